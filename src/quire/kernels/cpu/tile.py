"""Attention of many query rows: tiles of keys, widened once, against panels of rows.

A work item is a tile of queries of one KV head of one request. It walks over the keys that it sees; of each tile of
keys it computes, panel by panel and inside the first-level cache, transposed logits S' = K Q', their softmax, and O' +=
V' P'. Rows are the lanes of the vectors throughout: nothing but the queries and the outputs is ever transposed, and the
softmax needs no sums across lanes.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from quire.kernels.cpu.jit import function, kernel
from quire.kernels.cpu.problem import all_seen, close, first_key, key_offset, sees
from quire.kernels.cpu.simd import (
    LANES,
    WIDE,
    exp2,
    f32,
    fma,
    load,
    load_wide,
    maximum,
    splat,
    splat_wide,
    store,
    tanh,
    where_below,
)

PANEL = 4 * WIDE  # rows
PANELS = 256 // PANEL  # in a tile of queries
KEYS = 128  # in a tile


@function
def load_four(c, o):
    return load_wide(c, o), load_wide(c, o + WIDE), load_wide(c, o + 2 * WIDE), load_wide(c, o + 3 * WIDE)


@function
def store_four(c, o, x0, x1, x2, x3):
    store(c, o, x0)
    store(c, o + WIDE, x1)
    store(c, o + 2 * WIDE, x2)
    store(c, o + 3 * WIDE, x3)


@function
def multiply(a, a_row, a_column, b, b0, c, c0, rows, depth, add):
    """c[i, :] = (c[i, :] if add) + sum over x of a[i, x] * b[x, :] for panels b and c; rows is a multiple of 4."""
    zero = splat_wide(f32(0))
    for i in range(0, rows, 4):
        o = c0 + i * PANEL
        w0, w1, w2, w3, x0, x1, x2, x3 = zero, zero, zero, zero, zero, zero, zero, zero
        y0, y1, y2, y3, z0, z1, z2, z3 = zero, zero, zero, zero, zero, zero, zero, zero
        if add:
            w0, w1, w2, w3 = load_four(c, o)
            x0, x1, x2, x3 = load_four(c, o + PANEL)
            y0, y1, y2, y3 = load_four(c, o + 2 * PANEL)
            z0, z1, z2, z3 = load_four(c, o + 3 * PANEL)
        for x in range(depth):
            b_0, b_1, b_2, b_3 = load_four(b, b0 + x * PANEL)
            e = i * a_row + x * a_column
            t = splat_wide(a[e])
            w0, w1, w2, w3 = fma(t, b_0, w0), fma(t, b_1, w1), fma(t, b_2, w2), fma(t, b_3, w3)
            t = splat_wide(a[e + a_row])
            x0, x1, x2, x3 = fma(t, b_0, x0), fma(t, b_1, x1), fma(t, b_2, x2), fma(t, b_3, x3)
            t = splat_wide(a[e + 2 * a_row])
            y0, y1, y2, y3 = fma(t, b_0, y0), fma(t, b_1, y1), fma(t, b_2, y2), fma(t, b_3, y3)
            t = splat_wide(a[e + 3 * a_row])
            z0, z1, z2, z3 = fma(t, b_0, z0), fma(t, b_1, z1), fma(t, b_2, z2), fma(t, b_3, z3)
        store_four(c, o, w0, w1, w2, w3)
        store_four(c, o + PANEL, x0, x1, x2, x3)
        store_four(c, o + 2 * PANEL, y0, y1, y2, y3)
        store_four(c, o + 3 * PANEL, z0, z1, z2, z3)


@function
def rotate(p, x, x0, position):
    """A head in place by ROPE_LLAMA: element d with element d + half, by the position's angles."""
    half = p.dim_qk // 2
    angles = abs(position) * p.dim_qk
    back = f32(-1 if position < 0 else 1)  # queries may lie before the first key: their angles are negative
    for d in range(half):
        cos, sin = p.rope[angles + d], back * p.rope[angles + half + d]
        a, b = x[x0 + d], x[x0 + d + half]
        x[x0 + d], x[x0 + d + half] = a * cos - b * sin, b * cos + a * sin


@function
def widen(p, x, strides, b, h, t0, n, dim, tile):
    """Keys t0 to t0 + n of a KV head to float32 [n rounded up to 4, dim], zeros behind them."""
    for t in range(n):
        source = key_offset(p, strides, b, t0 + t) + h * strides[2]
        for d in range(0, dim, LANES):
            store(tile, t * dim + d, load(x, source + d))
    tile[n * dim : (n + 3) // 4 * 4 * dim] = 0


@function
def pack_queries(p, b, h, first, rows, q):
    """Rows of a KV head as panels [panel, dim_qk, PANEL], scaled and rotated; rows that there are not stay 0."""
    row = np.empty(p.dim_qk, np.float32)
    for r in range(first, first + rows):
        i, head = r // p.group, h * p.group + r % p.group
        source = (p.q_start[b] + i) * p.q_strides[0] + head * p.q_strides[1]
        for d in range(0, p.dim_qk, LANES):
            store(row, d, load(p.q, source + d) * splat(p.scale[head]))
        if len(p.rope):
            rotate(p, row, 0, i + p.kv_len[b] - p.q_len[b])
        target = (r - first) // PANEL * PANEL * p.dim_qk + (r - first) % PANEL
        for d in range(p.dim_qk):
            q[target + d * PANEL] = row[d]


@function
def shape_panel(p, b, h, r0, s, t0, n):
    """ALiBi, then the soft cap, on a panel's logits of n keys."""
    slopes, positions = np.zeros(PANEL, np.float32), np.zeros(PANEL, np.float32)
    for r in range(PANEL):
        positions[r] = (r0 + r) // p.group + p.kv_len[b] - p.q_len[b]
        if len(p.slopes):
            slopes[r] = p.slopes[h * p.group + (r0 + r) % p.group]
    cap = splat_wide(f32(p.cap))
    for t in range(n):
        for r in range(0, PANEL, WIDE):
            x = load_wide(s, t * PANEL + r)
            if len(p.slopes):
                x = fma(load_wide(slopes, r), splat_wide(f32(t0 + t)) - load_wide(positions, r), x)
            if p.cap > 0:
                x = cap * tanh(x / cap)
            store(s, t * PANEL + r, x)


@function
def hide_panel(p, b, r0, s, t0, n):
    """-inf where a row does not see a key."""
    past = p.kv_len[b] - p.q_len[b] - t0
    for r in range(PANEL):
        i = (r0 + r) // p.group
        first = min(max(past + i - p.window, 0), n) if p.window >= 0 else 0
        end = min(max(past + i + 1, 0), n) if p.causal else n
        for t in range(first):
            s[t * PANEL + r] = -np.inf
        for t in range(end, n):
            s[t * PANEL + r] = -np.inf
        if len(p.mask):
            for t in range(first, end):
                if not sees(p, b, i, t0 + t):
                    s[t * PANEL + r] = -np.inf


@function
def soften_panel(s, n, m, l, row, acc, acc0, dim):
    """Logits of n keys to weights, the rows' maxima and sums brought up to date, their outputs so far rescaled."""
    lowest, zero = splat_wide(f32(-3e38)), splat_wide(f32(0))
    for r in range(0, PANEL, WIDE):
        m_old = load_wide(m, row + r)
        top = m_old
        for t in range(n):
            top = maximum(top, load_wide(s, t * PANEL + r))
        base = where_below(top, lowest, zero, top)  # -inf: nothing seen so far
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
def finish(p, b, h, first, rows, acc, m, l):
    """A tile's panels [panel, dim_vo, PANEL] to its rows of out, and their lse."""
    row = np.empty(p.dim_vo, np.float32)
    for r in range(rows):
        head, token = h * p.group + (first + r) % p.group, p.q_start[b] + (first + r) // p.group
        gain, lse = close(p, head, m[r], l[r])
        p.lse[token * p.num_kv_heads * p.group + head] = lse
        source = r // PANEL * PANEL * p.dim_vo + r % PANEL
        for d in range(p.dim_vo):
            row[d] = acc[source + d * PANEL] * gain
        target = token * p.out_strides[0] + head * p.out_strides[1]
        for d in range(0, p.dim_vo, LANES):
            store(p.out, target + d, load(row, d))


@function
def attend_panel(p, b, h, r0, clear, k, v, q, q0, s, acc, acc0, m, l, row, t0, n):
    """One panel, whose first row is r0 of the KV head, against n keys from t0."""
    multiply(k, p.dim_qk, 1, q, q0, s, 0, (n + 3) // 4 * 4, p.dim_qk, False)
    if len(p.slopes) > 0 or p.cap > 0:
        shape_panel(p, b, h, r0, s, t0, n)
    if not clear:
        hide_panel(p, b, r0, s, t0, n)
    soften_panel(s, n, m, l, row, acc, acc0, p.dim_vo)
    multiply(v, 1, p.dim_vo, s, 0, acc, acc0, p.dim_vo, n, True)


@function
def attend_tile(p, b, h, i0, i1, k, v, q, s, acc, m, l):
    """Queries i0 to i1 of one KV head of a request; the other arguments are scratch."""
    past, first, rows = p.kv_len[b] - p.q_len[b], i0 * p.group, (i1 - i0) * p.group
    q[:], acc[:], m[:], l[:] = 0, 0, -np.inf, 0
    pack_queries(p, b, h, first, rows, q)
    end = min(p.kv_len[b], past + i1) if p.causal else p.kv_len[b]
    for t0 in range(first_key(p, b, i0) // KEYS * KEYS, end, KEYS):
        n = min(KEYS, end - t0)
        widen(p, p.k, p.k_strides, b, h, t0, n, p.dim_qk, k)
        widen(p, p.v, p.v_strides, b, h, t0, n, p.dim_vo, v)
        if len(p.rope):
            for t in range(n):
                rotate(p, k, t * p.dim_qk, t0 + t)
        for row in range(0, rows, PANEL):
            i, j = (first + row) // p.group, min((first + row + PANEL - 1) // p.group, p.q_len[b] - 1)
            seen = min(n, past + j + 1 - t0) if p.causal else n
            if seen > 0:
                clear = all_seen(p, b, i, j - i + 1, t0, seen)
                q0, acc0 = row * p.dim_qk, row * p.dim_vo
                attend_panel(p, b, h, first + row, clear, k, v, q, q0, s, acc, acc0, m, l, row, t0, seen)
    finish(p, b, h, first, rows, acc, m, l)


@kernel
def tile(p, items, programs):
    """Attention by tiles of queries. items: int64 [n, 4] of (request, KV head, first query, end query), costliest
    first; program i takes items i, i + programs, ...
    """
    for program in prange(programs):
        rows = PANEL * PANELS
        k, v = np.empty((KEYS + 4) * p.dim_qk, np.float32), np.empty((KEYS + 4) * p.dim_vo, np.float32)
        q, acc = np.empty(rows * p.dim_qk, np.float32), np.empty(rows * p.dim_vo, np.float32)
        s, m, l = np.empty((KEYS + 4) * PANEL, np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32)
        for item in range(program, len(items), programs):
            b, h, i0, i1 = items[item]
            attend_tile(p, b, h, i0, i1, k, v, q, s, acc, m, l)
