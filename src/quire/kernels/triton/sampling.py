"""Sampling and filtering of rows of logits or probabilities, without a sort.

Two launches. The first reads the rows once, on all multiprocessors (`chunk_stats`). `select_rows`, one program per row,
finds the threshold of top-k and top-p (`threshold.py`) and then the token, and reads only the chunks whose maximum says
that they matter. `map_rows` writes rows that were filtered.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.triton.threshold import (
    ALL,
    CHUNK,
    LOWEST,
    RowConfig,
    chunk_statistics,
    from_key,
    launch_options,
    list_chunks,
    load_chunks,
    load_ids,
    load_maxima,
    load_scale,
    load_sums,
    pick,
    row_config,
    running_programs,
    search,
    to_key,
    weigh,
)

MAP_BLOCK = 4096


@triton.jit
def keep(x, maxima, ids, sums, vocab, low, min_weight, top, scale, c: tl.constexpr):
    """List the chunks with elements above the key `low`. For each, write to `sums` the sum of the weights that are at
    least min_weight. Return the number of listed chunks, and the sum of all these weights.
    """
    listed = list_chunks(maxima, low, ids, vocab, c)
    total = tl.full([c.tile], 0, tl.float64)
    chunk = load_ids(ids, 0, listed, c.tile, c)
    for start in tl.range(0, listed, c.tile, disable_licm=True):
        values, chunk = load_chunks(x, chunk, vocab), load_ids(ids, start + c.tile, listed, c.tile, c)
        weights = weigh(values, top, scale, c.logits)
        each = tl.sum(tl.where((values > from_key(low)) & (weights >= min_weight), weights, 0.0), 1)
        i = start + tl.arange(0, c.tile)
        tl.store(sums + i, each, i < listed)
        total += each.to(tl.float64)
    tl.debug_barrier()
    return listed, tl.sum(total)


@triton.jit
def keep_all(maxima, sums, ids, kept, vocab, top, scale, c: tl.constexpr):
    """What `keep` writes where all tokens are kept: the sums of all chunks."""
    i = tl.arange(0, c.chunks)
    weights = load_sums(maxima, sums, vocab, top, scale, c)
    # Other threads may still read the list of the row before.
    tl.debug_barrier()
    tl.store(ids + i, i)
    tl.store(kept + i, weights)
    tl.debug_barrier()


@triton.jit
def uniform(seed, offset, subsequence, draw):
    """A float64 in [0, 1) of 53 bits from Philox4x32-10: the seed is the key, the rest the counter."""
    low, high = (offset & 0xFFFFFFFF).to(tl.uint32), ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, _, _ = tl.philox(seed, low, high, tl.cast(subsequence, tl.uint32), tl.cast(draw, tl.uint32))
    return ((a.to(tl.int64) << 21) | (b.to(tl.int64) >> 11)).to(tl.float64) * (2.0**-53)


@triton.jit
def step_to(weights, goal, size: tl.constexpr):
    """The first index at which the running sum of float64 weights exceeds `goal`, and the sum before it. If rounding
    leaves none, the last index with a weight.
    """
    i = tl.arange(0, size)
    running = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, i, -1))
    index = tl.minimum(tl.min(tl.where((running > goal) & (weights > 0), i, size)), last)
    return index, tl.max(tl.where(i < index, running, 0.0))


@triton.jit
def draw_token(x, ids, sums, listed, vocab, low, min_weight, u, top, scale, c: tl.constexpr):
    """The token at which the running sum of the weights kept exceeds the fraction u of their sum."""
    i = tl.arange(0, c.chunks)
    weights = tl.load(sums + i, i < listed, 0.0).to(tl.float64)
    goal = u * tl.max(tl.cumsum(weights, 0))
    index, before = step_to(weights, goal, c.chunks)
    token = tl.load(ids + index) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(x + token, token < vocab, -float("inf")).to(tl.float32)
    weights = weigh(values, top, scale, c.logits)
    weights = tl.where((values > from_key(low)) & (weights >= min_weight), weights, 0.0).to(tl.float64)
    index, before = step_to(weights, goal - before, CHUNK)
    return tl.max(tl.where(tl.arange(0, CHUNK) == index, token, 0))


@triton.jit
def first_largest(x, maxima, top, vocab, c: tl.constexpr):
    """The first of the largest elements of a row."""
    chunk = tl.min(tl.where(maxima == top, tl.arange(0, c.chunks), c.chunks - 1))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.min(tl.where(tl.load(x + token, token < vocab, -float("inf")).to(tl.float32) == top, token, vocab - 1))


@triton.jit(do_not_specialize=["outputs", "rows", "chunks", "top_k_value", "seed_value", "offset_value"])
def select_rows(  # noqa: C901
    x, indices, maxima, sums, ids, kept, found, temperature, top_k, top_p, min_p, seed, offset,
    temperature_value, top_k_value, top_p_value, min_p_value, seed_value, offset_value,
    tokens, valid, state, x_row, outputs, rows, vocab, chunks, seed_step, offset_step, shared_seed, c: tl.constexpr,
):  # fmt: skip
    """Program p computes every num_programs-th output from p on: a token, or what `map_rows` needs to know."""
    program = tl.program_id(0).to(tl.int64)
    ids, kept, found = ids + program * c.chunks, kept + program * c.chunks, found + program * c.tile * CHUNK
    for output in tl.range(tl.program_id(0), outputs, tl.num_programs(0), disable_licm=True):
        row = tl.cast(output, tl.int64)
        if indices is not None:
            row = tl.load(indices + output).to(tl.int64)
        known = (row >= 0) & (row < rows)
        row = tl.where(known, row, 0)
        highest, weights = maxima + row * chunks, sums + row * chunks
        top, scale = tl.max(load_maxima(highest, vocab, c)), load_scale(temperature, temperature_value, row)
        total = tl.sum(load_sums(highest, weights, vocab, top, scale, c))
        good = known & (total > 0) & (total < float("inf"))
        here = x + row * x_row
        token = tl.full((), 0, tl.int32)
        # Probabilities of 0 are not kept.
        low = tl.full((), LOWEST if c.logits else 0, tl.int64)
        mass = total.to(tl.float64)
        take_first = False
        if c.greedy:
            take_first = pick(temperature, temperature_value, row, tl.float32) <= 0
        if good & take_first:
            token = first_largest(here, load_maxima(highest, vocab, c), top, vocab, c)
        elif good:
            k = pick(top_k, top_k_value, row, tl.int64)
            k = tl.where((k < 1) | (k >= vocab), ALL, k).to(tl.int32)
            p = pick(top_p, top_p_value, row, tl.float32)
            fraction = tl.where(p < 1, tl.maximum(p, 0.0), float("inf"))
            # A fraction of the largest weight, which is kept in any case.
            min_weight = tl.minimum(pick(min_p, min_p_value, row, tl.float32), 1.0) * (1.0 if c.logits else top)
            # top-p is a fraction of this mass.
            whole = 1.0 if c.joint and not c.logits else mass.to(tl.float32)
            both = (k < ALL) & (fraction < float("inf"))
            # Top-p of what top-k keeps needs a second search; a joint search needs one.
            turns = both.to(tl.int32) + 1 if not c.joint else 1
            listed = tl.cdiv(vocab, CHUNK)
            if (k == ALL) & (fraction == float("inf")) & (min_weight <= 0):
                turns = 0
                if tokens is not None:
                    keep_all(highest, weights, ids, kept, vocab, top, scale, c)
            for turn in tl.range(0, turns, disable_licm=True):
                final = turn == turns - 1
                goal = tl.where(final, fraction * whole, float("inf"))
                if (k < ALL) | (goal < float("inf")):
                    start = low
                    # Tokens below this weight are together lighter than what top-p leaves out.
                    if c.logits:
                        floor = top + tl.log2(tl.maximum((whole - goal) / (2 * vocab), 1e-37)) / scale
                        floor = to_key(tl.minimum(floor, top)) & -c.grain
                        start = tl.where(goal < float("inf"), tl.maximum(low, floor - c.grain), low)
                    low = tl.maximum(
                        low, search(here, highest, weights, ids, found, vocab, k, goal, start, top, scale, c)
                    )
                listed, mass = keep(
                    here, highest, ids, kept, vocab, low, tl.where(final, min_weight, 0.0), top, scale, c
                )
                whole, k = mass.to(tl.float32), tl.full((), ALL, tl.int32)
            if tokens is not None:
                key = pick(seed, seed_value, output * seed_step, tl.int64)
                counter = pick(offset, offset_value, output * offset_step, tl.int64)
                u = uniform(key, counter, output * shared_seed, 0)
                token = draw_token(here, ids, kept, listed, vocab, low, min_weight, u, top, scale, c)
        if tokens is not None:
            tl.store(tokens + output, token.to(tokens.dtype.element_ty))
            tl.store(valid + output, good.to(tl.int8))
        else:
            tl.store(state + row * 3, from_key(low))
            tl.store(state + row * 3 + 1, mass.to(tl.float32))
            tl.store(state + row * 3 + 2, top)


@triton.jit
def map_rows(
    x, out, state, temperature, temperature_value, x_row, out_row, vocab,
    logits: tl.constexpr, mask: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the weights of the elements above a row's threshold, divided by their sum or, with `mask`, the elements;
    the others are 0 or, with `mask`, -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    low, total, top = tl.load(state + row * 3), tl.load(state + row * 3 + 1), tl.load(state + row * 3 + 2)
    values = tl.load(x + row * x_row + at, at < vocab, 0.0).to(tl.float32)
    if mask:
        result = tl.where(values <= low, -float("inf"), values)
    else:
        weights = weigh(values, top, load_scale(temperature, temperature_value, row), logits)
        result = tl.where(values <= low, 0.0, weights / total)
    tl.store(out + row * out_row + at, result.to(out.dtype.element_ty), at < vocab)


def _select(
    x: Tensor,
    indices: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    values: tuple[Any, ...],
    outs: tuple[Tensor | None, Tensor | None, Tensor | None],
    c: RowConfig,
) -> None:
    """Launch both kernels. tensors and values: temperature, top_k, top_p, min_p, seed and offset, as tensors
    or as numbers of all rows.
    """
    maxima, sums = chunk_statistics(x, tensors[0], values[0], c.logits)
    outputs = len(x) if indices is None else len(indices)
    programs = min(outputs, running_programs(x.device))
    ids = torch.empty(programs, c.chunks, dtype=torch.int32, device=x.device)
    kept = torch.empty(programs, c.chunks, dtype=torch.float32, device=x.device)
    found = torch.empty(programs, c.tile * CHUNK.value, dtype=torch.float32, device=x.device)
    seed, offset = tensors[4:]
    steps = [0 if s is None or len(s) == 1 else 1 for s in (seed, offset)]
    rows, vocab = x.shape
    select_rows[(programs,)](
        x, indices, maxima, sums, ids, kept, found, *tensors, *values, *outs, x.stride(0), outputs, rows, vocab,
        maxima.shape[1], *steps, 1 - steps[0], c, **launch_options(torch.version.hip is not None),
    )  # fmt: skip


def sample(
    tokens: Tensor,
    valid: Tensor,
    x: Tensor,
    indices: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    values: tuple[Any, ...],
    logits: bool,
    joint: bool,
    greedy: bool,
) -> None:
    """`quire.kernels.sampling.sample_rows` on a GPU."""
    if len(tokens):
        c = row_config(x.shape[1], x.dtype, logits, joint, greedy)
        _select(x, indices, tensors, values, (tokens, valid.view(torch.int8), None), c)


def transform(out: Tensor, x: Tensor, tensors: tuple[Tensor | None, ...], values: tuple[Any, ...], kind: str) -> None:
    """`quire.kernels.sampling.transform_rows` on a GPU."""
    (rows, vocab), logits = x.shape, kind != "probs"
    if not rows or not vocab:
        return
    c = row_config(vocab, x.dtype, logits, joint=True)
    state = torch.empty(rows, 3, dtype=torch.float32, device=x.device)
    none = (None, None, None)
    _select(x, None, (*tensors, *none), (*values, 0.0, 0, 0), (None, None, state), c)
    block = min(MAP_BLOCK, triton.next_power_of_2(vocab))
    grid, strides = (rows, triton.cdiv(vocab, block)), (x.stride(0), out.stride(0))
    map_rows[grid](x, out, state, tensors[0], values[0], *strides, vocab, logits, kind == "mask", block)
