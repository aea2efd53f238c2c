"""Tiles in parts, whose keys several programs have: the program that has a tile's first keys collects what those after
it on the line leave.

Each number tells itself that it is there, for none is left as 0: nobody waits until writes have arrived, nor counts
them. And nobody waits forever, since programs that come later on the line start earlier.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.results import write

MOST = gl.constexpr(16)  # rows that are collected together


class Parts(NamedTuple):
    """A place for each program: int32 [programs, c.part_rows, head_dim], and (largest logit, sum of weights) in
    [programs, c.part_rows, 2]. Numbers are float32, 0 is none.
    """

    rows: tl.tensor
    sums: tl.tensor


@gluon.jit
def leave(acc, m, l, parts, program, count, c: gl.constexpr):
    """A tile's part, of keys after its first, where the program that has those looks for it: `count` rows, and what is
    collected with them.
    """
    layout: gl.constexpr = acc.type.layout
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, acc.shape[0], flat)
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    run: gl.constexpr = min(c.part_rows, MOST)
    here = (r < c.part_rows) & (r // run * run < count)
    put(parts.rows + program * (c.part_rows * c.dim) + (r[:, None] * c.dim + d[None, :]), acc, here[:, None])
    sums = parts.sums + program * (c.part_rows * 2) + r * 2
    put(sums, gl.convert_layout(m, flat), here)
    put(sums + 1, gl.convert_layout(l, flat), here)


# Whoever reads it meanwhile finds a number whole or not at all.
_PUT = gl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }")


@gluon.jit
def put(places, x, here):
    """Numbers for `take`: -0 for 0, since what has not been written yet is 0."""
    bits = x.to(gl.int32, bitcast=True)
    bits = gl.where(bits == 0, -(1 << 31), bits)
    none = gl.zeros_like(bits)  # gives all of them the same shape
    here = here | none.to(gl.int1)
    gl.inline_asm_elementwise(_PUT, "=r,l,r,r", [places + none, bits, here.to(gl.int32)], gl.int32, False, 1)


@gluon.jit
def take(places, here):
    """What others put in these places, [., ., .], once it is there; then zeros are there again."""
    bits = gl.load(places, here, 1, volatile=True)
    while _least(bits) == 0:
        bits = gl.load(places, here, 1, volatile=True)
    gl.store(places, 0, here)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _least(bits):
    return gl.min(gl.min(gl.min(bits.to(gl.uint32, bitcast=True), 0), 1), 0)


@gluon.jit
def collect(acc, m, l, parts, results, request, h, program, final, spare, spare_sums, c: gl.constexpr):
    """Add to the state of a tile's first keys, [rows, head_dim], what programs after this one, to `final`, leave of the
    tile, in that order, and finish it. spare, spare_sums: shared memory that nobody needs any more.
    """
    R: gl.constexpr = min(c.part_rows, MOST)
    # Parts at a time: 64 or 32 numbers of a thread, as registers have room for, and 8 for the last ones.
    many: gl.constexpr = max((64 if R < MOST else 32) * 128 // (R * c.dim), 1)
    few: gl.constexpr = max(8 * 128 // (R * c.dim), 1)
    plane: gl.constexpr = gl.BlockedLayout([1, c.dim // 32], [1, 32], [4, 1], [1, 0])
    keep(acc, m, l, spare, spare_sums, 0, 1)
    gl.thread_barrier()
    rows = request.q_len * c.group
    final = gl.minimum(final, gl.num_programs(0) - 1)
    for r0 in range(0, gl.minimum(rows, c.part_rows), R):
        acc_r, m_r, l_r = kept(spare, spare_sums, 0, 1, r0 // R, plane, c)
        first = program + 1
        while final - first >= few:
            acc_r, m_r, l_r = add_parts(acc_r, m_r, l_r, parts, first, final, many, r0, c)
            first += many
        while final >= first:
            acc_r, m_r, l_r = add_parts(acc_r, m_r, l_r, parts, first, final, few, r0, c)
            first += few
        write(acc_r, m_r, l_r, results, request.q_begin, h, r0, rows, c)


@gluon.jit
def keep(acc, m, l, spare, sums, which: gl.constexpr, states: gl.constexpr):
    """A state, [rows, head_dim], to shared memory that nobody needs any more: its numbers to `spare`, and to `sums`,
    which has room for those of some states, its largest logits and sums of weights.
    """
    rows: gl.constexpr = acc.shape[0]
    gl.thread_barrier()
    spare._reinterpret(gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(acc)
    sums = sums._reinterpret(gl.float32, [2 * states, rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums.index(2 * which).store(m)
    sums.index(2 * which + 1).store(l)


@gluon.jit
def kept(spare, sums, which: gl.constexpr, states: gl.constexpr, some, plane: gl.constexpr, c: gl.constexpr):
    """Rows of a state from there: the some-th as many as are collected together."""
    R: gl.constexpr = min(c.part_rows, MOST)
    runs: gl.constexpr = c.rows // R
    flat: gl.constexpr = gl.SliceLayout(1, plane)
    x = spare._reinterpret(gl.float32, [runs, R, c.dim], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(some)
    sums = sums._reinterpret(gl.float32, [2 * states * runs, R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    m, l = sums.index(2 * which * runs + some), sums.index((2 * which + 1) * runs + some)
    return x.load(plane), m.load(flat), l.load(flat)


@gluon.jit
def add_parts(acc, m, l, parts, first, final, N: gl.constexpr, r0, c: gl.constexpr):
    """Add to the state of rows r0 and on what N programs from `first` on leave, none of them after `final`. Their reads
    overlap; each warp has rows of its own.
    """
    R: gl.constexpr = acc.shape[0]
    cube: gl.constexpr = gl.BlockedLayout([1, 1, c.dim // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    flat: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, pairs))
    n = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, pairs)))[:, None, None]
    r = gl.arange(0, R, flat)[None, :, None]
    which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, pairs)))[None, None, :]
    sums = parts.sums + (first * c.part_rows + r0) * 2 + ((n * c.part_rows + r) * 2 + which)
    m_n, l_n = take(sums, n <= final - first).split()
    n = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None, None]
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, cube)))[None, :, None]
    d = gl.arange(0, c.dim, gl.SliceLayout(0, gl.SliceLayout(1, cube)))[None, None, :]
    rows = parts.rows + (first * c.part_rows + r0) * c.dim + ((n * c.part_rows + r) * c.dim + d)
    acc_n = take(rows, n <= final - first)
    m_0, l_0 = gl.convert_layout(m, flat), gl.convert_layout(l, flat)
    n = gl.arange(0, N, gl.SliceLayout(1, m_n.type.layout))[:, None]
    m_n = gl.where(n <= final - first, m_n, -float("inf"))
    top = gl.maximum(m_0, gl.max(m_n, 0))
    base = gl.where(top == -float("inf"), 0.0, top)
    weight, shrink = gl.exp2(m_n - base[None, :]), gl.exp2(m_0 - base)
    total = l_0 * shrink + gl.sum(l_n * weight, 0)
    weight = gl.convert_layout(weight, gl.SliceLayout(2, cube))[:, :, None]
    more = gl.convert_layout(gl.sum(acc_n * weight, 0), acc.type.layout)
    acc = acc * gl.convert_layout(shrink, m.type.layout)[:, None] + more
    return acc, gl.convert_layout(top, m.type.layout), gl.convert_layout(total, l.type.layout)
