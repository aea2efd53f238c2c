"""The state of the online softmax, and how two states become one.

The state of a query row over some keys: m, the largest logit in base 2, or less than that by LARGEST_GROWTH at most; l,
the sum of exp2(logit - m); acc, the sum of exp2(logit - m) * value. Over no keys m is -inf, and l and acc are 0.
"""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.triton_internals import aggregate

LOG2E = tl.constexpr(1.4426950408889634)
# The growth of maxima in base 2 up to which a state is not rescaled.
LARGEST_GROWTH = gl.constexpr(8.0)


@aggregate
class SoftmaxState:
    """The state of several rows. acc: [rows, head_dim], or as the kernel says; m, l: [rows]."""

    acc: gl.tensor | tl.tuple
    m: gl.tensor
    l: gl.tensor


@gluon.jit
def empty_state(rows: gl.constexpr, layout: gl.constexpr):
    """Return m and l of rows over no keys."""
    return gl.full([rows], -float("inf"), gl.float32, layout), gl.full([rows], 0.0, gl.float32, layout)


@gluon.jit
def exponent_base(m):
    """What is subtracted from logits in exponents: m, or 0 if that is -inf, so that a difference is never NaN."""
    return gl.where(m == -float("inf"), 0.0, m)


@gluon.jit
def next_m(m, s, scale):
    """Return m, [rows], after a block of keys whose logits, before they are multiplied by scale, are s, [rows, keys].
    It stays the same unless a scaled logit exceeds it by more than LARGEST_GROWTH. So states are rescaled in few
    blocks, and probabilities are at most 2**LARGEST_GROWTH.
    """
    top = gl.max(s, 1) * scale
    # If both are -inf, their difference is NaN, and m stays.
    return gl.where(top - m > LARGEST_GROWTH, top, m)


@gluon.jit
def scaled_sums(l, alpha):
    """Return l, several sums of probabilities for each row, [rows, sums], times alpha, [rows]."""
    return l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None]


@gluon.constexpr_function
def _rescaling(count):
    """PTX that multiplies `count` accumulators of a thread, of two rows, by the factors of their rows, and skips that
    where the factors of all rows of the warp are 1.
    """
    copies = "".join(f"mov.b32 ${i}, ${count + i}; " for i in range(count))
    products = "".join(f"mul.f32 ${i}, ${count + i}, ${2 * count + i % 4 // 2 * 2}; " for i in range(count))
    # Accumulators alternate in pairs between the two rows.
    factors = f"${2 * count}", f"${2 * count + 2}"
    changed = "setp.neu.f32 p, {}, 0f3F800000; setp.neu.or.f32 p, {}, 0f3F800000, p;".format(*factors)
    return (
        f"{{ .reg .pred p; {copies} {changed} vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni ONES; "
        f"{products} ONES: }}"
    )


@gluon.constexpr_function
def _rescaling_constraints(count):
    return ",".join(["=f"] * count + ["f"] * 2 * count)


@gluon.jit
def rescale(acc, alpha):
    """Multiply the rows of acc, which has the layout of a product of one warp group, by alpha. Warps in which
    alpha is 1 for all rows skip the multiplication.
    """
    count: gl.constexpr = min(64, acc.shape[1] // 2)
    ptx: gl.constexpr = _rescaling(count)
    constraints: gl.constexpr = _rescaling_constraints(count)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    alpha += gl.zeros_like(acc)
    return gl.inline_asm_elementwise(ptx, constraints, [acc, alpha], gl.float32, is_pure=True, pack=count)


@gluon.jit
def merge(m, l, m_2, l_2):
    """Return m and l of two states merged, and the factor of each acc. Explicit fma fixes the rounding."""
    top = gl.maximum(m, m_2)
    base = exponent_base(top)
    alpha, alpha_2 = gl.exp2(m - base), gl.exp2(m_2 - base)
    return top, gl.fma(l, alpha, l_2 * alpha_2), alpha, alpha_2


@gluon.jit
def merge_acc(acc, acc_2, alpha, alpha_2):
    """Return acc of two states merged, with factors from `merge` that broadcast."""
    return gl.fma(acc, gl.zeros_like(acc) + alpha, acc_2 * alpha_2)


@gluon.jit
def add_sinks(acc, m, l, sink):
    """Return acc, m and l with one more logit per row, in base e, that has no value."""
    sink = sink * LOG2E
    top = gl.maximum(m, sink)
    base = gl.where(top == float("-inf"), 0.0, top)
    alpha = gl.exp2(m - base)
    return acc * alpha[:, None], top, l * alpha + gl.exp2(sink - base)
