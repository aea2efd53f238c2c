"""A consumer's work on a tile: S = QK and the softmax in every second block of keys, PV in all of them.

There are two consumers. Consumer 0 computes S and P of even blocks of a tile and the left half of acc's columns;
consumer 1 computes S and P of odd blocks and the right half. P passes from one to the other through shared memory, and
is multiplied from registers by the one that computed it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.mask import BatchMask, RowMask
from quire.kernels.hopper.mla.load import BLOCK_M, LatentPipeline, LatentQueries
from quire.kernels.hopper.softmax import SoftmaxState, exponent_base, next_m, rescale, scaled_sums


@aggregate
class LatentRows:
    """The rows of a tile. scale: of logits in the softmax; factor: of each row's logits before it, with c.transform;
    mask: which keys rows see; unmasked_end: keys before it are seen by all rows; kv_start: the tile's first key.
    """

    scale: gl.tensor
    factor: gl.tensor
    mask: RowMask
    unmasked_end: gl.tensor
    kv_start: gl.tensor


@aggregate
class Sums:
    """What rows have of a SoftmaxState besides acc. m: [64]; l, l_other: sums of probabilities of this consumer's
    blocks and of the other one's, [64, 4]: each of the four threads that have a row has the sum over its own columns.
    """

    m: gl.tensor
    l: gl.tensor
    l_other: gl.tensor


@gluon.constexpr_function
def _row_layout(columns):
    """A layout of [64, columns] with rows as in an MMA's result: four threads of a warp have each row, and share its
    columns if there are several.
    """
    own = [[0, 1], [0, 2]] if columns > 1 else [[0, 0]] * 2
    return gl.DistributedLinearLayout([[8, 0]], [*own, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _store_per_row(x, to):
    """Store a number per row to shared memory, [rows, 4]. Four threads have each number, and each writes a word of
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
def _opaque_zero():
    """A zero that the compiler does not know to be zero, for the index of the queries. With a constant index, the
    compiler would keep the address of each column in a register over the loop over keys, and run out of registers.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@aggregate
class LatentConsumer:
    """Consumer 0 or 1 of a program."""

    queries: LatentQueries
    pipeline: LatentPipeline
    mask: BatchMask
    index: gl.constexpr
    config: gl.constexpr

    @gluon.jit
    def load_rows(self, seqlens, tile, flat: gl.constexpr):
        """The LatentRows of a tile."""
        c: gl.constexpr = self.config
        r = gl.arange(0, BLOCK_M, flat)
        row_mask, end = self.mask.rows(seqlens, tile.row + r), self.mask.unmasked_end(seqlens, tile.row)
        scale = gl.to_tensor(1.0) if c.transform else self.queries.scale
        factor = row_mask.position
        if c.transform:
            factor = gl.full([BLOCK_M], 1.0, gl.float32, flat) * self.queries.scale
            if c.q_scale:
                factor *= gl.load(self.queries.q_scale + (tile.row + r) % c.tile.group, r < tile.count, 1.0)
            if c.k_scale:
                factor *= gl.load(self.queries.k_scale)
        return LatentRows(scale, factor, row_mask, end, tile.kv_start)

    @gluon.jit
    def start_qk(self, state, L: gl.constexpr):
        """Start S of the pipeline's next block, [64, block_n]."""
        pipeline, stage = self.pipeline, state.stage()
        zero = _opaque_zero()
        left, right, pe = pipeline.q_left.index(zero), pipeline.q_right.index(zero), pipeline.q_pe.index(zero)
        s = gl.full([BLOCK_M, self.config.tile.block_n], 0.0, gl.float32, L)
        pipeline.left.consumer_wait(state)
        fence_async_shared()
        s = warpgroup_mma(left, pipeline.k_left.index(stage).permute([1, 0]), s, use_acc=False, is_async=True)
        pipeline.right.consumer_wait(state)
        fence_async_shared()
        s = warpgroup_mma(right, pipeline.k_right.index(stage).permute([1, 0]), s, is_async=True)
        return warpgroup_mma(pe, pipeline.k_pe.index(stage).permute([1, 0]), s, is_async=True)

    @gluon.jit
    def softmax(self, s, sums, rows, state, i):
        """Take S of the tile's i-th block, which is the pipeline's next, into the sums, and store P, and m and l after
        it, for the other consumer. Returns P, the factor of acc, and the Sums.
        """
        c: gl.constexpr = self.config
        block_n: gl.constexpr = c.tile.block_n
        L: gl.constexpr = s.type.layout
        pipeline, stage = self.pipeline, state.stage()
        t0, l = rows.kv_start + i * block_n, sums.l
        if c.transform:
            s *= rows.factor[:, None]
        if t0 + block_n > rows.unmasked_end:
            s = gl.where(rows.mask.visible_in_block(t0, L), s, -float("inf"))
        m = next_m(sums.m, s, rows.scale)
        base = exponent_base(m)
        p, alpha = gl.exp2(s * rows.scale - base[:, None]), gl.exp2(sums.m - base)
        l_block = gl.sum(gl.sum(p.reshape([BLOCK_M, block_n // 8, 4, 2]), 3), 1)
        l = scaled_sums(l, alpha) + gl.convert_layout(l_block, l.type.layout, assert_trivial=True)
        p = p.to(pipeline.k_pe.dtype)
        # All warps have read k_pe, which P replaces.
        thread_barrier()
        pipeline.k_pe.index(stage).store(p)
        _store_per_row(m, pipeline.m.index(stage))
        pipeline.l.index(stage).store(l)
        fence_async_shared()
        # All warps have stored before the mbarrier says so.
        thread_barrier()
        mbarrier.arrive(pipeline.p_full.index(stage), count=1)
        return p, alpha, Sums(m, l, scaled_sums(sums.l_other, alpha))

    @gluon.jit
    def values(self):
        """This consumer's half of the values, and the pipeline that it is part of."""
        if self.index == 0:
            half = self.pipeline.k_left, self.pipeline.left
        else:
            half = self.pipeline.k_right, self.pipeline.right
        return half

    @gluon.jit
    def start_own_pv(self, acc, p, alpha, state):
        """Start to add PV of the pipeline's next block, whose P this consumer has in registers, to its half of acc."""
        values, _barriers = self.values()
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
        return warpgroup_mma(p, values.index(state.stage()), rescale(acc, alpha), is_async=True)

    @gluon.jit
    def start_other_pv(self, acc, sums, state):
        """Start to add PV of the pipeline's next block, whose P the other consumer has computed, to this one's half of
        acc. Returns acc and the Sums after it.
        """
        values, barriers = self.values()
        pipeline, stage = self.pipeline, state.stage()
        barriers.consumer_wait(state)
        mbarrier.wait(pipeline.p_full.index(stage), state.phase())
        fence_async_shared()
        flat: gl.constexpr = sums.m.type.layout
        m = _load_per_row(pipeline.m.index(stage), flat)
        l_other = pipeline.l.index(stage).load(sums.l.type.layout)
        alpha = gl.exp2(sums.m - exponent_base(m))
        acc = warpgroup_mma(pipeline.k_pe.index(stage), values.index(stage), rescale(acc, alpha), is_async=True)
        return acc, Sums(m, scaled_sums(sums.l, alpha), l_other)

    @gluon.jit
    def finish_pv(self, acc, state):
        """Wait for PV of a block, and release its memory: k_left by consumer 0 alone, the rest by both."""
        acc = warpgroup_mma_wait(0, [acc])
        if self.index == 0:
            self.pipeline.left.consumer_release(state)
        self.pipeline.right.consumer_release(state)
        return acc

    @gluon.jit
    def attend(self, seqlens, tile, state, q_state):
        """The SoftmaxState of a tile's rows, with this consumer's half of acc's columns. The tile's blocks are the
        pipeline's next ones. Returns the states of the pipeline and of its queries after the tile, too.
        """
        c: gl.constexpr = self.config
        block_n: gl.constexpr = c.tile.block_n
        L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
        O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.dim, 16])
        flat: gl.constexpr = gl.SliceLayout(1, L)
        queries = self.pipeline.queries
        rows = self.load_rows(seqlens, tile, flat)
        l = gl.full([BLOCK_M, 4], 0.0, gl.float32, _row_layout(4))
        sums = Sums(gl.full([BLOCK_M], -float("inf"), gl.float32, flat), l, l)
        acc = gl.full([BLOCK_M, c.dim], 0.0, gl.float32, O)
        blocks = (gl.maximum(tile.kv_end - tile.kv_start, 0) + block_n - 1) // block_n
        if blocks > 0:
            queries.consumer_wait(q_state)
        for i in range(0, blocks - 1, 2):
            even, odd = state.advance(i), state.advance(i + 1)
            if self.index == 0:
                s = warpgroup_mma_wait(0, [self.start_qk(even, L)])
                queries.consumer_release_once(q_state, pred=i + 2 >= blocks)
                p, alpha, sums = self.softmax(s, sums, rows, even, i)
                acc = self.start_own_pv(acc, p, alpha, even)
                acc = self.finish_pv(acc, even)
                acc, sums = self.start_other_pv(acc, sums, odd)
                acc = self.finish_pv(acc, odd)
            else:
                # The softmax of a block is computed while PV of the one before it runs.
                s = self.start_qk(odd, L)
                acc, sums = self.start_other_pv(acc, sums, even)
                s = warpgroup_mma_wait(1, [s])
                queries.consumer_release_once(q_state, pred=i + 3 >= blocks)
                p, alpha, sums = self.softmax(s, sums, rows, odd, i + 1)
                acc = self.finish_pv(acc, even)
                acc = self.start_own_pv(acc, p, alpha, odd)
                acc = self.finish_pv(acc, odd)
        state = state.advance(blocks)
        if blocks % 2 == 1:
            last = state.advance(-1)
            if self.index == 0:
                s = warpgroup_mma_wait(0, [self.start_qk(last, L)])
                queries.consumer_release_once(q_state)
                p, alpha, sums = self.softmax(s, sums, rows, last, blocks - 1)
                acc = self.start_own_pv(acc, p, alpha, last)
            else:
                queries.consumer_release_once(q_state, pred=blocks == 1)
                acc, sums = self.start_other_pv(acc, sums, last)
            acc = self.finish_pv(acc, last)
        if blocks > 0:
            q_state = q_state.advance(1)
        l = gl.convert_layout(gl.sum(sums.l + sums.l_other, 1), flat, assert_trivial=True)
        return SoftmaxState(acc, sums.m, l), state, q_state
