"""Writing new keys and values into their pages."""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl

from quire.definition.pages import PageTable


@triton.jit
def _copy(cache, new, page, within, i, c_page, c_token, c_head, n_token, n_head, heads, dim, block: tl.constexpr):
    """One token's heads, [heads, dim], to their place."""
    for start in range(0, heads * dim, block):
        e = start + tl.arange(0, block)
        h, d = e // dim, e % dim
        x = tl.load(new + i * n_token + h * n_head + d, e < heads * dim)
        tl.store(cache + page * c_page + within * c_token + h * c_head + d, x, e < heads * dim)


@triton.jit(do_not_specialize=["batch", "entries", "num_pages"])
def _append(
    k_cache, v_cache, key, value, requests, positions, indptr, indices, batch, entries, num_pages,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
    heads, dim_k, dim_v, page_size, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    request, position = tl.load(requests + i), tl.load(positions + i)
    known = (request >= 0) & (request < batch) & (position >= 0)
    begin, end = tl.load(indptr + request, known, 0), tl.load(indptr + request + 1, known, 0)
    place = position // page_size  # compared before the sum, which could be beyond int32
    known = known & (begin >= 0) & (place < end - begin) & (place < entries - begin)
    page = tl.load(indices + begin + place, known, -1).to(tl.int64)
    if (page >= 0) & (page < num_pages):
        within = position % page_size
        _copy(k_cache, key, page, within, i, kc_page, kc_token, kc_head, k_token, k_head, heads, dim_k, block)
        _copy(v_cache, value, page, within, i, vc_page, vc_token, vc_head, v_token, v_head, heads, dim_v, block)


@triton.jit(do_not_specialize=["num_pages"])
def _write(
    k_cache, v_cache, key, value, slots, num_pages,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
    heads, dim_k, dim_v, page_size, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    page, within = slot // page_size, slot % page_size
    if (slot >= 0) & (page < num_pages):
        _copy(k_cache, key, page, within, i, kc_page, kc_token, kc_head, k_token, k_head, heads, dim_k, block)
        _copy(v_cache, value, page, within, i, vc_page, vc_token, vc_head, v_token, v_head, heads, dim_v, block)


def _strides(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    return *k_cache.stride()[:3], *v_cache.stride()[:3], *key.stride()[:2], *value.stride()[:2]


def _sizes(key: Tensor, value: Tensor) -> tuple[int, int, int]:
    return key.shape[1], key.shape[2], value.shape[2]


def write(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """`quire.kernels.append.write` on a GPU."""
    if not len(key):
        return
    strides, sizes = _strides(k_cache, v_cache, key, value), _sizes(key, value)
    _write[(len(key),)](
        k_cache, v_cache, key, value, slots.contiguous(), len(k_cache), *strides, *sizes, k_cache.shape[1], 1024
    )


def append(
    k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, requests: Tensor, positions: Tensor, table: PageTable
) -> None:
    """`quire.kernels.append.append` on a GPU: tokens whose place does not exist are skipped, as nobody can be told."""
    if not len(key):
        return
    _append[(len(key),)](
        k_cache,
        v_cache,
        key,
        value,
        requests.contiguous(),
        positions.contiguous(),
        table.indptr.contiguous(),
        table.indices.contiguous(),
        table.batch_size,
        len(table.indices),
        len(k_cache),
        *_strides(k_cache, v_cache, key, value),
        *_sizes(key, value),
        table.page_size,
        1024,
    )
