"""Gated activations, element by element: a program computes a part of a long row, or several short ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher
from quire.kernels.triton.fp8 import convert, mantissa_bits, storage

# The number of elements that a program computes.
BLOCK = 1024
_HALF_ROOT = tl.constexpr(math.sqrt(0.5))
_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))


@dataclass(frozen=True)
class ActivationConfig:
    """The constants that the kernel is compiled for."""

    # An output row has `dim` elements. A program computes `block` of them in each of `block_rows` rows.
    dim: int
    block: int
    block_rows: int
    # The function is silu, gelu or gelu_tanh.
    kind: str
    # The number of mantissa bits of fp8 outputs; 0: outputs have another dtype.
    mantissa: int
    # One thread computes 8 elements, which are two loads of bfloat16.
    num_warps: int = BLOCK // 256


@lru_cache(maxsize=1024)
def activation_config(dim: int, kind: str, mantissa: int = 0) -> ActivationConfig:
    """The constants for rows of `dim` outputs."""
    block = min(triton.next_power_of_2(dim), BLOCK)
    return ActivationConfig(dim, block, BLOCK // block, kind, mantissa)


@triton.jit
def activate(x, c: tl.constexpr):
    """silu(x), or gelu(x) by the error function or by tanh: 1 + tanh(u) is 2 / (1 + exp(-2u))."""
    if c.kind == "silu":
        return x / (1 + tl.exp(-x))
    elif c.kind == "gelu":
        return 0.5 * x * (1 + tl.erf(x * _HALF_ROOT))
    else:
        return x / (1 + tl.exp((x + 0.044715 * x * x * x) * -_ROOT))


@triton.jit(do_not_specialize=["rows", "factor"])
def activate_rows(x, scale, out, rows, factor, x_token, o_token, c: tl.constexpr):
    row = (tl.program_id(0) * c.block_rows + tl.arange(0, c.block_rows))[:, None]
    e = tl.program_id(1) * c.block + tl.arange(0, c.block)[None, :]
    known = (row < rows) & (e < c.dim)
    x += row.to(tl.int64) * x_token + e
    gate = tl.load(x, known, 0.0).to(tl.float32)
    y = activate(gate, c) * tl.load(x + c.dim, known, 0.0).to(tl.float32)
    if scale is not None:
        factor /= tl.load(scale).to(tl.float32)
    y = convert(y, factor, out.dtype.element_ty, c.mantissa)
    tl.store(out + row.to(tl.int64) * o_token + e, y, known)


_launch = SmallLauncher(activate_rows)


def act_and_mul(out: Tensor, x: Tensor, scale: Tensor | None, factor: float, kind: str) -> None:
    """`quire.kernels.activation.act_and_mul` on a GPU."""
    if not out.numel():
        return
    rows, dim = out.shape
    c = activation_config(dim, kind, mantissa_bits(out.dtype))
    grid = triton.cdiv(rows, c.block_rows), triton.cdiv(dim, c.block)
    _launch(grid, (x, scale, storage(out)), (rows, factor), (x.stride(0), out.stride(0)), c)
