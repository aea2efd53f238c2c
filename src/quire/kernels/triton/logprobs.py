"""What an engine needs of logits before and after a token is drawn: penalties, and log-probabilities."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.triton.threshold import CHUNK, chunk_statistics, pick, row_config, running_programs

FINITE = tl.constexpr(torch.finfo(torch.float32).max)
# The bit of tokens in the prompt. The bits below it count occurrences in the output.
PROMPT = tl.constexpr(1 << 30)


@triton.jit
def each_token(row, listed, start, end, vocab, block: tl.constexpr):
    """A block of a row's tokens, and which of them are tokens of the vocabulary."""
    i = start + tl.arange(0, block)
    token = tl.load(listed + i, i < end, -1)
    return i, token, (token >= 0) & (token < vocab)


@triton.jit(do_not_specialize=["rows", "slot_count", "vocab", "max_len"])
def penalise_rows(
    logits, out, tokens, slots, prompt_lens, lens, repetition, presence, frequency, counts,
    repetition_value, presence_value, frequency_value, x_row, out_row, tokens_row, rows, slot_count, vocab, max_len,
    block: tl.constexpr,
):  # fmt: skip
    """Write the penalised logits of the tokens that occurred to rows of `out`, which holds all logits. counts: int32
    [programs, vocab], where only the entries of tokens that occurred are used, and set first.
    """
    program = tl.program_id(0).to(tl.int64)
    counts += program * vocab
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        divisor = pick(repetition, repetition_value, row, tl.float32)
        once = pick(presence, presence_value, row, tl.float32)
        often = pick(frequency, frequency_value, row, tl.float32)
        slot = pick(slots, row, row, tl.int64)
        end = tl.where((slot >= 0) & (slot < slot_count), tl.minimum(tl.load(lens + row), max_len), 0).to(tl.int32)
        prompt = tl.load(prompt_lens + row)
        if (divisor != 1) | (once != 0) | (often != 0):
            listed = tokens + slot * tokens_row
            # All threads have read the counts of the row before.
            tl.debug_barrier()
            for start in range(0, end, block):
                at, token, known = each_token(row, listed, start, end, vocab, block)
                tl.store(counts + token, 0, known)
            tl.debug_barrier()
            for start in range(0, end, block):
                at, token, known = each_token(row, listed, start, end, vocab, block)
                tl.atomic_or(counts + token, PROMPT, known & (at < prompt), sem="relaxed")
                tl.atomic_add(counts + token, 1, known & (at >= prompt), sem="relaxed")
            tl.debug_barrier()
            for start in range(0, end, block):
                at, token, known = each_token(row, listed, start, end, vocab, block)
                count = tl.load(counts + token, known, 0, cache_modifier=".cg") & (PROMPT - 1)
                x = tl.load(logits + row * x_row + token, known, 0.0).to(tl.float32)
                y = tl.where(x > 0, x / divisor, x * divisor)
                # Without the clamp, inf - inf would be NaN later.
                y = tl.where(y != y, y, tl.clamp(y, -FINITE, FINITE))
                y -= tl.where(count > 0, once + often * count.to(tl.float32), 0.0)
                y = tl.where(tl.abs(x) == float("inf"), x, tl.where(y != y, y, tl.clamp(y, -FINITE, FINITE)))
                tl.store(out + row * out_row + token, y, known)


def penalise(
    out: Tensor,
    logits: Tensor,
    tokens: Tensor,
    slots: Tensor | None,
    prompt_lens: Tensor,
    lens: Tensor,
    tensors: tuple[Tensor | None, ...],
    values: tuple[float, ...],
) -> None:
    """`quire.kernels.sampling.penalise_logits` on a GPU. tensors and values: repetition, presence, frequency."""
    out.copy_(logits)
    (rows, vocab), device = logits.shape, logits.device
    if not rows:
        return
    programs = min(rows, running_programs(device))
    counts = torch.empty(programs, vocab, dtype=torch.int32, device=device)
    sizes = logits.stride(0), out.stride(0), tokens.stride(0), rows, *tokens.shape[:1], vocab, tokens.shape[1]
    penalise_rows[(programs,)](
        logits, out, tokens, slots, prompt_lens, lens, *tensors, counts, *values, *sizes, 1024, num_warps=8
    )


@triton.jit(do_not_specialize=["vocab", "chunks", "count"])
def report_rows(
    x, maxima, sums, tokens, logprobs, top_tokens, top_logprobs, x_row, vocab, chunks, count,
    padded: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of a row's token and of its `count` most likely tokens. m holds, for each chunk, the largest
    logit that has not been reported yet, so that each step reads only the chunk with the largest of these.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    i = tl.arange(0, padded)
    m = tl.load(maxima + row * chunks + i, i < chunks, -float("inf"))
    top = tl.max(m)
    weights = tl.load(sums + row * chunks + i, i < chunks, 0.0) * tl.exp2((m - top) * 1.4426950408889634)
    lse = top + tl.log2(tl.sum(weights)) * 0.6931471805599453
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocab)
    tl.store(logprobs + row, tl.load(x + token, known, -float("inf")).to(tl.float32) - lse)
    largest, last = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for n in range(count):
        before, largest = largest, tl.max(m)
        chunk = tl.minimum(tl.min(tl.where(m == largest, i, padded)), chunks - 1)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(x + at, at < vocab, -float("inf")).to(tl.float32)
        # Tokens of equal logits are reported in their order.
        left = (values == largest) & (at > tl.where(largest < before, -1, last))
        last = tl.min(tl.where(left, at, vocab))
        there = (largest > -float("inf")) & (last < vocab)
        tl.store(top_tokens + row * count + n, tl.where(there, last, -1))
        tl.store(top_logprobs + row * count + n, tl.where(there | (lse != lse), largest - lse, -float("inf")))
        left = (values < largest) | ((values == largest) & (at > last))
        m = tl.where(i == chunk, tl.max(tl.where(left, values, -float("inf"))), m)


def report(logprobs: Tensor, top_tokens: Tensor, top_logprobs: Tensor, logits: Tensor, tokens: Tensor) -> None:
    """`quire.kernels.sampling.report_logprobs` on a GPU."""
    rows, vocab = logits.shape
    if rows:
        maxima, sums = chunk_statistics(logits, None, 1.0, True)
        c = row_config(vocab, logits.dtype, True)
        sizes = logits.stride(0), vocab, maxima.shape[1], top_tokens.shape[1]
        report_rows[(rows,)](
            logits, maxima, sums, tokens, logprobs, top_tokens, top_logprobs, *sizes, c.chunks, num_warps=4
        )
