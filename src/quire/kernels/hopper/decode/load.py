"""The producer: copies keys and values from the paged cache to the stages of a pipeline in shared memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.decode.tile import tile_of
from quire.kernels.hopper.epilogue import clear_padding
from quire.kernels.hopper.mask import needed_keys
from quire.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_pipeline
from quire.kernels.hopper.schedule import next_tile, page_of, request_at, segment_at


class Cache(NamedTuple):
    """Keys and values as 16-bit elements; strides count these."""

    k: tl.tensor
    v: tl.tensor
    k_page: tl.tensor
    k_token: tl.tensor
    k_head: tl.tensor
    v_page: tl.tensor
    v_token: tl.tensor
    v_head: tl.tensor


@aggregate
class KVPipeline:
    """Stages of [c.block_n, c.stored_dim * c.packed_heads] keys and values, which are committed and released
    together.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    barriers: Pipeline


@gluon.jit
def allocate_kv_pipeline(dtype: gl.constexpr, c: gl.constexpr):
    """A KVPipeline all of whose stages are empty."""
    width: gl.constexpr = c.stored_dim * c.packed_heads
    stages: gl.constexpr = c.stages
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_n, width], dtype)
    k = gl.allocate_shared_memory(dtype, [stages, c.block_n, width], layout)
    v = gl.allocate_shared_memory(dtype, [stages, c.block_n, width], layout)
    # All threads of the producer commit, one of the consumer releases.
    return KVPipeline(k, v, allocate_pipeline(stages, 128, 1))


@gluon.constexpr_function
def _gcd(a, b):
    return math.gcd(a, b)


@gluon.jit
def _row_offsets(page, head, j, next_rows, page_step, token_step, head_step, layout: gl.constexpr, c: gl.constexpr):
    """Offsets of a block's rows in the cache: those of keys j, which lie in these pages, and of the next_rows after
    each, which lie in the same page.
    """
    at = page * page_step + head * head_step
    if c.page_size > 1:
        at += j % c.page_size * token_step
    step = token_step if c.page_size > 0 else page_step
    rows = (at[:, None] + (next_rows * step)[None, :]).reshape([c.block_n])
    return gl.multiple_of(gl.convert_layout(rows, layout, assert_trivial=True), 8)


@gluon.jit
def load(tables, cache, pipeline, output, span, c: gl.constexpr):
    """Fill the pipeline with the blocks of a span, tile after tile, so that memory is busy across the ends of tiles.
    Each thread copies 16 bytes at a time; rows of keys that no query row sees become zeros. The producer also clears
    the padding of the output, while its last copies are in flight, unless prefill does it.
    """
    width: gl.constexpr = c.stored_dim * c.packed_heads
    rows: gl.constexpr = min(c.block_n * width // 1024, 8)  # neighbouring rows of a thread
    same: gl.constexpr = _gcd(c.page_size, rows)  # of these, rows that always lie in one page
    layout: gl.constexpr = gl.BlockedLayout([rows, 8], [256 // width, width // 8], [4, 1], [1, 0])
    cube: gl.constexpr = gl.BlockedLayout([rows // same, same, 8], [256 // width, 1, width // 8], [4, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    t = gl.arange(0, c.block_n, flat)
    first = gl.arange(0, c.block_n // same, gl.SliceLayout(1, gl.SliceLayout(2, cube))) * same
    next_rows = gl.arange(0, same, gl.SliceLayout(0, gl.SliceLayout(2, cube)))
    d = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    k_at, v_at = cache.k + d, cache.v + d
    if c.packed_heads > 1:
        k_at = cache.k + (d % c.stored_dim + d // c.stored_dim * cache.k_head)
        v_at = cache.v + (d % c.stored_dim + d // c.stored_dim * cache.v_head)
    unit, request = span.start, span.request
    if c.whole_tiles:
        unit, request = next_tile(tables, request, unit, span.end, c)
    state = PipelineState(gl.to_tensor(0), c.stages)
    while unit < span.end:
        segment = segment_at(request, unit, span.end, c)
        unit += segment.end - segment.start
        tile = tile_of(request, segment, tables.mask, c)
        head = (tile.h.to(gl.int64) if c.int64_offsets else tile.h) * c.packed_heads
        page = page_of(tables, request, tile.kv_start + first, c)
        for t0 in range(tile.kv_start, tile.kv_end, c.block_n):
            k_row = _row_offsets(page, head, t0 + first, next_rows, cache.k_page, cache.k_token, cache.k_head, flat, c)
            v_row = _row_offsets(page, head, t0 + first, next_rows, cache.v_page, cache.v_token, cache.v_head, flat, c)
            page = page_of(tables, request, t0 + c.block_n + first, c)  # prefetched for the next block
            needed = needed_keys(request, t0 + t, tables.mask, c)
            pipeline.barriers.producer_acquire(state)
            k, v = pipeline.k.index(state.stage()), pipeline.v.index(state.stage())
            async_copy.async_copy_global_to_shared(k, k_at + k_row[:, None], needed[:, None])
            async_copy.async_copy_global_to_shared(v, v_at + v_row[:, None], needed[:, None])
            pipeline.barriers.producer_commit(state)
            state = state.advance(1)
        request = request_at(tables, request, unit, span.end, c)
    if c.most_q_len == 0:
        clear_padding(tables, output, c)
