"""Split-KV: partial states of tiles that several programs share, and their combination."""

from __future__ import annotations

from collections import namedtuple

import triton
from triton import language as tl

from quire.kernels.triton.epilogue import write_rows
from quire.kernels.triton.softmax import empty_state, merge_states

# Memory for partial states: `num_slots` slots of `slot_rows` rows. acc: float32 [num_slots, slot_rows, head_dim_vo];
# ml: float32 [num_slots, slot_rows, 2]. Nothing outside is read or written, whatever the tables say. arrivals: int32
# [programs], counters of the partial states stored so far, for each tile at the first program that computes it.
Partials = namedtuple("Partials", "acc ml arrivals num_slots slot_rows")


@triton.jit
def rows_in_slot(partials, slot, request, tile, c: tl.constexpr):
    """How many of a tile's rows a slot holds: all of them, unless the tables have more than was planned for."""
    count = tl.minimum(request.q_len * c.group - tile * c.block_m, partials.slot_rows)
    # Layers that are not batch-invariant have two slots for each program, however many work units there are.
    if c.invariant:
        count = tl.where(slot < partials.num_slots, count, 0)
    return count


@triton.jit
def store_partial(partials, slot, acc, m, l, request, tile, c: tl.constexpr):
    """Store a tile's partial state in a slot."""
    dv = tl.arange(0, c.block_dv)[None, :]
    r = tl.arange(0, c.block_m)
    valid = r < rows_in_slot(partials, slot, request, tile, c)
    at = slot.to(tl.int64) * partials.slot_rows + r
    tl.store(partials.acc + at[:, None] * c.head_dim_vo + dv, acc, valid[:, None] & (dv < c.head_dim_vo))
    tl.store(partials.ml + at * 2, m, valid)
    tl.store(partials.ml + at * 2 + 1, l, valid)


@triton.jit
def combine_partials(
    partials, output, layer, request, tile, h, start, units, first_program, last_program, c: tl.constexpr
):
    """Merge a tile's partial states in the order of their keys, and write its rows. The tile has `units` work units
    from `start` on, computed by programs first_program to last_program.
    """
    r = tile * c.block_m + tl.arange(0, c.block_m)
    valid = r < request.q_len * c.group
    dv = tl.arange(0, c.block_dv)[None, :]
    acc, m, l = empty_state(c)
    count = last_program - first_program + 1
    if c.invariant:
        count = units
    # Registers last for four partial states of small tiles.
    unroll: tl.constexpr = 4 if c.block_m * c.block_dv <= 64 * 128 else 1
    for n in tl.range(count, loop_unroll_factor=unroll):
        if c.invariant:
            slot = start + n
        else:
            slot = tl.where(n == 0, 2 * first_program + 1, 2 * (first_program + n))
        at = slot.to(tl.int64) * partials.slot_rows + tl.arange(0, c.block_m)
        stored = tl.arange(0, c.block_m) < rows_in_slot(partials, slot, request, tile, c)
        inside = stored[:, None] & (dv < c.head_dim_vo)
        acc_2 = tl.load(partials.acc + at[:, None] * c.head_dim_vo + dv, inside, 0.0)
        m_2 = tl.load(partials.ml + at * 2, stored, float("-inf"))
        l_2 = tl.load(partials.ml + at * 2 + 1, stored, 0.0)
        acc, m, l = merge_states(acc, m, l, acc_2, m_2, l_2)
    token, head = request.q_start + r // c.group, h * c.group + r % c.group
    write_rows(acc, m, l, output, layer, token, head, h, valid, c)


@triton.jit
def combine_if_last(partials, output, layer, request, tile, h, start, units, share, c: tl.constexpr):
    """Combine a tile's partial states if this program is the last one to have stored any. Programs compute `share` work
    units each; those of the tile are `units` from `start` on.
    """
    first_program, last_program = start // share, (start + units - 1) // share
    if first_program < last_program:
        # All of this program's partial state is written before it counts as arrived.
        tl.debug_barrier()
        if tl.atomic_add(partials.arrivals + first_program, 1) == last_program - first_program:
            combine_partials(partials, output, layer, request, tile, h, start, units, first_program, last_program, c)
            tl.store(partials.arrivals + first_program, 0)
