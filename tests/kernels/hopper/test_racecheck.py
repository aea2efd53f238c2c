"""racecheck of compute-sanitizer, over decode on Hopper: threads that use shared memory before others are ready."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.hopper import gpu

hopper = pytest.importorskip("quire.kernels.hopper.host")

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
# One block for a program, and several; partial states combined in one level and in two.
CELLS = ["gqa4 p16 2x1k", "8:1 p16 3x9k", "gqa4 d64 20 mixed 9k", "mla16 p64 2x4k", "mla128 p64 3x4k", "mla128 9x4k"]
PROGRAM = """
import sys, torch
from quire.bench.calls import prepared
from quire.bench.cells import Cell
for name in sys.argv[1:]:
    cell = Cell.parse("decode " + name)
    for invariant in (False,) if cell.latent else (False, True):
        batch = cell.make("cuda")
        plan, run = prepared(cell, batch, backend="hopper", batch_invariant=invariant)
        plan()
        assert run(batch.k, batch.v).isfinite().all()
        print("ran")
"""


@gpu
@pytest.mark.skipif(TOOL is None, reason="there is no compute-sanitizer")
def test_no_warp_group_reads_what_another_has_not_written():
    """Hazards are reported only where Triton starts and ends warp groups, as in kernels that do nothing else."""
    command = [TOOL, "--tool", "racecheck", "--print-limit", "1000", sys.executable, "-c", PROGRAM, *CELLS]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    assert text.count("ran") == 9, text
    assert "RACECHECK SUMMARY" in text
    found = set(re.findall(r"(?:Read|Write) access at .* in (\w+\.py):(\d+)", text))
    assert len(found) == len(set(re.findall(r"access at .*\+0x\w+ in (.*?)(?: \[|\n)", text))), text
    for file, line in found:
        sources = [path.read_text().splitlines() for path in Path(hopper.__file__).parent.rglob(file)]
        lines = [source[int(line) - 1] for source in sources if int(line) <= len(source)]
        assert any(re.match(r"def decode(_latent)?\(|    gl.warp_specialize\(", each) for each in lines), text
