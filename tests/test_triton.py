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


def test_interpreted_kernels_are_the_oracle():
    file = Path(__file__).parent / "test_kernels.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k", CHOSEN]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("file", ["test_quantization.py"])
def test_interpreted_operations_are_their_definitions(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / file)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


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
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_packing_compiles_for_every_architecture(target, segmented):
    from quire.kernels.triton.pack import BLOCK, pack_bytes
    from triton_compile import compile_kernel

    constants = {"big": True, "block": BLOCK} | ({} if segmented else {"indptr": None, "bytes_at": None})
    types = {"x": "*u8", "bits": "*u8", "indptr": "*i64", "bytes_at": "*i64"}
    names = pack_bytes.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    assert compile_kernel(pack_bytes, target, signature, constants).spills == 0
