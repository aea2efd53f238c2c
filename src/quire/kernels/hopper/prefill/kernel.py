"""The prefill kernel: its compile-time configuration and its entry point.

A program is a producer (`load.py`), which loads keys and values into the stages of a pipeline in shared memory, and two
or three consumers (`tile.py`), each of which computes 64 query rows of a tile. Programs are persistent, one on a
multiprocessor: the producer finds work tiles (`tile_scheduler.py`), and is ahead of the consumers across the ends of
tiles.
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
from quire.kernels.hopper.pipeline import PipelineConfig
from quire.kernels.hopper.prefill.load import allocate_kv_pipeline, load, loader
from quire.kernels.hopper.prefill.tile import PrefillConsumer, PrefillQueries, consume
from quire.kernels.hopper.schedule import ScheduleConfig, Tables
from quire.kernels.hopper.tile_scheduler import TileSchedulerConfig, allocate_work_tiles


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """What the kernel is compiled for.

    Attributes:
        dim_qk, part: head_dim of queries and keys, which are in parts of `part` elements, a power of two.
        box: keys that TMA loads at once; 0: keys are copied one by one.
        registers, load_registers: registers per thread of a consumer, and of the producer.
        packed: whether P is kept as pairs of 16-bit elements, where there are few registers.
        fp8: whether keys and values are fp8. They are widened, keys to the dtype of queries, values to float16.
        fp8_q: whether queries are fp8, too. Keys then stay as they are.
        cap, alibi: whether logits have a soft cap, and ALiBi.
        transform: whether logits are scaled before the softmax.
        q_scale, k_scale: whether there are factors per head.
    """

    mask: MaskConfig
    schedule: ScheduleConfig
    scheduler: TileSchedulerConfig
    pipeline: PipelineConfig
    output: OutputConfig
    dim_qk: int
    part: int
    box: int
    registers: int
    load_registers: int
    packed: bool
    fp8: bool
    fp8_q: bool
    cap: bool
    alibi: bool
    transform: bool
    q_scale: bool
    k_scale: bool

    @property
    def tile(self) -> TileConfig:
        """How the work is cut."""
        return self.schedule.tile

    @property
    def dim(self) -> int:
        """The head_dim of values."""
        return self.output.dim


@gluon.jit
def _consume_last(consumer, tables):
    """The last consumer, which also clears the padding of the output."""
    consume(consumer)
    consumer.output.clear_padding(tables)


_POINTERS = (
    "lse", "sinks", "counter", "qo_indptr", "kv_indptr", "last_page_len", "indices", "mask_bits", "mask_indptr",
    "prefix_lens", "item_positions", "slopes", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_NUMBERS = ("slots", "mask_size", "items_len", "batch", "tokens", "entries", "pages", "window")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def prefill(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    partials, counter, qo_indptr, kv_indptr, last_page_len, indices, mask_bits, mask_indptr,
    prefix_lens, item_positions, slopes, q_scale, k_scale, v_scale,
    slots, mask_size, items_len, batch, tokens, entries, pages, window, scale, v_gain, cap,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
    c: gl.constexpr,
):  # fmt: skip
    """Attention of a batch of requests over pages or ragged rows, with any numbers of query tokens.

    q, k, v, out: as in `quire.kernels.call.Call` (q_pe and k_pe are None); k and v are descriptors of boxes if c.box >
    0. lse: float32 [tokens, heads]. partials: None unless tiles are split, float32 [slots, tile rows, dim] and after it
    [slots, tile rows, 2]; counter: int32 [1 + consumers * slots], 0 before and after. Strides are in elements; those of
    q, k and v are multiples of 16 bytes. slopes, scale and cap are in base 2.
    """
    mask = BatchMask(window, mask_bits, mask_indptr, mask_size, prefix_lens, item_positions, items_len, c.mask)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask, c.schedule)
    ml = partials
    if c.scheduler.split:
        ml += slots.to(gl.int64) * (c.tile.rows * c.dim)
    states = TilePartials(partials, ml, counter + 1, c.pipeline.consumers)
    output = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain, c.output)
    dtype: gl.constexpr = q.dtype.element_ty
    pipeline = allocate_kv_pipeline(dtype, c)
    k = loader(k, k_page, k_token, k_head, tables, pipeline.k, c.dim_qk, c)
    v = loader(v, v_page, v_token, v_head, tables, pipeline.v, c.dim, c)
    work_tiles = allocate_work_tiles(c.pipeline.load_warps, c.pipeline.consumers)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, c.part], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [c.pipeline.consumers * (c.dim_qk // c.part), 64, c.part], q_layout)
    queries = PrefillQueries(q, q_token, q_head, q_shared, scale, cap, q_scale, k_scale, slopes)
    first = PrefillConsumer(queries, pipeline, work_tiles, states, output, mask, 0, c)
    second = PrefillConsumer(queries, pipeline, work_tiles, states, output, mask, 1, c)
    gdc_launch_dependents()
    gdc_wait()
    if c.pipeline.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (first,)),
                (_consume_last, (second, tables)),
                (load, (k, v, pipeline.infos, work_tiles, counter, slots, c)),
            ],
            [4, c.pipeline.load_warps],
            [c.registers, c.load_registers],
        )
    else:
        third = PrefillConsumer(queries, pipeline, work_tiles, states, output, mask, 2, c)
        gl.warp_specialize(
            [
                (consume, (first,)),
                (consume, (second,)),
                (_consume_last, (third, tables)),
                (load, (k, v, pipeline.infos, work_tiles, counter, slots, c)),
            ],
            [4, 4, c.pipeline.load_warps],
            [c.registers, c.registers, c.load_registers],
        )
