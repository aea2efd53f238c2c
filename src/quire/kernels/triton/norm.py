"""RMS and layer norms: a program computes one long row, or several short ones, and reads each element once.

Rows of up to BLOCK elements stay in registers between the sum of squares and the output. Longer ones are read again,
from the L2 cache. A layer norm has two reductions, one after the other, and more weights, so that too few of its
programs run at once to keep the memory busy: each computes tile after tile of rows, and loads the next one ahead,
where there are registers for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher
from quire.kernels.triton.fp8 import convert, mantissa_bits, storage
from quire.kernels.triton.threshold import running_programs

# The most elements of a row that stays in registers, 16 for each thread.
BLOCK = 16384
# The number of elements of a longer row that are loaded at a time.
LOOP = 8192
# The number of elements of all rows of a program that computes several short rows.
SHORT = 2048
# The number of elements of all rows of a program that loads the next rows ahead.
AHEAD = 8192
# These are the warps of 1024 threads.
MAX_WARPS = 32 if torch.version.hip is None else 16


@dataclass(frozen=True)
class NormConfig:
    """The constants that the kernel is compiled for."""

    # A row has `dim` elements, of which `block` are loaded at a time.
    dim: int
    block: int
    # The number of rows that a program computes at a time.
    block_rows: int
    # This is added to weights.
    weight_bias: float
    # If true, the mean is subtracted, as in layer norm.
    center: bool
    # The number of mantissa bits of fp8 outputs; 0: outputs have another dtype.
    mantissa: int
    # If true, programs compute several tiles of rows, and load the next one ahead.
    ahead: bool

    @property
    def num_warps(self) -> int:
        """One thread for 16 elements, which are two loads of bfloat16."""
        return min(max(self.block * self.block_rows // 512, 1), MAX_WARPS)


@lru_cache(maxsize=1024)
def norm_config(dim: int, weight_bias: float = 0.0, center: bool = False, mantissa: int = 0) -> NormConfig:
    """The constants for rows of `dim` elements."""
    block = triton.next_power_of_2(dim)
    block = block if block <= BLOCK else LOOP
    ahead = center and block <= AHEAD and dim <= block
    return NormConfig(dim, block, max((AHEAD if ahead else SHORT) // block, 1), weight_bias, center, mantissa, ahead)


@triton.jit
def load_sum(x, residual, e, known):
    """Elements e of rows that start at x, plus those of the residual if there is one, float32."""
    y = tl.load(x + e, known, 0.0).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + e, known, 0.0).to(tl.float32)
    return y


@triton.jit
def load_affine(weight, beta, e, c: tl.constexpr):
    """Elements e of the weights and of what is added to weighted elements, float32."""
    w = tl.load(weight + e, e < c.dim, 0.0).to(tl.float32) + c.weight_bias
    b = 0.0
    if beta is not None:
        b = tl.load(beta + e, e < c.dim, 0.0).to(tl.float32)
    return w, b


@triton.jit
def write(y, mean, rstd, w, b, residual, out, e, known, factor, c: tl.constexpr):
    """Write elements e of the rows y to the residual, if there is one, and normalised to `out`."""
    if residual is not None:
        tl.store(residual + e, y.to(residual.dtype.element_ty), known)
    y = (y - mean) * rstd * w + b
    tl.store(out + e, convert(y, factor, out.dtype.element_ty, c.mantissa), known)


@triton.jit
def write_whole(y, w, b, residual, out, e, known, eps, factor, c: tl.constexpr):
    """Normalise and write rows y that are in registers."""
    mean = 0.0
    if c.center:
        mean = tl.sum(y, 1, keep_dims=True) / c.dim
    off = tl.where(known, y - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(off * off, 1, keep_dims=True) / c.dim + eps)
    write(y, mean, rstd, w, b, residual, out, e, known, factor, c)


@triton.jit
def rows_at(x, row, heads, x_token, x_head):
    """Where rows of x start: row i is head i % heads of token i // heads."""
    return x + (row // heads).to(tl.int64) * x_token + (row % heads).to(tl.int64) * x_head


@triton.jit(do_not_specialize=["rows", "eps", "factor"])
def norm_rows(
    x, residual, weight, beta, scale, out, rows, eps, factor, heads, x_token, x_head, r_token, r_head, o_token, o_head,
    c: tl.constexpr,
):  # fmt: skip
    """A tile of rows or, with c.ahead, each num_programs-th one."""
    row = tl.program_id(0) * c.block_rows + tl.arange(0, c.block_rows)[:, None]
    inside = row < rows
    if scale is not None:
        factor /= tl.load(scale).to(tl.float32)
    if residual is not None:
        residual = rows_at(residual, row, heads, r_token, r_head)
    if c.block >= c.dim:
        e = tl.arange(0, c.block)[None, :]
        at = rows_at(x, row, heads, x_token, x_head)
        if c.ahead:
            y = tl.load(at + e, inside & (e < c.dim), 0.0)
            w, b = load_affine(weight, beta, e, c)
            step = tl.num_programs(0) * c.block_rows
            for _ in range(tl.program_id(0) * c.block_rows, rows, step):
                at = rows_at(x, row + step, heads, x_token, x_head)
                following = tl.load(at + e, (row + step < rows) & (e < c.dim), 0.0)
                to, known = rows_at(out, row, heads, o_token, o_head), (row < rows) & (e < c.dim)
                write_whole(y.to(tl.float32), w, b, None, to, e, known, eps, factor, c)
                row += step
                y = following
        else:
            known = inside & (e < c.dim)
            y = load_sum(at, residual, e, known)
            # Weights are loaded while the sums are computed.
            w, b = load_affine(weight, beta, e, c)
            to = rows_at(out, row, heads, o_token, o_head)
            write_whole(y, w, b, residual, to, e, known, eps, factor, c)
    else:
        x, out = rows_at(x, row, heads, x_token, x_head), rows_at(out, row, heads, o_token, o_head)
        mean = 0.0
        total = tl.full((c.block_rows, c.block), 0.0, tl.float32)
        if c.center:
            for start in range(0, c.dim, c.block):
                e = start + tl.arange(0, c.block)[None, :]
                total += load_sum(x, residual, e, inside & (e < c.dim))
            mean = tl.sum(total, 1, keep_dims=True) / c.dim
            total = tl.full((c.block_rows, c.block), 0.0, tl.float32)
        for start in range(0, c.dim, c.block):
            e = start + tl.arange(0, c.block)[None, :]
            known = inside & (e < c.dim)
            off = tl.where(known, load_sum(x, residual, e, known) - mean, 0.0)
            total += off * off
        rstd = tl.rsqrt(tl.sum(total, 1, keep_dims=True) / c.dim + eps)
        for start in range(0, c.dim, c.block):
            e = start + tl.arange(0, c.block)[None, :]
            known = inside & (e < c.dim)
            w, b = load_affine(weight, beta, e, c)
            write(load_sum(x, residual, e, known), mean, rstd, w, b, residual, out, e, known, factor, c)


_launch = SmallLauncher(norm_rows)


def norm(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    beta: Tensor | None,
    scale: Tensor | None,
    factor: float,
    eps: float,
    weight_bias: float,
    center: bool,
) -> None:
    """`quire.kernels.norm.norm` on a GPU."""
    if not x.numel():
        return
    heads, dim = x.shape[1] if x.ndim == 3 else 1, x.shape[-1]
    c = norm_config(dim, weight_bias, center, mantissa_bits(out.dtype))
    rows = len(x) * heads
    sizes = heads, *_strides(x), *_strides(x if residual is None else residual), *_strides(out)
    tensors = (x, residual, weight, beta, scale, storage(out))
    tiles = triton.cdiv(rows, c.block_rows)
    if c.ahead:
        tiles = min(tiles, running_programs(x.device))
    _launch((tiles, 1), tensors, (rows, eps, factor), sizes, c)


def _strides(x: Tensor) -> tuple[int, int]:
    """Strides of tokens and heads; rows without heads count as tokens of one head."""
    return x.stride(0), x.stride(1) if x.ndim == 3 else 0
