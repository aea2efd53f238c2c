"""Kernels that write new keys and values into their pages, one program per token."""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl

from quire.definition.pages import PageTable
from quire.kernels.gpu.launch import has_dependent_launch, wait_for_launch_before
from quire.kernels.triton.fp8 import convert, mantissa_bits, storage


@triton.jit
def copy_token(
    k_cache, v_cache, key, value, i, page, slot, known,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
    heads, dim_k, dim_v, block: tl.constexpr,
):  # fmt: skip
    """Copy the key and value of token i, [heads, dim] each, to its slot, if it is known. No load waits for another."""
    k_cache += page * kc_page + slot * kc_token
    v_cache += page * vc_page + slot * vc_token
    for start in range(0, heads * tl.maximum(dim_k, dim_v), block):
        e = start + tl.arange(0, block)
        k_inside, v_inside = e < heads * dim_k, e < heads * dim_v
        k = tl.load(key + i * k_token + e // dim_k * k_head + e % dim_k, k_inside)
        v = tl.load(value + i * v_token + e // dim_v * v_head + e % dim_v, v_inside)
        tl.store(k_cache + e // dim_k * kc_head + e % dim_k, k, k_inside & known)
        tl.store(v_cache + e // dim_v * vc_head + e % dim_v, v, v_inside & known)


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
    # The entry is compared before it is added, as the sum could overflow int32.
    entry = position // page_size
    known = known & (start >= 0) & (entry < end - start) & (entry < entries - start)
    page = tl.load(indices + start + entry, known, -1).to(tl.int64)
    copy_token(
        k_cache, v_cache, key, value, i, page, position % page_size, (page >= 0) & (page < num_pages),
        kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
        heads, dim_k, dim_v, block,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages"])
def write_tokens(
    k_cache, v_cache, key, value, slots, num_pages,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
    heads, dim_k, dim_v, page_size, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    wait_for_launch_before(pdl)
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(slots + i).to(tl.int64)
    page = place // page_size
    copy_token(
        k_cache, v_cache, key, value, i, page, place % page_size, (place >= 0) & (page < num_pages),
        kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
        heads, dim_k, dim_v, block,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages", "k_divisor", "v_divisor"])
def write_tokens_quantized(
    k_cache, v_cache, key, value, slots, k_scale, v_scale, num_pages, k_divisor, v_divisor,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, k_token, k_head, v_token, v_head,
    heads, dim_k, dim_v, page_size, block: tl.constexpr, k_step: tl.constexpr, v_step: tl.constexpr,
    mantissa: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """`write_tokens` to an fp8 cache. Head h is divided by element h * k_step of k_scale or, if None, by k_divisor."""
    wait_for_launch_before(pdl)
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(slots + i).to(tl.int64)
    page, slot = place // page_size, place % page_size
    known = (place >= 0) & (page < num_pages)
    k_cache += page * kc_page + slot * kc_token
    v_cache += page * vc_page + slot * vc_token
    for start in range(0, heads * tl.maximum(dim_k, dim_v), block):
        e = start + tl.arange(0, block)
        k_inside, v_inside = e < heads * dim_k, e < heads * dim_v
        k = tl.load(key + i * k_token + e // dim_k * k_head + e % dim_k, k_inside, 0).to(tl.float32)
        v = tl.load(value + i * v_token + e // dim_v * v_head + e % dim_v, v_inside, 0).to(tl.float32)
        k = tl.div_rn(k, _divisor(k_scale, e // dim_k * k_step, k_inside, k_divisor, k))
        v = tl.div_rn(v, _divisor(v_scale, e // dim_v * v_step, v_inside, v_divisor, v))
        k, v = convert(k, 1.0, k_cache.dtype.element_ty, mantissa), convert(v, 1.0, v_cache.dtype.element_ty, mantissa)
        tl.store(k_cache + e // dim_k * kc_head + e % dim_k, k, k_inside & known)
        tl.store(v_cache + e // dim_v * vc_head + e % dim_v, v, v_inside & known)


@triton.jit
def _divisor(scale, offsets, inside, divisor, like):
    """What elements are divided by, in the shape of `like`."""
    if scale is None:
        return tl.zeros_like(like) + divisor
    else:
        return tl.load(scale + offsets, inside, 1.0).to(tl.float32)


def _strides_and_sizes(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The kernels' last arguments, from kc_page to the block size."""
    strides = *k_cache.stride()[:3], *v_cache.stride()[:3], *key.stride()[:2], *value.stride()[:2]
    return *strides, key.shape[1], key.shape[2], value.shape[2], k_cache.shape[1], 1024


def write(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """`quire.kernels.append.write` on a GPU."""
    if not len(key):
        return
    sizes = _strides_and_sizes(k_cache, v_cache, key, value)
    pdl = has_dependent_launch(key.device)
    options = {"launch_pdl": True} if pdl else {}
    write_tokens[(len(key),)](k_cache, v_cache, key, value, slots.contiguous(), len(k_cache), *sizes, pdl, **options)


def write_quantized(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
) -> None:
    """`quire.kernels.append.write_quantized` on a GPU."""
    if not len(key):
        return
    sizes, mantissa = _strides_and_sizes(k_cache, v_cache, key, value), mantissa_bits(k_cache.dtype)
    scales = [x.contiguous() if isinstance(x, Tensor) else None for x in (k_scale, v_scale)]
    divisors = [1.0 if isinstance(x, Tensor) else float(x) for x in (k_scale, v_scale)]
    steps = [int(x is not None and x.numel() > 1) for x in scales]
    pdl = has_dependent_launch(key.device)
    options = {"launch_pdl": True} if pdl else {}
    caches = storage(k_cache), storage(v_cache)
    write_tokens_quantized[(len(key),)](
        *caches, key, value, slots.contiguous(), *scales, len(k_cache), *divisors, *sizes, *steps, mantissa, pdl,
        **options,
    )  # fmt: skip


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
