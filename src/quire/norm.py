"""RMS and layer norms: with a residual added before, with fp8 outputs, and of heads before they are rotated and stored.

Names, parameters and meanings are those of `flashinfer.norm`, apart from `fused_qk_rmsnorm_rope_append_paged_kv_cache`.
All arithmetic is in float32: a result is rounded once, to the dtype of the output, and the sum of input and residual is
normalised as it is before it is rounded to the residual's dtype. Transformers' models instead round to the input's
dtype before they multiply by the weight, and again before they rotate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.spec import FLOATS8
from quire.definition.tensors import (
    as_divisor,
    check_floats,
    check_ints,
    check_layout,
    check_no_overlap,
    check_tensor,
    check_tensors,
    float_output,
    refuse_grad,
    split_cache,
)
from quire.kernels.norm import norm
from quire.kernels.qk_norm_rope import norm_rotate_append

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "fused_qk_rmsnorm_rope_append_paged_kv_cache",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_quant",
]


def _check_rows(x: Tensor, eps: float, **weights: Tensor) -> None:
    """Refuse an input that is not rows, or weights, by name, that do not fit it."""
    check_tensors(input=x)
    if x.ndim not in (2, 3):
        raise ValueError(f"input has shape {list(x.shape)}: it must be [tokens, dim] or [tokens, heads, dim]")
    check_floats(x, "input", tuple(x.shape))
    for name, weight in weights.items():
        check_floats(weight, name, (x.shape[-1],), x.device)
    check(0 <= eps < math.inf, "eps", eps, "a number of at least 0")


def _norm(
    out: Tensor | None,
    input: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_bias: float = 0.0,
    beta: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float | Tensor | None = None,
    fp8: bool = False,
) -> Tensor:
    """Check the arguments and compute into `out`, which is allocated if it is None and not of `fp8`."""
    refuse_grad(input=input, residual=residual, out=out)
    _check_rows(input, eps, **({"weight": weight} if beta is None else {"gemma": weight, "beta": beta}))
    divisor, factor = as_divisor(scale, "scale", input.device)
    shape = tuple(input.shape)
    if residual is not None:
        check_tensor(residual, "residual", shape, input.dtype, input.device)
        check_no_overlap(residual, "residual")
    name = "out" if residual is None or out is not input else "input"
    out = float_output(out, name, shape, input, fp8)
    x = None if out is input else input
    norm(out, x, residual, weight, beta, divisor, factor, float(eps), weight_bias, beta is not None)
    return out


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Rows over their root mean square, times weights: ``input / sqrt(mean(input**2) + eps) * weight``.

    Args:
        input: [tokens, dim] or [tokens, heads, dim], whose heads are normalised each on its own; float16, bfloat16 or
            float32, any strides with the last one 1.
        weight: [dim], float16, bfloat16 or float32, whatever the input's dtype is.
        eps: added to the mean of squares.
        out: where to write, of the input's shape and dtype; it may be the input. None: a new tensor.
        enable_pdl: accepted, without effect.

    Returns:
        `out`.

    Raises:
        ValueError: an argument that does not fit; in grad mode, an input or output that requires grad.
    """
    return _norm(out, input, weight, eps)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """`rmsnorm` with weight + 1 in weight's place, as in Gemma."""
    return _norm(out, input, weight, eps, weight_bias=1.0)


def rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    scale: float | Tensor | None,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`rmsnorm` divided by a scale, as fp8.

    Args:
        out: where to write, torch.float8_e4m3fn or float8_e5m2 of the input's shape. Values beyond the range of fp8
            become its largest finite value.
        scale: a positive number, or a tensor with one element on the input's device, never read by the host; None: 1.
        input, weight, eps, enable_pdl: as in `rmsnorm`.

    Raises:
        ValueError: as in `rmsnorm`.
    """
    _norm(out, input, weight, eps, scale=scale, fp8=True)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Add the input to the residual in place, and then write `rmsnorm` of the sum to the input.

    Args:
        input, residual: [tokens, dim] or [tokens, heads, dim] of one dtype, any strides with the last one 1.
        weight, eps, enable_pdl: as in `rmsnorm`.

    Raises:
        ValueError: as in `rmsnorm`.
    """
    check_tensors(residual=residual)
    _norm(input, input, weight, eps, residual=residual)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """`fused_add_rmsnorm` with weight + 1 in weight's place, as in Gemma."""
    check_tensors(residual=residual)
    _norm(input, input, weight, eps, residual=residual, weight_bias=1.0)


def fused_add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: float | Tensor | None,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add the input to the residual in place, and write `rmsnorm` of the sum divided by a scale, as fp8, to `out`.

    `input` is not changed. Arguments and errors are those of `rmsnorm_quant` and `fused_add_rmsnorm`.
    """
    check_tensors(residual=residual)
    _norm(out, input, weight, eps, residual=residual, scale=scale, fp8=True)


def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
    """Rows minus their mean, over their standard deviation: ``(input - mean) / sqrt(variance + eps) * gemma + beta``.

    Args:
        gemma, beta: [dim], float16, bfloat16 or float32.
        eps: added to the variance, which is the mean of squared deviations.
        input: as in `rmsnorm`.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: as in `rmsnorm`.
    """
    check_tensors(beta=beta)
    return _norm(None, input, gemma, eps, beta=beta)


def layernorm_quant(
    out: Tensor, input: Tensor, gemma: Tensor, beta: Tensor, scale: float | Tensor | None, eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    """`layernorm` divided by a scale, as fp8, to `out`. Arguments are those of `layernorm` and `rmsnorm_quant`."""
    check_tensors(beta=beta)
    _norm(out, input, gemma, eps, beta=beta, scale=scale, fp8=True)


def fused_qk_rmsnorm_rope_append_paged_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    *,
    slots: Tensor | None = None,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
    kv_indices: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    is_neox: bool = True,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    kv_layout: str = "NHD",
    q_out: Tensor | None = None,
) -> Tensor:
    """What a layer does between its projections and attention, in one launch: `rmsnorm` of each head of q and k, as in
    Qwen3 and Gemma 3, rotary embedding of both, and appending k and v to a paged cache.

    Args:
        q, k, v: [tokens, num_qo_heads, head_dim], [tokens, num_kv_heads, head_dim] and [tokens, num_kv_heads,
            head_dim_vo], float16, bfloat16 or float32, any strides with the last one 1: views of one packed projection.
        q_weight, k_weight: [head_dim], float16, bfloat16 or float32; None: no norm.
        cos_sin_cache: float32 [positions, rotary_dim], the cosines of the rotary_dim / 2 pairs, then their sines. Only
            the first rotary_dim elements of a head are rotated.
        pos_ids: int32 or int64 [tokens], rows of cos_sin_cache; on a GPU, a token whose row does not exist gets NaN.
        paged_kv_cache: as in `append_paged_kv_cache`, of k's dtype or of torch.float8_e4m3fn or float8_e5m2.
        slots: int32 or int64 [tokens], where each token goes: page * page_size + the index in the page; tokens with a
            negative slot are not appended. None: the next four arguments say it.
        batch_indices, positions, kv_indices, kv_indptr: as in `append_paged_kv_cache`, all of them if slots is None.
        is_neox: whether pair j is elements j and j + rotary_dim / 2 of a head; otherwise it is 2j and 2j + 1.
        eps: as in `rmsnorm`.
        weight_bias: added to the weights: 1 for Gemma, whose weights are stored less 1.
        k_scale, v_scale: for an fp8 cache, what keys and values are divided by before they are rounded, which attention
            then gets as its k_scale and v_scale: positive numbers, or tensors with one element, which the host never
            reads; None: 1. Values beyond the range of fp8 become its largest finite value.
        kv_layout: NHD or HND.
        q_out: where to write the queries, of q's shape and dtype; it may be q. None: a new tensor.

    Returns:
        q_out, normalised and rotated. k and v are not changed.

    Raises:
        ValueError: an argument that does not fit; in grad mode, q or q_out that require grad; on the host also a
            position that is not in cos_sin_cache, or a token outside its request's pages or outside the cache.

    Keys, values and caches that require grad are detached, as by `append_paged_kv_cache`.
    """
    refuse_grad(q=q, q_out=q_out)
    check_tensors(q=q, k=k, v=v)
    check_floats(q, "q", (None, None, None))
    (tokens, _, dim), device = q.shape, q.device
    check_tensor(k, "k", (tokens, None, dim), q.dtype, device)
    check_tensor(v, "v", (tokens, k.shape[1], None), q.dtype, device)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_floats(weight, name, (dim,), device)
    check_tensor(cos_sin_cache, "cos_sin_cache", (None, None), torch.float32, device)
    rotary_dim = cos_sin_cache.shape[1]
    whole = rotary_dim % 2 == 0 and 0 < rotary_dim <= dim
    check(whole, "rotary_dim", rotary_dim, lambda: f"an even number, 2 to head_dim = {dim}")
    check_ints(pos_ids, "pos_ids", tokens, device)
    check(0 <= eps < math.inf, "eps", eps, "a number of at least 0")
    k_cache, v_cache = split_cache(paged_kv_cache, check_layout(kv_layout))
    dtype = k_cache.dtype if k_cache.dtype in FLOATS8 else q.dtype
    check_tensor(k_cache, "paged_kv_cache's keys", (None, None, *k.shape[1:]), dtype, device)
    check_tensor(v_cache, "paged_kv_cache's values", (*k_cache.shape[:2], *v.shape[1:]), dtype, device)
    check_no_overlap(k_cache, "paged_kv_cache's keys")
    check_no_overlap(v_cache, "paged_kv_cache's values")
    table = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    _check_places(slots, table, tokens, device)
    scales = _cache_scale(k_scale, "k_scale", dtype, device), _cache_scale(v_scale, "v_scale", dtype, device)
    q_out = float_output(q_out, "q_out", tuple(q.shape), q)
    norm_rotate_append(
        q_out, k_cache, v_cache, None if q_out is q else q, k, v, q_weight, k_weight, cos_sin_cache, pos_ids,
        slots, batch_indices, positions, kv_indptr, kv_indices,
        scales[0][0], scales[1][0], scales[0][1], scales[1][1], float(eps), float(weight_bias), not is_neox,
    )  # fmt: skip
    return q_out


def _check_places(slots: Tensor | None, table: dict[str, Tensor | None], tokens: int, device: torch.device) -> None:
    """Refuse anything but either slots or a page table with each token's request and position."""
    given = [name for name, x in table.items() if x is not None]
    if slots is not None:
        check(not given, "slots", list(slots.shape), lambda: f"None, where {given[0]} is given")
        check_ints(slots, "slots", tokens, device)
        return
    for name, x in table.items():
        if x is None:
            raise ValueError(f"{name} is None: either slots or {', '.join(table)} must be given")
        check_tensors(**{name: x})
        check_ints(x, name, len(x) if name.startswith("kv_") else tokens, device)


def _cache_scale(
    scale: float | Tensor | None, name: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, float]:
    """A scale of keys or values, see `as_divisor`. Caches that are not fp8 have none."""
    check(scale is None or dtype in FLOATS8, name, scale, lambda: f"None for a cache of {dtype}")
    return as_divisor(scale, name, device)
