"""Triton's kernels without a GPU: interpreted on small batches, and compiled for every architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quire.attention import AttentionSpec

CHOSEN = "float32-float32 and (plain or window or alibi or mask or sinks) or ragged or strided or per_head or growing"


def interpret(file: str, chosen: str) -> None:
    """Run the chosen tests of a file with Triton's kernels interpreted."""
    path = str(Path(__file__).parent / file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path, "-k", chosen]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


def test_interpreted_kernels_are_the_oracle():
    interpret("test_kernels.py", CHOSEN)


def test_interpreted_heads_turn_as_defined():
    interpret("test_rope.py", "float32-indptr or cached or far or copied")


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_kernels_compile_for_every_architecture(target):
    from triton_compile import compile_attend

    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, q_dtype=torch.bfloat16)
    for layer, rows in ((spec, 4), (spec, 4000), (spec.but(kv_dtype=torch.float8_e4m3fn), 4)):
        usage = compile_attend(layer, target, rows, split=rows < 100)
        assert usage.shared <= usage.limit
        assert usage.spills <= 128, usage.spills


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_turning_compiles_for_every_architecture(target):
    from quire.kernels.triton.rope import rotate_heads, shape
    from triton_compile import compile_kernel

    heads = dict.fromkeys(("q", "k", "q_out", "k_out"), "*bf16")
    computed = {**heads, "positions": "*i32", "indptr": "*i32", "turns": "*i64", "cache": None}
    cached = {**heads, "positions": "*i64", "indptr": None, "turns": None, "cache": "*fp32"}
    for given, head_dim, rotary_dim in ((computed, 128, 128), (cached, 160, 96)):
        for interleave in (False, True):
            c = shape(head_dim, rotary_dim, 32, interleave, in_place=head_dim == rotary_dim)
            usage = compile_kernel(rotate_heads, target, {**given, "c": c}, num_warps=c.num_warps)
            assert usage.shared <= usage.limit
            assert usage.spills == 0, usage.spills
