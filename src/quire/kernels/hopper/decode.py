"""Decode on Hopper: a warp group that fetches keys and values, and one that attends.

A ring of blocks in shared memory lets the first run ahead of the second, over the ends of heads and requests, so that
memory is never idle: pages are gathered by 16-byte copies that name their own addresses, whatever the page size. The
second multiplies 64 rows at a time, most of them empty, which costs nothing that reading would not cost anyway. Two
programs share a multiprocessor, and each hides the other's beginning and end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from quire.kernels.hopper.line import Tables, extent, my_span, piece_at
from quire.kernels.hopper.parts import LOG2E, Results, clear_padding, merge, save, write


@dataclass(frozen=True, slots=True)
class Config:
    """What the kernel is compiled for. block: keys of a block; stages: blocks in the ring; scan: requests looked at
    together; merge_rows: rows merged together.
    """

    heads: int
    group: int
    dim: int
    page_size: int
    block: int
    stages: int
    scan: int
    merge_rows: int
    causal: bool
    window: bool
    cap: bool
    sinks: bool
    far: bool
    lse: bool
    q_scale: bool
    k_scale: bool
    v_scale: bool
    rows: int = 0  # of a tile: all


class Cache(NamedTuple):
    """Keys and values, with strides in elements."""

    k: tl.tensor
    v: tl.tensor
    k_page: tl.tensor
    k_token: tl.tensor
    k_head: tl.tensor
    v_page: tl.tensor
    v_token: tl.tensor
    v_head: tl.tensor


class Queries(NamedTuple):
    """Queries, with strides in elements; where a tile's lie in shared memory; what logits meet, in base 2."""

    q: tl.tensor
    token: tl.tensor
    head: tl.tensor
    tile: gl.shared_memory_descriptor
    scale: tl.tensor
    cap: tl.tensor
    q_scale: tl.tensor
    k_scale: tl.tensor


class Ring(NamedTuple):
    """Blocks of keys and values, and for each whether it is full, whether it is empty."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def pages_of(tables, request, j, c: gl.constexpr):
    """The pages of keys j, clamped, so that no table leads outside the cache."""
    page = gl.load(tables.indices + request.entry + j // c.page_size, j < request.kv_len, 0)
    page = gl.minimum(gl.maximum(page, 0), tables.pages - 1)
    return page.to(gl.int64) if c.far else page


@gluon.jit
def fetch(tables, cache, ring, span, c: gl.constexpr):
    """Fill the ring with the span's blocks. Each thread copies 16 bytes at a time; rows without a key become zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.dim, c.dim // 8], [4, 1], [1, 0])
    t = gl.arange(0, c.block, gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))[None, :]
    unit, b, start = span.unit, span.b, span.start
    n = span.unit * 0
    while unit < span.end:
        request = extent(tables, b, c)
        if unit < start + request.cost * c.heads:
            piece = piece_at(request, unit, span.end, start, c)
            unit += piece.last - piece.first
            head = piece.h.to(gl.int64) if c.far else piece.h
            begin = request.low + piece.first * c.block
            page = pages_of(tables, request, begin + t, c)
            for t0 in range(begin, piece.stop, c.block):
                j = t0 + t
                within = j % c.page_size
                k_row = page * cache.k_page + within * cache.k_token + head * cache.k_head
                v_row = page * cache.v_page + within * cache.v_token + head * cache.v_head
                page = pages_of(tables, request, j + c.block, c)  # asked for one block ahead
                here = j < request.kv_len
                if c.window:
                    here = here & (j >= request.kv_len - request.q_len - tables.window)
                stage = n % c.stages
                mbarrier.wait(ring.empty.index(stage), (n // c.stages & 1) ^ 1)
                async_copy.async_copy_global_to_shared(ring.k.index(stage), cache.k + k_row[:, None] + d, here[:, None])
                async_copy.async_copy_global_to_shared(ring.v.index(stage), cache.v + v_row[:, None] + d, here[:, None])
                async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
                n += 1
        else:
            start += request.cost * c.heads
            b += 1


@gluon.jit
def load_queries(queries, request, h, flat: gl.constexpr, c: gl.constexpr):
    """A tile's queries to shared memory, and the factor of each row's logits."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.dim, c.dim // 8], [4, 1], [1, 0])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    head = h * c.group + r % c.group
    at = (request.q_begin + r // c.group).to(gl.int64) * queries.token + head * queries.head
    real = r < request.q_len * c.group
    x = gl.load(queries.q + at[:, None] + d[None, :], real[:, None], 0.0)
    factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, layout)) * queries.scale
    if c.q_scale:
        factor *= gl.load(queries.q_scale + head, real, 1.0)
    if c.k_scale:
        factor *= gl.load(queries.k_scale + h)
    gl.thread_barrier()  # the last tile's are no longer read
    queries.tile.store(x)
    fence_async_shared()
    gl.thread_barrier()
    return gl.convert_layout(factor, flat)


@gluon.jit
def attend_block(acc, m, l, queries, factor, position, request, t0, k, v, window, L: gl.constexpr, c: gl.constexpr):
    """A block of keys into the state of 64 rows: weighted values, the largest logit in base 2, the sum of weights."""
    out: gl.constexpr = acc.type.layout
    s = warpgroup_mma(
        queries.tile, k.permute([1, 0]), gl.full([64, c.block], 0.0, gl.float32, L), use_acc=False
    )  # fmt: skip
    s = s * factor[:, None]
    if c.cap:
        s = queries.cap - 2.0 * queries.cap / (1.0 + gl.exp2(s * (2.0 * LOG2E / queries.cap)))
    j = (t0 + gl.arange(0, c.block, gl.SliceLayout(0, L)))[None, :]
    seen = j < request.kv_len
    if c.causal:
        seen = seen & (j <= position[:, None])
    if c.window:
        seen = seen & (j >= position[:, None] - window)
    s = gl.where(seen, s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 1))
    base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(s - base[:, None])
    shrink = gl.exp2(m - base)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, out))[:, None]
    weights = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, out, 2))
    return warpgroup_mma(weights, v, acc), top, l * shrink + gl.sum(p, 1)


@gluon.jit
def consume(tables, queries, ring, results, span, c: gl.constexpr):
    """Attend to the ring's blocks, tile by tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.dim, 16])
    flat: gl.constexpr = gl.SliceLayout(1, L)
    r = gl.arange(0, 64, flat)
    unit, b, start = span.unit, span.b, span.start
    n = span.unit * 0
    while unit < span.end:
        request = extent(tables, b, c)
        if unit < start + request.cost * c.heads:
            piece = piece_at(request, unit, span.end, start, c)
            factor = load_queries(queries, request, piece.h, flat, c)
            position = request.kv_len - request.q_len + r // c.group
            m = gl.full([64], -float("inf"), gl.float32, flat)
            l = gl.full([64], 0.0, gl.float32, flat)
            acc = gl.full([64, c.dim], 0.0, gl.float32, O)
            for t0 in range(request.low + piece.first * c.block, piece.stop, c.block):
                stage = n % c.stages
                mbarrier.wait(ring.full.index(stage), n // c.stages & 1)
                fence_async_shared()
                k, v = ring.k.index(stage), ring.v.index(stage)
                acc, m, l = attend_block(
                    acc, m, l, queries, factor, position, request, t0, k, v, tables.window, L, c
                )  # fmt: skip
                mbarrier.arrive(ring.empty.index(stage), count=1)
                n += 1
            rows = request.q_len * c.group
            if piece.last - piece.first == request.cost:
                ro: gl.constexpr = gl.SliceLayout(1, O)
                write(acc, gl.convert_layout(m, ro), gl.convert_layout(l, ro), results, request, piece.h, 0, rows, O, c)
            else:
                save(acc, m, l, results, 2 * gl.program_id(0) + (piece.first == 0).to(gl.int32), rows, O, c)
                begin = unit - piece.first
                origin, final = begin // span.share, (begin + request.cost - 1) // span.share
                gl.thread_barrier()  # all of this part is written before it counts as arrived
                if gl.atomic_add(results.arrivals + origin, 1) == final - origin:
                    merge(results, request, piece.h, origin, final, c)
                    gl.store(results.arrivals + origin, 0)
            unit += piece.last - piece.first
        else:
            start += request.cost * c.heads
            b += 1
    q_end = gl.load(tables.qo_indptr + tables.batch, tables.batch > 0, 0)
    clear_padding(results, gl.minimum(gl.maximum(q_end, 0), tables.tokens), tables.tokens, c)


_POINTERS = (
    "lse", "sinks", "arrivals", "qo_indptr", "kv_indptr", "last_page_len", "indices", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_NUMBERS = ("slots", "part_rows", "batch", "tokens", "entries", "pages", "window")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def decode(
    q, q_pe, k, v, k_pe, out, lse, sinks,
    part, arrivals, qo_indptr, kv_indptr, last_page_len, indices, q_scale, k_scale, v_scale,
    slots, part_rows, batch, tokens, entries, pages, window, scale, v_gain, cap,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, o_token, o_head,
    c: gl.constexpr,
):  # fmt: skip
    """Attention of a batch of requests with at most 64 query rows per KV head, over pages.

    q, k, v, out: as in `quire.kernels.registry.Call` (q_pe and k_pe are None); lse: float32 [tokens, heads]. part:
    float32 [slots, part_rows, dim] and after it [slots, part_rows, 2]; arrivals: int32 [programs], 0 before and after.
    Strides count elements, those of k and v are multiples of 16. scale and cap are in base 2.
    """
    tables = Tables(qo_indptr, kv_indptr, last_page_len, indices, batch, tokens, entries, pages, window)
    cache = Cache(k, v, k_page, k_token, k_head, v_page, v_token, v_head)
    part_ml = part + slots.to(gl.int64) * part_rows * c.dim
    results = Results(out, lse, o_token, o_head, part, part_ml, arrivals, slots, part_rows, sinks, v_scale, v_gain)
    dtype: gl.constexpr = k.dtype.element_ty
    block: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.block, c.dim], dtype)
    ring = Ring(
        gl.allocate_shared_memory(dtype, [c.stages, c.block, c.dim], block),
        gl.allocate_shared_memory(dtype, [c.stages, c.block, c.dim], block),
        gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout()),
    )
    stages: gl.constexpr = c.stages
    for s in gl.static_range(stages):
        mbarrier.init(ring.full.index(s), count=128)  # threads that copy
        mbarrier.init(ring.empty.index(s), count=1)
    tile = gl.allocate_shared_memory(dtype, [64, c.dim], gl.NVMMASharedLayout.get_default_for([64, c.dim], dtype))
    queries = Queries(q, q_token, q_head, tile, scale, cap, q_scale, k_scale)
    span = my_span(tables, c)
    gl.warp_specialize(
        [(consume, (tables, queries, ring, results, span, c)), (fetch, (tables, cache, ring, span, c))], [4], [104]
    )
