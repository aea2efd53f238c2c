"""The batch-invariant split: the bits of a row depend on nothing but its query, its keys and where these lie.

Keys are cut into work units of c.unit_size keys, and these into runs of c.run units; both start at multiples of their
length. The state of each unit is computed alone. Units are merged in order into the state of their run, and runs into
the state of their tile, no matter which programs computed them. Merging a state of no keys changes no bit, so rows of
one tile may see different keys. A column of an MMA does not depend on the other columns, so tiles may have any number
of rows. Requests of more rows than decode computes are prefill's, which never cuts tiles.

Decode tiles are cut between any two units. The owner of a run is the program with its first unit: it merges the run,
and reads partial states of the units after its span. The owner of a tile, with the tile's first run, merges its runs in
the same way, and writes the tile. Partial states are self-flagging, as in `combine.py`. That a 0 becomes -0 in them
changes no sum but that of zeros, and results are never -0. Programs only wait for programs with later units, which
start first. Where the longest request is not known, or is one for prefill, tiles are computed whole (c.whole_tiles),
without partial states.

The kernel is compiled without fusing products and sums, except where `fma` is written: otherwise the compiler would
choose which product of a sum of two is rounded, differently in each kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.decode.combine import (
    MAX_ROWS,
    clear_partials,
    interleave,
    load_partials,
    restore_rows,
    save_state,
    store_partial,
)
from quire.kernels.hopper.decode.tile import attend_keys, load_rows, tile_of, transpose_acc, zero_acc
from quire.kernels.hopper.epilogue import store_rows
from quire.kernels.hopper.pipeline import PipelineState
from quire.kernels.hopper.schedule import next_tile, quotient, request_at, segment_at
from quire.kernels.hopper.softmax import empty_state, merge, merge_acc


@gluon.jit
def _merge_columns(acc, m, l, acc_2, m_2, l_2, c: gl.constexpr):
    """Merge two states whose acc is [head_dim, rows], as in `tile.py`."""
    m, l, alpha, alpha_2 = merge(m, l, m_2, l_2)
    alpha, alpha_2 = alpha[None, :], alpha_2[None, :]
    x = merge_acc(acc[0], acc_2[0], alpha, alpha_2)
    if c.fp8:
        acc = x, merge_acc(acc[1], acc_2[1], alpha, alpha_2)
    else:
        acc = (x,)
    return acc, m, l


@gluon.jit
def _merge_rows(acc, m, l, acc_2, m_2, l_2):
    """Merge two states whose acc is [rows, head_dim], with the layouts of `restore_rows`."""
    m, l, alpha, alpha_2 = merge(m, l, m_2, l_2)
    alpha_2 = interleave(alpha_2, alpha_2, alpha_2, alpha_2, acc)
    return merge_acc(acc, acc_2, interleave(alpha, alpha, alpha, alpha, acc), alpha_2), m, l


@gluon.jit
def consume_invariant(tables, queries, pipeline, partials, output, span, c: gl.constexpr):
    """Attend to the pipeline's blocks, tile by tile, run by run, unit by unit."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block_m, 16])
    flat: gl.constexpr = gl.SliceLayout(0, L)
    index, request = span.start, span.request
    if c.whole_tiles:
        index, request = next_tile(tables, request, index, span.end, c)
    state = PipelineState(gl.to_tensor(0), c.stages)
    while index < span.end:
        segment = segment_at(request, index, span.end, c)
        tile = tile_of(request, segment, tables.mask, c)
        rows = load_rows(queries, request, tile.h, tile.row, flat, tables.mask, c)
        row_end = request.q_len * c.group
        # Here units are numbered by their keys: the tile has units low to high, this program u to last.
        low = request.first_key // c.unit_size
        u, high, last = low + segment.start, low + request.units, low + segment.end
        if c.whole_tiles:
            u, last = tile.kv_start // c.unit_size, gl.cdiv(tile.kv_end, c.unit_size)
        zero = index - segment.start - low  # where unit 0 of the tile would be in the schedule
        run_owner = span.program
        acc, m, l = _no_keys(L, flat, c)
        run, m_run, l_run = _no_keys(L, flat, c)
        while u < last:
            end = gl.minimum((u // c.run + 1) * c.run, last)
            if not c.whole_tiles:
                run_owner = quotient(zero + gl.maximum(u // c.run * c.run, low), span.size)
            run, m_run, l_run = _no_keys(L, flat, c)
            for i in range(u, end):
                start, stop = gl.maximum(tile.kv_start, i * c.unit_size), gl.minimum(tile.kv_end, (i + 1) * c.unit_size)
                x, m_x, l_x, state = attend_keys(queries, rows, request, pipeline, state, start, stop, tables.mask, c)
                if not c.whole_tiles:  # noqa: SIM102, "and" would generate code for partial states of whole tiles
                    if run_owner < span.program:
                        slot = _unit_slot(i, run_owner, c)
                        _store_slot(slot, transpose_acc(x, c), m_x, l_x, partials, 0, row_end, c)
                run, m_run, l_run = _merge_columns(run, m_run, l_run, x, m_x, l_x, c)
            if c.whole_tiles:
                acc, m, l = _merge_columns(acc, m, l, run, m_run, l_run, c)
            elif (run_owner == span.program) & ((end % c.run == 0) | (end == high)):
                if segment.start > 0:
                    slot = _run_slot(u // c.run, zero, low, quotient(zero + low, span.size), c)
                    _store_slot(slot, transpose_acc(run, c), m_run, l_run, partials, 0, row_end, c)
                acc, m, l = _merge_columns(acc, m, l, run, m_run, l_run, c)
            u = end
        if c.whole_tiles:
            _finish(transpose_acc(acc, c), m, l, output, request.q_start, tile.h, tile.row, row_end, c)
        elif (segment.start == 0) & (last == high):
            _finish(transpose_acc(acc, c), m, l, output, request.q_start, tile.h, 0, row_end, c)
        else:
            # This program's last run has more units in the next span.
            run_continues = (last < high) & (last % c.run > 0) & (run_owner == span.program)
            if run_continues | (segment.start == 0):
                save_state(transpose_acc(acc, c), m, l, pipeline.k, queries.p_shared, 0, 2)
                save_state(transpose_acc(run, c), m_run, l_run, pipeline.v, queries.p_shared, 1, 2)
                _combine(queries, pipeline, partials, output, span, request, segment, zero, run_continues, c)
        index += segment.end - segment.start
        request = request_at(tables, request, index, span.end, c)


@gluon.jit
def _finish(acc, m, l, output, q_start, h, row, row_end, c: gl.constexpr):
    """Write rows of a tile. Zeros lose their sign, which depends on what was stored as a partial state."""
    store_rows(acc + 0.0, m, l, output, q_start, h, row, row_end, c)


@gluon.jit
def _no_keys(L: gl.constexpr, flat: gl.constexpr, c: gl.constexpr):
    """The state of no keys."""
    m, l = empty_state(c.block_m, flat)
    return zero_acc(L, c), m, l


@gluon.jit
def _unit_slot(unit, run_owner, c: gl.constexpr):
    """The slot of a unit, not the first of its run, that the run's owner reads: each program has c.run - 1 of these."""
    return run_owner * (c.run - 1) + unit % c.run - 1


@gluon.jit
def _run_slot(run, zero, low, owner, c: gl.constexpr):
    """The slot of a run that the tile's owner reads; these follow the slots of units. Slots of different runs differ: a
    tile of n units has at most n / c.run + 1 runs after its first, and each program owns at most one tile that other
    programs have units of.
    """
    return gl.num_programs(0) * (c.run - 1) + (zero + low) // c.run + owner + run - low // c.run - 1


@gluon.jit
def _store_slot(slot, acc, m, l, partials, row, row_end, c: gl.constexpr):
    """Store a state's rows from `row` on, unless the slot is beyond the memory, as tables that overlap can make it."""
    if slot < partials.slots:
        store_partial(acc, m, l, partials, slot, row, row_end, c)


@gluon.jit
def _combine(queries, pipeline, partials, output, span, request, segment, zero, run_continues, c: gl.constexpr):
    """Complete a tile that is cut at the end of this span, from what `save_state` saved. If the last run continues,
    merge its other units, and store the run for the tile's owner if that is another program. If this program is the
    owner, merge all later runs and write the tile.
    """
    R: gl.constexpr = min(c.partial_rows, MAX_ROWS)
    low, row_end = request.first_key // c.unit_size, request.q_len * c.group
    high, last = low + request.units, low + segment.end
    next_run = gl.cdiv(last, c.run)
    owner = quotient(zero + low, span.size)
    gl.thread_barrier()  # all warps have saved their rows
    for row in range(0, gl.minimum(row_end, c.partial_rows), R):
        acc, m, l = restore_rows(pipeline.k, queries.p_shared, 0, 2, row // R, c)
        if run_continues:
            run, m_run, l_run = restore_rows(pipeline.v, queries.p_shared, 1, 2, row // R, c)
            number = gl.minimum(next_run * c.run, high) - last
            slot = _unit_slot(last, span.program, c)
            run, m_run, l_run = _merge_slots(run, m_run, l_run, partials, slot, number, row, c)
            if segment.start > 0:
                slot = _run_slot(next_run - 1, zero, low, owner, c)
                _store_slot(slot, run, gl.max(m_run, 1), gl.max(l_run, 1), partials, row, row_end, c)
            acc, m, l = _merge_rows(acc, m, l, run, m_run, l_run)
        if segment.start == 0:
            slot, number = _run_slot(next_run, zero, low, owner, c), gl.cdiv(high, c.run) - next_run
            acc, m, l = _merge_slots(acc, m, l, partials, slot, number, row, c)
            _finish(acc, gl.max(m, 1), gl.max(l, 1), output, request.q_start, segment.h, row, row_end, c)


@gluon.jit
def _merge_slots(acc, m, l, partials, first, number, row, c: gl.constexpr):
    """Merge the partial states in `number` slots, as soon as they are written and in order, into rows from `row` on of
    a state. As many are loaded at a time as registers hold.
    """
    N: gl.constexpr = max(min(32 * 128 // (c.dim * acc.shape[0]), 8), 1)
    last = gl.minimum(first + number, partials.slots) - 1
    while first <= last:
        x, addresses = load_partials(m, partials, first, last, N, row, c)
        for i in gl.static_range(N):
            acc_i = interleave(x[6 * i], x[6 * i + 1], x[6 * i + 2], x[6 * i + 3], acc)
            acc, m, l = _merge_rows(acc, m, l, acc_i, x[6 * i + 4], x[6 * i + 5])
        clear_partials(addresses, N, c)
        first += N
    return acc, m, l
