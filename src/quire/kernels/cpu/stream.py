"""Attention of few query rows over many keys: K and V are read in place, once, and widened in registers.

A request's keys are cut into blocks; programs take equal shares of all blocks (`schedule.py`). A program walks a
piece of a request block by block, all KV heads of a block together: on the CPU neighbouring heads share memory pages,
so that going through a request head by head would walk the same pages once per head. Pieces that are not a whole
request leave their state behind, and are merged in the order of their keys.

Vectors hold eight elements of a head.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from quire.kernels.cpu.jit import function, kernel
from quire.kernels.cpu.problem import all_seen, close, first_key, key_offset, sees
from quire.kernels.cpu.schedule import pieces, row_starts
from quire.kernels.cpu.simd import LANES, exp2, f32, fma, highest, load, maximum, prefetch, splat, store, tanh, total

BLOCK = 32  # keys
ROWS = 4  # query rows that share a loaded key
LINE = 32  # elements between prefetches: a cache line of 16-bit numbers


@function
def padded_rows(p, b):
    """Rows of one KV head, padded to what the loops take at once."""
    return (p.q_len[b] * p.group + ROWS - 1) // ROWS * ROWS


@function
def scores(q, q0, k, keys, h_offset, s, rows, n, dim):
    """s[r, t] = q[r] . k[t], four rows by two keys at a time; n is even."""
    zero = splat(f32(0))
    for r in range(0, rows, ROWS):
        q1 = q0 + r * dim
        for t in range(0, n, 2):
            k0, k1 = keys[t] + h_offset, keys[t + 1] + h_offset
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            for d in range(0, dim, LANES):
                x, y = load(k, k0 + d), load(k, k1 + d)
                w = load(q, q1 + d)
                a0, b0 = fma(x, w, a0), fma(y, w, b0)
                w = load(q, q1 + dim + d)
                a1, b1 = fma(x, w, a1), fma(y, w, b1)
                w = load(q, q1 + 2 * dim + d)
                a2, b2 = fma(x, w, a2), fma(y, w, b2)
                w = load(q, q1 + 3 * dim + d)
                a3, b3 = fma(x, w, a3), fma(y, w, b3)
            o = r * BLOCK + t
            s[o], s[o + 1] = total(a0), total(b0)
            s[o + BLOCK], s[o + BLOCK + 1] = total(a1), total(b1)
            s[o + 2 * BLOCK], s[o + 2 * BLOCK + 1] = total(a2), total(b2)
            s[o + 3 * BLOCK], s[o + 3 * BLOCK + 1] = total(a3), total(b3)


@function
def accumulate(s, v, keys, h_offset, acc, acc0, rows, n, dim):
    """acc[r] += sum over t of s[r, t] * v[t], four rows by two vectors at a time."""
    for r in range(0, rows, ROWS):
        for d in range(0, dim, 2 * LANES):
            e = min(d + LANES, dim - LANES)  # an odd last vector is done twice, with the same result
            o, u = acc0 + r * dim + d, acc0 + r * dim + e
            a0, a1, a2, a3 = load(acc, o), load(acc, o + dim), load(acc, o + 2 * dim), load(acc, o + 3 * dim)
            b0, b1, b2, b3 = load(acc, u), load(acc, u + dim), load(acc, u + 2 * dim), load(acc, u + 3 * dim)
            for t in range(n):
                x, y = load(v, keys[t] + h_offset + d), load(v, keys[t] + h_offset + e)
                i = r * BLOCK + t
                w = splat(s[i])
                a0, b0 = fma(w, x, a0), fma(w, y, b0)
                w = splat(s[i + BLOCK])
                a1, b1 = fma(w, x, a1), fma(w, y, b1)
                w = splat(s[i + 2 * BLOCK])
                a2, b2 = fma(w, x, a2), fma(w, y, b2)
                w = splat(s[i + 3 * BLOCK])
                a3, b3 = fma(w, x, a3), fma(w, y, b3)
            store(acc, o, a0)
            store(acc, o + dim, a1)
            store(acc, o + 2 * dim, a2)
            store(acc, o + 3 * dim, a3)
            store(acc, u, b0)
            store(acc, u + dim, b1)
            store(acc, u + 2 * dim, b2)
            store(acc, u + 3 * dim, b3)


@function
def fetch_ahead(x, keys, h_offset, n, dim):
    """Ask for the rows of the next head while this one is computed."""
    for t in range(n):
        for d in range(0, dim, LINE):
            prefetch(x, keys[t] + h_offset + d)


@function
def shape_row(p, b, h, r, s, s0, t0):
    """ALiBi, then the soft cap, on one row's logits of a block."""
    lanes = np.arange(LANES).astype(np.float32)
    lane, cap = load(lanes, 0), splat(f32(p.cap))
    position = r // p.group + p.kv_len[b] - p.q_len[b]
    for t in range(0, BLOCK, LANES):
        x = load(s, s0 + t)
        if len(p.slopes):
            x = fma(splat(p.slopes[h * p.group + r % p.group]), lane + splat(f32(t0 + t - position)), x)
        if p.cap > 0:
            x = cap * tanh(x / cap)
        store(s, s0 + t, x)


@function
def soften_row(s, s0, m, l, row, acc, dim):
    """Logits of a block to weights, the row's maximum and sum brought up to date, and its output so far rescaled."""
    top = splat(m[row])
    for t in range(s0, s0 + BLOCK, LANES):
        top = maximum(top, load(s, t))
    m_new = highest(top)
    base = splat(m_new if m_new > -np.inf else f32(0))
    rescale = exp2(splat(m[row]) - base)
    weights = splat(f32(0))
    for t in range(s0, s0 + BLOCK, LANES):
        x = exp2(load(s, t) - base)
        store(s, t, x)
        weights = weights + x
    factor = highest(rescale)
    l[row] = l[row] * factor + total(weights)
    m[row] = m_new
    if factor != f32(1):
        for d in range(row * dim, (row + 1) * dim, LANES):
            store(acc, d, load(acc, d) * rescale)


@function
def gather_queries(p, b, rows):
    """A request's queries, float32 [kv heads, rows, dim_qk], scaled, padded with zeros."""
    gathered = np.zeros(p.num_kv_heads * rows * p.dim_qk, np.float32)
    for h in range(p.num_kv_heads):
        for r in range(p.q_len[b] * p.group):
            head = h * p.group + r % p.group
            source = (p.q_start[b] + r // p.group) * p.q_strides[0] + head * p.q_strides[1]
            for d in range(0, p.dim_qk, LANES):
                store(gathered, (h * rows + r) * p.dim_qk + d, load(p.q, source + d) * splat(p.scale[head]))
    return gathered


@function
def attend_piece(p, b, first, last, acc, m, l):
    """Blocks first to last of a request, counted from its first visible one, into the state (acc, m, l)."""
    rows = padded_rows(p, b)
    q = gather_queries(p, b, rows)
    s = np.empty(rows * BLOCK, np.float32)
    k_keys, v_keys = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    acc[: p.num_kv_heads * rows * p.dim_vo] = 0
    m[: p.num_kv_heads * rows] = -np.inf
    l[: p.num_kv_heads * rows] = 0
    start = first_key(p, b, 0) // BLOCK * BLOCK
    k, v, dim_qk, dim_vo = p.k, p.v, p.dim_qk, p.dim_vo  # taking an array out of p counts references, atomically
    k_head, v_head = p.k_strides[2], p.v_strides[2]
    shaped = len(p.slopes) > 0 or p.cap > 0
    for t0 in range(start + first * BLOCK, start + last * BLOCK, BLOCK):
        n = min(BLOCK, p.kv_len[b] - t0)
        even = n + n % 2
        for t in range(even):
            j = min(t0 + t, p.kv_len[b] - 1)
            k_keys[t] = key_offset(p, p.k_strides, b, j)
            v_keys[t] = key_offset(p, p.v_strides, b, j)
        clear = all_seen(p, b, 0, p.q_len[b], t0, BLOCK)
        for h in range(p.num_kv_heads):
            if h + 1 < p.num_kv_heads:
                fetch_ahead(k, k_keys, (h + 1) * k_head, n, dim_qk)
                fetch_ahead(v, v_keys, (h + 1) * v_head, n, dim_vo)
            scores(q, h * rows * dim_qk, k, k_keys, h * k_head, s, rows, even, dim_qk)
            for r in range(rows):
                if shaped:
                    shape_row(p, b, h, r, s, r * BLOCK, t0)
                if not clear:
                    for t in range(BLOCK):
                        if not sees(p, b, r // p.group, t0 + t):
                            s[r * BLOCK + t] = -np.inf
                soften_row(s, r * BLOCK, m, l, h * rows + r, acc, dim_vo)
            accumulate(s, v, v_keys, h * v_head, acc, h * rows * dim_vo, rows, n, dim_vo)


@function
def finish(p, b, acc, m, l):
    """A request's state to its rows of out and lse."""
    rows = padded_rows(p, b)
    for h in range(p.num_kv_heads):
        for r in range(p.q_len[b] * p.group):
            head, row, token = h * p.group + r % p.group, h * rows + r, p.q_start[b] + r // p.group
            gain, lse = close(p, head, m[row], l[row])
            p.lse[token * p.num_kv_heads * p.group + head] = lse
            target = token * p.out_strides[0] + head * p.out_strides[1]
            for d in range(0, p.dim_vo, LANES):
                store(p.out, target + d, load(acc, row * p.dim_vo + d) * splat(gain))


@function
def join(p, b, acc, m, l, part_acc, part_m, part_l):
    """The state of two runs of keys, into (acc, m, l)."""
    for row in range(p.num_kv_heads * padded_rows(p, b)):
        top = max(m[row], part_m[row])
        safe = top if top > -np.inf else f32(0)
        old, new = np.exp2(m[row] - safe), np.exp2(part_m[row] - safe)
        l[row] = l[row] * old + part_l[row] * new
        m[row] = top
        for d in range(row * p.dim_vo, (row + 1) * p.dim_vo, LANES):
            store(acc, d, fma(load(acc, d), splat(f32(old)), load(part_acc, d) * splat(f32(new))))


@function
def merge_parts(p, b, begin, end, part_acc, part_m, part_l):
    """Merge what programs begin to end left of a request, in the order of its keys, and write it out."""
    slot = 2 * begin + 1
    acc, m, l = part_acc[slot], part_m[slot], part_l[slot]
    for program in range(begin + 1, end + 1):
        join(p, b, acc, m, l, part_acc[2 * program], part_m[2 * program], part_l[2 * program])
    finish(p, b, acc, m, l)


@kernel
def stream(p, requests, programs, part_acc, part_m, part_l):
    """Attention of the given requests, int64 [n], by `programs` programs.

    part_acc: float32 [2 * programs, rows * dim_vo], part_m and part_l: float32 [2 * programs, rows], rows being the
    most that a request has over all KV heads. Program i leaves the end of a request that began before it in slot 2i,
    and the begin of one that goes on in slot 2i + 1.
    """
    blocks = np.zeros(len(requests), np.int64)
    for i in range(len(requests)):
        b = requests[i]
        if p.kv_len[b] > 0:
            blocks[i] = (p.kv_len[b] + BLOCK - 1) // BLOCK - first_key(p, b, 0) // BLOCK
    starts = row_starts(blocks, 1, 1)
    share = (starts[-1] + programs - 1) // programs
    for program in prange(programs):
        for piece in pieces(program, programs, starts, blocks, 1):
            b, first, last = requests[piece[0]], piece[2], piece[3]
            slot = 2 * program + (1 if first == 0 else 0)
            attend_piece(p, b, first, last, part_acc[slot], part_m[slot], part_l[slot])
            if first == 0 and last == piece[4]:
                finish(p, b, part_acc[slot], part_m[slot], part_l[slot])
    for program in range(programs):  # too little work for a second parallel loop
        for piece in pieces(program, programs, starts, blocks, 1):
            if piece[2] > 0 and piece[3] == piece[4]:
                merge_parts(p, requests[piece[0]], starts[piece[0]] // share, program, part_acc, part_m, part_l)
