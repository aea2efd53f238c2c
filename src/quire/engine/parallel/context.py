"""A cache that several ranks divide among them by pages, for requests that are too long for one of them.

Every rank has the whole model and computes all tokens, but has a part of the pages of each request. Each computes the
attention over the keys and values that it has, and their partial states are exchanged and merged. In a step in which a
request has several new tokens, keys of earlier tokens are visible to all of them, whatever pages they are in; attention
among the new tokens is causal, and is computed from their keys and values, which every rank has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.cascade import merge_states
from quire.definition.pages import PageTable
from quire.engine.model import Model
from quire.engine.parallel.ranks import Ranks
from quire.engine.runner import Runner, Wrappers
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.steps import Layer, plan, store


class _ContextWrappers(NamedTuple):
    """Wrappers for the earlier tokens, which are in pages, and for the new ones."""

    pages: BatchPrefillWithPagedKVCacheWrapper
    new_tokens: BatchPrefillWithRaggedKVCacheWrapper

    def forget_cuda_graph(self) -> None:
        """As of each wrapper."""
        self.pages.forget_cuda_graph()
        self.new_tokens.forget_cuda_graph()


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

    def new_wrappers(self) -> Wrappers:
        """For each kind of heads, a wrapper for the pages and one for the attention among new tokens."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.model.device)
        return {
            heads: _ContextWrappers(pages, BatchPrefillWithRaggedKVCacheWrapper(empty, backend=self._backend))
            for heads, pages in super().new_wrappers().items()
        }

    def plan(self, wrappers: Wrappers, qo_indptr: Tensor, pages: PageTable, slots: Tensor, max_count: int) -> None:
        """`Runner.plan` with the tables of all ranks."""
        page, offset = slots // self.page_size, slots % self.page_size
        size = self.ranks.size
        is_own = (slots >= 0) & (page % size == self.ranks.rank)
        self._slots = torch.where(is_own, page // size * self.page_size + offset, -1)
        self._active, self._max_count = wrappers, max_count
        lengths = (pages.indptr.diff() - 1) * self.page_size + pages.last_page_len
        own_pages = self._own_pages(pages, lengths if max_count == 1 else lengths - qo_indptr.diff())
        longest = {"max_token_per_sequence": max_count}
        for heads, wrapper in wrappers.items():
            plan(wrapper.pages, own_pages, heads, self.model.dtype, self.kv_dtype, qo_indptr, causal=False, **longest)
            if max_count > 1:
                sizes = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim_qk, heads.head_dim_vo)
                options: Any = {"causal": True, "q_data_type": self.model.dtype, **longest}
                wrapper.new_tokens.plan(qo_indptr, qo_indptr, *sizes, **options)

    def _own_pages(self, pages: PageTable, visible: Tensor) -> PageTable:
        """The table of this rank's pages that have one of the first `visible` tokens of each request.

        The sizes of all tensors are those of the tables, so a CUDA graph may have this for tables with other contents.
        """
        size, rank = self.ranks.size, self.ranks.rank
        used = (visible + self.page_size - 1) // self.page_size
        entry = torch.arange(len(pages.indices), dtype=torch.int32, device=visible.device)
        row = torch.bucketize(entry, pages.indptr[1:], right=True).clamp(max=len(visible) - 1)
        is_own = (pages.indices % size == rank) & (entry - pages.indptr[row] < used[row])
        ends = is_own.cumsum(0)
        # Pages of other ranks are written to one more entry at the end, which is dropped.
        own = torch.zeros(len(entry) + 1, dtype=torch.int32, device=visible.device)
        own[torch.where(is_own, ends - 1, len(entry))] = pages.indices // size
        indptr = torch.nn.functional.pad(ends, (1, 0))[pages.indptr].int()
        last = (pages.indptr[:-1] + used - 1).clamp(0, max(len(entry) - 1, 0))
        unused = torch.where((used > 0) & is_own[last], used * self.page_size - visible, 0) if len(entry) else 0 * used
        return PageTable(indptr, own[:-1], (self.page_size - unused).int(), self.page_size)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """`Runner.attend`; ValueError if the layer has sinks."""
        if sinks is not None:
            raise ValueError(f"layer {index} has sinks, which are not supported with context_parallel_size")
        store(self.caches[index], k, v, self._slots)
        q = q.contiguous()
        options: Any = {"sm_scale": layer.sm_scale, "logits_soft_cap": layer.logits_soft_cap, "return_lse": True}
        wrapper = self._active[layer.heads]
        # The partial states of all ranks, [ranks, tokens, heads, head_dim_vo + 1].
        states = self.ranks.stack(_packed(*wrapper.pages.run(q, self.caches[index], **options)))
        if self._max_count > 1:
            states = torch.cat([states, _packed(*wrapper.new_tokens.run(q, k, v, **options))[None]])
        out, lse = states.transpose(0, 1).split([layer.heads.head_dim_vo, 1], dim=-1)
        return merge_states(out, lse.squeeze(-1).contiguous())[0].to(q.dtype)

    def _cache_pages(self) -> int:
        return -(-self.num_pages // self.ranks.size)


def _packed(out: Tensor, lse: Tensor) -> Tensor:
    """A partial state in float32, [tokens, heads, head_dim_vo + 1], whose last elements are the LSE."""
    return torch.cat([out.float(), lse[..., None]], dim=-1)
