"""A consumer: one warp group, which computes 64 of the query rows of each tile.

The products QK of a block and PV of the block before it run while the softmax of the former is computed: see `_step`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.hopper.combine import combine
from quire.kernels.hopper.epilogue import store_rows
from quire.kernels.hopper.mask import (
    RowMask,
    needed_keys,
    partly_needed,
    row_mask,
    unmasked_keys,
    visible_in_block,
)
from quire.kernels.hopper.pipeline import PipelineState
from quire.kernels.hopper.prefill.blocks import FLAGS, MASKED, MORE, read_note
from quire.kernels.hopper.prefill.load import row_layout
from quire.kernels.hopper.softmax import LOG2E, exponent_base, next_m, rescale, scaled_sums
from quire.kernels.hopper.tile_scheduler import (
    FIRST,
    LAST,
    Q_START,
    ROW,
    ROWS,
    SPLITS,
    H,
    job_field,
    job_request,
    release_job,
    wait_for_job,
)


class Queries(NamedTuple):
    """The tensor q with strides in elements; shared memory for the rows of each consumer; scale and cap of logits, in
    base 2; q_scale, k_scale: factors per query head and per KV head; slopes: of ALiBi, in base 2.
    """

    q: tl.tensor
    token: tl.tensor
    head: tl.tensor
    shared: gl.shared_memory_descriptor
    scale: tl.tensor
    cap: tl.tensor
    q_scale: tl.tensor
    k_scale: tl.tensor
    slopes: tl.tensor


class Rows(NamedTuple):
    """The rows of a tile. mask: which keys they see; factor: of logits, with c.transform; slope: of ALiBi."""

    mask: RowMask
    factor: tl.tensor
    slope: tl.tensor


@gluon.constexpr_function
def _logits_layout(c):
    """The layout of a block's logits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.block_n, 32 if c.fp8_q else 16])


@gluon.jit
def _copy_queries(queries, mailbox, i, W: gl.constexpr, c: gl.constexpr):
    """Start to copy a consumer's rows of the i-th job, which has been waited for, to shared memory. Rows that do not
    exist become zeros.
    """
    parts: gl.constexpr = c.dim_qk // c.part
    layout: gl.constexpr = row_layout(c.part, 16 if c.fp8_q else 8, 4)
    h, row, rows = job_field(mailbox, i, H), job_field(mailbox, i, ROW) + W * 64, job_field(mailbox, i, ROWS)
    # Offsets from the first row's token fit 32 bits, and unsigned quotients take fewer instructions.
    token, group = row // c.group, gl.to_tensor(c.group).to(gl.uint32)
    r = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    at = (r.to(gl.uint32) // group).to(gl.int32)
    at = (at - token) * queries.token + (r - at * c.group) * queries.head
    at = gl.multiple_of(at, 16 if c.fp8_q else 8)[:, None] + gl.arange(0, c.part, gl.SliceLayout(0, layout))[None, :]
    token = (job_field(mailbox, i, Q_START) + token).to(gl.int64) * queries.token
    at = queries.q + (token + h * c.group * queries.head) + at
    valid = ((r < rows) & (h >= 0))[:, None]
    for part in gl.static_range(parts):
        async_copy.async_copy_global_to_shared(queries.shared.index(W * parts + part), at + part * c.part, valid)
    async_copy.commit_group()


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
def _start_qk(queries, pipeline, state, W: gl.constexpr, c: gl.constexpr):
    """Start the product of a consumer's queries and the pipeline's next block of keys."""
    pipeline.k.barriers.consumer_wait(state)
    if c.box == 0:
        fence_async_shared()
    zero = gl.full([64, c.block_n], 0.0, gl.float32, _logits_layout(c))
    parts: gl.constexpr = c.dim_qk // c.part
    k = pipeline.k.data.index(state.stage() * parts).permute([1, 0])
    s = warpgroup_mma(queries.shared.index(W * parts), k, zero, use_acc=False, is_async=True)
    for part in gl.static_range(1, parts):
        k = pipeline.k.data.index(state.stage() * parts + part).permute([1, 0])
        s = warpgroup_mma(queries.shared.index(W * parts + part), k, s, is_async=True)
    return s


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


@gluon.jit
def _start_pv(acc, p, pipeline, state, c: gl.constexpr):
    """Start to add the product of P and the pipeline's next block of values to acc."""
    pipeline.v.barriers.consumer_wait(state)
    if c.box == 0:
        fence_async_shared()
    p = _unpack(p, pipeline.v.data.dtype) if c.packed else p.to(pipeline.v.data.dtype)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(p, pipeline.v.data.index(state.stage()), acc, is_async=True)


@gluon.jit
def _transform(s, rows, j, queries, c: gl.constexpr):
    """Scaled logits in base 2, with ALiBi, then the soft cap."""
    s = s * rows.factor[:, None]
    if c.alibi:
        s = gl.fma(gl.zeros_like(s) + rows.slope[:, None], (j[None, :] - rows.mask.position[:, None]).to(gl.float32), s)
    if c.cap:
        s = queries.cap - 2.0 * queries.cap / (1.0 + gl.exp2(s * (2.0 * LOG2E / queries.cap)))
    return s


@gluon.jit
def _softmax(s, m, l, rows, block, queries, mask, dtype: gl.constexpr, masked: gl.constexpr, c: gl.constexpr):
    """Take a block's logits into the state of the rows. Returns its probabilities, m, l and the factor of acc.
    l: [64, 8], sums of every eighth probability.
    """
    scale = 1.0 if c.transform else queries.scale
    if c.transform:
        j = block * c.block_n + gl.arange(0, c.block_n, gl.SliceLayout(0, s.type.layout))
        s = _transform(s, rows, j, queries, c)
    if masked:
        L: gl.constexpr = s.type.layout
        s = gl.where(visible_in_block(rows.mask, block * c.block_n, L, mask, c), s, -float("inf"))
    m_new = next_m(m, s, scale)
    base = exponent_base(m_new) if masked else m_new
    alpha = gl.exp2(m - base)  # exactly 1 if m is the same
    if c.split:
        p = gl.exp2(s * scale - base[:, None])
    else:  # if batch-invariant, the compiler fuses nothing by itself
        p = gl.exp2(gl.fma(s, gl.zeros_like(s) + scale, gl.zeros_like(s) - base[:, None]))
    sums = gl.sum(p.reshape([64, c.block_n // 8, 8]), 1)
    l = scaled_sums(l, alpha) + sums
    if c.packed:
        p = _pack(p, dtype)
    return p, m_new, l, alpha


@gluon.jit
def _step(
    acc, p, m, l, queries, pipeline, state, rows, block, mask, W: gl.constexpr, masked: gl.constexpr, c: gl.constexpr
):
    """Start QK of a block, the next of the pipeline, and PV of the block before it; compute the softmax of the former
    while the latter runs.
    """
    s = _start_qk(queries, pipeline, state, W, c)
    acc = _start_pv(acc, p, pipeline, state.advance(-1), c)
    s = warpgroup_mma_wait(1, [s])
    pipeline.k.barriers.consumer_release(state)
    p, m, l, alpha = _softmax(s, m, l, rows, block, queries, mask, pipeline.v.data.dtype, masked, c)
    l = _hold(l)
    acc = warpgroup_mma_wait(0, [acc])
    pipeline.v.barriers.consumer_release(state.advance(-1))
    return rescale(acc, alpha), p, m, l


@gluon.jit
def _clear_values(pipeline, state, block, request, mask, c: gl.constexpr):
    """Zero the values of keys that the request does not have, or that none of its rows sees, in the next block, which
    TMA has loaded: what is stored there may be NaN, which a probability of 0 does not hide. All consumers do it, each
    before it uses the block, and write the same, so that none waits for another.
    """
    if partly_needed(request, block * c.block_n, (block + 1) * c.block_n, mask, c):
        pipeline.v.barriers.consumer_wait(state)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.dim, c.dim // 8], [4, 1], [1, 0])
        for i in gl.static_range(c.block_n // 32):
            v = pipeline.v.data.index(state.stage()).slice(i * 32, 32)
            j = block * c.block_n + i * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
            x = v.load(layout)
            v.store(gl.where(needed_keys(request, j, mask, c)[:, None], x, gl.zeros_like(x)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _rows_of(queries, request, h, row, mask, flat: gl.constexpr, c: gl.constexpr):
    """The Rows from `row` on."""
    r = row + gl.arange(0, 64, flat)
    head, valid = h * c.group + r % c.group, r < request.q_len * c.group
    of_mask = row_mask(request, r, mask, c)
    factor, slope = of_mask.position, of_mask.position
    if c.transform:
        factor = gl.full([64], 1.0, gl.float32, flat) * queries.scale
        if c.q_scale:
            factor *= gl.load(queries.q_scale + head, valid, 1.0)
        if c.k_scale:
            factor *= gl.load(queries.k_scale + h)
    if c.alibi:
        slope = gl.load(queries.slopes + head, valid, 0.0)
    return Rows(of_mask, factor, slope)


@gluon.jit
def _pass(pipeline, mailbox, i, state, c: gl.constexpr):
    """Release the blocks of the i-th job, of which this consumer has no rows. Returns the state after them."""
    left = job_field(mailbox, i, LAST) - job_field(mailbox, i, FIRST) + 1
    while left > 0:
        left -= 1
        if c.listed:
            left = read_note(pipeline, state, c) & MORE
        pipeline.k.barriers.consumer_wait(state)
        pipeline.k.barriers.consumer_release_once(state, 128)
        pipeline.v.barriers.consumer_wait(state)
        pipeline.v.barriers.consumer_release_once(state, 128)
        state = state.advance(1)
    return state


@gluon.jit
def _attend_all(
    acc, p, m, l, queries, pipeline, state, request, rows, row, first, last, mask, W: gl.constexpr, c: gl.constexpr
):
    """Add to the state of a consumer's rows, over block `last`, which `state` is at, the blocks down to `first`.
    Returns the state of the rows, and that of the pipeline at block `first`.
    """
    start, end = unmasked_keys(request, row, gl.minimum(row + 64, request.q_len * c.group) - 1, mask, c)
    high = gl.minimum(gl.maximum(gl.maximum(end, 0) // c.block_n, first), last)
    low = gl.minimum(gl.maximum(gl.maximum(start + (c.block_n - 1), 0) // c.block_n, first), high)
    end = state.advance(last)  # block j is j blocks before it
    for j in range(last - 1, high - 1, -1):
        acc, p, m, l = _step(acc, p, m, l, queries, pipeline, end.advance(-j), rows, j, mask, W, True, c)
    for j in range(high - 1, low - 1, -1):
        acc, p, m, l = _step(acc, p, m, l, queries, pipeline, end.advance(-j), rows, j, mask, W, False, c)
    if c.window:
        for j in range(low - 1, first - 1, -1):
            acc, p, m, l = _step(acc, p, m, l, queries, pipeline, end.advance(-j), rows, j, mask, W, True, c)
    return acc, p, m, l, end.advance(-first)


@gluon.jit
def _attend_listed(acc, p, m, l, queries, pipeline, state, rows, note, mask, W: gl.constexpr, c: gl.constexpr):
    """`_attend_all` for the blocks of which there are notes, after the one that `state` is at, which has this note.
    Returns the last note, too.
    """
    while (note & MORE) != 0:
        state = state.advance(1)
        note = read_note(pipeline, state, c)
        block = note // FLAGS
        if (note & MASKED) != 0:
            acc, p, m, l = _step(acc, p, m, l, queries, pipeline, state, rows, block, mask, W, True, c)
        else:
            acc, p, m, l = _step(acc, p, m, l, queries, pipeline, state, rows, block, mask, W, False, c)
    return acc, p, m, l, state, note


@gluon.jit
def _attend(queries, pipeline, mailbox, i, state, mask, W: gl.constexpr, c: gl.constexpr):
    """The state of a consumer's rows over the blocks of the i-th job, the pipeline's next ones, but for the last PV:
    the state, P of the last block, and the pipeline's state at that block.
    """
    L: gl.constexpr = _logits_layout(c)
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.dim, 16])
    flat: gl.constexpr = gl.SliceLayout(1, L)
    s = _start_qk(queries, pipeline, state, W, c)
    request, row = job_request(mailbox, i), job_field(mailbox, i, ROW) + W * 64
    first, last = job_field(mailbox, i, FIRST), job_field(mailbox, i, LAST)
    note = last * FLAGS
    if c.listed:
        note = read_note(pipeline, state, c)
    rows = _rows_of(queries, request, job_field(mailbox, i, H), row, mask, flat, c)
    m = gl.full([64], -float("inf"), gl.float32, flat)
    l = gl.sum(gl.full([64, c.block_n], 0.0, gl.float32, L).reshape([64, c.block_n // 8, 8]), 1)
    acc = gl.full([64, c.dim], 0.0, gl.float32, O)
    s = warpgroup_mma_wait(0, [s])
    pipeline.k.barriers.consumer_release(state)
    if c.box > 0:
        _clear_values(pipeline, state, note // FLAGS, request, mask, c)
    p, m, l, _alpha = _softmax(s, m, l, rows, note // FLAGS, queries, mask, pipeline.v.data.dtype, True, c)
    if c.listed:
        acc, p, m, l, state, note = _attend_listed(acc, p, m, l, queries, pipeline, state, rows, note, mask, W, c)
        first = note // FLAGS
    else:
        acc, p, m, l, state = _attend_all(
            acc, p, m, l, queries, pipeline, state, request, rows, row, first, last, mask, W, c
        )
    if c.box > 0 and c.window:
        _clear_values(pipeline, state, first, job_request(mailbox, i), mask, c)
    return acc, p, m, l, state


@gluon.jit
def consume(queries, pipeline, mailbox, partials, output, mask, W: gl.constexpr, c: gl.constexpr):
    """Compute rows 64 * W to 64 * W + 63 of the tiles of all jobs."""
    flat: gl.constexpr = gl.SliceLayout(1, _logits_layout(c))
    i, state = gl.to_tensor(0), PipelineState(gl.to_tensor(0), c.stages)
    wait_for_job(mailbox, i)
    _copy_queries(queries, mailbox, i, W, c)
    while job_field(mailbox, i, H) >= 0:
        async_copy.wait_group(0)  # also where there are no rows: the next copies write to the same place
        if job_field(mailbox, i, ROW) + W * 64 < job_field(mailbox, i, ROWS):
            fence_async_shared()
            gl.thread_barrier()
            acc, p, m, l, state = _attend(queries, pipeline, mailbox, i, state, mask, W, c)
            wait_for_job(mailbox, i + 1)
            acc = _start_pv(acc, p, pipeline, state, c)
            _copy_queries(queries, mailbox, i + 1, W, c)
            l = gl.convert_layout(gl.sum(l, 1), flat)
            acc = warpgroup_mma_wait(0, [acc])
            pipeline.v.barriers.consumer_release_once(state, 128)  # does not wait for copies of queries
            state = state.advance(1)
            complete = True
            if c.split:  # noqa: SIM102, "and" would generate code for partial states
                if job_field(mailbox, i, SPLITS) > 1:
                    complete, acc, m, l = combine(acc, m, l, partials, mailbox, i, W, c)
            if complete:
                q_start, h = job_field(mailbox, i, Q_START), job_field(mailbox, i, H)
                row, rows = job_field(mailbox, i, ROW) + W * 64, job_field(mailbox, i, ROWS)
                store_rows(acc, m, l, output, q_start, h, row, rows, c, True)
        else:
            state = _pass(pipeline, mailbox, i, state, c)
            wait_for_job(mailbox, i + 1)
            _copy_queries(queries, mailbox, i + 1, W, c)
        release_job(mailbox, i)
        i += 1
