"""The products of adapters on a GPU, in two launches: h = x A^T (shrink) and y += h B (expand).

A launch reads the tables, B and y while the launch before it still runs. So a kernel that writes tables does not let
the next launch overlap it.

Programs of the first one share the columns of x, so that few rows, too, are spread over a GPU. Each writes its partial
sums of h, in float32, and the second launch adds them up in their order: nothing is added atomically, and shapes alone
decide on the order of a row's sums. Rows are those of `find_rows`: a block has rows of one adapter. How many blocks
there are is known on the device alone, so programs take one block after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, num_sms, wait_for_launch_before
from quire.kernels.triton.grouped_gemm import count_blocks, find_rows, sort_by_group

# Rows of rank in a page.
RANK_PAGE = 16
# With more rows than this, blocks are large.
_MANY = 512
# With at most _FEW rows, blocks of `expand` have _FEW_ROWS, as most adapters have few of the rows.
_FEW = 128
_FEW_ROWS = 2
# Pairs (most rows of x, programs that share the columns of x). From _LONG columns on, twice as many programs do.
_SPLITS = ((16, 16), (_MANY, 8), (2048, 4), (math.inf, 2))
_LONG = 8192
# The most programs of a launch of `shrink` per multiprocessor, unless there are more tiles of columns. `expand`, whose
# programs are smaller, has twice as many.
_PROGRAMS = 8


@dataclass(frozen=True)
class ShrinkConfig:
    """The constants that `shrink` is compiled for."""

    # The number of merged layers.
    parts: int
    # The most pages of an adapter.
    max_pages: int
    # The number of slots, rounded up to a power of two.
    padded_groups: int
    # A program multiplies block_m rows of x, all of one adapter, by block_r rows of the adapter's A at a time.
    block_m: int
    block_r: int
    # The number of elements of these rows that are loaded at a time.
    block_k: int
    # The number of programs that share the columns. Each of them has at most split_size columns.
    splits: int
    split_size: int
    num_stages: int
    num_warps: int
    # If true, the launch overlaps the one before.
    launch_pdl: bool


@dataclass(frozen=True)
class ExpandConfig:
    """The constants that `expand` is compiled for."""

    # The ends of the merged layers' columns.
    part_ends: tuple[int, ...]
    max_pages: int
    padded_groups: int
    # A program adds to block_m rows and block_n columns of y, which are of one layer, by block_r rows of B at a time.
    block_m: int
    block_n: int
    block_r: int
    # The number of partial sums of h, as in ShrinkConfig.
    splits: int
    # Tensor cores take at least 16 rows, and registers for these. Fewer rows are multiplied without tensor cores.
    tensor_cores: bool
    # Whether inputs have 16 bits. Tensor cores multiply only the upper bits of float32 numbers (TF32), which hold all
    # bits of such inputs.
    halves: bool
    num_warps: int
    launch_pdl: bool

    @property
    def part_tiles(self) -> tuple[int, ...]:
        """The tiles of columns up to the end of each layer."""
        total, ends = 0, []
        for start, end in pairwise((0, *self.part_ends)):
            total += triton.cdiv(end - start, self.block_n)
            ends.append(total)
        return tuple(ends)


@triton.jit(do_not_specialize=["num_slots"])
def shrink(x, a, order, ends, rank_pages, num_rank_pages, h, num_slots, in_features, x_row, a_page, c: tl.constexpr):
    """Write h [rows, splits, max_pages, parts, RANK_PAGE], whose rows are sorted as in `order`."""
    split = tl.program_id(0) % c.splits
    first_k = split * c.split_size
    last_k = tl.minimum(first_k + c.split_size, in_features)
    k = first_k + tl.arange(0, c.block_k)
    for block in range(tl.program_id(1), count_blocks(ends, num_slots, c), tl.num_programs(1)):
        slot, first, end = find_rows(ends, num_slots, block, c)
        m, ranks = first + tl.arange(0, c.block_m), tl.load(num_rank_pages + slot) * (c.parts * 16)
        row = tl.load(order + m, m < end, 0)
        h_rows = h + (m.to(tl.int64) * c.splits + split)[None, :] * (c.max_pages * c.parts * 16)
        pages = rank_pages + slot * c.max_pages
        wait_for_launch_before(c.launch_pdl)
        for first_r in range(
            tl.program_id(0) // c.splits * c.block_r, ranks, tl.num_programs(0) // c.splits * c.block_r
        ):
            r = first_r + tl.arange(0, c.block_r)
            page = tl.load(pages + r // (c.parts * 16), r < ranks, 0)
            a_at = a + page.to(tl.int64)[:, None] * a_page + ((r % (c.parts * 16)) * in_features)[:, None] + k[None, :]
            x_at = x + row.to(tl.int64)[None, :] * x_row + k[:, None]
            total = tl.full((c.block_r, c.block_m), 0.0, tl.float32)
            for start in tl.range(0, last_k - first_k, c.block_k, num_stages=c.num_stages):
                own_a = tl.load(a_at, (r < ranks)[:, None] & (k < last_k - start)[None, :], 0.0)
                own_x = tl.load(x_at, (m < end)[None, :] & (k < last_k - start)[:, None], 0.0)
                total = tl.dot(own_a, own_x, total, input_precision="ieee")
                a_at += c.block_k
                x_at += c.block_k
            tl.store(h_rows + r[:, None], total, (r < ranks)[:, None] & (m < end)[None, :])
    # Programs without a block must wait, too: the next launch waits for this launch alone, not for the one before.
    wait_for_launch_before(c.launch_pdl)


@triton.jit
def find_columns(tile, c: tl.constexpr):
    """The layer of a tile of columns, the tile's first column, and the end of the layer's columns."""
    part, column, end = 0, tile * c.block_n, c.part_ends[0]
    for j in tl.static_range(1, len(c.part_ends)):
        beyond = tile >= c.part_tiles[j - 1]
        part = tl.where(beyond, j, part)
        column = tl.where(beyond, (tile - c.part_tiles[j - 1]) * c.block_n + c.part_ends[j - 1], column)
        end = tl.where(beyond, c.part_ends[j], end)
    return part, column, end


@triton.jit
def load_b(b, pages, first_r, ranks, n, end_n, b_page, out_features, c: tl.constexpr):
    """Some rows of an adapter's B, 0 beyond its rank."""
    r = first_r + tl.arange(0, c.block_r)
    page = tl.load(pages + r // 16, r < ranks, 0)
    at = b + page.to(tl.int64)[:, None] * b_page + (r % 16)[:, None] * out_features + n[None, :]
    return tl.load(at, (r < ranks)[:, None] & (n < end_n)[None, :], 0.0)


@triton.jit
def load_h(h, m, end_m, first_r, ranks, part, c: tl.constexpr):
    """The sums of h for some rows of x and of B, [block_m, block_r]."""
    r, size = first_r + tl.arange(0, c.block_r), c.max_pages * len(c.part_ends) * 16
    at = h + m.to(tl.int64)[:, None] * (c.splits * size) + ((r // 16 * len(c.part_ends) + part) * 16 + r % 16)[None, :]
    inside = (m < end_m)[:, None] & (r < ranks)[None, :]
    total = tl.full((c.block_m, c.block_r), 0.0, tl.float32)
    splits: tl.constexpr = c.splits
    for split in tl.static_range(splits):
        total += tl.load(at + split * size, inside, 0.0)
    return total


@triton.jit
def multiply_h(h, b, total, c: tl.constexpr):
    """The total and the product of h and B, with all bits of h."""
    if not c.tensor_cores:
        m = tl.arange(0, c.block_m)[:, None]
        # An unrolled loop takes more registers than there are.
        for i in tl.range(0, c.block_m, loop_unroll_factor=1):
            own_h = tl.sum(tl.where(m == i, h, 0.0), 0)
            product = tl.sum(own_h[:, None] * b.to(tl.float32), 0)
            total = tl.where(m == i, total + product[None, :], total)
        return total
    if c.halves:
        upper = (h.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b = b.to(tl.float32)
        total = tl.dot(upper, b, total, input_precision="tf32")
        return tl.dot(h - upper, b, total, input_precision="tf32")
    return tl.dot(h, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_slots"])
def expand(h, b, order, ends, rank_pages, num_rank_pages, y, num_slots, out_features, y_row, b_page, c: tl.constexpr):
    """Add the products of h and B to y."""
    part, first_n, end_n = find_columns(tl.program_id(0), c)
    n = first_n + tl.arange(0, c.block_n)
    for block in range(tl.program_id(1), count_blocks(ends, num_slots, c), tl.num_programs(1)):
        slot, first, end = find_rows(ends, num_slots, block, c)
        m, ranks = first + tl.arange(0, c.block_m), tl.load(num_rank_pages + slot) * 16
        row = tl.load(order + m, m < end, 0)
        pages = rank_pages + slot * c.max_pages
        own_b = load_b(b, pages, 0, ranks, n, end_n, b_page, out_features, c)
        at = y + row.to(tl.int64)[:, None] * y_row + n[None, :]
        inside = (m < end)[:, None] & (n < end_n)[None, :] & (ranks > 0)
        before = tl.load(at, inside, 0.0)
        wait_for_launch_before(c.launch_pdl)
        total = tl.full((c.block_m, c.block_n), 0.0, tl.float32)
        for first_r in tl.range(0, ranks, c.block_r, num_stages=1):
            own_h = load_h(h, m, end, first_r, ranks, part, c)
            total = multiply_h(own_h, own_b, total, c)
            own_b = load_b(b, pages, first_r + c.block_r, ranks, n, end_n, b_page, out_features, c)
        tl.store(at, (before.to(tl.float32) + total).to(y.dtype.element_ty), inside)
    wait_for_launch_before(c.launch_pdl)


@lru_cache(maxsize=4096)
def lora_configs(
    num_rows: int,
    num_slots: int,
    max_pages: int,
    in_features: int,
    part_ends: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[ShrinkConfig, ExpandConfig]:
    """The constants for `num_rows` rows, `num_slots` slots, and at most `max_pages` pages of an adapter."""
    # Kernels keep more registers for float32 numbers, so that their blocks are smaller.
    halves = dtype != torch.float32
    block_m = 64 if halves and num_rows > _MANY else 16
    block_k, max_ranks = 256 // dtype.itemsize, max_pages * len(part_ends) * RANK_PAGE
    # If all rows are of one adapter, they fill few blocks, and splits give more programs. There are only a few possible
    # numbers of splits, since kernels are compiled for each of them.
    wanted = next(splits for rows, splits in _SPLITS if num_rows <= rows) * (2 if in_features >= _LONG else 1)
    splits = _power_of_two(min(wanted, max(in_features // 256, 1)))
    split_size = triton.cdiv(triton.cdiv(in_features, splits), block_k) * block_k
    splits = triton.cdiv(in_features, split_size)
    common = {"max_pages": max_pages, "padded_groups": triton.next_power_of_2(num_slots)}
    common |= {"splits": splits, "launch_pdl": has_dependent_launch(device)}
    block_r = min(triton.next_power_of_2(max_ranks), 64 if halves else 32)
    shrink_config = ShrinkConfig(
        parts=len(part_ends),
        block_m=block_m,
        block_r=block_r,
        block_k=block_k,
        split_size=split_size,
        num_stages=2 if torch.version.hip else 3,
        num_warps=8 if block_r == 64 else 4,
        **common,
    )
    few = num_rows <= _FEW
    # Without tensor cores, a thread has all rows of a page of B in some columns, of 16 bytes.
    block_n = 512 // dtype.itemsize if few else 128 if halves and block_m == 16 else 64
    expand_config = ExpandConfig(
        part_ends=part_ends,
        block_m=_FEW_ROWS if few else block_m,
        block_n=block_n,
        block_r=RANK_PAGE * (1 if few else min(triton.next_power_of_2(max_pages), 2)),
        tensor_cores=not few,
        halves=halves,
        num_warps=1 if few else 4,
        **common,
    )
    return shrink_config, expand_config


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << number.bit_length() - 1


def max_blocks(num_rows: int, num_slots: int, block_m: int) -> int:
    """The number of blocks of rows, at most."""
    return min(num_rows, min(num_slots, num_rows) + num_rows // block_m)


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    part_ends: tuple[int, ...],
    order: Tensor,
    ends: Tensor,
    rank_pages: Tensor,
    num_rank_pages: Tensor,
) -> None:
    """`quire.kernels.lora.add_lora` of rows [rows, features] on a GPU."""
    (num_rows, in_features), (num_slots, max_pages) = x.shape, rank_pages.shape
    c, expand_c = lora_configs(num_rows, num_slots, max_pages, in_features, part_ends, x.dtype, x.device)
    ranks, blocks = max_pages * c.parts * RANK_PAGE, max_blocks(num_rows, num_slots, c.block_m)
    h = torch.empty(c.splits * num_rows * ranks, dtype=torch.float32, device=x.device)
    most = _PROGRAMS * num_sms(x.device)
    tables = order, ends, rank_pages, num_rank_pages
    # Where there are few blocks, programs also divide the rows of A among them.
    across = c.splits * min(triton.cdiv(ranks, c.block_r), max(most // 4 // (blocks * c.splits), 1))
    grid = across, min(blocks, max(most // across, 1))
    _shrink(grid, (x, a, *tables, h), (num_slots,), (in_features, x.stride(0), a.stride(0)), c)
    across, blocks = expand_c.part_tiles[-1], max_blocks(num_rows, num_slots, expand_c.block_m)
    grid = across, min(blocks, max(2 * most // across, 1))
    _expand(grid, (h, b, *tables, y), (num_slots,), (y.shape[1], y.stride(0), b.stride(0)), expand_c)


_shrink, _expand = SmallLauncher(shrink), SmallLauncher(expand)


def group_by_slot(slots: Tensor, order: Tensor, ends: Tensor) -> None:
    """`quire.kernels.lora.group_by_slot` on a GPU."""
    sort_by_group(slots, order, None, ends)
