"""Verification of drafted tokens by speculative sampling, one program per request."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.triton.sampling import step_to, uniform
from quire.kernels.triton.threshold import CHUNK, load_chunks, pick, row_config

# The number of chunks that are read at a time.
TILE = tl.constexpr(64)


@triton.jit
def excess(target, draft, ids, vocab, drafted):
    """The target's probabilities less the draft's, at least 0: float32 [n, CHUNK]. Without a draft, the target's."""
    p = load_chunks(target, ids, vocab)
    q = load_chunks(draft, tl.where(drafted, ids, vocab), vocab)
    return tl.maximum(p - tl.maximum(q, 0.0), 0.0)


@triton.jit
def sum_chunks(target, draft, sums, vocab, drafted):
    """Write the sum of each chunk's excess to sums; return the sum of all."""
    total = tl.full([TILE], 0, tl.float64)
    chunks = tl.cdiv(vocab, CHUNK)
    for start in range(0, chunks, TILE):
        ids = start + tl.arange(0, TILE)
        each = tl.sum(excess(target, draft, ids, vocab, drafted), 1)
        tl.store(sums + ids, each, ids < chunks)
        total += each.to(tl.float64)
    tl.debug_barrier()
    return tl.sum(total)


@triton.jit(do_not_specialize=["count", "vocab", "seed_value", "offset_value"])
def verify_chain(
    draft, token_ids, target, out, accepted, emitted, seed, offset, seed_value, offset_value, sums,
    draft_row, draft_token, ids_row, target_row, target_token, out_row, count, vocab, seed_step, offset_step,
    shared_seed, padded: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    key = pick(seed, seed_value, row * seed_step, tl.int64)
    counter = pick(offset, offset_value, row * offset_step, tl.int64)
    draft, target, out = draft + row * draft_row, target + row * target_row, out + row * out_row
    sums += row * padded
    position, agreed = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for i in range(count):
        token = tl.load(token_ids + row * ids_row + i)
        known = (token >= 0) & (token < vocab)
        p = tl.load(target + i * target_token + token, known, 0.0).to(tl.float64)
        q = tl.load(draft + i * draft_token + token, known, 0.0).to(tl.float64)
        agrees = known & (uniform(key, counter, tl.program_id(0) * shared_seed, i) * q < p)
        position += (agrees & (position == i)).to(tl.int32)
        agreed += agrees.to(tl.int32)
        tl.store(out + i, tl.where(position == i + 1, token, -1))
    drafted = position < count
    target += position.to(tl.int64) * target_token
    draft += tl.minimum(position, tl.maximum(count - 1, 0)).to(tl.int64) * draft_token
    total = sum_chunks(target, draft, sums, vocab, drafted)
    # No probability is larger than the draft's, so only rounding rejected the token.
    if (total == 0) & drafted:
        drafted = drafted & False
        tl.debug_barrier()
        total = sum_chunks(target, draft, sums, vocab, drafted)
    ids = tl.arange(0, padded)
    weights = tl.load(sums + ids, ids < tl.cdiv(vocab, CHUNK), 0.0).to(tl.float64)
    u = uniform(key, counter, tl.program_id(0) * shared_seed, count)
    goal = u * tl.max(tl.cumsum(weights, 0))
    chunk, before = step_to(weights, goal, padded)
    weights = excess(target, draft, chunk + tl.arange(0, 1), vocab, drafted)
    index, before = step_to(tl.reshape(weights, [CHUNK]).to(tl.float64), goal - before, CHUNK)
    good = (total > 0) & (total < float("inf"))
    tl.store(out + count, -1)
    tl.debug_barrier()
    tl.store(out + position, tl.where(good, chunk * CHUNK + index, -1).to(out.dtype.element_ty))
    tl.store(accepted + row, tl.load(accepted + row) + agreed)
    tl.store(emitted + row, tl.load(emitted + row) + position)


def verify(
    out: Tensor,
    accepted: Tensor,
    emitted: Tensor,
    draft: Tensor,
    token_ids: Tensor,
    target: Tensor,
    tensors: tuple[Tensor | None, Tensor | None],
    values: tuple[int, int],
) -> None:
    """`quire.kernels.sampling.verify_drafts` on a GPU. tensors and values: seed and offset."""
    rows, count, vocab = draft.shape
    if not rows:
        return
    padded = row_config(vocab, torch.float32, False).chunks
    sums = torch.empty(rows, padded, dtype=torch.float32, device=draft.device)
    steps = [0 if s is None or len(s) == 1 else 1 for s in tensors]
    strides = *draft.stride()[:2], token_ids.stride(0), *target.stride()[:2], out.stride(0)
    verify_chain[(rows,)](
        draft, token_ids, target, out, accepted, emitted, *tensors, *values, sums, *strides, count, vocab,
        *steps, 1 - steps[0], padded, num_warps=8,
    )  # fmt: skip
