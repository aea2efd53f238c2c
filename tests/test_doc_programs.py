"""The Python programs in README and the documents run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from helpers.paths import ROOT

# Code between ```python and ``` is that of a whole program.
PROGRAMS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_python_block_of_a_document_runs(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{program}\n{done.stderr}"


def test_readme_and_guide_have_programs():
    pages = [parameter.id.rpartition("-")[0] for parameter in PROGRAMS]
    assert pages.count("README") >= 2
    assert pages.count("guide") >= 3
