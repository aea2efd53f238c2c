"""Computes a step's chunks: tables for the batch, keys and values into their pages, attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quire.engine.model import Layer, Model
from quire.engine.params import SamplingParams
from quire.engine.request import Request
from quire.engine.scheduler import Chunk
from quire.page import append_paged_kv_cache, get_batch_indices_positions
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper


def _int32(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)


class Runner:
    """A model and its paged cache.

    Args:
        model: the model.
        num_pages, page_size: of the cache, the same for all layers: a page id means a page in each layer's cache.
        backend: "auto" or a kernel family.
    """

    def __init__(self, model: Model, num_pages: int, page_size: int, backend: str = "auto") -> None:
        self.model, self.page_size = model, page_size
        self.caches = [self._new_cache(layer, num_pages) for layer in model.layers]
        workspace = torch.empty(0, dtype=torch.uint8, device=model.device)
        shapes = {self._shape(layer) for layer in model.layers}
        self.wrappers = {shape: BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend) for shape in shapes}

    @staticmethod
    def page_bytes(model: Model, page_size: int) -> int:
        """Bytes of one page in all layers."""
        numbers = sum(layer.num_kv_heads * (layer.head_dim_qk + layer.head_dim_vo) for layer in model.layers)
        return numbers * page_size * model.dtype.itemsize

    def warm_up(self) -> None:
        """Compute one token: what cannot be computed is refused now, and not when the first request comes.

        Raises:
            ValueError: no kernel family, or not the one asked for, supports a layer.
        """
        request = Request([0], SamplingParams(), None, frozenset(), lambda update: None)
        request.pages = [0]
        self.run([Chunk(request, 0, 1)])

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks; the logits after each one that ends with its request's last known token."""
        device = self.model.device
        self._plan(chunks)
        tokens = [t for c in chunks for t in c.request.tokens[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        ends = list(accumulate(c.count for c in chunks))
        rows = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        ids, places, last = (
            torch.tensor(x, dtype=torch.int64).to(device, non_blocking=True) for x in (tokens, positions, rows)
        )
        return self.model.logits(ids, places, last, self)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """A layer's attention (`quire.engine.model.Step`)."""
        cache = self.caches[index]
        append_paged_kv_cache(k, v, *self._places, cache, *self._tables)
        out = self.wrappers[self._shape(layer)].run(
            q.contiguous(),
            cache,
            sm_scale=layer.sm_scale,
            window_left=layer.window_left,
            logits_soft_cap=layer.logits_soft_cap,
            sinks=sinks,
        )
        assert isinstance(out, Tensor)
        return out

    def _plan(self, chunks: Sequence[Chunk]) -> None:
        """Tables of the batch, which all layers share."""
        device = self.model.device
        qo_indptr = _int32([0, *accumulate(c.count for c in chunks)], device)
        indptr = _int32([0, *accumulate(len(c.request.pages) for c in chunks)], device)
        indices = _int32([page for c in chunks for page in c.request.pages], device)
        lengths = [c.start + c.count for c in chunks]
        last_page_len = _int32([(n - 1) % self.page_size + 1 for n in lengths], device)
        self._tables = (indices, indptr, last_page_len)
        self._places = get_batch_indices_positions(qo_indptr, _int32(lengths, device), sum(c.count for c in chunks))
        for shape, wrapper in self.wrappers.items():
            heads, kv_heads, dim_qk, dim_vo = shape
            wrapper.plan(
                qo_indptr,
                indptr,
                indices,
                last_page_len,
                heads,
                kv_heads,
                dim_qk,
                self.page_size,
                dim_vo,
                causal=True,
                q_data_type=self.model.dtype,
            )

    def _new_cache(self, layer: Layer, num_pages: int) -> tuple[Tensor, Tensor]:
        shape = (num_pages, self.page_size, layer.num_kv_heads)
        options: Any = {"dtype": self.model.dtype, "device": self.model.device}
        return torch.empty(*shape, layer.head_dim_qk, **options), torch.empty(*shape, layer.head_dim_vo, **options)

    @staticmethod
    def _shape(layer: Layer) -> tuple[int, int, int, int]:
        return layer.num_qo_heads, layer.num_kv_heads, layer.head_dim_qk, layer.head_dim_vo
