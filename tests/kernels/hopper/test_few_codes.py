"""The kernels for few rows and quantized weights, compiled for Hopper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from helpers.triton_compile import compile_kernel
from quire.kernels.hopper.few_codes import multiply_few_code_groups, multiply_few_codes
from quire.kernels.hopper.few_codes_launch import few_codes_config

# Of each layout, the kind, the rows and columns of a block, and the types of codes, scales and zero points.
LAYOUTS = {
    "fp8 rows": ("fp8", (1, 4096), "*u8", "*fp32", None),
    "fp8 blocks": ("fp8", (128, 128), "*u8", "*fp32", None),
    "int4": ("int4", (1, 128), "*i16", "*bf16", "*u8"),
    "int4 rows": ("int4", (1, 4096), "*i16", "*fp32", None),
    "mxfp4": ("mxfp4", (1, 32), "*i16", "*i32", None),
    "dense": ("dense", (1, 4096), "*bf16", None, None),
}


def make_config(kind, block, out_features, in_features, **changes):
    c = few_codes_config(kind, block, out_features, in_features, 1, 32, torch.device("cpu"))
    return replace(c, launch_pdl=True, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(4096, 4096), (28672, 4096), (1000, 2880)])
def test_multiply_few_codes_keeps_codes_in_registers(layout, sizes):
    kind, block, codes, scale, zero = LAYOUTS[layout]
    c = make_config(kind, block, *sizes)
    given = {"x": "*bf16", "codes": codes, "scale": scale, "zero": zero, "bias": "*bf16", "out": "*bf16", "c": c}
    usage = compile_kernel(multiply_few_codes, "sm_90", given, num_warps=c.num_warps)
    assert usage.spills == 0
    # Shared memory has the sums of warps alone, after all products.
    ptx = usage.asm["ptx"]
    assert "st.shared" not in ptx[: ptx.rindex("mma.sync")]
    assert "cp.async" not in ptx
    first = ptx[: ptx.index("griddepcontrol.wait")]
    assert "ld.global.L1::evict_first.L2::cache_hint.v4" in first, "the first codes do not wait for the launch before"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dense"])
def test_multiply_few_code_groups_compiles_without_spills(layout):
    kind, block, codes, scale, zero = LAYOUTS[layout]
    c = make_config(kind, block, 5760, 2880)
    given = {"x": "*bf16", "order": "*i32", "ends": "*i32", "codes": codes, "scale": scale, "zero": zero}
    given |= {"out": "*bf16", "c": c}
    assert compile_kernel(multiply_few_code_groups, "sm_90", given, num_warps=c.num_warps).spills == 0
