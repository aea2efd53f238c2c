"""The product of one row and a matrix, whose rows are read once, at the rate of the memory.

The kernel is launched while the one before it still runs (programmatic dependent launch): its first loads of the matrix
are on their way when the row is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, wait_for_launch_before


@dataclass(frozen=True)
class GemvConfig:
    """The constants that the kernel is compiled for."""

    # A row has so many elements, of which `block` are loaded at a time.
    size: int
    block: int
    # A program multiplies so many rows of the matrix.
    rows: int
    num_warps: int
    # If true, the launch overlaps the one before.
    launch_pdl: bool


@lru_cache(maxsize=1024)
def gemv_config(size: int, device: torch.device) -> GemvConfig:
    """The constants for rows of `size` elements."""
    block = min(triton.next_power_of_2(size), 2048)
    return GemvConfig(size, block, 4096 // block, 4, has_dependent_launch(device))


@triton.jit
def load_block(weight, row, start, num_rows, weight_row, c: tl.constexpr):
    """Elements of some rows from `start` on, which are read once; 0 outside the matrix."""
    e = start + tl.arange(0, c.block)[None, :]
    inside = (row < num_rows)[:, None] & (e < c.size)
    return tl.load(weight + row.to(tl.int64)[:, None] * weight_row + e, inside, 0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(x, weight, bias, out, num_rows, weight_row, c: tl.constexpr):
    row = tl.program_id(0) * c.rows + tl.arange(0, c.rows)
    w = load_block(weight, row, 0, num_rows, weight_row, c)
    wait_for_launch_before(c.launch_pdl)
    total = tl.full((c.rows, c.block), 0.0, tl.float32)
    for start in range(0, c.size, c.block):
        following = load_block(weight, row, start + c.block, num_rows, weight_row, c)
        e = start + tl.arange(0, c.block)
        total += w.to(tl.float32) * tl.load(x + e, e < c.size, 0.0).to(tl.float32)[None, :]
        w = following
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + row, row < num_rows, 0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), row < num_rows)


_launch = SmallLauncher(multiply_rows)


def gemv(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """`quire.kernels.gemv.gemv` on a GPU."""
    num_rows, size = weight.shape
    c = gemv_config(size, x.device)
    _launch((triton.cdiv(num_rows, c.rows), 1), (x, weight, bias, out), (num_rows,), (weight.stride(0),), c)
