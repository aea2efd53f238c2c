"""A consumer's work on a tile: S = QK and the softmax in every second block of keys, PV in all of them.

There are two consumers. Consumer 0 computes S and P of even blocks of a tile and the left half of acc's columns;
consumer 1 computes S and P of odd blocks and the right half. P passes from one to the other through shared memory, and
is multiplied from registers by the one that computed it.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.hopper.mask import RowMask, row_mask, tile_keys, unmasked_end, visible_in_block
from quire.kernels.hopper.softmax import exponent_base, next_m, rescale, scaled_sums


class Tile(NamedTuple):
    """What a program computes of a segment or of a work unit: `count` rows of a request from `row` on, none if
    count <= 0, and keys kv_start to kv_end.
    """

    row: tl.tensor
    count: tl.tensor
    kv_start: tl.tensor
    kv_end: tl.tensor


class Queries(NamedTuple):
    """The two parts of queries, with strides in elements; scale: of logits, in base 2; q_scale: a factor per query
    head; k_scale: one factor.
    """

    q: tl.tensor
    pe: tl.tensor
    token: tl.tensor
    head: tl.tensor
    pe_token: tl.tensor
    pe_head: tl.tensor
    scale: tl.tensor
    q_scale: tl.tensor
    k_scale: tl.tensor


class Rows(NamedTuple):
    """The rows of a tile. scale: of logits in the softmax; factor: of each row's logits before it, with c.transform;
    mask: which keys rows see; unmasked_end: keys before it are seen by all rows; kv_start: the tile's first key.
    """

    scale: tl.tensor
    factor: tl.tensor
    mask: RowMask
    unmasked_end: tl.tensor
    kv_start: tl.tensor


@gluon.jit
def tile_of(request, segment, mask, c: gl.constexpr):
    """This program's Tile of a segment, without keys that no row of it sees."""
    row = (segment.h * c.programs_per_span + gl.program_id(0) % c.programs_per_span) * c.block_m
    count = gl.minimum(request.q_len * c.group - row, c.block_m)
    start, last_row = segment.start * c.block_n, row + gl.maximum(count, 1) - 1
    start, end = tile_keys(request.kv_len - request.q_len, row, last_row, start, segment.kv_end, mask, c)
    return Tile(row, count, start, gl.where(count > 0, end, start))


@gluon.jit
def tile_of_unit(row, rows, first, last, c: gl.constexpr):
    """The Tile of a work unit: rows from `row` on, of a request that has `rows`, and key blocks `first` to `last`."""
    return Tile(row, gl.minimum(rows - row, c.block_m), first * c.block_n, (last + 1) * c.block_n)


@gluon.jit
def _rows_of(queries, request, tile, flat: gl.constexpr, mask, c: gl.constexpr):
    """The Rows of a tile."""
    r = gl.arange(0, c.block_m, flat)
    sees, end = row_mask(request, tile.row + r, mask, c), unmasked_end(request, tile.row, c)
    scale = gl.to_tensor(1.0) if c.transform else queries.scale
    factor = sees.position
    if c.transform:
        factor = gl.full([c.block_m], 1.0, gl.float32, flat) * queries.scale
        if c.q_scale:
            factor *= gl.load(queries.q_scale + (tile.row + r) % c.group, r < tile.count, 1.0)
        if c.k_scale:
            factor *= gl.load(queries.k_scale)
    return Rows(scale, factor, sees, end, tile.kv_start)


@gluon.jit
def _start_qk(pipeline, state, L: gl.constexpr, c: gl.constexpr):
    """Start S of the pipeline's next block, [block_m, block_n]."""
    stage = state.stage()
    # A zero that the compiler does not know to be one: otherwise it would keep the address of each column of queries
    # in a register, and there are not enough.
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    left, right, pe = pipeline.q_left.index(zero), pipeline.q_right.index(zero), pipeline.q_pe.index(zero)
    s = gl.full([c.block_m, c.block_n], 0.0, gl.float32, L)
    pipeline.left.consumer_wait(state)
    fence_async_shared()
    s = warpgroup_mma(left, pipeline.k_left.index(stage).permute([1, 0]), s, use_acc=False, is_async=True)
    pipeline.right.consumer_wait(state)
    fence_async_shared()
    s = warpgroup_mma(right, pipeline.k_right.index(stage).permute([1, 0]), s, is_async=True)
    return warpgroup_mma(pe, pipeline.k_pe.index(stage).permute([1, 0]), s, is_async=True)


@gluon.constexpr_function
def _row_layout(columns):
    """A layout of [64, columns] with rows as in an MMA's result: four threads of a warp have each row, and share its
    columns if there are several.
    """
    own = [[0, 1], [0, 2]] if columns > 1 else [[0, 0]] * 2
    return gl.DistributedLinearLayout([[8, 0]], [*own, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _store_per_row(x, to):
    """Store a number per row to shared memory, [block_m, 4]. Four threads have each number, and each writes a word of
    its own: racecheck reports words that several threads write at a time.
    """
    layout: gl.constexpr = _row_layout(4)
    x = gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True)
    to.store(x[:, None] + gl.full([to.shape[0], 4], 0.0, gl.float32, layout))


@gluon.jit
def _load_per_row(at, layout: gl.constexpr):
    """Load what `_store_per_row` stored, from the first of the four columns."""
    x = at.slice(0, 1, 1).load(_row_layout(1))
    return gl.convert_layout(gl.max(x, 1), layout, assert_trivial=True)


@gluon.jit
def _softmax(s, sums, rows, pipeline, state, i, mask, c: gl.constexpr):
    """Take S of the tile's i-th block, which is the pipeline's next, into the sums, and store P, and m and l after it,
    for the other consumer. Returns P, the factor of acc, and the sums.

    sums: m, and sums of probabilities of this consumer's blocks and of the other one's, [block_m, 4]: the four threads
    that have a row have a sum of their own columns each.
    """
    L: gl.constexpr = s.type.layout
    stage, t0 = state.stage(), rows.kv_start + i * c.block_n
    m, l, l_other = sums
    if c.transform:
        s *= rows.factor[:, None]
    if t0 + c.block_n > rows.unmasked_end:
        s = gl.where(visible_in_block(rows.mask, t0, L, mask, c), s, -float("inf"))
    m_new = next_m(m, s, rows.scale)
    base = exponent_base(m_new)
    p, alpha = gl.exp2(s * rows.scale - base[:, None]), gl.exp2(m - base)
    l_block = gl.sum(gl.sum(p.reshape([c.block_m, c.block_n // 8, 4, 2]), 3), 1)
    l = scaled_sums(l, alpha) + gl.convert_layout(l_block, l.type.layout, assert_trivial=True)
    p = p.to(pipeline.k_pe.dtype)
    gl.thread_barrier()  # all warps have read k_pe, which P replaces
    pipeline.k_pe.index(stage).store(p)
    _store_per_row(m_new, pipeline.m.index(stage))
    pipeline.l.index(stage).store(l)
    fence_async_shared()
    gl.thread_barrier()  # all warps have stored before the mbarrier says so
    mbarrier.arrive(pipeline.p_full.index(stage), count=1)
    return p, alpha, (m_new, l, scaled_sums(l_other, alpha))


@gluon.jit
def _start_own_pv(acc, p, alpha, pipeline, state, consumer: gl.constexpr):
    """Start to add PV of the pipeline's next block, whose P this consumer has in registers, to its half of acc."""
    values = pipeline.k_left if consumer == 0 else pipeline.k_right
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(p, values.index(state.stage()), rescale(acc, alpha), is_async=True)


@gluon.jit
def _start_other_pv(acc, sums, pipeline, state, consumer: gl.constexpr):
    """Start to add PV of the pipeline's next block, whose P the other consumer has computed, to this one's half of acc.
    Returns acc and the sums after it.
    """
    values = pipeline.k_left if consumer == 0 else pipeline.k_right
    barriers = pipeline.left if consumer == 0 else pipeline.right
    stage = state.stage()
    m, l, _l_other = sums
    barriers.consumer_wait(state)
    mbarrier.wait(pipeline.p_full.index(stage), state.phase())
    fence_async_shared()
    flat: gl.constexpr = m.type.layout
    m_new = _load_per_row(pipeline.m.index(stage), flat)
    l_other = pipeline.l.index(stage).load(l.type.layout)
    alpha = gl.exp2(m - exponent_base(m_new))
    acc = warpgroup_mma(pipeline.k_pe.index(stage), values.index(stage), rescale(acc, alpha), is_async=True)
    return acc, (m_new, scaled_sums(l, alpha), l_other)


@gluon.jit
def _finish_pv(acc, pipeline, state, consumer: gl.constexpr):
    """Wait for PV of a block, and release its memory: k_left by consumer 0 alone, the rest by both."""
    acc = warpgroup_mma_wait(0, [acc])
    if consumer == 0:
        pipeline.left.consumer_release(state)
    pipeline.right.consumer_release(state)
    return acc


@gluon.jit
def attend(queries, pipeline, state, q_state, request, tile, mask, consumer: gl.constexpr, c: gl.constexpr):
    """The state of a tile's rows, of which this consumer has half of acc's columns. The tile's blocks are the
    pipeline's next ones. Returns acc, m, l, and the states of the pipeline and of its queries after the tile.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block_n, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.dim, 16])
    flat: gl.constexpr = gl.SliceLayout(1, L)
    rows = _rows_of(queries, request, tile, flat, mask, c)
    l = gl.full([c.block_m, 4], 0.0, gl.float32, _row_layout(4))
    sums = gl.full([c.block_m], -float("inf"), gl.float32, flat), l, l
    acc = gl.full([c.block_m, c.dim], 0.0, gl.float32, O)
    blocks = (gl.maximum(tile.kv_end - tile.kv_start, 0) + c.block_n - 1) // c.block_n
    if blocks > 0:
        pipeline.queries.consumer_wait(q_state)
    for i in range(0, blocks - 1, 2):
        even, odd = state.advance(i), state.advance(i + 1)
        if consumer == 0:
            s = warpgroup_mma_wait(0, [_start_qk(pipeline, even, L, c)])
            pipeline.queries.consumer_release_once(q_state, pred=i + 2 >= blocks)
            p, alpha, sums = _softmax(s, sums, rows, pipeline, even, i, mask, c)
            acc = _start_own_pv(acc, p, alpha, pipeline, even, consumer)
            acc = _finish_pv(acc, pipeline, even, consumer)
            acc, sums = _start_other_pv(acc, sums, pipeline, odd, consumer)
            acc = _finish_pv(acc, pipeline, odd, consumer)
        else:  # the softmax of a block is computed while PV of the one before it runs
            s = _start_qk(pipeline, odd, L, c)
            acc, sums = _start_other_pv(acc, sums, pipeline, even, consumer)
            s = warpgroup_mma_wait(1, [s])
            pipeline.queries.consumer_release_once(q_state, pred=i + 3 >= blocks)
            p, alpha, sums = _softmax(s, sums, rows, pipeline, odd, i + 1, mask, c)
            acc = _finish_pv(acc, pipeline, even, consumer)
            acc = _start_own_pv(acc, p, alpha, pipeline, odd, consumer)
            acc = _finish_pv(acc, pipeline, odd, consumer)
    state = state.advance(blocks)
    if blocks % 2 == 1:
        last = state.advance(-1)
        if consumer == 0:
            s = warpgroup_mma_wait(0, [_start_qk(pipeline, last, L, c)])
            pipeline.queries.consumer_release_once(q_state)
            p, alpha, sums = _softmax(s, sums, rows, pipeline, last, blocks - 1, mask, c)
            acc = _start_own_pv(acc, p, alpha, pipeline, last, consumer)
        else:
            pipeline.queries.consumer_release_once(q_state, pred=blocks == 1)
            acc, sums = _start_other_pv(acc, sums, pipeline, last, consumer)
        acc = _finish_pv(acc, pipeline, last, consumer)
    if blocks > 0:
        q_state = q_state.advance(1)
    m, l, l_other = sums
    l = gl.convert_layout(gl.sum(l + l_other, 1), flat, assert_trivial=True)
    return acc, m, l, state, q_state
