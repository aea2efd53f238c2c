"""Batch-invariant attention: the bits of a row depend on nothing but its query, its keys and where these lie.

Keys come in units of c.unit and in runs of c.run units, both of which begin at multiples of their length. The state of
each unit is made alone, from nothing; units are folded in order into the state of their run, and runs into the state of
their tile, whoever made them. A state of no keys changes no bit of what it is folded into, so that rows of one tile may
see different keys. A column of a product does not depend on the others, so tiles may have any number of rows.

Tiles of few rows are cut anywhere between units. Who has the first unit of a run folds it, and collects what is beyond
the end of its share; who has the first run of a tile does the same with runs, and finishes it. What is left for others
has a place of its own, and tells by itself that it is there, as in `parts.py`. A 0 becomes -0 there, which changes no
sum that is not 0, and results are never -0. Waiting is for programs later on the line, which start earlier.
Tiles of a prefill are not cut (c.whole), and nothing is left of them.

No product is fused with a sum but where `fma` says so (the kernel is compiled like that): which product of a sum of two
is rounded would be the compiler's choice, another one in each kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.decode.combine import MOST, clear, keep, leave, neighbours, spread, take
from quire.kernels.hopper.decode.tile import attend_keys, load_queries, no_values, rows_of, upright
from quire.kernels.hopper.epilogue import write
from quire.kernels.hopper.schedule import next_tile, piece_at, quotient, request_at


class UnitParts(NamedTuple):
    """Where states go that others fold, as in `Parts`, but in `slots` places; none is beyond, whatever the tables say.
    Each program has c.run - 1 places for the units of a run; then come runs.
    """

    rows: tl.tensor
    sums: tl.tensor
    slots: tl.tensor


class Reach(NamedTuple):
    """What is computed of a piece of the line: head h's rows from `row` on, and their keys begin to stop."""

    h: tl.tensor
    row: tl.tensor
    begin: tl.tensor
    stop: tl.tensor


@gluon.jit
def reach_of(request, piece, window, c: gl.constexpr):
    """What a piece is of a request. Of whole tiles, keys that none of their rows sees are left out."""
    h, row, begin, stop = piece.h, piece.h * 0, request.low + piece.first * c.unit, piece.stop
    if c.run > 0:
        past, end = request.kv_len - request.q_len, request.q_len * c.group
        if c.whole:
            # Tiles from both ends in turns: of a prompt, neighbours have as many keys together as any others.
            tiles = (end + c.tile_rows - 1) // c.tile_rows
            h, at = piece.h // tiles, piece.h % tiles
            row = gl.where(at % 2 == 0, at // 2, tiles - 1 - at // 2) * c.tile_rows
            end = gl.minimum(row + c.tile_rows, end)
            if c.causal:
                stop = gl.minimum(stop, past + (end - 1) // c.group + 1)
        if c.window:
            begin = gl.maximum(begin, (past + row // c.group - window) // c.block * c.block)
    return Reach(h, row, begin, stop)


@gluon.jit
def fold(acc, m, l, acc_2, m_2, l_2, c: gl.constexpr):
    """The state of two runs of keys, [head_dim, rows]."""
    m, l, weight, weight_2 = weigh(m, l, m_2, l_2)
    weight, weight_2 = weight[None, :], weight_2[None, :]
    x = add(acc[0], acc_2[0], weight, weight_2)
    if c.fp8:
        acc = x, add(acc[1], acc_2[1], weight, weight_2)
    else:
        acc = (x,)
    return acc, m, l


@gluon.jit
def fold_rows(acc, m, l, acc_2, m_2, l_2):
    """The same, [rows, head_dim], with m and l as in `spread`."""
    m, l, weight, weight_2 = weigh(m, l, m_2, l_2)
    weight_2 = neighbours(weight_2, weight_2, weight_2, weight_2, acc)
    return add(acc, acc_2, neighbours(weight, weight, weight, weight, acc), weight_2), m, l


@gluon.jit
def weigh(m, l, m_2, l_2):
    """The sums of two states together, and the weight of each."""
    top = gl.maximum(m, m_2)
    base = gl.where(top == -float("inf"), 0.0, top)
    weight, weight_2 = gl.exp2(m - base), gl.exp2(m_2 - base)
    return top, gl.fma(l, weight, l_2 * weight_2), weight, weight_2


@gluon.jit
def add(x, x_2, weight, weight_2):
    return gl.fma(x, gl.zeros_like(x) + weight, x_2 * weight_2)


@gluon.jit
def consume_units(tables, queries, masks, ring, parts, results, span, c: gl.constexpr):
    """Attend to the ring's blocks, tile by tile, run by run, unit by unit."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.rows, 16])
    flat: gl.constexpr = gl.SliceLayout(0, L)
    position, request = span.unit, span.request
    if c.whole:
        position, request = next_tile(tables, request, position, span.end, c)
    n = span.unit * 0
    while position < span.end:
        piece = piece_at(request, position, span.end, c)
        reach = reach_of(request, piece, tables.window, c)
        factor = load_queries(queries, request, reach.h, reach.row, flat, c)
        rows = rows_of(request, reach.row, factor, masks, c)
        count = request.q_len * c.group
        # Units are numbered by their keys: the tile has low to high, this program u to last.
        low = request.low // c.unit
        u, high, last = low + piece.first, low + request.cost, low + piece.last
        if c.whole:
            u, last = reach.begin // c.unit, gl.cdiv(reach.stop, c.unit)
        zero = position - piece.first - low  # where unit 0 would lie on the line
        origin = span.program
        acc, m, l = nothing(L, flat, c)
        run, m_run, l_run = nothing(L, flat, c)
        while u < last:
            end = gl.minimum((u // c.run + 1) * c.run, last)
            if not c.whole:
                origin = quotient(zero + gl.maximum(u // c.run * c.run, low), span.share)  # who folds this run
            run, m_run, l_run = nothing(L, flat, c)
            for i in range(u, end):
                begin, stop = gl.maximum(reach.begin, i * c.unit), gl.minimum(reach.stop, (i + 1) * c.unit)
                one, m_one, l_one, n = attend_keys(queries, rows, request, ring, begin, stop, n, tables, masks, c)
                if not c.whole:  # noqa: SIM102, with "and" there would be code for what is left of whole tiles
                    if origin < span.program:
                        leave_at(unit_slot(i, origin, c), upright(one, c), m_one, l_one, parts, 0, count, c)
                run, m_run, l_run = fold(run, m_run, l_run, one, m_one, l_one, c)
            if c.whole:
                acc, m, l = fold(acc, m, l, run, m_run, l_run, c)
            elif (origin == span.program) & ((end % c.run == 0) | (end == high)):
                if piece.first > 0:
                    slot = run_slot(u // c.run, zero, low, quotient(zero + low, span.share), c)
                    leave_at(slot, upright(run, c), m_run, l_run, parts, 0, count, c)
                acc, m, l = fold(acc, m, l, run, m_run, l_run, c)
            u = end
        if c.whole:
            finish(upright(acc, c), m, l, results, request.q_begin, reach.h, reach.row, count, c)
        elif (piece.first == 0) & (last == high):
            finish(upright(acc, c), m, l, results, request.q_begin, reach.h, 0, count, c)
        else:
            # The last run goes on in the next share, and begins here.
            goes_on = (last < high) & (last % c.run > 0) & (origin == span.program)
            if goes_on | (piece.first == 0):
                keep(upright(acc, c), m, l, ring.k, queries.weights, 0, 2)
                keep(upright(run, c), m_run, l_run, ring.v, queries.weights, 1, 2)
                hand_over(queries, ring, parts, results, span, request, piece, zero, goes_on, c)
        position += piece.last - piece.first
        request = request_at(tables, request, position, span.end, c)


@gluon.jit
def finish(acc, m, l, results, q_begin, h, r0, rows, c: gl.constexpr):
    """Write rows of a tile; the sign of a 0 would tell whether it was left for others on its way."""
    write(acc + 0.0, m, l, results, q_begin, h, r0, rows, c)


@gluon.jit
def nothing(L: gl.constexpr, flat: gl.constexpr, c: gl.constexpr):
    """The state of no keys."""
    m, l = gl.full([c.rows], -float("inf"), gl.float32, flat), gl.full([c.rows], 0.0, gl.float32, flat)
    return no_values(L, c), m, l


@gluon.jit
def unit_slot(unit, origin, c: gl.constexpr):
    """The slot of a unit, not the first of its run, for who folds the run."""
    return origin * (c.run - 1) + unit % c.run - 1


@gluon.jit
def run_slot(run, zero, low, owner, c: gl.constexpr):
    """The slot of a run that its tile's owner collects. A tile of n units, however they lie, has no more than n / c.run
    + 1 runs after its first; an owner has only one tile that others have a part of.
    """
    return gl.num_programs(0) * (c.run - 1) + (zero + low) // c.run + owner + run - low // c.run - 1


@gluon.jit
def leave_at(slot, acc, m, l, parts, r0, count, c: gl.constexpr):
    """A state's rows r0 and on, of `count`, to a slot."""
    if slot < parts.slots:
        leave(acc, m, l, parts, slot, r0, count, c)


@gluon.jit
def hand_over(queries, ring, parts, results, span, request, piece, zero, goes_on, c: gl.constexpr):
    """Collect what others have of the run at the end of this share, if it goes on there, and leave it for who has the
    tile's beginning or, where that is here, collect the runs that follow and finish the tile.
    """
    R: gl.constexpr = min(c.part_rows, MOST)
    low, rows = request.low // c.unit, request.q_len * c.group
    high, last = low + request.cost, low + piece.last
    next_run = gl.cdiv(last, c.run)
    owner = quotient(zero + low, span.share)
    gl.thread_barrier()  # all that is kept is there
    for r0 in range(0, gl.minimum(rows, c.part_rows), R):
        acc, m, l = spread(ring.k, queries.weights, 0, 2, r0 // R, c)
        if goes_on:
            run, m_run, l_run = spread(ring.v, queries.weights, 1, 2, r0 // R, c)
            number = gl.minimum(next_run * c.run, high) - last
            run, m_run, l_run = collect(run, m_run, l_run, parts, unit_slot(last, span.program, c), number, r0, c)
            if piece.first > 0:
                slot = run_slot(next_run - 1, zero, low, owner, c)
                leave_at(slot, run, gl.max(m_run, 1), gl.max(l_run, 1), parts, r0, rows, c)
            acc, m, l = fold_rows(acc, m, l, run, m_run, l_run)
        if piece.first == 0:
            slot, number = run_slot(next_run, zero, low, owner, c), gl.cdiv(high, c.run) - next_run
            acc, m, l = collect(acc, m, l, parts, slot, number, r0, c)
            finish(acc, gl.max(m, 1), gl.max(l, 1), results, request.q_begin, piece.h, r0, rows, c)


@gluon.jit
def collect(acc, m, l, parts, first, number, r0, c: gl.constexpr):
    """Fold what others leave in so many slots, as soon as it is there, in order, into rows r0 and on of a state. Some
    are taken together, as registers have room for.
    """
    some: gl.constexpr = max(min(32 * 128 // (c.dim * acc.shape[0]), 8), 1)
    end = gl.minimum(first + number, parts.slots) - 1
    while first <= end:
        x, places = take(m, parts, first, end, some, r0, c)
        for i in gl.static_range(some):
            one = neighbours(x[6 * i], x[6 * i + 1], x[6 * i + 2], x[6 * i + 3], acc)
            acc, m, l = fold_rows(acc, m, l, one, x[6 * i + 4], x[6 * i + 5])
        clear(places, some, c)
        first += some
    return acc, m, l
