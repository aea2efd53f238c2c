"""Thresholds of top-k and top-p in rows of logits or probabilities, without a sort.

The weight of a token is its probability or, of logits, ``exp((x - max) / temperature)``. `chunk_stats`, on all
multiprocessors, reads the rows once and writes the maximum and the sum of weights of each chunk of 64 tokens. `search`,
in one program per row, bisects float32 keys: the count and the weight of the tokens above a pivot show whether the
threshold is above it. The maxima of chunks alone, each a token, give a lower bound. If at most `TILE` chunks have
tokens above it, they are loaded once, and the search ends in registers. Otherwise passes over the row, with three
pivots each, narrow the bracket until the tokens inside fit into registers. The first pivots come from a sample of the
row, and nearly always one pass is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

# The number of tokens in a chunk.
CHUNK = tl.constexpr(64)
# The number of chunks that are in registers at a time.
TILE = 64
# More tokens than any row has, as the top_k that keeps all of them.
ALL = tl.constexpr(2**31 - 1)
# This is the key of -inf.
LOWEST = tl.constexpr(-0x7F800000)


@dataclass(frozen=True)
class RowConfig:
    """The constants that the kernels are compiled for."""

    # A row has `chunks` chunks, padded to a power of two, of which `tile` are in registers at a time.
    chunks: int
    tile: int
    # If true, rows hold logits; otherwise they hold probabilities.
    logits: bool
    # If true, top-p refers to all tokens, not to those that top-k keeps.
    joint: bool
    # If true, a temperature of 0 means the first of the most likely tokens.
    greedy: bool
    # Keys of the rows' dtype are multiples of this.
    grain: int


def launch_options(hip: bool) -> dict[str, int]:
    """How `select_rows` is compiled. To have two programs on a multiprocessor, NVIDIA's compiler would spill."""
    return {"num_warps": 8} if hip else {"num_warps": 8, "maxnreg": 255}


@lru_cache(maxsize=1024)
def row_config(vocab: int, dtype: torch.dtype, logits: bool, joint: bool = False, greedy: bool = False) -> RowConfig:
    chunks = max(triton.next_power_of_2(triton.cdiv(vocab, CHUNK.value)), TILE)
    grain = {torch.float32: 1, torch.bfloat16: 1 << 16, torch.float16: 1 << 13}[dtype]
    return RowConfig(chunks, TILE, logits, joint, greedy, grain)


@triton.jit
def pick(values, value, i, dtype: tl.constexpr):
    """Parameter i of a tensor or, without a tensor, the one of all rows."""
    if values is None:
        return tl.cast(value, dtype)
    else:
        return tl.load(values + i).to(dtype)


@triton.jit
def to_key(x):
    """An int64 that orders float32 values as they are ordered, with one key for both zeros."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def from_key(key):
    bits = tl.where(key < 0, -key - 0x80000000, key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(temperature, value, row):
    """log2(e) / temperature. Temperatures next to 0 are raised to where the quotient is finite."""
    return 1.4426950408889634 / tl.maximum(pick(temperature, value, row, tl.float32), 1e-30)


@triton.jit
def weigh(x, top, scale, logits: tl.constexpr):
    """Weights of float32 logits relative to `top`, or of probabilities, where negative ones have none."""
    return tl.exp2((x - top) * scale) if logits else tl.where(x < 0, 0.0, x)


@triton.jit
def load_chunks(x, ids, vocab):
    """The chunks `ids` of a row, float32 [n, CHUNK]; -inf beyond the row."""
    at = ids[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(x + at, at < vocab, -float("inf")).to(tl.float32)


@triton.jit(do_not_specialize=["chunks"])
def chunk_stats(
    x, temperature, temperature_value, maxima, sums, x_row, vocab, chunks, logits: tl.constexpr, block: tl.constexpr
):
    """Maximum and sum of weights of each chunk, float32 [rows, chunks]; weights of logits relative to the maximum."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * block + tl.arange(0, block)
    values = load_chunks(x + row * x_row, ids, vocab)
    top = tl.max(values, 1)
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = weigh(values, base[:, None], load_scale(temperature, temperature_value, row), logits)
    tl.store(maxima + row * chunks + ids, top, ids < chunks)
    tl.store(sums + row * chunks + ids, tl.sum(weights, 1), ids < chunks)


@triton.jit
def middle(low, high, top, scale, turn, c: tl.constexpr):
    """A pivot between two keys. For logits it is the middle of the two numbers, or a number below `high` if `low` is
    -inf. At every fourth turn it is the middle of the keys, so that the search ends after 32 such turns. For
    probabilities it is always the middle of the keys, which halves the range of exponents.
    """
    key = (low + high) >> 1
    if c.logits:
        b = from_key(high)
        a = tl.where(low == LOWEST, b - 2 * (top - b) - 8 / scale, from_key(low))
        key = tl.where(turn % 4 == 3, key, to_key(a * 0.5 + b * 0.5))
    return inside(key & -c.grain, low, high, c)


@triton.jit
def inside(key, low, high, c: tl.constexpr):
    """The key moved to at least one grain above `low` and below `high`, which are more than a grain apart."""
    return tl.minimum(tl.maximum(key, low + c.grain), high - c.grain)


@triton.jit
def sum_all(x):
    return tl.sum(tl.reshape(x, [x.numel]))


@triton.jit
def above(x, weights, pivot):
    """Number and weight of the elements above a pivot."""
    inside = x > pivot
    return sum_all(inside.to(tl.int32)), sum_all(tl.where(inside, weights, 0.0))


@triton.jit
def bisect(x, weights, more, more_mass, k, mass, low, high, left, stop, top, scale, c: tl.constexpr):
    """Narrow a bracket to (low, high], until at most `stop` elements of x are inside, or none that differ.

    The threshold is above `low`, where k elements or the weight `mass` are above it, and at most `high`. more and
    more_mass: number and weight of elements above those of x. left: at least the number of elements of x above low.
    Returns low.
    """
    right, turn = more, more * 0
    while (high - low > c.grain) & (left > stop) & (left - right > 1):
        pivot = middle(low, high, top, scale, turn, c)
        n, w = above(x, weights, from_key(pivot))
        n, w = n + more, w + more_mass
        rejected = (n >= k) | (w >= mass)
        low, high = tl.where(rejected, pivot, low), tl.where(rejected, high, pivot)
        left, right = tl.where(rejected, n, left), tl.where(rejected, right, n)
        turn += 1
    return low


@triton.jit
def load_maxima(maxima, vocab, c: tl.constexpr):
    """The maxima of a row's chunks, which are loaded again for each use, as registers are scarce."""
    i = tl.arange(0, c.chunks)
    return tl.load(maxima + i, i * CHUNK < vocab, -float("inf"))


@triton.jit
def load_sums(maxima, sums, vocab, top, scale, c: tl.constexpr):
    """The weights of a row's chunks, those of logits relative to the row's maximum."""
    m, i = load_maxima(maxima, vocab, c), tl.arange(0, c.chunks)
    s = tl.load(sums + i, i * CHUNK < vocab, 0.0)
    return s * tl.exp2((m - tl.where(top == -float("inf"), 0.0, top)) * scale) if c.logits else s


@triton.jit
def list_chunks(maxima, low, ids, vocab, c: tl.constexpr):
    """Write the chunks that have elements above `low` to ids; return their number."""
    active = load_maxima(maxima, vocab, c) > from_key(low)
    # Other threads may still read the list before.
    tl.debug_barrier()
    tl.store(ids + tl.cumsum(active.to(tl.int32), 0) - 1, tl.arange(0, c.chunks), active)
    tl.debug_barrier()
    return tl.sum(active.to(tl.int32))


@triton.jit
def load_ids(ids, start, listed, tile: tl.constexpr, c: tl.constexpr):
    """The listed chunks from `start` on, and a chunk beyond all rows after the last. Loops load them a turn ahead."""
    i = start + tl.arange(0, tile)
    return tl.load(ids + i, i < listed, c.chunks)


@triton.jit
def count_pivots(x, ids, listed, vocab, p, q, r, top, scale, c: tl.constexpr):
    """Number and weight of elements above each of three pivots, in the listed chunks. They are added up per thread, and
    over threads at the end; the chunks of the next turn are on their way during each turn.
    """
    tile: tl.constexpr = c.tile // 2
    n_p = tl.full([tile, CHUNK], 0, tl.int32)
    n_q, n_r = n_p, n_p
    w_p = tl.full([tile, CHUNK], 0, tl.float32)
    w_q, w_r = w_p, w_p
    values = load_chunks(x, load_ids(ids, 0, listed, tile, c), vocab)
    chunk = load_ids(ids, tile, listed, tile, c)
    for start in tl.range(0, listed, tile, disable_licm=True):
        following, chunk = load_chunks(x, chunk, vocab), load_ids(ids, start + 2 * tile, listed, tile, c)
        weights = weigh(values, top, scale, c.logits)
        n_p += (values > p).to(tl.int32)
        n_q += (values > q).to(tl.int32)
        n_r += (values > r).to(tl.int32)
        w_p += tl.where(values > p, weights, 0.0)
        w_q += tl.where(values > q, weights, 0.0)
        w_r += tl.where(values > r, weights, 0.0)
        values = following
    return sum_all(n_p), sum_all(n_q), sum_all(n_r), sum_all(w_p), sum_all(w_q), sum_all(w_r)


@triton.jit
def estimate(x, ids, listed, vocab, k, mass, whole, low, high, top, scale, c: tl.constexpr):
    """Three pivots (p, q, r) from a sample of the listed chunks: q is where the threshold is expected. Between p and q,
    and between q and r, half of the elements are expected that fit into registers. whole: weight of the chunks.

    The weight above a pivot is computed as `whole` less the weight below, which the sample gives more exactly: most of
    the weight above belongs to few tokens, which may or may not be in the sample.
    """
    values = load_chunks(x, tl.load(ids + tl.arange(0, c.tile) * listed // c.tile), vocab)
    weights = weigh(values, top, scale, c.logits)
    part = c.tile / listed.to(tl.float32)
    k, mass = tl.maximum((k * part).to(tl.int32), 1), sum_all(weights) - (whole - mass) * part
    reach = tl.maximum((part * (c.tile * CHUNK // 2)).to(tl.int32), 1)
    none, any_mass, size = listed * 0, mass * 0 + float("inf"), listed * 0 + c.tile * CHUNK
    q = bisect(values, weights, none, 0.0, k, mass, low, high, size, 0, top, scale, c)
    n, _ = above(values, weights, from_key(q))
    p = bisect(values, weights, none, 0.0, n + reach, any_mass, low, q, size, 0, top, scale, c)
    r = bisect(values, weights, none, 0.0, tl.maximum(n - reach, 1), any_mass, q, high, n, 0, top, scale, c)
    return p, q, r


@triton.jit
def collect(x, ids, listed, vocab, low, high, found, c: tl.constexpr):
    """Write the elements in (low, high] to `found`, in their order; return them, [tile, CHUNK]."""
    p, q, size = from_key(low), from_key(high), low.to(tl.int32) * 0
    tl.debug_barrier()
    chunk = load_ids(ids, 0, listed, c.tile, c)
    for start in tl.range(0, listed, c.tile, disable_licm=True):
        values, chunk = load_chunks(x, chunk, vocab), load_ids(ids, start + c.tile, listed, c.tile, c)
        inside = ((values > p) & (values <= q)).to(tl.int32)
        each = tl.sum(inside, 1)
        at = size + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(inside, 1) - 1
        tl.store(found + at, values, inside != 0)
        size += tl.sum(each)
    tl.debug_barrier()
    at = tl.arange(0, c.tile)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(found + at, at < size, -float("inf"))


@triton.jit
def search(x, maxima, sums, ids, found, vocab, k, mass, low, top, scale, c: tl.constexpr):
    """The key below the threshold: the elements above it are those with fewer than k elements, and a weight of less
    than `mass`, above themselves. low: a key below the threshold.
    """
    none = low.to(tl.int32) * 0
    high = to_key(top)
    highest = load_maxima(maxima, vocab, c)
    listed = tl.sum((highest > from_key(low)).to(tl.int32))
    weights = weigh(highest, top, scale, c.logits)
    low = bisect(highest, weights, none, 0.0, k, mass, low, high, listed, c.tile, top, scale, c)
    listed = list_chunks(maxima, low, ids, vocab, c)
    more, more_mass = none, none.to(tl.float32)
    left, turn = listed * CHUNK, none
    capacity: tl.constexpr = c.tile * CHUNK
    if left > capacity:
        weights = load_sums(maxima, sums, vocab, top, scale, c)
        whole = tl.sum(tl.where(load_maxima(maxima, vocab, c) > from_key(low), weights, 0.0))
        p, q, r = estimate(x, ids, listed, vocab, k, mass, whole, low, high, top, scale, c)
        while (left - more > capacity) & (high - low > c.grain):
            p, q, r = inside(p, low, high, c), inside(q, low, high, c), inside(r, low, high, c)
            n_p, n_q, n_r, w_p, w_q, w_r = count_pivots(
                x, ids, listed, vocab, from_key(p), from_key(q), from_key(r), top, scale, c
            )
            if (n_r >= k) | (w_r >= mass):
                low, left = r, n_r
            elif (n_q >= k) | (w_q >= mass):
                low, left = q, n_q
                high, more = r, n_r
                more_mass = w_r
            elif (n_p >= k) | (w_p >= mass):
                low, left = p, n_p
                high, more = q, n_q
                more_mass = w_q
            else:
                high, more, more_mass = p, n_p, w_p
            q = middle(low, high, top, scale, turn, c)
            p, r = middle(low, q, top, scale, turn, c), middle(q, high, top, scale, turn, c)
            turn += 1
    values = tl.full([c.tile, CHUNK], -float("inf"), tl.float32)
    if listed * CHUNK <= capacity:
        values = load_chunks(x, load_ids(ids, 0, listed, c.tile, c), vocab)
    elif high - low > c.grain:
        values = collect(x, ids, listed, vocab, low, high, found, c)
    weights = weigh(values, top, scale, c.logits)
    low = bisect(values, weights, more, more_mass, k, mass, low, high, left, 0, top, scale, c)
    return low


def running_programs(device: torch.device) -> int:
    """How many programs with scratch of their own are launched: two for each multiprocessor."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def chunk_statistics(x: Tensor, temperature: Tensor | None, value: float, logits: bool) -> tuple[Tensor, Tensor]:
    """`chunk_stats` of rows [rows, vocab]: float32 [rows, chunks] each."""
    (rows, vocab), chunks = x.shape, triton.cdiv(x.shape[1], CHUNK.value)
    maxima, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=x.device)
    block = min(64, triton.next_power_of_2(chunks))
    grid = (rows, triton.cdiv(chunks, block))
    chunk_stats[grid](
        x, temperature, value, maxima, sums, x.stride(0), vocab, chunks, logits, block, num_warps=max(block // 16, 1)
    )
    return maxima, sums
