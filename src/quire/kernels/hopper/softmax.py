"""The state of the online softmax, and how two states become one.

The state of a query row over some keys: m, the largest logit in base 2; l, the sum of exp2(logit - m); acc, the sum of
exp2(logit - m) * value. Over no keys m is -inf, and l and acc are 0.
"""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = tl.constexpr(1.4426950408889634)


@gluon.jit
def empty_state(rows: gl.constexpr, layout: gl.constexpr):
    """Return m and l of rows over no keys."""
    return gl.full([rows], -float("inf"), gl.float32, layout), gl.full([rows], 0.0, gl.float32, layout)


@gluon.jit
def exponent_base(m):
    """What is subtracted from logits in exponents: m, or 0 if that is -inf, so that a difference is never NaN."""
    return gl.where(m == -float("inf"), 0.0, m)


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
    """The state with one more logit per row, in base e, that has no value."""
    sink = sink * LOG2E
    top = gl.maximum(m, sink)
    alpha = gl.exp2(m - top)
    return acc * alpha[:, None], top, l * alpha + gl.exp2(sink - top)
