"""The product of one or a few rows and a matrix, whose rows are read once, at the rate of the memory.

The kernels are launched while the one before them still runs (programmatic dependent launch): their first loads of the
matrix are on their way when the rows are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, has_hopper_kernels, wait_for_launch_before

# The most rows for which the kernel of Hopper GPUs is used. It takes 8, but steps of 8 requests are slower with it.
_HOPPER_ROWS = 4


@dataclass(frozen=True)
class GemvConfig:
    """The constants that `multiply_row` is compiled for."""

    # A row has `size` elements, of which `block` are loaded at a time.
    size: int
    block: int
    # The number of rows of the matrix that a program multiplies.
    rows: int
    num_warps: int
    # If true, the launch overlaps the one before.
    launch_pdl: bool


@dataclass(frozen=True)
class SkinnyConfig:
    """The constants that `multiply_few` is compiled for."""

    # A row has `size` elements, of which `parts` times `block` are loaded at a time.
    size: int
    parts: int
    block: int
    # A program multiplies `rows` rows of the matrix by `block_m` rows of x. The left operand of tensor cores has 16
    # rows, and the right one 8 or more: up to 8 rows of x are the right operand, and up to 16 the left one.
    rows: int
    block_m: int
    num_warps: int
    launch_pdl: bool


@lru_cache(maxsize=1024)
def gemv_config(size: int, device: torch.device) -> GemvConfig:
    """The constants for a row of `size` elements."""
    block = min(triton.next_power_of_2(size), 2048)
    return GemvConfig(size, block, 4096 // block, 4, has_dependent_launch(device))


@lru_cache(maxsize=1024)
def skinny_config(size: int, num_rows: int, tokens: int, device: torch.device) -> SkinnyConfig:
    """The constants for `tokens` rows of `size` elements, of which each warp has a part, and a matrix of `num_rows`."""
    block_m = 8 if tokens <= 8 else 16
    # A matrix of few rows has few programs: each takes fewer of its rows, by more warps. AMD's instructions take 16.
    takes_fewer = block_m == 16 and num_rows <= 2048 and torch.version.hip is None
    parts, rows = (8, 8) if takes_fewer else (4, 16)
    return SkinnyConfig(size, parts, 128, rows, block_m, parts, has_dependent_launch(device))


@triton.jit
def load_block(weight, row, start, num_rows, weight_row, c: tl.constexpr):
    """Elements of some rows from `start` on, which are read once; 0 outside the matrix."""
    e = start + tl.arange(0, c.block)[None, :]
    inside = (row < num_rows)[:, None] & (e < c.size)
    return tl.load(weight + row.to(tl.int64)[:, None] * weight_row + e, inside, 0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows"])
def multiply_row(x, weight, bias, out, num_rows, weight_row, c: tl.constexpr):
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


@triton.jit
def load_parts(weight, n, start, num_rows, weight_row, c: tl.constexpr):
    """Elements of some rows from `start` on, [parts, rows, block]; 0 outside the matrix."""
    k = start + tl.arange(0, c.parts)[:, None, None] * c.block + tl.arange(0, c.block)[None, None, :]
    inside = (n < num_rows)[None, :, None] & (k < c.size)
    return tl.load(weight + n.to(tl.int64)[None, :, None] * weight_row + k, inside, 0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["tokens", "num_rows"])
def multiply_few(x, weight, bias, out, tokens, num_rows, weight_row, c: tl.constexpr):
    x_is_left: tl.constexpr = c.block_m == 16
    n, m = tl.program_id(0) * c.rows + tl.arange(0, c.rows), tl.arange(0, c.block_m)
    w = load_parts(weight, n, 0, num_rows, weight_row, c)
    wait_for_launch_before(c.launch_pdl)
    k = tl.arange(0, c.parts)[:, None, None] * c.block + tl.arange(0, c.block)[None, None, :]
    # Rows that x does not have are computed as the last one, and not written.
    x_at = x + tl.minimum(m, tokens - 1)[None, :, None] * c.size + k
    total = tl.full((c.parts, c.block_m if x_is_left else c.rows, c.rows if x_is_left else c.block_m), 0.0, tl.float32)
    for start in range(0, c.size, c.parts * c.block):
        following = load_parts(weight, n, start + c.parts * c.block, num_rows, weight_row, c)
        few = tl.load(x_at + start, k < c.size - start, 0.0)
        if x_is_left:
            total = tl.dot(few, w.permute(0, 2, 1), total)
        else:
            total = tl.dot(w, few.permute(0, 2, 1), total)
        w = following
    y = tl.sum(total, 0) if x_is_left else tl.sum(total, 0).T
    if bias is not None:
        y += tl.load(bias + n, n < num_rows, 0.0).to(tl.float32)[None, :]
    out_at = out + m[:, None] * num_rows + n[None, :]
    tl.store(out_at, y.to(out.dtype.element_ty), (m < tokens)[:, None] & (n < num_rows)[None, :])


_launch_row, _launch_few = SmallLauncher(multiply_row), SmallLauncher(multiply_few)


def skinny_gemm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """`quire.kernels.skinny_gemm.skinny_gemm` on a GPU."""
    num_rows, size = weight.shape
    tokens, tensors = x.numel() // size, (x, weight, bias, out)
    if tokens == 1:
        c = gemv_config(size, x.device)
        _launch_row((triton.cdiv(num_rows, c.rows), 1), tensors, (num_rows,), (weight.stride(0),), c)
    elif tokens <= _HOPPER_ROWS and size % 16 == 0 and has_hopper_kernels(x.device):
        from quire.kernels.hopper.few_codes_launch import multiply_dense

        multiply_dense(out, x.view(tokens, size), weight, bias)
    else:
        few = skinny_config(size, num_rows, tokens, x.device)
        _launch_few((triton.cdiv(num_rows, few.rows), 1), tensors, (tokens, num_rows), (weight.stride(0),), few)
