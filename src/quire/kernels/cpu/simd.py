"""Vectors of float32 as values in Numba: loads that widen any storage type, arithmetic, fma, exp2, tanh.

Vectors along a head have eight lanes, because head_dim is a multiple of 8 and loops then need no remainder. Vectors
along query rows have WIDE lanes, the number that suits the CPU's registers best. LLVM compiles both to the instructions
that the CPU has (AVX2, AVX-512, NEON).

Arrays are flat. The dtype of an array stands for a storage type:

    float32 float32 · int16 bfloat16 · uint16 float16 · int8 float8_e4m3fn · uint8 float8_e5m2

Kernels are compiled for each storage type of such an array. `rows.py` has functions for arrays of bytes, whose storage
type is known at run time.

Loads and stores do not check offsets: callers keep them within the arrays.
"""

from __future__ import annotations

import operator

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from quire.kernels.cpu.jit import function
from quire.kernels.cpu.numba_internals import get_or_insert_function, unpack_tuple

LANES = 8
WIDE = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
f32 = np.float32

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_I16, _I8 = ir.IntType(16), ir.IntType(8)


class VecType(types.Type):
    """The Numba type of a vector of `lanes` float32, which takes one register or two."""

    def __init__(self, lanes: int) -> None:
        super().__init__(name=f"f32x{lanes}")
        self.lanes = lanes
        self.floats, self.ints = ir.VectorType(_F32, lanes), ir.VectorType(_I32, lanes)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.floats)


_EIGHT, _WIDE = VecType(LANES), VecType(WIDE)


def _call(builder, name: str, result, *args):
    """Call an LLVM intrinsic."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(get_or_insert_function(builder.module, signature, name), args)


def _const(vector, x):
    return ir.Constant(vector, [x] * vector.count)


def _pointer(context, builder, storage, array_type, array, offset):
    """The address of the element at `offset` of an array whose bytes are elements of a storage type."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, context.get_data_type(storage).as_pointer()), [offset])


def _load_as(builder, pointer, element, lanes: int):
    vector = ir.VectorType(element, lanes)
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)


def _widen_bf16(builder, pointer, vec):
    bits = builder.zext(_load_as(builder, pointer, _I16, vec.lanes), vec.ints)
    return builder.bitcast(builder.shl(bits, _const(vec.ints, 16)), vec.floats)


def _extend_f16(builder, bits, vec):
    """Convert 16-bit integers that hold the bits of float16."""
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), vec.lanes)), vec.floats)


def _widen_f16(builder, pointer, vec):
    return _extend_f16(builder, _load_as(builder, pointer, _I16, vec.lanes), vec)


def _widen_e5m2(builder, pointer, vec):
    """The bits of an e5m2 number are the upper byte of an equal float16."""
    shorts = ir.VectorType(_I16, vec.lanes)
    bits = builder.zext(_load_as(builder, pointer, _I8, vec.lanes), shorts)
    return _extend_f16(builder, builder.shl(bits, _const(shorts, 8)), vec)


def _widen_e4m3(builder, pointer, vec):
    """Exponent and mantissa, at their place in a float16, are 2**-8 of the value; the only NaN has magnitude 0x7f."""
    shorts = ir.VectorType(_I16, vec.lanes)
    bits = builder.zext(_load_as(builder, pointer, _I8, vec.lanes), shorts)
    magnitude = builder.and_(bits, _const(shorts, 0x7F))
    sign = builder.shl(builder.and_(bits, _const(shorts, 0x80)), _const(shorts, 8))
    half = builder.or_(sign, builder.shl(magnitude, _const(shorts, 7)))
    value = builder.fmul(_extend_f16(builder, half, vec), _const(vec.floats, 256.0))
    is_nan = builder.icmp_unsigned("==", magnitude, _const(shorts, 0x7F))
    return builder.select(is_nan, _const(vec.floats, float("nan")), value)


STORAGE_TYPES = (types.float32, types.int16, types.uint16, types.int8, types.uint8)
_WIDEN = {
    types.float32: lambda builder, pointer, vec: _load_as(builder, pointer, _F32, vec.lanes),
    types.int16: _widen_bf16,
    types.uint16: _widen_f16,
    types.int8: _widen_e4m3,
    types.uint8: _widen_e5m2,
}


def _narrow_bf16(builder, value, vec):
    """Round to nearest even; NaN stays NaN."""
    bits = builder.bitcast(value, vec.ints)
    odd = builder.and_(builder.lshr(bits, _const(vec.ints, 16)), _const(vec.ints, 1))
    rounded = builder.add(builder.add(bits, _const(vec.ints, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    upper = builder.select(is_nan, _const(vec.ints, 0x7FC0), builder.lshr(rounded, _const(vec.ints, 16)))
    return builder.trunc(upper, ir.VectorType(_I16, vec.lanes))


def _narrow_f16(builder, value, vec):
    return builder.fptrunc(value, ir.VectorType(ir.HalfType(), vec.lanes))


_NARROW = {types.float32: lambda builder, value, vec: value, types.int16: _narrow_bf16, types.uint16: _narrow_f16}


def _loader(vec, storage=None):
    """A function (array, offset) that loads array[offset : offset + lanes] and widens it to float32. `storage` is the
    storage type of an array of bytes.
    """

    @intrinsic
    def load(typingctx, array, offset):
        kind = storage or array.dtype

        def codegen(context, builder, signature, args):
            return _WIDEN[kind](builder, _pointer(context, builder, kind, signature.args[0], *args), vec)

        return vec(array, types.intp), codegen

    return load


def _storer(storage=None):
    """A function (array, offset, value) that stores a vector at array[offset : offset + lanes], rounded to the storage
    type, which is float32, bfloat16 or float16. `storage` is that of an array of bytes.
    """

    @intrinsic
    def store(typingctx, array, offset, value):
        kind = storage or array.dtype

        def codegen(context, builder, signature, args):
            narrowed = _NARROW[kind](builder, args[2], value)
            pointer = _pointer(context, builder, kind, signature.args[0], *args[:2])
            builder.store(narrowed, builder.bitcast(pointer, narrowed.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(array, types.intp, value), codegen

    return store


load, load_wide, store = _loader(_EIGHT), _loader(_WIDE), _storer()


# Loads and stores for arrays of bytes, one per storage type. Outputs have one of the first three storage types.
LOADERS = [_loader(_EIGHT, t) for t in STORAGE_TYPES]
STORERS = [_storer(t) for t in STORAGE_TYPES[:3]]


@intrinsic
def prefetch(typingctx, array, offset):
    """Prefetch the cache line of array[offset]."""

    def codegen(context, builder, signature, args):
        pointer = builder.bitcast(_pointer(context, builder, array.dtype, signature.args[0], *args), _I8.as_pointer())
        read, near, data = (ir.Constant(_I32, x) for x in (0, 3, 1))
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, near, data)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


def _splat(vec):
    def codegen(context, builder, signature, args):
        nothing = ir.Constant(vec.floats, ir.Undefined)
        one = builder.insert_element(nothing, args[-1], ir.Constant(_I32, 0))
        return builder.shuffle_vector(one, nothing, _const(vec.ints, 0))

    return codegen


@intrinsic
def splat(typingctx, x):
    """A number in eight lanes."""
    return _EIGHT(types.float32), _splat(_EIGHT)


@intrinsic
def splat_wide(typingctx, x):
    """A number in WIDE lanes."""
    return _WIDE(types.float32), _splat(_WIDE)


@intrinsic
def splat_like(typingctx, v, x):
    """A number in as many lanes as v has."""
    return v(v, types.float32), _splat(v)


def _llvm(name: str, vec, arity: int):
    """The signature and code of an LLVM intrinsic that computes lane by lane."""

    def codegen(context, builder, signature, args):
        return _call(builder, f"llvm.{name}.v{vec.lanes}f32", vec.floats, *args)

    return vec(*[vec] * arity), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """The lanes of a * b + c, each rounded once."""
    return _llvm("fma", a, 3)


@intrinsic
def maximum(typingctx, a, b):
    """The larger of each pair of lanes."""
    return _llvm("maxnum", a, 2)


@intrinsic
def reduce_add(typingctx, a):
    """The sum of the lanes, in an order that LLVM chooses."""

    def codegen(context, builder, signature, args):
        name = f"llvm.vector.reduce.fadd.v{a.lanes}f32"
        callee = get_or_insert_function(builder.module, ir.FunctionType(_F32, [_F32, a.floats]), name)
        return builder.call(callee, [ir.Constant(_F32, 0.0), args[0]], fastmath=("reassoc",))

    return types.float32(a), codegen


@intrinsic
def reduce_max(typingctx, a):
    """The largest lane."""
    name = f"llvm.vector.reduce.fmax.v{a.lanes}f32"
    return types.float32(a), lambda context, builder, signature, args: _call(builder, name, _F32, *args)


@intrinsic
def where_below(typingctx, x, bound, below, otherwise):
    """`below` in the lanes in which x < bound, else `otherwise` (also where x is NaN)."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return x(x, x, x, x), codegen


@function
def load4(x, o, step):
    """Four vectors of eight lanes, from offsets o, o + step, o + 2 * step and o + 3 * step."""
    return load(x, o), load(x, o + step), load(x, o + 2 * step), load(x, o + 3 * step)


@function
def load4_wide(x, o):
    """Four vectors of WIDE lanes that follow each other, from offset o."""
    return load_wide(x, o), load_wide(x, o + WIDE), load_wide(x, o + 2 * WIDE), load_wide(x, o + 3 * WIDE)


@function
def store4(x, o, step, four):
    """Store four vectors at offsets o, o + step, o + 2 * step and o + 3 * step."""
    for i in range(4):
        store(x, o + i * step, four[i])


@intrinsic
def transpose(typingctx, eight):
    """Of eight vectors of eight lanes: vector i of the result has lane i of each."""
    low, high = ([*zip(range(i, i + 4), range(i + 8, i + 12), strict=True)] for i in (0, 4))
    masks = [ir.Constant(ir.VectorType(_I32, 8), [lane for pair in half for lane in pair]) for half in (low, high)]

    def codegen(context, builder, signature, args):
        x = unpack_tuple(builder, args[0])
        # Each step interleaves the first half of all 64 lanes with the second half.
        for _ in range(3):
            x = [builder.shuffle_vector(x[i], x[i + 4], mask) for i in range(4) for mask in masks]
        return context.make_tuple(builder, signature.return_type, x)

    return eight(eight), codegen


@function
def transpose_block(x, x0, x_step, y, y0, y_step):
    """y[y0 + i * y_step + j] = x[x0 + j * x_step + i] for i and j below 8."""
    eight = transpose(load4(x, x0, x_step) + load4(x, x0 + 4 * x_step, x_step))
    store4(y, y0, y_step, eight[:4])
    store4(y, y0 + 4 * y_step, y_step, eight[4:])


@function
def fma4(a, four, c):
    """Four vectors, a * four + c: a is one vector, `four` and c are four each."""
    return fma(a, four[0], c[0]), fma(a, four[1], c[1]), fma(a, four[2], c[2]), fma(a, four[3], c[3])


def _binary(symbol, method: str) -> None:
    """Define an operator of two vectors of equal widths by a method of the LLVM builder."""

    @intrinsic
    def operation(typingctx, a, b):
        return a(a, a), lambda context, builder, signature, args: getattr(builder, method)(*args)

    @overload(symbol)
    def typed(a, b):
        if isinstance(a, VecType) and a == b:
            return lambda a, b: operation(a, b)


_binary(operator.add, "fadd")
_binary(operator.sub, "fsub")
_binary(operator.mul, "fmul")
_binary(operator.truediv, "fdiv")


@intrinsic
def _scale_by_power(typingctx, p, shifted):
    """Multiply p by 2**n, where n is in the low bits of `shifted` = n + 1.5 * 2**23."""

    def codegen(context, builder, signature, args):
        exponent = builder.shl(builder.bitcast(args[1], p.ints), _const(p.ints, 23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], p.ints), exponent), p.floats)

    return p(p, p), codegen


_EXP2 = tuple(map(f32, (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 0.24022651, 0.69314718)))


@function
def _fraction_power(r):
    """(2**r - 1) / r for |r| <= 1/2, to one part in 10**8, by a polynomial."""
    p = splat_like(r, _EXP2[0])
    for c in _EXP2[1:]:
        p = fma(p, r, splat_like(r, c))
    return p


@function
def exp2(x):
    """2**x for x <= 0; 0 for x < -126, NaN for NaN."""
    # Adding 1.5 * 2**23 rounds x to an integer in the low bits.
    magic = splat_like(x, f32(12582912.0))
    low = splat_like(x, f32(-126.0))
    bounded = where_below(x, low, low, x)
    shifted = bounded + magic
    r = bounded - (shifted - magic)
    p = fma(_fraction_power(r), r, splat_like(x, f32(1.0)))
    return where_below(x, low, splat_like(x, f32(0.0)), _scale_by_power(p, shifted))


@function
def tanh(x):
    """tanh(x), to a few parts in 10**7 also near 0: e / (e + 2), with e = exp(2x) - 1 free of cancellation."""
    y = x * splat_like(x, f32(2.8853900817779268))
    top, low = splat_like(x, f32(40.0)), splat_like(x, f32(-40.0))
    y = where_below(top, y, top, where_below(y, low, low, y))
    magic = splat_like(x, f32(12582912.0))
    shifted = y + magic
    r = y - (shifted - magic)
    one = splat_like(x, f32(1.0))
    power = _scale_by_power(one, shifted)
    e = fma(_fraction_power(r) * r, power, power - one)
    return e / (e + splat_like(x, f32(2.0)))
