"""The 16-bit numbers of quantized weights in memory, and rows that are rounded to fp8, for products of many rows."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton import language as tl

from quire.kernels.gpu.launch import wait_for_launch_before
from quire.kernels.triton.code_product import load_group, load_quarters, word_operand
from quire.kernels.triton.codes import decode_bytes, decode_words
from quire.kernels.triton.fp8 import convert


@dataclass(frozen=True)
class NumberConfig:
    """The constants that `write_numbers` is compiled for; see `CodeConfig`."""

    kind: str
    group: int
    scale_rows: int
    block_n: int
    num_warps: int
    pairs: bool
    even: bool


@dataclass(frozen=True)
class RoundConfig:
    """The constants that `round_rows` is compiled for."""

    columns: int
    # Columns that share a scale, or 0 for all of them.
    group: int
    launch_pdl: bool

    @property
    def block(self) -> int:
        """The columns of a row, rounded up to a power of two."""
        return triton.next_power_of_2(self.columns)

    @property
    def num_warps(self) -> int:
        """A thread has 16 columns, where there are that many threads."""
        return min(max(self.block // 512, 1), 16)


@triton.jit(do_not_specialize=["start", "num_rows"])
def write_numbers(
    codes, scale, zero, weight, start, num_rows, out_features, in_features, scale_group, scale_row, c: tl.constexpr
):  # fmt: skip
    """Write a tile of block_n rows and 128 columns; the first row of `weight` is row `start` of the codes."""
    row = tl.program_id(0) * c.block_n + tl.arange(0, c.block_n)
    block, valid = tl.program_id(1), row < num_rows
    n = tl.minimum(start + row, out_features - 1)
    at = (n // c.scale_rows) * scale_row
    out_at = weight + row.to(tl.int64)[:, None] * in_features + block * 128
    if c.kind == "int4" or c.kind == "mxfp4":
        s = load_quarters(scale, block, at, scale_group, in_features, c)
        z = (None, None, None, None)
        if zero is not None:
            z = load_quarters(zero, block, at, scale_group, in_features, c)
        column = tl.arange(0, 32)
        words = tl.load(codes + block.to(tl.int64) * out_features * 32 + n[:, None] * 32 + column[None, :])
        operands = (
            word_operand(s[0], z[0], tl.float32, c),
            word_operand(s[1], z[1], tl.float32, c),
            word_operand(s[2], z[2], tl.float32, c),
            word_operand(s[3], z[3], tl.float32, c),
        )
        numbers = decode_words(words, operands, tl.float32, c)
        for i in tl.static_range(4):
            y = numbers[i]
            if c.kind == "int4":
                y *= s[i].to(tl.float32)[:, None]
            known = valid[:, None] & (block * 128 + 32 * i + column < in_features)[None, :]
            tl.store(out_at + 32 * i + column[None, :], y.to(weight.dtype.element_ty), known)
    else:
        g = 0
        if c.group > 0:
            g = block // (c.group // 128)
        s = load_group(scale, g, at, scale_group, in_features, c).to(tl.float32)
        z = None
        if zero is not None:
            z = load_group(zero, g, at, scale_group, in_features, c).to(tl.int32)[:, None]
        column = tl.arange(0, 128)
        inside = (block * 128 + column < in_features)[None, :]
        none: tl.constexpr = 0.0 if codes.dtype.element_ty.is_fp8() else 0
        bytes = tl.load(codes + n.to(tl.int64)[:, None] * in_features + block * 128 + column[None, :], inside, none)
        y = decode_bytes(bytes, z, tl.float32, c) * s[:, None]
        tl.store(out_at + column[None, :], y.to(weight.dtype.element_ty), valid[:, None] & inside)


@triton.jit(do_not_specialize=["num_rows"])
def round_rows(x, out, scales, num_rows, x_row, scale_row, scale_group, c: tl.constexpr):
    """Round a row, or zeros beyond the last one, to fp8. The largest number of those that share a scale becomes 448."""
    wait_for_launch_before(c.launch_pdl)
    row = tl.program_id(0)
    width: tl.constexpr = c.block if c.group == 0 else c.group
    e = tl.arange(0, c.block // width)[:, None] * width + tl.arange(0, width)[None, :]
    y = tl.load(x + row.to(tl.int64) * x_row + e, (e < c.columns) & (row < num_rows), 0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(y), 1), 1e-12)
    y = convert(y, (448.0 / largest)[:, None], out.dtype.element_ty, 3)
    tl.store(out + row.to(tl.int64) * c.columns + e, y, e < c.columns)
    g = tl.arange(0, c.block // width)
    tl.store(scales + row * scale_row + g * scale_group, largest / 448.0, g * width < c.columns)
