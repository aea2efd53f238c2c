"""Codes of quantized weights as floating-point numbers, in Triton kernels.

Codes of 4 bits are four to a word of 16 bits. Integer instructions take 32 bits, so that a few of them turn two words
into two numbers, by inline assembly where `c.pairs` is set. A code q of int4 is put into the mantissa of 128 (bfloat16)
or 1024 (float16), which makes it 128 + q or 1024 + q; one of mxfp4 has the sign, the exponent and the mantissa of a
bfloat16 number that is 2**126 times smaller. All of it is exact.
"""

from __future__ import annotations

import triton
from triton import language as tl


def _integers(bits: str, one: str, add: str) -> str:
    """PTX that decodes two words of int4 to four pairs of numbers: code + base + operand. bits: two bases."""
    steps = [f"lop3.b32 t, $4, 0x000F000F, {bits}, 0xEA; {add.format(0, 5)}"]
    steps += [
        f"shr.b32 t, $4, {4 * i}; lop3.b32 t, t, 0x000F000F, {bits}, 0xEA; {add.format(i, 5 + i)}" for i in range(1, 4)
    ]
    return f"{{ .reg .b32 t, one; mov.b32 one, {one}; {' '.join(steps)} }}"


def _floats() -> str:
    """PTX that decodes two words of mxfp4 to four pairs of numbers: number * operand."""
    shifts = (("shl", 12, "shl", 6), ("shl", 8, "shl", 2), ("shl", 4, "shr", 2), ("shl", 0, "shr", 6))
    steps = [
        f"{a}.b32 t, $4, {i}; {b}.b32 u, $4, {j}; and.b32 u, u, 0x01C001C0; lop3.b32 t, t, 0x80008000, u, 0xEA; "
        f"fma.rn.bf16x2 ${n}, t, ${5 + n}, zero;"
        for n, (a, i, b, j) in enumerate(shifts)
    ]
    return f"{{ .reg .b32 t, u, zero; mov.b32 zero, 0x80008000; {' '.join(steps)} }}"


_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")
FOUR_BF16, FOUR_FP16 = tl.constexpr((tl.bfloat16,) * 4), tl.constexpr((tl.float16,) * 4)
_INT4_BF16 = tl.constexpr(_integers("0x43004300", "0x3F803F80", "fma.rn.bf16x2 ${}, t, one, ${};"))
_INT4_FP16 = tl.constexpr(_integers("0x64006400", "0", "add.rn.f16x2 ${}, t, ${};"))
MXFP4_BF16 = tl.constexpr(_floats())
_PAIR = (
    " prmt.b32 t, {}, 0, {}; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0; lop3.b32 t, t, 0x80008000, u, 0xEA;"
    " fma.rn.bf16x2 {}, t, large, zero;"
)
_SET = "{ .reg .b32 t, u, large, zero; mov.b32 large, 0x7B807B80; mov.b32 zero, 0x80008000;"
_TWO_FP8_BF16 = tl.constexpr(_SET + _PAIR.format("$1", "0x1404", "$0") + " }")
FOUR_FP8_BF16 = tl.constexpr(_SET + _PAIR.format("$2", "0x1404", "$0") + _PAIR.format("$2", "0x3424", "$1") + " }")


@triton.jit
def int4_offset(zero, dtype: tl.constexpr):
    """What `decode_words` adds, for zero points of int32."""
    base: tl.constexpr = 1024 if dtype == tl.float16 else 128
    return (-base - zero).to(dtype)


@triton.jit
def mxfp4_factor(exponent, dtype: tl.constexpr, c: tl.constexpr):
    """What `decode_words` multiplies by, for exponents of scales, uint8, of at most 128: 2**(exponent - 127), and
    2**126 times that with `c.pairs`.
    """
    if c.pairs:
        return ((exponent.to(tl.int32) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return tl.exp2(exponent.to(tl.float32) - 127).to(dtype)


@triton.jit
def decode_words(words, operands, dtype: tl.constexpr, c: tl.constexpr):
    """The numbers of the four codes of each word, a tuple.

    Args:
        words: int16 [rows, columns], the first code in the lowest bits.
        operands: for each code, dtype [rows, 1]: `int4_offset` or `mxfp4_factor`.
        dtype: of the numbers; with pairs, bfloat16 or, for int4, float16.
        c: with `kind`: "int4", codes less their zero points, or "mxfp4", codes times their scales; and `pairs`.
    """
    if not c.pairs:
        return (
            _decode_word(words, 0, operands[0], dtype, c),
            _decode_word(words, 1, operands[1], dtype, c),
            _decode_word(words, 2, operands[2], dtype, c),
            _decode_word(words, 3, operands[3], dtype, c),
        )
    else:
        a, b, d, e = operands
        if c.kind == "mxfp4":
            return tl.inline_asm_elementwise(MXFP4_BF16, _REGISTERS, [words, a, b, d, e], FOUR_BF16, True, 2)
        elif dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(_INT4_BF16, _REGISTERS, [words, a, b, d, e], FOUR_BF16, True, 2)
        else:
            return tl.inline_asm_elementwise(_INT4_FP16, _REGISTERS, [words, a, b, d, e], FOUR_FP16, True, 2)


@triton.jit
def _decode_word(words, place: tl.constexpr, operand, dtype: tl.constexpr, c: tl.constexpr):
    code = (words.to(tl.int32) >> (4 * place)) & 15
    if c.kind == "int4":
        base: tl.constexpr = 1024 if dtype == tl.float16 else 128
        return (code + base).to(dtype) + operand
    else:
        size, odd = code & 7, code & 1
        # Four times the number, which is a multiple of 1/4.
        quarters = tl.where(size < 2, 2 * odd, (2 + odd) << (size >> 1))
        number = tl.where(code < 8, quarters, -quarters).to(tl.float32) * 0.25
        return (number * operand.to(tl.float32)).to(dtype)


@triton.jit
def decode_bytes(codes, zero, dtype: tl.constexpr, c: tl.constexpr):
    """The numbers of codes of 8 bits.

    Args:
        codes: fp8: float8_e4m3fn or, where the GPU does not convert it, its bytes as uint8. int8: int8.
        zero: int8: zero points, int32 [rows, 1], or None.
        dtype: of the numbers.
        c: with `kind`, "fp8" or "int8".
    """
    if c.kind == "int8":
        if zero is None:
            return codes.to(dtype)
        else:
            return (codes.to(tl.int32) - zero).to(dtype)
    elif c.pairs and dtype == tl.bfloat16:
        if c.wgmma:
            return tl.inline_asm_elementwise(_TWO_FP8_BF16, "=r,r", [codes], tl.bfloat16, True, 2)
        else:
            return tl.inline_asm_elementwise(FOUR_FP8_BF16, "=&r,=r,r", [codes], tl.bfloat16, True, 4)
    elif codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        # The exponent of float16 is 8 lower.
        return (half.to(tl.float32) * 256.0).to(dtype)
    else:
        return codes.to(dtype)
