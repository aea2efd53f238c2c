"""The attention kernel, over pages or ragged rows, for every kind of layer.

With split-KV (see `schedule.py`) programs take equal shares of all work units. A program whose share holds only a part
of a tile stores a partial state in one of its two slots, and the last program to store one of a tile combines them in
the order of their keys. Without split-KV, programs take whole tiles, the last ones first, since these see most keys. A
plan only has bounds of its batch: the kernel reads the tables when it runs, and they may change between two launches.

In batch-invariant mode a work unit is a longer run of keys that starts at a multiple of its length. The state of each
unit is computed on its own, and states are merged in the order of their keys whichever program computed them, so that
the bits of a row depend on nothing but its own query and keys.
"""

from __future__ import annotations

import triton
from triton import language as tl

from quire.kernels.triton.combine import Partials, combine_if_last, store_partial
from quire.kernels.triton.epilogue import OutputRows, clear_padding, write_rows
from quire.kernels.triton.mask import Mask, first_key, key_ends
from quire.kernels.triton.schedule import BatchTables, find_request, load_offsets, load_request, tiles_and_units
from quire.kernels.triton.softmax import empty_state, merge_states
from quire.kernels.triton.tile import Cache, LayerValues, Queries, attend_keys, load_queries, load_rows


@triton.jit
def attend_tile(
    queries, cache, layer, mask, output, partials, request, tile, h, first_unit, end_unit, units, slot, c: tl.constexpr
):
    """Compute work units first_unit to end_unit of a tile that has `units`: into its rows of the output, or into slots
    from `slot` on if these are not all.
    """
    rows = load_rows(tile, h, request, layer, mask, c)
    q1, q2, rows = load_queries(queries, rows, request, layer, c)

    i_first = tile * c.block_m // c.group
    i_last = tl.minimum((tile * c.block_m + c.block_m - 1) // c.group, request.q_len - 1)
    # Keys start to stop are read, of which those before full_end need no mask. No row sees any key before `first`.
    # Work unit u of a tile has keys from (unit_0 + u) * c.unit on.
    unit_0 = first_key(request, 0, mask, c) // c.unit
    start = unit_0 * c.unit + first_unit * c.unit
    first = first_key(request, i_first, mask, c)
    start = tl.maximum(start, first // c.block_n * c.block_n)
    stop, full_end = key_ends(request, i_first, i_last, mask, c)
    unit_end = tl.cdiv(stop, c.unit)
    if c.split_kv:
        unit_end = unit_0 + end_unit
        stop = tl.minimum(stop, unit_end * c.unit)
    full_end = tl.minimum(full_end // c.block_n * c.block_n, stop // c.block_n * c.block_n)

    whole = end_unit - first_unit == units
    acc, m, l = empty_state(c)
    if c.invariant:
        for u in range(unit_0 + first_unit, unit_end):
            acc_2, m_2, l_2 = empty_state(c)
            acc_2, m_2, l_2 = attend_keys(
                acc_2, m_2, l_2, q1, q2, rows, request, h, cache, layer, mask,
                tl.maximum(start, u * c.unit), tl.minimum(stop, (u + 1) * c.unit), first, stop, True, c,
            )  # fmt: skip
            if c.split_kv and not whole:
                store_partial(partials, slot, acc_2, m_2, l_2, request, tile, c)
                slot += 1
            else:
                acc, m, l = merge_states(acc, m, l, acc_2, m_2, l_2)
    else:
        if c.mask.has_full_blocks:
            acc, m, l = attend_keys(
                acc, m, l, q1, q2, rows, request, h, cache, layer, mask, start, full_end, first, stop, False, c
            )
            start = tl.maximum(start, full_end)
        acc, m, l = attend_keys(
            acc, m, l, q1, q2, rows, request, h, cache, layer, mask, start, stop, first, stop, True, c
        )
        if c.split_kv and not whole:
            store_partial(partials, slot, acc, m, l, request, tile, c)
    if whole or not c.split_kv:
        write_rows(acc, m, l, output, layer, request.q_start + rows.i, rows.head, h, rows.valid, c)


_POINTERS = (
    "lse", "sinks", "arrivals", "qo_indptr", "kv_indptr", "last_page_len", "indices", "mask_bits", "mask_indptr",
    "prefix_lens", "item_positions", "slopes", "inv_freq", "q_scales", "k_scales", "v_scales",
)  # fmt: skip
_NUMBERS = ("window_left", "mask_bytes", "items_len", "num_slots", "slot_rows", "batch", "tokens", "entries", "pages")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def attend(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    partials, arrivals, qo_indptr, kv_indptr, last_page_len, indices,
    mask_bits, mask_indptr, prefix_lens, item_positions, slopes, inv_freq, q_scales, k_scales, v_scales,
    window_left, mask_bytes, items_len, num_slots, slot_rows, batch, tokens, entries, pages,
    sm_scale, v_scale, pe_scale, soft_cap,
    stride_q_token, stride_q_head, stride_q_pe_token, stride_q_pe_head,
    stride_k_page, stride_k_token, stride_k_head, stride_v_page, stride_v_token, stride_v_head,
    stride_k_pe_page, stride_k_pe_token, stride_o_token, stride_o_head,
    c: tl.constexpr,
):  # fmt: skip
    """Attention of a batch.

    q, k, v, out: as in `quire.kernels.call.Call`; lse: float32 [tokens, heads]. With split-KV, partials: float32
    [num_slots, slot_rows, head_dim_vo] and then [num_slots, slot_rows, 2]; arrivals: int32 [programs], 0 before and
    after the launch. Strides count elements. sm_scale and soft_cap are in base 2; inv_freq: int64 [head_dim_qk / 2].
    """
    tables = BatchTables(qo_indptr, kv_indptr, last_page_len, batch, tokens, entries)
    queries = Queries(q, q_pe, stride_q_token, stride_q_head, stride_q_pe_token, stride_q_pe_head)
    cache = Cache(
        k, v, k_pe, indices, pages, stride_k_page, stride_k_token, stride_k_head,
        stride_v_page, stride_v_token, stride_v_head, stride_k_pe_page, stride_k_pe_token,
    )  # fmt: skip
    layer = LayerValues(sm_scale, v_scale, pe_scale, soft_cap, inv_freq, sinks, slopes, q_scales, k_scales, v_scales)
    mask = Mask(mask_bits, mask_indptr, prefix_lens, item_positions, window_left, mask_bytes, items_len)
    output = OutputRows(out, lse, stride_o_token, stride_o_head)
    ml = partials
    if c.split_kv:
        ml = partials + num_slots.to(tl.int64) * slot_rows * c.head_dim_vo
    partials = Partials(partials, ml, arrivals, num_slots, slot_rows)

    program = tl.program_id(0)
    _start, q_end = load_offsets(qo_indptr, batch - 1, tokens, batch > 0)
    clear_padding(output, q_end, tokens, c)
    total, _b, _s = find_request(tables, mask, 0 * program, c)
    share = 1
    unit = total - 1 - program
    if c.split_kv:
        share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
        unit = program * share
    end = tl.minimum(unit + share, total)
    _t, b, start = find_request(tables, mask, tl.maximum(unit, 0), c)
    while (unit < end) & (unit >= 0):
        request = load_request(tables, b, c)
        tiles, units = tiles_and_units(request, mask, c)
        if unit < start + tiles * units * c.heads:
            row = (unit - start) // units
            first_unit = unit - start - row * units
            end_unit = tl.minimum(first_unit + end - unit, units)
            slot = unit if c.invariant else 2 * program + (first_unit == 0).to(tl.int32)
            tile, h = row // c.heads, row % c.heads
            attend_tile(
                queries, cache, layer, mask, output, partials, request, tile, h, first_unit, end_unit, units, slot, c
            )
            if c.split_kv:
                combine_if_last(partials, output, layer, request, tile, h, unit - first_unit, units, share, c)
            unit += end_unit - first_unit
        else:
            start += tiles * units * c.heads
            b += 1
