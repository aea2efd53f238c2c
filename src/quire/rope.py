"""Rotary position embedding of queries and keys, as new tensors or in place.

Names, parameters and meanings are those of `flashinfer.rope`. Under torch.compile, use the functions that return new
tensors if q and k are views of one packed tensor: with operations that write to two views of one tensor, Inductor's
graphs for dynamic shapes have been seen to fail, and to leave a token of k wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.spec import FLOATS
from quire.definition.tensors import (
    check_ints,
    check_no_overlap,
    check_tensor,
    check_tensors,
    fp8_outputs,
    refuse_grad,
    split_heads,
    split_rope_cache,
)
from quire.kernels.rope import rotate, rotate_quantized

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
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]

# low_freq_factor, high_freq_factor and old_context_len without the scaling of Llama 3.1: rope_scale divides all
# frequencies.
_UNSCALED = (1.0, 4.0, 0.0)


def _check_heads(q: Tensor, k: Tensor, rotary_dim: int, names: tuple[str, str] = ("q", "k")) -> None:
    if q.dtype not in FLOATS:
        raise ValueError(f"{names[0]} is {q.dtype}: it must be float32, bfloat16 or float16")
    check_tensor(q, names[0], (None, None, None), q.dtype, q.device)
    check_tensor(k, names[1], (len(q), None, q.shape[-1]), q.dtype, q.device)
    whole = isinstance(rotary_dim, int) and rotary_dim % 2 == 0 and 0 < rotary_dim <= q.shape[-1]
    check(whole, "rotary_dim", rotary_dim, lambda: f"an even number, 2 to head_dim = {q.shape[-1]}")


def _apply(
    q: Tensor,
    k: Tensor,
    positions: tuple[Tensor] | tuple[Tensor, Tensor],
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    scaling: tuple[float, float, float] = _UNSCALED,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by computed angles; positions is (pos_ids,) or (indptr, offsets)."""
    check_tensors(q=q, k=k)
    refuse_grad(q=q, k=k)
    rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
    _check_heads(q, k, rotary_dim)
    *requests, start = positions
    if requests:
        check_tensors(indptr=requests[0], offsets=start)
        check_ints(requests[0], "indptr", len(start) + 1, q.device)
        check_ints(start, "offsets", len(start), q.device)
    else:
        check_ints(start, "pos_ids", len(q), q.device)
    low, high, context = scaling
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        # torch.compile does not trace math.isfinite.
        check(0 < value < math.inf, name, value, "a positive number")
    check(high > low, "high_freq_factor", high, lambda: f"more than low_freq_factor = {low}")
    check(0 <= context < math.inf, "old_context_len", context, "a positive number")
    frequencies = [float(x) for x in (rope_scale, rope_theta, *scaling)]
    indptr = requests[0] if requests else None
    if inplace:
        check_no_overlap(q, "q")
        check_no_overlap(k, "k")
        rotate(q, k, None, None, start, indptr, None, rotary_dim, interleave, *frequencies)
        return q, k
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    rotate(q_out, k_out, q, k, start, indptr, None, rotary_dim, interleave, *frequencies)
    return q_out, k_out


def apply_rope(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate queries and keys by their positions, pair j by ``position / rope_scale * rope_theta**(-2j/rotary_dim)``.

    Angles are computed in fixed point, and are exact at any position.

    Args:
        q, k: float16, bfloat16 or float32 [tokens, heads, head_dim], any strides with the last one 1.
        indptr: int32 or int64 [batch_size + 1]: request b has the tokens indptr[b] to indptr[b + 1]. Tokens of no
            request are copied.
        offsets: int32 or int64 [batch_size], the position of each request's first token.
        rotary_dim: how many elements of a head are rotated, the first ones; None: all. The others are copied.
        interleave: whether pair j is elements 2j and 2j + 1 of a head; otherwise it is j and j + rotary_dim / 2.
        rope_scale: the divisor of positions.
        rope_theta: the base of the frequencies.

    Returns:
        The rotated q and k, of the shapes and dtypes of q and k.

    Raises:
        ValueError: an argument that does not fit; in grad mode, q or k that require grad; on the host also an indptr
            that falls or leaves the tensors.
    """
    return _apply(q, k, (indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_inplace(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """`apply_rope` in place. Under torch.compile, q and k must not be views of one tensor: see `quire.rope`."""
    _apply(q, k, (indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta, inplace=True)


def apply_rope_pos_ids(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`apply_rope` with an explicit position for each token: pos_ids, int32 or int64 [tokens]."""
    return _apply(q, k, (pos_ids,), rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_pos_ids_inplace(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """`apply_rope_pos_ids` in place. Under torch.compile, q and k must not be views of one tensor: see `quire.rope`."""
    _apply(q, k, (pos_ids,), rotary_dim, interleave, rope_scale, rope_theta, inplace=True)


def apply_llama31_rope(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`apply_rope` with the frequencies of Llama 3.1: rope_scale divides only the low ones.

    Args:
        low_freq_factor: the frequency of a pair is low if it makes fewer revolutions than this in old_context_len.
        high_freq_factor: pairs that make more revolutions than this keep their frequency; frequencies between the two
            are interpolated.
        old_context_len: the context length in tokens for which the model was first trained.
        q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta: as in `apply_rope`.
    """
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, (indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta, scaling)


def apply_llama31_rope_inplace(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    """`apply_llama31_rope` in place. Under torch.compile, q and k must not be views of one tensor: see `quire.rope`."""
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    _apply(q, k, (indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta, scaling, inplace=True)


def apply_llama31_rope_pos_ids(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`apply_llama31_rope` with an explicit position for each token: pos_ids, int32 or int64 [tokens]."""
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    return _apply(q, k, (pos_ids,), rotary_dim, interleave, rope_scale, rope_theta, scaling)


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    """`apply_llama31_rope_pos_ids` in place; see `quire.rope` on views of one tensor under torch.compile."""
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    _apply(q, k, (pos_ids,), rotary_dim, interleave, rope_scale, rope_theta, scaling, inplace=True)


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
    """Rotate query and key by the angles of a cache of cosines and sines."""
    check(isinstance(head_size, int) and head_size > 0, "head_size", head_size, "a positive integer")
    check_tensors(query=query, key=key)
    refuse_grad(query=query, key=key)
    q, k = split_heads(query, "query", head_size), split_heads(key, "key", head_size)
    check_tensor(cache, "cos_sin_cache", (None, None), torch.float32, q.device)
    _check_heads(q, k, cache.shape[1], ("query", "key"))
    check_ints(positions, "positions", len(q), q.device)
    angles = (positions, None, cache, cache.shape[1], not is_neox, 1.0, 1.0, *_UNSCALED)
    if inplace:
        check_no_overlap(query, "query")
        check_no_overlap(key, "key")
        rotate(q, k, None, None, *angles)
        return query, key
    q_out, k_out = torch.empty_like(query), torch.empty_like(key)
    rotate(split_heads(q_out, "query", head_size), split_heads(k_out, "key", head_size), q, k, *angles)
    return q_out, k_out


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by angles whose cosines and sines are in a table.

    Args:
        positions: int32 or int64 [tokens], rows of cos_sin_cache; on a GPU, a token whose row does not exist gets NaN.
        query, key: float16, bfloat16 or float32 [tokens, heads * head_size] or [tokens, heads, head_size], any strides
            with the last one 1.
        head_size: elements of a head.
        cos_sin_cache: float32 [positions, rotary_dim], the cosines of the rotary_dim / 2 pairs, then their sines. Only
            the first rotary_dim elements of a head are rotated.
        is_neox: whether pair j is elements j and j + rotary_dim / 2 of a head; otherwise it is 2j and 2j + 1.

    Returns:
        The rotated query and key, of the shapes and dtypes of query and key.

    Raises:
        ValueError: an argument that does not fit; on the host also a position that is not in the cache.
    """
    return _apply_cache(positions, query, key, head_size, cos_sin_cache, is_neox)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """`apply_rope_with_cos_sin_cache` in place; see `quire.rope` on views of one tensor under torch.compile."""
    _apply_cache(positions, query, key, head_size, cos_sin_cache, is_neox, inplace=True)


def _check_nope(
    q: Tensor, k: Tensor, q_nope: Tensor | None, k_nope: Tensor | None, cache: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Refuse RoPE and NoPE elements that do not fit each other; return q_nope and k_nope, with dimension 0 for None."""
    check_tensors(q_rope=q, k_rope=k)
    check_tensor(cache, "cos_sin_cache", (None, None), torch.float32, q.device)
    one_head = isinstance(k, Tensor) and k.ndim == 2
    _check_heads(q, k.unsqueeze(1) if one_head else k, cache.shape[1], ("q_rope", "k_rope"))
    if q.shape[-1] != cache.shape[1]:
        raise ValueError(f"cos_sin_cache has shape {list(cache.shape)}: it must be [any, rope_dim = {q.shape[-1]}]")
    check_ints(positions, "pos_ids", len(q), q.device)
    q_nope = q[..., :0] if q_nope is None else q_nope
    k_nope = k[..., :0] if k_nope is None else k_nope
    check_tensor(q_nope, "q_nope", (*q.shape[:2], None), q.dtype, q.device)
    check_tensor(k_nope, "k_nope", (*k.shape[:-1], q_nope.shape[-1]), q.dtype, q.device)
    return q_nope, k_nope


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotate q_rope and k_rope, and write them, q_nope and k_nope, times their scales, as fp8.

    Args:
        q_rope: [tokens, num_qo_heads, rope_dim], float16, bfloat16 or float32, any strides with the last one 1.
        k_rope: [tokens, num_kv_heads, rope_dim], or [tokens, rope_dim] for a single head, as in MLA.
        q_nope, k_nope: the elements that are not rotated, [..., nope_dim]; None if there are none.
        cos_sin_cache: float32 [positions, rope_dim], as in `apply_rope_with_cos_sin_cache`.
        pos_ids: int32 or int64 [tokens].
        is_neox: as in `apply_rope_with_cos_sin_cache`.
        quantize_dtype: torch.float8_e4m3fn or float8_e5m2; None: the outputs' dtype, or e4m3.
        quant_scale_q, quant_scale_kv: factors applied before rounding. Values beyond the range of fp8 become its
            largest finite value.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: where to write, of the inputs' shapes.
        enable_pdl: accepted, without effect.
        backend: "cuda" or "cutile"; accepted, without effect.

    Returns:
        q_rope, k_rope, q_nope and k_nope as fp8.

    Raises:
        ValueError: an argument that does not fit; on the host also a position that is not in the cache.
    """
    check(backend in ("cuda", "cutile"), "backend", backend, "cuda or cutile")
    refuse_grad(q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope)
    q_nope, k_nope = _check_nope(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids)
    sources = {"q_rope_out": (q_rope, q_rope_out), "k_rope_out": (k_rope, k_rope_out)}
    sources |= {"q_nope_out": (q_nope, q_nope_out), "k_nope_out": (k_nope, k_nope_out)}
    outs, _ = fp8_outputs(sources, quantize_dtype)
    q_out, k_out, q_nope_out, k_nope_out = outs
    k = k_rope
    if k.ndim == 2:
        k, k_nope, k_out, k_nope_out = (x.unsqueeze(1) for x in (k, k_nope, k_out, k_nope_out))
    rotate_quantized(
        q_out, q_nope_out, k_out, k_nope_out, None, q_rope, q_nope, k, k_nope, None, pos_ids, cos_sin_cache,
        None, None, None, None, not is_neox, float(quant_scale_q), float(quant_scale_kv),
    )  # fmt: skip
    return outs[0], outs[1], outs[2], outs[3]


# FlashInfer's older name is kept for its callers.
mla_rope_quantize_fp8 = rope_quantize_fp8


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope_quantize_fp8` that appends keys, and values if there are any, to a paged cache, all in one launch.

    Args:
        v: [tokens, num_kv_heads, head_dim], quantized with quant_scale_kv; None if k_rope is [tokens, rope_dim].
        paged_kv_cache: a pair of fp8 tensors. Keys, k_rope before k_nope, and values, [pages, page_size, num_kv_heads,
            head_dim] or in HND; for k_rope [tokens, rope_dim] the pair is k_nope's [pages, page_size, nope_dim] and
            k_rope's [pages, page_size, rope_dim].
        kv_indices, kv_indptr, batch_indices, positions: int32 or int64, as in `append_paged_kv_cache`; tokens of
            request -1 are skipped.
        page_size: tokens in a page.
        kv_layout: NHD or HND.
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox: as in `rope_quantize_fp8`.
        quantize_dtype, quant_scale_q, quant_scale_kv, q_rope_out, q_nope_out, enable_pdl: likewise.

    Returns:
        q_rope and q_nope as fp8.

    Raises:
        ValueError: an argument that does not fit; on the host also a token outside its request's pages.
    """
    q_nope, k_nope = _check_nope(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids)
    sources = {"q_rope_out": (q_rope, q_rope_out), "q_nope_out": (q_nope, q_nope_out)}
    (q_out, q_nope_out), dtype = fp8_outputs(sources, quantize_dtype)
    check(isinstance(page_size, int) and page_size > 0, "page_size", page_size, "a positive integer")
    k_out, k_nope_out, v_out = split_rope_cache(paged_kv_cache, k_rope, k_nope, v, dtype, page_size, kv_layout)
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        check_ints(x, name, len(q_rope), q_rope.device)
    for name, x in (("kv_indices", kv_indices), ("kv_indptr", kv_indptr)):
        check_tensors(**{name: x})
        check_ints(x, name, len(x), q_rope.device)
    k, k_nope = (x.unsqueeze(1) if x.ndim == 2 else x for x in (k_rope, k_nope))
    rotate_quantized(
        q_out, q_nope_out, k_out, k_nope_out, v_out, q_rope, q_nope, k, k_nope, v, pos_ids, cos_sin_cache,
        batch_indices, positions, kv_indptr, kv_indices, not is_neox, float(quant_scale_q), float(quant_scale_kv),
    )  # fmt: skip
    return q_out, q_nope_out
