"""Rotary position embedding: the queries and the keys of a batch in one launch, each number read and written once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import triton
from torch import Tensor
from triton import language as tl

STEP = tl.constexpr(2 * math.pi / 2**32)  # of an angle, where a turn is 2**32 steps
FULL = 1024  # tokens


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for: pairs in a head, and how much of it a program takes at once."""

    head_dim: int
    half: int
    pad: int  # half, as a power of two
    block: int  # heads
    width: int  # elements that are copied
    interleave: bool
    in_place: bool

    @property
    def num_warps(self) -> int:
        """A thread for each 8 pairs."""
        return min(max(self.pad * self.block // 256, 1), 8)


@lru_cache(maxsize=1024)
def shape(head_dim: int, rotary_dim: int, heads: int, interleave: bool, in_place: bool) -> Shape:
    """For heads of a dimension of which rotary_dim elements turn; the larger of q's and k's numbers of heads."""
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    pad = triton.next_power_of_2(half)
    block = min(max(1024 // pad, 1), triton.next_power_of_2(heads))
    width = min(max(2048 // block, 1), triton.next_power_of_2(max(rest, 1)))
    return Shape(head_dim, half, pad, block, width, interleave, in_place)


@triton.jit
def position_of(i, positions, indptr, batch):
    """The position of token i: its entry or, with indptr, its place in its request after the request's offset.
    Tokens of no request are at 0, where nothing turns.
    """
    if indptr is None:
        position = tl.load(positions + i).to(tl.int64)
    else:
        low, high = batch * 0, batch + 1  # between them is how many entries of indptr are at most i
        while low < high:
            middle = (low + high) // 2
            passed = tl.load(indptr + middle) <= i
            low, high = tl.where(passed, middle + 1, low), tl.where(passed, high, middle)
        known = (low > 0) & (low <= batch)
        begin = tl.load(indptr + low - 1, known, 0).to(tl.int64)
        offset = tl.load(positions + low - 1, known, 0).to(tl.int64)
        position = tl.where(known, offset + i - begin, 0)
    return position


@triton.jit
def cos_sin(turned):
    """Cosine and sine of angles in fractions of 2**64 of a turn: Taylor's series in the nearest quarter of a turn.
    Libdevice's would reduce each angle twice more, and hold a stack for angles that are never met.
    """
    angle = (turned >> 32).to(tl.int32)
    quarter = (angle + (1 << 29)) >> 30
    x = (angle - (quarter << 30)).to(tl.float32) * STEP
    xx = x * x
    sin = x + x * xx * (-1 / 6 + xx * (1 / 120 + xx * (-1 / 5040 + xx * (1 / 362880))))
    cos = 1 + xx * (-1 / 2 + xx * (1 / 24 + xx * (-1 / 720 + xx * (1 / 40320 - xx * (1 / 3628800)))))
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def cos_sin_at(position, turns, cache, cache_row, rows, c: tl.constexpr):
    """Cosines and sines of a position's angles, [1, c.pad]: from the cache's row, NaN if it has none, or computed.

    Turns are fractions of 2**64. Products that wrap drop whole turns, so that far angles are as exact as near ones.
    """
    j = tl.arange(0, c.pad)
    if cache is not None:
        known = (j < c.half) & (position >= 0) & (position < rows)
        row = cache + position * cache_row
        cos = tl.load(row + j, known, float("nan"))
        sin = tl.load(row + c.half + j, known, float("nan"))
    else:
        cos, sin = cos_sin(position * tl.load(turns + j, j < c.half, 0))
    return cos[None, :], sin[None, :]


@triton.jit
def turn(x, out, rows, cos, sin, c: tl.constexpr):
    """Heads that begin at x, [heads, 1], where `rows`, turned into those at out. Elements 2j and 2j + 1 are a pair, or
    j and j + c.half.
    """
    if c.interleave:
        e = tl.arange(0, 2 * c.pad)[None, :]
        inside = rows & (e < 2 * c.half)
        pairs = tl.load(x + e, inside, 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (c.block, c.pad, 2)))
        pairs = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (c.block, 2 * c.pad))
        tl.store(out + e, pairs.to(out.dtype.element_ty), inside)
    else:
        j = tl.arange(0, c.pad)[None, :]
        inside = rows & (j < c.half)
        a = tl.load(x + j, inside, 0.0).to(tl.float32)
        b = tl.load(x + c.half + j, inside, 0.0).to(tl.float32)
        tl.store(out + j, (a * cos - b * sin).to(out.dtype.element_ty), inside)
        tl.store(out + c.half + j, (b * cos + a * sin).to(out.dtype.element_ty), inside)


@triton.jit
def carry(x, out, rows, c: tl.constexpr):
    """What does not turn of heads that begin at x, [heads, 1], where `rows`, into those at out."""
    for start in range(2 * c.half, c.head_dim, c.width):
        d = start + tl.arange(0, c.width)[None, :]
        inside = rows & (d < c.head_dim)
        tl.store(out + d, tl.load(x + d, inside), inside)


@triton.jit
def rotate_block(x, out, i, b, heads, x_token, x_head, out_token, out_head, cos, sin, c: tl.constexpr):
    """Block b of the heads of token i."""
    h = (b * c.block + tl.arange(0, c.block)).to(tl.int64)[:, None]
    x, out = x + i * x_token + h * x_head, out + i * out_token + h * out_head
    turn(x, out, h < heads, cos, sin, c)
    if not c.in_place:
        carry(x, out, h < heads, c)


@triton.jit(do_not_specialize=["batch", "rows", "q_heads", "k_heads"])
def rotate_heads(
    q, k, q_out, k_out, positions, indptr, turns, cache, cache_row, batch, rows, q_heads, k_heads,
    q_token, q_head, k_token, k_head, qo_token, qo_head, ko_token, ko_head, c: tl.constexpr,
):  # fmt: skip
    """Those blocks of a token's heads that axis 1 of the grid deals to this program."""
    i = tl.program_id(0).to(tl.int64)
    position = position_of(i, positions, indptr, batch)
    cos, sin = cos_sin_at(position, turns, cache, cache_row, rows, c)
    q_blocks = tl.cdiv(q_heads, c.block)
    for b in range(tl.program_id(1), q_blocks + tl.cdiv(k_heads, c.block), tl.num_programs(1)):
        if b < q_blocks:
            rotate_block(q, q_out, i, b, q_heads, q_token, q_head, qo_token, qo_head, cos, sin, c)
        else:
            rotate_block(k, k_out, i, b - q_blocks, k_heads, k_token, k_head, ko_token, ko_head, cos, sin, c)


def rotate(
    q_out: Tensor,
    k_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    positions: Tensor,
    indptr: Tensor | None,
    turns: Tensor | None,
    cos_sin_cache: Tensor | None,
    rotary_dim: int,
    interleave: bool,
) -> None:
    """`quire.kernels.rope.rotate` on a GPU, with the turns of one position where there is no cache."""
    tokens, q_heads, head_dim = q_out.shape
    k_heads = k_out.shape[1]
    if not tokens or not q_heads + k_heads:
        return
    in_place = q is None or k is None
    c = shape(head_dim, rotary_dim, max(q_heads, k_heads), interleave, in_place)
    blocks = triton.cdiv(q_heads, c.block) + triton.cdiv(k_heads, c.block)
    q, k = (q_out, k_out) if q is None or k is None else (q, k)
    # Many tokens fill a GPU, and the angles of each are found once; few are spread over it.
    grid = (tokens, 1 if tokens > FULL else blocks)
    rotate_heads[grid](
        q,
        k,
        q_out,
        k_out,
        positions,
        indptr,
        turns,
        cos_sin_cache,
        0 if cos_sin_cache is None else cos_sin_cache.stride(0),
        0 if indptr is None else len(indptr) - 1,
        0 if cos_sin_cache is None else len(cos_sin_cache),
        q_heads,
        k_heads,
        *q.stride()[:2],
        *k.stride()[:2],
        *q_out.stride()[:2],
        *k_out.stride()[:2],
        c,
        num_warps=c.num_warps,
    )
