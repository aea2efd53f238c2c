"""The consumer's work on a tile: its queries, and QK, softmax and PV of one block of keys after another.

Both products are transposed: S^T = K Q^T and O^T = V^T P^T. An MMA of a warp group has at least 64 rows, which keys and
elements of values fill; the few query rows of a decode step are its columns, at least 8. So acc is [head_dim, rows].
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from quire.kernels.hopper.mask import RowMask, row_mask, tile_keys, visible
from quire.kernels.hopper.softmax import LOG2E, exponent_base


class Tile(NamedTuple):
    """What is computed of a segment: head h's rows from `row` on, and keys kv_start to kv_end."""

    h: tl.tensor
    row: tl.tensor
    kv_start: tl.tensor
    kv_end: tl.tensor


class Queries(NamedTuple):
    """The tensor q with strides in elements; shared memory for a tile's queries and for P, the numerators of the
    softmax; scale and cap of logits, in base 2; q_scale, k_scale: factors per query head and per KV head.
    """

    q: tl.tensor
    token: tl.tensor
    head: tl.tensor
    q_shared: gl.shared_memory_descriptor
    p_shared: gl.shared_memory_descriptor
    scale: tl.tensor
    cap: tl.tensor
    q_scale: tl.tensor
    k_scale: tl.tensor


class Rows(NamedTuple):
    """The rows of a tile. factor: of their logits; mask: which keys they see."""

    factor: tl.tensor
    mask: RowMask


@gluon.jit
def tile_of(request, segment, mask, c: gl.constexpr):
    """The Tile of a segment, without keys that no row of it sees."""
    h, row, kv_start = segment.h, segment.h * 0, request.first_key + segment.start * c.unit_size
    past, row_end = request.kv_len - request.q_len, request.q_len * c.group
    if c.whole_tiles:
        tiles = (row_end + c.tile_rows - 1) // c.tile_rows
        h, row = segment.h // tiles, segment.h % tiles * c.tile_rows
        row_end = gl.minimum(row + c.tile_rows, row_end)
    kv_start, kv_end = tile_keys(past, row, row_end - 1, kv_start, segment.kv_end, mask, c)
    return Tile(h, row, kv_start, kv_end)


@gluon.jit
def load_rows(queries, request, h, row, flat: gl.constexpr, mask, c: gl.constexpr):
    """Copy a tile's queries, head h's rows from `row` on, to shared memory, and return its Rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.dim, c.dim // 8], [4, 1], [1, 0])
    r = row + gl.arange(0, c.block_m, gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    head = h * c.group + r % c.group
    at = (request.q_start + r // c.group).to(gl.int64) * queries.token + head * queries.head
    valid = r < request.q_len * c.group
    x = gl.load(queries.q + at[:, None] + d[None, :], valid[:, None], 0.0)
    factor = gl.full([c.block_m], 1.0, gl.float32, gl.SliceLayout(1, layout)) * queries.scale
    if c.q_scale:
        factor *= gl.load(queries.q_scale + head, valid, 1.0)
    if c.k_scale:
        factor *= gl.load(queries.k_scale + head // (c.group // c.packed_heads), valid, 1.0)
    gl.thread_barrier()  # all warps have read the queries of the tile before
    if c.fp8:
        x, power = _scale_to_fp16(x)
        factor *= power
        even, odd = x.reshape([c.block_m, c.stored_dim, 2]).split()
        queries.q_shared.index(0).store(even)
        queries.q_shared.index(1).store(odd)
    else:
        queries.q_shared.index(0).store(x)
    fence_async_shared()
    gl.thread_barrier()
    return Rows(gl.convert_layout(factor, flat), row_mask(request, row + gl.arange(0, c.block_m, flat), mask, c))


@gluon.jit
def _scale_to_fp16(x):
    """Rows of x divided by powers of two so that they fit float16, and the powers."""
    x = x.to(gl.float32)
    exponent = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) & 0x7F800000
    power = gl.where(exponent == 0, 1.0, exponent.to(gl.float32, bitcast=True))
    return (x / power[:, None]).to(gl.float16), power


# Two 16-bit elements, each of two fp8 numbers, become four float16: first both even numbers, then both odd ones.
_WIDEN = """{{ .reg .b16 a, b; .reg .b32 s, t; mov.b32 {{a, b}}, $2; cvt.rn.f16x2.{0}x2 s, a; cvt.rn.f16x2.{0}x2 t, b;
    prmt.b32 $0, s, t, 0x5410; prmt.b32 $1, s, t, 0x7632; }}"""
_WIDEN_E4M3, _WIDEN_E5M2 = gl.constexpr(_WIDEN.format("e4m3")), gl.constexpr(_WIDEN.format("e5m2"))


@gluon.jit
def _widen(x, c: gl.constexpr):
    """The even and the odd fp8 numbers of 16-bit elements as float16."""
    ptx: gl.constexpr = _WIDEN_E5M2 if c.e5m2 else _WIDEN_E4M3
    return gl.inline_asm_elementwise(ptx, "=r,=r,r", [x], (gl.float16, gl.float16), True, 2)


@gluon.jit
def _qk(queries, k, L: gl.constexpr, c: gl.constexpr):
    """S^T of one KV head's keys, [block_n, block_m]."""
    zero = gl.full([c.block_n, c.block_m], 0.0, gl.float32, L)
    if c.fp8:
        even, odd = _widen(k.load(gl.DotOperandLayout(0, L, 2)), c)
        s = warpgroup_mma(even, queries.q_shared.index(0).permute([1, 0]), zero, use_acc=False)
        s = warpgroup_mma(odd, queries.q_shared.index(1).permute([1, 0]), s)
    else:
        s = warpgroup_mma(k, queries.q_shared.index(0).permute([1, 0]), zero, use_acc=False)
    return s


@gluon.jit
def _pv(acc, p, v, L: gl.constexpr, c: gl.constexpr):
    """Add V^T P^T of one KV head's values to acc."""
    p = p.permute([1, 0])
    if c.fp8:
        even, odd = _widen(v.permute([1, 0]).load(gl.DotOperandLayout(0, L, 2)), c)
        evens = warpgroup_mma(even, p, acc[0])
        acc = evens, warpgroup_mma(odd, p, acc[1])
    else:
        acc = (warpgroup_mma(v.permute([1, 0]), p, acc[0]),)
    return acc


@gluon.jit
def zero_acc(L: gl.constexpr, c: gl.constexpr):
    """The acc of no keys, [head_dim, block_m]; with fp8, a tensor of even and a tensor of odd elements."""
    zero = gl.full([c.stored_dim, c.block_m], 0.0, gl.float32, L)
    acc = (zero,)
    if c.fp8:
        acc = zero, zero  # type: ignore[assignment]
    return acc


@gluon.jit
def transpose_acc(acc, c: gl.constexpr):
    """Return acc as [block_m, head_dim]."""
    if c.fp8:
        x = gl.join(acc[0], acc[1]).permute([1, 0, 2]).reshape([c.block_m, c.dim])
    else:
        x = acc[0].permute([1, 0])
    return x


@gluon.constexpr_function
def _warp_results_layout(rows):
    """The layout of [4, rows], a number per warp and row, in which each thread has all four numbers of the rows that
    are its columns of a product.
    """
    further = [[0, 8 << i] for i in range((rows // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], *further], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, rows]
    )


@gluon.jit
def _reduce_keys(x, largest: gl.constexpr):
    """The maximum or the sum of x, [keys, rows], over keys: within warps first, so that one barrier is enough."""
    blocks: gl.constexpr = x.shape[0] // 64
    rows: gl.constexpr = x.shape[1]
    flat: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    x = x.reshape([blocks, 4, 16, rows])
    if largest:
        x = gl.max(gl.max(x, 2), 0)
        x = gl.max(gl.convert_layout(x, _warp_results_layout(rows)), 0)
    else:
        x = gl.sum(gl.sum(x, 2), 0)
        x = gl.sum(gl.convert_layout(x, _warp_results_layout(rows)), 0)
    return gl.convert_layout(x, flat, assert_trivial=True)


@gluon.jit
def _attend_block(acc, m, l, queries, rows, t0, k, v, mask, c: gl.constexpr):
    """Add a block of keys, from t0 on, to the state of all rows. l is [block_n, block_m] here: its sum over keys is
    left to the end of the tile.
    """
    L: gl.constexpr = l.type.layout
    s = _qk(queries, k.slice(0, c.stored_dim, 1), L, c)
    if c.packed_heads > 1:
        second = gl.arange(0, c.block_m, gl.SliceLayout(0, L)) % c.group >= c.group // 2
        s = gl.where(second[None, :], _qk(queries, k.slice(c.stored_dim, c.stored_dim, 1), L, c), s)
    s = s * rows.factor[None, :]
    if c.cap:
        s = queries.cap - 2.0 * queries.cap / (1.0 + gl.exp2(s * (2.0 * LOG2E / queries.cap)))
    j = (t0 + gl.arange(0, c.block_n, gl.SliceLayout(1, L)))[:, None]
    of = rows.mask
    seen = visible(j, of.position[None, :], of.end[None, :], of.bit[None, :], mask, c)
    s = gl.where(seen, s, -float("inf"))
    m_new = gl.maximum(m, _reduce_keys(s, True))
    base = exponent_base(m_new)
    p = gl.exp2(s - base[None, :])
    alpha = gl.exp2(m - base)
    queries.p_shared.permute([1, 0]).store(p.to(queries.p_shared.dtype))
    fence_async_shared()
    gl.thread_barrier()
    if c.fp8:
        acc = acc[0] * alpha[None, :], acc[1] * alpha[None, :]
    else:
        acc = (acc[0] * alpha[None, :],)
    acc_new = _pv(acc, queries.p_shared, v.slice(0, c.stored_dim, 1), L, c)
    if c.packed_heads > 1:
        # Each product has the rows of both heads, and those of its own head are selected: zeros in P instead would let
        # NaN in one head's values through to the other head's rows.
        other = _pv(acc, queries.p_shared, v.slice(c.stored_dim, c.stored_dim, 1), L, c)
        if c.fp8:
            acc_new = gl.where(second[None, :], other[0], acc_new[0]), gl.where(second[None, :], other[1], acc_new[1])
        else:
            acc_new = (gl.where(second[None, :], other[0], acc_new[0]),)
    return acc_new, m_new, l * alpha[None, :] + p


@gluon.jit
def attend_keys(queries, rows, request, pipeline, state, start, end, mask, c: gl.constexpr):
    """Attend a tile's rows to keys start to end, the pipeline's next blocks. Returns acc, m and l, and the pipeline's
    state after them.
    """
    flat: gl.constexpr = rows.factor.type.layout
    L: gl.constexpr = flat.parent
    m = gl.full([c.block_m], -float("inf"), gl.float32, flat)
    l = gl.full([c.block_n, c.block_m], 0.0, gl.float32, L)
    acc = zero_acc(L, c)
    for t0 in range(start, end, c.block_n):
        pipeline.barriers.consumer_wait(state)
        fence_async_shared()
        k, v = pipeline.k.index(state.stage()), pipeline.v.index(state.stage())
        acc, m, l = _attend_block(acc, m, l, queries, rows, t0, k, v, mask, c)
        pipeline.barriers.consumer_release_once(state)
        state = state.advance(1)
    return acc, m, _reduce_keys(l, False), state
