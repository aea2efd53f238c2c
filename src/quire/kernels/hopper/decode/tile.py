"""Query rows and a block of keys: what one step of decode on Hopper computes.

Keys are multiplied by queries, and values by weights: keys and elements are the many rows that a product wants, the few
query rows its columns.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from quire.kernels.hopper.epilogue import LOG2E


class Queries(NamedTuple):
    """Queries, with strides in elements; where a tile's lie in shared memory, and the weights of a block's keys; what
    logits meet, in base 2.
    """

    q: tl.tensor
    token: tl.tensor
    head: tl.tensor
    tile: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    scale: tl.tensor
    cap: tl.tensor
    q_scale: tl.tensor
    k_scale: tl.tensor


class Masks(NamedTuple):
    """Packed masks: see `quire.definition.masks`."""

    bits: tl.tensor
    indptr: tl.tensor
    size: tl.tensor


class Rows(NamedTuple):
    """What the rows' logits are multiplied by, their positions, and where their bits of the mask begin."""

    factor: tl.tensor
    position: tl.tensor
    bit: tl.tensor


@gluon.jit
def load_queries(queries, request, h, row, flat: gl.constexpr, c: gl.constexpr):
    """A tile's queries, those of rows from `row` on, to shared memory, and the factor of each row's logits."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.dim, c.dim // 8], [4, 1], [1, 0])
    r = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
    head = h * c.group + r % c.group
    at = (request.q_begin + r // c.group).to(gl.int64) * queries.token + head * queries.head
    real = r < request.q_len * c.group
    x = gl.load(queries.q + at[:, None] + d[None, :], real[:, None], 0.0)
    factor = gl.full([c.rows], 1.0, gl.float32, gl.SliceLayout(1, layout)) * queries.scale
    if c.q_scale:
        factor *= gl.load(queries.q_scale + head, real, 1.0)
    if c.k_scale:
        factor *= gl.load(queries.k_scale + head // (c.group // c.pair), real, 1.0)
    gl.thread_barrier()  # the last tile's are no longer read
    if c.fp8:
        x, power = as_halves(x)
        factor *= power
        even, odd = x.reshape([c.rows, c.words, 2]).split()
        queries.tile.index(0).store(even)
        queries.tile.index(1).store(odd)
    else:
        queries.tile.index(0).store(x)
    fence_async_shared()
    gl.thread_barrier()
    return gl.convert_layout(factor, flat)


@gluon.jit
def as_halves(x):
    """Rows of x over powers of two, so that halves hold them, and the powers."""
    x = x.to(gl.float32)
    exponent = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) & 0x7F800000
    power = gl.where(exponent == 0, 1.0, exponent.to(gl.float32, bitcast=True))
    return (x / power[:, None]).to(gl.float16), power


# Two words to two pairs of halves, then both first ones together and both second ones.
_WIDEN = """{{ .reg .b16 a, b; .reg .b32 s, t; mov.b32 {{a, b}}, $2; cvt.rn.f16x2.{0}x2 s, a; cvt.rn.f16x2.{0}x2 t, b;
    prmt.b32 $0, s, t, 0x5410; prmt.b32 $1, s, t, 0x7632; }}"""
_WIDEN_E4M3, _WIDEN_E5M2 = gl.constexpr(_WIDEN.format("e4m3")), gl.constexpr(_WIDEN.format("e5m2"))


@gluon.jit
def widen(x, c: gl.constexpr):
    """The first and the second fp8 number of each word, as halves."""
    ptx: gl.constexpr = _WIDEN_E5M2 if c.e5m2 else _WIDEN_E4M3
    return gl.inline_asm_elementwise(ptx, "=r,=r,r", [x], (gl.float16, gl.float16), True, 2)


@gluon.jit
def logits(queries, k, L: gl.constexpr, c: gl.constexpr):
    """[keys, rows]: products of a block's keys of one head and a tile's queries."""
    zero = gl.full([c.block, c.rows], 0.0, gl.float32, L)
    if c.fp8:
        even, odd = widen(k.load(gl.DotOperandLayout(0, L, 2)), c)
        s = warpgroup_mma(even, queries.tile.index(0).permute([1, 0]), zero, use_acc=False)
        s = warpgroup_mma(odd, queries.tile.index(1).permute([1, 0]), s)
    else:
        s = warpgroup_mma(k, queries.tile.index(0).permute([1, 0]), zero, use_acc=False)
    return s


@gluon.jit
def add_values(acc, weights, v, L: gl.constexpr, c: gl.constexpr):
    """The weighted values of a block's keys of one head, added to acc."""
    weights = weights.permute([1, 0])
    if c.fp8:
        even, odd = widen(v.permute([1, 0]).load(gl.DotOperandLayout(0, L, 2)), c)
        evens = warpgroup_mma(even, weights, acc[0])
        acc = evens, warpgroup_mma(odd, weights, acc[1])
    else:
        acc = (warpgroup_mma(v.permute([1, 0]), weights, acc[0]),)
    return acc


@gluon.jit
def no_values(L: gl.constexpr, c: gl.constexpr):
    """Before any keys, acc is zeros: [head_dim, rows], with fp8 its even and its odd elements apart."""
    zero = gl.full([c.words, c.rows], 0.0, gl.float32, L)
    acc = (zero,)
    if c.fp8:
        acc = zero, zero  # type: ignore[assignment]
    return acc


@gluon.jit
def upright(acc, c: gl.constexpr):
    """[rows, head_dim]."""
    if c.fp8:
        x = gl.join(acc[0], acc[1]).permute([1, 0, 2]).reshape([c.rows, c.dim])
    else:
        x = acc[0].permute([1, 0])
    return x


@gluon.jit
def rows_of(request, row, factor, masks, c: gl.constexpr):
    """A request's rows from `row` on."""
    r = row + gl.arange(0, c.rows, factor.type.layout)
    bit = r.to(gl.int64)
    if c.mask:
        begin = gl.maximum(gl.load(masks.indptr + request.b), 0).to(gl.int64)
        bit = begin * 8 + (r // c.group).to(gl.int64) * request.kv_len
    return Rows(factor, request.kv_len - request.q_len + r // c.group, bit)


@gluon.jit
def visible(rows, request, t0, window, masks, L: gl.constexpr, c: gl.constexpr):
    """Which of a block's keys each row sees."""
    j = (t0 + gl.arange(0, c.block, gl.SliceLayout(1, L)))[:, None]
    seen = j < request.kv_len
    if c.causal:
        seen = seen & (j <= rows.position[None, :])
    if c.window:
        seen = seen & (j >= rows.position[None, :] - window)
    if c.mask:
        seen = seen & (rows.position < request.kv_len)[None, :]
        bit = rows.bit[None, :] + j
        byte = gl.load(masks.bits + gl.minimum(bit >> 3, masks.size - 1), seen, 0)
        seen = seen & (((byte.to(gl.int32) >> (bit & 7).to(gl.int32)) & 1) != 0)
    return seen


@gluon.constexpr_function
def _everywhere(rows):
    """Numbers of four warps, [4, rows], all of them in threads that have a row's of a product."""
    further = [[0, 8 << i] for i in range((rows // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], *further], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, rows]
    )


@gluon.jit
def over_keys(x, largest: gl.constexpr):
    """Of each row's numbers, [keys, rows], the largest or the sum, in all threads. With one barrier."""
    blocks: gl.constexpr = x.shape[0] // 64
    rows: gl.constexpr = x.shape[1]
    flat: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    x = x.reshape([blocks, 4, 16, rows])
    if largest:
        x = gl.max(gl.max(x, 2), 0)
        x = gl.max(gl.convert_layout(x, _everywhere(rows)), 0)
    else:
        x = gl.sum(gl.sum(x, 2), 0)
        x = gl.sum(gl.convert_layout(x, _everywhere(rows)), 0)
    return gl.convert_layout(x, flat, assert_trivial=True)


@gluon.jit
def attend_block(acc, m, l, queries, rows, request, t0, k, v, window, masks, c: gl.constexpr):
    """A block of keys into the state of all rows, which are columns here: acc, weighted values; m, the largest logits
    in base 2; l [keys, rows], sums of weights.
    """
    L: gl.constexpr = l.type.layout
    s = logits(queries, k.slice(0, c.words, 1), L, c)
    if c.pair > 1:
        second = gl.arange(0, c.rows, gl.SliceLayout(0, L)) % c.group >= c.group // 2
        s = gl.where(second[None, :], logits(queries, k.slice(c.words, c.words, 1), L, c), s)
    s = s * rows.factor[None, :]
    if c.cap:
        s = queries.cap - 2.0 * queries.cap / (1.0 + gl.exp2(s * (2.0 * LOG2E / queries.cap)))
    s = gl.where(visible(rows, request, t0, window, masks, L, c), s, -float("inf"))
    top = gl.maximum(m, over_keys(s, True))
    base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(s - base[None, :])
    shrink = gl.exp2(m - base)
    queries.weights.permute([1, 0]).store(p.to(queries.weights.dtype))
    fence_async_shared()
    gl.thread_barrier()
    if c.fp8:
        acc = acc[0] * shrink[None, :], acc[1] * shrink[None, :]
    else:
        acc = (acc[0] * shrink[None, :],)
    sums = add_values(acc, queries.weights, v.slice(0, c.words, 1), L, c)
    if c.pair > 1:
        # All columns once for each head, and then those that are its own: zeros for weights would let NaN through.
        other = add_values(acc, queries.weights, v.slice(c.words, c.words, 1), L, c)
        if c.fp8:
            sums = gl.where(second[None, :], other[0], sums[0]), gl.where(second[None, :], other[1], sums[1])
        else:
            sums = (gl.where(second[None, :], other[0], sums[0]),)
    return sums, top, l * shrink[None, :] + p


@gluon.jit
def attend_keys(queries, rows, request, ring, begin, stop, n, tables, masks, c: gl.constexpr):
    """The state of keys begin to stop, which are the ring's blocks from the n-th on: acc, m, and sums of weights of all
    rows; and n after them.
    """
    flat: gl.constexpr = rows.factor.type.layout
    L: gl.constexpr = flat.parent
    m = gl.full([c.rows], -float("inf"), gl.float32, flat)
    l = gl.full([c.block, c.rows], 0.0, gl.float32, L)
    acc = no_values(L, c)
    for t0 in range(begin, stop, c.block):
        stage = n % c.stages
        mbarrier.wait(ring.full.index(stage), n // c.stages & 1)
        fence_async_shared()
        k, v = ring.k.index(stage), ring.v.index(stage)
        acc, m, l = attend_block(acc, m, l, queries, rows, request, t0, k, v, tables.window, masks, c)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        n += 1
    return acc, m, over_keys(l, False), n
