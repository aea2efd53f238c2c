"""The tensors of a call: views of caches that do not depend on the layout, and checks against the spec.

Layouts (as in FlashInfer's tutorial on KV layouts): NHD is [..., tokens, heads, head_dim], HND is [..., heads, tokens,
head_dim]. Kernels get NHD views, with any strides whose last one is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.spec import FLOATS, FLOATS8, AttentionSpec

LAYOUTS = ("NHD", "HND")


def check_layout(kv_layout: str) -> str:
    check(kv_layout in LAYOUTS, "kv_layout", kv_layout, "NHD or HND")
    return kv_layout


def check_tensors(**arguments: Any) -> None:
    """Refuse arguments, by name, that are not tensors."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}: it must be a tensor")


def check_optional(**arguments: Any) -> None:
    """Refuse arguments, by name, that are neither None nor tensors."""
    check_tensors(**{name: x for name, x in arguments.items() if x is not None})


def check_cache(cache: Any, name: str) -> None:
    """Refuse a paged cache that is neither one tensor nor a pair of tensors."""
    if isinstance(cache, Tensor):
        return
    kind = f"a {type(cache).__name__}"
    if isinstance(cache, (tuple, list)):
        if len(cache) == 2 and isinstance(cache[0], Tensor) and isinstance(cache[1], Tensor):
            return
        kind += f" of {', '.join(type(x).__name__ for x in cache) or 'nothing'}"
    raise ValueError(f"{name} is {kind}: it must be one 5-D tensor or a pair (k, v) of 4-D tensors")


def split_cache(cache: Tensor | tuple[Tensor, Tensor], kv_layout: str) -> tuple[Tensor, Tensor]:
    """K and V pages as two views [pages, page_size, heads, head_dim].

    Args:
        cache: a pair of 4-D tensors, or one 5-D tensor with K and V at dim 1. With pages of one token, the dimension
            page_size may be omitted: a pair of 3-D tensors, or one 4-D tensor.
        kv_layout: NHD: [pages, page_size, heads, head_dim]; HND: [pages, heads, page_size, head_dim].
    """
    check_cache(cache, "paged_kv_cache")
    if isinstance(cache, Tensor):
        if cache.ndim not in (4, 5) or cache.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache has shape {list(cache.shape)}: one tensor must be 5-D with 2 at dim 1, or 4-D with "
                "pages of one token"
            )
        k, v = cache.unbind(1)
    else:
        k, v = cache
        if k.ndim not in (3, 4) or v.ndim != k.ndim:
            raise ValueError(
                f"paged_kv_cache has shapes {list(k.shape)} and {list(v.shape)}: a pair must be 4-D each, or 3-D with "
                "pages of one token"
            )
    if k.ndim == 3:
        return k.unsqueeze(1), v.unsqueeze(1)
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def split_rope_cache(
    cache: tuple[Tensor, Tensor],
    k: Tensor,
    k_nope: Tensor,
    v: Tensor | None,
    dtype: torch.dtype,
    page_size: int,
    kv_layout: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where fused RoPE writes k_rope (`k`), k_nope and v: views [pages, page_size, heads, dim] of a checked cache.

    Args:
        cache: keys, k_rope before k_nope, and values, in a layout; for k [tokens, rope_dim], as in MLA, the pair
            of k_nope's [pages, page_size, nope_dim] and k_rope's [pages, page_size, rope_dim], and v is None.
    """
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


def as_nhd(x: Tensor, kv_layout: str, name: str) -> Tensor:
    """A view [tokens, heads, head_dim] of a key or value tensor in either layout."""
    check_tensors(**{name: x})
    if x.ndim != 3:
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be 3-D ({kv_layout})")
    return x if kv_layout == "NHD" else x.transpose(0, 1)


def split_heads(x: Tensor, name: str, head_size: int) -> Tensor:
    """A view [tokens, heads, head_size] of a tensor [tokens, heads * head_size] or [tokens, heads, head_size]."""
    if x.ndim not in (2, 3) or x.shape[-1] % head_size or (x.ndim == 3 and x.shape[-1] != head_size):
        wanted = f"[tokens, heads * {head_size}] or [tokens, heads, {head_size}]"
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be {wanted}")
    return x if x.ndim == 3 else x.unflatten(-1, (x.shape[-1] // head_size, head_size))


def check_tensor(
    x: Tensor, name: str, shape: tuple[int | None, ...], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Refuse a tensor whose shape (None: any size), dtype (None: any floating-point type), device or last stride does
    not fit.
    """
    if not isinstance(x, Tensor):
        check_tensors(**{name: x})
    fits = x.ndim == len(shape)
    # The lengths have been compared, so zip need not be strict.
    for size, want in zip(x.shape, shape):  # noqa: B905
        fits = fits and (want is None or size == want)
    if not fits:
        wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be {wanted}")
    if dtype is None:
        check(x.is_floating_point(), f"{name}.dtype", x.dtype, "a floating-point type")
    elif x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}: it must be {dtype}")
    if x.device != device:
        raise ValueError(f"{name} lies on {x.device}: it must lie on {device}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} has strides {list(x.stride())}: the last one must be 1")


def refuse_grad(**tensors: Tensor | None) -> None:
    """Refuse tensors, by name, whose gradients would be lost: those that require grad while grad mode is on.

    Operations that only store tensors, and arguments that are weights of a layer (sinks, scales), detach them instead.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} requires grad, but Quire computes no gradients: call it under torch.no_grad() or "
                f"torch.inference_mode(), or pass {name}.detach()"
            )


def check_no_overlap(x: Tensor, name: str) -> None:
    """Refuse an output whose strides give two elements the same address."""
    if x.is_contiguous() or not x.numel():
        return
    dims = [(stride, i, n) for i, (stride, n) in enumerate(zip(x.stride(), x.shape, strict=True)) if n > 1]
    for stride, i, _ in dims:
        span = sum((n - 1) * inner for inner, j, n in dims if inner < stride or (inner == stride and j > i))
        if stride <= span:
            raise ValueError(f"{name} has strides {list(x.stride())}: elements overlap, and are to be written")


def as_scale(scale: float | Tensor | None, name: str, heads: int) -> float | Tensor:
    """A scale as a number (1 for None), or as a detached tensor with one element or one per head. ValueError for
    anything else.
    """
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor):
        fits = scale.numel() in (1, heads)
        check(fits, name, list(scale.shape), lambda: f"a number, or one for each of {heads} heads")
        check(scale.is_floating_point(), f"{name}.dtype", scale.dtype, "torch.float32")
        return scale.detach() if scale.requires_grad else scale
    allowed = "a number, or a tensor with one, or one for each of {} heads"
    check(isinstance(scale, Real), name, scale, lambda: allowed.format(heads))
    return scale


def as_divisor(scale: float | Tensor | None, name: str, device: torch.device) -> tuple[Tensor | None, float]:
    """A scale of fp8 outputs as (divisor, factor), which outputs are divided and multiplied by: (the tensor, 1) for a
    tensor with one element, which the host never reads; (None, 1 / scale) for a number; (None, 1) for None.
    """
    divisor = as_scale(scale, name, 1)
    if isinstance(divisor, Tensor):
        if divisor.device != device:
            raise ValueError(f"{name} lies on {divisor.device}: it must lie on {device}")
        return divisor, 1.0
    check(0 < divisor < math.inf, name, divisor, "a positive number")
    return None, 1.0 / divisor


def check_ints(x: Tensor, name: str, length: int, device: torch.device) -> None:
    """Refuse anything but an int32 or int64 vector of this length."""
    dtype = torch.int64 if isinstance(x, Tensor) and x.dtype == torch.int64 else torch.int32
    check_tensor(x, name, (length,), dtype, device)


def float_output(out: Tensor | None, name: str, shape: tuple[int, ...], x: Tensor, fp8: bool = False) -> Tensor:
    """An output of x's dtype and device, or with `fp8` of an fp8 type: checked or, if None and not fp8, made."""
    if out is None and not fp8:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if not isinstance(out, Tensor):
        raise ValueError(f"{name} is a {type(out).__name__}: it must be a tensor")
    if fp8:
        check(out.dtype in FLOATS8, f"{name}.dtype", out.dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
    check_tensor(out, name, shape, out.dtype if fp8 else x.dtype, x.device)
    check_no_overlap(out, name)
    return out


def check_floats(x: Tensor, name: str, shape: tuple[int | None, ...], device: torch.device | None = None) -> None:
    """Refuse a tensor that is not float32, bfloat16 or float16, or does not fit as `check_tensor` says."""
    check_tensors(**{name: x})
    check(x.dtype in FLOATS, f"{name}.dtype", x.dtype, "float32, bfloat16 or float16")
    check_tensor(x, name, shape, x.dtype, x.device if device is None else device)


def as_slopes(slopes: Sequence[float] | Tensor | None) -> tuple[float, ...]:
    """ALiBi slopes as a tuple of numbers, empty for None. Waits for the device of a tensor."""
    if isinstance(slopes, Tensor):
        slopes = slopes.flatten().tolist()
    return () if slopes is None else tuple(slopes)


def check_lse(lse: Tensor | None, shape: torch.Size, base: str, layout: str, device: torch.device) -> None:
    """Refuse an unknown base or layout, and an lse that is not contiguous float32 of `shape`, which is [tokens, heads],
    or of its transpose for the layout "HN".
    """
    check(base in ("log2", "ln"), "lse_base", base, "log2 or ln")
    check(layout in ("NH", "HN"), "lse_layout", layout, "NH or HN")
    refuse_grad(lse=lse)
    if lse is not None:
        check_tensor(lse, "lse", tuple(shape) if layout == "NH" else (shape[1], shape[0]), torch.float32, device)
        check(lse.is_contiguous(), "lse.stride()", lse.stride(), "contiguous")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, device: torch.device) -> None:
    """Check q [tokens, heads, dim], and k and v [..., heads, dim] with equal leading sizes, against a spec."""
    check_tensor(q, "q", (None, spec.num_qo_heads, spec.head_dim_qk), spec.q_dtype, device)
    lead = tuple(k.shape[:-2])
    check_tensor(k, "k", (*lead, spec.num_kv_heads, spec.head_dim_qk), spec.kv_dtype, device)
    check_tensor(v, "v", (*lead, spec.num_kv_heads, spec.head_dim_vo), spec.kv_dtype, device)


def outputs(
    tokens: int, spec: AttentionSpec, device: torch.device, out: Tensor | None, lse: Tensor | None, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`out` [tokens, heads, head_dim_vo] and, if wanted, `lse` float32 [tokens, heads]: checked, or allocated."""
    shape = (tokens, spec.num_qo_heads, spec.head_dim_vo)
    refuse_grad(out=out, lse=lse)
    if out is None:
        out = torch.empty(shape, dtype=spec.o_dtype, device=device)
    else:
        check_tensor(out, "out", shape, spec.o_dtype, device)
        check_no_overlap(out, "out")
    if lse is not None:
        check_tensor(lse, "lse", shape[:2], torch.float32, device)
        check_no_overlap(lse, "lse")
    elif want_lse:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
    return out, lse


def fp8_outputs(
    sources: dict[str, tuple[Tensor, Tensor | None]], dtype: torch.dtype | None
) -> tuple[list[Tensor], torch.dtype]:
    """fp8 outputs, checked or allocated, and their dtype.

    Args:
        sources: for each argument's name an input and its output, which has the input's shape; None: allocate it.
        dtype: float8_e4m3fn or float8_e5m2; None: that of the first output, or float8_e4m3fn.
    """
    present = [out for _, out in sources.values() if out is not None]
    dtype = (present[0].dtype if present else torch.float8_e4m3fn) if dtype is None else dtype
    check(dtype in FLOATS8, "quantize_dtype", dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
    for name, (x, out) in sources.items():
        if out is not None:
            check_tensor(out, name, tuple(x.shape), dtype, x.device)
            check_no_overlap(out, name)
    return [torch.empty_like(x, dtype=dtype) if out is None else out for x, out in sources.values()], dtype
