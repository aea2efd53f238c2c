"""The producer: copies keys and values from the paged cache to the stages of a pipeline in shared memory."""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.decode.tile import tile_of
from quire.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_pipeline


@aggregate
class DecodeCache:
    """Keys or values as 16-bit elements; strides count these elements."""

    x: gl.tensor
    page: gl.tensor
    token: gl.tensor
    head: gl.tensor

    @gluon.jit
    def columns(self, d, c: gl.constexpr):
        """Addresses of elements d of a row: with packed heads those of the second head follow the first one's."""
        at = self.x + d
        if c.tile.packed_heads > 1:
            at = self.x + (d % c.stored_dim + d // c.stored_dim * self.head)
        return at

    @gluon.jit
    def row_offsets(self, page, head, j, next_rows, layout: gl.constexpr, config: gl.constexpr):
        """Offsets of a block's rows: those of keys j, which lie in these pages, and of the next_rows after each, which
        lie in the same page. config: a ScheduleConfig.
        """
        at = page * self.page + head * self.head
        if config.page_size > 1:
            at += j % config.page_size * self.token
        step = self.token if config.page_size > 0 else self.page
        rows = (at[:, None] + (next_rows * step)[None, :]).reshape([config.tile.block_n])
        return gl.multiple_of(gl.convert_layout(rows, layout, assert_trivial=True), 8)


@aggregate
class DecodePipeline:
    """Stages of keys and values, [block_n, stored_dim * packed_heads], which are committed and released together."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    barriers: Pipeline


@gluon.jit
def allocate_kv_pipeline(dtype: gl.constexpr, c: gl.constexpr):
    """A DecodePipeline all of whose stages are empty."""
    block: gl.constexpr = [c.tile.block_n, c.stored_dim * c.tile.packed_heads]
    stages: gl.constexpr = c.pipeline.stages
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(block, dtype)
    k = gl.allocate_shared_memory(dtype, [stages, block[0], block[1]], layout)
    v = gl.allocate_shared_memory(dtype, [stages, block[0], block[1]], layout)
    # All threads of the producer commit, one of the consumer releases.
    return DecodePipeline(k, v, allocate_pipeline(stages, 128, 1))


@gluon.constexpr_function
def _gcd(a, b):
    return math.gcd(a, b)


@gluon.jit
def load(tables, k, v, pipeline, output, span, c: gl.constexpr):
    """Fill the pipeline with the blocks of a span, tile after tile, so that memory is busy across the ends of tiles.
    Each thread copies 16 bytes at a time; rows of keys that no query row sees become zeros. The producer also clears
    the padding of the output, while its last copies are in flight, unless prefill does it.
    """
    schedule: gl.constexpr = c.schedule
    block_n: gl.constexpr = c.tile.block_n
    width: gl.constexpr = c.stored_dim * c.tile.packed_heads
    # The number of neighbouring rows that a thread copies, and how many of these always lie in one page.
    rows: gl.constexpr = min(block_n * width // 1024, 8)
    same: gl.constexpr = _gcd(schedule.page_size, rows)
    layout: gl.constexpr = gl.BlockedLayout([rows, 8], [256 // width, width // 8], [4, 1], [1, 0])
    cube: gl.constexpr = gl.BlockedLayout([rows // same, same, 8], [256 // width, 1, width // 8], [4, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    t = gl.arange(0, block_n, flat)
    first = gl.arange(0, block_n // same, gl.SliceLayout(1, gl.SliceLayout(2, cube))) * same
    next_rows = gl.arange(0, same, gl.SliceLayout(0, gl.SliceLayout(2, cube)))
    d = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    k_columns, v_columns = k.columns(d, c), v.columns(d, c)
    unit, request = span.start, span.request
    if schedule.whole_tiles:
        unit, request = tables.next_tile(request, unit, span.end)
    state = PipelineState(gl.to_tensor(0), c.pipeline.stages)
    while unit < span.end:
        segment = request.segment(unit, span.end)
        unit += segment.end - segment.start
        tile = tile_of(request, segment, tables.mask)
        head = (tile.h.to(gl.int64) if schedule.int64_offsets else tile.h) * c.tile.packed_heads
        page = tables.page_ids(request, tile.kv_start + first)
        for t0 in range(tile.kv_start, tile.kv_end, block_n):
            k_row = k.row_offsets(page, head, t0 + first, next_rows, flat, schedule)
            v_row = v.row_offsets(page, head, t0 + first, next_rows, flat, schedule)
            # The page ids of the next block are loaded ahead.
            page = tables.page_ids(request, t0 + block_n + first)
            needed = tables.mask.needed_keys(request, t0 + t)
            pipeline.barriers.producer_acquire(state)
            to_k, to_v = pipeline.k.index(state.stage()), pipeline.v.index(state.stage())
            async_copy.async_copy_global_to_shared(to_k, k_columns + k_row[:, None], needed[:, None])
            async_copy.async_copy_global_to_shared(to_v, v_columns + v_row[:, None], needed[:, None])
            pipeline.barriers.producer_commit(state)
            state = state.advance(1)
        request = tables.request_at(request, unit, span.end)
    if schedule.max_q_len == 0:
        output.clear_padding(tables)
