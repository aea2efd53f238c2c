"""Rotary position embedding: pairs of a head's elements are rotated by angles that grow with the position."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quire.definition.pages import as_int32, check_indptr, refuse_first
from quire.kernels.append import append
from quire.kernels.ops import on_triton, operation


@lru_cache(maxsize=64)
def rope_frequencies(
    rotary_dim: int,
    rope_scale: float,
    rope_theta: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: float,
    device: torch.device,
) -> Tensor:
    """The angle by which each pair rotates per position: int64 [rotary_dim / 2], in units of 2**-64 revolutions.

    A pair with at least `high_freq_factor` revolutions within old_context_len positions keeps its frequency, a pair
    with at most `low_freq_factor` revolutions has its frequency divided by rope_scale, and the frequencies of the pairs
    between these two are interpolated linearly. With old_context_len 0, rope_scale divides all frequencies.

    Whole revolutions do not matter, and int64 arithmetic drops them. The product of a position and a frequency is
    therefore exact, up to 2**-65 revolutions per position.
    """
    half = rotary_dim // 2
    frequencies = rope_theta ** -(torch.arange(half, dtype=torch.float64) / half) / (2 * math.pi)
    smooth = (frequencies * old_context_len - low_freq_factor) / (high_freq_factor - low_freq_factor)
    frequencies = torch.lerp(frequencies / rope_scale, frequencies, smooth.clamp(0, 1))
    return ((frequencies - (frequencies + 0.5).floor()) * 2.0**64).long().to(device)


@operation("rotate", "q_out", "k_out")
def rotate(
    q_out: Tensor,
    k_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    positions: Tensor,
    indptr: Tensor | None,
    cos_sin_cache: Tensor | None,
    rotary_dim: int,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: float,
) -> None:
    """Rotate the first rotary_dim elements of each head of q and k into q_out and k_out, and copy the other elements.

    q, k, q_out, k_out: [tokens, heads, head_dim], any strides with the last one 1. If q and k are None, q_out and k_out
    are rotated in place.
    positions: int [tokens], each token's position; with indptr, int [batch_size + 1], it is int [batch_size], the
    position of each request's first token.
    cos_sin_cache: float32 [positions, rotary_dim], cosines before sines. If it is None, `rope_frequencies` of the
    last five arguments gives the angles.
    """
    device, frequencies = q_out.device, None
    if cos_sin_cache is None:
        scaling = (low_freq_factor, high_freq_factor, old_context_len)
        frequencies = rope_frequencies(rotary_dim, rope_scale, rope_theta, *scaling, device)
    if device.type == "cpu":
        check_positions(positions, indptr, cos_sin_cache, len(q_out))
    if on_triton(device):
        from quire.kernels.triton.rope import rotate as rotate_on_gpu

        rotate_on_gpu(q_out, k_out, q, k, positions, indptr, frequencies, cos_sin_cache, rotary_dim, interleave)
        return
    if indptr is not None:
        positions = _token_positions(indptr, positions, len(q_out))
    cos, sin = cos_sin(positions, frequencies, cos_sin_cache)
    for x, out in ((q, q_out), (k, k_out)):
        rotate_pairs(out if x is None else x, out, cos, sin, rotary_dim, interleave)
        if x is not None:
            out[..., rotary_dim:] = x[..., rotary_dim:]


@operation("rotate_quantized", "q_out", "q_nope_out", "k_out", "k_nope_out", "v_out")
def rotate_quantized(
    q_out: Tensor,
    q_nope_out: Tensor,
    k_out: Tensor,
    k_nope_out: Tensor,
    v_out: Tensor | None,
    q: Tensor,
    q_nope: Tensor,
    k: Tensor,
    k_nope: Tensor,
    v: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    requests: Tensor | None,
    append_positions: Tensor | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    interleave: bool,
    q_scale: float,
    k_scale: float,
) -> None:
    """Rotate q and k, all elements of their heads, and write them, q_nope, k_nope and v, times their scales, as fp8.

    Inputs and outputs: [tokens, heads, dim], any strides with the last one 1; q_nope and k_nope may have dim 0.
    With requests and append_positions, int [tokens], and the page table, keys and values are appended to k_out,
    k_nope_out and v_out, [pages, page_size, heads, dim]: token i goes to position append_positions[i] of request
    requests[i]; requests below 0 are skipped.
    v is multiplied by k_scale. Values beyond the range of fp8 become its largest finite value.
    """
    if q_out.device.type == "cpu":
        check_positions(positions, None, cos_sin_cache, len(q))
    table = None
    if requests is not None and append_positions is not None and kv_indptr is not None and kv_indices is not None:
        table = (requests, append_positions, kv_indptr, kv_indices)
    if on_triton(q_out.device):
        from quire.kernels.triton.rope import rotate_quantized as rotate_on_gpu

        outs, inputs = (q_out, q_nope_out, k_out, k_nope_out, v_out), (q, q_nope, k, k_nope, v)
        rotate_on_gpu(outs, inputs, positions, cos_sin_cache, table, interleave, (q_scale, k_scale))
        return
    cos, sin = cos_sin(positions, None, cos_sin_cache)
    q, k = (rotate_pairs(x, torch.empty(x.shape), cos, sin, x.shape[-1], interleave) for x in (q, k))
    q, q_nope = (quantized(x, q_scale, q_out.dtype) for x in (q, q_nope))
    k, k_nope = (quantized(x, k_scale, k_out.dtype) for x in (k, k_nope))
    if table is None:
        k_out.copy_(k)
        k_nope_out.copy_(k_nope)
    else:
        requests, append_positions, kv_indptr, kv_indices = map(as_int32, table)
        where = (requests, append_positions, kv_indptr, kv_indices, torch.ones_like(kv_indptr[1:]))
        append(k_out, k_nope_out, k, k_nope, *where)
        if v is not None and v_out is not None:
            v = quantized(v, k_scale, v_out.dtype)
            append(v_out, v_out[..., :0], v, v[..., :0], *where)
    q_out.copy_(q)
    q_nope_out.copy_(q_nope)


def quantized(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def check_positions(positions: Tensor, indptr: Tensor | None, cache: Tensor | None, tokens: int) -> None:
    """Refuse, on the host, an indptr that leaves the tensors, and positions outside the cache."""
    if indptr is not None:
        check_indptr(indptr, "indptr", tokens, "the number of tokens")
    if cache is not None:
        outside = (positions < 0) | (positions >= len(cache))
        refuse_first(outside, "positions", positions, f"cos_sin_cache has rows for 0 to {len(cache) - 1}")


def _token_positions(indptr: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """int64 [tokens]: the request's offset plus the token's index in the request; 0 for tokens of no request."""
    positions = indptr.new_zeros(tokens, dtype=torch.int64)
    starts = (offsets.long() - indptr[:-1]).repeat_interleave(indptr.diff().long())
    rows = slice(int(indptr[0]), int(indptr[-1]))
    positions[rows] = starts + torch.arange(tokens)[rows]
    return positions


def cos_sin(positions: Tensor, frequencies: Tensor | None, cache: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions' angles, float32 [tokens, 1, rotary_dim / 2] each."""
    if cache is not None:
        cos, sin = cache[positions.long(), None].chunk(2, -1)
        return cos, sin
    assert frequencies is not None
    angles = (positions.long()[:, None, None] * frequencies).double() * (2 * math.pi / 2**64)
    return angles.cos().float(), angles.sin().float()


def rotate_pairs(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleave: bool) -> Tensor:
    """Rotate the pairs in the first rotary_dim elements of x's heads into out, which may be x, and return out."""
    half = rotary_dim // 2
    first, second = slice(half), slice(half, rotary_dim)
    if interleave:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    a, b = x[..., first].float(), x[..., second].float()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out
