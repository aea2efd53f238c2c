"""Rotary position embedding of queries and keys, as new tensors or in place.

Names, parameters and meanings are those of `flashinfer.rope`. Under torch.compile use the functions that return new
tensors where q and k are views of one packed tensor: Inductor's graphs for changing shapes have been seen to fail, or
to leave a token of k wrong, with operations that write to two views of one tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.definition.spec import FLOATS, FLOATS8, check
from quire.definition.tensors import check_apart, check_layout, check_tensor, check_tensors, refuse_grad
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
    check(whole, "rotary_dim", rotary_dim, lambda: f"an even number, 2 to head_dim = {q.shape[-1]}")


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
    check_tensors(q=q, k=k)
    refuse_grad(q=q, k=k)
    rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
    _check_heads(q, k, rotary_dim)
    if indptr is None:
        _check_ints(positions, "pos_ids", len(q), q.device)
    else:
        check_tensors(offsets=positions)
        _check_ints(indptr, "indptr", len(positions) + 1, q.device)
        _check_ints(positions, "offsets", len(positions), q.device)
    low, high, context = scaling
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        check(0 < value < math.inf, name, value, "a positive number")  # torch.compile traces no math.isfinite
    check(high > low, "high_freq_factor", high, lambda: f"more than low_freq_factor = {low}")
    check(0 <= context < math.inf, "old_context_len", context, "a positive number")
    q_out, k_out = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
    x, y = (None, None) if inplace else (q, k)
    if inplace:
        check_apart(q, "q")
        check_apart(k, "k")
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
        ValueError: an argument that does not fit; in grad mode, q or k that require grad; on the host also an indptr
            that falls or leaves the tensors.
    """
    check_tensors(indptr=indptr)
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
    """`apply_rope` in place; not for views of one tensor under torch.compile: see `quire.rope`."""
    check_tensors(indptr=indptr)
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
    """`apply_rope_pos_ids` in place; not for views of one tensor under torch.compile: see `quire.rope`."""
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
    check_tensors(indptr=indptr)
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
    """`apply_llama31_rope` in place; not for views of one tensor under torch.compile: see `quire.rope`."""
    scaling = (low_freq_factor, high_freq_factor, old_context_len)
    check_tensors(indptr=indptr)
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
    """`apply_llama31_rope_pos_ids` in place; not for views of one tensor under torch.compile: see `quire.rope`."""
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
    check_tensors(query=query, key=key)
    refuse_grad(query=query, key=key)
    q, k = _split_heads(query, "query", head_size), _split_heads(key, "key", head_size)
    check_tensor(cache, "cos_sin_cache", (None, None), torch.float32, q.device)
    _check_heads(q, k, cache.shape[1], ("query", "key"))
    _check_ints(positions, "positions", len(q), q.device)
    q_out, k_out = (query, key) if inplace else (torch.empty_like(query), torch.empty_like(key))
    x, y = (None, None) if inplace else (q, k)
    if inplace:
        check_apart(query, "query")
        check_apart(key, "key")
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
    """`apply_rope_with_cos_sin_cache` in place; not for views of one tensor under torch.compile: see `quire.rope`."""
    _apply_cache(positions, query, key, head_size, cos_sin_cache, is_neox, inplace=True)


def _check_parts(
    q: Tensor, k: Tensor, q_nope: Tensor | None, k_nope: Tensor | None, cache: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Refuse parts of heads that do not fit each other, and return the other parts, of dimension 0 where None."""
    check_tensors(q_rope=q, k_rope=k)
    check_tensor(cache, "cos_sin_cache", (None, None), torch.float32, q.device)
    one_head = isinstance(k, Tensor) and k.ndim == 2
    _check_heads(q, k.unsqueeze(1) if one_head else k, cache.shape[1], ("q_rope", "k_rope"))
    if q.shape[-1] != cache.shape[1]:
        raise ValueError(f"cos_sin_cache has shape {list(cache.shape)}: it must be [any, rope_dim = {q.shape[-1]}]")
    _check_ints(positions, "pos_ids", len(q), q.device)
    q_nope = q[..., :0] if q_nope is None else q_nope
    k_nope = k[..., :0] if k_nope is None else k_nope
    check_tensor(q_nope, "q_nope", (*q.shape[:2], None), q.dtype, q.device)
    check_tensor(k_nope, "k_nope", (*k.shape[:-1], q_nope.shape[-1]), q.dtype, q.device)
    return q_nope, k_nope


def _fp8_outputs(
    sources: dict[str, tuple[Tensor, Tensor | None]], dtype: torch.dtype | None
) -> tuple[list[Tensor], torch.dtype]:
    """For each name a source and its output, or None: the outputs, new where None, and their dtype."""
    given = [out for _, out in sources.values() if out is not None]
    dtype = (given[0].dtype if given else torch.float8_e4m3fn) if dtype is None else dtype
    check(dtype in FLOATS8, "quantize_dtype", dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
    for name, (x, out) in sources.items():
        if out is not None:
            check_tensor(out, name, tuple(x.shape), dtype, x.device)
            check_apart(out, name)
    return [torch.empty_like(x, dtype=dtype) if out is None else out for x, out in sources.values()], dtype


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
    """Turn the parts of queries and keys that have positions, and write all parts, scaled, as fp8.

    Args:
        q_rope: [tokens, num_qo_heads, rope_dim], float16, bfloat16 or float32, any strides with the last one 1.
        k_rope: [tokens, num_kv_heads, rope_dim], or [tokens, rope_dim] for a single head, as in MLA.
        q_nope, k_nope: what does not turn, [..., other_dim]; None if there is nothing.
        cos_sin_cache: float32 [positions, rope_dim], as in `apply_rope_with_cos_sin_cache`.
        pos_ids: int32 or int64 [tokens].
        is_neox: as in `apply_rope_with_cos_sin_cache`.
        quantize_dtype: torch.float8_e4m3fn or float8_e5m2; where not given that of the outputs, or e4m3.
        quant_scale_q, quant_scale_kv: what is multiplied before rounding. What is too large becomes the largest.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: where to write, of the inputs' shapes.
        enable_pdl, backend: accepted, of no consequence; backend is "cuda" or "cutile".

    Returns:
        q_rope, k_rope, q_nope and k_nope as fp8.

    Raises:
        ValueError: an argument that does not fit; on the host also a position that is not in the cache.
    """
    check(backend in ("cuda", "cutile"), "backend", backend, "cuda or cutile")
    refuse_grad(q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope)
    q_nope, k_nope = _check_parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids)
    sources = {"q_rope_out": (q_rope, q_rope_out), "k_rope_out": (k_rope, k_rope_out)}
    sources |= {"q_nope_out": (q_nope, q_nope_out), "k_nope_out": (k_nope, k_nope_out)}
    outs, _ = _fp8_outputs(sources, quantize_dtype)
    q_out, k_out, q_rest_out, k_rest_out = outs
    k, k_rest = k_rope, k_nope
    if k.ndim == 2:
        k, k_rest, k_out, k_rest_out = (x.unsqueeze(1) for x in (k, k_rest, k_out, k_rest_out))
    rotate_quantized(
        q_out, q_rest_out, k_out, k_rest_out, None, q_rope, q_nope, k, k_rest, None, pos_ids, cos_sin_cache,
        None, None, None, None, not is_neox, float(quant_scale_q), float(quant_scale_kv),
    )  # fmt: skip
    return outs[0], outs[1], outs[2], outs[3]


def mla_rope_quantize_fp8(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rope_quantize_fp8` under its older name."""
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip


def _cache_parts(
    cache: tuple[Tensor, Tensor],
    k: Tensor,
    k_nope: Tensor,
    v: Tensor | None,
    dtype: torch.dtype,
    page_size: int,
    kv_layout: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where k, k_nope and v go, [pages, page_size, heads, dim]: in MLA's two caches, or in those of keys and values."""
    pair = isinstance(cache, (tuple, list)) and len(cache) == 2
    if not pair or not all(isinstance(x, Tensor) for x in cache):
        raise ValueError("paged_kv_cache must be a pair of tensors")
    rope_dim, dim = k.shape[-1], k.shape[-1] + k_nope.shape[-1]
    if k.ndim == 2:
        if v is not None:
            raise ValueError(f"v has shape {list(v.shape)}: it must be None where k_rope has a single head, as in MLA")
        check_tensor(cache[0], "ckv_cache", (None, page_size, k_nope.shape[-1]), dtype, k.device)
        check_tensor(cache[1], "kpe_cache", (len(cache[0]), page_size, rope_dim), dtype, k.device)
        return cache[1].unsqueeze(2), cache[0].unsqueeze(2), None
    if v is None:
        raise ValueError("v is None: it must be given where k_rope is [tokens, num_kv_heads, rope_dim]")
    heads = k.shape[1]
    check_tensor(v, "v", (len(k), heads, None), k.dtype, k.device)
    rows = (page_size, heads) if check_layout(kv_layout) == "NHD" else (heads, page_size)
    check_tensor(cache[0], "k_cache", (None, *rows, dim), dtype, k.device)
    check_tensor(cache[1], "v_cache", (len(cache[0]), *rows, v.shape[-1]), dtype, k.device)
    k_cache, v_cache = (x if kv_layout == "NHD" else x.transpose(1, 2) for x in cache)
    return k_cache[..., :rope_dim], k_cache[..., rope_dim:], v_cache


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
    """`rope_quantize_fp8` whose keys, and values, go to their places in a paged cache, all in one launch.

    Args:
        v: [tokens, num_kv_heads, head_dim], quantized with quant_scale_kv; None if k_rope is [tokens, rope_dim].
        paged_kv_cache: a pair of fp8 tensors. Keys, k_rope before k_nope, and values, [pages, page_size, num_kv_heads,
            head_dim] or in HND; for k_rope [tokens, rope_dim] the pair is k_nope's [pages, page_size, other_dim] and
            k_rope's [pages, page_size, rope_dim].
        kv_indices, kv_indptr, batch_indices, positions: int32 or int64, as in `append_paged_kv_cache`; tokens of
            request -1 are skipped.
        page_size: tokens in a page.
        kv_layout: NHD or HND.
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
            q_rope_out, q_nope_out, enable_pdl: as in `rope_quantize_fp8`.

    Returns:
        q_rope and q_nope as fp8.

    Raises:
        ValueError: an argument that does not fit; on the host also a token outside its request's pages.
    """
    q_nope, k_nope = _check_parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids)
    sources = {"q_rope_out": (q_rope, q_rope_out), "q_nope_out": (q_nope, q_nope_out)}
    (q_out, q_rest_out), dtype = _fp8_outputs(sources, quantize_dtype)
    check(isinstance(page_size, int) and page_size > 0, "page_size", page_size, "a positive integer")
    k_out, k_rest_out, v_out = _cache_parts(paged_kv_cache, k_rope, k_nope, v, dtype, page_size, kv_layout)
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        _check_ints(x, name, len(q_rope), q_rope.device)
    for name, x in (("kv_indices", kv_indices), ("kv_indptr", kv_indptr)):
        check_tensors(**{name: x})
        _check_ints(x, name, len(x), q_rope.device)
    k, k_rest = (x.unsqueeze(1) if x.ndim == 2 else x for x in (k_rope, k_nope))
    rotate_quantized(
        q_out, q_rest_out, k_out, k_rest_out, v_out, q_rope, q_nope, k, k_rest, v, pos_ids, cos_sin_cache,
        batch_indices, positions, kv_indptr, kv_indices, not is_neox, float(quant_scale_q), float(quant_scale_kv),
    )  # fmt: skip
    return q_out, q_rest_out
