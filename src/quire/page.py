"""Appending keys and values to a paged cache, and the tables that this needs.

Names, parameters and meanings are those of `flashinfer.page`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.pages import appended_tokens, page_lengths, table
from quire.definition.tensors import check_layout, check_no_overlap, check_tensor, check_tensors, split_cache
from quire.kernels.append import append

__all__ = ["append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"]


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Append new keys and values to a paged cache. The page tables already include the new tokens.

    Args:
        append_key, append_value: [tokens, num_kv_heads, head_dim], of the cache's dtype.
        batch_indices: int32 or int64 [tokens], each token's request; tokens with a negative request are skipped.
        positions: int32 or int64 [tokens], each token's position in its request.
        paged_kv_cache: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
        kv_indices, kv_indptr, kv_last_page_len: as in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        kv_layout: NHD or HND.

    Raises:
        ValueError: a tensor that does not fit; on the host also a token outside its request's pages.

    Keys, values and caches that require grad are detached, so the cache never becomes part of an autograd graph.
    """
    k, v = split_cache(paged_kv_cache, check_layout(kv_layout))
    check_tensors(append_key=append_key, append_value=append_value)
    tokens, device = len(append_key), k.device
    check_tensor(v, "paged_kv_cache's values", (*k.shape[:3], None), k.dtype, device)
    check_tensor(append_key, "append_key", (None, *k.shape[2:]), k.dtype, device)
    check_tensor(append_value, "append_value", (tokens, *v.shape[2:]), v.dtype, device)
    check_no_overlap(k, "paged_kv_cache's keys")
    check_no_overlap(v, "paged_kv_cache's values")
    batch_indices, positions = _check_tokens(batch_indices, positions, tokens, device)
    append(k, v, append_key, append_value, batch_indices, positions, kv_indptr, kv_indices, kv_last_page_len)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Append new tokens to a paged latent cache (MLA). The page tables already include the new tokens.

    Args:
        append_ckv: [tokens, head_dim_ckv], of the cache's dtype.
        append_kpe: [tokens, head_dim_kpe], of the cache's dtype.
        ckv_cache: [pages, page_size, head_dim_ckv], any strides with the last one 1.
        kpe_cache: [pages, page_size, head_dim_kpe], any strides with the last one 1; both may be slices of one tensor.

    The other arguments and errors are those of `append_paged_kv_cache`.
    """
    for cache, name in ((ckv_cache, "ckv_cache"), (kpe_cache, "kpe_cache")):
        if not isinstance(cache, Tensor) or cache.ndim != 3:
            got = list(cache.shape) if isinstance(cache, Tensor) else cache
            raise ValueError(f"{name} = {got} is not supported: a tensor [pages, page_size, head_dim]")
    assert ckv_cache is not None
    assert kpe_cache is not None
    check_tensors(append_ckv=append_ckv, append_kpe=append_kpe)
    tokens, device = len(append_ckv), ckv_cache.device
    check_tensor(kpe_cache, "kpe_cache", (*ckv_cache.shape[:2], None), ckv_cache.dtype, device)
    check_tensor(append_ckv, "append_ckv", (None, ckv_cache.shape[2]), ckv_cache.dtype, device)
    check_tensor(append_kpe, "append_kpe", (tokens, kpe_cache.shape[2]), kpe_cache.dtype, device)
    check_no_overlap(ckv_cache, "ckv_cache")
    check_no_overlap(kpe_cache, "kpe_cache")
    batch_indices, positions = _check_tokens(batch_indices, positions, tokens, device)
    caches, rows = (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)), (append_ckv.unsqueeze(1), append_kpe.unsqueeze(1))
    append(*caches, *rows, batch_indices, positions, kv_indptr, kv_indices, kv_last_page_len)


def _check_tokens(batch_indices: Tensor, positions: Tensor, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each token's request and position, checked, as int32."""
    batch_indices, positions = table(batch_indices, "batch_indices"), table(positions, "positions")
    check_tensor(batch_indices, "batch_indices", (tokens,), torch.int32, device)
    check_tensor(positions, "positions", (tokens,), torch.int32, device)
    return batch_indices, positions


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The request and the position of each appended token. The appended tokens are the last ones of each request.

    Args:
        append_indptr: int32 or int64 [batch_size + 1], where each request starts among the appended tokens.
        seq_lens: int32 or int64 [batch_size], the requests' lengths in tokens, with the appended ones.
        nnz: the number of entries to return, at least append_indptr[-1]. Entries beyond it have request -1, position 0.
        batch_indices, positions: int32 [nnz], where to write; None: new tensors.

    Returns:
        (batch_indices, positions), int32 [nnz]. Never waits for a device.

    Raises:
        ValueError: a table or an output that does not fit.
    """
    append_indptr, seq_lens = table(append_indptr, "append_indptr"), table(seq_lens, "seq_lens")
    if len(seq_lens) != len(append_indptr) - 1:
        raise ValueError(f"seq_lens has {len(seq_lens)} entries: append_indptr has {len(append_indptr) - 1} requests")
    found = appended_tokens(append_indptr, seq_lens, nnz)
    outputs = (batch_indices, "batch_indices"), (positions, "positions")
    for x, (out, name) in zip(found, outputs, strict=True):
        if out is not None:
            check_tensor(out, name, (nnz,), torch.int32, x.device)
            out.copy_(x)
    return found[0] if batch_indices is None else batch_indices, found[1] if positions is None else positions


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The requests' lengths in tokens from their page tables; a request without pages has length 0.

    Args:
        kv_indptr: int32 or int64 [batch_size + 1], as in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        kv_last_page_len: int32 or int64 [batch_size], as in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        page_size: tokens in a page.

    Returns:
        int32 [batch_size].

    Raises:
        ValueError: a table that does not fit.
    """
    kv_indptr = table(kv_indptr, "kv_indptr")
    kv_last_page_len = table(kv_last_page_len, "kv_last_page_len", len(kv_indptr) - 1)
    return page_lengths(kv_indptr, kv_last_page_len, page_size)
