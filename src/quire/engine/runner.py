"""Computes a step's chunks: tables for the batch, keys and values into their pages, attention over them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quire.engine.model import Model
from quire.engine.params import SamplingParams
from quire.engine.request import Request
from quire.engine.scheduler import Chunk
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.serving.base import Layer, StepTables, plan, store


class Runner:
    """A model and its paged cache. A serving backend takes its place in `LLM` by overriding `begin` and `attend`.

    Args:
        model: the model.
        num_pages, page_size: of the cache, the same for all layers: a page id means a page in each layer's cache.
        backend: "auto" or a kernel family.

    Attributes:
        caches: each layer's keys and values, [num_pages, page_size, num_kv_heads, head_dim].
    """

    def __init__(self, model: Model, num_pages: int, page_size: int, backend: str = "auto") -> None:
        self.model, self.num_pages, self.page_size = model, num_pages, page_size
        self.caches = [self._new_cache(layer) for layer in model.layers]
        empty = torch.empty(0, dtype=torch.uint8, device=model.device)
        kinds = {layer.heads for layer in model.layers}
        self.wrappers = {heads: BatchPrefillWithPagedKVCacheWrapper(empty, backend=backend) for heads in kinds}

    @staticmethod
    def page_bytes(model: Model, page_size: int) -> int:
        """Bytes of one page in all layers."""
        heads = [layer.heads for layer in model.layers]
        numbers = sum(h.num_kv_heads * (h.head_dim_qk + h.head_dim_vo) for h in heads)
        return numbers * page_size * model.dtype.itemsize

    def warm_up(self) -> None:
        """Compute one token: what cannot be computed is refused now, and not when the first request comes.

        Raises:
            ValueError: no kernel family, or not the one asked for, supports a layer.
        """
        request = Request([0], SamplingParams(), None, frozenset(), lambda update: None)
        request.pages = array("i", [0])
        self.run([Chunk(request, 0, 1)])

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks; the logits after each one that ends with its request's last known token."""
        tables = self.tables(chunks)
        self.begin(chunks, tables)
        tokens, rows = self.inputs(chunks)
        return self.model.logits(tokens, tables.positions, rows, self)

    def tables(self, chunks: Sequence[Chunk], pad_to: int = 0) -> StepTables:
        """The chunks' tables, on the model's device."""
        return StepTables.from_host(
            [c.request.pages for c in chunks],
            [c.start + c.count for c in chunks],
            [c.count for c in chunks],
            self.page_size,
            self.num_pages,
            self.model.device,
            pad_to=pad_to,
        )

    def inputs(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """The chunks' tokens, and the rows after which logits are wanted; int64, on the model's device."""
        tokens = [t for c in chunks for t in c.request.tokens[c.start : c.start + c.count]]
        ends = accumulate(c.count for c in chunks)
        rows = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        device = self.model.device
        ids, last = (torch.tensor(x, dtype=torch.int64).to(device, non_blocking=True) for x in (tokens, rows))
        return ids, last

    def begin(self, chunks: Sequence[Chunk], tables: StepTables) -> None:
        """Prepare a step, for which `attend` is then called once per layer."""
        self._slots = tables.slots
        dtype, longest = self.model.dtype, max(chunk.count for chunk in chunks)
        for heads, wrapper in self.wrappers.items():
            plan(
                wrapper,
                tables.pages,
                heads,
                dtype,
                dtype,
                tables.qo_indptr,
                causal=True,
                max_token_per_sequence=longest,
            )

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """A layer's attention (`quire.engine.model.Step`)."""
        cache = self.caches[index]
        store(cache, k, v, self._slots)
        out = self.wrappers[layer.heads].run(
            q.contiguous(),
            cache,
            sm_scale=layer.sm_scale,
            window_left=layer.window_left,
            logits_soft_cap=layer.logits_soft_cap,
            sinks=sinks,
        )
        assert isinstance(out, Tensor)
        return out

    def _new_cache(self, layer: Layer) -> tuple[Tensor, Tensor]:
        heads = layer.heads
        shape = (self.num_pages, self.page_size, heads.num_kv_heads)
        options: Any = {"dtype": self.model.dtype, "device": self.model.device}
        return torch.empty(*shape, heads.head_dim_qk, **options), torch.empty(*shape, heads.head_dim_vo, **options)
