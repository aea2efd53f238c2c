"""The plug-in against the interface of published versions of vLLM.

It needs no GPU, and of vLLM no more than its Python files: QUIRE_TEST_VLLM has folders of unpacked wheels, with what
they import, separated as those of PATH. Without it, the installed vLLM is compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT, TESTS
from helpers.vllm_modules import INSTALLED

GIVEN = [x for x in os.environ.get("QUIRE_TEST_VLLM", "").split(os.pathsep) if x]
FOLDERS = [x for x in GIVEN if (Path(x) / "vllm").is_dir()]
HERE = [""] if not GIVEN and INSTALLED else []


@pytest.mark.skipif(not (FOLDERS or HERE), reason="vLLM is not installed, and QUIRE_TEST_VLLM names no folder")
@pytest.mark.parametrize("folder", FOLDERS or HERE or [""])
def test_interface_of_vllm_is_that_of_the_plug_in(folder):
    others = [x for x in GIVEN if x not in FOLDERS]
    paths = [str(ROOT / "src"), *([folder, *others] if folder else []), *(x for x in sys.path if x)]
    done = subprocess.run(
        [sys.executable, str(TESTS / "helpers" / "vllm_interface.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    major, minor, *_ = done.stdout.split()[-1].split(".")
    assert (int(major), 26) <= (0, int(minor)) <= (0, 33)
