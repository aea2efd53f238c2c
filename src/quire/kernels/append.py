"""Appending keys and values to a paged cache: by torch's indexed assignment on the CPU, by Triton kernels on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.pages import PageTable
from quire.kernels.ops import env_flag, on_triton, operation


@operation("append", "k_cache", "v_cache")
def append(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    requests: Tensor,
    positions: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write the key and value of token i to position positions[i] of request requests[i], if requests[i] >= 0.

    k_cache, v_cache: [pages, page_size, kv_heads, head_dim], any strides; key, value: [tokens, kv_heads, head_dim] of
    the cache's dtype; requests, positions: int32 [tokens]; kv_indptr, kv_indices, kv_last_page_len: see
    `quire.definition.PageTable`.
    """
    table = PageTable(kv_indptr, kv_indices, kv_last_page_len, k_cache.shape[1])
    # torch and Triton do not copy all fp8 types, but they copy bytes.
    if k_cache.element_size() == 1:
        k_cache, v_cache, key, value = (x.view(torch.uint8) for x in (k_cache, v_cache, key, value))
    if requests.is_cuda and env_flag("QUIRE_CHECK"):
        _check(requests.cpu(), positions.cpu(), table.to("cpu"), len(k_cache))
    if on_triton(requests.device):
        from quire.kernels.triton.append import append as append_on_gpu

        append_on_gpu(k_cache, v_cache, key, value, requests, positions, table)
        return
    _check(requests, positions, table, len(k_cache))
    key, value, requests, positions = _where(requests >= 0, key, value, requests.long(), positions.long())
    entry = table.indptr.long()[requests] + positions // table.page_size
    page, slot = table.indices.long()[entry], positions % table.page_size
    k_cache[page, slot], v_cache[page, slot] = key, value


@operation("write", "k_cache", "v_cache")
def write(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the key and value of token i to slot slots[i], page * page_size + the index in the page, if slots[i] >= 0.

    k_cache, v_cache, key, value: as in `append`; slots: int32 or int64 [tokens]. Slots beyond the cache raise a
    ValueError on the host, and on a GPU if QUIRE_CHECK is set; otherwise the GPU's kernel skips them.
    """
    check_slots(slots, k_cache)
    if k_cache.element_size() == 1:
        k_cache, v_cache, key, value = (x.view(torch.uint8) for x in (k_cache, v_cache, key, value))
    if on_triton(slots.device):
        from quire.kernels.triton.append import write as write_on_gpu

        write_on_gpu(k_cache, v_cache, key, value, slots)
        return
    key, value, slots = _where(slots >= 0, key, value, slots.long())
    page, slot = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[page, slot], v_cache[page, slot] = key, value


@operation("write_quantized", "k_cache", "v_cache")
def write_quantized(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_divisor: float,
    v_divisor: float,
) -> None:
    """`write` to a cache of fp8, of keys and values in float32, bfloat16 or float16, which are divided by their scales
    and saturate.

    k_scale, v_scale: tensors with one element, or one for each head; None: k_divisor or v_divisor is the scale.
    """
    check_slots(slots, k_cache)
    scales = k_divisor if k_scale is None else k_scale, v_divisor if v_scale is None else v_scale
    if on_triton(slots.device):
        from quire.kernels.triton.append import write_quantized as write_on_gpu

        write_on_gpu(k_cache, v_cache, key, value, slots, *scales)
        return
    for cache, x, scale in zip((k_cache, v_cache), (key, value), scales, strict=True):
        x, places = _where(slots >= 0, x, slots.long())
        page, slot = places // cache.shape[1], places % cache.shape[1]
        cache.view(torch.uint8)[page, slot] = quantize(x, cache.dtype, scale).view(torch.uint8)


def quantize(x: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """Divide x, [..., heads, head_dim], by its scale, a number or a tensor with one element or one for each head;
    saturate it and convert it to an fp8 dtype.
    """
    if isinstance(scale, Tensor):
        scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def check_slots(slots: Tensor, cache: Tensor) -> None:
    """Refuse slots beyond a cache [pages, page_size, ...], on the host, and on a GPU if QUIRE_CHECK is set."""
    num_slots = cache.shape[0] * cache.shape[1]
    if (slots.is_cpu or env_flag("QUIRE_CHECK")) and len(slots) and int(slots.max()) >= num_slots:
        i = int(slots.argmax())
        raise ValueError(f"slots[{i}] = {int(slots[i])} is out of range: the cache has {num_slots} slots")


def _where(valid: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The rows of some tensors for which `valid` holds."""
    return tensors if bool(valid.all()) else tuple(x[valid] for x in tensors)


def _check(requests: Tensor, positions: Tensor, table: PageTable, num_pages: int) -> None:
    """Refuse tokens outside their request's pages, naming the first. Tokens of requests below 0 are not checked."""
    valid = requests >= 0
    if not bool(valid.any()):
        return
    if int(requests.max()) >= table.batch_size:
        raise ValueError(f"batch_indices names request {int(requests.max())}: there are {table.batch_size}")
    capacity = table.indptr.diff()[requests.clamp(min=0).long()] * table.page_size
    bad = valid & ((positions < 0) | (positions >= capacity))
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        where = f"request {int(requests[i])}, which has pages for {int(capacity[i])} tokens"
        raise ValueError(f"positions[{i}] = {int(positions[i])} is out of range for {where}")
    table.check_pool(num_pages)
