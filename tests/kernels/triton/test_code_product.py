"""Kernels of products with quantized weights compile for every architecture without spilling registers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from helpers.triton_compile import compile_kernel
from quire.kernels.triton.code_groups import multiply_code_groups
from quire.kernels.triton.code_launch import group_config, product_config
from quire.kernels.triton.code_numbers import NumberConfig, RoundConfig, round_rows, write_numbers
from quire.kernels.triton.code_product import multiply_codes

CPU, OVERLAPPING = torch.device("cpu"), ("sm_90", "sm_100", "sm_120")
NATIVE_FP8 = ("sm_89", *OVERLAPPING)
# Of each kind, the rows and columns of a block, and whether there are zero points.
LAYOUTS = [("fp8", (1, 4096), False), ("fp8", (128, 128), False), ("int8", (1, 4096), True)]
LAYOUTS += [("int4", (1, 128), True), ("int4", (1, 32), False), ("mxfp4", (1, 32), False)]
# Each takes seconds to compile, so that some are left to `make test-all`.
CASES = [
    pytest.param(
        *layout,
        target,
        marks=[] if target == "sm_90" or (target in ("sm_80", "gfx942") and i in (1, 3)) else [pytest.mark.slow],
    )
    for i, layout in enumerate(LAYOUTS)
    for target in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
]
every_case = pytest.mark.parametrize(("kind", "block", "zero", "target"), CASES)


def tensors(kind, zero, target, pairs):
    """The types of a weight's tensors."""
    codes = {"fp8": "*fp8e4nv" if target in NATIVE_FP8 and not pairs else "*u8", "int8": "*i8"}.get(kind, "*i16")
    scale = {"fp8": "*fp32", "mxfp4": "*i32"}.get(kind, "*bf16")
    return {"codes": codes, "scale": scale, "zero": ("*i8" if kind == "int8" else "*u8") if zero else None}


@every_case
def test_product_of_few_rows_compiles_for_every_architecture(kind, block, zero, target):
    for rows, dtype in ((1, torch.bfloat16), (64, torch.float16 if kind == "int4" else torch.bfloat16)):
        c = product_config(kind, block, rows, 4096, 4096, dtype, CPU, 4096)
        pairs = target != "gfx942" and kind != "int8" and (dtype == torch.bfloat16 or kind == "int4")
        stages = 2 if target == "gfx942" else c.num_stages
        c = replace(c, splits=4, launch_pdl=target in OVERLAPPING, pairs=pairs, num_stages=stages)
        name = "*bf16" if dtype == torch.bfloat16 else "*fp16"
        given = tensors(kind, zero, target, pairs)
        given |= {"x": name, "bias": name, "partials": "*fp32", "arrivals": "*i32", "out": name, "c": c}
        usage = compile_kernel(multiply_codes, target, given, num_warps=c.num_warps)
        assert usage.shared <= usage.limit
        assert usage.spills <= 64, (rows, usage.spills)
        if target == "sm_90":
            ptx = usage.asm["ptx"]
            assert ("wgmma.mma_async" in ptx) == c.wgmma
            # Codes reach the tensor cores without a second way through shared memory.
            assert "0x10," in "".join(re.findall(r"cp\.async\.c[ag].*?, 0x\w+,", ptx))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_product_of_experts_compiles_for_every_architecture(target):
    for rows in (4, 1024):
        c = group_config("mxfp4", (1, 32), rows, 32, 2880, 2880, torch.bfloat16, CPU, 4096)
        stages = 2 if target == "gfx942" else c.num_stages
        c = replace(c, splits=2, launch_pdl=target in OVERLAPPING, pairs=target != "gfx942", num_stages=stages)
        given = tensors("mxfp4", False, target, True) | dict.fromkeys(("x", "out"), "*bf16")
        given |= {"order": "*i32", "ends": "*i32", "partials": "*fp32", "arrivals": "*i32", "c": c}
        usage = compile_kernel(multiply_code_groups, target, given, num_warps=c.num_warps)
        assert usage.shared <= usage.limit
        assert usage.spills == 0, (rows, usage.spills)


@every_case
def test_dequantization_compiles_for_every_architecture(kind, block, zero, target):
    c = NumberConfig(kind, 0 if block[1] == 4096 else block[1], block[0], 64, 4, False, True)
    given = {**tensors(kind, zero, target, False), "weight": "*bf16", "c": c}
    usage = compile_kernel(write_numbers, target, given, num_warps=c.num_warps)
    assert usage.spills == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_rounding_of_rows_to_fp8_compiles_for_every_architecture(target):
    for columns, group in ((4096, 0), (14336, 128)):
        c = RoundConfig(columns, group, target in OVERLAPPING)
        given = {"x": "*bf16", "out": "*fp8e4nv" if target in NATIVE_FP8 else "*u8", "scales": "*fp32", "c": c}
        usage = compile_kernel(round_rows, target, given, num_warps=c.num_warps)
        assert usage.spills == 0
