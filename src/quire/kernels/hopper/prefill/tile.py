"""A consumer: one warp group, which computes 64 of the query rows of each tile.

The products QK of a block and PV of the block before it run while the softmax of the former is computed: see
`PrefillConsumer.step`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.combine import TilePartials
from quire.kernels.hopper.epilogue import Output
from quire.kernels.hopper.mask import BatchMask, RowMask
from quire.kernels.hopper.pipeline import PipelineState
from quire.kernels.hopper.prefill.block_info import block_info
from quire.kernels.hopper.prefill.load import KVPipeline, row_layout
from quire.kernels.hopper.softmax import LOG2E, SoftmaxState, exponent_base, next_m, rescale, scaled_sums
from quire.kernels.hopper.tile_scheduler import WorkTilePipeline


@aggregate
class PrefillQueries:
    """The tensor q with strides in elements; shared memory for the rows of each consumer; scale and cap of logits, in
    base 2; q_scale, k_scale: factors per query head and per KV head; slopes: of ALiBi, in base 2.
    """

    q: gl.tensor
    token: gl.tensor
    head: gl.tensor
    shared: gl.shared_memory_descriptor
    scale: gl.tensor
    cap: gl.tensor
    q_scale: gl.tensor | None
    k_scale: gl.tensor | None
    slopes: gl.tensor | None


@aggregate
class PrefillRows:
    """The rows of a tile. mask: which keys they see; factor: of logits, with c.transform; slope: of ALiBi."""

    mask: RowMask
    factor: gl.tensor
    slope: gl.tensor


@aggregate
class TileState:
    """The state of a tile's rows, but for the last block's values. acc: [64, dim]; p: probabilities of the last block;
    m: [64]; l: [64, 8], sums of every eighth probability.
    """

    acc: gl.tensor
    p: gl.tensor
    m: gl.tensor
    l: gl.tensor


@gluon.constexpr_function
def _logits_layout(c):
    """The layout of a block's logits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.tile.block_n, 32 if c.fp8_q else 16])


@gluon.jit
def _hold(l):
    """Return l, in a way that keeps the wait for products after it behind the softmax.

    ptxas moves a wait up, in front of all that does not depend on it, so that nothing is left to overlap with the
    products; but not in front of a store, even if that is never executed, as here, where sums are not negative.
    """
    ptx: gl.constexpr = """{ .reg .pred p; .reg .b32 z; .reg .f32 a, b; add.f32 a, $4, $5; add.f32 b, $6, $7;
        add.f32 a, a, b; mov.b32 z, 0; setp.lt.f32 p, a, 0f00000000; @p st.shared.f32 [z], a;
        mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }"""
    return gl.inline_asm_elementwise(ptx, "=f,=f,=f,=f,f,f,f,f", [l], gl.float32, is_pure=False, pack=4)


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    """Probabilities as pairs of 16-bit elements, which take half of the registers until they are used."""
    a, b = p.reshape([64, p.shape[1] // 2, 2]).split()
    ptx: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ptx, "=r,f,f", [a, b], gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _two(dtype):
    return dtype, dtype


@gluon.jit
def _unpack(p, dtype: gl.constexpr):
    """The 16-bit elements of pairs, without the conversions that take apart a tensor of these."""
    ptx: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    a, b = gl.inline_asm_elementwise(ptx, "=h,=h,r", [p], _two(dtype), is_pure=True, pack=1)
    return gl.join(a, b).reshape([64, 2 * p.shape[1]])


@aggregate
class PrefillConsumer:
    """The index-th consumer, which has rows 64 * index to 64 * index + 63 of each tile."""

    queries: PrefillQueries
    pipeline: KVPipeline
    work_tiles: WorkTilePipeline
    partials: TilePartials
    output: Output
    mask: BatchMask
    index: gl.constexpr
    config: gl.constexpr

    @gluon.jit
    def row(self, tile):
        """The consumer's first row of a tile, which is given by its WorkTileSlot."""
        return tile.load("row") + self.index * 64

    @gluon.jit
    def copy_queries(self, tile):
        """Start to copy the consumer's rows of a tile to shared memory. Rows that do not exist become zeros."""
        c: gl.constexpr = self.config
        group: gl.constexpr = c.tile.group
        parts: gl.constexpr = c.dim_qk // c.part
        elements: gl.constexpr = 16 if c.fp8_q else 8
        layout: gl.constexpr = row_layout(c.part, elements, 4)
        queries = self.queries
        h, row, rows = tile.load("h"), self.row(tile), tile.load("rows")
        # Offsets from the first row's token fit 32 bits, and unsigned quotients take fewer instructions.
        token, divisor = row // group, gl.to_tensor(group).to(gl.uint32)
        r = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        at = (r.to(gl.uint32) // divisor).to(gl.int32)
        at = (at - token) * queries.token + (r - at * group) * queries.head
        at = gl.multiple_of(at, elements)[:, None] + gl.arange(0, c.part, gl.SliceLayout(0, layout))[None, :]
        token = (tile.load("q_start") + token).to(gl.int64) * queries.token
        at = queries.q + (token + h * group * queries.head) + at
        valid = ((r < rows) & (h >= 0))[:, None]
        for part in gl.static_range(parts):
            to = queries.shared.index(self.index * parts + part)
            async_copy.async_copy_global_to_shared(to, at + part * c.part, valid)
        async_copy.commit_group()

    @gluon.jit
    def load_rows(self, seqlens, h, row):
        """The PrefillRows from `row` on."""
        c: gl.constexpr = self.config
        flat: gl.constexpr = gl.SliceLayout(1, _logits_layout(c))
        r = row + gl.arange(0, 64, flat)
        head, valid = h * c.tile.group + r % c.tile.group, r < seqlens.q_len * c.tile.group
        row_mask = self.mask.rows(seqlens, r)
        factor, slope = row_mask.position, row_mask.position
        if c.transform:
            factor = gl.full([64], 1.0, gl.float32, flat) * self.queries.scale
            if c.q_scale:
                factor *= gl.load(self.queries.q_scale + head, valid, 1.0)
            if c.k_scale:
                factor *= gl.load(self.queries.k_scale + h)
        if c.alibi:
            slope = gl.load(self.queries.slopes + head, valid, 0.0)
        return PrefillRows(row_mask, factor, slope)

    @gluon.jit
    def start_qk(self, state):
        """Start the product of the queries and the pipeline's next block of keys."""
        c: gl.constexpr = self.config
        q, keys = self.queries.shared, self.pipeline.k
        keys.barriers.consumer_wait(state)
        if c.box == 0:
            fence_async_shared()
        zero = gl.full([64, c.tile.block_n], 0.0, gl.float32, _logits_layout(c))
        parts: gl.constexpr = c.dim_qk // c.part
        k = keys.data.index(state.stage() * parts).permute([1, 0])
        s = warpgroup_mma(q.index(self.index * parts), k, zero, use_acc=False, is_async=True)
        for part in gl.static_range(1, parts):
            k = keys.data.index(state.stage() * parts + part).permute([1, 0])
            s = warpgroup_mma(q.index(self.index * parts + part), k, s, is_async=True)
        return s

    @gluon.jit
    def start_pv(self, acc, p, state):
        """Start to add the product of P and the pipeline's next block of values to acc."""
        values = self.pipeline.v
        values.barriers.consumer_wait(state)
        if self.config.box == 0:
            fence_async_shared()
        p = _unpack(p, values.data.dtype) if self.config.packed else p.to(values.data.dtype)
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
        return warpgroup_mma(p, values.data.index(state.stage()), acc, is_async=True)

    @gluon.jit
    def transform(self, s, rows, j):
        """Scaled logits in base 2, with ALiBi, then the soft cap."""
        s = s * rows.factor[:, None]
        if self.config.alibi:
            distance = (j[None, :] - rows.mask.position[:, None]).to(gl.float32)
            s = gl.fma(gl.zeros_like(s) + rows.slope[:, None], distance, s)
        if self.config.cap:
            cap = self.queries.cap
            s = cap - 2.0 * cap / (1.0 + gl.exp2(s * (2.0 * LOG2E / cap)))
        return s

    @gluon.jit
    def softmax(self, s, m, l, rows, block, masked: gl.constexpr):
        """Take a block's logits into the state of the rows. Returns its probabilities, m, l and the factor of acc."""
        c: gl.constexpr = self.config
        block_n: gl.constexpr = c.tile.block_n
        L: gl.constexpr = s.type.layout
        scale = 1.0 if c.transform else self.queries.scale
        if c.transform:
            s = self.transform(s, rows, block * block_n + gl.arange(0, block_n, gl.SliceLayout(0, L)))
        if masked:
            s = gl.where(rows.mask.visible_in_block(block * block_n, L), s, -float("inf"))
        m_new = next_m(m, s, scale)
        base = exponent_base(m_new) if masked else m_new
        # This is exactly 1 where m is the same.
        alpha = gl.exp2(m - base)
        if c.scheduler.split:
            p = gl.exp2(s * scale - base[:, None])
        else:
            # If batch-invariant, the compiler fuses nothing by itself.
            p = gl.exp2(gl.fma(s, gl.zeros_like(s) + scale, gl.zeros_like(s) - base[:, None]))
        sums = gl.sum(p.reshape([64, block_n // 8, 8]), 1)
        l = scaled_sums(l, alpha) + sums
        if c.packed:
            p = _pack(p, self.pipeline.v.data.dtype)
        return p, m_new, l, alpha

    @gluon.jit
    def step(self, tile_state, rows, state, block, masked: gl.constexpr):
        """Start QK of a block, the next of the pipeline, and PV of the block before it; compute the softmax of the
        former while the latter runs.
        """
        s = self.start_qk(state)
        acc = self.start_pv(tile_state.acc, tile_state.p, state.advance(-1))
        s = warpgroup_mma_wait(1, [s])
        self.pipeline.k.barriers.consumer_release(state)
        p, m, l, alpha = self.softmax(s, tile_state.m, tile_state.l, rows, block, masked)
        l = _hold(l)
        acc = warpgroup_mma_wait(0, [acc])
        self.pipeline.v.barriers.consumer_release(state.advance(-1))
        return TileState(rescale(acc, alpha), p, m, l)

    @gluon.jit
    def clear_values(self, state, block, seqlens):
        """Zero the values of keys that the request does not have, or that none of its rows sees, in the next block,
        which TMA has loaded: what is stored there may be NaN, which a probability of 0 does not hide. All consumers do
        it, each before it uses the block, and write the same, so that none waits for another.
        """
        block_n: gl.constexpr = self.config.tile.block_n
        dim: gl.constexpr = self.config.dim
        if self.mask.partly_needed(seqlens, block * block_n, (block + 1) * block_n):
            self.pipeline.v.barriers.consumer_wait(state)
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
            for i in gl.static_range(block_n // 32):
                v = self.pipeline.v.data.index(state.stage()).slice(i * 32, 32)
                j = block * block_n + i * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
                x = v.load(layout)
                v.store(gl.where(self.mask.needed_keys(seqlens, j)[:, None], x, gl.zeros_like(x)))
            fence_async_shared()
            thread_barrier()

    @gluon.jit
    def skip(self, tile, state):
        """Release the blocks of a tile of which this consumer has no rows. Returns the pipeline's state after them."""
        more = tile.load("last") - tile.load("first") + 1
        while more > 0:
            more -= 1
            if self.config.mask.listed:
                info = self.pipeline.infos.get(state)  # type: ignore[union-attr]
                more = info.has_more().to(gl.int32)
            self.pipeline.k.barriers.consumer_wait(state)
            self.pipeline.k.barriers.consumer_release_once(state, 128)
            self.pipeline.v.barriers.consumer_wait(state)
            self.pipeline.v.barriers.consumer_release_once(state, 128)
            state = state.advance(1)
        return state

    @gluon.jit
    def attend_all(self, tile_state, rows, state, seqlens, row, first, last):
        """Add blocks last - 1 down to `first`. The pipeline's state is at block `last`. Returns the TileState, and the
        pipeline's state at block `first`.
        """
        last_row = gl.minimum(row + 64, seqlens.q_len * self.config.tile.group) - 1
        low, high = self.mask.unmasked_blocks(seqlens, row, last_row, first, last)
        # The pipeline's state at block j is j uses before this one.
        end = state.advance(last)
        for j in range(last - 1, high - 1, -1):
            tile_state = self.step(tile_state, rows, end.advance(-j), j, True)
        for j in range(high - 1, low - 1, -1):
            tile_state = self.step(tile_state, rows, end.advance(-j), j, False)
        if self.config.mask.cuts_first_blocks:
            for j in range(low - 1, first - 1, -1):
                tile_state = self.step(tile_state, rows, end.advance(-j), j, True)
        return tile_state, end.advance(-first)

    @gluon.jit
    def attend_listed(self, tile_state, rows, state, info):
        """`attend_all` for listed blocks: those after the block that the pipeline's state is at, whose BlockInfo is
        `info`. Returns the last BlockInfo, too.
        """
        while info.has_more():
            state = state.advance(1)
            info = self.pipeline.infos.get(state)  # type: ignore[union-attr]
            block = info.block()
            if info.is_masked():
                tile_state = self.step(tile_state, rows, state, block, True)
            else:
                tile_state = self.step(tile_state, rows, state, block, False)
        return tile_state, state, info

    @gluon.jit
    def attend(self, tile, state):
        """Attend to the blocks of a tile, the pipeline's next ones. Returns the TileState, and the pipeline's state at
        the last block.
        """
        c: gl.constexpr = self.config
        L: gl.constexpr = _logits_layout(c)
        O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.dim, 16])
        s = self.start_qk(state)
        seqlens, row = tile.seqlens(), self.row(tile)
        first, last = tile.load("first"), tile.load("last")
        info = block_info(last)
        if c.mask.listed:
            info = self.pipeline.infos.get(state)  # type: ignore[union-attr]
        rows = self.load_rows(seqlens, tile.load("h"), row)
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, L))
        l = gl.sum(gl.full([64, c.tile.block_n], 0.0, gl.float32, L).reshape([64, c.tile.block_n // 8, 8]), 1)
        acc = gl.full([64, c.dim], 0.0, gl.float32, O)
        s = warpgroup_mma_wait(0, [s])
        self.pipeline.k.barriers.consumer_release(state)
        if c.box > 0:
            self.clear_values(state, info.block(), seqlens)
        p, m, l, _alpha = self.softmax(s, m, l, rows, info.block(), True)
        tile_state = TileState(acc, p, m, l)
        if c.mask.listed:
            tile_state, state, info = self.attend_listed(tile_state, rows, state, info)
            first = info.block()
        else:
            tile_state, state = self.attend_all(tile_state, rows, state, seqlens, row, first, last)
        if c.box > 0 and c.mask.cuts_first_blocks:
            self.clear_values(state, first, tile.seqlens())
        return tile_state, state

    @gluon.jit
    def finish(self, tile, state):
        """Combine a tile's SoftmaxState with those of other programs, if its keys are split, and write the rows."""
        complete = True
        # With "and" in place of the inner condition, code for partial states would be generated without a split, too.
        if self.config.scheduler.split:  # noqa: SIM102
            if tile.load("splits") > 1:
                complete, state = self.partials.combine(state, tile, self.index)
        if complete:
            q_start, h = tile.load("q_start"), tile.load("h")
            self.output.store_rows(state, q_start, h, self.row(tile), tile.load("rows"), True)


@gluon.jit
def consume(consumer):
    """Compute the consumer's rows of all tiles."""
    c: gl.constexpr = consumer.config
    flat: gl.constexpr = gl.SliceLayout(1, _logits_layout(c))
    work_tiles, values = consumer.work_tiles, consumer.pipeline.v
    tile_state, kv_state = PipelineState(gl.to_tensor(0), 2), PipelineState(gl.to_tensor(0), c.pipeline.stages)
    work_tiles.wait(tile_state)
    consumer.copy_queries(work_tiles.slot(tile_state))
    while work_tiles.slot(tile_state).load("h") >= 0:
        tile, following = work_tiles.slot(tile_state), tile_state.advance(1)
        # This is needed where there are no rows, too: the next copies write to the same place.
        async_copy.wait_group(0)
        if consumer.row(tile) < tile.load("rows"):
            fence_async_shared()
            thread_barrier()
            attended, kv_state = consumer.attend(tile, kv_state)
            work_tiles.wait(following)
            acc = consumer.start_pv(attended.acc, attended.p, kv_state)
            consumer.copy_queries(work_tiles.slot(following))
            l = gl.convert_layout(gl.sum(attended.l, 1), flat)
            acc = warpgroup_mma_wait(0, [acc])
            # This does not wait for copies of queries.
            values.barriers.consumer_release_once(kv_state, 128)
            kv_state = kv_state.advance(1)
            consumer.finish(tile, SoftmaxState(acc, attended.m, l))
        else:
            kv_state = consumer.skip(tile, kv_state)
            work_tiles.wait(following)
            consumer.copy_queries(work_tiles.slot(following))
        work_tiles.release(tile_state)
        tile_state = following
