"""A cache that several ranks divide among them by pages, for requests that are too long for one of them.

Every rank has the whole model and computes all tokens, but has a part of the pages of each request. Each computes the
attention over the keys and values that it has, and their partial states are exchanged and merged. In a step in which a
request has several new tokens, keys of earlier tokens are visible to all of them, whatever pages they are in; attention
among the new tokens is causal, and is computed from their keys and values, which every rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.cascade import merge_states
from quire.definition.pages import PageTable
from quire.engine.model import Model
from quire.engine.parallel.ranks import Ranks
from quire.engine.runner import Runner, Wrappers
from quire.prefill import BatchPrefillWithRaggedKVCacheWrapper
from quire.steps import Layer, StepTables, plan, store, upload


class ContextParallelRunner(Runner):
    """A runner whose page `p` is page `p // ranks.size` of rank `p % ranks.size`.

    Args:
        model, num_pages, page_size, backend: as of `Runner`; the pages are those of all ranks.
        ranks: those that call the same methods.

    Raises:
        ValueError: a layer has a window.
    """

    def __init__(self, model: Model, num_pages: int, page_size: int, backend: str = "auto", *, ranks: Ranks) -> None:
        windows = sum(layer.window_left >= 0 for layer in model.layers)
        if windows:
            what = f"{windows} of its layers have a window, and see other tokens than those of whole pages"
            raise ValueError(f"{model.folder} can't be run with context_parallel_size = {ranks.size}: {what}")
        self.ranks: Ranks = ranks
        super().__init__(model, num_pages, page_size, backend)
        empty = torch.empty(0, dtype=torch.uint8, device=model.device)
        self._among_new = {
            heads: BatchPrefillWithRaggedKVCacheWrapper(empty, backend=backend) for heads in self.wrappers
        }
        self._max_count = 1

    def host_tables(
        self, pages: Sequence[Any], lengths: Sequence[int], counts: Sequence[int], pad_to: int = 0
    ) -> StepTables:
        """The tables of a step; its pages are those of this rank with tokens that all new tokens see, and its slots are
        -1 for tokens that other ranks store.
        """
        tables = super().host_tables(pages, lengths, counts, pad_to)
        ends = np.asarray(lengths, dtype=np.int32)
        visible = ends if max(counts) == 1 else ends - np.asarray(counts, dtype=np.int32)
        visible = np.pad(visible, (0, len(tables.lengths) - len(visible)))
        page, offset = tables.slots // self.page_size, tables.slots % self.page_size
        size, rank = self.ranks.size, self.ranks.rank
        slots = torch.where(page % size == rank, page // size * self.page_size + offset, -1)
        return replace(tables, pages=self._own_pages(pages, visible), slots=slots)

    def _own_pages(self, pages: Sequence[Any], visible: np.ndarray) -> PageTable:
        """The pages of this rank with the first tokens of each request, of which `visible` says how many."""
        size, rank = self.ranks.size, self.ranks.rank
        counts = -(-visible // self.page_size)
        last_page_len = np.full(len(counts), self.page_size, dtype=np.int32)
        own: list[np.ndarray] = []
        for index, count in enumerate(counts):
            used = np.frombuffer(pages[index], dtype=np.int32)[:count] if count else np.zeros(0, dtype=np.int32)
            is_own = used % size == rank
            if count and is_own[-1]:
                last_page_len[index] = visible[index] - (count - 1) * self.page_size
            own.append(used[is_own] // size)
        indptr = np.zeros(len(own) + 1, dtype=np.int32)
        np.cumsum([len(each) for each in own], out=indptr[1:])
        on_indptr, on_indices, on_last = (
            upload(each, self.model.device) for each in (indptr, np.concatenate(own), last_page_len)
        )
        return PageTable(on_indptr, on_indices, on_last, self.page_size)

    def plan(self, wrappers: Wrappers, qo_indptr: Tensor, pages: PageTable, slots: Tensor, max_count: int) -> None:
        """`Runner.plan` with the tables of `host_tables`."""
        self._active, self._slots = wrappers, slots
        self._max_count = max_count
        for heads, wrapper in wrappers.items():
            options: Any = {"causal": False, "max_token_per_sequence": max_count}
            plan(wrapper, pages, heads, self.model.dtype, self.kv_dtype, qo_indptr, **options)
            if max_count > 1:
                sizes = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim_qk, heads.head_dim_vo)
                self._among_new[heads].plan(qo_indptr, qo_indptr, *sizes, causal=True, q_data_type=self.model.dtype)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """`Runner.attend`; ValueError if the layer has sinks."""
        if sinks is not None:
            raise ValueError(f"layer {index} has sinks, which are not supported with context_parallel_size")
        store(self.caches[index], k, v, self._slots)
        q = q.contiguous()
        options: Any = {"sm_scale": layer.sm_scale, "logits_soft_cap": layer.logits_soft_cap, "return_lse": True}
        states = self._states_of_all(*self._active[layer.heads].run(q, self.caches[index], **options))
        if self._max_count > 1:
            states = torch.cat([states, _packed(*self._among_new[layer.heads].run(q, k, v, **options))[:, None]], dim=1)
        out, lse = states.split([layer.heads.head_dim_vo, 1], dim=-1)
        return merge_states(out.contiguous(), lse.squeeze(-1).contiguous())[0].to(q.dtype)

    def _states_of_all(self, out: Tensor, lse: Tensor) -> Tensor:
        """The partial states of all ranks, float32 [tokens, ranks, heads, head_dim_vo + 1], with the LSE as the last
        elements.
        """
        own = _packed(out, lse)
        return self.ranks.concatenated(own).unflatten(-1, (self.ranks.size, own.shape[-1])).transpose(1, 2)

    def _cache_pages(self) -> int:
        return -(-self.num_pages // self.ranks.size)


def _packed(out: Tensor, lse: Tensor) -> Tensor:
    return torch.cat([out.float(), lse[..., None]], dim=-1)
