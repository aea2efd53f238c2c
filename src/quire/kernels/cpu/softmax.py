"""Logits to weights: ALiBi and soft cap, and the online softmax with its state, the merge of two states, and its end.

A row's state is the maximum m of its base-2 logits so far, the sum l of 2**(logit - m), and acc, the sum of values
weighted by 2**(logit - m), which is divided by l at the end (Milakov and Gimelshein, 2018). A row that has seen no key
has m = -inf and l = 0.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.jit import function
from quire.kernels.cpu.mask import position
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
    tanh,
    where_below,
)


@function
def transform_row(p, b, h, r, s, s0, j0):
    """Add ALiBi and apply the soft cap to row r's logits s[s0 : s0 + BLOCK] of keys from j0."""
    lanes = np.arange(LANES).astype(np.float32)
    lane, cap = load(lanes, 0), splat(f32(p.cap))
    here = position(p, b, r // p.group)
    for t in range(0, BLOCK, LANES):
        x = load(s, s0 + t)
        if len(p.slopes):
            x = fma(splat(p.slopes[h * p.group + r % p.group]), lane + splat(f32(j0 + t - here)), x)
        if p.cap > 0:
            x = cap * tanh(x / cap)
        store(s, s0 + t, x)


@function
def transform_panel(p, b, h, r0, s, j0, n):
    """Add ALiBi and apply the soft cap to the logits s, [n, PANEL], of rows from r0 of a KV head and keys from j0."""
    slopes, positions = np.zeros(PANEL, np.float32), np.zeros(PANEL, np.float32)
    for r in range(PANEL):
        positions[r] = position(p, b, (r0 + r) // p.group)
        if len(p.slopes):
            slopes[r] = p.slopes[h * p.group + (r0 + r) % p.group]
    cap = splat_wide(f32(p.cap))
    for t in range(n):
        for r in range(0, PANEL, WIDE):
            x = load_wide(s, t * PANEL + r)
            if len(p.slopes):
                x = fma(load_wide(slopes, r), splat_wide(f32(j0 + t)) - load_wide(positions, r), x)
            if p.cap > 0:
                x = cap * tanh(x / cap)
            store(s, t * PANEL + r, x)


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
        # Rows that have seen no key have top = -inf.
        base = where_below(top, lowest, zero, top)
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
def finalize(p, b, h, r, m, l):
    """Write the base-2 lse of row r of KV head h, its sink included; return where the row starts in out, and the factor
    from its acc to its output, v_scale included. Without a sink, a row that has seen no key has lse -inf and factor 0.
    """
    token, head = p.q_start[b] + r // p.group, h * p.group + r % p.group
    top, weight, factor = m, l, f32(1)
    if len(p.sinks):
        top = max(m, p.sinks[head])
        base = top if top > -np.inf else f32(0)
        factor = np.exp2(m - base)
        weight = l * factor + np.exp2(p.sinks[head] - base)
    seen = weight != 0
    p.lse[token * p.num_kv_heads * p.group + head] = top + np.log2(weight) if seen else -np.inf
    start = token * p.out_strides[0] + head * p.out_strides[1]
    return start, factor / weight * p.v_scale[head] if seen else f32(0)
