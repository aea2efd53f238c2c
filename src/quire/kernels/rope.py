"""Rotary position embedding: pairs of a head's elements turned by angles that grow with the position."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quire.definition.pages import as_int32, check_indptr, refuse_first
from quire.kernels.append import append
from quire.kernels.ops import on_triton, operation


@lru_cache(maxsize=64)
def turns_of(
    rotary_dim: int,
    rope_scale: float,
    rope_theta: float,
    low_freq_factor: float,
    high_freq_factor: float,
    old_context_len: float,
    device: torch.device,
) -> Tensor:
    """How far each pair turns from one position to the next: int64 [rotary_dim / 2], in fractions of 2**64 of a turn.

    A pair that turns at least `high_freq_factor` times within old_context_len keeps its frequency, one that turns at
    most `low_freq_factor` times has it divided by rope_scale, and between the two it goes over in a straight line.

    Whole turns don't show, and int64 drops them: a position times this is exact, up to 2**-65 of a turn per position.
    """
    half = rotary_dim // 2
    turns = rope_theta ** -(torch.arange(half, dtype=torch.float64) / half) / (2 * math.pi)
    kept = (turns * old_context_len - low_freq_factor) / (high_freq_factor - low_freq_factor)
    turns = torch.lerp(turns / rope_scale, turns, kept.clamp(0, 1))
    return ((turns - (turns + 0.5).floor()) * 2.0**64).long().to(device)


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
    """Turn the first rotary_dim elements of the heads of q and k into q_out and k_out, and copy the others.

    q, k, q_out, k_out: [tokens, heads, head_dim], any strides with the last one 1. Without q and k, q_out and k_out are
    turned in place.
    positions: int [tokens]; with indptr int [batch_size + 1], the requests' first positions, int [batch_size].
    cos_sin_cache: float32 [positions, rotary_dim], cosines, then sines; without one the other numbers say how far
    pairs turn (see `turns_of`; old_context_len 0 divides every frequency by rope_scale).
    """
    device, turns = q_out.device, None
    if cos_sin_cache is None:
        scaling = (low_freq_factor, high_freq_factor, old_context_len)
        turns = turns_of(rotary_dim, rope_scale, rope_theta, *scaling, device)
    if device.type == "cpu":
        _check_places(positions, indptr, cos_sin_cache, len(q_out))
    if on_triton(device):
        from quire.kernels.triton.rope import rotate as rotate_on_gpu

        rotate_on_gpu(q_out, k_out, q, k, positions, indptr, turns, cos_sin_cache, rotary_dim, interleave)
        return
    if indptr is not None:
        positions = _positions(indptr, positions, len(q_out))
    cos, sin = _cos_sin(positions, turns, cos_sin_cache)
    for x, out in ((q, q_out), (k, k_out)):
        _turn(out if x is None else x, out, cos, sin, rotary_dim, interleave)
        if x is not None:
            out[..., rotary_dim:] = x[..., rotary_dim:]


@operation("rotate_quantized", "q_out", "q_rest_out", "k_out", "k_rest_out", "v_out")
def rotate_quantized(
    q_out: Tensor,
    q_rest_out: Tensor,
    k_out: Tensor,
    k_rest_out: Tensor,
    v_out: Tensor | None,
    q: Tensor,
    q_rest: Tensor,
    k: Tensor,
    k_rest: Tensor,
    v: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    requests: Tensor | None,
    places: Tensor | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    interleave: bool,
    q_scale: float,
    k_scale: float,
) -> None:
    """Turn q and k whole, and write them, q_rest, k_rest and v, times their scales, as fp8.

    Inputs and outputs: [tokens, heads, dim], any strides with the last one 1; rests may have dim 0. With requests and
    places, int [tokens], and the page table, keys and values go to those places of their requests, in k_out,
    k_rest_out and v_out [pages, page_size, heads, dim]; those of requests below 0 are skipped.
    Numbers that are too large for fp8 become its largest. v has k's scale.
    """
    if q_out.device.type == "cpu":
        _check_places(positions, None, cos_sin_cache, len(q))
    table = None
    if requests is not None and places is not None and kv_indptr is not None and kv_indices is not None:
        table = (requests, places, kv_indptr, kv_indices)
    if on_triton(q_out.device):
        from quire.kernels.triton.rope import rotate_quantized as rotate_on_gpu

        outs, parts = (q_out, q_rest_out, k_out, k_rest_out, v_out), (q, q_rest, k, k_rest, v)
        rotate_on_gpu(outs, parts, positions, cos_sin_cache, table, interleave, (q_scale, k_scale))
        return
    cos, sin = _cos_sin(positions, None, cos_sin_cache)
    q, k = (_turn(x, torch.empty(x.shape), cos, sin, x.shape[-1], interleave) for x in (q, k))
    q, q_rest = (_quantized(x, q_scale, q_out.dtype) for x in (q, q_rest))
    k, k_rest = (_quantized(x, k_scale, k_out.dtype) for x in (k, k_rest))
    if table is None:
        k_out.copy_(k)
        k_rest_out.copy_(k_rest)
    else:
        requests, places, kv_indptr, kv_indices = map(as_int32, table)
        pages = (kv_indptr, kv_indices, torch.ones_like(kv_indptr[1:]))
        append(k_out, k_rest_out, k, k_rest, requests, places, *pages)
        if v is not None and v_out is not None:
            v = _quantized(v, k_scale, v_out.dtype)
            append(v_out, v_out[..., :0], v, v[..., :0], requests, places, *pages)
    q_out.copy_(q)
    q_rest_out.copy_(q_rest)


def _quantized(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def _check_places(positions: Tensor, indptr: Tensor | None, cache: Tensor | None, tokens: int) -> None:
    """Refuse requests that leave the tensors, and positions outside the cache."""
    if indptr is not None:
        check_indptr(indptr, "indptr", tokens, "the number of tokens")
    if cache is not None:
        outside = (positions < 0) | (positions >= len(cache))
        refuse_first(outside, "positions", positions, f"cos_sin_cache has rows for 0 to {len(cache) - 1}")


def _positions(indptr: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """Each token's position: its request's offset and its place in it; 0 for tokens of no request."""
    positions = indptr.new_zeros(tokens, dtype=torch.int64)
    lengths = indptr.diff().long()
    starts = (offsets.long() - indptr[:-1]).repeat_interleave(lengths)
    rows = slice(int(indptr[0]), int(indptr[-1]))
    positions[rows] = starts + torch.arange(tokens)[rows]
    return positions


def _cos_sin(positions: Tensor, turns: Tensor | None, cache: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [tokens, 1, rotary_dim / 2]."""
    if cache is not None:
        cos, sin = cache[positions.long(), None].chunk(2, -1)
        return cos, sin
    assert turns is not None
    angles = (positions.long()[:, None, None] * turns).double() * (2 * math.pi / 2**64)
    return angles.cos().float(), angles.sin().float()


def _turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleave: bool) -> Tensor:
    """Write the first rotary_dim elements of x's heads, turned, to out, which may be x, and return out."""
    half = rotary_dim // 2
    first, second = slice(half), slice(half, rotary_dim)
    if interleave:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    a, b = x[..., first].float(), x[..., second].float()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out
