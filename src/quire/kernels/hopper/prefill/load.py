"""The producer: takes work units, and loads their keys and values into the stages of a pipeline in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.mask import needed_keys
from quire.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_mbarriers, allocate_pipeline
from quire.kernels.hopper.prefill.blocks import Notes, first_block, next_block, write_note
from quire.kernels.hopper.schedule import page_of, select
from quire.kernels.hopper.tile_scheduler import find_unit, first_walk, next_unit, plan_units, post_job


class Cache(NamedTuple):
    """Keys or values. x: a pointer, and the strides of pages, tokens and heads in elements; or, if c.box > 0, a
    descriptor of a matrix whose rows have the stride of tokens, then page and head are strides in rows, and column is
    the stride of heads in columns.
    """

    x: Any
    page: tl.tensor
    token: tl.tensor
    head: tl.tensor
    column: tl.tensor


@gluon.jit
def cache_of(x, page, token, head, c: gl.constexpr):
    """The Cache of a tensor with these strides."""
    column = head
    if c.box > 0:
        row = page if c.page_size == 0 else token
        page, head, column = page // row, head // row, head % row
    return Cache(x, page, token, head, column)


@aggregate
class Stages:
    """Stages of blocks in shared memory. All threads of the consumers release a stage."""

    data: gl.shared_memory_descriptor
    barriers: Pipeline


class KVPipeline(NamedTuple):
    """k: stages of blocks of keys, [c.block_n, c.part] for each part of them; v: of values, [c.block_n, c.dim]; notes:
    None unless c.listed.
    """

    k: Stages
    v: Stages
    notes: Notes | None


@gluon.jit
def _allocate_stages(
    dtype: gl.constexpr, width: gl.constexpr, parts: gl.constexpr, arrivals: gl.constexpr, c: gl.constexpr
):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block_n, width], dtype)
    data = gl.allocate_shared_memory(dtype, [c.stages * parts, c.block_n, width], layout)
    return Stages(data, allocate_pipeline(c.stages, arrivals, 128 * c.consumers))


@gluon.jit
def allocate_stages(dtype: gl.constexpr, c: gl.constexpr):
    """Empty stages of keys and of values."""
    threads: gl.constexpr = 32 * c.load_warps  # each of which arrives where its copies do
    arrivals: gl.constexpr = 1 if c.box > 0 or c.fp8 else threads
    k = _allocate_stages(dtype, c.part, c.dim_qk // c.part, threads if c.fp8_q else arrivals, c)
    # fp8 is widened to float16 in a fourth of the instructions that bfloat16 takes. Keys must be as queries are.
    return k, _allocate_stages(gl.float16 if c.fp8 else dtype, c.dim, 1, arrivals, c)


@gluon.jit
def allocate_notes(c: gl.constexpr):
    """Notes of empty stages."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [c.stages * 32 * c.load_warps, 1], layout)
    return Notes(words, allocate_mbarriers(c.stages, 1))


@gluon.jit
def _page_ids(tables, request, block, c: gl.constexpr):
    """The page ids of 32 boxes, among them those of a block of keys. Pages that a request does not have lie behind the
    cache, where TMA reads zeros.
    """
    boxes: gl.constexpr = c.block_n // c.box
    i = block * boxes // 32 * 32 + gl.arange(0, 32, gl.BlockedLayout([1], [32], [c.load_warps], [0]))
    j = i * c.box
    inside = (j >= 0) & (j < request.kv_len)
    ids = gl.load(tables.indices + request.kv_start + j // c.page_size, inside, 0)
    return gl.where(inside, gl.minimum(gl.maximum(ids, 0), tables.pages - 1), tables.pages)


@gluon.jit
def _copy_boxes(cache, stages, state, request, h, block, ids, dim: gl.constexpr, c: gl.constexpr):
    """Load a block of keys or values by TMA into the next stage."""
    boxes: gl.constexpr = c.block_n // c.box
    width: gl.constexpr = stages.data.shape[2]
    parts: gl.constexpr = dim // width
    full = stages.barriers.full.index(state.stage())
    stages.barriers.producer_acquire(state)
    mbarrier.expect(full, c.block_n * dim * 2)
    for i in gl.static_range(boxes):
        row = h * cache.head
        if c.page_size > 0:
            j = block * c.block_n + i * c.box
            mine = (
                gl.arange(0, 32, ids.type.layout) == (block * boxes + i) % 32
            )  # the thread that has the box's page id
            row += select(ids, mine) * cache.page + j % c.page_size
        else:
            row += (request.kv_start + block * c.block_n) * cache.page
        for part in gl.static_range(parts):
            box = stages.data.index(state.stage() * parts + part).slice(i * c.box, c.box)
            at = [row, h * cache.column + part * width]
            tma.async_copy_global_to_shared(cache.x, at, full, box)


@gluon.jit
def _load_boxes(k, v, pipeline, state, tables, job, c: gl.constexpr):
    """Load blocks of keys and values by TMA, from the last to the first: values are used a block later than keys."""
    boxes: gl.constexpr = c.block_n // c.box
    h, last, blocks = job.h, job.last, job.last - job.first + 1
    ids = last
    if c.page_size > 0:
        ids = _page_ids(tables, job, last, c)
    v_ids, next_ids = ids * 0, ids * 0 + 1  # not ids: the compiler takes variables of a loop that begin equal for one
    for i in range(blocks):
        block = last - i
        if c.page_size > 0:
            at_end = (block + 1) * boxes % 32 == 0  # of what one vector of ids has
            ids = gl.where(at_end & (i > 0), next_ids, ids)
            if at_end | (i == 0):
                next_ids = _page_ids(tables, job, block // (32 // boxes) * (32 // boxes) - 1, c)
        _copy_boxes(k, pipeline.k, state.advance(i), job, h, block, ids, c.dim_qk, c)
        if i > 0:
            _copy_boxes(v, pipeline.v, state.advance(i - 1), job, h, block + 1, v_ids, c.dim, c)
        v_ids = ids
    _copy_boxes(v, pipeline.v, state.advance(blocks - 1), job, h, job.first, v_ids, c.dim, c)


@gluon.jit
def _pages_of(tables, request, block, layout: gl.constexpr, c: gl.constexpr):
    """Page ids of the keys of a block, which may lie before the request's first one."""
    return page_of(tables, request, gl.maximum(block * c.block_n + gl.arange(0, c.block_n, layout), 0), c)


@gluon.constexpr_function
def _page_layout(rows, width, elements, warps):
    """A layout of a number for each of the rows of `row_layout`: a thread has that of one row that its warp copies, and
    gets those of its other rows from threads of the same warp.
    """
    threads = width // elements  # for a row
    step = 32 // threads * warps  # rows that all threads copy at once
    steps = [[step << i] for i in range((rows // step).bit_length() - 1)]
    lanes, bits = [[1 << i] for i in range((32 // threads).bit_length() - 1)], threads.bit_length() - 1
    return gl.DistributedLinearLayout(
        steps[bits:],
        [*steps[:bits], *[[0]] * (bits - len(steps)), *lanes],
        [[32 // threads << i] for i in range(warps.bit_length() - 1)],
        [],
        [rows],
    )


@gluon.constexpr_function
def row_layout(width, elements, warps):
    """The layout of rows of `width` elements that are copied, so many of them, 16 bytes, by each thread."""
    threads = width // elements
    return gl.BlockedLayout([1, elements], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.jit
def _row_addresses(cache, request, h, block, page, mask, layout: gl.constexpr, c: gl.constexpr):
    """Where the rows of a block's keys or values begin in memory, and which of them are needed: [keys, 1]. page: with a
    `_page_layout`, in which offsets are computed before all threads of a row get them.
    """
    start = block * c.block_n
    at = page * cache.page + (h.to(gl.int64) if c.int64_offsets else h) * cache.head
    if c.page_size > 1:
        at += (start + gl.arange(0, c.block_n, page.type.layout)) % c.page_size * cache.token
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    at = gl.multiple_of(gl.convert_layout(at, flat), 16 if c.fp8 else 8)
    # A thread's first row is taken from the bounds, so that its rows are constants.
    j, first = gl.arange(0, c.block_n, flat), gl.constexpr(layout.threads_per_warp[0] * layout.warps_per_cta[0] - 1)
    needed = needed_keys(request, j & ~first, mask, c, start + (j & first))
    return cache.x + at[:, None], needed[:, None]


@gluon.jit
def _copy_rows(cache, stages, state, request, h, block, page, mask, dim: gl.constexpr, c: gl.constexpr):
    """Copy a block of keys or values to the next stage, 16 bytes at a time. Those that are not needed become zeros."""
    width: gl.constexpr = stages.data.shape[2]
    parts: gl.constexpr = dim // width
    layout: gl.constexpr = row_layout(width, 16 if c.fp8_q else 8, c.load_warps)
    at, needed = _row_addresses(cache, request, h, block, page, mask, layout, c)
    at = at + gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    stages.barriers.producer_acquire(state)
    for part in gl.static_range(parts):
        to = stages.data.index(state.stage() * parts + part)
        async_copy.async_copy_global_to_shared(to, at + part * width, needed)
    stages.barriers.producer_commit(state)


@gluon.jit
def _fetch_rows(cache, tables, request, h, block, wanted, width: gl.constexpr, dim: gl.constexpr, c: gl.constexpr):
    """Start to load a block of fp8 keys or values, if it is wanted: a tensor for each part of `width` elements, in
    words of four, since elements of a loop's variables take a register each.
    """
    words: gl.constexpr = width // 4
    layout: gl.constexpr = row_layout(words, 4, c.load_warps)
    page = _pages_of(tables, request, block, _page_layout(c.block_n, words, 4, c.load_warps), c)
    at, needed = _row_addresses(cache, request, h, block, page, tables.mask, layout, c)
    at = at.to(gl.pointer_type(gl.int32), bitcast=True) + gl.arange(0, words, gl.SliceLayout(0, layout))[None, :]
    needed = needed & wanted
    if dim == width:
        return (gl.load(at, needed, 0),)
    else:  # which is not left out: the compiler goes on after a return
        gl.static_assert(dim == 3 * width)  # heads of 192 elements
        return gl.load(at, needed, 0), gl.load(at + words, needed, 0), gl.load(at + 2 * words, needed, 0)


# A word of four fp8 numbers becomes two words of two 16-bit numbers.
_TO_FP16 = """{{ .reg .b16 a, b; mov.b32 {{a, b}}, $2; cvt.rn.f16x2.{0}x2 $0, a; cvt.rn.f16x2.{0}x2 $1, b; }}"""
_TO_BF16 = """{{ .reg .b16 a, b, p, q, r, s; .reg .b32 x, y; .reg .f32 i, j, k, l; mov.b32 {{a, b}}, $2;
    cvt.rn.f16x2.{0}x2 x, a; cvt.rn.f16x2.{0}x2 y, b; mov.b32 {{p, q}}, x; mov.b32 {{r, s}}, y; cvt.f32.f16 i, p;
    cvt.f32.f16 j, q; cvt.f32.f16 k, r; cvt.f32.f16 l, s; cvt.rn.bf16x2.f32 $0, j, i; cvt.rn.bf16x2.f32 $1, l, k; }}"""


@gluon.constexpr_function
def _widening(stored, dtype):
    """PTX that widens a word of four numbers of type `stored` to dtype."""
    return (_TO_BF16 if dtype == gl.bfloat16 else _TO_FP16).format("e5m2" if stored == gl.float8e5 else "e4m3")


@gluon.jit
def _widen_rows(x, stored: gl.constexpr, stages, state):
    """Store what `_fetch_rows` has loaded in the next stage, in 16 bits."""
    parts: gl.constexpr = len(x)
    rows: gl.constexpr = stages.data.shape[1]
    words: gl.constexpr = stages.data.shape[2] // 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, words], gl.int32)
    to = stages.data._reinterpret(gl.int32, [stages.data.shape[0], rows, words], layout)
    ptx: gl.constexpr = _widening(stored, stages.data.dtype)
    stages.barriers.producer_acquire(state)
    for part in gl.static_range(parts):
        a, b = gl.inline_asm_elementwise(ptx, "=r,=r,r", [x[part]], (gl.int32, gl.int32), is_pure=True, pack=1)
        to.index(state.stage() * parts + part).store(gl.join(a, b).reshape([rows, words]))
    fence_async_shared()
    stages.barriers.producer_commit_once(state)


@gluon.jit
def _load_widened(k, v, pipeline, state, tables, job, c: gl.constexpr):
    """`_load_boxes` of fp8 keys and values, which are widened while those that are stored next are being loaded."""
    stored: gl.constexpr = k.x.dtype.element_ty
    h, last, blocks = job.h, job.last, job.last - job.first + 1
    keys = _fetch_rows(k, tables, job, h, last, True, c.part, c.dim_qk, c)
    for i in range(blocks + 1):
        values = _fetch_rows(v, tables, job, h, last - i + 1, i > 0, c.dim, c.dim, c)
        if i < blocks:
            _widen_rows(keys, stored, pipeline.k, state.advance(i))
        keys = _fetch_rows(k, tables, job, h, last - i - 1, i + 1 < blocks, c.part, c.dim_qk, c)
        if i > 0:
            _widen_rows(values, stored, pipeline.v, state.advance(i - 1))


@gluon.jit
def _load_widened_values(k, v, pipeline, state, tables, job, c: gl.constexpr):
    """`_load_boxes` of fp8 keys, which stay as they are for fp8 queries, and of values, which are widened."""
    stored: gl.constexpr = v.x.dtype.element_ty
    layout: gl.constexpr = _page_layout(c.block_n, c.part, 16, c.load_warps)
    h, last, blocks = job.h, job.last, job.last - job.first + 1
    values = _fetch_rows(v, tables, job, h, last, True, c.dim, c.dim, c)
    for i in range(blocks + 1):
        block = last - i
        if i < blocks:
            pages = _pages_of(tables, job, block, layout, c)
            _copy_rows(k, pipeline.k, state.advance(i), job, h, block, pages, tables.mask, c.dim_qk, c)
        if i > 0:
            _widen_rows(values, stored, pipeline.v, state.advance(i - 1))
            values = _fetch_rows(v, tables, job, h, block, i < blocks, c.dim, c.dim, c)


@gluon.jit
def _load_rows(k, v, pipeline, state, tables, job, c: gl.constexpr):
    """`_load_boxes` with copies of 16 bytes."""
    layout: gl.constexpr = _page_layout(c.block_n, c.part, 8, c.load_warps)
    mask, h, last, blocks = tables.mask, job.h, job.last, job.last - job.first + 1
    pages = _pages_of(tables, job, last, layout, c)
    v_pages = pages * 0  # not pages: the compiler takes variables of a loop that begin equal for one
    for i in range(blocks):
        next_pages = _pages_of(tables, job, last - i - 1, layout, c)  # a block ahead
        _copy_rows(k, pipeline.k, state.advance(i), job, h, last - i, pages, mask, c.dim_qk, c)
        if i > 0:
            _copy_rows(v, pipeline.v, state.advance(i - 1), job, h, last - i + 1, v_pages, mask, c.dim, c)
        v_pages, pages = pages, next_pages
    _copy_rows(v, pipeline.v, state.advance(blocks - 1), job, h, job.first, v_pages, mask, c.dim, c)


@gluon.jit
def _fetch(cache, stages, tables, job, block, wanted, dim: gl.constexpr, c: gl.constexpr):
    """Start to load what passes through registers for a block of keys or values, if it is wanted: elements that are
    widened, otherwise page ids.
    """
    width: gl.constexpr = stages.data.shape[2]
    if c.fp8 and cache.x.dtype.element_ty != stages.data.dtype:
        return _fetch_rows(cache, tables, job, job.h, block, wanted, width, dim, c)
    else:  # which is not left out: the compiler goes on after a return
        layout: gl.constexpr = _page_layout(c.block_n, width, 16 if c.fp8_q else 8, c.load_warps)
        return (_pages_of(tables, job, block, layout, c),)


@gluon.jit
def _load_fetched(x, cache, stages, state, tables, job, block, dim: gl.constexpr, c: gl.constexpr):
    """Load a block of keys or values, of which `_fetch` has returned x, into the next stage."""
    if c.fp8 and cache.x.dtype.element_ty != stages.data.dtype:
        _widen_rows(x, cache.x.dtype.element_ty, stages, state)
    else:
        _copy_rows(cache, stages, state, job, job.h, block, x[0], tables.mask, dim, c)


@gluon.jit
def _load_listed(k, v, pipeline, state, tables, job, c: gl.constexpr):
    """Load the blocks of a job that are not hidden, with a note for each, into the next stages, as `_load_widened`
    does. Returns the state after them.
    """
    cursor, values = first_block(job, tables.mask, c), job.first - 1  # values: the block whose values come next
    keys = _fetch(k, pipeline.k, tables, job, cursor.block, True, c.dim_qk, c)
    while (cursor.block >= job.first) | (values >= job.first):
        block, following = cursor.block, next_block(cursor, job, tables.mask, c)
        fetched = _fetch(v, pipeline.v, tables, job, values, values >= job.first, c.dim, c)
        if block >= job.first:
            write_note(pipeline, state, cursor, following.block >= job.first, c)
            _load_fetched(keys, k, pipeline.k, state, tables, job, block, c.dim_qk, c)
        keys = _fetch(k, pipeline.k, tables, job, following.block, following.block >= job.first, c.dim_qk, c)
        if values >= job.first:
            _load_fetched(fetched, v, pipeline.v, state.advance(-1), tables, job, values, c.dim, c)
        values, cursor = block, following
        state = state.advance(1)
    return state.advance(-1)


@gluon.jit
def load(tables, k, v, pipeline, mailbox, counter, slots, c: gl.constexpr):
    """Take work units from the counter, tell them to the consumers, and load their blocks, until there are none."""
    split = plan_units(tables, slots, c)
    walk = first_walk(split, c)
    unit = gl.program_id(0)
    i, state = unit * 0, PipelineState(gl.to_tensor(0), c.stages)
    while unit < split.total:
        walk, job = find_unit(walk, unit, tables, split, c)
        if job.first <= job.last:
            post_job(mailbox, i, job, c)
            i += 1
            if c.listed:
                state = _load_listed(k, v, pipeline, state, tables, job, c)
            else:
                if c.box > 0:
                    _load_boxes(k, v, pipeline, state, tables, job, c)
                elif c.fp8_q:
                    _load_widened_values(k, v, pipeline, state, tables, job, c)
                elif c.fp8:
                    _load_widened(k, v, pipeline, state, tables, job, c)
                else:
                    _load_rows(k, v, pipeline, state, tables, job, c)
                state = state.advance(job.last - job.first + 1)
        unit = next_unit(counter, split)
    walk, job = find_unit(walk, unit, tables, split, c)
    post_job(mailbox, i, job, c)
