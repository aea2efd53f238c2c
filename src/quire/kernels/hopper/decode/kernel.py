"""The decode kernel: its compile-time configuration, its entry point and the consumer.

One warp group loads keys and values (`load.py`), another one attends (`tile.py`), with a pipeline of blocks in shared
memory between them. The producer runs ahead over the ends of heads and requests, so that memory is never idle; it
gathers pages of any size by copies of 16 bytes with an address each. Two programs share a multiprocessor where there is
room, and each hides the other's prologue and epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.decode.combine import Partials, combine, combines, slot_of, store_partial
from quire.kernels.hopper.decode.invariant import consume_invariant
from quire.kernels.hopper.decode.load import Cache, allocate_kv_pipeline, load
from quire.kernels.hopper.decode.tile import Queries, attend_keys, load_rows, tile_of, transpose_acc
from quire.kernels.hopper.epilogue import Output, store_rows
from quire.kernels.hopper.mask import Mask
from quire.kernels.hopper.pipeline import PipelineState
from quire.kernels.hopper.schedule import Tables, find_span, quotient, request_at, segment_at


@dataclass(frozen=True, slots=True)
class Config:
    """What the kernel is compiled for."""

    heads: int  # KV heads; `packed_heads` of them count as one
    group: int  # query heads of one of these
    packed_heads: int  # 1, or 2 KV heads whose keys and values are loaded together and computed as one tile
    dim: int  # head_dim
    stored_dim: int  # 16-bit elements of a head in the cache: dim, or dim / 2 with fp8
    page_size: int  # tokens in a page; 0 for ragged rows
    block_m: int  # query rows of a tile, padded to a power of two
    block_n: int  # keys in a block
    stages: int  # blocks in the pipeline
    programs: int  # on a multiprocessor
    scan: int  # requests in one prefix sum of the schedule
    partial_rows: int  # rows of a partial state, a power of two, at least 4
    partial_cost: int  # time to merge a partial state, in 32nds of the time of a work unit
    load_registers: int  # per thread of the producer
    right: int  # keys to the right of its position that a row sees; -1: all
    window: bool
    mask: bool  # custom masks
    cap: bool  # of logits
    sinks: bool
    int64_offsets: bool  # the cache has 2**31 elements or more
    by_length: bool  # last_page_len has the key counts of whole requests
    lse: bool  # is written
    q_scale: bool  # factors per head
    k_scale: bool
    v_scale: bool
    fp8: bool
    e5m2: bool  # fp8 is float8_e5m2, not float8_e4m3fn
    unit_size: int  # keys in a work unit: a block, unless batch-invariant
    run: int  # work units in a run of the batch-invariant split; 0: not batch-invariant
    whole_tiles: bool  # programs compute whole tiles
    tile_rows: int  # query rows of a tile; 0: all of a request
    most_q_len: int  # query tokens of the requests that this launch computes; 0: any number
    least_q_len: int = 0
    items: bool = False


@gluon.jit
def consume(tables, queries, pipeline, partials, output, span, c: gl.constexpr):
    """Attend to the pipeline's blocks, tile by tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block_m, 16])
    flat: gl.constexpr = gl.SliceLayout(0, L)
    unit, request = span.start, span.request
    state = PipelineState(gl.to_tensor(0), c.stages)
    while unit < span.end:
        segment = segment_at(request, unit, span.end, c)
        rows = load_rows(queries, request, segment.h, 0, flat, tables.mask, c)
        tile = tile_of(request, segment, tables.mask, c)
        start, end = tile.kv_start, tile.kv_end
        acc, m, l, state = attend_keys(queries, rows, request, pipeline, state, start, end, tables.mask, c)
        acc, row_end = transpose_acc(acc, c), request.q_len * c.group
        tile_start = unit - segment.start
        owner, last = quotient(tile_start, span.size), quotient(tile_start + request.units - 1, span.size)
        if owner == last:
            store_rows(acc, m, l, output, request.q_start, tile.h, 0, row_end, c)
        elif combines(span.program, owner, last):
            free, free_ml = pipeline.k, pipeline.v
            combine(acc, m, l, partials, output, request, tile.h, span.program, owner, last, free, free_ml, c)
        else:
            store_partial(acc, m, l, partials, slot_of(span.program, owner, last), 0, row_end, c)
        unit += segment.end - segment.start
        request = request_at(tables, request, unit, span.end, c)


_POINTERS = (
    "lse", "sinks", "qo_indptr", "kv_indptr", "last_page_len", "indices", "mask_bits", "mask_indptr",
    "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_NUMBERS = ("processors", "slots", "mask_size", "batch", "tokens", "entries", "pages", "window")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def decode(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    partials, qo_indptr, kv_indptr, last_page_len, indices, mask_bits, mask_indptr, q_scale, k_scale, v_scale,
    processors, slots, mask_size, batch, tokens, entries, pages, window, scale, v_gain, cap,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
    c: gl.constexpr,
):  # fmt: skip
    """Attention of those requests of a batch that have at most 64 query rows per KV head, over pages or ragged rows.
    With c.whole_tiles there may be others.

    q, k, v, out: as in `quire.kernels.registry.Call` (q_pe and k_pe are None). lse: float32 [tokens, heads]. partials:
    None with c.whole_tiles, otherwise int32 [n, c.partial_rows, dim] and after it [n, c.partial_rows, 2] for `Partials`
    with n slots, `slots` if c.run > 0 and one per program if not; 0 before and after. Strides count 16-bit elements,
    and those of k and v are multiples of 16. scale and cap are in base 2.
    """
    mask = Mask(window, mask_bits, mask_indptr, mask_size, None, None, None)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask)
    if c.fp8:
        k, v = k.to(gl.pointer_type(gl.int16), bitcast=True), v.to(gl.pointer_type(gl.int16), bitcast=True)
    cache = Cache(k, v, k_page, k_token, k_head, v_page, v_token, v_head)
    ml = partials
    if not c.whole_tiles:
        ml += (slots.to(gl.int64) if c.run > 0 else gl.num_programs(0)) * (c.partial_rows * c.dim)
    partial_states = Partials(partials, ml, slots)
    output = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain)
    stored: gl.constexpr = k.dtype.element_ty
    dtype: gl.constexpr = gl.float16 if c.fp8 else stored
    pipeline = allocate_kv_pipeline(stored, c)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_m, c.stored_dim], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [c.dim // c.stored_dim, c.block_m, c.stored_dim], q_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_m, c.block_n], dtype)
    p_shared = gl.allocate_shared_memory(dtype, [c.block_m, c.block_n], p_layout)
    queries = Queries(q, q_token, q_head, q_shared, p_shared, scale, cap, q_scale, k_scale)
    gdc_launch_dependents()
    gdc_wait()
    span = find_span(tables, gl.program_id(0), gl.num_programs(0), processors, c)
    gl.warp_specialize(
        [
            (consume_invariant if c.run > 0 else consume, (tables, queries, pipeline, partial_states, output, span, c)),
            (load, (tables, cache, pipeline, output, span, c)),
        ],
        [4],
        [c.load_registers],
    )
