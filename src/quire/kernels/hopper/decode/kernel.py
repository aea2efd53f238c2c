"""Decode on Hopper: a warp group that fetches keys and values, and one that attends.

A ring of blocks in shared memory lets the first run ahead of the second, over the ends of heads and requests, so that
memory is never idle: pages are gathered by 16-byte copies that name their own addresses, whatever the page size. What
the second computes of a block is in `tile.py`. Two programs share a multiprocessor, and each hides the other's
beginning and end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.decode.combine import Parts, collect, collects, leave, place_of
from quire.kernels.hopper.decode.invariant import UnitParts, consume_units, reach_of
from quire.kernels.hopper.decode.tile import Masks, Queries, attend_keys, load_queries, rows_of, upright
from quire.kernels.hopper.epilogue import Results, clear_padding, write
from quire.kernels.hopper.schedule import Tables, my_span, next_tile, piece_at, quotient, request_at


@dataclass(frozen=True, slots=True)
class Config:
    """What the kernel is compiled for. heads: KV heads, of which `pair` are read together and count as one;
    group: query heads for one; words: numbers of two bytes in a stored head; block: keys of a block; stages: blocks in
    the ring; programs: on a multiprocessor; scan: requests looked at together; rows: of a tile, a power of
    two; part_rows: of a part of a tile, a power of two of at least four; part_cost: how long it takes to add up a part,
    in 32nds of what a unit takes; fetchers: registers of a thread that fetches.
    """

    heads: int
    group: int
    pair: int
    dim: int
    words: int
    page_size: int
    block: int
    stages: int
    programs: int
    scan: int
    rows: int
    part_rows: int
    part_cost: int
    fetchers: int
    causal: bool
    window: bool
    cap: bool
    mask: bool
    sinks: bool
    far: bool
    by_length: bool
    lse: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    fp8: bool
    e5m2: bool
    unit: int  # keys of a unit of the line, a block unless it is batch-invariant
    run: int = 0  # units that are folded together to be batch-invariant; 0: it is not
    whole: bool = False  # tiles are not cut, and are of tile_rows rows
    tile_rows: int = 0  # all


class Cache(NamedTuple):
    """Keys and values in numbers of two bytes, with strides in them."""

    k: tl.tensor
    v: tl.tensor
    k_page: tl.tensor
    k_token: tl.tensor
    k_head: tl.tensor
    v_page: tl.tensor
    v_token: tl.tensor
    v_head: tl.tensor


class Ring(NamedTuple):
    """Blocks of keys and values, and for each whether it is full, whether it is empty."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def pages_of(tables, request, j, c: gl.constexpr):
    """The pages of keys j, clamped, so that no table leads outside the cache."""
    if c.page_size > 0:
        page = gl.load(tables.indices + request.entry + j // c.page_size, j < request.kv_len, 0)
    else:
        page = request.entry + j
    page = gl.minimum(gl.maximum(page, 0), tables.pages - 1)
    return page.to(gl.int64) if c.far else page


@gluon.constexpr_function
def _common(a, b):
    return math.gcd(a, b)


@gluon.jit
def rows_at(page, head, j, further, page_step, token_step, head_step, layout: gl.constexpr, c: gl.constexpr):
    """Where rows lie: of keys j, that have these pages, and of those that follow each."""
    at = page * page_step + head * head_step
    if c.page_size > 1:
        at += j % c.page_size * token_step
    step = token_step if c.page_size > 0 else page_step
    rows = (at[:, None] + (further * step)[None, :]).reshape([c.block])
    return gl.multiple_of(gl.convert_layout(rows, layout, assert_trivial=True), 8)


@gluon.jit
def fetch(tables, cache, ring, results, span, c: gl.constexpr):
    """Fill the ring with the span's blocks. Each thread copies 16 bytes at a time; rows without a key become zeros. And
    clear the padding, while blocks are on their way.
    """
    width: gl.constexpr = c.words * c.pair
    each: gl.constexpr = min(c.block * width // 1024, 8)  # neighbouring rows of a thread
    same: gl.constexpr = _common(c.page_size, each)  # that are in one page
    layout: gl.constexpr = gl.BlockedLayout([each, 8], [256 // width, width // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.BlockedLayout([each // same, same, 8], [256 // width, 1, width // 8], [4, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    t = gl.arange(0, c.block, flat)
    first = gl.arange(0, c.block // same, gl.SliceLayout(1, gl.SliceLayout(2, rows))) * same
    further = gl.arange(0, same, gl.SliceLayout(0, gl.SliceLayout(2, rows)))
    d = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    k_at, v_at = cache.k + d, cache.v + d
    if c.pair > 1:
        k_at = cache.k + (d % c.words + d // c.words * cache.k_head)
        v_at = cache.v + (d % c.words + d // c.words * cache.v_head)
    unit, request = span.unit, span.request
    if c.whole:
        unit, request = next_tile(tables, request, unit, span.end, c)
    n = unit * 0
    while unit < span.end:
        piece = piece_at(request, unit, span.end, c)
        unit += piece.last - piece.first
        reach = reach_of(request, piece, tables.window, c)
        head = (reach.h.to(gl.int64) if c.far else reach.h) * c.pair
        page = pages_of(tables, request, reach.begin + first, c)
        for t0 in range(reach.begin, reach.stop, c.block):
            k_row = rows_at(page, head, t0 + first, further, cache.k_page, cache.k_token, cache.k_head, flat, c)
            v_row = rows_at(page, head, t0 + first, further, cache.v_page, cache.v_token, cache.v_head, flat, c)
            page = pages_of(tables, request, t0 + c.block + first, c)  # asked for one block ahead
            j = t0 + t
            here = j < request.kv_len
            if c.window:
                here = here & (j >= request.kv_len - request.q_len - tables.window)
            stage = n % c.stages
            mbarrier.wait(ring.empty.index(stage), (n // c.stages & 1) ^ 1)
            async_copy.async_copy_global_to_shared(ring.k.index(stage), k_at + k_row[:, None], here[:, None])
            async_copy.async_copy_global_to_shared(ring.v.index(stage), v_at + v_row[:, None], here[:, None])
            async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
            n += 1
        request = request_at(tables, request, unit, span.end, c)
    clear_padding(tables, results, c)


@gluon.jit
def consume(tables, queries, masks, ring, parts, results, span, c: gl.constexpr):
    """Attend to the ring's blocks, tile by tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.rows, 16])
    flat: gl.constexpr = gl.SliceLayout(0, L)
    unit, request = span.unit, span.request
    n = span.unit * 0
    while unit < span.end:
        piece = piece_at(request, unit, span.end, c)
        rows = rows_of(request, 0, load_queries(queries, request, piece.h, 0, flat, c), masks, c)
        begin = request.low + piece.first * c.block
        acc, m, total, n = attend_keys(queries, rows, request, ring, begin, piece.stop, n, tables, masks, c)
        state, count = upright(acc, c), request.q_len * c.group
        tile = unit - piece.first
        origin, final = quotient(tile, span.share), quotient(tile + request.cost - 1, span.share)
        if origin == final:
            write(state, m, total, results, request.q_begin, piece.h, 0, count, c)
        elif collects(span.program, origin, final):
            collect(state, m, total, parts, results, request, piece.h, span.program, origin, final, ring.k, ring.v, c)
        else:
            leave(state, m, total, parts, place_of(span.program, origin, final), 0, count, c)
        unit += piece.last - piece.first
        request = request_at(tables, request, unit, span.end, c)


_POINTERS = (
    "lse", "sinks", "qo_indptr", "kv_indptr", "last_page_len", "indices", "mask_bits", "mask_indptr",
    "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_NUMBERS = ("processors", "slots", "mask_size", "batch", "tokens", "entries", "pages", "window")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def decode(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    part, qo_indptr, kv_indptr, last_page_len, indices, mask_bits, mask_indptr, q_scale, k_scale, v_scale,
    processors, slots, mask_size, batch, tokens, entries, pages, window, scale, v_gain, cap,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
    c: gl.constexpr,
):  # fmt: skip
    """Attention of a batch of requests, over pages or ragged rows; with at most 64 query rows per KV head, but where
    tiles are whole.

    q, k, v, out: as in `quire.kernels.registry.Call` (q_pe and k_pe are None); lse: float32 [tokens, heads]. part:
    int32 [programs, c.part_rows, dim] and after it [programs, c.part_rows, 2], 0 before and after; with c.run [slots,
    ...]; none where tiles are whole. Strides count elements, those of k and v are multiples of 16. scale and cap are in
    base 2.
    """
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, window)
    if c.fp8:
        k, v = k.to(gl.pointer_type(gl.int16), bitcast=True), v.to(gl.pointer_type(gl.int16), bitcast=True)
    cache = Cache(k, v, k_page, k_token, k_head, v_page, v_token, v_head)
    sums = part
    if not c.whole:
        sums += (slots.to(gl.int64) if c.run > 0 else gl.num_programs(0)) * (c.part_rows * c.dim)
    parts = Parts(part, sums)
    if c.run > 0:
        parts = UnitParts(part, sums, slots)  # type: ignore[assignment]
    results = Results(out, lse, o_token, o_head, sinks, v_scale, v_gain)
    stored: gl.constexpr = k.dtype.element_ty
    dtype: gl.constexpr = gl.float16 if c.fp8 else stored
    width: gl.constexpr = c.words * c.pair
    block: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block, width], stored)
    ring = Ring(
        gl.allocate_shared_memory(stored, [c.stages, c.block, width], block),
        gl.allocate_shared_memory(stored, [c.stages, c.block, width], block),
        gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout()),
    )
    stages: gl.constexpr = c.stages
    for s in gl.static_range(stages):
        mbarrier.init(ring.full.index(s), count=128)  # threads that copy
        mbarrier.init(ring.empty.index(s), count=1)
    row: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.rows, c.words], dtype)
    tile = gl.allocate_shared_memory(dtype, [c.dim // c.words, c.rows, c.words], row)
    key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.rows, c.block], dtype)
    weights = gl.allocate_shared_memory(dtype, [c.rows, c.block], key)
    queries = Queries(q, q_token, q_head, tile, weights, scale, cap, q_scale, k_scale)
    masks = Masks(mask_bits, mask_indptr, mask_size)
    gdc_launch_dependents()
    gdc_wait()
    span = my_span(tables, gl.program_id(0), gl.num_programs(0), processors, c)
    gl.warp_specialize(
        [
            (consume_units if c.run > 0 else consume, (tables, queries, masks, ring, parts, results, span, c)),
            (fetch, (tables, cache, ring, results, span, c)),
        ],
        [4],
        [c.fetchers],
    )
