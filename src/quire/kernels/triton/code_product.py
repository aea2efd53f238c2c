"""Products of a few rows and a quantized weight, whose codes become numbers of 16 bits in registers.

The weight's bytes take the time: each program reads a tile of codes once for all of its rows. The tile is the left
operand of the tensor cores, whose instructions take 64 rows there or 16, and the rows of x are the right one, which may
be as few as 8. Where the weight has too few tiles for the GPU, several programs share the columns of a tile (split-K),
and the last of them adds up their sums in the order of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton import language as tl

from quire.kernels.gpu.launch import wait_for_launch_before
from quire.kernels.triton.codes import decode_bytes, decode_words, int4_offset, mxfp4_factor


@dataclass(frozen=True)
class CodeConfig:
    """The constants that `multiply_codes` is compiled for."""

    # "fp8", "int8", "int4" or "mxfp4".
    kind: str
    # Columns of a scale: 32, 64, a multiple of 128, or 0 for all of them.
    group: int
    # Rows of the weight that share a scale.
    scale_rows: int
    # Rows of x, and rows of the weight, of a program.
    block_m: int
    block_n: int
    # Programs that share the columns of a tile.
    splits: int
    num_stages: int
    num_warps: int
    launch_pdl: bool
    # Whether pairs of 4-bit codes are decoded by inline assembly.
    pairs: bool
    # Whether the columns are whole blocks of 128.
    even: bool

    @property
    def wgmma(self) -> bool:
        """Whether Triton multiplies by instructions of warp groups on Hopper, for which a thread loads two codes at a
        time instead of four.
        """
        return self.block_n >= 64 and self.block_m >= 16 and self.num_warps >= 4


@triton.jit
def load_group(values, group, at, stride, columns, c: tl.constexpr):
    """The values, such as scales, of a group of columns, or of the last one, if there is no such group.

    Args:
        values: [groups, rows] with a stride of `stride` between groups.
        at: the offsets of the values of some rows of the weight.
        columns: of the weight.
    """
    if c.group > 0 and not c.even:
        group = tl.minimum(group, tl.cdiv(columns, c.group) - 1)
    return tl.load(values + group * stride + at)


@triton.jit
def load_quarters(values, block, at, stride, columns, c: tl.constexpr):
    """The values, such as scales, of a block of 128 columns: a tuple of four, each for 32 columns. Arguments are those
    of `load_group`, and the index of the block. Those of mxfp4 are the bytes of a word.
    """
    if c.kind == "mxfp4":
        v = tl.load(values + block * stride + at)
        return (v & 255, v >> 8 & 255, v >> 16 & 255, v >> 24 & 255)
    elif c.group == 0:
        v = load_group(values, 0, at, stride, columns, c)
        return (v, v, v, v)
    elif c.group >= 128:
        v = load_group(values, block // (c.group // 128), at, stride, columns, c)
        return (v, v, v, v)
    elif c.group == 64:
        v = load_group(values, block * 2, at, stride, columns, c)
        w = load_group(values, block * 2 + 1, at, stride, columns, c)
        return (v, v, w, w)
    else:
        return (
            load_group(values, block * 4, at, stride, columns, c),
            load_group(values, block * 4 + 1, at, stride, columns, c),
            load_group(values, block * 4 + 2, at, stride, columns, c),
            load_group(values, block * 4 + 3, at, stride, columns, c),
        )


@triton.jit
def word_operand(scale, zero, dtype: tl.constexpr, c: tl.constexpr):
    """What `decode_words` takes for the scales and zero points of some rows."""
    if c.kind == "mxfp4":
        return mxfp4_factor(scale, dtype, c)[:, None]
    elif zero is None:
        return tl.full((c.block_n, 1), 0, dtype) + int4_offset(tl.full((), 8, tl.int32), dtype)
    else:
        return int4_offset(zero.to(tl.int32), dtype)[:, None]


@triton.jit
def add_words(total, x_at, words_at, scale, zero, at, block, columns, stride, c: tl.constexpr):
    """Add the product with a block of 128 columns in words of four codes: code i of word j is of column 32 i + j."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    s = load_quarters(scale, block, at, stride, columns, c)
    z = (None, None, None, None)
    if zero is not None:
        z = load_quarters(zero, block, at, stride, columns, c)
    operands = (
        word_operand(s[0], z[0], dtype, c),
        word_operand(s[1], z[1], dtype, c),
        word_operand(s[2], z[2], dtype, c),
        word_operand(s[3], z[3], dtype, c),
    )
    words = tl.load(words_at)
    numbers = decode_words(words, operands, dtype, c)
    k = tl.arange(0, 32)[:, None]
    whole: tl.constexpr = c.kind == "mxfp4" or c.group == 0
    partial = total
    if not whole:
        partial = tl.full((c.block_n, c.block_m), 0.0, tl.float32)
    for i in tl.static_range(4):
        if c.even:
            rows = tl.load(x_at + 32 * i)
        else:
            rows = tl.load(x_at + 32 * i, block * 128 + 32 * i + k < columns, 0.0)
        partial = tl.dot(numbers[i], rows, partial, input_precision="ieee")
        if not whole and c.group < 128:
            total += partial * s[i].to(tl.float32)[:, None]
            partial = tl.full((c.block_n, c.block_m), 0.0, tl.float32)
    if whole:
        return partial
    elif c.group < 128:
        return total
    else:
        return total + partial * s[0].to(tl.float32)[:, None]


@triton.jit
def add_bytes(total, x_at, codes_at, scale, zero, at, block, columns, stride, c: tl.constexpr):
    """Add the product with a block of 128 columns of 8-bit codes."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    g = 0
    if c.group > 0:
        g = block // (c.group // 128)
    s = load_group(scale, g, at, stride, columns, c).to(tl.float32)
    z = None
    if zero is not None:
        z = load_group(zero, g, at, stride, columns, c).to(tl.int32)[:, None]
    k = tl.arange(0, 128)
    none: tl.constexpr = 0.0 if codes_at.dtype.element_ty.is_fp8() else 0
    if c.even:
        codes, rows = tl.load(codes_at), tl.load(x_at)
    else:
        inside = block * 128 + k < columns
        codes, rows = tl.load(codes_at, inside[None, :], none), tl.load(x_at, inside[:, None], 0.0)
    numbers = decode_bytes(codes, z, dtype, c)
    if c.group == 0:
        return tl.dot(numbers, rows, total, input_precision="ieee")
    else:
        return total + tl.dot(numbers, rows, input_precision="ieee") * s[:, None]


@triton.jit
def sum_blocks(
    x_rows, codes, scale, zero, n, first, last, out_features, in_features, scale_group, scale_row, c: tl.constexpr
):  # fmt: skip
    """The product of rows of x and rows of the weight over the columns of blocks `first` to `last`, float32 [block_n,
    block_m].

    Args:
        x_rows: pointers [1, block_m] to the rows of x.
        codes: 8-bit codes [out_features, in_features], or words int16 [in_features / 128, out_features, 32].
        n: [block_n], the rows of the weight.
    """
    # Rows that the weight does not have are computed as the last one, and not written.
    n = tl.minimum(n, out_features - 1)
    at = (n // c.scale_rows) * scale_row
    total = tl.full((c.block_n, c.block_m), 0.0, tl.float32)
    if c.kind == "int4" or c.kind == "mxfp4":
        x_at = x_rows + first * 128 + tl.arange(0, 32)[:, None]
        step = out_features * 32
        codes_at = codes + first.to(tl.int64) * step + n[:, None] * 32 + tl.arange(0, 32)[None, :]
        for block in tl.range(first, last, num_stages=c.num_stages):
            total = add_words(total, x_at, codes_at, scale, zero, at, block, in_features, scale_group, c)
            x_at += 128
            codes_at += step
    else:
        k = tl.arange(0, 128)
        x_at = x_rows + first * 128 + k[:, None]
        codes_at = codes + n.to(tl.int64)[:, None] * in_features + first * 128 + k[None, :]
        for block in tl.range(first, last, num_stages=c.num_stages):
            total = add_bytes(total, x_at, codes_at, scale, zero, at, block, in_features, scale_group, c)
            x_at += 128
            codes_at += 128
    if c.group == 0:
        total *= load_group(scale, 0, at, scale_group, in_features, c).to(tl.float32)[:, None]
    return total


@triton.jit
def sum_splits(total, partials, arrivals, tile, split, c: tl.constexpr):
    """The sum of the programs that share a tile, in the last of them, and whether this is it.

    Args:
        partials: float32 [tiles, splits, block_n, block_m].
        arrivals: int32 [tiles], 0 before and after the launch.
        tile: the index of the tile.
    """
    inside = tl.arange(0, c.block_n)[:, None] * c.block_m + tl.arange(0, c.block_m)[None, :]
    at = partials + tile.to(tl.int64) * (c.splits * c.block_n * c.block_m) + inside
    tl.store(at + split * (c.block_n * c.block_m), total)
    # All of the program's sums are written before it counts as arrived.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals + tile, 1) == c.splits - 1
    if is_last:
        tl.store(arrivals + tile, 0)
        total = tl.load(at)
        for i in range(1, c.splits):
            total += tl.load(at + i * (c.block_n * c.block_m))
    return total, is_last


@triton.jit(do_not_specialize=["num_rows"])
def multiply_codes(
    x, codes, scale, zero, bias, partials, arrivals, out,
    num_rows, out_features, in_features, x_row, scale_group, scale_row, c: tl.constexpr,
):  # fmt: skip
    wait_for_launch_before(c.launch_pdl)
    tile_n, split = tl.program_id(0), tl.program_id(1) % c.splits
    tile_m = tl.program_id(1) // c.splits
    n, m = tile_n * c.block_n + tl.arange(0, c.block_n), tile_m * c.block_m + tl.arange(0, c.block_m)
    blocks = tl.cdiv(in_features, 128)
    share = tl.cdiv(blocks, c.splits)
    first, last = split * share, tl.minimum(split * share + share, blocks)
    x_rows = x + tl.minimum(m, num_rows - 1).to(tl.int64)[None, :] * x_row
    total = sum_blocks(x_rows, codes, scale, zero, n, first, last, out_features, in_features, scale_group, scale_row, c)
    is_last = True
    if c.splits > 1:
        tile = tile_m * tl.num_programs(0) + tile_n
        total, is_last = sum_splits(total, partials, arrivals, tile, split, c)
    if is_last:
        if bias is not None:
            total += tl.load(bias + n, n < out_features, 0.0).to(tl.float32)[:, None]
        out_at = out + m.to(tl.int64)[None, :] * out_features + n[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), (m < num_rows)[None, :] & (n < out_features)[:, None])
