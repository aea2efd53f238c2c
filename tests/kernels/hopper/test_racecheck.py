"""compute-sanitizer over decode and prefill on Hopper: threads that use shared memory before others are ready
(racecheck), and accesses outside of tensors (memcheck).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.hopper import gpu

hopper = pytest.importorskip("quire.kernels.hopper.host")

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
needs_tool = pytest.mark.skipif(TOOL is None, reason="there is no compute-sanitizer")
# One block for a program, and several; partial states combined in one level and in two; all ways of loading keys.
CELLS = [
    "decode gqa4 p16 2x1k", "decode 8:1 p16 3x9k", "decode gqa4 d64 20 mixed 9k", "decode mla16 p64 2x4k",
    "decode mla128 p64 3x4k", "decode mla128 9x4k", "prefill ragged 2x700", "prefill p16 2x500", "prefill p1 2x300",
    "prefill p16 fp8 2x300", "prefill p16 3x40@2k", "prefill p16 d64 2x500", "prefill p1 d256 2x200",
    "prefill mla16 p16 2x300",
]  # fmt: skip
EXPECTED = (  # lines of source
    r"def (decode|prefill)(_latent)?\(|    (    )?gl.warp_specialize\(|    if c.pipeline.consumers == 2:|"
    r"                (x = v.load|v.store)\("
)
PROGRAM = """
import sys, torch
import quire
from quire.bench.calls import prepared
from quire.bench.cells import Cell
for name in sys.argv[1:]:
    cell = Cell.parse(name)
    for invariant in (False,) if cell.latent else (False, True):
        batch = cell.make("cuda")
        plan, run = prepared(cell, batch, backend="hopper", batch_invariant=invariant)
        plan()
        k, v = batch.rows()[:2] if cell.ragged else (batch.k, batch.v)
        assert run(k, v).isfinite().all()
        print("ran")
q = torch.randn(300, 8, 128, dtype=torch.bfloat16, device="cuda")
k, v = torch.randn(2, 704, 2, 128, dtype=torch.bfloat16, device="cuda")
mask = torch.rand(300, 704, device="cuda") < 0.5
mask[:, 128:400], mask[:, 512:640] = False, True  # blocks that are left out, and one that needs no mask
assert quire.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, backend="hopper").isfinite().all()
print("ran")
"""


def sanitized(*options: str, cells: list[str], **env: str) -> str:
    """What compute-sanitizer says of these cells, batch-invariant and not, and of a custom mask."""
    command = [TOOL, *options, sys.executable, "-c", PROGRAM, *cells]
    text = subprocess.run(command, capture_output=True, text=True, env=os.environ | env).stdout
    runs = 1 + sum(1 if "mla" in cell else 2 for cell in cells)
    assert len(re.findall("^ran$", text, re.MULTILINE)) == runs, text
    return text


@gpu
@needs_tool
def test_racecheck_of_kernels_finds_the_known_hazards_alone():
    """Hazards are reported only where Triton starts and ends warp groups, as in kernels that do nothing else, and where
    all consumers of prefill clear unused values: each writes what the others do.
    """
    text = sanitized("--tool", "racecheck", "--print-limit", "1000", cells=CELLS)
    assert "RACECHECK SUMMARY" in text
    found = set(re.findall(r"(?:Read|Write) access at .* in (\w+\.py):(\d+)", text))
    assert len(found) == len(set(re.findall(r"access at .*\+0x\w+ in (.*?)(?: \[|\n)", text))), text
    for file, line in found:
        sources = [path.read_text().splitlines() for path in Path(hopper.__file__).parent.rglob(file)]
        lines = [source[int(line) - 1] for source in sources if int(line) <= len(source)]
        assert any(re.match(EXPECTED, each) for each in lines), text


@gpu
@needs_tool
def test_memcheck_of_kernels_finds_no_errors():
    """Each tensor is an allocation of its own, so that an access past its end is seen."""
    cells = [CELLS[0], CELLS[2], *CELLS[6:]]
    options = ("--tool", "memcheck", "--report-api-errors", "no")
    assert "ERROR SUMMARY: 0 errors" in sanitized(*options, cells=cells, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
