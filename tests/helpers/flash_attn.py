"""Quire under the names of `flash_attn_interface`, FlashAttention-3's module.

Names, order and defaults of arguments are the module's own. There are only those that `quire.bench` gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

import quire
from quire.definition.pages import PageTable

__version__ = "3.0"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
) -> Tensor:
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0))
    shape = (q.shape[1], k.shape[1], q.shape[2])
    wrapper.plan(cu_seqlens_q, cu_seqlens_k, *shape, causal=causal, q_data_type=q.dtype, kv_data_type=k.dtype)
    return wrapper.run(q, k, v)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    qv: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    scheduler_metadata: Tensor,
) -> Tensor:
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert scheduler_metadata.tolist() == cache_seqlens.tolist()
    if qv is not None:  # latent keys: k_cache has their second part, v_cache the first
        return _latent(q, qv, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, causal)
    pages = PageTable.from_block_tables(page_table, cache_seqlens, k_cache.shape[1])
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
    wrapper.plan(
        cu_seqlens_q,
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        k_cache.shape[1],
        causal=causal,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    return wrapper.run(q, (k_cache, v_cache))


def _latent(q_pe, q_nope, k_pe, ckv, page_table, lengths, qo_indptr, sm_scale, causal):
    pages = PageTable.from_block_tables(page_table, lengths, ckv.shape[1])
    wrapper = quire.BatchMLAPagedAttentionWrapper(torch.empty(0))
    heads, dim, pe_dim = q_nope.shape[1], q_nope.shape[2], q_pe.shape[2]
    layer = (heads, dim, pe_dim, ckv.shape[1], causal, sm_scale, q_pe.dtype, ckv.dtype)
    wrapper.plan(qo_indptr, pages.indptr, pages.indices, lengths, *layer)
    return wrapper.run(q_nope, q_pe, ckv.squeeze(2), k_pe.squeeze(2))


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    *,
    cu_seqlens_q: Tensor,
    page_size: int,
    causal: bool = False,
) -> Tensor:
    """What `flash_attn_with_kvcache` above expects: the lengths."""
    assert causal
    assert batch_size == len(cache_seqlens) == len(cu_seqlens_q) - 1
    assert int(cache_seqlens.max()) <= max_seqlen_k < int(cache_seqlens.max()) + page_size
    assert num_heads_q % num_heads_kv == 0
    assert (headdim, headdim_v) == (64, 512) or headdim == headdim_v
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return cache_seqlens.clone()
