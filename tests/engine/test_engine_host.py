"""tools/engine_host.py, whose runner has to have what the engine reads of one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from helpers.paths import ROOT

pytest.importorskip("transformers")


@pytest.mark.parametrize("flags", [[], pytest.param(["--text", "--last"], marks=pytest.mark.slow)], ids=str)
def test_engine_host_of_few_steps_prints_the_time_of_each_part(flags):
    command = [sys.executable, "tools/engine_host.py", "--requests", "3", "--length", "20", "--steps", "4", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    title, times = done.stdout.splitlines()
    assert title == "3 requests of 20 tokens, medians of 4 steps in us:"
    assert re.fullmatch(r"  schedule \d+, launch \d+, read \d+, step \d+", times)
