"""Rotary position embedding of queries and keys, in place or not.

Names, parameters and meanings are those of `flashinfer.rope`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.attention.spec import FLOATS, check
from quire.attention.tensors import check_tensor
from quire.kernels.rope import rotate

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]

_PLAIN = (1.0, 4.0, 0.0)  # no context whose frequencies are to be kept: rope_scale divides all of them


def _check_ints(x: Tensor, name: str, length: int, device: torch.device) -> None:
    """Refuse all but an int32 or int64 vector of a length."""
    dtype = torch.int64 if isinstance(x, Tensor) and x.dtype == torch.int64 else torch.int32
    check_tensor(x, name, (length,), dtype, device)


def _check_heads(q: Tensor, k: Tensor, rotary_dim: int, names: tuple[str, str] = ("q", "k")) -> None:
    if q.dtype not in FLOATS:
        raise ValueError(f"{names[0]} is {q.dtype}: it must be float32, bfloat16 or float16")
    check_tensor(q, names[0], (None, None, None), q.dtype, q.device)
    check_tensor(k, names[1], (len(q), None, q.shape[-1]), q.dtype, q.device)
    whole = isinstance(rotary_dim, int) and rotary_dim % 2 == 0 and 0 < rotary_dim <= q.shape[-1]
    check(whole, "rotary_dim", rotary_dim, f"an even number, 2 to head_dim = {q.shape[-1]}")


def _apply(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    indptr: Tensor | None,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    scaling: tuple[float, float, float] = _PLAIN,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn q and k by computed angles: at positions or, with indptr, from the requests' offsets on."""
    rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
    _check_heads(q, k, rotary_dim)
    if indptr is None:
        _check_ints(positions, "pos_ids", len(q), q.device)
    else:
        _check_ints(indptr, "indptr", len(positions) + 1, q.device)
        _check_ints(positions, "offsets", len(positions), q.device)
    low, high, context = scaling
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        check(math.isfinite(value) and value > 0, name, value, "a positive number")
    check(high > low, "high_freq_factor", high, f"more than low_freq_factor = {low}")
    check(math.isfinite(context) and context >= 0, "old_context_len", context, "a positive number")
    q_out, k_out = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
    x, y = (None, None) if inplace else (q, k)
    scale, theta, low, high, context = (float(n) for n in (rope_scale, rope_theta, low, high, context))
    rotate(q_out, k_out, x, y, positions, indptr, None, rotary_dim, interleave, scale, theta, low, high, context)
    return q_out, k_out


def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions, pair j by ``position / rope_scale * rope_theta**(-2j/rotary_dim)``.

    Angles are computed, and stay exact at any position.

    Args:
        q, k: float16, bfloat16 or float32 [tokens, heads, head_dim], any strides with the last one 1.
        indptr: int32 or int64 [batch_size + 1]: request b has the tokens indptr[b] to indptr[b + 1]. Tokens of no
            request are copied.
        offsets: int32 or int64 [batch_size], the position of each request's first token.
        rotary_dim: how many elements of a head are turned, the first ones; all where not given. The others are copied.
        interleave: pairs are elements 2j and 2j + 1 of a head; otherwise j and j + rotary_dim / 2.
        rope_scale: what positions are divided by.
        rope_theta: the base of the frequencies.

    Returns:
        q and k, turned, of their shapes and dtypes.

    Raises:
        ValueError: an argument that does not fit; on the host also an indptr that falls or leaves the tensors.
    """
    return _apply(q, k, offsets, indptr, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope`, of which q and k themselves are the results."""
    _apply(q, k, offsets, indptr, rotary_dim, interleave, rope_scale, rope_theta, inplace=True)


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """`apply_rope` with each token's position given: pos_ids, int32 or int64 [tokens]."""
    return _apply(q, k, pos_ids, None, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope_pos_ids`, of which q and k themselves are the results."""
    _apply(q, k, pos_ids, None, rotary_dim, interleave, rope_scale, rope_theta, inplace=True)


def apply_llama31_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """`apply_rope` with the frequencies of Llama 3.1, of which rope_scale divides only the low ones.

    Args:
        low_freq_factor: pairs that turn less often than this within old_context_len are low.
        high_freq_factor: pairs that turn more often than this keep their frequency; those between the two are scaled
            in part.
        old_context_len: how many tokens the model was first trained for.
        q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta: as in `apply_rope`.
    """
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, offsets, indptr, rotary_dim, interleave, rope_scale, rope_theta, scaling)


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope`, of which q and k themselves are the results."""
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    _apply(q, k, offsets, indptr, rotary_dim, interleave, rope_scale, rope_theta, scaling, inplace=True)


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:
    """`apply_llama31_rope` with each token's position given: pos_ids, int32 or int64 [tokens]."""
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, pos_ids, None, rotary_dim, interleave, rope_scale, rope_theta, scaling)


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope_pos_ids`, of which q and k themselves are the results."""
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    _apply(q, k, pos_ids, None, rotary_dim, interleave, rope_scale, rope_theta, scaling, inplace=True)


def _split_heads(x: Tensor, name: str, head_size: int) -> Tensor:
    """[tokens, heads, head_size] of a tensor that may have a token's heads in one row."""
    if x.ndim not in (2, 3) or x.shape[-1] % head_size or (x.ndim == 3 and x.shape[-1] != head_size):
        wanted = f"[tokens, heads * {head_size}] or [tokens, heads, {head_size}]"
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be {wanted}")
    return x if x.ndim == 3 else x.unflatten(-1, (x.shape[-1] // head_size, head_size))


def _apply_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cache: Tensor,
    is_neox: bool,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn query and key by the angles of a cache."""
    check(isinstance(head_size, int) and head_size > 0, "head_size", head_size, "a positive integer")
    q, k = _split_heads(query, "query", head_size), _split_heads(key, "key", head_size)
    check_tensor(cache, "cos_sin_cache", (None, None), torch.float32, q.device)
    _check_heads(q, k, cache.shape[1], ("query", "key"))
    _check_ints(positions, "positions", len(q), q.device)
    q_out, k_out = (query, key) if inplace else (torch.empty_like(query), torch.empty_like(key))
    x, y = (None, None) if inplace else (q, k)
    q, k = _split_heads(q_out, "query", head_size), _split_heads(k_out, "key", head_size)
    rotate(q, k, x, y, positions, None, cache, cache.shape[1], not is_neox, 1.0, 1.0, *_PLAIN)
    return q_out, k_out


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by angles whose cosines and sines are given.

    Args:
        positions: int32 or int64 [tokens], rows of cos_sin_cache; on a GPU, a token whose row does not exist gets NaN.
        query, key: float16, bfloat16 or float32 [tokens, heads * head_size] or [tokens, heads, head_size], any strides
            with the last one 1.
        head_size: elements of a head.
        cos_sin_cache: float32 [positions, rotary_dim], the cosines of the rotary_dim / 2 pairs, then their sines. Only
            the first rotary_dim elements of a head are turned.
        is_neox: pairs are elements j and j + rotary_dim / 2 of a head; otherwise 2j and 2j + 1.

    Returns:
        query and key, turned, of their shapes and dtypes.

    Raises:
        ValueError: an argument that does not fit; on the host also a position that is not in the cache.
    """
    return _apply_cache(positions, query, key, head_size, cos_sin_cache, is_neox)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """`apply_rope_with_cos_sin_cache`, of which query and key themselves are the results."""
    _apply_cache(positions, query, key, head_size, cos_sin_cache, is_neox, inplace=True)
