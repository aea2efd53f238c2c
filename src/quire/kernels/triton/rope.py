"""Rotary position embedding of a batch's queries and keys in one launch, which reads and writes each element once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.triton.fp8 import convert, mantissa_bits

# These are the radians in 2**-32 of a full rotation.
STEP = tl.constexpr(2 * math.pi / 2**32)
# With more tokens than this, one program per token fills a GPU.
FULL = 1024


@dataclass(frozen=True)
class RopeConfig:
    """The constants that the kernel is compiled for."""

    # `half` pairs of a head are rotated, and `rest` elements are copied.
    half: int
    rest: int
    # The number of elements of a value's head.
    dim_v: int
    # This is `half`, padded to a power of two.
    block_half: int
    # The number of heads in a block.
    block_heads: int
    # The number of elements of a head that are copied at a time.
    block_copy: int
    interleave: bool
    # The number of mantissa bits of fp8 outputs; 0: outputs have another dtype.
    mantissa: int

    @property
    def num_warps(self) -> int:
        """One thread for 8 pairs."""
        return min(max(self.block_half * self.block_heads // 256, 1), 8)


@lru_cache(maxsize=1024)
def rope_config(half: int, rest: int, heads: int, interleave: bool, dim_v: int = 0, mantissa: int = 0) -> RopeConfig:
    """The constants for heads of these sizes. heads: the larger of the numbers of q's and k's heads."""
    block_half = triton.next_power_of_2(half)
    block_heads = min(max(1024 // block_half, 1), triton.next_power_of_2(heads))
    block_copy = min(max(2048 // block_heads, 1), triton.next_power_of_2(max(rest, dim_v, 1)))
    return RopeConfig(half, rest, dim_v, block_half, block_heads, block_copy, interleave, mantissa)


@triton.jit
def load_position(i, positions, indptr, batch):
    """The position of token i: positions[i] or, with indptr, its request's offset plus its index in the request. Tokens
    of no request are at position 0, where rotation changes nothing.
    """
    if indptr is None:
        position = tl.load(positions + i).to(tl.int64)
    else:
        # This is a binary search for the number of entries of indptr that are at most i.
        low, high = batch * 0, batch + 1
        while low < high:
            middle = (low + high) // 2
            passed = tl.load(indptr + middle) <= i
            low, high = tl.where(passed, middle + 1, low), tl.where(passed, high, middle)
        known = (low > 0) & (low <= batch)
        start = tl.load(indptr + low - 1, known, 0).to(tl.int64)
        offset = tl.load(positions + low - 1, known, 0).to(tl.int64)
        position = tl.where(known, offset + i - start, 0)
    return position


@triton.jit
def cos_sin(rotation):
    """Cosine and sine of angles in 2**-64 of a full rotation, by a Taylor series around the nearest quarter rotation.
    Libdevice's functions would reduce each angle twice more, and need a stack for angles that never occur.
    """
    angle = (rotation >> 32).to(tl.int32)
    quarter = (angle + (1 << 29)) >> 30
    x = (angle - (quarter << 30)).to(tl.float32) * STEP
    xx = x * x
    sin = x + x * xx * (-1 / 6 + xx * (1 / 120 + xx * (-1 / 5040 + xx * (1 / 362880))))
    cos = 1 + xx * (-1 / 2 + xx * (1 / 24 + xx * (-1 / 720 + xx * (1 / 40320 - xx * (1 / 3628800)))))
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def load_cos_sin(position, inv_freq, cache, stride_cache, cache_len, c: tl.constexpr):
    """Cosines and sines of a position's angles, [1, c.block_half]: the cache's row, NaN if it has none, or computed.

    inv_freq counts 2**-64 of a full rotation. Products that overflow int64 drop full rotations, so that the angles of
    far positions are as exact as those of near ones.
    """
    j = tl.arange(0, c.block_half)
    if cache is not None:
        known = (j < c.half) & (position >= 0) & (position < cache_len)
        row = cache + position * stride_cache
        cos = tl.load(row + j, known, float("nan"))
        sin = tl.load(row + c.half + j, known, float("nan"))
    else:
        cos, sin = cos_sin(position * tl.load(inv_freq + j, j < c.half, 0))
    return cos[None, :], sin[None, :]


@triton.jit
def load_pairs(x, valid, c: tl.constexpr):
    """The pairs of heads that start at x, [heads, 1], as their first and their second elements, float32
    [heads, c.block_half]. Pairs are elements 2j and 2j + 1, or j and j + c.half.
    """
    if c.interleave:
        e = tl.arange(0, 2 * c.block_half)[None, :]
        pairs = tl.load(x + e, valid & (e < 2 * c.half), 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (pairs.shape[0], c.block_half, 2)))
    else:
        j = tl.arange(0, c.block_half)[None, :]
        a = tl.load(x + j, valid & (j < c.half), 0.0).to(tl.float32)
        b = tl.load(x + c.half + j, valid & (j < c.half), 0.0).to(tl.float32)
    return a, b


@triton.jit
def store_rotated(a, b, out, valid, cos, sin, scale, c: tl.constexpr):
    """Rotate the pairs (a, b) of heads, and write them to heads that start at `out`, [heads, 1]."""
    dtype: tl.constexpr = out.dtype.element_ty
    a, b = a * cos - b * sin, b * cos + a * sin
    if c.interleave:
        e = tl.arange(0, 2 * c.block_half)[None, :]
        pairs = tl.reshape(tl.join(a, b), (a.shape[0], 2 * c.block_half))
        tl.store(out + e, convert(pairs, scale, dtype, c.mantissa), valid & (e < 2 * c.half))
    else:
        j = tl.arange(0, c.block_half)[None, :]
        tl.store(out + j, convert(a, scale, dtype, c.mantissa), valid & (j < c.half))
        tl.store(out + c.half + j, convert(b, scale, dtype, c.mantissa), valid & (j < c.half))


@triton.jit
def copy_rows(x, out, valid, scale, dim: tl.constexpr, c: tl.constexpr):
    """Convert heads that start at x, [heads, 1], into those at `out`."""
    for start in range(0, dim, c.block_copy):
        d = start + tl.arange(0, c.block_copy)[None, :]
        inside = valid & (d < dim)
        y = tl.load(x + d, inside, 0.0).to(tl.float32)
        tl.store(out + d, convert(y, scale, out.dtype.element_ty, c.mantissa), inside)


@triton.jit
def pointers(tensors, i, page, slot, h):
    """Where heads h of token i start in the input and in the output; tensors: see `_tensors`."""
    x, out, x_token, x_head, out_page, out_slot, out_head = tensors
    return x + i * x_token + h * x_head, out + page * out_page + slot * out_slot + h * out_head


@triton.jit
def rotate_block(tensors, rest, i, page, slot, b, heads, cos, sin, scale, c: tl.constexpr):
    """Block b of the heads of token i: rotate their first elements, and copy the rest."""
    h = (b * c.block_heads + tl.arange(0, c.block_heads)).to(tl.int64)[:, None]
    x, out = pointers(tensors, i, page, slot, h)
    first, second = load_pairs(x, h < heads, c)
    store_rotated(first, second, out, h < heads, cos, sin, scale, c)
    if rest is not None:
        x, out = pointers(rest, i, page, slot, h)
        copy_rows(x, out, h < heads, scale, c.rest, c)


@triton.jit
def copy_block(tensors, i, page, slot, b, heads, scale, c: tl.constexpr):
    """Block b of the heads of token i's value: copy it."""
    h = (b * c.block_heads + tl.arange(0, c.block_heads)).to(tl.int64)[:, None]
    x, out = pointers(tensors, i, page, slot, h)
    copy_rows(x, out, h < heads, scale, c.dim_v, c)


@triton.jit
def load_slot(i, table):
    """The page and slot of token i; page -1 if it has none. Without a table, token i has page i, of one slot."""
    if table is None:
        page, slot = i, i * 0
    else:
        requests, positions, indptr, indices, batch, entries, pages, page_size = table
        request, position = tl.load(requests + i), tl.load(positions + i)
        known = (request >= 0) & (request < batch) & (position >= 0)
        start, end = tl.load(indptr + request, known, 0), tl.load(indptr + request + 1, known, 0)
        # The entry is compared before it is added, as the sum could overflow int32.
        entry = position // page_size
        known = known & (start >= 0) & (entry < end - start) & (entry < entries - start)
        page, slot = tl.load(indices + start + entry, known, -1).to(tl.int64), (position % page_size).to(tl.int64)
        page = tl.where(page < pages, page, -1)
    return page, slot


@triton.jit(do_not_specialize=["batch", "cache_len", "q_heads", "k_heads"])
def rotate_heads(
    q, q_rest, k, k_rest, v, positions, indptr, inv_freq, cache, stride_cache, table, batch, cache_len, q_heads,
    k_heads, q_scale, k_scale, c: tl.constexpr,
):  # fmt: skip
    """Program (i, n) computes every num_programs(1)-th block of the heads of token i, from block n on."""
    i = tl.program_id(0).to(tl.int64)
    position = load_position(i, positions, indptr, batch)
    cos, sin = load_cos_sin(position, inv_freq, cache, stride_cache, cache_len, c)
    page, slot = load_slot(i, table)
    q_blocks, k_blocks = tl.cdiv(q_heads, c.block_heads), tl.cdiv(k_heads, c.block_heads)
    blocks = q_blocks + k_blocks if v is None else q_blocks + 2 * k_blocks
    for b in range(tl.program_id(1), blocks, tl.num_programs(1)):
        if b < q_blocks:
            rotate_block(q, q_rest, i, i, 0, b, q_heads, cos, sin, q_scale, c)
        elif page >= 0:
            if b < q_blocks + k_blocks:
                rotate_block(k, k_rest, i, page, slot, b - q_blocks, k_heads, cos, sin, k_scale, c)
            elif v is not None:
                copy_block(v, i, page, slot, b - q_blocks - k_blocks, k_heads, k_scale, c)


def _tensors(x: Tensor, out: Tensor, paged: bool = False) -> tuple[Tensor | int, ...] | None:
    """Input [tokens, heads, dim] and output, [tokens, heads, dim] or [pages, slots, heads, dim], with their strides;
    None if they are empty.
    """
    page, slot, head = out.stride()[:3] if paged else (out.stride(0), 0, out.stride(1))
    return (x, out, x.stride(0), x.stride(1), page, slot, head) if x.shape[-1] else None


def _launch(
    tensors: tuple[Any, ...],
    angles: tuple[Any, ...],
    table: tuple[Any, ...] | None,
    heads: tuple[int, int],
    scales: tuple[float, float],
    c: RopeConfig,
) -> None:
    (q, *_, v), (_positions, indptr, _inv_freq, cache) = tensors, angles
    tokens, (q_heads, k_heads) = len(q[0]), heads
    blocks = triton.cdiv(q_heads, c.block_heads) + triton.cdiv(k_heads, c.block_heads) * (1 if v is None else 2)
    if not tokens or not blocks:
        return
    stride_cache, cache_len = (0, 0) if cache is None else (cache.stride(0), len(cache))
    batch = 0 if indptr is None else len(indptr) - 1
    # Many tokens fill a GPU with one program each, which finds the token's angles once. Few are spread over it.
    grid = (tokens, 1 if tokens > FULL else blocks)
    rotate_heads[grid](
        *tensors, *angles, stride_cache, table, batch, cache_len, *heads, *scales, c, num_warps=c.num_warps
    )


def rotate(
    q_out: Tensor,
    k_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    positions: Tensor,
    indptr: Tensor | None,
    inv_freq: Tensor | None,
    cos_sin_cache: Tensor | None,
    rotary_dim: int,
    interleave: bool,
) -> None:
    """`quire.kernels.rope.rotate` on a GPU. inv_freq comes from `quire.kernels.rope.rope_frequencies`."""
    tensors: list[Any] = []
    for x, out in ((q, q_out), (k, k_out)):
        rest = None if x is None else _tensors(x[..., rotary_dim:], out[..., rotary_dim:])
        tensors += [_tensors(out if x is None else x, out), rest]
    heads = q_out.shape[1], k_out.shape[1]
    c = rope_config(rotary_dim // 2, q_out.shape[2] - rotary_dim, max(heads), interleave)
    _launch((*tensors, None), (positions, indptr, inv_freq, cos_sin_cache), None, heads, (1.0, 1.0), c)


def rotate_quantized(
    outs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    positions: Tensor,
    cos_sin_cache: Tensor,
    table: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    interleave: bool,
    scales: tuple[float, float],
) -> None:
    """`quire.kernels.rope.rotate_quantized` on a GPU: q, its rest, k, its rest, and v where they are appended to pages.
    Tokens without a slot are skipped, as a kernel cannot raise.
    """
    q, q_rest, k, _, v = inputs
    heads, dim_v, paged = (q.shape[1], k.shape[1]), 0 if v is None else v.shape[2], table is not None
    bits = mantissa_bits(outs[0].dtype)
    c = rope_config(q.shape[2] // 2, q_rest.shape[2], max(heads), interleave, dim_v, bits)
    sizes = () if table is None else (len(table[2]) - 1, len(table[3]), *outs[2].shape[:2])
    tensors = tuple(
        None if x is None or out is None else _tensors(x, out.view(torch.uint8), paged=paged and n >= 2)
        for n, (x, out) in enumerate(zip(inputs, outs, strict=True))
    )
    angles = positions, None, None, cos_sin_cache
    _launch(tensors, angles, None if table is None else (*table, *sizes), heads, scales, c)
