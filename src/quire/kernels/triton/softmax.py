"""The online softmax in base 2. A state (acc, m, l) holds, for each row of a tile and the keys so far, the weighted sum
of values, the largest logit and the sum of weights.

Sums of two products are written as `fma`. The compiler would otherwise choose which of the products is rounded, not
always alike in two kernels, and the bits of a row would depend on the kernel that computes it.
"""

from __future__ import annotations

import triton
from triton import language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def empty_state(c: tl.constexpr):
    """The state of no keys."""
    m = tl.full([c.block_m], float("-inf"), tl.float32)
    l = tl.full([c.block_m], 0.0, tl.float32)
    return tl.full([c.block_m, c.block_dv], 0.0, tl.float32), m, l


@triton.jit
def update_state(m, l, s, scale, masked: tl.constexpr):
    """Add the logits `scale * s` of a block of keys. Unless the block is masked, each row must see a key of it.

    Returns the block's weights, the factor of what `acc` has summed, and the new m and l.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(m_new == float("-inf"), 0.0, m_new) if masked else m_new
    p = tl.exp2(s * scale - base[:, None])
    alpha = tl.exp2(m - base)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def merge_states(acc, m, l, acc_2, m_2, l_2):
    """The state of the keys of two states."""
    m_new = tl.maximum(m, m_2)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, alpha_2 = tl.exp2(m - base), tl.exp2(m_2 - base)
    acc = tl.fma(acc, alpha[:, None], acc_2 * alpha_2[:, None])
    return acc, m_new, tl.fma(l, alpha, l_2 * alpha_2)


@triton.jit
def add_sink(acc, m, l, sink):
    """Add a logit per row, in base e, that has no value."""
    sink = sink.to(tl.float32) * LOG2E
    m_new = tl.maximum(m, sink)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - base)
    return acc * alpha[:, None], m_new, l * alpha + tl.exp2(sink - base)
