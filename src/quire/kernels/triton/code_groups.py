"""Products of rows and the quantized weights of their experts: `code_product` over rows that are sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton import language as tl

from quire.kernels.gpu.launch import wait_for_launch_before
from quire.kernels.triton.code_product import CodeConfig, sum_blocks, sum_splits
from quire.kernels.triton.grouped_gemm import find_rows


@dataclass(frozen=True)
class CodeGroupConfig(CodeConfig):
    """The constants that `multiply_code_groups` is compiled for; block_m sorted rows are all of one expert."""

    # The number of experts, rounded up to a power of two.
    padded_groups: int = 1


@triton.jit(do_not_specialize=["top_k", "num_experts"])
def multiply_code_groups(
    x, order, ends, codes, scale, zero, partials, arrivals, out, top_k, num_experts,
    out_features, in_features, x_row, codes_expert, scale_expert, scale_group, scale_row, c: tl.constexpr,
):  # fmt: skip
    wait_for_launch_before(c.launch_pdl)
    tile_n, split, tile_m = tl.program_id(0), tl.program_id(1) % c.splits, tl.program_id(1) // c.splits
    expert, first_row, end = find_rows(ends, num_experts, tile_m, c)
    if expert >= num_experts:
        return
    n, m = tile_n * c.block_n + tl.arange(0, c.block_n), first_row + tl.arange(0, c.block_m)
    # Rows beyond the last one are computed as that, and not written.
    source = tl.minimum(m, end - 1)
    if order is not None:
        source = tl.load(order + source) // top_k
    blocks = tl.cdiv(in_features, 128)
    share = tl.cdiv(blocks, c.splits)
    first, last = split * share, tl.minimum(split * share + share, blocks)
    codes += expert.to(tl.int64) * codes_expert
    scale += expert.to(tl.int64) * scale_expert
    if zero is not None:
        zero += expert.to(tl.int64) * scale_expert
    x_rows = x + source.to(tl.int64)[None, :] * x_row
    total = sum_blocks(
        x_rows, codes, scale, zero, n, first, last, out_features, in_features, scale_group, scale_row, c
    )  # fmt: skip
    is_last = True
    if c.splits > 1:
        tile = tile_m * tl.num_programs(0) + tile_n
        total, is_last = sum_splits(total, partials, arrivals, tile, split, c)
    if is_last:
        out_at = out + m.to(tl.int64)[None, :] * out_features + n[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), (m < end)[None, :] & (n < out_features)[:, None])
