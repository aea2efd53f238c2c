"""Planned wrappers: one for each kind of layer, planned in a step when a layer first needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.integrations.sglang.tables import PageBuffers, QueryRows
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.steps import workspace

# This size counts bytes.
_WORKSPACE = 128 << 20


class WrapperPool:
    """The wrappers of a backend, by kind of layer. Steps and CUDA graphs of all sizes take turns with them.

    A graph reads the tables that the backend keeps, and memory of its own, so that later plans do not change it. All
    wrappers share one float workspace, as they run one after another.

    Args:
        page_size, kv_dtype: those of the pool of keys and values.
        invariant: whether the bits of a request must not depend on its batch.
    """

    def __init__(self, device: torch.device, page_size: int, kv_dtype: torch.dtype, invariant: bool) -> None:
        self.page_size, self.kv_dtype = page_size, kv_dtype
        self._invariant = invariant
        self._workspace = workspace(device, _WORKSPACE)
        self._wrappers: dict[Any, Any] = {}

    def take(self, kind: type, which: Any) -> Any:
        """The wrapper of a kind of layer, ready to be planned."""
        wrapper = self._wrappers.get((kind, which))
        if wrapper is None:
            wrapper = self._wrappers[kind, which] = kind(self._workspace, batch_invariant=self._invariant or None)
        wrapper.forget_cuda_graph()
        return wrapper


class StepWrappers:
    """The wrappers of a step.

    Args:
        pool: where they are from.
        rows: the step's query rows.
        tables: the page tables of the pool's slots and, if there are such, of the slots of windows.
    """

    def __init__(self, pool: WrapperPool, rows: QueryRows, tables: list[PageBuffers]) -> None:
        self._pool, self._rows = pool, rows
        self._tables = tables
        self._planned: dict[Any, Any] = {}

    def paged(self, q: Tensor, k: Tensor, v: Tensor, windows: bool) -> Any:
        """The wrapper over pages for q [tokens, heads, head_dim] and k, v [pages, page_size, heads, head_dim].

        Args:
            windows: whether the pages are of the slots of windows.
        """
        heads = q.shape[1], k.shape[2], q.shape[2]
        which = (windows, *heads, v.shape[3], q.dtype, self._rows.mask is None)
        wrapper = self._planned.get(which)
        if wrapper is None:
            wrapper = self._planned[which] = self._pool.take(BatchPrefillWithPagedKVCacheWrapper, which)
            wrapper.plan(
                self._rows.qo_indptr,
                *self._tables[windows],
                *heads,
                self._pool.page_size,
                v.shape[3],
                packed_custom_mask=self._rows.mask,
                causal=True,
                q_data_type=q.dtype,
                kv_data_type=self._pool.kv_dtype,
                max_token_per_sequence=self._rows.max_q_len,
            )
        return wrapper

    def ragged(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        """The wrapper over the new keys alone: q, k and v [tokens, heads, head_dim]."""
        heads = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        which = (*heads, q.dtype, causal)
        wrapper = self._planned.get(which)
        if wrapper is None:
            wrapper = self._planned[which] = self._pool.take(BatchPrefillWithRaggedKVCacheWrapper, which)
            rows = self._rows.qo_indptr
            options: dict[str, Any] = {"q_data_type": q.dtype, "max_token_per_sequence": self._rows.max_q_len}
            wrapper.plan(rows, rows, *heads, causal=causal, **options)
        return wrapper
