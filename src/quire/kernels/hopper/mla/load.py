"""The producer: copies keys and queries to the stages of a pipeline in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_mbarriers, allocate_pipeline
from quire.kernels.hopper.schedule import Tables
from quire.kernels.hopper.tile_scheduler import tile_scheduler

# Query rows of a program's tile.
BLOCK_M = gl.constexpr(64)
# Elements of the second part of a head.
PE_DIM = gl.constexpr(64)


@aggregate
class LatentTile:
    """What a program computes of a segment or of a work tile: `count` rows of a request from `row` on, none if
    count <= 0, and keys kv_start to kv_end.
    """

    row: gl.tensor
    count: gl.tensor
    kv_start: gl.tensor
    kv_end: gl.tensor


@gluon.jit
def tile_of(request, segment, mask, programs_per_span: gl.constexpr):
    """This program's LatentTile of a segment, without keys that no row of it sees."""
    row = (segment.h * programs_per_span + gl.program_id(0) % programs_per_span) * BLOCK_M
    count = gl.minimum(request.rows() - row, BLOCK_M)
    start, last_row = segment.start * request.config.tile.block_n, row + gl.maximum(count, 1) - 1
    start, end = mask.tile_keys(request.kv_len - request.q_len, row, last_row, start, segment.kv_end)
    return LatentTile(row, count, start, gl.where(count > 0, end, start))


@gluon.jit
def tile_of_blocks(row, rows, first, last, block_n: gl.constexpr):
    """The LatentTile of a work tile: rows from `row` on, of a request that has `rows`, and blocks `first` to `last`."""
    return LatentTile(row, gl.minimum(rows - row, BLOCK_M), first * block_n, (last + 1) * block_n)


@aggregate
class LatentQueries:
    """The two parts of queries, with strides in elements; scale: of logits, in base 2; q_scale: a factor per query
    head; k_scale: one factor.
    """

    q: gl.tensor
    pe: gl.tensor
    token: gl.tensor
    head: gl.tensor
    pe_token: gl.tensor
    pe_head: gl.tensor
    scale: gl.tensor
    q_scale: gl.tensor | None
    k_scale: gl.tensor | None


@aggregate
class LatentCache:
    """The two parts of keys, with strides in elements. The first part, k, is also the values."""

    k: gl.tensor
    pe: gl.tensor
    page: gl.tensor
    token: gl.tensor
    pe_page: gl.tensor
    pe_token: gl.tensor


@aggregate
class LatentPipeline:
    """Shared memory and mbarriers. For each of `stages` blocks of keys: k_left and k_right, the halves of the first
    part; k_pe, the second part, which P of the block replaces once S is computed; m and l, [64, 4], which the consumer
    that computed P passes to the other one. For a tile's queries: the same three parts, once.

    left: the pipeline of k_left, which consumer 0 alone releases; right: that of k_right and k_pe, which both consumers
    release; p_full: mbarriers by which P, m and l of a stage are committed; queries: a pipeline of one stage.
    """

    k_left: gl.shared_memory_descriptor
    k_right: gl.shared_memory_descriptor
    k_pe: gl.shared_memory_descriptor
    m: gl.shared_memory_descriptor
    l: gl.shared_memory_descriptor
    q_left: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    q_pe: gl.shared_memory_descriptor
    left: Pipeline
    right: Pipeline
    p_full: gl.shared_memory_descriptor
    queries: Pipeline


@gluon.jit
def allocate_latent_pipeline(dtype: gl.constexpr, c: gl.constexpr):
    """A LatentPipeline all of whose stages are empty."""
    stages: gl.constexpr = c.pipeline.stages
    block_n: gl.constexpr = c.tile.block_n
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([block_n, c.dim], dtype)
    pe: gl.constexpr = gl.NVMMASharedLayout.get_default_for([block_n, PE_DIM], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return LatentPipeline(
        gl.allocate_shared_memory(dtype, [stages, block_n, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, block_n, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, block_n, PE_DIM], pe),
        gl.allocate_shared_memory(gl.float32, [stages, BLOCK_M, 4], flat),
        gl.allocate_shared_memory(gl.float32, [stages, BLOCK_M, 4], flat),
        gl.allocate_shared_memory(dtype, [1, BLOCK_M, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, BLOCK_M, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, BLOCK_M, PE_DIM], pe),
        # Warp groups have 128 threads, all of which commit and release keys.
        allocate_pipeline(stages, 128, 128),
        allocate_pipeline(stages, 128, 256),
        allocate_mbarriers(stages, 1),
        allocate_pipeline(1, 128, 2),
    )


@gluon.jit
def _copy_rows(to, x, row, valid, layout: gl.constexpr):
    """Copy rows at these offsets from x to shared memory, 16 bytes at a time; rows that are not valid become zeros."""
    d = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))[None, :]
    async_copy.async_copy_global_to_shared(to, x + row[:, None] + d, valid[:, None])


@aggregate
class Producer:
    """What the producer loads from and to. config: a LatentConfig."""

    tables: Tables
    cache: LatentCache
    queries: LatentQueries
    pipeline: LatentPipeline
    config: gl.constexpr

    @gluon.jit
    def copy_queries(self, request, tile, layout: gl.constexpr):
        """Copy a tile's queries to shared memory."""
        group: gl.constexpr = self.config.tile.group
        queries, pipeline = self.queries, self.pipeline
        r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        token = (request.q_start + (tile.row + r) // group).to(gl.int64)
        head = (tile.row + r) % group
        row, row_pe = token * queries.token + head * queries.head, token * queries.pe_token + head * queries.pe_head
        valid = r < tile.count
        _copy_rows(pipeline.q_left.index(0), queries.q, row, valid, layout)
        _copy_rows(pipeline.q_right.index(0), queries.q + self.config.dim, row, valid, layout)
        _copy_rows(pipeline.q_pe.index(0), queries.pe, row_pe, valid, layout)

    @gluon.jit
    def load_tile(self, request, tile, state, q_state):
        """Fill the pipeline with the blocks of a tile, and copy the tile's queries after its first block. Returns the
        states of the pipeline and of its queries after it.
        """
        block_n: gl.constexpr = self.config.tile.block_n
        page_size: gl.constexpr = self.config.schedule.page_size
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        one_page: gl.constexpr = page_size % block_n == 0
        tables, cache, pipeline = self.tables, self.cache, self.pipeline
        r = gl.arange(0, block_n, gl.SliceLayout(1, layout))
        first = r
        if one_page:
            # All keys of a block lie in one page, that of the first key.
            first = gl.to_tensor(0)
        page = tables.page_ids(request, tile.kv_start + first)
        for t0 in range(tile.kv_start, tile.kv_end, block_n):
            j, within = t0 + r, (t0 + first) % page_size
            row, row_pe = page * cache.page + within * cache.token, page * cache.pe_page + within * cache.pe_token
            if one_page:
                row, row_pe = row + r * cache.token, row_pe + r * cache.pe_token
            # The page ids of the next block are loaded ahead.
            page = tables.page_ids(request, t0 + block_n + first)
            stage, needed = state.stage(), tables.mask.needed_keys(request, j)
            pipeline.left.producer_acquire(state)
            _copy_rows(pipeline.k_left.index(stage), cache.k, row, needed, layout)
            pipeline.left.producer_commit(state)
            pipeline.right.producer_acquire(state)
            _copy_rows(pipeline.k_right.index(stage), cache.k + self.config.dim, row, needed, layout)
            _copy_rows(pipeline.k_pe.index(stage), cache.pe, row_pe, needed, layout)
            pipeline.right.producer_commit(state)
            state = state.advance(1)
            if t0 == tile.kv_start:
                pipeline.queries.producer_acquire(q_state)
                self.copy_queries(request, tile, layout)
                pipeline.queries.producer_commit(q_state)
                q_state = q_state.advance(1)
        return state, q_state


@gluon.jit
def load_span(producer, span):
    """Fill the pipeline with the blocks of a span."""
    c: gl.constexpr = producer.config
    tables = producer.tables
    unit, request = span.start, span.request
    state, q_state = PipelineState(gl.to_tensor(0), c.pipeline.stages), PipelineState(gl.to_tensor(0), 1)
    while unit < span.end:
        segment = request.segment(unit, span.end)
        unit += segment.end - segment.start
        tile = tile_of(request, segment, tables.mask, c.programs_per_span)
        state, q_state = producer.load_tile(request, tile, state, q_state)
        request = tables.request_at(request, unit, span.end)


@gluon.jit
def load_work_tiles(producer, work_tiles, counter, slots):
    """Take work tiles from the counter, pass them to the consumers, and load their blocks, until there are none."""
    c: gl.constexpr = producer.config
    scheduler = tile_scheduler(producer.tables, counter, slots, gl.constexpr(c.scheduler))
    it = scheduler.begin()
    tile_state = PipelineState(gl.to_tensor(0), 2)
    state, q_state = PipelineState(gl.to_tensor(0), c.pipeline.stages), PipelineState(gl.to_tensor(0), 1)
    while it.index < scheduler.num_tiles:
        it, work_tile = scheduler.find(it)
        if work_tile.first <= work_tile.last:
            work_tiles.put(tile_state, work_tile)
            tile_state = tile_state.advance(1)
            tile = tile_of_blocks(work_tile.row, work_tile.rows, work_tile.first, work_tile.last, c.tile.block_n)
            state, q_state = producer.load_tile(work_tile, tile, state, q_state)
        it = scheduler.advance(it)
    it, work_tile = scheduler.find(it)
    work_tiles.put(tile_state, work_tile)
