"""The prefill kernel: its compile-time configuration and its entry point.

A program is a producer (`load.py`), which loads keys and values into the stages of a pipeline in shared memory, and two
or three consumers (`tile.py`), each of which computes 64 query rows of a tile. Programs are persistent, one on a
multiprocessor: the producer finds work (`tile_scheduler.py`), and is ahead of the consumers across the ends of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.combine import Partials
from quire.kernels.hopper.epilogue import Output, clear_padding
from quire.kernels.hopper.mask import Mask
from quire.kernels.hopper.prefill.load import KVPipeline, allocate_notes, allocate_stages, cache_of, load
from quire.kernels.hopper.prefill.tile import Queries, consume
from quire.kernels.hopper.schedule import Tables
from quire.kernels.hopper.tile_scheduler import allocate_mailbox


@dataclass(frozen=True, slots=True)
class Config:
    """What the kernel is compiled for."""

    heads: int  # KV heads
    group: int  # query heads of one
    dim: int  # head_dim of values
    dim_qk: int  # head_dim of queries and keys, which are in parts of `part` elements, a power of two
    part: int
    fp8: bool  # keys and values are fp8 and are widened: keys to the dtype of queries, values to float16
    fp8_q: bool  # queries are fp8, too: keys stay as they are
    page_size: int  # tokens in a page; 0 for ragged rows
    box: int  # keys that TMA loads at once; 0: keys are copied one by one
    block_n: int  # keys in a block
    stages: int  # blocks in the pipeline
    consumers: int  # each of which has 64 query rows of a tile
    tile_rows: int  # query rows of a tile
    registers: int  # per thread of a consumer
    load_registers: int  # per thread of the producer
    load_warps: int  # of the producer
    packed: bool  # P is kept as pairs of 16-bit elements, where there are few registers
    right: int  # keys to the right of its position that a row sees; -1: all
    window: bool
    mask: bool  # custom masks
    items: bool
    cap: bool  # of logits
    alibi: bool
    transform: bool  # logits are scaled before the softmax
    sinks: bool
    int64_offsets: bool  # the cache has 2**31 elements or more
    by_length: bool  # last_page_len has the key counts of whole requests
    lse: bool  # is written
    q_scale: bool  # factors per head
    k_scale: bool
    v_scale: bool
    unit_size: int  # block_n
    split: bool  # tiles may be cut into several work units; no if batch-invariant
    least_q_len: int  # query tokens of the requests that this launch computes; 0: any number
    most_q_len: int = 0
    packed_heads: int = 1

    @property
    def listed(self) -> bool:
        """Whether custom masks or items hide blocks of keys: see `blocks.py`."""
        return self.mask or self.items


@gluon.jit
def _consume_last(tables, queries, pipeline, mailbox, partials, output, mask, c: gl.constexpr):
    """The last consumer, which also clears the padding of the output."""
    consume(queries, pipeline, mailbox, partials, output, mask, c.consumers - 1, c)
    clear_padding(tables, output, c)


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

    q, k, v, out: as in `quire.kernels.registry.Call` (q_pe and k_pe are None); k and v are descriptors of boxes if
    c.box > 0. lse: float32 [tokens, heads]. partials: None unless c.split, float32 [slots, tile_rows, dim] and after it
    [slots, tile_rows, 2]; counter: int32 [1 + consumers * slots], 0 before and after. Strides are in elements; those of
    q, k and v are multiples of 16 bytes. slopes, scale and cap are in base 2.
    """
    mask = Mask(window, mask_bits, mask_indptr, mask_size, prefix_lens, item_positions, items_len)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask)
    k, v = cache_of(k, k_page, k_token, k_head, c), cache_of(v, v_page, v_token, v_head, c)
    ml = partials
    if c.split:
        ml += slots.to(gl.int64) * (c.tile_rows * c.dim)
    states = Partials(partials, ml, counter + 1)
    output = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain)
    dtype: gl.constexpr = q.dtype.element_ty
    k_stages, v_stages = allocate_stages(dtype, c)
    notes = None
    if c.listed:
        notes = allocate_notes(c)
    pipeline = KVPipeline(k_stages, v_stages, notes)
    mailbox = allocate_mailbox(c)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, c.part], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [c.consumers * (c.dim_qk // c.part), 64, c.part], q_layout)
    queries = Queries(q, q_token, q_head, q_shared, scale, cap, q_scale, k_scale, slopes)
    gdc_launch_dependents()
    gdc_wait()
    if c.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (queries, pipeline, mailbox, states, output, mask, 0, c)),
                (_consume_last, (tables, queries, pipeline, mailbox, states, output, mask, c)),
                (load, (tables, k, v, pipeline, mailbox, counter, slots, c)),
            ],
            [4, c.load_warps],
            [c.registers, c.load_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (queries, pipeline, mailbox, states, output, mask, 0, c)),
                (consume, (queries, pipeline, mailbox, states, output, mask, 1, c)),
                (_consume_last, (tables, queries, pipeline, mailbox, states, output, mask, c)),
                (load, (tables, k, v, pipeline, mailbox, counter, slots, c)),
            ],
            [4, 4, c.load_warps],
            [c.registers, c.registers, c.load_registers],
        )
