"""What becomes of rows: those of a whole tile go to the output; parts go to slots, and the last program to leave one
there puts all of the tile's together, in the order of their keys, so that bits do not depend on who it was.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = tl.constexpr(1.4426950408889634)


class Results(NamedTuple):
    """Where rows go, and where parts of tiles do: float32 [slots, rows, head_dim], and (largest logit, sum of weights)
    in [slots, rows, 2]. None is written beyond, whatever the tables say.
    """

    out: tl.tensor
    lse: tl.tensor
    o_token: tl.tensor
    o_head: tl.tensor
    part: tl.tensor
    part_ml: tl.tensor
    arrivals: tl.tensor
    slots: tl.tensor
    rows: tl.tensor
    sinks: tl.tensor
    v_scale: tl.tensor
    v_gain: tl.tensor


@gluon.jit
def save(acc, m, l, results, slot, r0, rows, c: gl.constexpr):
    """A tile's part, or its rows from r0 on, to its slot. acc: [some, head_dim]; m, l: [some]."""
    layout: gl.constexpr = acc.type.layout
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    count = gl.where(slot < results.slots, gl.minimum(rows, results.rows), 0)
    r = r0 + gl.arange(0, acc.shape[0], flat)
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    at = slot.to(gl.int64) * results.rows + r
    gl.store(results.part + at[:, None] * c.dim + d[None, :], acc, (r < count)[:, None])
    gl.store(results.part_ml + at * 2, gl.convert_layout(m, flat), r < count)
    gl.store(results.part_ml + at * 2 + 1, gl.convert_layout(l, flat), r < count)


class Part(NamedTuple):
    """Of which tile a part is: `rows` rows of head h from token q_begin on, in shares of programs origin to final. None
    where final < origin.
    """

    q_begin: tl.tensor
    rows: tl.tensor
    h: tl.tensor
    origin: tl.tensor
    final: tl.tensor


@gluon.jit
def join(results, first, last, c: gl.constexpr):
    """Count a program's parts, of at most two tiles, as arrived, and merge what is complete with them."""
    which = gl.arange(0, 2, gl.BlockedLayout([1], [32], [4], [0]))
    origin = gl.where(which == 0, first.origin, last.origin)
    more = gl.where(which == 0, first.final, last.final) - origin
    gl.thread_barrier()  # all of the parts are written before they count
    before = gl.atomic_add(results.arrivals + origin, which * 0 + 1, more >= 0)
    complete = gl.sum(((more >= 0) & (before == more)).to(gl.int32) << which, 0)
    if complete & 1:
        merge(results, first, c)
    if complete & 2:
        merge(results, last, c)


@gluon.jit
def merge(results, part, c: gl.constexpr):
    """Put together all parts of a tile, and finish it."""
    rows = gl.minimum(part.rows, results.rows)
    for r0 in range(0, rows, c.merge_rows):
        acc, m, l = together(results, r0, rows, part.origin, part.origin, part.final, 1, c)
        write(acc, m, l, results, part.q_begin, part.h, r0, rows, c)
    gl.store(results.arrivals + part.origin, 0)


@gluon.jit
def together(results, r0, rows, origin, first, final, step, c: gl.constexpr):
    """Rows r0 and on (of `rows`) of what each `step`-th program from first to final left of a tile that begins in
    program origin. As many parts at a time as registers hold, so that their reads overlap; each warp has rows of its
    own.
    """
    R: gl.constexpr = c.merge_rows
    N: gl.constexpr = 64 * 128 // (R * c.dim)
    each: gl.constexpr = c.dim // 32
    cube: gl.constexpr = gl.BlockedLayout([1, 1, each], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    plane: gl.constexpr = gl.BlockedLayout([1, each], [1, 32], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, cube))
    n = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None]
    d = gl.arange(0, c.dim, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    r = r0 + gl.arange(0, R, flat)
    m = gl.full([R], -float("inf"), gl.float32, flat)
    l = gl.full([R], 0.0, gl.float32, flat)
    acc = gl.full([R, c.dim], 0.0, gl.float32, gl.SliceLayout(0, cube))
    for p in range(first, final + 1, N * step):
        program = p + n * step
        slot = gl.where(program == origin, 2 * program + 1, 2 * program)
        at = slot.to(gl.int64) * results.rows + r[None, :]
        here = (program <= final) & (slot < results.slots) & (r < rows)[None, :]
        m_n = gl.load(results.part_ml + at * 2, here, -float("inf"))
        l_n = gl.load(results.part_ml + at * 2 + 1, here, 0.0)
        acc_n = gl.load(results.part + at[:, :, None] * c.dim + d[None, None, :], here[:, :, None], 0.0)
        top = gl.maximum(m, gl.max(m_n, 0))
        base = gl.where(top == -float("inf"), 0.0, top)
        weight, shrink = gl.exp2(m_n - base[None, :]), gl.exp2(m - base)
        m, l = top, l * shrink + gl.sum(l_n * weight, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(0, cube)))
        acc = acc * shrink[:, None] + gl.sum(acc_n * weight[:, :, None], 0)
    return gl.convert_layout(acc, plane), m, l


@gluon.jit
def write(acc, m, l, results, q_begin, h, r0, rows, c: gl.constexpr):
    """Rows r0 and on of a tile to out and lse, sinks joined in; a row that saw nothing is 0 and -inf."""
    layout: gl.constexpr = acc.type.layout
    m, l = gl.convert_layout(m, gl.SliceLayout(1, layout)), gl.convert_layout(l, gl.SliceLayout(1, layout))
    r = r0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    real = r < rows
    token, head = q_begin + r // c.group, h * c.group + r % c.group
    if c.sinks:
        sink = gl.load(results.sinks + head, real, 0.0) * LOG2E
        top = gl.maximum(m, sink)
        shrink = gl.exp2(m - top)
        acc, l, m = acc * shrink[:, None], l * shrink + gl.exp2(sink - top), top
    acc = acc * (results.v_gain / gl.where(l == 0.0, 1.0, l))[:, None]
    if c.v_scale:
        acc = acc * gl.load(results.v_scale + head // (c.group // c.pair), real, 0.0)[:, None]
    at = token.to(gl.int64) * results.o_token + head.to(gl.int64) * results.o_head
    gl.store(results.out + at[:, None] + d[None, :], acc.to(results.out.dtype.element_ty), real[:, None])
    if c.lse:
        at = token * (c.heads * c.group) + head
        gl.store(results.lse + at, gl.where(l == 0.0, -float("inf"), m + gl.log2(l)), real)


@gluon.jit
def clear_padding(results, q_end, tokens, c: gl.constexpr):
    """Zero the rows that belong to no request, spread over all programs."""
    layout: gl.constexpr = gl.BlockedLayout([1, c.dim // 32], [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))[None, :]
    row = gl.arange(0, 4, gl.SliceLayout(1, layout))
    heads: gl.constexpr = c.heads * c.group
    for i in range(q_end + gl.program_id(0), tokens, gl.num_programs(0)):
        token = gl.to_tensor(i)
        for h0 in range(0, heads, 4):
            head = h0 + row
            at = token.to(gl.int64) * results.o_token + head.to(gl.int64) * results.o_head
            zero = gl.full([4, c.dim], 0.0, results.out.dtype.element_ty, layout)
            gl.store(results.out + at[:, None] + d, zero, (head < heads)[:, None])
            if c.lse:
                gl.store(results.lse + token * heads + head, -float("inf"), head < heads)
