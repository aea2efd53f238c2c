"""The producer: copies keys and queries to the stages of a pipeline in shared memory."""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.mask import needed_keys
from quire.kernels.hopper.mla.tile import tile_of, tile_of_unit
from quire.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_mbarriers, allocate_pipeline
from quire.kernels.hopper.schedule import page_of, request_at, segment_at
from quire.kernels.hopper.tile_scheduler import find_unit, first_walk, next_unit, plan_units, post_job


class Cache(NamedTuple):
    """The two parts of keys, with strides in elements. The first part, k, is also the values."""

    k: tl.tensor
    pe: tl.tensor
    page: tl.tensor
    token: tl.tensor
    pe_page: tl.tensor
    pe_token: tl.tensor


@aggregate
class LatentPipeline:
    """Shared memory and mbarriers. c.stages blocks of keys: k_left and k_right, the halves of the first part; k_pe, the
    second part, which P of the block replaces once S is computed; m and l, [c.block_m, 4], what the consumer that
    computed P hands to the other one. Once: the same three parts of a tile's queries.

    left: of k_left, which consumer 0 alone releases; right: of k_right and k_pe, which both do; p_full: mbarriers, by
    which P, m and l of a stage are committed; queries: a pipeline of one stage.
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
    stages: gl.constexpr = c.stages
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_n, c.dim], dtype)
    pe: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_n, c.pe_dim], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return LatentPipeline(
        gl.allocate_shared_memory(dtype, [stages, c.block_n, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block_n, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block_n, c.pe_dim], pe),
        gl.allocate_shared_memory(gl.float32, [stages, c.block_m, 4], flat),
        gl.allocate_shared_memory(gl.float32, [stages, c.block_m, 4], flat),
        gl.allocate_shared_memory(dtype, [1, c.block_m, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, c.block_m, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, c.block_m, c.pe_dim], pe),
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


@gluon.jit
def _copy_queries(queries, pipeline, request, tile, layout: gl.constexpr, c: gl.constexpr):
    """Copy a tile's queries to shared memory."""
    r = gl.arange(0, c.block_m, gl.SliceLayout(1, layout))
    token = (request.q_start + (tile.row + r) // c.group).to(gl.int64)
    head = (tile.row + r) % c.group
    row, row_pe = token * queries.token + head * queries.head, token * queries.pe_token + head * queries.pe_head
    valid = r < tile.count
    _copy_rows(pipeline.q_left.index(0), queries.q, row, valid, layout)
    _copy_rows(pipeline.q_right.index(0), queries.q + c.dim, row, valid, layout)
    _copy_rows(pipeline.q_pe.index(0), queries.pe, row_pe, valid, layout)


@gluon.jit
def load_tile(tables, cache, queries, pipeline, state, q_state, request, tile, c: gl.constexpr):
    """Fill the pipeline with the blocks of a tile, and copy the tile's queries after its first block. Returns the
    states of the pipeline and of its queries after it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one_page: gl.constexpr = c.page_size % c.block_n == 0
    r = gl.arange(0, c.block_n, gl.SliceLayout(1, layout))
    first = r
    if one_page:  # all keys of a block lie in one page, that of the first key
        first = gl.to_tensor(0)
    page = page_of(tables, request, tile.kv_start + first, c)
    for t0 in range(tile.kv_start, tile.kv_end, c.block_n):
        j, within = t0 + r, (t0 + first) % c.page_size
        row, row_pe = page * cache.page + within * cache.token, page * cache.pe_page + within * cache.pe_token
        if one_page:
            row, row_pe = row + r * cache.token, row_pe + r * cache.pe_token
        page = page_of(tables, request, t0 + c.block_n + first, c)  # prefetched for the next block
        stage, needed = state.stage(), needed_keys(request, j, tables.mask, c)
        pipeline.left.producer_acquire(state)
        _copy_rows(pipeline.k_left.index(stage), cache.k, row, needed, layout)
        pipeline.left.producer_commit(state)
        pipeline.right.producer_acquire(state)
        _copy_rows(pipeline.k_right.index(stage), cache.k + c.dim, row, needed, layout)
        _copy_rows(pipeline.k_pe.index(stage), cache.pe, row_pe, needed, layout)
        pipeline.right.producer_commit(state)
        state = state.advance(1)
        if t0 == tile.kv_start:
            pipeline.queries.producer_acquire(q_state)
            _copy_queries(queries, pipeline, request, tile, layout, c)
            pipeline.queries.producer_commit(q_state)
            q_state = q_state.advance(1)
    return state, q_state


@gluon.jit
def load_span(tables, cache, queries, pipeline, span, c: gl.constexpr):
    """Fill the pipeline with the blocks of a span."""
    unit, request = span.start, span.request
    state, q_state = PipelineState(gl.to_tensor(0), c.stages), PipelineState(gl.to_tensor(0), 1)
    while unit < span.end:
        segment = segment_at(request, unit, span.end, c)
        unit += segment.end - segment.start
        tile = tile_of(request, segment, tables.mask, c)
        state, q_state = load_tile(tables, cache, queries, pipeline, state, q_state, request, tile, c)
        request = request_at(tables, request, unit, span.end, c)


@gluon.jit
def load_units(tables, cache, queries, pipeline, mailbox, counter, slots, c: gl.constexpr):
    """Take work units from the counter, tell them to the consumers, and load their blocks, until there are none."""
    split = plan_units(tables, slots, c)
    walk = first_walk(split, c)
    unit = gl.program_id(0)
    i = unit * 0
    state, q_state = PipelineState(gl.to_tensor(0), c.stages), PipelineState(gl.to_tensor(0), 1)
    while unit < split.total:
        walk, job = find_unit(walk, unit, tables, split, c)
        if job.first <= job.last:
            post_job(mailbox, i, job, c)
            i += 1
            tile = tile_of_unit(job.row, job.rows, job.first, job.last, c)
            state, q_state = load_tile(tables, cache, queries, pipeline, state, q_state, job, tile, c)
        unit = next_unit(counter, split)
    walk, job = find_unit(walk, unit, tables, split, c)
    post_job(mailbox, i, job, c)
