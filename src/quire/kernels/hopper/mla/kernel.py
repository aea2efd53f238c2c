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

from quire.kernels.hopper.combine import Partials, combine
from quire.kernels.hopper.epilogue import Output, clear_padding, store_rows
from quire.kernels.hopper.mask import Mask
from quire.kernels.hopper.mla.combine import combine_span, partials_of, store_partial
from quire.kernels.hopper.mla.load import Cache, allocate_latent_pipeline, load_span, load_units
from quire.kernels.hopper.mla.tile import Queries, attend, tile_of, tile_of_unit
from quire.kernels.hopper.pipeline import PipelineState
from quire.kernels.hopper.schedule import Tables, find_span, quotient, request_at, segment_at
from quire.kernels.hopper.tile_scheduler import (
    FIRST,
    LAST,
    Q_START,
    ROW,
    ROWS,
    SPLITS,
    H,
    allocate_mailbox,
    job_field,
    job_request,
    release_job,
    wait_for_job,
)

REGISTERS = 168  # per thread at the start; the producer gives some to the consumers
CONSUMER_REGISTERS = gl.constexpr(216)  # per thread


@dataclass(frozen=True, slots=True)
class Config:
    """What the kernel is compiled for. Fields without a comment are as in `decode/kernel.py`. Those with a value are
    the same in all latent layers.
    """

    group: int
    dim: int  # half of the first part of a head: the columns of a consumer's acc
    dim_qk: int  # elements of queries and keys
    page_size: int
    programs_per_span: int  # programs that read the same keys, for block_m query rows each
    tile_rows: int  # query rows of all of these
    stages: int
    scan: int
    merge_rows: int  # rows of partial states that are merged at a time
    fan_in: int  # partial states that one program merges
    right: int  # keys to the right of its position that a row sees; -1: all
    transform: bool  # logits are scaled before the softmax
    sinks: bool
    int64_offsets: bool
    by_length: bool
    lse: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    pe_dim: int = 64  # the second part of a head
    block_m: int = 64
    block_n: int = 64
    unit_size: int = 64
    heads: int = 1
    packed_heads: int = 1
    programs: int = 1
    partial_cost: int = 0
    window: bool = False
    mask: bool = False
    items: bool = False
    whole_tiles: bool = False
    least_q_len: int = 0
    most_q_len: int = 0
    consumers: int = 2
    load_warps: int = 4
    split: bool = True


@gluon.jit
def consume_span(tables, queries, pipeline, partials, output, span, consumer: gl.constexpr, c: gl.constexpr):
    """Attend to the blocks of a span as consumer 0 or 1, tile by tile."""
    unit, request = span.start, span.request
    state, q_state = PipelineState(gl.to_tensor(0), c.stages), PipelineState(gl.to_tensor(0), 1)
    while unit < span.end:
        segment = segment_at(request, unit, span.end, c)
        tile = tile_of(request, segment, tables.mask, c)
        acc, m, l, state, q_state = attend(queries, pipeline, state, q_state, request, tile, tables.mask, consumer, c)
        if tile.count > 0:
            if segment.end - segment.start == request.units:
                store_rows(acc, m, l, output, request.q_start, 0, tile.row, tile.row + tile.count, c, True)
            else:
                slot = 2 * span.program + (segment.start == 0).to(gl.int32)
                store_partial(acc, m, l, partials, slot, 0, tile.count, c)
                tile_start = unit - segment.start
                owner, last = quotient(tile_start, span.size), quotient(tile_start + request.units - 1, span.size)
                combine_span(partials, output, request, tile, span.program, owner, last, c)
        unit += segment.end - segment.start
        request = request_at(tables, request, unit, span.end, c)
    clear_padding(tables, output, c)


@gluon.jit
def consume_units(tables, queries, pipeline, mailbox, partials, output, consumer: gl.constexpr, c: gl.constexpr):
    """Attend to the blocks of work units as consumer 0 or 1."""
    i = gl.to_tensor(0)
    state, q_state = PipelineState(gl.to_tensor(0), c.stages), PipelineState(gl.to_tensor(0), 1)
    wait_for_job(mailbox, i)
    while job_field(mailbox, i, H) >= 0:
        request, row = job_request(mailbox, i), job_field(mailbox, i, ROW)
        first, last = job_field(mailbox, i, FIRST), job_field(mailbox, i, LAST)
        tile = tile_of_unit(row, job_field(mailbox, i, ROWS), first, last, c)
        acc, m, l, state, q_state = attend(queries, pipeline, state, q_state, request, tile, tables.mask, consumer, c)
        complete = True
        if job_field(mailbox, i, SPLITS) > 1:
            complete, acc, m, l = combine(acc, m, l, partials, mailbox, i, consumer, c)
        if complete:
            q_start, row = job_field(mailbox, i, Q_START), job_field(mailbox, i, ROW)
            row_end = gl.minimum(job_field(mailbox, i, ROWS), row + c.block_m)
            store_rows(acc, m, l, output, q_start, 0, row, row_end, c, True)
        release_job(mailbox, i)
        i += 1
        wait_for_job(mailbox, i)
    clear_padding(tables, output, c)


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

    q, q_pe, k, k_pe, out: as in `quire.kernels.registry.Call` (v is k). lse: float32 [tokens, heads]. partials: for
    each half of the columns float32 [2 * programs, partial_rows, dim] and after it [2 * programs, partial_rows, 2];
    arrivals: int32 [6 * programs], 0 before and after. Programs are a multiple of c.programs_per_span. Strides count
    elements, and those of queries and keys are multiples of 16. scale is in base 2.
    """
    mask = Mask(None, None, None, None, None, None, None)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask)
    cache = Cache(k, k_pe, k_page, k_token, k_pe_page, k_pe_token)
    queries = Queries(q, q_pe, q_token, q_head, q_pe_token, q_pe_head, scale, q_scale, k_scale)
    pipeline = allocate_latent_pipeline(k.dtype.element_ty, c)
    partials_0 = partials_of(0, partials, arrivals, partial_rows, c)
    partials_1 = partials_of(1, partials, arrivals, partial_rows, c)
    # Both consumers write the lse of a row: they have the same m and l.
    left = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain)
    right = Output(out + c.dim, lse, o_token, o_head, sinks, v_scale, v_gain)
    gdc_launch_dependents()
    gdc_wait()
    programs = gl.num_programs(0) // c.programs_per_span
    span = find_span(tables, gl.program_id(0) // c.programs_per_span, programs, programs, c)
    gl.warp_specialize(
        [
            (load_span, (tables, cache, queries, pipeline, span, c)),
            (consume_span, (tables, queries, pipeline, partials_0, left, span, 0, c)),
            (consume_span, (tables, queries, pipeline, partials_1, right, span, 1, c)),
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
    mask = Mask(None, None, None, None, None, None, None)
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, mask)
    cache = Cache(k, k_pe, k_page, k_token, k_pe_page, k_pe_token)
    queries = Queries(q, q_pe, q_token, q_head, q_pe_token, q_pe_head, scale, q_scale, k_scale)
    pipeline, mailbox = allocate_latent_pipeline(k.dtype.element_ty, c), allocate_mailbox(c)
    states = Partials(partials, partials + slots.to(gl.int64) * (128 * c.dim), arrivals + 1)
    left = Output(out, lse, o_token, o_head, sinks, v_scale, v_gain)
    right = Output(out + c.dim, lse, o_token, o_head, sinks, v_scale, v_gain)
    gdc_launch_dependents()
    gdc_wait()
    gl.warp_specialize(
        [
            (load_units, (tables, cache, queries, pipeline, mailbox, arrivals, slots, c)),
            (consume_units, (tables, queries, pipeline, mailbox, states, left, 0, c)),
            (consume_units, (tables, queries, pipeline, mailbox, states, right, 1, c)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )
