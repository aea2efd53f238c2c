"""A short interface: a paged cache that owns its page tables, and attention over the sequences in it.

cache = PagedKVCache(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16, max_num_pages=128, device="cpu")
decode = BatchDecodeWithPagedKVCache(kv_cache=cache, num_heads=32, kv_heads=8, head_dim=128)
sequence = cache.begin_forward(50)
...  # cache.append(layer, key, value) for each layer
cache.end_forward(sequence, 50)
output = decode.decode(query)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.cache.pool import PagedKVCache
from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.checks import as_dtype, check
from quire.definition.tensors import check_tensors
from quire.prefill import BatchPrefillWithRaggedKVCacheWrapper

__all__ = ["BatchDecodeWithPagedKVCache", "BatchPrefillWithRaggedKVCache", "PagedKVCache"]


class BatchDecodeWithPagedKVCache:
    """Decode attention over the sequences of a `PagedKVCache`.

    Args:
        kv_cache: the cache.
        num_heads: the number of query heads, a multiple of kv_heads.
        kv_heads, head_dim: the cache's number of heads and their size.
        sm_scale: the factor of logits; None: 1/sqrt(head_dim).
        dtype: of queries and outputs; None: the cache's.
        backend: "auto" or a kernel family.

    Raises:
        ValueError: kv_heads or head_dim differ from the cache's.
    """

    def __init__(
        self,
        kv_cache: PagedKVCache,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        sm_scale: float | None = None,
        dtype: torch.dtype | str | None = None,
        backend: str = "auto",
    ) -> None:
        check(kv_heads == kv_cache.num_kv_heads, "kv_heads", kv_heads, f"{kv_cache.num_kv_heads}, as in the cache")
        check(head_dim == kv_cache.head_dim, "head_dim", head_dim, f"{kv_cache.head_dim}, as in the cache")
        self.kv_cache, self.num_heads = kv_cache, num_heads
        self.sm_scale = sm_scale
        self.dtype = kv_cache.data.dtype if dtype is None else as_dtype(dtype)
        workspace = torch.empty(0, dtype=torch.uint8, device=kv_cache.device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, kv_cache.kv_layout, backend=backend)

    def decode(
        self, query: Tensor, layer: int = 0, sequences: Sequence[int] | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of each sequence's last token over all tokens of the sequence.

        Args:
            query: [batch, 1, num_heads, head_dim] or [batch, num_heads, head_dim], one row per sequence.
            layer: the index of the layer in the cache.
            sequences: the sequence of each row; None: all sequences in the cache, oldest first.
            return_lse: whether to return the LSE, too.

        Returns:
            The output in the query's shape, or (output, lse) with lse float32 [batch, num_heads], in base 2.

        Raises:
            ValueError: a query that does not fit the sequences or the layer.
        """
        cache = self.kv_cache
        ids = cache.sequences if sequences is None else list(sequences)
        check_tensors(query=query)
        q = query[:, 0] if query.ndim == 4 and query.shape[1] == 1 else query
        check(
            q.ndim == 3 and len(q) == len(ids), "query.shape", list(query.shape), f"{len(ids)} rows, one per sequence"
        )
        table = cache.page_table(ids)
        self._wrapper.plan(
            table.indptr,
            table.indices,
            table.last_page_len,
            self.num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.page_size,
            q_data_type=self.dtype,
            kv_data_type=cache.data.dtype,
            sm_scale=self.sm_scale,
        )
        out, lse = self._wrapper.run(q, cache.layer(layer), return_lse=True)
        out = out.view(query.shape)
        return (out, lse) if return_lse else out


class BatchPrefillWithRaggedKVCache:
    """Prefill attention over ragged keys and values, which are stored one request after another.

    Args:
        num_heads, kv_heads, head_dim: the layer's query heads and KV heads, and the size of a head.
        sm_scale: the factor of logits; None: 1/sqrt(head_dim).
        dtype: of queries, keys, values and outputs.
        device: the device of all tensors.
        causal: whether tokens see only themselves and tokens before them.
        backend: "auto" or a kernel family.
    """

    def __init__(
        self,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        sm_scale: float | None = None,
        dtype: torch.dtype | str = torch.float16,
        device: torch.device | str = "cpu",
        causal: bool = True,
        backend: str = "auto",
    ) -> None:
        self.num_heads, self.kv_heads = num_heads, kv_heads
        self.head_dim, self.sm_scale = head_dim, sm_scale
        self.dtype, self.causal = as_dtype(dtype), causal
        workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, qo_indptr: Tensor, kv_indptr: Tensor | None = None
    ) -> Tensor:
        """Attention of a batch.

        Args:
            query: [tokens, num_heads, head_dim].
            key, value: [kv_tokens, kv_heads, head_dim].
            qo_indptr: int32 or int64 [batch + 1], where each request starts among the queries.
            kv_indptr: int32 or int64 [batch + 1], where each request starts among the keys; None: qo_indptr.

        Returns:
            [tokens, num_heads, head_dim].

        Raises:
            ValueError: a tensor that does not fit.
        """
        check_tensors(query=query, key=key, value=value)
        self._wrapper.plan(
            qo_indptr,
            qo_indptr if kv_indptr is None else kv_indptr,
            self.num_heads,
            self.kv_heads,
            self.head_dim,
            causal=self.causal,
            sm_scale=self.sm_scale,
            q_data_type=self.dtype,
        )
        out = self._wrapper.run(query, key, value)
        assert isinstance(out, Tensor)
        return out
