"""Writing new keys and values into their pages: by torch's indexed assignment, on a GPU by kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.pages import PageTable
from quire.kernels.ops import asked, on_triton, operation


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
    """Write token i's key and value to position positions[i] of request requests[i]; requests below 0 are skipped.

    k_cache, v_cache: [pages, page_size, kv_heads, head_dim], any strides; key, value: [tokens, kv_heads, head_dim] of
    the cache's dtype; requests, positions: int32 [tokens]; the tables: see `quire.definition.PageTable`.
    """
    table = PageTable(kv_indptr, kv_indices, kv_last_page_len, k_cache.shape[1])
    if k_cache.element_size() == 1:  # neither way moves fp8; bytes are bytes
        k_cache, v_cache, key, value = (x.view(torch.uint8) for x in (k_cache, v_cache, key, value))
    if requests.is_cuda and asked("QUIRE_CHECK"):
        _check(requests.cpu(), positions.cpu(), table.to("cpu"), len(k_cache))
    if on_triton(requests.device):
        from quire.kernels.triton.append import append as append_on_gpu

        append_on_gpu(k_cache, v_cache, key, value, requests, positions, table)
        return
    _check(requests, positions, table, len(k_cache))
    kept = requests >= 0
    if not bool(kept.all()):
        key, value, requests, positions = key[kept], value[kept], requests[kept], positions[kept]
    requests, positions = requests.long(), positions.long()
    entry = table.indptr.long()[requests] + positions // table.page_size
    page, slot = table.indices.long()[entry], positions % table.page_size
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache[page, slot] = new


@operation("write", "k_cache", "v_cache")
def write(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write token i's key and value to slot slots[i], which is page * page_size + place; slots below 0 are skipped.

    k_cache, v_cache, key, value: as in `append`; slots: int32 or int64 [tokens]. Slots beyond the cache are refused; on
    a GPU, where nobody can be told, they are skipped too, unless QUIRE_CHECK is 1.
    """
    room = k_cache.shape[0] * k_cache.shape[1]
    if (slots.is_cpu or asked("QUIRE_CHECK")) and len(slots) and int(slots.max()) >= room:
        i = int(slots.argmax())
        raise ValueError(f"slots[{i}] = {int(slots[i])} is out of range: the cache has {room} slots")
    if k_cache.element_size() == 1:
        k_cache, v_cache, key, value = (x.view(torch.uint8) for x in (k_cache, v_cache, key, value))
    if on_triton(slots.device):
        from quire.kernels.triton.append import write as write_on_gpu

        write_on_gpu(k_cache, v_cache, key, value, slots)
        return
    kept = slots >= 0
    if not bool(kept.all()):
        key, value, slots = key[kept], value[kept], slots[kept]
    page, place = slots.long() // k_cache.shape[1], slots.long() % k_cache.shape[1]
    k_cache[page, place] = key
    v_cache[page, place] = value


def _check(requests: Tensor, positions: Tensor, table: PageTable, num_pages: int) -> None:
    """Refuse tokens outside their request's pages, naming the first; those of requests below 0 are nobody's."""
    kept = requests >= 0
    if not bool(kept.any()):
        return
    if int(requests.max()) >= table.batch_size:
        raise ValueError(f"batch_indices names request {int(requests.max())}: there are {table.batch_size}")
    room = table.indptr.diff()[requests.clamp(min=0).long()] * table.page_size
    bad = kept & ((positions < 0) | (positions >= room))
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        where = f"request {int(requests[i])}, which has pages for {int(room[i])} tokens"
        raise ValueError(f"positions[{i}] = {int(positions[i])} is out of range for {where}")
    table.check_pool(num_pages)
