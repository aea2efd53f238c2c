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

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.decode.combine import DecodePartials, SavedState, combines, slot_of
from quire.kernels.hopper.decode.invariant import consume_invariant
from quire.kernels.hopper.decode.load import DecodeCache, allocate_kv_pipeline, load
from quire.kernels.hopper.decode.tile import DecodeQueries, attend_keys, tile_of, transposed
from quire.kernels.hopper.epilogue import Output, OutputConfig
from quire.kernels.hopper.mask import BatchMask, MaskConfig
from quire.kernels.hopper.pipeline import PipelineConfig, PipelineState
from quire.kernels.hopper.schedule import ScheduleConfig, SpanConfig, Tables


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """What the kernel is compiled for.

    Attributes:
        stored_dim: 16-bit elements of a head in the cache: dim, or dim / 2 with fp8.
        block_m: query rows of a tile, padded to a power of two.
        partial_rows: rows of a partial state, a power of two, at least 4.
        split_group: work units of a split group of the batch-invariant split; 0: not batch-invariant.
        load_registers: registers per thread of the producer.
        cap: whether logits have a soft cap.
        q_scale, k_scale: whether there are factors per head.
        fp8, e5m2: whether caches are fp8, and whether their type is float8_e5m2 and not float8_e4m3fn.
    """

    mask: MaskConfig
    schedule: ScheduleConfig
    span: SpanConfig
    pipeline: PipelineConfig
    output: OutputConfig
    stored_dim: int
    block_m: int
    partial_rows: int
    split_group: int
    load_registers: int
    cap: bool
    q_scale: bool
    k_scale: bool
    fp8: bool
    e5m2: bool

    @property
    def tile(self) -> TileConfig:
        """How the work is cut."""
        return self.schedule.tile

    @property
    def dim(self) -> int:
        """The head_dim."""
        return self.output.dim


@gluon.jit
def consume(tables, queries, pipeline, partials, output, span, c: gl.constexpr):
    """Attend to the pipeline's blocks, tile by tile."""
    unit, request = span.start, span.request
    kv_state = PipelineState(gl.to_tensor(0), c.pipeline.stages)
    while unit < span.end:
        segment = request.segment(unit, span.end)
        rows = queries.load(request, segment.h, 0, tables.mask)
        tile = tile_of(request, segment, tables.mask)
        state, kv_state = attend_keys(queries, rows, pipeline, kv_state, tile.kv_start, tile.kv_end)
        state = transposed(state, c)
        tile_start = unit - segment.start
        owner, last = span.owner(tile_start), span.owner(tile_start + request.units - 1)
        if owner == last:
            output.store_rows(state, request.q_start, tile.h, 0, request.rows())
        elif combines(span.program, owner, last):
            saved = SavedState(pipeline.k, pipeline.v, 0, 1, c)
            saved.save(state)
            thread_barrier()
            partials.combine(saved, output, request, tile.h, span.program, owner, last)
        else:
            partials.store(state, slot_of(span.program, owner, last), 0, request.rows())
        unit += segment.end - segment.start
        request = tables.request_at(request, unit, span.end)


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
    With whole tiles, the batch may have others, which are left out.

    q, k, v, out: as in `quire.kernels.call.Call` (q_pe and k_pe are None). lse: float32 [tokens, heads]. partials: None
    with whole tiles, otherwise int32 [n, c.partial_rows, dim] and after it [n, c.partial_rows, 2] for `DecodePartials`
    with n slots, `slots` if c.split_group > 0 and one per program if not; 0 before and after. Strides count 16-bit
    elements, and those of k and v are multiples of 16. scale and cap are in base 2.
    """
    mask = BatchMask(window, mask_bits, mask_indptr, mask_size, None, None, None, c.mask)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask, c.schedule)
    if c.fp8:
        k, v = k.to(gl.pointer_type(gl.int16), bitcast=True), v.to(gl.pointer_type(gl.int16), bitcast=True)
    k_cache, v_cache = DecodeCache(k, k_page, k_token, k_head), DecodeCache(v, v_page, v_token, v_head)
    ml = partials
    if not c.schedule.whole_tiles:
        ml += (slots.to(gl.int64) if c.split_group > 0 else gl.num_programs(0)) * (c.partial_rows * c.dim)
    states = DecodePartials(partials, ml, slots, c.partial_rows, c.dim)
    output = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain, c.output)
    stored: gl.constexpr = k.dtype.element_ty
    dtype: gl.constexpr = gl.float16 if c.fp8 else stored
    pipeline = allocate_kv_pipeline(stored, c)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_m, c.stored_dim], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [c.dim // c.stored_dim, c.block_m, c.stored_dim], q_layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_m, c.tile.block_n], dtype)
    p_shared = gl.allocate_shared_memory(dtype, [c.block_m, c.tile.block_n], p_layout)
    queries = DecodeQueries(q, q_token, q_head, q_shared, p_shared, scale, cap, q_scale, k_scale, c)
    gdc_launch_dependents()
    gdc_wait()
    span = tables.find_span(gl.program_id(0), gl.num_programs(0), processors, gl.constexpr(c.span))
    gl.warp_specialize(
        [
            (consume_invariant if c.split_group > 0 else consume, (tables, queries, pipeline, states, output, span, c)),
            (load, (tables, k_cache, v_cache, pipeline, output, span, c)),
        ],
        [4],
        [c.load_registers],
    )
