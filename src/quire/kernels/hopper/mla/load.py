"""The producer: copies keys and queries to the stages of a pipeline in shared memory."""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.hopper.mask import needed_keys
from quire.kernels.hopper.mla.tile import tile_of, tile_of_unit
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


class Pipeline(NamedTuple):
    """Shared memory and mbarriers. c.stages blocks of keys: k_left and k_right, the halves of the first part; k_pe, the
    second part, which P of the block replaces once S is computed; m and l, [c.block_m, 4], what the consumer that
    computed P hands to the other one. Once: the same three parts of a tile's queries.

    full, empty: two mbarriers per stage, for k_left and for the rest; p_full: P, m and l of a stage are there.
    q_full, q_empty: for queries.
    """

    k_left: gl.shared_memory_descriptor
    k_right: gl.shared_memory_descriptor
    k_pe: gl.shared_memory_descriptor
    m: gl.shared_memory_descriptor
    l: gl.shared_memory_descriptor
    q_left: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    q_pe: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor


@gluon.jit
def allocate_pipeline(dtype: gl.constexpr, c: gl.constexpr):
    """A pipeline all of whose stages are empty."""
    stages: gl.constexpr = c.stages
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_n, c.dim], dtype)
    pe: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_n, c.pe_dim], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    pipeline = Pipeline(
        gl.allocate_shared_memory(dtype, [stages, c.block_n, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block_n, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block_n, c.pe_dim], pe),
        gl.allocate_shared_memory(gl.float32, [stages, c.block_m, 4], flat),
        gl.allocate_shared_memory(gl.float32, [stages, c.block_m, 4], flat),
        gl.allocate_shared_memory(dtype, [1, c.block_m, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, c.block_m, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, c.block_m, c.pe_dim], pe),
        gl.allocate_shared_memory(gl.int64, [2 * stages, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2 * stages, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
    )
    for s in gl.static_range(stages):
        for i in gl.static_range(2):
            mbarrier.init(pipeline.full.index(2 * s + i), count=128)  # threads of the producer
            # Threads of the consumers that read k_left, and of those that read the rest.
            mbarrier.init(pipeline.empty.index(2 * s + i), count=128 * (1 + i))
        mbarrier.init(pipeline.p_full.index(s), count=1)
    mbarrier.init(pipeline.q_full, count=128)
    mbarrier.init(pipeline.q_empty, count=2)
    return pipeline


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
def load_tile(tables, cache, queries, pipeline, request, tile, n, tiles, c: gl.constexpr):
    """Fill the pipeline with the blocks of a tile from its n-th block on, and copy the tile's queries after its first
    block. tiles: how many tiles with blocks came before. Returns n and tiles after it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one_page: gl.constexpr = c.page_size % c.block_n == 0
    r = gl.arange(0, c.block_n, gl.SliceLayout(1, layout))
    first = r
    if one_page:  # all keys of a block lie in one page, that of the first key
        first = n * 0
    page = page_of(tables, request, tile.kv_start + first, c)
    for t0 in range(tile.kv_start, tile.kv_end, c.block_n):
        j, within = t0 + r, (t0 + first) % c.page_size
        row, row_pe = page * cache.page + within * cache.token, page * cache.pe_page + within * cache.pe_token
        if one_page:
            row, row_pe = row + r * cache.token, row_pe + r * cache.pe_token
        page = page_of(tables, request, t0 + c.block_n + first, c)  # prefetched for the next block
        stage, phase, needed = n % c.stages, (n // c.stages & 1) ^ 1, needed_keys(request, j, tables.mask, c)
        mbarrier.wait(pipeline.empty.index(2 * stage), phase)
        _copy_rows(pipeline.k_left.index(stage), cache.k, row, needed, layout)
        async_copy.mbarrier_arrive(pipeline.full.index(2 * stage), increment_count=False)
        mbarrier.wait(pipeline.empty.index(2 * stage + 1), phase)
        _copy_rows(pipeline.k_right.index(stage), cache.k + c.dim, row, needed, layout)
        _copy_rows(pipeline.k_pe.index(stage), cache.pe, row_pe, needed, layout)
        async_copy.mbarrier_arrive(pipeline.full.index(2 * stage + 1), increment_count=False)
        n += 1
        if t0 == tile.kv_start:
            mbarrier.wait(pipeline.q_empty, (tiles & 1) ^ 1)
            _copy_queries(queries, pipeline, request, tile, layout, c)
            async_copy.mbarrier_arrive(pipeline.q_full, increment_count=False)
            tiles += 1
    return n, tiles


@gluon.jit
def load_span(tables, cache, queries, pipeline, span, c: gl.constexpr):
    """Fill the pipeline with the blocks of a span."""
    unit, request = span.start, span.request
    n = span.start * 0
    tiles = n
    while unit < span.end:
        segment = segment_at(request, unit, span.end, c)
        unit += segment.end - segment.start
        tile = tile_of(request, segment, tables.mask, c)
        n, tiles = load_tile(tables, cache, queries, pipeline, request, tile, n, tiles, c)
        request = request_at(tables, request, unit, span.end, c)


@gluon.jit
def load_units(tables, cache, queries, pipeline, mailbox, counter, slots, c: gl.constexpr):
    """Take work units from the counter, tell them to the consumers, and load their blocks, until there are none."""
    split = plan_units(tables, slots, c)
    walk = first_walk(split, c)
    unit = gl.program_id(0)
    i, n = unit * 0, unit * 0
    tiles = unit * 0
    while unit < split.total:
        walk, job = find_unit(walk, unit, tables, split, c)
        if job.first <= job.last:
            post_job(mailbox, i, job, c)
            i += 1
            tile = tile_of_unit(job.row, job.rows, job.first, job.last, c)
            n, tiles = load_tile(tables, cache, queries, pipeline, job, tile, n, tiles, c)
        unit = next_unit(counter, split)
    walk, job = find_unit(walk, unit, tables, split, c)
    post_job(mailbox, i, job, c)
