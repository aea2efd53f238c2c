"""Split-KV: partial states of tiles whose keys several programs have, and how they are combined.

Each program stores its state and counts it as arrived. The last program to arrive of c.fan_in neighbours merges their
partial states, and the last one to do so merges the results and writes the rows. Slots are merged in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.epilogue import store_rows
from quire.kernels.hopper.softmax import empty_state, exponent_base


class Partials(NamedTuple):
    """Slots for partial states. acc: float32 [slots, rows, dim]; ml: pairs (m, l), [slots, rows, 2]; arrivals: counters
    for groups of neighbours, and for tiles. Slots and rows beyond the memory are not written, whatever the tables say.
    """

    acc: tl.tensor
    ml: tl.tensor
    slots: tl.tensor
    rows: tl.tensor
    arrivals: tl.tensor


@gluon.jit
def partials_of(consumer: gl.constexpr, partials, arrivals, rows, c: gl.constexpr):
    """The Partials of one consumer of this program, which it shares with those that compute the same rows in other
    spans: as for `decode_latent`'s arguments, for one half of the columns and one of c.programs_per_span programs.
    """
    programs, which = gl.num_programs(0), gl.program_id(0) % c.programs_per_span
    slots = 2 * (programs // c.programs_per_span)
    all_rows, before = (2 * programs).to(gl.int64) * rows, (which * slots).to(gl.int64) * rows
    partials += consumer * all_rows * (c.dim + 2)
    arrivals += (consumer * c.programs_per_span + which) * (slots + slots // 2)
    return Partials(partials + before * c.dim, partials + all_rows * c.dim + before * 2, slots, rows, arrivals)


@gluon.jit
def store_partial(acc, m, l, partials, slot, row, row_end, c: gl.constexpr):
    """Store a state whose first row is `row`, up to row_end, to a slot. acc: [rows, dim]; m, l: [rows]."""
    layout: gl.constexpr = acc.type.layout
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    row_end = gl.where(slot < partials.slots, gl.minimum(row_end, partials.rows), 0)
    r = row + gl.arange(0, acc.shape[0], flat)
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    at = slot.to(gl.int64) * partials.rows + r
    gl.store(partials.acc + at[:, None] * c.dim + d[None, :], acc, (r < row_end)[:, None])
    gl.store(partials.ml + at * 2, gl.convert_layout(m, flat), r < row_end)
    gl.store(partials.ml + at * 2 + 1, gl.convert_layout(l, flat), r < row_end)


@gluon.jit
def _merge_slots(partials, row, row_end, owner, first, last, step, c: gl.constexpr):
    """Merge rows from `row` up to row_end of the partial states that programs first to last, each `step`-th of them,
    have of a tile that starts in program `owner`. As many are loaded at a time as registers hold, so that the loads
    overlap; each warp has rows of its own.
    """
    R: gl.constexpr = c.merge_rows
    N: gl.constexpr = 64 * 128 // (R * c.dim)
    width: gl.constexpr = c.dim // 32
    cube: gl.constexpr = gl.BlockedLayout([1, 1, width], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    plane: gl.constexpr = gl.BlockedLayout([1, width], [1, 32], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, cube))
    n = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None]
    d = gl.arange(0, c.dim, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    r = row + gl.arange(0, R, flat)
    m, l = empty_state(R, flat)
    acc = gl.full([R, c.dim], 0.0, gl.float32, gl.SliceLayout(0, cube))
    for p in range(first, last + 1, N * step):
        program = p + n * step
        slot = gl.where(program == owner, 2 * program + 1, 2 * program)
        at = slot.to(gl.int64) * partials.rows + r[None, :]
        valid = (program <= last) & (slot < partials.slots) & (r < row_end)[None, :]
        m_n = gl.load(partials.ml + at * 2, valid, -float("inf"))
        l_n = gl.load(partials.ml + at * 2 + 1, valid, 0.0)
        acc_n = gl.load(partials.acc + at[:, :, None] * c.dim + d[None, None, :], valid[:, :, None], 0.0)
        top = gl.maximum(m, gl.max(m_n, 0))
        base = exponent_base(top)
        alpha_n, alpha = gl.exp2(m_n - base[None, :]), gl.exp2(m - base)
        m, l = top, l * alpha + gl.sum(l_n * alpha_n, 0)
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(0, cube)))
        acc = acc * alpha[:, None] + gl.sum(acc_n * alpha_n[:, :, None], 0)
    return gl.convert_layout(acc, plane), m, l


@gluon.jit
def combine_span(partials, output, request, tile, program, owner, last, c: gl.constexpr):
    """Count this program's partial state of a tile of programs owner to last as arrived, and merge what is complete:
    in two levels, since one program that merges all would take longer than the programs take to attend.
    """
    first = program - (program - owner) % c.fan_in
    group_last = gl.minimum(first + c.fan_in - 1, last)
    slot = 2 * first + (first == owner).to(gl.int32)
    group_arrivals = partials.arrivals + gl.num_programs(0) // c.programs_per_span + slot
    tile_arrivals = partials.arrivals + owner
    rows = gl.minimum(tile.count, partials.rows)
    gl.thread_barrier()  # all warps have stored their rows
    if gl.atomic_add(group_arrivals, 1) == group_last - first:
        gl.store(group_arrivals, 0)
        step, complete = 1, last - owner < c.fan_in
        if last - owner >= c.fan_in:
            for row in range(0, rows, c.merge_rows):
                acc, m, l = _merge_slots(partials, row, rows, owner, first, group_last, 1, c)
                store_partial(acc, m, l, partials, slot, row, rows, c)
            gl.thread_barrier()
            step, complete = c.fan_in, gl.atomic_add(tile_arrivals, 1) == (last - owner) // c.fan_in
            gl.store(tile_arrivals, 0, complete)
        if complete:
            for row in range(0, rows, c.merge_rows):
                acc, m, l = _merge_slots(partials, row, rows, owner, owner, last, step, c)
                store_rows(acc, m, l, output, request.q_start, 0, tile.row + row, tile.row + rows, c)
