"""Kernels that write new keys and values into their pages, one program per token."""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl

from quire.definition.pages import PageTable


@triton.jit
def _copy(cache, new, page, slot, i, c_page, c_token, c_head, n_token, n_head, heads, dim, block: tl.constexpr):
    """Copy one token's heads, [heads, dim], to its slot."""
    for start in range(0, heads * dim, block):
        e = start + tl.arange(0, block)
        h, d = e // dim, e % dim
        x = tl.load(new + i * n_token + h * n_head + d, e < heads * dim)
        tl.store(cache + page * c_page + slot * c_token + h * c_head + d, x, e < heads * dim)


@triton.jit(do_not_specialize=["batch", "entries", "num_pages"])
def append_tokens(
    k_cache, v_cache, key, value, requests, positions, indptr, indices, batch, entries, num_pages,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
    heads, dim_k, dim_v, page_size, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    request, position = tl.load(requests + i), tl.load(positions + i)
    known = (request >= 0) & (request < batch) & (position >= 0)
    start, end = tl.load(indptr + request, known, 0), tl.load(indptr + request + 1, known, 0)
    entry = position // page_size  # compared before it is added, as the sum could overflow int32
    known = known & (start >= 0) & (entry < end - start) & (entry < entries - start)
    page = tl.load(indices + start + entry, known, -1).to(tl.int64)
    if (page >= 0) & (page < num_pages):
        slot = position % page_size
        _copy(k_cache, key, page, slot, i, kc_page, kc_token, kc_head, k_token, k_head, heads, dim_k, block)
        _copy(v_cache, value, page, slot, i, vc_page, vc_token, vc_head, v_token, v_head, heads, dim_v, block)


@triton.jit(do_not_specialize=["num_pages"])
def write_tokens(
    k_cache, v_cache, key, value, slots, num_pages,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
    heads, dim_k, dim_v, page_size, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(slots + i).to(tl.int64)
    page, slot = place // page_size, place % page_size
    if (place >= 0) & (page < num_pages):
        _copy(k_cache, key, page, slot, i, kc_page, kc_token, kc_head, k_token, k_head, heads, dim_k, block)
        _copy(v_cache, value, page, slot, i, vc_page, vc_token, vc_head, v_token, v_head, heads, dim_v, block)


def _strides_and_sizes(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The kernels' last arguments, from kc_page to the block size."""
    strides = *k_cache.stride()[:3], *v_cache.stride()[:3], *key.stride()[:2], *value.stride()[:2]
    return *strides, key.shape[1], key.shape[2], value.shape[2], k_cache.shape[1], 1024


def write(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """`quire.kernels.append.write` on a GPU."""
    if not len(key):
        return
    sizes = _strides_and_sizes(k_cache, v_cache, key, value)
    write_tokens[(len(key),)](k_cache, v_cache, key, value, slots.contiguous(), len(k_cache), *sizes)


def append(
    k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, requests: Tensor, positions: Tensor, table: PageTable
) -> None:
    """`quire.kernels.append.append` on a GPU. Tokens without a slot are skipped, as a kernel cannot raise."""
    if not len(key):
        return
    tables = (x.contiguous() for x in (requests, positions, table.indptr, table.indices))
    counts = table.batch_size, len(table.indices), len(k_cache)
    sizes = _strides_and_sizes(k_cache, v_cache, key, value)
    append_tokens[(len(key),)](k_cache, v_cache, key, value, *tables, *counts, *sizes)
