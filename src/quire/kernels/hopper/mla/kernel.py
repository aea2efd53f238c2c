"""Decode over latent caches (MLA) on Hopper: a warp group that fetches, and two that attend, with 64 query rows.

One fetches blocks of 64 keys, both parts, and queries. The others make weights of every second block each, while the
other one multiplies, and leave them, as halves, where the keys' second part was, which nobody needs any more. Both add
up all values, from the same keys' first part, but half of their columns each: a whole row is more than a group's
registers hold.

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

from quire.kernels.hopper.decode.kernel import pages_of
from quire.kernels.hopper.epilogue import Results, clear_padding, write
from quire.kernels.hopper.mla.combine import arrive, parts_of, save
from quire.kernels.hopper.schedule import Tables, my_span, piece_at, quotient, request_at

REGISTERS = 168  # of a thread at the start; who fetches gives some away
ATTENDERS = gl.constexpr(216)  # of a thread that attends


@dataclass(frozen=True, slots=True)
class Config:
    """What the kernel is compiled for. dim: half of the first part of a head; group: query heads; lanes: programs that
    have the same keys; tile_rows: query rows of all of them; stages: blocks in the ring; scan: requests looked at
    together; merge_rows: rows merged together; fan: parts merged by one program. The last eight are what latent layers
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
    by_length: bool
    lse: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    block: int = 64
    unit: int = 64
    heads: int = 1
    pair: int = 1
    programs: int = 1
    part_cost: int = 0
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
    of each row with a block's weights the factor of what was before, the largest logit, the sum of weights (`hand`).
    Once, the same of a tile's queries. What waits for what: the left half of a block, and the rest of it, are full and
    empty; a block is weighed; queries are there, and no longer needed.
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


class Rows(NamedTuple):
    """Of each row of a tile the factor of its logits and the last key that it sees; keys before `clear` are seen by all
    rows. What all this is of: the request's keys, and the tile's from `begin` on.
    """

    factor: tl.tensor
    position: tl.tensor
    clear: tl.tensor
    kv_len: tl.tensor
    begin: tl.tensor


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
def copy_rows(to, x, row, real, layout: gl.constexpr):
    """64 rows from x on to shared memory, 16 bytes at a time; those that are not real become zeros."""
    d = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))[None, :]
    async_copy.async_copy_global_to_shared(to, x + row[:, None] + d, real[:, None])


@gluon.jit
def copy_queries(queries, ring, request, tile, layout: gl.constexpr, c: gl.constexpr):
    """A tile's queries to shared memory."""
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    token = (request.q_begin + (tile.row + r) // c.group).to(gl.int64)
    head = (tile.row + r) % c.group
    row, row_pe = token * queries.token + head * queries.head, token * queries.pe_token + head * queries.pe_head
    real = r < tile.count
    copy_rows(ring.q_left.index(0), queries.q, row, real, layout)
    copy_rows(ring.q_right.index(0), queries.q + c.dim, row, real, layout)
    copy_rows(ring.q_rest.index(0), queries.pe, row_pe, real, layout)


@gluon.jit
def fetch(tables, cache, queries, ring, span, c: gl.constexpr):
    """Fill the ring with the span's blocks, and bring each tile's queries after its first."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one_page: gl.constexpr = c.page_size % c.block == 0
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    first = r
    if one_page:  # a block has one page, known by its first key
        first = span.unit * 0
    unit, request = span.unit, span.request
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
            stage, phase, real = n % c.stages, (n // c.stages & 1) ^ 1, j < request.kv_len
            mbarrier.wait(ring.empty.index(2 * stage), phase)
            copy_rows(ring.left.index(stage), cache.k, row, real, layout)
            async_copy.mbarrier_arrive(ring.full.index(2 * stage), increment_count=False)
            mbarrier.wait(ring.empty.index(2 * stage + 1), phase)
            copy_rows(ring.right.index(stage), cache.k + c.dim, row, real, layout)
            copy_rows(ring.rest.index(stage), cache.pe, row_pe, real, layout)
            async_copy.mbarrier_arrive(ring.full.index(2 * stage + 1), increment_count=False)
            n += 1
            if t0 == tile.begin:
                mbarrier.wait(ring.answered, (tiles & 1) ^ 1)
                copy_queries(queries, ring, request, tile, layout, c)
                async_copy.mbarrier_arrive(ring.asked, increment_count=False)
                tiles += 1
        request = request_at(tables, request, unit, span.end, c)


@gluon.jit
def logits(ring, at, L: gl.constexpr, c: gl.constexpr):
    """Products of a tile's queries and the keys of the block that is the at-th of this program, [64, 64]."""
    stage, phase = at % c.stages, at // c.stages & 1
    # Not known to be 0, or the compiler would keep where each column of queries lies, for which there are no registers.
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    left, right, rest = ring.q_left.index(zero), ring.q_right.index(zero), ring.q_rest.index(zero)
    s = gl.full([64, c.block], 0.0, gl.float32, L)
    mbarrier.wait(ring.full.index(2 * stage), phase)
    fence_async_shared()
    s = warpgroup_mma(left, ring.left.index(stage).permute([1, 0]), s, use_acc=False, is_async=True)
    mbarrier.wait(ring.full.index(2 * stage + 1), phase)
    fence_async_shared()
    s = warpgroup_mma(right, ring.right.index(stage).permute([1, 0]), s, is_async=True)
    s = warpgroup_mma(rest, ring.rest.index(stage).permute([1, 0]), s, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    gl.thread_barrier()  # weights take the place of what all warps have read now
    return s


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


@gluon.constexpr_function
def _words(columns):
    """Rows as products have them, four threads of a warp each row: their columns, if there are several."""
    own = [[0, 1], [0, 2]] if columns > 1 else [[0, 0]] * 2
    return gl.DistributedLinearLayout([[8, 0]], [*own, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def hand(x, to):
    """A number of each row to shared memory, [64, 4]. Four threads have it, and each writes a word of its own: words
    that several write at a time are what racecheck cannot follow.
    """
    each: gl.constexpr = _words(4)
    x = gl.convert_layout(x, gl.SliceLayout(1, each), assert_trivial=True)
    to.store(x[:, None] + gl.full([64, 4], 0.0, gl.float32, each))


@gluon.jit
def handed(at, layout: gl.constexpr):
    """The numbers there, as the first of the four wrote them."""
    x = at.slice(0, 1, 1).load(_words(1))
    return gl.convert_layout(gl.max(x, 1), layout, assert_trivial=True)


@gluon.jit
def weigh(s, m, l, rows, ring, i, at, c: gl.constexpr):
    """Leave weights of a tile's i-th block, the at-th of this program, and what the sums of those before become."""
    L: gl.constexpr = s.type.layout
    stage, t0 = at % c.stages, rows.begin + i * c.block
    s *= rows.factor[:, None]
    if t0 + c.block > rows.clear:
        j = (t0 + gl.arange(0, c.block, gl.SliceLayout(0, L)))[None, :]
        s = gl.where((j <= rows.position[:, None]) & (j < rows.kv_len), s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 1))
    base = gl.where(top == -float("inf"), 0.0, top)
    p, shrink = gl.exp2(s - base[:, None]), gl.exp2(m - base)
    ring.rest.index(stage).store(p.to(ring.rest.dtype))
    hand(shrink, ring.shrink.index(stage))
    hand(top, ring.top.index(stage))
    hand(l * shrink + gl.sum(p, 1), ring.total.index(stage))
    fence_async_shared()
    gl.thread_barrier()  # all weights are there before they count as such
    mbarrier.arrive(ring.weighed.index(stage), count=1)


@gluon.jit
def add_values(acc, ring, at, turn: gl.constexpr, flat: gl.constexpr, c: gl.constexpr):
    """Begin to add the weighed values of the at-th block; and the sums after it."""
    values = ring.left if turn == 0 else ring.right
    stage, phase = at % c.stages, at // c.stages & 1
    mbarrier.wait(ring.full.index(2 * stage + turn), phase)
    mbarrier.wait(ring.weighed.index(stage), phase)
    fence_async_shared()
    shrink = handed(ring.shrink.index(stage), gl.SliceLayout(1, acc.type.layout))
    m, l = handed(ring.top.index(stage), flat), handed(ring.total.index(stage), flat)
    acc = warpgroup_mma(ring.rest.index(stage), values.index(stage), acc * shrink[:, None], is_async=True)
    return acc, m, l


@gluon.jit
def give_back(acc, ring, at, turn: gl.constexpr, c: gl.constexpr):
    """When they are added, give back what nobody needs any more: the rest of a block is both groups'."""
    acc = warpgroup_mma_wait(0, [acc])
    gl.thread_barrier()
    if turn == 0:
        mbarrier.arrive(ring.empty.index(2 * (at % c.stages)), count=1)
    mbarrier.arrive(ring.empty.index(2 * (at % c.stages) + 1), count=1)
    return acc


@gluon.jit
def attend(tables, queries, ring, parts, results, span, turn: gl.constexpr, c: gl.constexpr):
    """Weigh the first (turn 0) or second block of every two, and add up the left or right half of values, by tiles."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.dim, 16])
    flat: gl.constexpr = gl.SliceLayout(1, L)
    unit, request = span.unit, span.request
    n = span.unit * 0
    tiles = n
    while unit < span.end:
        piece = piece_at(request, unit, span.end, c)
        tile = tile_at(request, piece, c)
        position = last_seen(request, tile.row + gl.arange(0, 64, flat), c)
        clear = gl.minimum(last_seen(request, tile.row, c) + 1, request.kv_len)
        rows = Rows(factors(queries, tile, flat, c), position, clear, request.kv_len, tile.begin)
        m = gl.full([64], -float("inf"), gl.float32, flat)
        l = gl.full([64], 0.0, gl.float32, flat)
        acc = gl.full([64, c.dim], 0.0, gl.float32, O)
        blocks = (gl.maximum(tile.stop - tile.begin, 0) + c.block - 1) // c.block
        if blocks > 0:
            mbarrier.wait(ring.asked, tiles & 1)
        for i in range(0, blocks - 1, 2):
            s = logits(ring, n + i + turn, L, c)
            mbarrier.arrive(ring.answered, count=1, pred=i + turn + 2 >= blocks)
            if turn == 0:
                weigh(s, m, l, rows, ring, i, n + i, c)
            acc, m, l = add_values(acc, ring, n + i, turn, flat, c)
            if turn == 1:
                weigh(s, m, l, rows, ring, i + 1, n + i + 1, c)
            acc = give_back(acc, ring, n + i, turn, c)
            acc, m, l = add_values(acc, ring, n + i + 1, turn, flat, c)
            acc = give_back(acc, ring, n + i + 1, turn, c)
        n += blocks
        if blocks % 2 == 1:
            if turn == 0:
                s = logits(ring, n - 1, L, c)
                weigh(s, m, l, rows, ring, blocks - 1, n - 1, c)
            mbarrier.arrive(ring.answered, count=1, pred=(blocks == 1) | (turn == 0))
            acc, m, l = add_values(acc, ring, n - 1, turn, flat, c)
            acc = give_back(acc, ring, n - 1, turn, c)
        if blocks > 0:
            tiles += 1
        if tile.count > 0:
            if piece.last - piece.first == request.cost:
                write(acc, m, l, results, request.q_begin, 0, tile.row, tile.row + tile.count, c)
            else:
                slot = 2 * span.program + (piece.first == 0).to(gl.int32)
                save(acc, m, l, parts, slot, 0, tile.count, c)
                begin = unit - piece.first
                origin, final = quotient(begin, span.share), quotient(begin + request.cost - 1, span.share)
                arrive(parts, results, request, tile, span.program, origin, final, c)
        unit += piece.last - piece.first
        request = request_at(tables, request, unit, span.end, c)
    clear_padding(tables, results, c)


@gluon.jit
def share_memory(dtype: gl.constexpr, c: gl.constexpr):
    """The ring, and what its parts wait for, of which nothing has happened yet."""
    stages: gl.constexpr = c.stages
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block, c.dim], dtype)
    rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block, 64], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(dtype, [stages, c.block, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block, c.dim], half),
        gl.allocate_shared_memory(dtype, [stages, c.block, 64], rest),
        gl.allocate_shared_memory(gl.float32, [stages, 64, 4], flat),
        gl.allocate_shared_memory(gl.float32, [stages, 64, 4], flat),
        gl.allocate_shared_memory(gl.float32, [stages, 64, 4], flat),
        gl.allocate_shared_memory(dtype, [1, 64, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, 64, c.dim], half),
        gl.allocate_shared_memory(dtype, [1, 64, 64], rest),
        gl.allocate_shared_memory(gl.int64, [2 * stages, 1], one),
        gl.allocate_shared_memory(gl.int64, [stages, 1], one),
        gl.allocate_shared_memory(gl.int64, [2 * stages, 1], one),
        gl.allocate_shared_memory(gl.int64, [1], one),
        gl.allocate_shared_memory(gl.int64, [1], one),
    )
    for s in gl.static_range(stages):
        for half in gl.static_range(2):
            mbarrier.init(ring.full.index(2 * s + half), count=128)  # threads that copy
            mbarrier.init(ring.empty.index(2 * s + half), count=1 + half)  # groups that attend
        mbarrier.init(ring.weighed.index(s), count=1)
    mbarrier.init(ring.asked, count=128)
    mbarrier.init(ring.answered, count=2)
    return ring


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
    programs = gl.num_programs(0) // c.lanes
    span = my_span(tables, gl.program_id(0) // c.lanes, programs, programs, c)
    gl.warp_specialize(
        [
            (fetch, (tables, cache, queries, ring, span, c)),
            (attend, (tables, queries, ring, parts_0, left, span, 0, c)),
            (attend, (tables, queries, ring, parts_1, right, span, 1, c)),
        ],
        [4, 4],
        [ATTENDERS, ATTENDERS],
    )
