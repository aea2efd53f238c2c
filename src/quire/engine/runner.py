"""Computing the chunks of a step: tables of the batch, keys and values written to pages, attention over pages."""

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
from quire.steps import Layer, StepTables, plan, store


class Runner:
    """A model and its paged cache. Subclasses that override `begin` and `attend` run a serving backend in `LLM`.

    Args:
        model: the model.
        num_pages, page_size: of each layer's cache; a page id denotes one page in the caches of all layers.
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
        """The number of bytes of a page in the caches of all layers."""
        heads = [layer.heads for layer in model.layers]
        elements = sum(h.num_kv_heads * (h.head_dim_qk + h.head_dim_vo) for h in heads)
        return elements * page_size * model.dtype.itemsize

    def warm_up(self) -> None:
        """Compute a few tokens of two requests in shared steps, in chunks and one by one, and compare the logits with
        those of Transformers' attention. Unsupported models are thus refused before requests arrive.

        Raises:
            ValueError: no kernel family, or not the requested one, supports a layer; or the logits of a request depend
                on chunks or on other requests.
        """
        model, batch = self.model, min(2, self.num_pages)
        pages = self.num_pages // batch  # per request
        n = min(7, model.context, pages * self.page_size)
        first = model.vocab_size // 3  # special tokens have the lowest or the highest ids
        tokens = [[(first + 11 * i * i + 5 * b) % model.vocab_size for i in range(n)] for b in range(batch)]
        self.run([self._probe_chunk(tokens[0], 0, 0, 1)])  # raises if no kernel family supports a layer
        own = model.own_logits(torch.tensor(tokens, device=model.device))

        def differ(steps: list[list[tuple[int, int, int]]]) -> list[bool]:
            """For each chunk (request, start, end) of the steps, whether the logits of its last token differ."""
            differing = []
            for step in filter(None, steps):
                chunks = [self._probe_chunk(tokens[b], b * pages, start, end) for b, start, end in step]
                logits = self.run(chunks)
                differing += [_differ(row, own[b, end - 1]) for row, (b, _, end) in zip(logits, step, strict=True)]
            return differing

        # Of n = 7 tokens, request 0 computes 3, 2 and 2; request 1 computes 5, 1 and 1, that is, it decodes. Request 1
        # comes first in the second step.
        cuts = [(0, 0), (-(-3 * n // 7), max(1, n - 2)), (-(-5 * n // 7), max(1, n - 1)), (n, n)]
        orders = [range(batch), range(batch)[::-1], range(batch)]
        steps = zip(cuts, cuts[1:], orders, strict=False)
        wrong = differ([[(b, start[b], end[b]) for b in order if start[b] < end[b]] for start, end, order in steps])
        if sum(wrong) <= len(wrong) // 3:  # rounding may route a token or two to other experts
            return model.check_positions()
        whole = [(b, 0, n) for b in range(batch)]
        if any(differ([[request] for request in whole])):
            reason = "its attention is not what it asks the attention function for"
        elif any(differ([whole])):
            reason = "requests of a step change each other, since it ignores position_ids or mixes neighbouring tokens"
        else:
            reason = "a request that is computed in several steps does not become what it is in one"
        raise ValueError(f"{model.folder} can't be run: its logits are not those of Transformers: {reason}")

    def _probe_chunk(self, tokens: list[int], first_page: int, start: int, end: int) -> Chunk:
        request = Request(tokens[:end], SamplingParams(), None, frozenset(), lambda update: None)
        request.pages = array("i", range(first_page, first_page + -(-end // self.page_size)))
        return Chunk(request, start, end - start)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks; return the logits of the last token of each chunk that samples (see `Chunk.samples`)."""
        tables = self.tables(chunks)
        self.begin(chunks, tables)
        tokens, rows = self.inputs(chunks)
        return self.model.logits(tokens, tables.positions, rows, self)

    def tables(self, chunks: Sequence[Chunk], pad_to: int = 0) -> StepTables:
        """The tables of the chunks, on the model's device."""
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
        """The tokens of the chunks, and the indices of rows whose logits are needed; int64, on the model's device."""
        tokens = [t for c in chunks for t in c.request.tokens[c.start : c.start + c.count]]
        ends = accumulate(c.count for c in chunks)
        rows = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        device = self.model.device
        ids, last = (torch.tensor(x, dtype=torch.int64).to(device, non_blocking=True) for x in (tokens, rows))
        return ids, last

    def begin(self, chunks: Sequence[Chunk], tables: StepTables) -> None:
        """Plan a step, for which `attend` is then called once per layer."""
        self._slots, dtype = tables.slots, self.model.dtype
        options: Any = {"causal": True, "max_token_per_sequence": max(chunk.count for chunk in chunks)}
        for heads, wrapper in self.wrappers.items():
            plan(wrapper, tables.pages, heads, dtype, dtype, tables.qo_indptr, **options)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """The attention of a layer, see `quire.engine.model.Step`."""
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


def _differ(logits: Tensor, own: Tensor) -> bool:
    """Whether logits differ from Transformers' by more than rounding; False if Transformers' are not finite."""
    own = own.float()
    error, size = (logits.float() - own).norm(), (own - own.mean()).norm()
    bound = 1e-3 if logits.dtype == torch.float32 else 0.2  # 16-bit elements are rounded in many layers
    return bool(own.isfinite().all()) and not bool(error <= bound * size)
