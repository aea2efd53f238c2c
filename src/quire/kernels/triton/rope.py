"""Rotary position embedding: the queries and the keys of a batch in one launch, each number read and written once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

STEP = tl.constexpr(2 * math.pi / 2**32)  # of an angle, where a turn is 2**32 steps
FULL = 1024  # tokens, whose programs keep a GPU busy


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for: pairs in a head, and how much of it a program takes at once."""

    half: int
    rest: int  # elements that do not turn
    dim_v: int  # elements of a value's head
    pad: int  # half, as a power of two
    block: int  # heads
    width: int  # elements that are copied
    interleave: bool
    mantissa: int  # bits of it in fp8, 0 for other dtypes

    @property
    def num_warps(self) -> int:
        """A thread for each 8 pairs."""
        return min(max(self.pad * self.block // 256, 1), 8)


@lru_cache(maxsize=1024)
def shape(half: int, rest: int, heads: int, interleave: bool, dim_v: int = 0, mantissa: int = 0) -> Shape:
    """For the larger of q's and k's numbers of heads."""
    pad = triton.next_power_of_2(half)
    block = min(max(1024 // pad, 1), triton.next_power_of_2(heads))
    width = min(max(2048 // block, 1), triton.next_power_of_2(max(rest, dim_v, 1)))
    return Shape(half, rest, dim_v, pad, block, width, interleave, mantissa)


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
def stored(x, scale, dtype: tl.constexpr, c: tl.constexpr):
    """Float32 as what is stored: bytes of fp8 after scaling, rounded to even and saturated, or `dtype`."""
    if c.mantissa == 0:
        return x.to(dtype)
    else:  # in whole numbers, as not all GPUs convert to fp8
        bias: tl.constexpr = 7 if c.mantissa == 3 else 15
        largest: tl.constexpr = 448.0 if c.mantissa == 3 else 57344.0
        one: tl.constexpr = 2.0 ** (24 - bias - c.mantissa)  # a float32 whose last bit is the smallest fp8
        cut: tl.constexpr = 23 - c.mantissa
        x = x * scale
        size = tl.minimum(tl.abs(x), largest)
        bits = size.to(tl.int32, bitcast=True)
        normal = (bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1) >> cut) - ((127 - bias) << c.mantissa)
        small = (size + one).to(tl.int32, bitcast=True) - tl.full((), one, tl.float32).to(tl.int32, bitcast=True)
        code = tl.where(size < 2.0 ** (1 - bias), small, normal)
        code = tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8)


@triton.jit
def turn(x, out, rows, cos, sin, scale, c: tl.constexpr):
    """Heads that begin at x, [heads, 1], where `rows`, turned into those at out. Elements 2j and 2j + 1 are a pair, or
    j and j + c.half.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    if c.interleave:
        e = tl.arange(0, 2 * c.pad)[None, :]
        inside = rows & (e < 2 * c.half)
        pairs = tl.load(x + e, inside, 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (c.block, c.pad, 2)))
        pairs = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (c.block, 2 * c.pad))
        tl.store(out + e, stored(pairs, scale, dtype, c), inside)
    else:
        j = tl.arange(0, c.pad)[None, :]
        inside = rows & (j < c.half)
        a = tl.load(x + j, inside, 0.0).to(tl.float32)
        b = tl.load(x + c.half + j, inside, 0.0).to(tl.float32)
        tl.store(out + j, stored(a * cos - b * sin, scale, dtype, c), inside)
        tl.store(out + c.half + j, stored(b * cos + a * sin, scale, dtype, c), inside)


@triton.jit
def carry(x, out, rows, scale, dim: tl.constexpr, c: tl.constexpr):
    """Heads that begin at x, [heads, 1], where `rows`, as they are into those at out."""
    for start in range(0, dim, c.width):
        d = start + tl.arange(0, c.width)[None, :]
        inside = rows & (d < dim)
        tl.store(out + d, stored(tl.load(x + d, inside, 0.0).to(tl.float32), scale, out.dtype.element_ty, c), inside)


@triton.jit
def places_of(part, i, page, slot, h):
    """Where heads h of token i begin, and where they go: see `_part`."""
    x, out, x_token, x_head, out_page, out_slot, out_head = part
    return x + i * x_token + h * x_head, out + page * out_page + slot * out_slot + h * out_head


@triton.jit
def rotate_block(part, rest, i, page, slot, b, heads, cos, sin, scale, c: tl.constexpr):
    """Block b of the heads of token i: what turns, and the rest."""
    h = (b * c.block + tl.arange(0, c.block)).to(tl.int64)[:, None]
    x, out = places_of(part, i, page, slot, h)
    turn(x, out, h < heads, cos, sin, scale, c)
    if rest is not None:
        x, out = places_of(rest, i, page, slot, h)
        carry(x, out, h < heads, scale, c.rest, c)


@triton.jit
def carry_block(part, i, page, slot, b, heads, scale, c: tl.constexpr):
    """Block b of the heads of token i, of which nothing turns."""
    h = (b * c.block + tl.arange(0, c.block)).to(tl.int64)[:, None]
    x, out = places_of(part, i, page, slot, h)
    carry(x, out, h < heads, scale, c.dim_v, c)


@triton.jit
def slot_of(i, table):
    """The page and slot of token i, page -1 if it has none; without a table, page i has one slot."""
    if table is None:
        page, slot = i, i * 0
    else:
        requests, places, indptr, indices, batch, entries, pages, page_size = table
        request, place = tl.load(requests + i), tl.load(places + i)
        known = (request >= 0) & (request < batch) & (place >= 0)
        begin, end = tl.load(indptr + request, known, 0), tl.load(indptr + request + 1, known, 0)
        entry = place // page_size  # compared before the sum, which could be beyond int32
        known = known & (begin >= 0) & (entry < end - begin) & (entry < entries - begin)
        page, slot = tl.load(indices + begin + entry, known, -1).to(tl.int64), (place % page_size).to(tl.int64)
        page = tl.where(page < pages, page, -1)
    return page, slot


@triton.jit(do_not_specialize=["batch", "rows", "q_heads", "k_heads"])
def rotate_heads(
    q, q_rest, k, k_rest, v, positions, indptr, turns, cache, cache_row, table, batch, rows, q_heads, k_heads,
    q_scale, k_scale, c: tl.constexpr,
):  # fmt: skip
    """Those blocks of a token's heads that axis 1 of the grid deals to this program."""
    i = tl.program_id(0).to(tl.int64)
    position = position_of(i, positions, indptr, batch)
    cos, sin = cos_sin_at(position, turns, cache, cache_row, rows, c)
    page, slot = slot_of(i, table)
    q_blocks, k_blocks = tl.cdiv(q_heads, c.block), tl.cdiv(k_heads, c.block)
    blocks = q_blocks + k_blocks if v is None else q_blocks + 2 * k_blocks
    for b in range(tl.program_id(1), blocks, tl.num_programs(1)):
        if b < q_blocks:
            rotate_block(q, q_rest, i, i, 0, b, q_heads, cos, sin, q_scale, c)
        elif page >= 0:
            if b < q_blocks + k_blocks:
                rotate_block(k, k_rest, i, page, slot, b - q_blocks, k_heads, cos, sin, k_scale, c)
            elif v is not None:
                carry_block(v, i, page, slot, b - q_blocks - k_blocks, k_heads, k_scale, c)


def _part(x: Tensor, out: Tensor, paged: bool = False) -> tuple[Tensor | int, ...] | None:
    """Heads [tokens, heads, dim] and where they go, [tokens, heads, dim] or [pages, slots, heads, dim], with their
    strides; None if they are empty.
    """
    page, slot, head = out.stride()[:3] if paged else (out.stride(0), 0, out.stride(1))
    return (x, out, x.stride(0), x.stride(1), page, slot, head) if x.shape[-1] else None


def _launch(parts: tuple, places: tuple, table: tuple | None, heads: tuple[int, int], scales: tuple, c: Shape) -> None:
    (q, *_), (positions, indptr, turns, cache) = parts, places
    tokens, (q_heads, k_heads) = len(q[0]), heads
    blocks = triton.cdiv(q_heads, c.block) + triton.cdiv(k_heads, c.block) * (1 if parts[4] is None else 2)
    if not tokens or not blocks:
        return
    # Many tokens fill a GPU, and the angles of each are found once; few are spread over it.
    rotate_heads[(tokens, 1 if tokens > FULL else blocks)](
        *parts,
        positions,
        indptr,
        turns,
        cache,
        0 if cache is None else cache.stride(0),
        table,
        0 if indptr is None else len(indptr) - 1,
        0 if cache is None else len(cache),
        *heads,
        *scales,
        c,
        num_warps=c.num_warps,
    )


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
    parts: list = []
    for x, out in ((q, q_out), (k, k_out)):
        parts += [
            _part(out if x is None else x, out),
            None if x is None else _part(x[..., rotary_dim:], out[..., rotary_dim:]),
        ]
    heads = q_out.shape[1], k_out.shape[1]
    c = shape(rotary_dim // 2, q_out.shape[2] - rotary_dim, max(heads), interleave)
    _launch((*parts, None), (positions, indptr, turns, cos_sin_cache), None, heads, (1.0, 1.0), c)


def rotate_quantized(
    outs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    positions: Tensor,
    cos_sin_cache: Tensor,
    places: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    interleave: bool,
    scales: tuple[float, float],
) -> None:
    """`quire.kernels.rope.rotate_quantized` on a GPU: q, its rest, k, its rest, and v where they are appended to pages.
    Tokens whose place does not exist are skipped, as nobody can be told.
    """
    q, q_rest, k, _, v = parts
    heads, dim_v = (q.shape[1], k.shape[1]), 0 if v is None else v.shape[2]
    mantissa = 3 if outs[0].dtype == torch.float8_e4m3fn else 2
    c = shape(q.shape[2] // 2, q_rest.shape[2], max(heads), interleave, dim_v, mantissa)
    table = None
    if places is not None:
        table = (*places, len(places[2]) - 1, len(places[3]), *outs[2].shape[:2])
    given = [
        None if x is None or out is None else _part(x, out.view(torch.uint8), paged=places is not None and n >= 2)
        for n, (x, out) in enumerate(zip(parts, outs, strict=True))
    ]
    _launch(tuple(given), (positions, None, None, cos_sin_cache), table, heads, scales, c)
