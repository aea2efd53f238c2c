"""Batch-invariant attention: the bits of a row depend on nothing but its query, its keys and where these lie.

Keys come in units of c.unit and in runs of c.run units, both of which begin at multiples of their length. The state of
each unit is made alone, from nothing; units are folded in order into the state of their run, and runs into the state of
their tile, whoever made them. A state of no keys changes no bit of what it is folded into, so that rows of one tile may
see different keys. A column of a product does not depend on the others, so tiles may have any number of rows.

Tiles of few rows are cut anywhere between units. Who has the first unit of a run folds it, and collects what is beyond
the end of its share; who has the first run of a tile does the same with runs, and finishes it. What is left for others
has a place of its own, and is counted when it is there. Waiting is for programs later on the line, which start earlier.
Tiles of a prefill are not cut (c.whole), and nothing is left of them.

No product is fused with a sum but where `fma` says so (the kernel is compiled like that): which product of a sum of two
is rounded would be the compiler's choice, another one in each kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.kernels.hopper.attend import attend_block, load_queries, no_values, rows_of, upright
from quire.kernels.hopper.line import first_request, next_tile, piece_at, request_at
from quire.kernels.hopper.results import clear_padding, write


class UnitParts(NamedTuple):
    """Where states go that others fold: float32 [slots, c.part_rows, head_dim], and (largest logit, sum of weights) in
    [slots, c.part_rows, 2]. None is written beyond, whatever the tables say. Each program has c.run slots for the units
    of a run; then come runs. arrivals: of units for each program, and then of runs, how many are there.
    """

    acc: tl.tensor
    sums: tl.tensor
    slots: tl.tensor
    arrivals: tl.tensor


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
    top = gl.maximum(m, m_2)
    base = gl.where(top == -float("inf"), 0.0, top)
    weight, weight_2 = gl.exp2(m - base), gl.exp2(m_2 - base)
    l = gl.fma(l, weight, l_2 * weight_2)
    x = add(acc[0], acc_2[0], weight, weight_2)
    if c.fp8:
        acc = x, add(acc[1], acc_2[1], weight, weight_2)
    else:
        acc = (x,)
    return acc, top, l


@gluon.jit
def add(x, x_2, weight, weight_2):
    zero = gl.zeros_like(x)
    return gl.fma(x, zero + weight[None, :], x_2 * weight_2[None, :])


@gluon.jit
def consume_units(tables, queries, masks, ring, parts, results, span, c: gl.constexpr):
    """Attend to the ring's blocks, tile by tile, run by run, unit by unit."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.rows, 16])
    flat: gl.constexpr = gl.SliceLayout(0, L)
    position, request = span.unit, first_request(tables, span, c)
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
        acc, m, l = nothing(L, flat, c)
        while u < last:
            end = gl.minimum((u // c.run + 1) * c.run, last)
            origin = span.program
            if not c.whole:
                origin = (zero + gl.maximum(u // c.run * c.run, low)) // span.share  # who folds this run
            run, m_run, l_run = nothing(L, flat, c)
            for i in range(u, end):
                one, m_one, l_one, n = attend_unit(tables, queries, masks, ring, request, reach, rows, i, n, c)
                if not c.whole:
                    left = gl.where(origin < span.program, count, 0)
                    save(one, m_one, l_one, parts, origin * c.run + i % c.run, left, c)
                run, m_run, l_run = fold(run, m_run, l_run, one, m_one, l_one, c)
            if not c.whole:
                if origin < span.program:
                    arrive(parts.arrivals + origin, end - u)
                else:
                    arrivals, slot = parts.arrivals + span.program, span.program * c.run + end % c.run
                    more = gl.minimum(gl.cdiv(end, c.run) * c.run, high) - end
                    run, m_run, l_run = collect(run, m_run, l_run, parts, arrivals, slot, more, count, c)
                    if piece.first > 0:
                        owner = (zero + low) // span.share
                        save(run, m_run, l_run, parts, run_slot(u // c.run, zero, low, owner, c), count, c)
                        arrive(parts.arrivals + gl.num_programs(0) + owner, 1)
            acc, m, l = fold(acc, m, l, run, m_run, l_run, c)
            u = end
        if piece.first == 0:
            if not c.whole:
                arrivals = parts.arrivals + gl.num_programs(0) + span.program
                slot = run_slot(gl.cdiv(last, c.run), zero, low, span.program, c)
                more = gl.cdiv(high, c.run) - gl.cdiv(last, c.run)
                acc, m, l = collect(acc, m, l, parts, arrivals, slot, more, count, c)
            write(upright(acc, c), m, l, results, request.q_begin, reach.h, reach.row, count, c)
        position += piece.last - piece.first
        request = request_at(tables, request, position, span.end, c)
    q_end = gl.load(tables.qo_indptr + tables.batch, tables.batch > 0, 0)
    clear_padding(results, gl.minimum(gl.maximum(q_end, 0), tables.tokens), tables.tokens, c)


@gluon.jit
def attend_unit(tables, queries, masks, ring, request, reach, rows, unit, n, c: gl.constexpr):
    """The state of a unit's keys, for all rows of a tile. n: how many blocks the ring has had, before and after."""
    flat: gl.constexpr = rows.factor.type.layout
    L: gl.constexpr = flat.parent
    acc, m, _l = nothing(L, flat, c)
    l = gl.full([c.block, c.rows], 0.0, gl.float32, L)
    begin, stop = gl.maximum(reach.begin, unit * c.unit), gl.minimum(reach.stop, (unit + 1) * c.unit)
    for t0 in range(begin, stop, c.block):
        stage = n % c.stages
        mbarrier.wait(ring.full.index(stage), n // c.stages & 1)
        fence_async_shared()
        k, v = ring.k.index(stage), ring.v.index(stage)
        acc, m, l = attend_block(acc, m, l, queries, rows, request, t0, k, v, tables.window, masks, c)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        n += 1
    return acc, m, gl.sum(l, 0), n


@gluon.jit
def nothing(L: gl.constexpr, flat: gl.constexpr, c: gl.constexpr):
    """The state of no keys."""
    m, l = gl.full([c.rows], -float("inf"), gl.float32, flat), gl.full([c.rows], 0.0, gl.float32, flat)
    return no_values(L, c), m, l


@gluon.jit
def run_slot(run, zero, low, owner, c: gl.constexpr):
    """The slot of a run that its tile's owner collects. A tile of n units, however they lie, has no more than n / c.run
    + 1 runs after its first; an owner has only one tile that others have a part of.
    """
    return gl.num_programs(0) * c.run + (zero + low) // c.run + owner + run - low // c.run - 1


@gluon.jit
def places(like, parts, slot, count, c: gl.constexpr):
    """Where a slot has the numbers of a state (elements of fp8's second kind after the first) and its sums, and which
    rows are there.
    """
    L: gl.constexpr = like.type.layout
    r = gl.arange(0, c.rows, gl.SliceLayout(0, L))
    d = gl.arange(0, c.words, gl.SliceLayout(1, L))
    slot = slot.to(gl.int64)
    at = parts.acc + slot * (c.part_rows * c.dim) + (r[None, :] * c.dim + d[:, None])
    return (
        at,
        parts.sums + slot * (c.part_rows * 2) + r * 2,
        (r < gl.minimum(count, c.part_rows)) & (slot < parts.slots),
    )


@gluon.jit
def save(acc, m, l, parts, slot, count, c: gl.constexpr):
    """A state of `count` rows, if any, to its slot."""
    if count > 0:
        at, sums, real = places(acc[0], parts, slot, count, c)
        gl.store(at, acc[0], real[None, :])
        if c.fp8:
            gl.store(at + c.words, acc[1], real[None, :])
        gl.store(sums, m, real)
        gl.store(sums + 1, l, real)


@gluon.jit
def saved(like, parts, slot, count, c: gl.constexpr):
    """The state in a slot, laid out like another; of no keys where there are no rows."""
    at, sums, real = places(like, parts, slot, count, c)
    x = gl.load(at, real[None, :], 0.0)
    acc = (x,)
    if c.fp8:
        acc = x, gl.load(at + c.words, real[None, :], 0.0)  # type: ignore[assignment]
    return acc, gl.load(sums, real, -float("inf")), gl.load(sums + 1, real, 0.0)


@gluon.jit
def arrive(arrivals, number):
    """So many states are there, after all that this program has written."""
    gl.thread_barrier()
    gl.atomic_add(arrivals, number, sem="release", scope="gpu")


_ARRIVED = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")


@gluon.jit
def arrived(arrivals):
    return gl.inline_asm_elementwise(_ARRIVED, "=r,l", [arrivals], gl.int32, False, 1)


@gluon.jit
def collect(acc, m, l, parts, arrivals, slot, number, count, c: gl.constexpr):
    """Fold what others leave in so many slots, in order, into a state. Some are loaded together, as registers have room
    for.
    """
    some: gl.constexpr = max(32 * 128 // (c.dim * c.rows), 1)
    if number > 0:
        there = arrived(arrivals)
        while there < number:
            there = arrived(arrivals)
        gl.thread_barrier()
        gl.store(arrivals, 0)
    for i in range(0, number, some):
        states = ()
        for j in gl.static_range(some):
            states += (saved(acc[0], parts, slot + i + j, gl.where(i + j < number, count, 0), c),)  # type: ignore[assignment]
        for j in gl.static_range(some):
            acc, m, l = fold(acc, m, l, *states[j], c)
    return acc, m, l
