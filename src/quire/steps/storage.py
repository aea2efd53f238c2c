"""Writing keys and values to the slots of a paged cache, in fp8 where the cache is fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.spec import FLOATS, FLOATS8
from quire.definition.tensors import as_scale, check_cache, check_no_overlap, check_tensor, check_tensors
from quire.kernels.append import quantize as to_fp8
from quire.kernels.append import write, write_quantized

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def store(
    cache: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """Write new keys and values into pages. If the cache is fp8 and they are not, they are divided by their scales.

    Args:
        cache: k and v, NHD views [pages, page_size, num_kv_heads, head_dim].
        key, value: [tokens, num_kv_heads, head_dim].
        slots: int32 or int64 [tokens], see `StepTables`; tokens of slot -1 are skipped.
        k_scale, v_scale: numbers, or tensors with one element or one for each head.

    Raises:
        ValueError: tensors that do not fit the cache, or a slot outside it (checked where slots lie on the host).
    """
    check_cache(cache, "cache")
    check_tensors(key=key, value=value, slots=slots)
    k_cache, v_cache = cache
    dtype, device = k_cache.dtype, k_cache.device
    check_tensor(k_cache, "k_cache", (None,) * 4, dtype, device)
    check_tensor(v_cache, "v_cache", (*k_cache.shape[:3], None), dtype, device)
    check_no_overlap(k_cache, "k_cache")
    check_no_overlap(v_cache, "v_cache")
    check_tensor(slots, "slots", (None,), torch.int32 if slots.dtype == torch.int32 else torch.int64, device)
    quantizes = dtype in FLOATS8 and key.dtype in FLOATS
    given = key.dtype if quantizes else dtype
    check_tensor(key, "key", (len(slots), *k_cache.shape[2:]), given, device)
    check_tensor(value, "value", (len(slots), *v_cache.shape[2:]), given, device)
    if not quantizes:
        write(k_cache, v_cache, key, value, slots)
        return
    heads = k_cache.shape[2]
    scales = as_scale(k_scale, "k_scale", heads), as_scale(v_scale, "v_scale", heads)
    (k_tensor, k_number), (v_tensor, v_number) = ((x, 1.0) if isinstance(x, Tensor) else (None, x) for x in scales)
    write_quantized(k_cache, v_cache, key, value, slots, k_tensor, v_tensor, float(k_number), float(v_number))


def quantize(x: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """Divide x by its scale, saturate it and convert it to an fp8 dtype; x itself if it has the dtype already or the
    dtype is wider than one byte.
    """
    if x.dtype == dtype or dtype.itemsize > 1:
        return x
    return to_fp8(x, dtype, scale)


def fp8_dtype(name: str) -> torch.dtype:
    """The dtype of the names fp8, fp8_e4m3 and fp8_e5m2; ValueError for any other name."""
    if name not in _FP8:
        raise ValueError(f"fp8 dtype {name!r} is not known: {', '.join(_FP8)} are")
    return _FP8[name]
