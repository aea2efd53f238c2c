"""The consumer's work on a tile: its queries, and QK, softmax and PV of one block of keys after another.

Both products are transposed: S^T = K Q^T and O^T = V^T P^T. An MMA of a warp group has at least 64 rows, which keys and
elements of values fill; the few query rows of a decode step are its columns, at least 8. So acc is [head_dim, rows].
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.mask import RowMask
from quire.kernels.hopper.softmax import LOG2E, SoftmaxState, exponent_base


@aggregate
class DecodeTile:
    """What is computed of a segment: head h's rows from `row` on, and keys kv_start to kv_end."""

    h: gl.tensor
    row: gl.tensor
    kv_start: gl.tensor
    kv_end: gl.tensor


@gluon.jit
def tile_of(request, segment, mask):
    """The DecodeTile of a segment, without keys that no row of it sees."""
    c: gl.constexpr = request.config
    kv_start = request.first_key + segment.start * c.tile.unit_size
    h, row, row_end = segment.h, segment.h * 0, request.rows()
    if c.whole_tiles:
        tiles = request.tiles()
        h, row = segment.h // tiles, segment.h % tiles * c.tile.rows
        row_end = gl.minimum(row + c.tile.rows, row_end)
    past = request.kv_len - request.q_len
    kv_start, kv_end = mask.tile_keys(past, row, row_end - 1, kv_start, segment.kv_end)
    return DecodeTile(h, row, kv_start, kv_end)


@aggregate
class DecodeRows:
    """The rows of a tile. factor: the factor of each row's logits; mask: the RowMask."""

    factor: gl.tensor
    mask: RowMask


@aggregate
class DecodeQueries:
    """The tensor q with strides in elements; shared memory for a tile's queries and for P, the numerators of the
    softmax; scale and cap of logits, in base 2; q_scale, k_scale: factors per query head and per KV head; config: the
    kernel's DecodeConfig.
    """

    q: gl.tensor
    token: gl.tensor
    head: gl.tensor
    q_shared: gl.shared_memory_descriptor
    p_shared: gl.shared_memory_descriptor
    scale: gl.tensor
    cap: gl.tensor
    q_scale: gl.tensor | None
    k_scale: gl.tensor | None
    config: gl.constexpr

    @gluon.jit
    def load(self, request, h, row, mask):
        """Copy a tile's queries, head h's rows from `row` on, to shared memory, and return its DecodeRows."""
        c: gl.constexpr = self.config
        group: gl.constexpr = c.tile.group
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.dim, c.dim // 8], [4, 1], [1, 0])
        r = row + gl.arange(0, c.block_m, gl.SliceLayout(1, layout))
        d = gl.arange(0, c.dim, gl.SliceLayout(0, layout))
        head = h * group + r % group
        at = (request.q_start + r // group).to(gl.int64) * self.token + head * self.head
        valid = r < request.rows()
        x = gl.load(self.q + at[:, None] + d[None, :], valid[:, None], 0.0)
        factor = gl.full([c.block_m], 1.0, gl.float32, gl.SliceLayout(1, layout)) * self.scale
        if c.q_scale:
            factor *= gl.load(self.q_scale + head, valid, 1.0)
        if c.k_scale:
            factor *= gl.load(self.k_scale + head // (group // c.tile.packed_heads), valid, 1.0)
        # All warps have read the queries of the tile before.
        thread_barrier()
        if c.fp8:
            x, power = _scale_to_fp16(x)
            factor *= power
            even, odd = x.reshape([c.block_m, c.stored_dim, 2]).split()
            self.q_shared.index(0).store(even)
            self.q_shared.index(1).store(odd)
        else:
            self.q_shared.index(0).store(x)
        fence_async_shared()
        thread_barrier()
        flat: gl.constexpr = rows_layout(c)
        return DecodeRows(gl.convert_layout(factor, flat), mask.rows(request, row + gl.arange(0, c.block_m, flat)))

    @gluon.jit
    def qk(self, k):
        """S^T of one KV head's keys, [block_n, block_m]."""
        L: gl.constexpr = product_layout(self.config)
        zero = gl.full([self.config.tile.block_n, self.config.block_m], 0.0, gl.float32, L)
        if self.config.fp8:
            even, odd = _widen(k.load(gl.DotOperandLayout(0, L, 2)), self.config)
            s = warpgroup_mma(even, self.q_shared.index(0).permute([1, 0]), zero, use_acc=False)
            s = warpgroup_mma(odd, self.q_shared.index(1).permute([1, 0]), s)
        else:
            s = warpgroup_mma(k, self.q_shared.index(0).permute([1, 0]), zero, use_acc=False)
        return s

    @gluon.jit
    def add_pv(self, acc, v):
        """Add V^T P^T of one KV head's values to acc."""
        L: gl.constexpr = product_layout(self.config)
        p = self.p_shared.permute([1, 0])
        if self.config.fp8:
            even, odd = _widen(v.permute([1, 0]).load(gl.DotOperandLayout(0, L, 2)), self.config)
            evens = warpgroup_mma(even, p, acc[0])
            acc = evens, warpgroup_mma(odd, p, acc[1])
        else:
            acc = (warpgroup_mma(v.permute([1, 0]), p, acc[0]),)
        return acc


@gluon.constexpr_function
def product_layout(c):
    """The layout of both products."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block_m, 16])


@gluon.constexpr_function
def rows_layout(c):
    """The layout of a number for each row."""
    return gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block_m, 16]))


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
def zero_acc(c: gl.constexpr):
    """The acc of no keys, [head_dim, block_m]; with fp8, a tensor of even and a tensor of odd elements."""
    zero = gl.full([c.stored_dim, c.block_m], 0.0, gl.float32, product_layout(c))
    acc = (zero,)
    if c.fp8:
        acc = zero, zero  # type: ignore[assignment]
    return acc


@gluon.jit
def transposed(state, c: gl.constexpr):
    """A state with acc as [block_m, head_dim]."""
    if c.fp8:
        x = gl.join(state.acc[0], state.acc[1]).permute([1, 0, 2]).reshape([c.block_m, c.dim])
    else:
        x = state.acc[0].permute([1, 0])
    return SoftmaxState(x, state.m, state.l)


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
def _attend_block(state, queries, rows, t0, k, v):
    """Add a block of keys, from t0 on, to the state of all rows. l is [block_n, block_m] here: its sum over keys is
    left to the end of the tile.
    """
    c: gl.constexpr = queries.config
    acc, m, l = state.acc, state.m, state.l
    L: gl.constexpr = l.type.layout
    s = queries.qk(k.slice(0, c.stored_dim, 1))
    if c.tile.packed_heads > 1:
        second = gl.arange(0, c.block_m, gl.SliceLayout(0, L)) % c.tile.group >= c.tile.group // 2
        s = gl.where(second[None, :], queries.qk(k.slice(c.stored_dim, c.stored_dim, 1)), s)
    s = s * rows.factor[None, :]
    if c.cap:
        s = queries.cap - 2.0 * queries.cap / (1.0 + gl.exp2(s * (2.0 * LOG2E / queries.cap)))
    j = (t0 + gl.arange(0, c.tile.block_n, gl.SliceLayout(1, L)))[:, None]
    s = gl.where(rows.mask.visible(j), s, -float("inf"))
    m_new = gl.maximum(m, _reduce_keys(s, True))
    base = exponent_base(m_new)
    p = gl.exp2(s - base[None, :])
    alpha = gl.exp2(m - base)
    queries.p_shared.permute([1, 0]).store(p.to(queries.p_shared.dtype))
    fence_async_shared()
    thread_barrier()
    if c.fp8:
        acc = acc[0] * alpha[None, :], acc[1] * alpha[None, :]
    else:
        acc = (acc[0] * alpha[None, :],)
    acc_new = queries.add_pv(acc, v.slice(0, c.stored_dim, 1))
    if c.tile.packed_heads > 1:
        # Each product has the rows of both heads, and those of its own head are selected: zeros in P instead would let
        # NaN in one head's values through to the other head's rows.
        other = queries.add_pv(acc, v.slice(c.stored_dim, c.stored_dim, 1))
        if c.fp8:
            acc_new = gl.where(second[None, :], other[0], acc_new[0]), gl.where(second[None, :], other[1], acc_new[1])
        else:
            acc_new = (gl.where(second[None, :], other[0], acc_new[0]),)
    return SoftmaxState(acc_new, m_new, l * alpha[None, :] + p)


@gluon.jit
def attend_keys(queries, rows, pipeline, kv_state, start, end):
    """The SoftmaxState of a tile's rows over keys start to end, the pipeline's next blocks, with acc as in `zero_acc`;
    and the pipeline's state after them.
    """
    c: gl.constexpr = queries.config
    m = gl.full([c.block_m], -float("inf"), gl.float32, rows_layout(c))
    l = gl.full([c.tile.block_n, c.block_m], 0.0, gl.float32, product_layout(c))
    state = SoftmaxState(zero_acc(c), m, l)
    for t0 in range(start, end, c.tile.block_n):
        pipeline.barriers.consumer_wait(kv_state)
        fence_async_shared()
        k, v = pipeline.k.index(kv_state.stage()), pipeline.v.index(kv_state.stage())
        state = _attend_block(state, queries, rows, t0, k, v)
        pipeline.barriers.consumer_release_once(kv_state)
        kv_state = kv_state.advance(1)
    return SoftmaxState(state.acc, state.m, _reduce_keys(state.l, False)), kv_state
