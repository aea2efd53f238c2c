"""Decode over latent caches (MLA) on Hopper: four warp groups on 64 query rows, which read each key once.

One fetches blocks of 64 keys, both parts, and queries. One makes logits and weights of a block, and leaves the weights,
as halves, where the keys' second part was, which nobody needs any more. Two more accumulate half of the columns of the
output each, from the same keys' first part: a whole row is more than a group's registers hold. So the logits of a block
are made while the values of the one before are added up.

Tiles of 64 rows that have the same keys are spread over neighbouring programs, `lanes` of them, which walk along the
same line at the same time: all but one find the keys in the GPU's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.decode import pages_of
from quire.kernels.hopper.line import Tables, first_request, my_span, piece_at, request_at
from quire.kernels.hopper.results import Results, clear_padding, write


@dataclass(frozen=True, slots=True)
class Config:
    """What the kernel is compiled for. dim: half of the first part of a head; group: query heads; lanes: programs that
    have the same keys; tile_rows: query rows of all of them; stages: blocks in the ring; scan: requests looked at
    together; merge_rows: rows merged together; fan: parts merged by one program. The last seven are what latent layers
    always have.
    """

    group: int
    dim: int
    page_size: int
    lanes: int
    tile_rows: int
    stages: int
    scan: int
    merge_rows: int
    fan: int
    causal: bool
    sinks: bool
    far: bool
    lse: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    block: int = 64
    unit: int = 64
    heads: int = 1
    pair: int = 1
    programs: int = 1
    window: bool = False
    whole: bool = False


class Cache(NamedTuple):
    """Keys' two parts, with strides in elements."""

    k: tl.tensor
    pe: tl.tensor
    page: tl.tensor
    token: tl.tensor
    pe_page: tl.tensor
    pe_token: tl.tensor


class Queries(NamedTuple):
    """Queries' two parts, with strides in elements, and the factor of logits, in base 2."""

    q: tl.tensor
    pe: tl.tensor
    token: tl.tensor
    head: tl.tensor
    pe_token: tl.tensor
    pe_head: tl.tensor
    scale: tl.tensor
    q_scale: tl.tensor
    k_scale: tl.tensor


class Ring(NamedTuple):
    """Shared memory. Blocks of keys: left and right half of their first part, their second part and, later, weights;
    of each row with a block's weights the factor of what was before, the largest logit, the sum of weights. The same of
    a tile's queries. What waits for what: a block is full, weighed, empty; queries are there, and no longer needed.
    """

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    shrink: gl.shared_memory_descriptor
    top: gl.shared_memory_descriptor
    total: gl.shared_memory_descriptor
    q_left: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    weighed: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    asked: gl.shared_memory_descriptor
    answered: gl.shared_memory_descriptor


class Parts(NamedTuple):
    """Where parts of tiles go: float32 [slots, rows, dim], and (largest logit, sum of weights) in [slots, rows, 2].
    None is written beyond, whatever the tables say. And counters of those that have arrived, neighbours' and all.
    """

    acc: tl.tensor
    sums: tl.tensor
    slots: tl.tensor
    rows: tl.tensor
    arrivals: tl.tensor


class Tile(NamedTuple):
    """`count` rows of a request (none where there are fewer), from `row` on, and its keys begin to stop."""

    row: tl.tensor
    count: tl.tensor
    begin: tl.tensor
    stop: tl.tensor


@gluon.jit
def last_seen(request, row, c: gl.constexpr):
    """The last key that a row sees, if there are so many."""
    if c.causal:
        return request.kv_len - request.q_len + row // c.group
    return request.kv_len + row * 0


@gluon.jit
def tile_at(request, piece, c: gl.constexpr):
    """This program's tile of a piece of the line. Keys that no row sees are left out."""
    row = (piece.h * c.lanes + gl.program_id(0) % c.lanes) * 64
    count = gl.minimum(request.q_len * c.group - row, 64)
    begin, stop = piece.first * c.block, piece.stop
    stop = gl.minimum(stop, last_seen(request, row + gl.maximum(count, 1) - 1, c) + 1)
    return Tile(row, count, begin, gl.where(count > 0, stop, begin))


@gluon.jit
def copy_rows(left, right, rest, x, x_rest, row, row_rest, real, layout: gl.constexpr, c: gl.constexpr):
    """64 rows of two parts to shared memory, 16 bytes at a time; those that are not real become zeros."""
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))[None, :]
    e = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    row, row_rest, real = row[:, None], row_rest[:, None], real[:, None]
    async_copy.async_copy_global_to_shared(left, x + row + d, real)
    async_copy.async_copy_global_to_shared(right, x + row + (d + c.dim), real)
    async_copy.async_copy_global_to_shared(rest, x_rest + row_rest + e, real)


@gluon.jit
def copy_queries(queries, ring, request, tile, layout: gl.constexpr, c: gl.constexpr):
    """A tile's queries to shared memory."""
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    token = (request.q_begin + (tile.row + r) // c.group).to(gl.int64)
    head = (tile.row + r) % c.group
    row, row_pe = token * queries.token + head * queries.head, token * queries.pe_token + head * queries.pe_head
    real = r < tile.count
    copy_rows(ring.q_left, ring.q_right, ring.q_rest, queries.q, queries.pe, row, row_pe, real, layout, c)


@gluon.jit
def fetch(tables, cache, queries, ring, span, c: gl.constexpr):
    """Fill the ring with the span's blocks, and bring each tile's queries after its first."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one_page: gl.constexpr = c.page_size % c.block == 0
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    first = r
    if one_page:  # a block has one page, known by its first key
        first = span.unit * 0
    unit, request = span.unit, first_request(tables, span, c)
    n = span.unit * 0
    tiles = n
    while unit < span.end:
        piece = piece_at(request, unit, span.end, c)
        unit += piece.last - piece.first
        tile = tile_at(request, piece, c)
        page = pages_of(tables, request, tile.begin + first, c)
        for t0 in range(tile.begin, tile.stop, c.block):
            j, within = t0 + r, (t0 + first) % c.page_size
            row, row_pe = page * cache.page + within * cache.token, page * cache.pe_page + within * cache.pe_token
            if one_page:
                row, row_pe = row + r * cache.token, row_pe + r * cache.pe_token
            page = pages_of(tables, request, t0 + c.block + first, c)  # asked for one block ahead
            stage = n % c.stages
            mbarrier.wait(ring.empty.index(stage), (n // c.stages & 1) ^ 1)
            left, right, rest = ring.left.index(stage), ring.right.index(stage), ring.rest.index(stage)
            copy_rows(left, right, rest, cache.k, cache.pe, row, row_pe, j < request.kv_len, layout, c)
            async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
            n += 1
            if t0 == tile.begin:
                mbarrier.wait(ring.answered, (tiles & 1) ^ 1)
                copy_queries(queries, ring, request, tile, layout, c)
                async_copy.mbarrier_arrive(ring.asked, increment_count=False)
                tiles += 1
        request = request_at(tables, request, unit, span.end, c)


@gluon.jit
def logits(ring, stage, L: gl.constexpr, c: gl.constexpr):
    """Products of a tile's queries and a block's keys, [64, 64]."""
    s = gl.full([64, c.block], 0.0, gl.float32, L)
    s = warpgroup_mma(ring.q_left, ring.left.index(stage).permute([1, 0]), s, use_acc=False, is_async=True)
    s = warpgroup_mma(ring.q_right, ring.right.index(stage).permute([1, 0]), s, is_async=True)
    s = warpgroup_mma(ring.q_rest, ring.rest.index(stage).permute([1, 0]), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def factors(queries, tile, flat: gl.constexpr, c: gl.constexpr):
    """What each row's logits are multiplied by."""
    r = gl.arange(0, 64, flat)
    factor = gl.full([64], 1.0, gl.float32, flat) * queries.scale
    if c.q_scale:
        factor *= gl.load(queries.q_scale + (tile.row + r) % c.group, r < tile.count, 1.0)
    if c.k_scale:
        factor *= gl.load(queries.k_scale)
    return factor


@gluon.jit
def weigh(tables, queries, ring, span, c: gl.constexpr):
    """Make weights of the ring's blocks, tile by tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block, 16])
    flat: gl.constexpr = gl.SliceLayout(1, L)
    unit, request = span.unit, first_request(tables, span, c)
    n = span.unit * 0
    tiles = n
    while unit < span.end:
        piece = piece_at(request, unit, span.end, c)
        unit += piece.last - piece.first
        tile = tile_at(request, piece, c)
        factor = factors(queries, tile, flat, c)
        position = last_seen(request, tile.row + gl.arange(0, 64, flat), c)
        clear = gl.minimum(last_seen(request, tile.row, c) + 1, request.kv_len)  # keys that all rows see
        m = gl.full([64], -float("inf"), gl.float32, flat)
        l = gl.full([64], 0.0, gl.float32, flat)
        for t0 in range(tile.begin, tile.stop, c.block):
            stage = n % c.stages
            mbarrier.wait(ring.full.index(stage), n // c.stages & 1)
            mbarrier.wait(ring.asked, tiles & 1)
            fence_async_shared()
            s = logits(ring, stage, L, c) * factor[:, None]
            gl.thread_barrier()  # weights take the place of what all warps have read now
            mbarrier.arrive(ring.answered, count=1, pred=t0 + c.block >= tile.stop)
            if t0 + c.block > clear:
                j = (t0 + gl.arange(0, c.block, gl.SliceLayout(0, L)))[None, :]
                s = gl.where((j <= position[:, None]) & (j < request.kv_len), s, -float("inf"))
            top = gl.maximum(m, gl.max(s, 1))
            base = gl.where(top == -float("inf"), 0.0, top)
            p = gl.exp2(s - base[:, None])
            shrink = gl.exp2(m - base)
            m, l = top, l * shrink + gl.sum(p, 1)
            ring.rest.index(stage).store(p.to(ring.rest.dtype))
            ring.shrink.index(stage).store(shrink)
            ring.top.index(stage).store(m)
            ring.total.index(stage).store(l)
            fence_async_shared()
            gl.thread_barrier()  # all weights are there before they count as such
            mbarrier.arrive(ring.weighed.index(stage), count=1)
            n += 1
        if tile.stop > tile.begin:
            tiles += 1
        request = request_at(tables, request, unit, span.end, c)


@gluon.jit
def gather(tables, ring, values, parts, results, span, c: gl.constexpr):
    """Add up the half of the values that `values` has, tile by tile."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(c.dim, 128), 16])
    flat: gl.constexpr = gl.SliceLayout(1, O)
    unit, request = span.unit, first_request(tables, span, c)
    n = span.unit * 0
    while unit < span.end:
        piece = piece_at(request, unit, span.end, c)
        tile = tile_at(request, piece, c)
        m = gl.full([64], -float("inf"), gl.float32, flat)
        l = gl.full([64], 0.0, gl.float32, flat)
        acc = gl.full([64, c.dim], 0.0, gl.float32, O)
        for _t in range(tile.begin, tile.stop, c.block):
            stage = n % c.stages
            mbarrier.wait(ring.full.index(stage), n // c.stages & 1)
            mbarrier.wait(ring.weighed.index(stage), n // c.stages & 1)
            fence_async_shared()
            acc = acc * ring.shrink.index(stage).load(flat)[:, None]
            m, l = ring.top.index(stage).load(flat), ring.total.index(stage).load(flat)
            acc = warpgroup_mma(ring.rest.index(stage), values.index(stage), acc)
            gl.thread_barrier()
            mbarrier.arrive(ring.empty.index(stage), count=1)
            n += 1
        if tile.count > 0:
            if piece.last - piece.first == request.cost:
                write(acc, m, l, results, request.q_begin, 0, tile.row, tile.row + tile.count, c)
            else:
                slot = 2 * span.program + (piece.first == 0).to(gl.int32)
                save(acc, m, l, parts, slot, 0, tile.count, c)
                begin = unit - piece.first
                final = (begin + request.cost - 1) // span.share
                arrive(parts, results, request, tile, span.program, begin // span.share, final, c)
        unit += piece.last - piece.first
        request = request_at(tables, request, unit, span.end, c)
    q_end = gl.load(tables.qo_indptr + tables.batch, tables.batch > 0, 0)
    clear_padding(results, gl.minimum(gl.maximum(q_end, 0), tables.tokens), tables.tokens, c)


@gluon.jit
def save(acc, m, l, parts, slot, r0, rows, c: gl.constexpr):
    """A tile's part, or its rows from r0 on, to its slot. acc: [some, head_dim]; m, l: [some]."""
    layout: gl.constexpr = acc.type.layout
    flat: gl.constexpr = gl.SliceLayout(1, layout)
    count = gl.where(slot < parts.slots, gl.minimum(rows, parts.rows), 0)
    r = r0 + gl.arange(0, acc.shape[0], flat)
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    at = slot.to(gl.int64) * parts.rows + r
    gl.store(parts.acc + at[:, None] * c.dim + d[None, :], acc, (r < count)[:, None])
    gl.store(parts.sums + at * 2, gl.convert_layout(m, flat), r < count)
    gl.store(parts.sums + at * 2 + 1, gl.convert_layout(l, flat), r < count)


@gluon.jit
def together(parts, r0, rows, origin, first, final, step, c: gl.constexpr):
    """Rows r0 and on (of `rows`) of what each `step`-th program from first to final left of a tile that begins in
    program origin. As many parts at a time as registers hold, so that their reads overlap; each warp has rows of its
    own.
    """
    R: gl.constexpr = c.merge_rows
    N: gl.constexpr = 64 * 128 // (R * c.dim)
    each: gl.constexpr = c.dim // 32
    cube: gl.constexpr = gl.BlockedLayout([1, 1, each], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    plane: gl.constexpr = gl.BlockedLayout([1, each], [1, 32], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, cube))
    n = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None]
    d = gl.arange(0, c.dim, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    r = r0 + gl.arange(0, R, flat)
    m = gl.full([R], -float("inf"), gl.float32, flat)
    l = gl.full([R], 0.0, gl.float32, flat)
    acc = gl.full([R, c.dim], 0.0, gl.float32, gl.SliceLayout(0, cube))
    for p in range(first, final + 1, N * step):
        program = p + n * step
        slot = gl.where(program == origin, 2 * program + 1, 2 * program)
        at = slot.to(gl.int64) * parts.rows + r[None, :]
        here = (program <= final) & (slot < parts.slots) & (r < rows)[None, :]
        m_n = gl.load(parts.sums + at * 2, here, -float("inf"))
        l_n = gl.load(parts.sums + at * 2 + 1, here, 0.0)
        acc_n = gl.load(parts.acc + at[:, :, None] * c.dim + d[None, None, :], here[:, :, None], 0.0)
        top = gl.maximum(m, gl.max(m_n, 0))
        base = gl.where(top == -float("inf"), 0.0, top)
        weight, shrink = gl.exp2(m_n - base[None, :]), gl.exp2(m - base)
        m, l = top, l * shrink + gl.sum(l_n * weight, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(0, cube)))
        acc = acc * shrink[:, None] + gl.sum(acc_n * weight[:, :, None], 0)
    return gl.convert_layout(acc, plane), m, l


@gluon.jit
def arrive(parts, results, request, tile, program, origin, final, c: gl.constexpr):
    """A part is there, of those that programs origin to final make. The last of c.fan neighbours merges theirs, and the
    last who did so what they merged: one program that did it all would take longer than many need to attend.
    """
    first = program - (program - origin) % c.fan
    last = gl.minimum(first + c.fan - 1, final)
    slot = 2 * first + (first == origin).to(gl.int32)
    neighbours = parts.arrivals + gl.num_programs(0) // c.lanes + slot
    groups = parts.arrivals + origin
    rows = gl.minimum(tile.count, parts.rows)
    gl.thread_barrier()  # all of this part is written before it counts as arrived
    if gl.atomic_add(neighbours, 1) == last - first:
        gl.store(neighbours, 0)
        step, complete = 1, final - origin < c.fan
        if final - origin >= c.fan:
            for r0 in range(0, rows, c.merge_rows):
                acc, m, l = together(parts, r0, rows, origin, first, last, 1, c)
                save(acc, m, l, parts, slot, r0, rows, c)
            gl.thread_barrier()
            step, complete = c.fan, gl.atomic_add(groups, 1) == (final - origin) // c.fan
            gl.store(groups, 0, complete)
        if complete:
            for r0 in range(0, rows, c.merge_rows):
                acc, m, l = together(parts, r0, rows, origin, origin, final, step, c)
                write(acc, m, l, results, request.q_begin, 0, tile.row + r0, tile.row + rows, c)


@gluon.jit
def share_memory(dtype: gl.constexpr, c: gl.constexpr):
    """The ring, and what its parts wait for, of which nothing has happened yet."""
    stages: gl.constexpr = c.stages
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block, c.dim], dtype)
    rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block, 64], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(dtype, [stages, c.block, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block, 64], rest),
        gl.allocate_shared_memory(gl.float32, [stages, 64], flat),
        gl.allocate_shared_memory(gl.float32, [stages, 64], flat),
        gl.allocate_shared_memory(gl.float32, [stages, 64], flat),
        gl.allocate_shared_memory(dtype, [64, c.dim], half),
        gl.allocate_shared_memory(dtype, [64, c.dim], half),
        gl.allocate_shared_memory(dtype, [64, 64], rest),
        gl.allocate_shared_memory(gl.int64, [stages, 1], one),
        gl.allocate_shared_memory(gl.int64, [stages, 1], one),
        gl.allocate_shared_memory(gl.int64, [stages, 1], one),
        gl.allocate_shared_memory(gl.int64, [1], one),
        gl.allocate_shared_memory(gl.int64, [1], one),
    )
    for s in gl.static_range(stages):
        mbarrier.init(ring.full.index(s), count=128)  # threads that copy
        mbarrier.init(ring.weighed.index(s), count=1)
        mbarrier.init(ring.empty.index(s), count=2)  # groups that gather
    mbarrier.init(ring.asked, count=128)
    mbarrier.init(ring.answered, count=1)
    return ring


@gluon.jit
def parts_of(half: gl.constexpr, part, arrivals, part_rows, c: gl.constexpr):
    """Where one half of the columns of this program's lane has its parts."""
    programs, lane = gl.num_programs(0), gl.program_id(0) % c.lanes
    slots = 2 * (programs // c.lanes)
    rows, before = (2 * programs).to(gl.int64) * part_rows, (lane * slots).to(gl.int64) * part_rows
    part += half * rows * (c.dim + 2)
    arrivals += (half * c.lanes + lane) * (slots + slots // 2)
    return Parts(part + before * c.dim, part + rows * c.dim + before * 2, slots, part_rows, arrivals)


_POINTERS = (
    "lse", "sinks", "arrivals", "qo_indptr", "kv_indptr", "last_page_len", "indices", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_NUMBERS = ("part_rows", "batch", "tokens", "entries", "pages")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def decode_latent(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    part, arrivals, qo_indptr, kv_indptr, last_page_len, indices, q_scale, k_scale, v_scale,
    part_rows, batch, tokens, entries, pages, scale, v_gain,
    q_token, q_head, q_pe_token, q_pe_head, k_page, k_token, k_pe_page, k_pe_token, o_token, o_head,
    c: gl.constexpr,
):  # fmt: skip
    """Attention of a batch over pages of a latent cache.

    q, q_pe, k, k_pe, out: as in `quire.kernels.registry.Call` (v is k); lse: float32 [tokens, heads]. part: for each
    half of the columns float32 [2 * programs, part_rows, dim] and after it [2 * programs, part_rows, 2]; arrivals:
    int32 [6 * programs], 0 before and after. Programs are a multiple of lanes. Strides count elements, those of queries
    and keys are multiples of 16. scale is in base 2.
    """
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, batch)
    cache = Cache(k, k_pe, k_page, k_token, k_pe_page, k_pe_token)
    queries = Queries(q, q_pe, q_token, q_head, q_pe_token, q_pe_head, scale, q_scale, k_scale)
    ring = share_memory(k.dtype.element_ty, c)
    parts_0, parts_1 = parts_of(0, part, arrivals, part_rows, c), parts_of(1, part, arrivals, part_rows, c)
    # Both halves write the sums of a row, which are the same.
    left = Results(out, lse, o_token, o_head, sinks, v_scale, v_gain)
    right = Results(out + c.dim, lse, o_token, o_head, sinks, v_scale, v_gain)
    gdc_launch_dependents()
    gdc_wait()
    span = my_span(tables, gl.program_id(0) // c.lanes, gl.num_programs(0) // c.lanes, c)
    gl.warp_specialize(
        [
            (weigh, (tables, queries, ring, span, c)),
            (gather, (tables, ring, ring.left, parts_0, left, span, c)),
            (gather, (tables, ring, ring.right, parts_1, right, span, c)),
            (fetch, (tables, cache, queries, ring, span, c)),
        ],
        [4, 4, 4],
        [160, 160, 64],
    )
