"""Products of rows and the matrices of their experts: a grouped matrix product over rows that are sorted by expert.

A decode step has few rows for each expert, so the weights' bytes take the time: each program reads a tile of one
expert's weight once, for all of its rows. The weight's tile is the left operand of the tensor cores, whose instructions
take 64 rows there, and the rows of x are the right one, which may be as few as 16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, wait_for_launch_before


@dataclass(frozen=True)
class GroupConfig:
    """The constants that `group_rows` is compiled for."""

    # The number of elements of `groups` that are loaded at a time.
    block: int
    num_warps: int
    # If true, the launch overlaps the one before.
    launch_pdl: bool


@dataclass(frozen=True)
class GemmConfig:
    """The constants that `multiply_groups` is compiled for."""

    # This is the number of experts, rounded up to a power of two.
    padded_groups: int
    # A program multiplies block_m sorted rows, all of one expert, by block_n rows of the expert's weight.
    block_m: int
    block_n: int
    # The number of elements of these rows that are loaded at a time.
    block_k: int
    num_stages: int
    num_warps: int
    launch_pdl: bool


@triton.jit(do_not_specialize=["num_rows"])
def group_rows(groups, order, position, ends, num_rows, c: tl.constexpr):
    """One program for each group, which finds the group's rows, and how many rows the groups before it have. Rows of
    negative groups have no place.
    """
    wait_for_launch_before(c.launch_pdl)
    group = tl.program_id(0)
    start, end = 0, 0
    for first in range(0, num_rows, c.block):
        row = first + tl.arange(0, c.block)
        g = tl.load(groups + row, row < num_rows, -1)
        start += tl.sum(((g >= 0) & (g < group)).to(tl.int32), 0)
        end += tl.sum(((g >= 0) & (g <= group)).to(tl.int32), 0)
    tl.store(ends + group, end)
    if start == end:
        return
    for first in range(0, num_rows, c.block):
        row = first + tl.arange(0, c.block)
        mine = tl.load(groups + row, row < num_rows, -1) == group
        place = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, row, mine)
        if position is not None:
            tl.store(position + row, place, mine)
        start += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def load_groups(ends, num_groups, c: tl.constexpr):
    """The start and the end of each group's rows, such as an expert's."""
    g = tl.arange(0, c.padded_groups)
    end = tl.load(ends + g, g < num_groups, 0)
    return tl.load(ends + g - 1, (g > 0) & (g < num_groups), 0), end


@triton.jit
def count_blocks(ends, num_groups, c: tl.constexpr):
    """How many blocks the rows of all groups have."""
    start, end = load_groups(ends, num_groups, c)
    return tl.sum(tl.cdiv(end - start, c.block_m), 0)


@triton.jit
def find_rows(ends, num_groups, block, c: tl.constexpr):
    """The group of a block of rows, which is beyond num_groups if there is no such block; the block's first row, and
    the end of the group's rows. A group's blocks begin at its first row.
    """
    start, end = load_groups(ends, num_groups, c)
    blocks = tl.cdiv(end - start, c.block_m)
    # The number of blocks up to the end of each group.
    following = tl.cumsum(blocks, 0)
    group = tl.sum((following <= block).to(tl.int32), 0)
    mine = tl.arange(0, c.padded_groups) == group
    first = tl.sum(tl.where(mine, start + (block - following + blocks) * c.block_m, 0), 0)
    return group, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit(do_not_specialize=["top_k", "num_experts", "num_weights"])
def multiply_groups(
    x, order, ends, weight, weight_indices, out, top_k, num_experts, num_weights,
    out_features, in_features, x_row, out_row, weight_expert, weight_row, weight_column, c: tl.constexpr,
):  # fmt: skip
    wait_for_launch_before(c.launch_pdl)
    expert, first, end = find_rows(ends, num_experts, tl.program_id(1), c)
    if expert >= num_experts:
        return
    m = first + tl.arange(0, c.block_m)
    source = m
    if order is not None:
        source = tl.load(order + m, m < end, 0) // top_k
    n, k = tl.program_id(0) * c.block_n + tl.arange(0, c.block_n), tl.arange(0, c.block_k)
    matrix = expert.to(tl.int64)
    if weight_indices is not None:
        # The index is clamped, so that a weight is read whatever the table holds.
        matrix = tl.minimum(tl.maximum(tl.load(weight_indices + expert).to(tl.int64), 0), num_weights - 1)
    w_at = weight + matrix * weight_expert
    w_at += n.to(tl.int64)[:, None] * weight_row + k.to(tl.int64)[None, :] * weight_column
    x_at = x + source.to(tl.int64)[None, :] * x_row + k[:, None]
    total = tl.full((c.block_n, c.block_m), 0.0, tl.float32)
    for start in tl.range(0, in_features, c.block_k, num_stages=c.num_stages):
        w = tl.load(w_at, (n < out_features)[:, None] & (k < in_features - start)[None, :], 0.0)
        rows = tl.load(x_at, (m < end)[None, :] & (k < in_features - start)[:, None], 0.0)
        total = tl.dot(w, rows, total, input_precision="ieee")
        w_at += c.block_k * weight_column
        x_at += c.block_k
    out_at = out + m.to(tl.int64)[None, :] * out_row + n[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), (m < end)[None, :] & (n < out_features)[:, None])


@lru_cache(maxsize=1024)
def group_config(num_rows: int, device: torch.device) -> GroupConfig:
    """The constants for `num_rows` rows, 8 for each thread."""
    block = min(max(triton.next_power_of_2(num_rows), 256), 4096)
    return GroupConfig(block, block // 256, has_dependent_launch(device))


_group, _multiply = SmallLauncher(group_rows), SmallLauncher(multiply_groups)


def sort_by_group(groups: Tensor, order: Tensor, position: Tensor | None, ends: Tensor) -> None:
    """`quire.kernels.grouped_gemm.group_by_expert`, and `quire.kernels.lora.group_by_slot`, on a GPU."""
    c = group_config(len(groups), groups.device)
    if position is None:
        # The products of adapters read these tables without waiting for the launch that is before them.
        c = replace(c, launch_pdl=False)
    _group((len(ends), 1), (groups, order, position, ends), (len(groups),), (), c)


@lru_cache(maxsize=1024)
def gemm_config(num_rows: int, num_experts: int, dtype: torch.dtype, device: torch.device) -> GemmConfig:
    """The constants for `num_rows` rows. Blocks have up to twice the mean rows of an expert: most experts need one."""
    mean = triton.cdiv(num_rows, num_experts)
    block_m = min(max(triton.next_power_of_2(2 * mean), 16), 128 // dtype.itemsize)
    block_n, block_k = (128, 64) if block_m == 64 else (64, 256 // dtype.itemsize)
    # A stage has at most 24 KiB.
    num_stages = 2 if torch.version.hip else 4
    return GemmConfig(
        triton.next_power_of_2(num_experts), block_m, block_n, block_k, num_stages, 4, has_dependent_launch(device)
    )


def grouped_gemm(
    out: Tensor,
    x: Tensor,
    order: Tensor | None,
    ends: Tensor,
    weight: Tensor,
    top_k: int,
    weight_indices: Tensor | None = None,
) -> None:
    """`quire.kernels.grouped_gemm.grouped_gemm` on a GPU, and `segment_gemm`, whose segments are the experts here."""
    num_rows, num_experts, (num_weights, out_features, in_features) = len(out), len(ends), weight.shape
    c = gemm_config(num_rows, num_experts, weight.dtype, x.device)
    blocks = min(num_rows, min(num_experts, num_rows) + num_rows // c.block_m)
    sizes = (out_features, in_features, x.stride(0), out.stride(0), *weight.stride())
    grid = (triton.cdiv(out_features, c.block_n), blocks)
    tensors = (x, order, ends, weight, weight_indices, out)
    _multiply(grid, tensors, (top_k, num_experts, num_weights), sizes, c)
