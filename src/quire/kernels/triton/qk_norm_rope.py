"""Queries and keys normalised per head and rotated, and keys and values appended to pages, in one launch.

A program computes some heads of the queries, the keys or the values of one token, so that the few tokens of a decode
step, too, are spread over a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher
from quire.kernels.triton.fp8 import convert, mantissa_bits, storage
from quire.kernels.triton.rope import copy_rows, load_cos_sin, load_pairs, load_slot, store_rotated

# Pairs of elements in all heads of a program.
PAIRS = 512


@dataclass(frozen=True)
class HeadConfig:
    """The constants that the kernel is compiled for, of the heads of queries or of those of keys and values."""

    # A query's or key's head has `dim` elements, and a value's head has `dim_v`.
    dim: int
    dim_v: int
    # The number of pairs of a head that are rotated. block_half is this number, padded to a power of two.
    half: int
    block_half: int
    # The number of elements of a head that are not rotated, padded to a power of two; 0 if all are rotated.
    block_rest: int
    # The number of elements of a value's head that are copied at a time.
    block_copy: int
    # The number of heads that a program computes.
    block_heads: int
    interleave: bool
    # This is added to weights.
    weight_bias: float
    # The number of mantissa bits of fp8 outputs; 0: outputs have another dtype.
    mantissa: int

    @property
    def num_warps(self) -> int:
        """One thread for 8 pairs."""
        return min(max(self.block_half * self.block_heads // 256, 1), 8)


@dataclass(frozen=True)
class QkConfig:
    """The constants that the kernel is compiled for."""

    q: HeadConfig
    kv: HeadConfig

    @property
    def num_warps(self) -> int:
        return self.q.num_warps


@lru_cache(maxsize=1024)
def qk_config(
    dim: int, dim_v: int, rotary_dim: int, heads: int, interleave: bool, weight_bias: float, mantissa: int = 0
) -> QkConfig:
    """The constants for heads of these sizes. heads: the larger of the numbers of q's and k's heads."""
    half, rest = rotary_dim // 2, dim - rotary_dim
    block_half, block_rest = triton.next_power_of_2(half), triton.next_power_of_2(rest) if rest else 0
    block_heads = min(max(PAIRS // max(block_half, block_rest // 2), 1), triton.next_power_of_2(heads))
    block_copy = min(triton.next_power_of_2(dim_v), 512)
    blocks = (half, block_half, block_rest, block_copy, block_heads, interleave, weight_bias)
    return QkConfig(HeadConfig(dim, dim_v, *blocks, 0), HeadConfig(dim, dim_v, *blocks, mantissa))


@triton.jit
def norm_rotate(x, out, inside, weight, cos, sin, scale, eps, c: tl.constexpr):
    """Normalise heads that start at x, [heads, 1], unless weight is None, and rotate them into those at `out`."""
    a, b = load_pairs(x, inside, c)
    if c.block_rest:
        d = 2 * c.half + tl.arange(0, c.block_rest)[None, :]
        rest = tl.load(x + d, inside & (d < c.dim), 0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1, keep_dims=True)
        if c.block_rest:
            squares += tl.sum(rest * rest, 1, keep_dims=True)
            rest_weight = tl.load(weight + d, d < c.dim, 0.0).to(tl.float32) + c.weight_bias
        a_weight, b_weight = load_pairs(weight, inside, c)
        rstd = tl.rsqrt(squares / c.dim + eps)
        a, b = a * rstd * (a_weight + c.weight_bias), b * rstd * (b_weight + c.weight_bias)
        if c.block_rest:
            rest = rest * rstd * rest_weight
    store_rotated(a, b, out, inside, cos, sin, scale, c)
    if c.block_rest:
        tl.store(out + d, convert(rest, scale, out.dtype.element_ty, c.mantissa), inside & (d < c.dim))


@triton.jit(do_not_specialize=["cache_len", "batch", "entries", "num_pages", "eps", "k_factor", "v_factor"])
def norm_rotate_append(
    q, k, v, q_weight, k_weight, cos_sin_cache, pos_ids, q_out, k_cache, v_cache, k_scale, v_scale,
    slots, requests, positions, indptr, indices,
    cache_len, batch, entries, num_pages, eps, k_factor, v_factor,
    q_heads, kv_heads, page_size, stride_cache, q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, c: tl.constexpr,
):  # fmt: skip
    """Program (i, n) computes block n of the heads of token i: first those of queries, then of keys, then of values."""
    i, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_q: tl.constexpr = c.q
    of_kv: tl.constexpr = c.kv
    q_blocks, kv_blocks = tl.cdiv(q_heads, of_q.block_heads), tl.cdiv(kv_heads, of_q.block_heads)
    block = tl.where(n < q_blocks, n, (n - q_blocks) % kv_blocks)
    h = (block * of_q.block_heads + tl.arange(0, of_q.block_heads)).to(tl.int64)[:, None]
    position = tl.load(pos_ids + i).to(tl.int64)
    cos, sin = load_cos_sin(position, None, cos_sin_cache, stride_cache, cache_len, of_q)
    if n < q_blocks:
        x, out = q + i * q_token + h * q_head, q_out + i * o_token + h * o_head
        norm_rotate(x, out, h < q_heads, q_weight, cos, sin, 1.0, eps, of_q)
    else:
        if slots is None:
            page, slot = load_slot(i, (requests, positions, indptr, indices, batch, entries, num_pages, page_size))
        else:
            place = tl.load(slots + i).to(tl.int64)
            page, slot = place // page_size, place % page_size
            page = tl.where((place >= 0) & (page < num_pages), page, -1)
        if page >= 0:
            if n < q_blocks + kv_blocks:
                if k_scale is not None:
                    k_factor /= tl.load(k_scale).to(tl.float32)
                x, out = k + i * k_token + h * k_head, k_cache + page * kc_page + slot * kc_token + h * kc_head
                norm_rotate(x, out, h < kv_heads, k_weight, cos, sin, k_factor, eps, of_kv)
            else:
                if v_scale is not None:
                    v_factor /= tl.load(v_scale).to(tl.float32)
                x, out = v + i * v_token + h * v_head, v_cache + page * vc_page + slot * vc_token + h * vc_head
                copy_rows(x, out, h < kv_heads, v_factor, of_kv.dim_v, of_kv)


_launch = SmallLauncher(norm_rotate_append)


def norm_rotate_append_on_gpu(
    tensors: tuple[Tensor, ...],
    weights: tuple[Tensor | None, Tensor | None],
    angles: tuple[Tensor, Tensor],
    slots: Tensor | None,
    table: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    scales: tuple[Tensor | None, Tensor | None],
    numbers: tuple[float, float, float],
    interleave: bool,
    weight_bias: float,
) -> None:
    """`quire.kernels.qk_norm_rope.norm_rotate_append` on a GPU. Tokens without a slot are skipped, as a kernel cannot
    raise.

    Args:
        tensors: q_out, k_cache, v_cache, q, k, v.
        angles: cos_sin_cache, pos_ids.
        table: requests, positions, indptr, indices.
        scales, numbers: those of keys and values; eps and the factors of keys and values.
    """
    q_out, k_cache, v_cache, q, k, v = tensors
    (tokens, q_heads, dim), kv_heads, cos_sin_cache = q.shape, k.shape[1], angles[0]
    rotary_dim, mantissa = cos_sin_cache.shape[1], mantissa_bits(k_cache.dtype)
    c = qk_config(dim, v.shape[2], rotary_dim, max(q_heads, kv_heads), interleave, weight_bias, mantissa)
    blocks = triton.cdiv(q_heads, c.q.block_heads) + 2 * triton.cdiv(kv_heads, c.q.block_heads)
    if not tokens:
        return
    requests, positions, indptr, indices = table or (None, None, None, None)
    batch, entries = (0, 0) if indptr is None or indices is None else (len(indptr) - 1, len(indices))
    counts = len(cos_sin_cache), batch, entries, len(k_cache)
    strides = [n for x in (q, k, v, q_out) for n in x.stride()[:2]] + [n for x in tensors[1:3] for n in x.stride()[:3]]
    pointers = (q, k, v, *weights, *angles, q_out, storage(k_cache), storage(v_cache), *scales)
    places = (slots, requests, positions, indptr, indices)
    sizes = (q_heads, kv_heads, k_cache.shape[1], cos_sin_cache.stride(0), *strides)
    _launch((tokens, blocks), (*pointers, *places), (*counts, *numbers), sizes, c)
