"""Online softmax: the state of rows, its update by a block of logits, the merge of two states, and the final division.

A row's state is the maximum m of its base-2 logits so far, the sum l of 2**(logit - m), and acc, the sum of values
weighted by 2**(logit - m), which is divided by l at the end (Milakov and Gimelshein, 2018). A row that has seen no key
has m = -inf and l = 0.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.jit import function
from quire.kernels.cpu.schedule import BLOCK, PANEL
from quire.kernels.cpu.simd import (
    LANES,
    WIDE,
    exp2,
    f32,
    fma,
    load,
    load_wide,
    maximum,
    reduce_add,
    reduce_max,
    splat,
    splat_wide,
    store,
    where_below,
)


@function
def update_row(s, s0, m, l, row, acc, dim):
    """Turn a row's logits s[s0 : s0 + BLOCK] into weights, update its m and l, and rescale its acc, [rows, dim]."""
    top = splat(m[row])
    for t in range(s0, s0 + BLOCK, LANES):
        top = maximum(top, load(s, t))
    m_new = reduce_max(top)
    base = splat(m_new if m_new > -np.inf else f32(0))
    rescale = exp2(splat(m[row]) - base)
    weights = splat(f32(0))
    for t in range(s0, s0 + BLOCK, LANES):
        x = exp2(load(s, t) - base)
        store(s, t, x)
        weights = weights + x
    factor = reduce_max(rescale)
    l[row] = l[row] * factor + reduce_add(weights)
    m[row] = m_new
    if factor != f32(1):
        for d in range(row * dim, (row + 1) * dim, LANES):
            store(acc, d, load(acc, d) * rescale)


@function
def update_panel(s, n, m, l, row, acc, acc0, dim):
    """Turn logits s, [n, PANEL], into weights, update m and l of the panel's rows, which start at `row`, and rescale
    their acc, [dim, PANEL] from acc0.
    """
    lowest, zero = splat_wide(f32(-3e38)), splat_wide(f32(0))
    for r in range(0, PANEL, WIDE):
        m_old = load_wide(m, row + r)
        top = m_old
        for t in range(n):
            top = maximum(top, load_wide(s, t * PANEL + r))
        base = where_below(top, lowest, zero, top)  # rows that have seen no key have top = -inf
        rescale = exp2(m_old - base)
        weights = zero
        for t in range(n):
            x = exp2(load_wide(s, t * PANEL + r) - base)
            store(s, t * PANEL + r, x)
            weights = weights + x
        store(l, row + r, fma(load_wide(l, row + r), rescale, weights))
        store(m, row + r, top)
        for d in range(dim):
            o = acc0 + d * PANEL + r
            store(acc, o, load_wide(acc, o) * rescale)


@function
def merge_states(rows, dim, acc, m, l, other_acc, other_m, other_l):
    """Merge the states of the same rows over other keys into (acc, m, l); acc is [rows, dim]."""
    for row in range(rows):
        top = max(m[row], other_m[row])
        base = top if top > -np.inf else f32(0)
        old, new = np.exp2(m[row] - base), np.exp2(other_m[row] - base)
        l[row] = l[row] * old + other_l[row] * new
        m[row] = top
        for d in range(row * dim, (row + 1) * dim, LANES):
            store(acc, d, fma(load(acc, d), splat(f32(old)), load(other_acc, d) * splat(f32(new))))


@function
def finalize(p, head, m, l):
    """(factor, lse): the factor from a row's acc to its output, its head's v_scale and sink included, and its base-2
    lse. They are (0, -inf) for a row without a sink that has seen no key.
    """
    top, weight, factor = m, l, f32(1)
    if len(p.sinks):
        top = max(m, p.sinks[head])
        factor = np.exp2(m - top)
        weight = l * factor + np.exp2(p.sinks[head] - top)
    if weight == 0:
        return f32(0), f32(-np.inf)
    return factor / weight * p.v_scale[head], top + np.log2(weight)
