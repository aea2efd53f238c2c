"""Attention of few query rows over many keys: K and V are read in place, once, and widened in registers.

The keys of a request are cut into blocks, and programs take equal shares of all blocks (split-KV, see `schedule.py`). A
program walks over its segment of a request block by block, and computes all KV heads of a block together: on the CPU
neighbouring heads share memory pages, which a walk head by head would visit once per head. Partial states of requests
that are divided among programs are combined in the order of their keys.

Vectors hold eight elements of a head.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from quire.kernels.cpu.jit import function, kernel
from quire.kernels.cpu.mask import apply_mask, visible_to_all
from quire.kernels.cpu.params import key_offset
from quire.kernels.cpu.rows import load_rows, scale_rows, store_rows
from quire.kernels.cpu.schedule import BLOCK, ROWS, block_range, request_starts, segments
from quire.kernels.cpu.simd import LANES, f32, fma4, load, load4, prefetch, reduce_add, splat, store4
from quire.kernels.cpu.softmax import finalize, merge_states, transform_row, update_row

# The distance of prefetches in elements: 32 elements of 16 bits fill a cache line.
PREFETCH = 32


@function
def padded_rows(p, b):
    """The number of query rows of one KV head of request b, rounded up to a multiple of ROWS."""
    return (p.q_len[b] * p.group + ROWS - 1) // ROWS * ROWS


@function
def scores(q, q0, k, offsets, h_offset, s, rows, n, dim):
    """s[r, t] = q[r] . k[t] for n keys, four rows by two keys at a time; n is even, s is [rows, BLOCK]."""
    zero = splat(f32(0))
    for r in range(0, rows, ROWS):
        for t in range(0, n, 2):
            x, y = (zero, zero, zero, zero), (zero, zero, zero, zero)
            for d in range(0, dim, LANES):
                four = load4(q, q0 + r * dim + d, dim)
                x = fma4(load(k, offsets[t] + h_offset + d), four, x)
                y = fma4(load(k, offsets[t + 1] + h_offset + d), four, y)
            for i in range(ROWS):
                o = (r + i) * BLOCK + t
                s[o], s[o + 1] = reduce_add(x[i]), reduce_add(y[i])


@function
def accumulate(s, v, offsets, h_offset, acc, acc0, rows, n, dim):
    """acc[r] += sum over t of s[r, t] * v[t] for n values, four rows by two vectors at a time."""
    for r in range(0, rows, ROWS):
        for d in range(0, dim, 2 * LANES):
            # An odd last vector is computed twice, with equal results.
            e = min(d + LANES, dim - LANES)
            o, u = acc0 + r * dim + d, acc0 + r * dim + e
            x, y = load4(acc, o, dim), load4(acc, u, dim)
            for t in range(n):
                i = r * BLOCK + t
                four = splat(s[i]), splat(s[i + BLOCK]), splat(s[i + 2 * BLOCK]), splat(s[i + 3 * BLOCK])
                x = fma4(load(v, offsets[t] + h_offset + d), four, x)
                y = fma4(load(v, offsets[t] + h_offset + e), four, y)
            store4(acc, o, dim, x)
            store4(acc, u, dim, y)


@function
def prefetch_head(x, offsets, h_offset, n, dim):
    """Prefetch n keys or values of a KV head."""
    for t in range(n):
        for d in range(0, dim, PREFETCH):
            prefetch(x, offsets[t] + h_offset + d)


@function
def load_queries(p, b, rows):
    """A request's queries, scaled: float32 [kv heads, rows, dim_qk], with zeros in rows past the request's."""
    n, q = p.q_len[b] * p.group, np.zeros(p.num_kv_heads * rows * p.dim_qk, np.float32)
    offsets, factors = np.empty(n, np.int64), np.empty(n, np.float32)
    for h in range(p.num_kv_heads):
        for r in range(n):
            head = h * p.group + r % p.group
            offsets[r] = (p.q_start[b] + r // p.group) * p.q_strides[0] + head * p.q_strides[1]
            factors[r] = p.scale[head]
        load_rows(p.q_storage, p.q, offsets, n, p.dim_qk, q, h * rows * p.dim_qk)
        scale_rows(q, h * rows * p.dim_qk, n, p.dim_qk, factors)
    return q


@function
def attend_segment(p, k, v, b, start, end, acc, m, l):
    """Compute the state (acc, m, l) of a request over blocks start to end, counted from the first one that it sees."""
    rows = padded_rows(p, b)
    q = load_queries(p, b, rows)
    s = np.empty(rows * BLOCK, np.float32)
    k_offsets, v_offsets = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    acc[: p.num_kv_heads * rows * p.dim_vo] = 0
    m[: p.num_kv_heads * rows] = -np.inf
    l[: p.num_kv_heads * rows] = 0
    skipped = block_range(p, b)[0]
    dim_qk, dim_vo = p.dim_qk, p.dim_vo
    k_head, v_head = p.k_strides[2], p.v_strides[2]
    transformed = len(p.slopes) > 0 or p.cap > 0
    for j0 in range((skipped + start) * BLOCK, (skipped + end) * BLOCK, BLOCK):
        n = min(BLOCK, p.kv_len[b] - j0)
        even = n + n % 2
        for t in range(even):
            j = min(j0 + t, p.kv_len[b] - 1)
            k_offsets[t] = key_offset(p, p.k_strides, b, j)
            v_offsets[t] = key_offset(p, p.v_strides, b, j)
        masked = not visible_to_all(p, b, 0, p.q_len[b], j0, j0 + BLOCK)
        for h in range(p.num_kv_heads):
            if h + 1 < p.num_kv_heads:
                prefetch_head(k, k_offsets, (h + 1) * k_head, n, dim_qk)
                prefetch_head(v, v_offsets, (h + 1) * v_head, n, dim_vo)
            scores(q, h * rows * dim_qk, k, k_offsets, h * k_head, s, rows, even, dim_qk)
            for r in range(rows):
                if transformed:
                    transform_row(p, b, h, r, s, r * BLOCK, j0)
                if masked:
                    apply_mask(p, b, r // p.group, j0, BLOCK, s, r * BLOCK, 1)
                update_row(s, r * BLOCK, m, l, h * rows + r, acc, dim_vo)
            accumulate(s, v, v_offsets, h * v_head, acc, h * rows * dim_vo, rows, n, dim_vo)


@function
def store_output(p, b, acc, m, l):
    """Write a request's rows of out and lse from its state, whose acc is scaled."""
    rows, n = padded_rows(p, b), p.q_len[b] * p.group
    offsets, factors = np.empty(n, np.int64), np.empty(n, np.float32)
    for h in range(p.num_kv_heads):
        for r in range(n):
            offsets[r], factors[r] = finalize(p, b, h, r, m[h * rows + r], l[h * rows + r])
        scale_rows(acc, h * rows * p.dim_vo, n, p.dim_vo, factors)
        store_rows(p.out_storage, acc, h * rows * p.dim_vo, n, p.dim_vo, p.out, offsets)


@function
def combine(p, b, first, last, acc, m, l):
    """Merge the partial states of request b that programs first to last, both included, have stored, in the order of
    their keys, and write its output; acc, m and l are the workspace of `stream`.
    """
    slot, rows = 2 * first + 1, p.num_kv_heads * padded_rows(p, b)
    for other in range(2 * first + 2, 2 * last + 1, 2):
        merge_states(rows, p.dim_vo, acc[slot], m[slot], l[slot], acc[other], m[other], l[other])
    store_output(p, b, acc[slot], m[slot], l[slot])


@kernel
def stream(p, k, v, requests, programs, acc, m, l):
    """Compute attention of the given requests, int64 [n], by `programs` programs. k and v are those of p, as arrays of
    their storage type, for each of which the kernel is compiled.

    The workspace is float32: acc [2 * programs, rows * dim_vo], m and l [2 * programs, rows], with as many rows as the
    largest request has over all KV heads. Program i stores its partial state of a request that an earlier program
    started in slot 2i, and of a request that a later program continues in slot 2i + 1.
    """
    blocks = np.zeros(len(requests), np.int64)
    for i in range(len(requests)):
        start, end = block_range(p, requests[i])
        blocks[i] = end - start
    starts = request_starts(blocks)
    share = (starts[-1] + programs - 1) // programs
    for program in prange(programs):
        for i, start, end in segments(program, programs, starts, blocks):
            b, slot = requests[i], 2 * program + (1 if start == 0 else 0)
            attend_segment(p, k, v, b, start, end, acc[slot], m[slot], l[slot])
            if start == 0 and end == blocks[i]:
                store_output(p, b, acc[slot], m[slot], l[slot])
    # There is too little work for a second parallel loop.
    for program in range(programs):
        for i, start, end in segments(program, programs, starts, blocks):
            if start > 0 and end == blocks[i]:
                combine(p, requests[i], starts[i] // share, program, acc, m, l)
