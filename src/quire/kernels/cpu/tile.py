"""Attention of many query rows: tiles of keys, widened to float32 once, against panels of query rows.

A work tile is a run of queries of one request and one KV head. It walks over the keys that its queries see, tile by
tile. For each tile of keys it computes, panel by panel and inside the first-level cache, the transposed logits
S' = K Q', their softmax, and O' += V' P'. Query rows are the lanes of all vectors: only queries and outputs are ever
transposed, and the softmax needs no sums across lanes.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from quire.kernels.cpu.jit import function, kernel
from quire.kernels.cpu.mask import apply_mask, key_range, position, visible_to_all
from quire.kernels.cpu.params import key_offset
from quire.kernels.cpu.rows import load_rows, scale_rows, store_rows
from quire.kernels.cpu.schedule import PANEL, TILE_KEYS, TILE_ROWS
from quire.kernels.cpu.simd import LANES, WIDE, f32, fma4, load4_wide, splat_wide, store4, transpose_block
from quire.kernels.cpu.softmax import finalize, transform_panel, update_panel


@function
def matmul(a, a_row, a_column, b, b0, c, c0, rows, depth, add):
    """C = A B or, if `add`, C += A B. A has `rows` rows, a multiple of 4, and `depth` columns, with strides a_row and
    a_column; B is [depth, PANEL] from b0, C is [rows, PANEL] from c0.

    A B is summed by itself, since the rounding errors of one long sum over all tiles of keys grow with the tiles.
    """
    zero, one = splat_wide(f32(0)), splat_wide(f32(1))
    for i in range(0, rows, 4):
        o = c0 + i * PANEL
        w = x = y = z = (zero, zero, zero, zero)
        for t in range(depth):
            four = load4_wide(b, b0 + t * PANEL)
            e = i * a_row + t * a_column
            w = fma4(splat_wide(a[e]), four, w)
            x = fma4(splat_wide(a[e + a_row]), four, x)
            y = fma4(splat_wide(a[e + 2 * a_row]), four, y)
            z = fma4(splat_wide(a[e + 3 * a_row]), four, z)
        if add:
            w, x = fma4(one, load4_wide(c, o), w), fma4(one, load4_wide(c, o + PANEL), x)
            y, z = fma4(one, load4_wide(c, o + 2 * PANEL), y), fma4(one, load4_wide(c, o + 3 * PANEL), z)
        store4(c, o, WIDE, w)
        store4(c, o + PANEL, WIDE, x)
        store4(c, o + 2 * PANEL, WIDE, y)
        store4(c, o + 3 * PANEL, WIDE, z)


@function
def rotate(p, x, x0, pos):
    """Apply ROPE_LLAMA to the head x[x0 : x0 + dim_qk] in place: element d is paired with element d + dim_qk // 2."""
    half = p.dim_qk // 2
    angles = abs(pos) * p.dim_qk
    # Positions of queries are negative if there are more queries than keys.
    sign = f32(-1 if pos < 0 else 1)
    for d in range(half):
        cos, sin = p.rope[angles + d], sign * p.rope[angles + half + d]
        x1, x2 = x[x0 + d], x[x0 + d + half]
        x[x0 + d], x[x0 + d + half] = x1 * cos - x2 * sin, x2 * cos + x1 * sin


@function
def load_keys(p, x, strides, b, h, j0, n, dim, target, offsets):
    """Widen n keys or values from j0 of a KV head to float32 [n rounded up to 4, dim], with zeros in the last rows."""
    for t in range(n):
        offsets[t] = key_offset(p, strides, b, j0 + t) + h * strides[2]
    load_rows(p.kv_storage, x, offsets, n, dim, target, 0)
    target[n * dim : (n + 3) // 4 * 4 * dim] = 0


@function
def load_queries(p, b, h, r0, rows, q, loaded, offsets, factors):
    """Load rows from r0 of a KV head into panels q, [panels, dim_qk, PANEL], scaled and rotated. The arguments after q
    are scratch memory for eight rows.
    """
    for first in range(0, rows, LANES):
        n = min(LANES, rows - first)
        for t in range(n):
            r = r0 + first + t
            head = h * p.group + r % p.group
            offsets[t] = (p.q_start[b] + r // p.group) * p.q_strides[0] + head * p.q_strides[1]
            factors[t] = p.scale[head]
        loaded[n * p.dim_qk : LANES * p.dim_qk] = 0
        load_rows(p.q_storage, p.q, offsets, n, p.dim_qk, loaded, 0)
        scale_rows(loaded, 0, n, p.dim_qk, factors)
        if len(p.rope):
            for t in range(n):
                rotate(p, loaded, t * p.dim_qk, position(p, b, (r0 + first + t) // p.group))
        target = first // PANEL * PANEL * p.dim_qk + first % PANEL
        for d in range(0, p.dim_qk, LANES):
            transpose_block(loaded, d, p.dim_qk, q, target + d * PANEL, PANEL)


@function
def store_output(p, b, h, r0, rows, acc, m, l, stored, offsets, factors):
    """Write rows from r0 of a KV head to out and lse from the state (acc, m, l); acc is [panels, dim_vo, PANEL]. The
    arguments after l are scratch memory for eight rows.
    """
    for first in range(0, rows, LANES):
        n = min(LANES, rows - first)
        for t in range(n):
            r = first + t
            offsets[t], factors[t] = finalize(p, b, h, r0 + r, m[r], l[r])
        source = first // PANEL * PANEL * p.dim_vo + first % PANEL
        for d in range(0, p.dim_vo, LANES):
            transpose_block(acc, source + d * PANEL, PANEL, stored, d, p.dim_vo)
        scale_rows(stored, 0, n, p.dim_vo, factors)
        store_rows(p.out_storage, stored, 0, n, p.dim_vo, p.out, offsets)


@function
def attend_panel(p, b, h, r0, k, v, q, q0, s, acc, acc0, m, l, row, j0, n):
    """Update the state of a panel by n keys from j0. The panel's rows start at r0 of the KV head and at `row` of m and
    l, its queries at q[q0] and its acc at acc[acc0].
    """
    i0, i1 = r0 // p.group, min((r0 + PANEL - 1) // p.group + 1, p.q_len[b])
    n = min(n, key_range(p, b, i0, i1)[1] - j0)
    if n <= 0:
        return
    matmul(k, p.dim_qk, 1, q, q0, s, 0, (n + 3) // 4 * 4, p.dim_qk, False)
    if len(p.slopes) > 0 or p.cap > 0:
        transform_panel(p, b, h, r0, s, j0, n)
    if not visible_to_all(p, b, i0, i1, j0, j0 + n):
        for r in range(PANEL):
            apply_mask(p, b, (r0 + r) // p.group, j0, n, s, r, PANEL)
    update_panel(s, n, m, l, row, acc, acc0, p.dim_vo)
    matmul(v, 1, p.dim_vo, s, 0, acc, acc0, p.dim_vo, n, True)


@function
def attend_tile(p, b, h, i0, i1, k, v, q, s, acc, m, l, offsets, factors):
    """Compute queries i0 to i1 of one KV head of a request; the arguments from k on are scratch memory."""
    r0, rows = i0 * p.group, (i1 - i0) * p.group
    q[:], acc[:] = 0, 0
    m[:], l[:] = -np.inf, 0
    load_queries(p, b, h, r0, rows, q, k, offsets, factors)
    start, end = key_range(p, b, i0, i1)
    for j0 in range(start // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        n = min(TILE_KEYS, end - j0)
        load_keys(p, p.k, p.k_strides, b, h, j0, n, p.dim_qk, k, offsets)
        load_keys(p, p.v, p.v_strides, b, h, j0, n, p.dim_vo, v, offsets)
        if len(p.rope):
            for t in range(n):
                rotate(p, k, t * p.dim_qk, j0 + t)
        for row in range(0, rows, PANEL):
            attend_panel(p, b, h, r0 + row, k, v, q, row * p.dim_qk, s, acc, row * p.dim_vo, m, l, row, j0, n)
    store_output(p, b, h, r0, rows, acc, m, l, v, offsets, factors)


@kernel
def tile(p, work, programs):
    """Compute attention by the tiles of `query_tiles`, int64 [n, 4]: program i computes tiles i, i + programs, ..."""
    rows = max(TILE_ROWS, (p.group + PANEL - 1) // PANEL * PANEL)
    for program in prange(programs):
        k, v = np.empty((TILE_KEYS + 4) * p.dim_qk, np.float32), np.empty((TILE_KEYS + 4) * p.dim_vo, np.float32)
        q, acc = np.empty(rows * p.dim_qk, np.float32), np.empty(rows * p.dim_vo, np.float32)
        s, m, l = np.empty((TILE_KEYS + 4) * PANEL, np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32)
        offsets, factors = np.empty(TILE_KEYS, np.int64), np.empty(LANES, np.float32)
        for index in range(program, len(work), programs):
            b, h, i0, i1 = work[index]
            attend_tile(p, b, h, i0, i1, k, v, q, s, acc, m, l, offsets, factors)
