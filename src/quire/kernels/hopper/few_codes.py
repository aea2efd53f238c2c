"""Products of up to 8 rows and a weight of codes or 16 bits, which goes from memory to the registers of tensor cores.

The tile of codes is the left operand of the tensor cores. A lane loads 16 bytes of each of its rows at a time, which
are its elements of a block of 128 columns, and the same columns of the rows of x, the right operand: the order in which
columns are multiplied does not matter. So nothing goes through shared memory but, at the end, the sums of the program's
warps, each of which has every fourth, eighth or sixteenth block of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quire.kernels.gpu.launch import wait_for_launch_before
from quire.kernels.triton.codes import FOUR_BF16, FOUR_FP8_BF16, FOUR_FP16, MXFP4_BF16, mxfp4_factor


@dataclass(frozen=True)
class FewCodesConfig:
    """The constants that `multiply_few_codes` and `multiply_few_code_groups` are compiled for."""

    # "fp8", "int4" or "mxfp4"; "dense" for numbers of the dtype of x, which have no scales.
    kind: str
    # The columns that share a scale (32 of mxfp4, a multiple of 128, or 0 for all), and the rows that share a scale.
    group: int
    scale_rows: int
    # The rows of the weight that a program multiplies, and whether all programs have that number of rows.
    block_n: int
    whole: bool
    # The number of warps, which take turns with the blocks of 128 columns, and the blocks that a warp loads at a time.
    parts: int
    unroll: int
    # Whether all warps have the same number of blocks, and all blocks are whole.
    even: bool
    launch_pdl: bool
    # The number of experts, rounded up to a power of two.
    padded_groups: int = 1

    # `mxfp4_factor` returns factors for pairs of numbers.
    pairs = True

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return self.parts

    @property
    def packed(self) -> bool:
        """Whether codes are four to a word."""
        return self.kind in ("int4", "mxfp4")

    @property
    def width(self) -> int:
        """Neighbouring elements that a lane loads at once, 16 bytes of words, codes or numbers."""
        return 16 if self.kind == "fp8" else 8

    @property
    def columns(self) -> int:
        """Stored elements in a row of a block: words, codes or numbers."""
        return 32 if self.packed else 128

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """The layout of sums [parts, block_n, 8]."""
        return gl.NVMMADistributedLayout([2, 0], [self.parts, 1, 1], [1, 16, 8])

    @property
    def codes(self) -> gl.DotOperandLayout:
        """The layout of codes [parts, block_n, columns]."""
        return gl.DotOperandLayout(0, self.sums, self.width)

    @property
    def x(self) -> gl.DotOperandLayout:
        """The layout of rows of x [parts, columns, 8]."""
        return gl.DotOperandLayout(1, self.sums, self.width)

    @property
    def scales(self) -> gl.SliceLayout:
        """The layout of scales [parts, block_n]."""
        return gl.SliceLayout(2, self.codes if self.kind == "mxfp4" else self.sums)


def _put_into(base: str) -> str:
    """Assembly that puts each of the four codes of a word into the mantissa of a number, for two words at a time."""
    steps = [f"lop3.b32 $0, $4, 0x000F000F, {base}, 0xEA;"]
    steps += [f"shr.b32 t, $4, {4 * i}; lop3.b32 ${i}, t, 0x000F000F, {base}, 0xEA;" for i in range(1, 4)]
    return f"{{ .reg .b32 t; {' '.join(steps)} }}"


_INT4_BF16, _INT4_FP16 = gl.constexpr(_put_into("0x43004300")), gl.constexpr(_put_into("0x64006400"))
_ONE_WORD, _WORD_AND_FOUR = gl.constexpr("=&r,=&r,=&r,=&r,r"), gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@gluon.jit
def decode_int4(words, dtype: gl.constexpr):
    """The four codes of each word, each plus 128 (bfloat16) or 1024 (float16)."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(_INT4_BF16, _ONE_WORD, [words], FOUR_BF16, True, 2)
    else:
        return gl.inline_asm_elementwise(_INT4_FP16, _ONE_WORD, [words], FOUR_FP16, True, 2)


@gluon.jit
def decode_mxfp4(words, exponents, dtype: gl.constexpr, c: gl.constexpr):
    """The numbers of the four codes of each word, times their scales. exponents: int32 [parts, block_n], four each."""
    factors = [
        words,
        mxfp4_factor(exponents & 255, dtype, c)[:, :, None],
        mxfp4_factor(exponents >> 8 & 255, dtype, c)[:, :, None],
        mxfp4_factor(exponents >> 16 & 255, dtype, c)[:, :, None],
        mxfp4_factor(exponents >> 24 & 255, dtype, c)[:, :, None],
    ]
    return gl.inline_asm_elementwise(MXFP4_BF16, _WORD_AND_FOUR, factors, FOUR_BF16, True, 2)


@gluon.jit
def rows_of_tile(first, out_features, layout: gl.constexpr, c: gl.constexpr):
    """Rows of the weight from `first` on; those that it does not have are computed as the last one, and not written."""
    n = first + gl.arange(0, c.block_n, layout)
    if not c.whole:
        n = gl.minimum(n, out_features - 1)
    return n


@gluon.jit
def load_codes(at, block, in_features, c: gl.constexpr):
    """A block's codes, which are read once; 0 for columns that the weight does not have."""
    part = block + gl.arange(0, c.parts, gl.SliceLayout(1, gl.SliceLayout(2, c.codes)))[:, None, None]
    if c.even:
        return gl.load(at, eviction_policy="evict_first")
    elif c.packed:
        return gl.load(at, part * 128 < in_features, 0, eviction_policy="evict_first")
    else:
        column = part * 128 + gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, c.codes)))[None, None, :]
        return gl.load(at, column < in_features, 0, eviction_policy="evict_first")


@gluon.jit
def load_scales(values, n, block, in_features, stride, c: gl.constexpr):
    """The scales, or the zero points, of a block's rows [parts, block_n]; those of mxfp4 are words of four."""
    at = n[None, :]
    if c.group > 0:
        group = block + gl.arange(0, c.parts, gl.SliceLayout(1, c.scales))[:, None]
        if not c.even:
            group = gl.minimum(group, gl.cdiv(in_features, 128) - 1)
        if c.group > 128:
            group = group // (c.group // 128)
        at = group * stride + at
    return gl.load(values + at)


@gluon.jit
def load_blocks(at, scale, zero, n, block, in_features, step, stride, c: gl.constexpr):
    """Codes, scales and zero points, which are 8 where int4 has none, of as many blocks as are loaded at a time."""
    unroll: gl.constexpr = c.unroll
    loaded = ()
    for i in gl.static_range(unroll):
        z = gl.full([c.parts, c.block_n], 8, gl.int32, c.scales)
        if zero is not None:
            z = load_scales(zero, n, block + i * c.parts, in_features, stride, c)
        s = z
        if scale is not None:
            s = load_scales(scale, n, block + i * c.parts, in_features, stride, c)
        loaded += ((load_codes(at + i * step, block + i * c.parts, in_features, c), s, z),)  # type: ignore[assignment]
    return loaded


@gluon.jit
def load_rows(at, column, block, in_features, quarter: gl.constexpr, c: gl.constexpr):
    """Rows of x in a block, or in a quarter of it; 0 for columns that they do not have."""
    first = block * 128 + quarter * 32
    if c.even:
        return gl.load(at + first)
    else:
        return gl.load(at + first, column + first < in_features, 0.0)


@gluon.jit
def add_block(total, codes, scale, zero, at, column, block, in_features, c: gl.constexpr):
    """Add the product with a block of 128 columns, whose codes, scale and zero points `load_blocks` has returned."""
    dtype: gl.constexpr = at.dtype.element_ty
    none = gl.full([c.parts, c.block_n, 8], 0.0, gl.float32, c.sums)
    if c.kind == "dense":
        return mma_v2(codes, load_rows(at, column, block, in_features, 0, c), total)
    elif c.kind == "fp8":
        numbers = gl.inline_asm_elementwise(FOUR_FP8_BF16, "=&r,=r,r", [codes], gl.bfloat16, True, 4)
        product = mma_v2(numbers, load_rows(at, column, block, in_features, 0, c), total if c.group == 0 else none)
        return product if c.group == 0 else total + product * scale[:, :, None]
    else:
        x0 = load_rows(at, column, block, in_features, 0, c)
        x1 = load_rows(at, column, block, in_features, 1, c)
        x2 = load_rows(at, column, block, in_features, 2, c)
        x3 = load_rows(at, column, block, in_features, 3, c)
        if c.kind == "mxfp4":
            a0, a1, a2, a3 = decode_mxfp4(codes, scale, dtype, c)
            return mma_v2(a3, x3, mma_v2(a2, x2, mma_v2(a1, x1, mma_v2(a0, x0, total))))
        else:
            a0, a1, a2, a3 = decode_int4(codes, dtype)
            product = mma_v2(a3, x3, mma_v2(a2, x2, mma_v2(a1, x1, mma_v2(a0, x0, none))))
            # Decoded numbers are too large by base + zero. This times the sum of each row of x, which the product with
            # ones computes, is subtracted. All rows of these sums are equal.
            ones = gl.full([c.parts, 16, 32], 1.0, dtype, c.codes)
            sums = gl.full([c.parts, 16, 8], 0.0, gl.float32, c.sums)
            sums = mma_v2(ones, x3, mma_v2(ones, x2, mma_v2(ones, x1, mma_v2(ones, x0, sums))))
            if c.block_n > 16:
                sums = gl.max(sums, 1)[:, None, :]
            base: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
            excess = sums * (base + zero.to(gl.float32))[:, :, None]
            return total + (product - excess) * scale.to(gl.float32)[:, :, None]


@gluon.jit
def add_blocks(total, loaded, at, column, block, in_features, c: gl.constexpr):
    """Add the products with the blocks that `load_blocks` returned."""
    unroll: gl.constexpr = c.unroll
    for i in gl.static_range(unroll):
        codes, s, z = loaded[i]
        total = add_block(total, codes, s, z, at, column, block + i * c.parts, in_features, c)
    return total


@gluon.jit
def sum_columns(
    x, source, codes, scale, zero, first_n, out_features, in_features, x_row, scale_group, scale_row,
    launch_pdl: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """The product of rows of x and rows of the weight, float32 [block_n, 8].

    Args:
        source: the rows of x, int32 [1, 1, 8].
        codes: uint8 or 16 bits [out_features, in_features], or words int16 [in_features / 128, out_features, 32].
        first_n: the first row of the weight.
        launch_pdl: whether the launch before this one has not been waited for.
    """
    part = gl.arange(0, c.parts, gl.SliceLayout(1, gl.SliceLayout(2, c.codes)))[:, None, None].to(gl.int64)
    n = rows_of_tile(first_n, out_features, gl.SliceLayout(0, gl.SliceLayout(2, c.codes)), c)[None, :, None]
    e = gl.arange(0, c.columns, gl.SliceLayout(0, gl.SliceLayout(1, c.codes)))[None, None, :]
    if c.packed:
        step = out_features.to(gl.int64) * 32
        codes_at = codes + (part * step + (n * 32 + e))
    else:
        step = gl.full([], 128, gl.int64)
        codes_at = codes + (part * step + (n.to(gl.int64) * in_features + e))
    step *= c.parts
    scale_n = rows_of_tile(first_n, out_features, gl.SliceLayout(0, c.scales), c) // c.scale_rows * scale_row
    loaded = load_blocks(codes_at, scale, zero, scale_n, 0, in_features, step, scale_group, c)
    wait_for_launch_before(launch_pdl)
    column = gl.arange(0, c.parts, gl.SliceLayout(1, gl.SliceLayout(2, c.x)))[:, None, None] * 128
    column += gl.arange(0, c.columns, gl.SliceLayout(0, gl.SliceLayout(2, c.x)))[None, :, None]
    x_at = x + (source.to(gl.int64) * x_row + column)
    total = gl.full([c.parts, c.block_n, 8], 0.0, gl.float32, c.sums)
    total = add_blocks(total, loaded, x_at, column, 0, in_features, c)
    for block in range(c.parts * c.unroll, gl.cdiv(in_features, 128), c.parts * c.unroll):
        codes_at += step * c.unroll
        loaded = load_blocks(codes_at, scale, zero, scale_n, block, in_features, step, scale_group, c)
        total = add_blocks(total, loaded, x_at, column, block, in_features, c)
    if c.kind == "fp8" and c.group == 0:
        total *= load_scales(scale, scale_n, 0, in_features, scale_group, c)[:, :, None]
    return gl.sum(total, 0)


@gluon.jit(do_not_specialize=["num_rows"])
def multiply_few_codes(
    x, codes, scale, zero, bias, out,
    num_rows, out_features, in_features, x_row, scale_group, scale_row, c: gl.constexpr,
):  # fmt: skip
    first_n = gl.program_id(0) * c.block_n
    m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, c.x)))[None, None, :]
    y = sum_columns(
        x, gl.minimum(m, num_rows - 1), codes, scale, zero, first_n, out_features, in_features, x_row, scale_group,
        scale_row, c.launch_pdl, c,
    )  # fmt: skip
    n = first_n + gl.arange(0, c.block_n, gl.SliceLayout(1, y.type.layout))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, y.type.layout))[None, :]
    if bias is not None:
        y += gl.load(bias + n, n < out_features, 0.0).to(gl.float32)
    gl.store(out + row * out_features + n, y.to(out.dtype.element_ty), (row < num_rows) & (n < out_features))


@gluon.jit
def find_expert(ends, num_experts, tile, c: gl.constexpr):
    """The expert of a tile of 8 sorted rows, which is beyond num_experts if there is no such tile; the tile's first
    row, and the end of the expert's rows. An expert's tiles begin at its first row.
    """
    layout: gl.constexpr = gl.BlockedLayout([max(c.padded_groups // 32, 1)], [32], [c.parts], [0])
    e = gl.arange(0, c.padded_groups, layout)
    end = gl.load(ends + e, e < num_experts, 0)
    start = gl.load(ends + e - 1, (e > 0) & (e < num_experts), 0)
    tiles = gl.cdiv(end - start, 8)
    # The number of tiles up to the end of each expert.
    following = gl.associative_scan(tiles, 0, add)
    expert = gl.sum((following <= tile).to(gl.int32), 0)
    first = gl.sum(gl.where(e == expert, start + (tile - following + tiles) * 8, 0), 0)
    return expert, first, gl.sum(gl.where(e == expert, end, 0), 0)


@gluon.jit
def add(a, b):
    """The operation of a prefix sum."""
    return a + b


@gluon.jit(do_not_specialize=["top_k", "num_experts"])
def multiply_few_code_groups(
    x, order, ends, codes, scale, zero, out, top_k, num_experts,
    out_features, in_features, x_row, codes_expert, scale_expert, scale_group, scale_row, c: gl.constexpr,
):  # fmt: skip
    wait_for_launch_before(c.launch_pdl)
    expert, first_row, end = find_expert(ends, num_experts, gl.program_id(1), c)
    if expert >= num_experts:
        return
    first_n = gl.program_id(0) * c.block_n
    source = gl.minimum(first_row + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, c.x))), end - 1)
    if order is not None:
        source = gl.load(order + source) // top_k
    codes += expert.to(gl.int64) * codes_expert
    scale += expert.to(gl.int64) * scale_expert
    if zero is not None:
        zero += expert.to(gl.int64) * scale_expert
    y = sum_columns(
        x, source[None, None, :], codes, scale, zero, first_n, out_features, in_features, x_row, scale_group,
        scale_row, False, c,
    )  # fmt: skip
    n = first_n + gl.arange(0, c.block_n, gl.SliceLayout(1, y.type.layout))[:, None]
    row = first_row + gl.arange(0, 8, gl.SliceLayout(0, y.type.layout))[None, :]
    at = row.to(gl.int64) * out_features + n
    gl.store(out + at, y.to(out.dtype.element_ty), (row < end) & (n < out_features))
