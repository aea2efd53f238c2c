"""Launches of `few_codes.py`."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, num_sms
from quire.kernels.hopper.few_codes import FewCodesConfig, multiply_few_code_groups, multiply_few_codes

_launch, _launch_groups = SmallLauncher(multiply_few_codes), SmallLauncher(multiply_few_code_groups)


@lru_cache(maxsize=4096)
def few_codes_config(
    kind: str,
    block: tuple[int, int],
    out_features: int,
    in_features: int,
    tiles_m: int,
    num_experts: int,
    device: torch.device,
) -> FewCodesConfig:
    """The constants for `tiles_m` tiles of 8 rows. Arguments are those of `code_launch.product_config`."""
    sms, blocks = num_sms(device), triton.cdiv(in_features, 128)
    tiles = triton.cdiv(out_features, 16) * tiles_m
    # Many tiles fill a GPU with programs of four warps. Larger tiles save int4 the sums of x.
    parts, block_n = 4, 32 if kind == "int4" and block[1] < in_features else 16
    if tiles < 8 * sms and kind != "dense":
        parts, block_n = 16 if blocks >= 64 and tiles <= 2 * sms else 8, 16
    # Warps with few blocks load them all at once, as far as the registers of all programs allow it.
    even, steps = in_features % (128 * parts) == 0, blocks // parts
    unroll = min(steps, 4 if tiles <= 2 * sms else 2 if tiles <= 3 * sms else 1)
    if not even or steps > 4 or steps % unroll:
        unroll = 1
    # Programs of four warps that load two blocks at a time are faster than these for numbers of 16 bits.
    if kind == "dense":
        unroll = 2 if even and steps % 2 == 0 else 1
    return FewCodesConfig(
        kind=kind,
        group=0 if block[1] >= in_features else block[1],
        scale_rows=block[0],
        block_n=block_n,
        whole=out_features % block_n == 0,
        parts=parts,
        unroll=unroll,
        even=even,
        launch_pdl=has_dependent_launch(device),
        padded_groups=triton.next_power_of_2(num_experts),
    )


def multiply(
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    kind: str,
    block: tuple[int, int],
) -> None:
    """`quire.kernels.code_product.code_product` of up to 8 rows into out."""
    num_rows, out_features = out.shape
    c = few_codes_config(kind, block, out_features, x.shape[1], 1, 1, x.device)
    sizes = (out_features, x.shape[1], x.stride(0), scale.stride(1), scale.stride(0))
    _launch((triton.cdiv(out_features, c.block_n), 1), (x, codes, scale, zero, bias, out), (num_rows,), sizes, c)


def multiply_dense(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """`quire.kernels.skinny_gemm.skinny_gemm` of up to 8 rows [rows, in_features] into out."""
    out_features, in_features = weight.shape
    c = few_codes_config("dense", (1, in_features), out_features, in_features, 1, 1, x.device)
    sizes = (out_features, in_features, x.stride(0), 0, 0)
    tensors = (x, weight, None, None, bias, out)
    _launch((triton.cdiv(out_features, c.block_n), 1), tensors, (len(x),), sizes, c)


def multiply_groups(
    out: Tensor,
    x: Tensor,
    order: Tensor | None,
    ends: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    block: tuple[int, int],
) -> None:
    """`quire.kernels.code_product.grouped_code_product` into out, where most experts have up to 8 rows."""
    (num_rows, out_features), (num_tokens, in_features), num_experts = out.shape, x.shape, len(ends)
    tiles_m = min(num_rows, min(num_experts, num_rows) + num_rows // 8)
    c = few_codes_config(kind, block, out_features, in_features, min(num_rows, num_experts), num_experts, x.device)
    strides = (codes.stride(0), scale.stride(0), scale.stride(2), scale.stride(1))
    sizes = (out_features, in_features, x.stride(0), *strides)
    tensors = (x, order, ends, codes, scale, zero, out)
    grid = (triton.cdiv(out_features, c.block_n), tiles_m)
    _launch_groups(grid, tensors, (num_rows // num_tokens, num_experts), sizes, c)
