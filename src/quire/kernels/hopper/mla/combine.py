"""Where parts of tiles of a latent layer go, and how they come together."""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.epilogue import write


class Parts(NamedTuple):
    """Where parts of tiles go: float32 [slots, rows, dim], and (largest logit, sum of weights) in [slots, rows, 2].
    None is written beyond, whatever the tables say. And counters of those that have arrived, neighbours' and all.
    """

    acc: tl.tensor
    sums: tl.tensor
    slots: tl.tensor
    rows: tl.tensor
    arrivals: tl.tensor


@gluon.jit
def parts_of(half: gl.constexpr, part, arrivals, part_rows, c: gl.constexpr):
    """Where one half of the columns of this program's lane has its parts."""
    programs, lane = gl.num_programs(0), gl.program_id(0) % c.lanes
    slots = 2 * (programs // c.lanes)
    rows, before = (2 * programs).to(gl.int64) * part_rows, (lane * slots).to(gl.int64) * part_rows
    part += half * rows * (c.dim + 2)
    arrivals += (half * c.lanes + lane) * (slots + slots // 2)
    return Parts(part + before * c.dim, part + rows * c.dim + before * 2, slots, part_rows, arrivals)


@gluon.jit
def save(acc, m, l, parts, slot, r0, rows, c: gl.constexpr):
    """A tile's part, or its rows from r0 on, to its slot. acc: [some, head_dim]; m, l: [some]."""
    layout: gl.constexpr = acc.type.layout
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    count = gl.where(slot < parts.slots, gl.minimum(rows, parts.rows), 0)
    r = r0 + gl.arange(0, acc.shape[0], flat)
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    at = slot.to(gl.int64) * parts.rows + r
    gl.store(parts.acc + at[:, None] * c.dim + d[None, :], acc, (r < count)[:, None])
    gl.store(parts.sums + at * 2, gl.convert_layout(m, flat), r < count)
    gl.store(parts.sums + at * 2 + 1, gl.convert_layout(l, flat), r < count)


@gluon.jit
def together(parts, r0, rows, origin, first, final, step, c: gl.constexpr):
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
        at = slot.to(gl.int64) * parts.rows + r[None, :]
        here = (program <= final) & (slot < parts.slots) & (r < rows)[None, :]
        m_n = gl.load(parts.sums + at * 2, here, -float("inf"))
        l_n = gl.load(parts.sums + at * 2 + 1, here, 0.0)
        acc_n = gl.load(parts.acc + at[:, :, None] * c.dim + d[None, None, :], here[:, :, None], 0.0)
        top = gl.maximum(m, gl.max(m_n, 0))
        base = gl.where(top == -float("inf"), 0.0, top)
        weight, shrink = gl.exp2(m_n - base[None, :]), gl.exp2(m - base)
        m, l = top, l * shrink + gl.sum(l_n * weight, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(0, cube)))
        acc = acc * shrink[:, None] + gl.sum(acc_n * weight[:, :, None], 0)
    return gl.convert_layout(acc, plane), m, l


@gluon.jit
def arrive(parts, results, request, tile, program, origin, final, c: gl.constexpr):
    """A part is there, of those that programs origin to final make. The last of c.fan neighbours merges theirs, and the
    last who did so what they merged: one program that did it all would take longer than many need to attend.
    """
    first = program - (program - origin) % c.fan
    last = gl.minimum(first + c.fan - 1, final)
    slot = 2 * first + (first == origin).to(gl.int32)
    neighbours = parts.arrivals + gl.num_programs(0) // c.lanes + slot
    groups = parts.arrivals + origin
    rows = gl.minimum(tile.count, parts.rows)
    gl.thread_barrier()  # all of this part is written before it counts as arrived
    if gl.atomic_add(neighbours, 1) == last - first:
        gl.store(neighbours, 0)
        step, complete = 1, final - origin < c.fan
        if final - origin >= c.fan:
            for r0 in range(0, rows, c.merge_rows):
                acc, m, l = together(parts, r0, rows, origin, first, last, 1, c)
                save(acc, m, l, parts, slot, r0, rows, c)
            gl.thread_barrier()
            step, complete = c.fan, gl.atomic_add(groups, 1) == (final - origin) // c.fan
            gl.store(groups, 0, complete)
        if complete:
            for r0 in range(0, rows, c.merge_rows):
                acc, m, l = together(parts, r0, rows, origin, origin, final, step, c)
                write(acc, m, l, results, request.q_begin, 0, tile.row + r0, tile.row + rows, c)
