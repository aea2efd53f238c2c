"""The batch-invariant split: the bits of a row depend on nothing but its query, its keys and where these lie.

Keys are cut into work units, the splits, and these into split groups of c.split_group units; both start at multiples of
their length. The state of each unit is computed alone. Units are merged in order into the state of their split group,
and groups into the state of their tile, no matter which programs computed them. Merging a state of no keys changes no
bit, so rows of one tile may see different keys. A column of an MMA does not depend on the other columns, so tiles may
have any number of rows. Requests of more rows than decode computes are prefill's, which never cuts tiles.

Decode tiles are cut between any two units. The owner of a split group is the program with its first unit: it merges the
group, and reads partial states of the units after its span. The owner of a tile, with the tile's first group, merges
its groups in the same way, and writes the tile. Partial states are self-flagging, as in `combine.py`. That a 0 becomes
-0 in them changes no sum but that of zeros, and results are never -0. Where the longest request is not known, or is one
for prefill, tiles are computed whole (ScheduleConfig.whole_tiles), without partial states.

The kernel is compiled without fusing products and sums, except where `fma` is written: otherwise the compiler would
choose which product of a sum of two is rounded, differently in each kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.hopper.decode.combine import MAX_ROWS, SavedState, interleave, one_per_row
from quire.kernels.hopper.decode.tile import attend_keys, rows_layout, tile_of, transposed, zero_acc
from quire.kernels.hopper.pipeline import PipelineState
from quire.kernels.hopper.softmax import SoftmaxState, empty_state, merge, merge_acc


@gluon.jit
def _merge_columns(state, other, c: gl.constexpr):
    """Merge two states whose acc is [head_dim, rows], as in `tile.py`."""
    m, l, alpha, alpha_2 = merge(state.m, state.l, other.m, other.l)
    alpha, alpha_2 = alpha[None, :], alpha_2[None, :]
    acc = (merge_acc(state.acc[0], other.acc[0], alpha, alpha_2),)
    if c.fp8:
        acc = acc[0], merge_acc(state.acc[1], other.acc[1], alpha, alpha_2)  # type: ignore[assignment]
    return SoftmaxState(acc, m, l)


@gluon.jit
def _merge_rows(state, other):
    """Merge two states whose acc is [rows, head_dim], with the layouts of `SavedState.rows`."""
    m, l, alpha, alpha_2 = merge(state.m, state.l, other.m, other.l)
    alpha_2 = interleave(alpha_2, alpha_2, alpha_2, alpha_2, state.acc)
    alpha = interleave(alpha, alpha, alpha, alpha, state.acc)
    return SoftmaxState(merge_acc(state.acc, other.acc, alpha, alpha_2), m, l)


@gluon.jit
def _no_keys(c: gl.constexpr):
    """The state of no keys."""
    m, l = empty_state(c.block_m, rows_layout(c))
    return SoftmaxState(zero_acc(c), m, l)


@gluon.jit
def consume_invariant(tables, queries, pipeline, partials, output, span, c: gl.constexpr):  # noqa: C901
    """Attend to the pipeline's blocks, tile by tile, split group by split group, unit by unit."""
    whole_tiles: gl.constexpr = c.schedule.whole_tiles
    unit_size: gl.constexpr = c.tile.unit_size
    size: gl.constexpr = c.split_group
    index, request = span.start, span.request
    if whole_tiles:
        index, request = tables.next_tile(request, index, span.end)
    kv_state = PipelineState(gl.to_tensor(0), c.pipeline.stages)
    while index < span.end:
        segment = request.segment(index, span.end)
        tile = tile_of(request, segment, tables.mask)
        rows = queries.load(request, tile.h, tile.row, tables.mask)
        row_end = request.rows()
        # Here units are numbered by their keys: the tile has units low to high, this program u to last.
        low = request.first_key // unit_size
        u, high, last = low + segment.start, low + request.units, low + segment.end
        if whole_tiles:
            u, last = tile.kv_start // unit_size, gl.cdiv(tile.kv_end, unit_size)
        # Where unit 0 of the tile would be in the schedule.
        zero = index - segment.start - low
        group_owner = span.program
        state = _no_keys(c)
        group = _no_keys(c)
        while u < last:
            end = gl.minimum((u // size + 1) * size, last)
            if not whole_tiles:
                group_owner = span.owner(zero + gl.maximum(u // size * size, low))
            group = _no_keys(c)
            for i in range(u, end):
                start, stop = gl.maximum(tile.kv_start, i * unit_size), gl.minimum(tile.kv_end, (i + 1) * unit_size)
                unit, kv_state = attend_keys(queries, rows, pipeline, kv_state, start, stop)
                # With "and" in place of the inner condition, whole tiles would get code for partial states, too.
                if not whole_tiles:  # noqa: SIM102
                    if group_owner < span.program:
                        _store_slot(partials, _unit_slot(i, group_owner, c), transposed(unit, c), 0, row_end)
                group = _merge_columns(group, unit, c)
            if whole_tiles:
                state = _merge_columns(state, group, c)
            elif (group_owner == span.program) & ((end % size == 0) | (end == high)):
                if segment.start > 0:
                    slot = _group_slot(u // size, zero, low, span.owner(zero + low), c)
                    _store_slot(partials, slot, transposed(group, c), 0, row_end)
                state = _merge_columns(state, group, c)
            u = end
        if whole_tiles:
            _finish(transposed(state, c), output, request.q_start, tile.h, tile.row, row_end)
        elif (segment.start == 0) & (last == high):
            _finish(transposed(state, c), output, request.q_start, tile.h, 0, row_end)
        else:
            # This program's last split group has more units in the next span.
            continues = (last < high) & (last % size > 0) & (group_owner == span.program)
            if continues | (segment.start == 0):
                saved = SavedState(pipeline.k, queries.p_shared, 0, 2, c)
                saved_group = SavedState(pipeline.v, queries.p_shared, 1, 2, c)
                saved.save(transposed(state, c))
                saved_group.save(transposed(group, c))
                _combine(saved, saved_group, continues, partials, output, span, request, segment, zero, c)
        index += segment.end - segment.start
        request = tables.request_at(request, index, span.end)


@gluon.jit
def _finish(state, output, q_start, h, row, row_end):
    """Write rows of a tile. Zeros lose their sign, which depends on what was stored as a partial state."""
    output.store_rows(SoftmaxState(state.acc + 0.0, state.m, state.l), q_start, h, row, row_end)


@gluon.jit
def _unit_slot(unit, group_owner, c: gl.constexpr):
    """The slot of a unit, not the first of its split group, that the group's owner reads: each program has
    c.split_group - 1 of these.
    """
    return group_owner * (c.split_group - 1) + unit % c.split_group - 1


@gluon.jit
def _group_slot(group, zero, low, owner, c: gl.constexpr):
    """The slot of a split group that the tile's owner reads; these follow the slots of units. Slots of different groups
    differ: a tile of n units has at most n / c.split_group + 1 groups after its first, and each program owns at most
    one tile that other programs have units of.
    """
    size: gl.constexpr = c.split_group
    return gl.num_programs(0) * (size - 1) + (zero + low) // size + owner + group - low // size - 1


@gluon.jit
def _store_slot(partials, slot, state, row, row_end):
    """Store a state's rows from `row` on, unless the slot is beyond the memory, as tables that overlap can make it."""
    if slot < partials.slots:
        partials.store(state, slot, row, row_end)


@gluon.jit
def _combine(saved, saved_group, continues, partials, output, span, request, segment, zero, c: gl.constexpr):
    """Complete a tile that is cut at the end of this span, from the states of it and of its last split group. If that
    group continues, merge its other units, and store it for the tile's owner if that is another program. If this
    program is the owner, merge all later groups and write the tile.
    """
    size: gl.constexpr = c.split_group
    R: gl.constexpr = min(c.partial_rows, MAX_ROWS)
    low, row_end = request.first_key // c.tile.unit_size, request.rows()
    high, last = low + request.units, low + segment.end
    next_group = gl.cdiv(last, size)
    owner = span.owner(zero + low)
    # All warps have saved their rows.
    thread_barrier()
    for row in range(0, gl.minimum(row_end, c.partial_rows), R):
        state = saved.rows(row // R)
        if continues:
            group = saved_group.rows(row // R)
            number = gl.minimum(next_group * size, high) - last
            group = _merge_slots(group, partials, _unit_slot(last, span.program, c), number, row, c)
            if segment.start > 0:
                slot = _group_slot(next_group - 1, zero, low, owner, c)
                _store_slot(partials, slot, one_per_row(group), row, row_end)
            state = _merge_rows(state, group)
        if segment.start == 0:
            slot, number = _group_slot(next_group, zero, low, owner, c), gl.cdiv(high, size) - next_group
            state = _merge_slots(state, partials, slot, number, row, c)
            _finish(one_per_row(state), output, request.q_start, segment.h, row, row_end)


@gluon.jit
def _merge_slots(state, partials, first, number, row, c: gl.constexpr):
    """Merge the partial states in `number` slots, as soon as they are written and in order, into rows from `row` on of
    a state. As many are loaded at a time as registers hold.
    """
    N: gl.constexpr = max(min(32 * 128 // (c.dim * state.acc.shape[0]), 8), 1)
    last = gl.minimum(first + number, partials.slots) - 1
    while first <= last:
        x, addresses = partials.poll(state.m, first, last, N, row)
        for i in gl.static_range(N):
            acc = interleave(x[6 * i], x[6 * i + 1], x[6 * i + 2], x[6 * i + 3], state.acc)
            state = _merge_rows(state, SoftmaxState(acc, x[6 * i + 4], x[6 * i + 5]))
        partials.clear(addresses, N)
        first += N
    return state
