"""The MLA kernels: their compile-time configuration, their entry points and the consumers.

One warp group loads blocks of 64 keys, both parts of them, and queries (`load.py`); two warp groups attend with 64
query rows (`tile.py`). Each of the two computes S and P of every second block, while the other one multiplies, and
accumulates PV of all blocks, but half of the columns: acc of whole rows would not fit the registers of one warp group.

`decode_latent` is for few query rows per request. Several 64-row tiles of a request that read the same keys are given
to neighbouring programs, c.programs_per_span of them, which compute the same span at the same time: all but the first
one to load a key find it in the L2 cache. `prefill_latent` is for many rows. Its tiles have different numbers of keys
in causal order, and programs take them one at a time, as those of `prefill/` do.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.combine import TilePartials
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.epilogue import Output, OutputConfig
from quire.kernels.hopper.mask import BatchMask, MaskConfig
from quire.kernels.hopper.mla.combine import span_partials
from quire.kernels.hopper.mla.load import (
    BLOCK_M,
    LatentCache,
    LatentQueries,
    Producer,
    allocate_latent_pipeline,
    load_span,
    load_work_tiles,
    tile_of,
    tile_of_blocks,
)
from quire.kernels.hopper.mla.tile import LatentConsumer
from quire.kernels.hopper.pipeline import PipelineConfig, PipelineState
from quire.kernels.hopper.schedule import ScheduleConfig, SpanConfig, Tables
from quire.kernels.hopper.tile_scheduler import TileSchedulerConfig, allocate_work_tiles

# Registers per thread at launch, and those of a consumer after the producer has given up some of its own.
REGISTERS = 168
CONSUMER_REGISTERS = gl.constexpr(216)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """What the kernels are compiled for. A consumer's output is one half of the first part of a head.

    Attributes:
        span: how `decode_latent` finds spans.
        scheduler: how `prefill_latent` finds work tiles.
        programs_per_span: programs that read the same keys, for 64 query rows each.
        transform: whether logits are scaled before the softmax.
        q_scale, k_scale: whether queries have a factor per head, and whether keys have a factor.
    """

    mask: MaskConfig
    schedule: ScheduleConfig
    span: SpanConfig
    scheduler: TileSchedulerConfig
    pipeline: PipelineConfig
    output: OutputConfig
    programs_per_span: int
    transform: bool
    q_scale: bool
    k_scale: bool

    @property
    def tile(self) -> TileConfig:
        """How the work is cut."""
        return self.schedule.tile

    @property
    def dim(self) -> int:
        """Columns of a consumer's acc."""
        return self.output.dim


@gluon.jit
def consume_span(consumer, tables, partials, output, span):
    """Attend to the blocks of a span, tile by tile."""
    c: gl.constexpr = consumer.config
    unit, request = span.start, span.request
    kv_state, q_state = PipelineState(gl.to_tensor(0), c.pipeline.stages), PipelineState(gl.to_tensor(0), 1)
    while unit < span.end:
        segment = request.segment(unit, span.end)
        tile = tile_of(request, segment, tables.mask, c.programs_per_span)
        state, kv_state, q_state = consumer.attend(request, tile, kv_state, q_state)
        if tile.count > 0:
            if segment.end - segment.start == request.units:
                output.store_rows(state, request.q_start, 0, tile.row, tile.row + tile.count, True)
            else:
                partials.store(state, 2 * span.program + (segment.start == 0).to(gl.int32), 0, tile.count)
                tile_start = unit - segment.start
                owner, last = span.owner(tile_start), span.owner(tile_start + request.units - 1)
                partials.combine(output, request, tile, span.program, owner, last)
        unit += segment.end - segment.start
        request = tables.request_at(request, unit, span.end)
    output.clear_padding(tables)


@gluon.jit
def consume_work_tiles(consumer, tables, partials, output, work_tiles):
    """Attend to the blocks of work tiles."""
    c: gl.constexpr = consumer.config
    tile_state = PipelineState(gl.to_tensor(0), 2)
    kv_state, q_state = PipelineState(gl.to_tensor(0), c.pipeline.stages), PipelineState(gl.to_tensor(0), 1)
    work_tiles.wait(tile_state)
    while work_tiles.slot(tile_state).load("h") >= 0:
        slot = work_tiles.slot(tile_state)
        seqlens, row = slot.seqlens(), slot.load("row")
        first, last = slot.load("first"), slot.load("last")
        tile = tile_of_blocks(row, slot.load("rows"), first, last, c.tile.block_n)
        state, kv_state, q_state = consumer.attend(seqlens, tile, kv_state, q_state)
        complete = True
        if slot.load("splits") > 1:
            complete, state = partials.combine(state, slot, consumer.index)
        if complete:
            q_start, row = slot.load("q_start"), slot.load("row")
            output.store_rows(state, q_start, 0, row, gl.minimum(slot.load("rows"), row + BLOCK_M), True)
        work_tiles.release(tile_state)
        tile_state = tile_state.advance(1)
        work_tiles.wait(tile_state)
    output.clear_padding(tables)


_POINTERS = (
    "lse", "sinks", "arrivals", "qo_indptr", "kv_indptr", "last_page_len", "indices", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_NUMBERS = ("partial_rows", "slots", "batch", "tokens", "entries", "pages")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def decode_latent(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    partials, arrivals, qo_indptr, kv_indptr, last_page_len, indices, q_scale, k_scale, v_scale,
    partial_rows, batch, tokens, entries, pages, scale, v_gain,
    q_token, q_head, q_pe_token, q_pe_head, k_page, k_token, k_pe_page, k_pe_token, o_token, o_head,
    c: gl.constexpr,
):  # fmt: skip
    """Attention of a batch over pages of a latent cache.

    q, q_pe, k, k_pe, out: as in `quire.kernels.call.Call` (v is k). lse: float32 [tokens, heads]. partials: for each
    half of the columns float32 [2 * programs, partial_rows, dim] and after it [2 * programs, partial_rows, 2];
    arrivals: int32 [6 * programs], 0 before and after. Programs are a multiple of c.programs_per_span. Strides count
    elements, and those of queries and keys are multiples of 16. scale is in base 2.
    """
    mask = BatchMask(None, None, None, None, None, None, None, c.mask)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask, c.schedule)
    cache = LatentCache(k, k_pe, k_page, k_token, k_pe_page, k_pe_token)
    queries = LatentQueries(q, q_pe, q_token, q_head, q_pe_token, q_pe_head, scale, q_scale, k_scale)
    pipeline = allocate_latent_pipeline(k.dtype.element_ty, c)
    left_partials = span_partials(0, partials, arrivals, partial_rows, c)
    right_partials = span_partials(1, partials, arrivals, partial_rows, c)
    # Both consumers write the lse of a row: they have the same m and l.
    left = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain, c.output)
    right = Output(out + c.dim, lse, o_token, o_head, sinks, v_scale, v_gain, c.output)
    producer = Producer(tables, cache, queries, pipeline, c)
    first, second = LatentConsumer(queries, pipeline, mask, 0, c), LatentConsumer(queries, pipeline, mask, 1, c)
    gdc_launch_dependents()
    gdc_wait()
    programs = gl.num_programs(0) // c.programs_per_span
    span = tables.find_span(gl.program_id(0) // c.programs_per_span, programs, programs, gl.constexpr(c.span))
    gl.warp_specialize(
        [
            (load_span, (producer, span)),
            (consume_span, (first, tables, left_partials, left, span)),
            (consume_span, (second, tables, right_partials, right, span)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def prefill_latent(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    partials, arrivals, qo_indptr, kv_indptr, last_page_len, indices, q_scale, k_scale, v_scale,
    slots, batch, tokens, entries, pages, scale, v_gain,
    q_token, q_head, q_pe_token, q_pe_head, k_page, k_token, k_pe_page, k_pe_token, o_token, o_head,
    c: gl.constexpr,
):  # fmt: skip
    """`decode_latent` for requests of many query rows. partials: float32 [slots, 128, dim], and after it [slots, 128,
    2]; arrivals: int32 [1 + 2 * slots], 0 before and after.
    """
    mask = BatchMask(None, None, None, None, None, None, None, c.mask)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask, c.schedule)
    cache = LatentCache(k, k_pe, k_page, k_token, k_pe_page, k_pe_token)
    queries = LatentQueries(q, q_pe, q_token, q_head, q_pe_token, q_pe_head, scale, q_scale, k_scale)
    pipeline = allocate_latent_pipeline(k.dtype.element_ty, c)
    work_tiles = allocate_work_tiles(c.pipeline.load_warps, c.pipeline.consumers)
    states = TilePartials(partials, partials + slots.to(gl.int64) * (128 * c.dim), arrivals + 1, c.pipeline.consumers)
    left = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain, c.output)
    right = Output(out + c.dim, lse, o_token, o_head, sinks, v_scale, v_gain, c.output)
    producer = Producer(tables, cache, queries, pipeline, c)
    first, second = LatentConsumer(queries, pipeline, mask, 0, c), LatentConsumer(queries, pipeline, mask, 1, c)
    gdc_launch_dependents()
    gdc_wait()
    gl.warp_specialize(
        [
            (load_work_tiles, (producer, work_tiles, arrivals, slots)),
            (consume_work_tiles, (first, tables, states, left, work_tiles)),
            (consume_work_tiles, (second, tables, states, right, work_tiles)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )
