"""Attention over pages or ragged rows, one kernel for every kind of layer.

How tiles (`schedule.py`) meet programs (`quire.kernels.cpu.schedule` states the rule in plain loops): all tiles
of all requests lie on a line, request by request, tile by tile, head by head. With `split`, a tile is as long as its
request has units of keys (a unit is a block) and each program takes an equal share of the line; a program that holds
only a part of a tile leaves its state in one of its two slots, and whoever is last to do so puts the parts together in
the order of their keys. Without, a program takes one tile, the last ones first, since those see most. Programs find
their tiles themselves, from the tables: what runs later reads tables that have changed since.

With `invariant`, a unit is a longer run of keys that begins at a multiple of its length. The state of each unit is made
alone, and they are folded in order whoever made them, so that a row's bits depend on nothing but its own keys.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl

from quire.kernels.triton.schedule import Tables, bounds, cost_of, extent, first_key, line
from quire.kernels.triton.tile import LOG2E, Cache, Layer, Masks, Rows, fold, load_queries, nothing, walk


class Queries(NamedTuple):
    """Queries, with strides in elements. `pe`: their second part where it is stored apart."""

    q: tl.tensor
    pe: tl.tensor
    q_token: tl.tensor
    q_head: tl.tensor
    pe_token: tl.tensor
    pe_head: tl.tensor


class Results(NamedTuple):
    """Where rows go, and where parts of tiles do: there are `slots` of them, of `rows` rows each, and none is written
    beyond, whatever the tables say.
    """

    out: tl.tensor
    lse: tl.tensor
    o_token: tl.tensor
    o_head: tl.tensor
    part: tl.tensor
    part_ml: tl.tensor
    slots: tl.tensor
    rows: tl.tensor


@triton.jit
def rows_of(tile, h, request, layer, masks, c: tl.constexpr):
    """The rows of a tile."""
    r = tile * c.block_m + tl.arange(0, c.block_m)
    real = r < request.q_len * c.group
    i, head = r // c.group, h * c.group + r % c.group
    position = request.kv_len - request.q_len + i
    scale = tl.full([c.block_m, 1], 1.0, tl.float32) * layer.scale
    if c.q_scale:
        scale *= tl.load(layer.q_scale + head, real, 1.0)[:, None]
    if c.k_scale:
        scale *= tl.load(layer.k_scale + h)
    slope = position
    if c.alibi:
        slope = tl.load(layer.slopes + head, real, 0.0)
    item = position
    prefix = request.b * 0
    if c.items:
        prefix = tl.load(masks.prefix_lens + request.b).to(tl.int32)
        at = position - prefix
        there = real & (at >= 0) & (at < masks.items_len)
        item = tl.load(masks.item_positions + request.b.to(tl.int64) * masks.items_len + at, there, 0).to(tl.int32)
    mask_begin = request.b * 0
    if c.mask:
        mask_begin = tl.maximum(tl.load(masks.indptr + request.b), 0)
    return Rows(i, head, position, real, scale, slope, item, mask_begin, prefix)


@triton.jit
def queries_of(queries, rows, request, layer, c: tl.constexpr):
    """Both parts of a tile's queries, and its rows: halves need them near 1, by a power of two that joins the scale."""
    token, head = (request.q_begin + rows.i).to(tl.int64), rows.head.to(tl.int64)
    start = queries.q + token * queries.q_token + head * queries.q_head
    q1 = load_queries(start, 0, c.d1, rows, layer.turns, c)
    q2 = q1
    if c.latent:
        start = queries.pe + token * queries.pe_token + head * queries.pe_head - c.d1
    if c.d2 > 0:
        q2 = load_queries(start, c.d1, c.d2, rows, layer.turns, c)
    if c.latent:
        q2 = q2.to(tl.float32) * layer.pe_gain
    scale = rows.scale
    if c.normed:
        top = tl.max(tl.abs(q1.to(tl.float32)), 1)
        if c.d2 > 0:
            top = tl.maximum(top, tl.max(tl.abs(q2.to(tl.float32)), 1))
        power = tl.exp2(tl.floor(tl.log2(tl.maximum(top, 1e-30))))[:, None]
        q1, scale = q1 / power, scale * power
        if c.d2 > 0:
            q2 = q2 / power
    rows = Rows(rows.i, rows.head, rows.position, rows.real, scale, rows.slope, rows.item, rows.mask_begin, rows.prefix)
    return q1.to(c.qk_type), q2.to(c.qk_type), rows


@triton.jit
def attend_tile(
    queries, cache, layer, masks, results, request, tile, h, first, last, cost, slot, window, c: tl.constexpr
):
    """Units first to last (of `cost`) of one tile, to its rows of out and lse, or to slots if that is not all."""
    rows = rows_of(tile, h, request, layer, masks, c)
    q1, q2, rows = queries_of(queries, rows, request, layer, c)

    # Keys begin to high are those that some row sees, those before `clear` are seen by all.
    past = request.kv_len - request.q_len
    i_first = tile * c.block_m // c.group
    i_last = tl.minimum((tile * c.block_m + c.block_m - 1) // c.group, request.q_len - 1)
    low = first_key(request, window, 0, c.unit, c)
    begin = tl.maximum(low + first * c.unit, first_key(request, window, i_first, c.block_n, c))
    high, clear, lowest = request.kv_len, request.kv_len, 0
    if c.window:
        lowest = tl.maximum(past + i_first - window, 0)
    if c.causal:
        high = tl.minimum(request.kv_len, past + i_last + 1)
        clear = tl.maximum(tl.minimum(request.kv_len, past + i_first + 1), 0)
    stop = tl.cdiv(high, c.unit)
    if c.split:
        stop = low // c.unit + last
        high = tl.minimum(high, stop * c.unit)
    clear = tl.minimum(clear // c.block_n * c.block_n, high // c.block_n * c.block_n)

    whole = last - first == cost
    acc, m, l = nothing(c)
    if c.invariant:
        for u in range(low // c.unit + first, stop):
            acc_2, m_2, l_2 = nothing(c)
            acc_2, m_2, l_2 = walk(
                acc_2, m_2, l_2, q1, q2, rows, request, h, cache, layer, masks, window,
                tl.maximum(begin, u * c.unit), tl.minimum(high, (u + 1) * c.unit), lowest, high, True, c,
            )  # fmt: skip
            if c.split and not whole:
                save(results, slot, acc_2, m_2, l_2, request, tile, c)
                slot += 1
            else:
                acc, m, l = fold(acc, m, l, acc_2, m_2, l_2)
    else:
        if not (c.window or c.mask or c.items):
            acc, m, l = walk(
                acc, m, l, q1, q2, rows, request, h, cache, layer, masks, window,
                begin, clear, lowest, high, False, c,
            )  # fmt: skip
            begin = tl.maximum(begin, clear)
        acc, m, l = walk(
            acc, m, l, q1, q2, rows, request, h, cache, layer, masks, window, begin, high, lowest, high, True, c
        )
        if c.split and not whole:
            save(results, slot, acc, m, l, request, tile, c)
    if whole or not c.split:
        finish(acc, m, l, results, layer, request.q_begin + rows.i, rows.head, h, rows.real, c)


@triton.jit
def kept(results, slot, request, tile, c: tl.constexpr):
    """How many of a tile's rows a slot has room for: all of them, unless the tables say more than was planned for."""
    count = tl.minimum(request.q_len * c.group - tile * c.block_m, results.rows)
    if c.invariant:  # else there are two slots for each program, whatever the line's length
        count = tl.where(slot < results.slots, count, 0)
    return count


@triton.jit
def save(results, slot, acc, m, l, request, tile, c: tl.constexpr):
    """A state to its slot."""
    dv = tl.arange(0, c.dv)[None, :]
    r = tl.arange(0, c.block_m)
    real = r < kept(results, slot, request, tile, c)
    at = slot.to(tl.int64) * results.rows + r
    tl.store(results.part + at[:, None] * c.dim_vo + dv, acc, real[:, None] & (dv < c.dim_vo))
    tl.store(results.part_ml + at * 2, m, real)
    tl.store(results.part_ml + at * 2 + 1, l, real)


@triton.jit
def merge_parts(results, layer, request, tile, h, begin, cost, origin, final, c: tl.constexpr):
    """Put a tile's parts together, and finish it. It begins at unit `begin`; programs origin to final hold parts."""
    r = tile * c.block_m + tl.arange(0, c.block_m)
    real = r < request.q_len * c.group
    dv = tl.arange(0, c.dv)[None, :]
    acc, m, l = nothing(c)
    count = final - origin + 1
    if c.invariant:
        count = cost
    ahead: tl.constexpr = 4 if c.block_m * c.dv <= 64 * 128 else 1  # as registers have room for
    for n in tl.range(count, loop_unroll_factor=ahead):
        if c.invariant:
            slot = begin + n
        else:
            slot = tl.where(n == 0, 2 * origin + 1, 2 * (origin + n))
        at = slot.to(tl.int64) * results.rows + tl.arange(0, c.block_m)
        saved = tl.arange(0, c.block_m) < kept(results, slot, request, tile, c)
        acc_2 = tl.load(results.part + at[:, None] * c.dim_vo + dv, saved[:, None] & (dv < c.dim_vo), 0.0)
        m_2 = tl.load(results.part_ml + at * 2, saved, float("-inf"))
        l_2 = tl.load(results.part_ml + at * 2 + 1, saved, 0.0)
        acc, m, l = fold(acc, m, l, acc_2, m_2, l_2)
    finish(acc, m, l, results, layer, request.q_begin + r // c.group, h * c.group + r % c.group, h, real, c)


@triton.jit
def finish(acc, m, l, results, layer, token, head, h, real, c: tl.constexpr):
    """Rows' states to out and lse, sinks joined in; a row that saw nothing is 0 and -inf."""
    dv = tl.arange(0, c.dv)[None, :]
    if c.sinks:
        sink = tl.load(layer.sinks + head, real, 0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        acc, l, m = acc * shrink[:, None], l * shrink + tl.exp2(sink - top), top
    acc = acc * (layer.v_gain / tl.where(l == 0.0, 1.0, l))[:, None]
    if c.v_scale:
        acc *= tl.load(layer.v_scale + h)
    at = token[:, None].to(tl.int64) * results.o_token + head[:, None].to(tl.int64) * results.o_head + dv
    tl.store(results.out + at, acc, real[:, None] & (dv < c.dim_vo))
    if c.lse:
        at = token * (c.heads * c.group) + head
        tl.store(results.lse + at, tl.where(l == 0.0, float("-inf"), m + tl.log2(l)), real)


@triton.jit
def clear_padding(results, q_end, tokens, c: tl.constexpr):
    """Zero the rows that belong to no request, spread over all programs."""
    dv = tl.arange(0, c.dv)[None, :]
    head = tl.arange(0, c.pad_heads)
    real = head < c.heads * c.group
    for token in range(q_end + tl.program_id(0), tokens, tl.num_programs(0)):
        zero = tl.full([c.pad_heads, c.dv], 0.0, tl.float32)
        at = tl.full([1], 1, tl.int64) * token * results.o_token + head.to(tl.int64) * results.o_head
        tl.store(results.out + at[:, None] + dv, zero, real[:, None] & (dv < c.dim_vo))
        if c.lse:
            tl.store(results.lse + token * (c.heads * c.group) + head, float("-inf"), real)


_POINTERS = (
    "lse", "sinks", "arrivals", "qo_indptr", "kv_indptr", "last_page_len", "indices", "mask_bits", "mask_indptr",
    "prefix_lens", "item_positions", "slopes", "turns", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_NUMBERS = ("mask_size", "items_len", "slots", "part_rows", "batch", "tokens", "entries", "pages", "window")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def attend(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    part, arrivals, qo_indptr, kv_indptr, last_page_len, indices,
    mask_bits, mask_indptr, prefix_lens, item_positions, slopes, turns, q_scale, k_scale, v_scale,
    mask_size, items_len, slots, part_rows, batch, tokens, entries, pages, window, scale, v_gain, pe_gain, cap,
    q_token, q_head, q_pe_token, q_pe_head, k_page, k_token, k_head, v_page, v_token, v_head,
    k_pe_page, k_pe_token, o_token, o_head,
    c: tl.constexpr,
):  # fmt: skip
    """Attention of a batch.

    q, k, v, out: as in `quire.kernels.registry.Call`; lse: float32 [tokens, heads]. With `split`, part: float32 [slots,
    part_rows, dim_vo] and after it [slots, part_rows, 2]; arrivals: int32 [programs], 0 before and after. Strides
    count elements. scale and cap are in base 2; turns: int64 [dim_qk / 2].
    """
    tables = Tables(qo_indptr, kv_indptr, last_page_len, batch, tokens, entries, window)
    queries = Queries(q, q_pe, q_token, q_head, q_pe_token, q_pe_head)
    cache = Cache(
        k, v, k_pe, indices, pages, k_page, k_token, k_head, v_page, v_token, v_head, k_pe_page, k_pe_token
    )  # fmt: skip
    layer = Layer(scale, v_gain, pe_gain, cap, turns, sinks, slopes, q_scale, k_scale, v_scale)
    masks = Masks(mask_bits, mask_indptr, mask_size, prefix_lens, item_positions, items_len)
    part_ml = part
    if c.split:
        part_ml = part + slots.to(tl.int64) * part_rows * c.dim_vo
    results = Results(out, lse, o_token, o_head, part, part_ml, slots, part_rows)

    program = tl.program_id(0)
    _begin, q_end = bounds(qo_indptr, batch - 1, tokens, batch > 0)
    clear_padding(results, q_end, tokens, c)
    total, _b, _s = line(tables, 0 * program, c)
    share = 1
    unit = total - 1 - program
    if c.split:
        share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
        unit = program * share
    end = tl.minimum(unit + share, total)
    _t, b, start = line(tables, tl.maximum(unit, 0), c)
    while (unit < end) & (unit >= 0):
        request = extent(tables, b, c)
        tiles, cost = cost_of(request, window, c)
        if unit < start + tiles * cost * c.heads:
            row = (unit - start) // cost
            first = unit - start - row * cost
            last = tl.minimum(first + end - unit, cost)
            slot = unit if c.invariant else 2 * program + (first == 0).to(tl.int32)
            tile, h = row // c.heads, row % c.heads
            attend_tile(queries, cache, layer, masks, results, request, tile, h, first, last, cost, slot, window, c)
            if c.split:
                begin = unit - first
                origin, final = begin // share, (begin + cost - 1) // share
                if origin < final:
                    tl.debug_barrier()  # all of this part is written before it counts as arrived
                    if tl.atomic_add(arrivals + origin, 1) == final - origin:
                        merge_parts(results, layer, request, tile, h, begin, cost, origin, final, c)
                        tl.store(arrivals + origin, 0)
            unit += last - first
        else:
            start += tiles * cost * c.heads
            b += 1
