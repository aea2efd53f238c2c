"""Tables at fixed addresses, which captured CUDA graphs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper


@dataclass(frozen=True, eq=False, slots=True)
class GraphBuffers:
    """Tables that captured graphs read. Wrappers made by `decode` and `prefill` write their plans into them.

    Attributes:
        indptr, last_page_len: int32 [max_requests + 1] and [max_requests].
        indices: int32 [entries], the pages of all requests.
        qo_indptr, mask, mask_indptr: for wrappers of several query tokens per request; mask: uint8, bit-packed.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    qo_indptr: Tensor | None = None
    mask: Tensor | None = None
    mask_indptr: Tensor | None = None

    def decode(self, batch_size: int, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> Any:
        """A decode wrapper for graphs of `batch_size` requests; ValueError if the buffers are too small."""
        self._check(batch_size)
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.indptr[: batch_size + 1],
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last_page_len[:batch_size],
            **options,
        )

    def prefill(self, batch_size: int, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> Any:
        """A prefill wrapper for graphs of `batch_size` requests; ValueError if the buffers are too small or for decode
        only.
        """
        self._check(batch_size)
        if self.qo_indptr is None:
            raise ValueError("these buffers are for decode: qo_indptr is missing")
        return BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            kv_layout,
            use_cuda_graph=True,
            qo_indptr_buf=self.qo_indptr[: batch_size + 1],
            paged_kv_indptr_buf=self.indptr[: batch_size + 1],
            paged_kv_indices_buf=self.indices,
            paged_kv_last_page_len_buf=self.last_page_len[:batch_size],
            custom_mask_buf=self.mask,
            mask_indptr_buf=None if self.mask_indptr is None else self.mask_indptr[: batch_size + 1],
            **options,
        )

    def _check(self, batch_size: int) -> None:
        capacity = len(self.last_page_len)
        if not 0 < batch_size <= capacity:
            raise ValueError(f"a graph of {batch_size} requests does not fit buffers made for {capacity}")
