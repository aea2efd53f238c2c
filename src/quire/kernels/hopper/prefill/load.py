"""The producer: takes work tiles, and loads their keys and values into the stages of a pipeline in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.pipeline import Pipeline, PipelineState, allocate_pipeline
from quire.kernels.hopper.prefill.block_info import BlockInfos, allocate_block_infos, first_block
from quire.kernels.hopper.schedule import Tables, select
from quire.kernels.hopper.tile_scheduler import tile_scheduler


@aggregate
class Stages:
    """Stages of blocks in shared memory. All threads of the consumers release a stage."""

    data: gl.shared_memory_descriptor
    barriers: Pipeline


@aggregate
class KVPipeline:
    """k: stages of blocks of keys, [block_n, c.part] for each part of them; v: of values, [block_n, c.dim]; infos: None
    unless blocks are listed.
    """

    k: Stages
    v: Stages
    infos: BlockInfos | None


@gluon.jit
def _allocate_stages(
    dtype: gl.constexpr, width: gl.constexpr, parts: gl.constexpr, arrivals: gl.constexpr, c: gl.constexpr
):
    stages: gl.constexpr = c.pipeline.stages
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.tile.block_n, width], dtype)
    data = gl.allocate_shared_memory(dtype, [stages * parts, c.tile.block_n, width], layout)
    return Stages(data, allocate_pipeline(stages, arrivals, 128 * c.pipeline.consumers))


@gluon.jit
def allocate_kv_pipeline(dtype: gl.constexpr, c: gl.constexpr):
    """A KVPipeline all of whose stages are empty, for queries of a dtype."""
    # With asynchronous copies, each thread arrives at the mbarrier when its own copies have arrived.
    threads: gl.constexpr = 32 * c.pipeline.load_warps
    arrivals: gl.constexpr = 1 if c.box > 0 or c.fp8 else threads
    k = _allocate_stages(dtype, c.part, c.dim_qk // c.part, threads if c.fp8_q else arrivals, c)
    # Widening fp8 to float16 takes a fourth of the instructions of bfloat16, but keys must have the dtype of queries.
    v = _allocate_stages(gl.float16 if c.fp8 else dtype, c.dim, 1, arrivals, c)
    infos = None
    if c.mask.listed:
        infos = allocate_block_infos(c.pipeline.stages, c.pipeline.load_warps)
    return KVPipeline(k, v, infos)


@gluon.constexpr_function
def _page_layout(rows, width, elements, warps):
    """A layout of one number per row, for rows in `row_layout`. A thread holds the number of one of the rows that its
    warp copies, and gets the numbers of the others from threads of the same warp.
    """
    # The number of threads that copy a row.
    threads = width // elements
    # The number of rows that all threads copy at once.
    step = 32 // threads * warps
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
    """The layout of rows of `width` elements, of which each thread copies `elements` at a time, which are 16 bytes."""
    threads = width // elements
    return gl.BlockedLayout([1, elements], [32 // threads, threads], [warps, 1], [1, 0])


# A word of four fp8 numbers becomes two words of two 16-bit numbers.
_TO_FP16 = """{{ .reg .b16 a, b; mov.b32 {{a, b}}, $2; cvt.rn.f16x2.{0}x2 $0, a; cvt.rn.f16x2.{0}x2 $1, b; }}"""
_TO_BF16 = """{{ .reg .b16 a, b, p, q, r, s; .reg .b32 x, y; .reg .f32 i, j, k, l; mov.b32 {{a, b}}, $2;
    cvt.rn.f16x2.{0}x2 x, a; cvt.rn.f16x2.{0}x2 y, b; mov.b32 {{p, q}}, x; mov.b32 {{r, s}}, y; cvt.f32.f16 i, p;
    cvt.f32.f16 j, q; cvt.f32.f16 k, r; cvt.f32.f16 l, s; cvt.rn.bf16x2.f32 $0, j, i; cvt.rn.bf16x2.f32 $1, l, k; }}"""


@gluon.constexpr_function
def _widening(stored, dtype):
    """PTX that widens a word of four numbers of type `stored` to dtype."""
    return (_TO_BF16 if dtype == gl.bfloat16 else _TO_FP16).format("e5m2" if stored == gl.float8e5 else "e4m3")


@aggregate
class Loader:
    """Loads blocks of keys or of values. Without boxes, x is a pointer, and page, token and head are strides in
    elements. If c.box > 0, x is the descriptor of a matrix whose rows have the stride of tokens: page and head are then
    strides in rows, and column is the stride of heads in columns. dim: elements of a row; config: a PrefillConfig.
    """

    x: gl.tensor | tma.tensor_descriptor
    page: gl.tensor
    token: gl.tensor
    head: gl.tensor
    column: gl.tensor
    tables: Tables
    stages: Stages
    dim: gl.constexpr
    config: gl.constexpr

    @gluon.jit
    def copy_boxes(self, state, tile, block, ids):
        """Load a block by TMA into the next stage. ids: page ids by `_box_ids`."""
        c: gl.constexpr = self.config
        block_n: gl.constexpr = c.tile.block_n
        boxes: gl.constexpr = block_n // c.box
        width: gl.constexpr = self.stages.data.shape[2]
        parts: gl.constexpr = self.dim // width
        full = self.stages.barriers.full.index(state.stage())
        self.stages.barriers.producer_acquire(state)
        mbarrier.expect(full, block_n * self.dim * 2)
        for i in gl.static_range(boxes):
            row = tile.h * self.head
            if c.schedule.page_size > 0:
                j = block * block_n + i * c.box
                # The thread that has the box's page id.
                mine = gl.arange(0, 32, ids.type.layout) == (block * boxes + i) % 32
                row += select(ids, mine) * self.page + j % c.schedule.page_size
            else:
                row += (tile.kv_start + block * block_n) * self.page
            for part in gl.static_range(parts):
                box = self.stages.data.index(state.stage() * parts + part).slice(i * c.box, c.box)
                at = [row, tile.h * self.column + part * width]
                tma.async_copy_global_to_shared(self.x, at, full, box)

    @gluon.jit
    def page_ids(self, tile, block, layout: gl.constexpr):
        """Page ids of the keys of a block, which may lie before the request's first one."""
        block_n: gl.constexpr = self.config.tile.block_n
        return self.tables.page_ids(tile, gl.maximum(block * block_n + gl.arange(0, block_n, layout), 0))

    @gluon.jit
    def row_addresses(self, tile, block, page, layout: gl.constexpr):
        """Where the rows of a block begin in memory, and which of them are needed: [keys, 1]. page: with a
        `_page_layout`, in which offsets are computed before all threads of a row get them.
        """
        schedule: gl.constexpr = self.config.schedule
        block_n: gl.constexpr = schedule.tile.block_n
        start = block * block_n
        at = page * self.page + (tile.h.to(gl.int64) if schedule.int64_offsets else tile.h) * self.head
        if schedule.page_size > 1:
            at += (start + gl.arange(0, block_n, page.type.layout)) % schedule.page_size * self.token
        flat: gl.constexpr = gl.SliceLayout(1, layout)
        at = gl.multiple_of(gl.convert_layout(at, flat), 16 if self.config.fp8 else 8)
        # A thread's first row is taken from the bounds, so that its rows are constants.
        first: gl.constexpr = layout.threads_per_warp[0] * layout.warps_per_cta[0] - 1
        j = gl.arange(0, block_n, flat)
        needed = self.tables.mask.needed_keys(tile, j & ~first, start + (j & first))
        return self.x + at[:, None], needed[:, None]

    @gluon.jit
    def copy_rows(self, state, tile, block, page):
        """Copy a block to the next stage, 16 bytes at a time. Rows that are not needed become zeros."""
        c: gl.constexpr = self.config
        width: gl.constexpr = self.stages.data.shape[2]
        parts: gl.constexpr = self.dim // width
        layout: gl.constexpr = row_layout(width, 16 if c.fp8_q else 8, c.pipeline.load_warps)
        at, needed = self.row_addresses(tile, block, page, layout)
        at = at + gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
        self.stages.barriers.producer_acquire(state)
        for part in gl.static_range(parts):
            to = self.stages.data.index(state.stage() * parts + part)
            async_copy.async_copy_global_to_shared(to, at + part * width, needed)
        self.stages.barriers.producer_commit(state)

    @gluon.jit
    def fetch_rows(self, tile, block, wanted):
        """Start to load a block of fp8, if it is wanted: a tensor for each part of it, in words of four elements, since
        each element of a variable that a loop carries takes a register.
        """
        warps: gl.constexpr = self.config.pipeline.load_warps
        width: gl.constexpr = self.stages.data.shape[2]
        words: gl.constexpr = width // 4
        layout: gl.constexpr = row_layout(words, 4, warps)
        page = self.page_ids(tile, block, _page_layout(self.config.tile.block_n, words, 4, warps))
        at, needed = self.row_addresses(tile, block, page, layout)
        at = at.to(gl.pointer_type(gl.int32), bitcast=True) + gl.arange(0, words, gl.SliceLayout(0, layout))[None, :]
        needed = needed & wanted
        if self.dim == width:
            return (gl.load(at, needed, 0),)
        else:
            # Without this branch, the compiler would also compile this after the return. Heads have 192 elements here.
            gl.static_assert(self.dim == 3 * width)
            return gl.load(at, needed, 0), gl.load(at + words, needed, 0), gl.load(at + 2 * words, needed, 0)

    @gluon.jit
    def widen_rows(self, state, x):
        """Store what `fetch_rows` has loaded in the next stage, in 16 bits."""
        data = self.stages.data
        parts: gl.constexpr = len(x)
        rows: gl.constexpr = data.shape[1]
        words: gl.constexpr = data.shape[2] // 2
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, words], gl.int32)
        to = data._reinterpret(gl.int32, [data.shape[0], rows, words], layout)
        ptx: gl.constexpr = _widening(self.x.dtype.element_ty, data.dtype)
        self.stages.barriers.producer_acquire(state)
        for part in gl.static_range(parts):
            a, b = gl.inline_asm_elementwise(ptx, "=r,=r,r", [x[part]], (gl.int32, gl.int32), is_pure=True, pack=1)
            to.index(state.stage() * parts + part).store(gl.join(a, b).reshape([rows, words]))
        fence_async_shared()
        self.stages.barriers.producer_commit_once(state)

    @gluon.jit
    def fetch(self, tile, block, wanted):
        """Start to load what passes through registers for a block, if it is wanted: elements that are widened,
        otherwise page ids.
        """
        c: gl.constexpr = self.config
        if c.fp8 and self.x.dtype.element_ty != self.stages.data.dtype:
            return self.fetch_rows(tile, block, wanted)
        else:
            # Without this branch, the compiler would also compile this after the return.
            elements: gl.constexpr = 16 if c.fp8_q else 8
            width: gl.constexpr = self.stages.data.shape[2]
            return (self.page_ids(tile, block, _page_layout(c.tile.block_n, width, elements, c.pipeline.load_warps)),)

    @gluon.jit
    def load_fetched(self, state, tile, block, x):
        """Load a block, of which `fetch` has returned x, into the next stage."""
        if self.config.fp8 and self.x.dtype.element_ty != self.stages.data.dtype:
            self.widen_rows(state, x)
        else:
            self.copy_rows(state, tile, block, x[0])


@gluon.jit
def loader(x, page, token, head, tables, stages, dim: gl.constexpr, c: gl.constexpr):
    """The Loader of a tensor with these strides, or of its descriptor."""
    column = head
    if c.box > 0:
        row = page if c.schedule.page_size == 0 else token
        page, head, column = page // row, head // row, head % row
    return Loader(x, page, token, head, column, tables, stages, dim, c)


@gluon.jit
def _box_ids(tables, tile, block, c: gl.constexpr):
    """The page ids of 32 boxes, among them those of a block of keys. Pages that a request does not have lie behind the
    cache, where TMA reads zeros.
    """
    boxes: gl.constexpr = c.tile.block_n // c.box
    i = block * boxes // 32 * 32 + gl.arange(0, 32, gl.BlockedLayout([1], [32], [c.pipeline.load_warps], [0]))
    j = i * c.box
    inside = (j >= 0) & (j < tile.kv_len)
    ids = gl.load(tables.indices + tile.kv_start + j // c.schedule.page_size, inside, 0)
    return gl.where(inside, gl.minimum(gl.maximum(ids, 0), tables.pages - 1), tables.pages)


@gluon.jit
def _load_boxes(k, v, state, tile, c: gl.constexpr):
    """Load blocks of keys and values by TMA, from the last to the first: values are used a block later than keys."""
    boxes: gl.constexpr = c.tile.block_n // c.box
    paged: gl.constexpr = c.schedule.page_size > 0
    last, blocks = tile.last, tile.last - tile.first + 1
    ids = last
    if paged:
        ids = _box_ids(k.tables, tile, last, c)
    # These values are not used. They differ, because the compiler merges variables of a loop that begin equal.
    v_ids, next_ids = ids * 0, ids * 0 + 1
    for i in range(blocks):
        block = last - i
        if paged:
            # Whether the block is the last one whose page ids one vector of 32 holds.
            at_end = (block + 1) * boxes % 32 == 0
            ids = gl.where(at_end & (i > 0), next_ids, ids)
            if at_end | (i == 0):
                next_ids = _box_ids(k.tables, tile, block // (32 // boxes) * (32 // boxes) - 1, c)
        k.copy_boxes(state.advance(i), tile, block, ids)
        if i > 0:
            v.copy_boxes(state.advance(i - 1), tile, block + 1, v_ids)
        v_ids = ids
    v.copy_boxes(state.advance(blocks - 1), tile, tile.first, v_ids)


@gluon.jit
def _load_widened(k, v, state, tile):
    """`_load_boxes` of fp8 keys and values, which are widened while those that are stored next are being loaded."""
    last, blocks = tile.last, tile.last - tile.first + 1
    keys = k.fetch_rows(tile, last, True)
    for i in range(blocks + 1):
        values = v.fetch_rows(tile, last - i + 1, i > 0)
        if i < blocks:
            k.widen_rows(state.advance(i), keys)
        keys = k.fetch_rows(tile, last - i - 1, i + 1 < blocks)
        if i > 0:
            v.widen_rows(state.advance(i - 1), values)


@gluon.jit
def _load_widened_values(k, v, state, tile, c: gl.constexpr):
    """`_load_boxes` of fp8 keys, which stay as they are for fp8 queries, and of values, which are widened."""
    layout: gl.constexpr = _page_layout(c.tile.block_n, c.part, 16, c.pipeline.load_warps)
    last, blocks = tile.last, tile.last - tile.first + 1
    values = v.fetch_rows(tile, last, True)
    for i in range(blocks + 1):
        block = last - i
        if i < blocks:
            k.copy_rows(state.advance(i), tile, block, k.page_ids(tile, block, layout))
        if i > 0:
            v.widen_rows(state.advance(i - 1), values)
            values = v.fetch_rows(tile, block, i < blocks)


@gluon.jit
def _load_rows(k, v, state, tile, c: gl.constexpr):
    """`_load_boxes` with copies of 16 bytes."""
    layout: gl.constexpr = _page_layout(c.tile.block_n, c.part, 8, c.pipeline.load_warps)
    last, blocks = tile.last, tile.last - tile.first + 1
    pages = k.page_ids(tile, last, layout)
    # This value is not used. It differs from `pages`, as the compiler merges variables of a loop that begin equal.
    v_pages = pages * 0
    for i in range(blocks):
        # Page ids are loaded a block ahead.
        next_pages = k.page_ids(tile, last - i - 1, layout)
        k.copy_rows(state.advance(i), tile, last - i, pages)
        if i > 0:
            v.copy_rows(state.advance(i - 1), tile, last - i + 1, v_pages)
        v_pages, pages = pages, next_pages
    v.copy_rows(state.advance(blocks - 1), tile, tile.first, v_pages)


@gluon.jit
def _load_listed(k, v, infos, state, tile, c: gl.constexpr):
    """Load the blocks of a work tile that are not hidden, with a BlockInfo for each, into the next stages, as
    `_load_widened` does. Returns the state after them.
    """
    mask = k.tables.mask
    warps: gl.constexpr = c.pipeline.load_warps
    # The block whose values come next.
    values = tile.first - 1
    it = first_block(tile, mask, warps)
    keys = k.fetch(tile, it.block, True)
    while (it.block >= tile.first) | (values >= tile.first):
        block, following = it.block, it.next(tile, mask, warps)
        fetched = v.fetch(tile, values, values >= tile.first)
        if block >= tile.first:
            infos.put(k.stages, state, it.info(following.block >= tile.first))
            k.load_fetched(state, tile, block, keys)
        keys = k.fetch(tile, following.block, following.block >= tile.first)
        if values >= tile.first:
            v.load_fetched(state.advance(-1), tile, values, fetched)
        values, it = block, following
        state = state.advance(1)
    return state.advance(-1)


@gluon.jit
def load(k, v, infos, work_tiles, counter, slots, c: gl.constexpr):
    """Take work tiles from the counter, pass them to the consumers, and load their blocks, until there are none."""
    scheduler = tile_scheduler(k.tables, counter, slots, gl.constexpr(c.scheduler))
    it = scheduler.begin()
    tile_state, kv_state = PipelineState(gl.to_tensor(0), 2), PipelineState(gl.to_tensor(0), c.pipeline.stages)
    while it.index < scheduler.num_tiles:
        it, tile = scheduler.find(it)
        if tile.first <= tile.last:
            work_tiles.put(tile_state, tile)
            tile_state = tile_state.advance(1)
            if c.mask.listed:
                kv_state = _load_listed(k, v, infos, kv_state, tile, c)
            else:
                if c.box > 0:
                    _load_boxes(k, v, kv_state, tile, c)
                elif c.fp8_q:
                    _load_widened_values(k, v, kv_state, tile, c)
                elif c.fp8:
                    _load_widened(k, v, kv_state, tile)
                else:
                    _load_rows(k, v, kv_state, tile, c)
                kv_state = kv_state.advance(tile.last - tile.first + 1)
        it = scheduler.advance(it)
    it, tile = scheduler.find(it)
    work_tiles.put(tile_state, tile)
