"""Computing the chunks of a step: tables of the batch, keys and values written to pages, attention over pages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.definition.pages import PageTable
from quire.engine.chunks import Chunk, Computed
from quire.engine.graphs import MAX_ROWS, MAX_TOKENS, StepGraphs
from quire.engine.inputs import InputBuffers, Inputs, Shape
from quire.engine.model import Model
from quire.engine.params import LIBRARY_DEFAULTS, SamplingParams
from quire.engine.probe import check_positions
from quire.engine.request import Request
from quire.engine.sampler import Sampler
from quire.engine.scales import Scales
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.steps import Heads, Layer, StepTables, fp8_dtype, plan, store, upload

Wrappers = dict[Heads, BatchPrefillWithPagedKVCacheWrapper]


class Runner:
    """A model and its paged cache. Subclasses that override `run`, or `begin` and `attend`, run a serving backend in
    `LLM`; their steps are computed one after another, without graphs.

    Args:
        model: the model.
        num_pages, page_size: of each layer's cache; a page id denotes one page in the caches of all layers.
        backend: "auto" or a kernel family.
        kv_cache_dtype: "auto" for the model's dtype, "fp8" or "fp8_e4m3" or "fp8_e5m2".
        batch_invariant: compute attention so that the bits of a request do not depend on the other requests, and
            check that nothing else does either; `Model.width` pads steps for that.
        kv_cache_scales: what keys and values of each layer are divided by before they are rounded to fp8; None: 1.

    Attributes:
        caches: each layer's keys and values, [num_pages, page_size, num_kv_heads, head_dim].
        scales: of each layer's keys and values.
        sampler: has the tokens that the last launched step has sampled, for requests whose last one is pending; set by
            the engine.
        step_graphs: CUDA graphs of steps, if there are any; see `StepGraphs`.
    """

    sampler: Sampler
    step_graphs: StepGraphs | None = None

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        backend: str = "auto",
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
        kv_cache_scales: Scales | None = None,
    ) -> None:
        self.model, self.num_pages, self.page_size = model, num_pages, page_size
        self.kv_dtype = self.cache_dtype(model, kv_cache_dtype)
        self.caches = [self._new_cache(layer) for layer in model.layers]
        self._backend, self._batch_invariant = backend, batch_invariant
        self.scales = kv_cache_scales or [(1.0, 1.0)] * len(model.layers)
        self.wrappers = self._active = self.new_wrappers()

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched before the host knows the tokens of the step before it."""
        own = (type(self).run, type(self).begin, type(self).attend) == (Runner.run, Runner.begin, Runner.attend)
        return own and self.model.device.type == "cuda"

    @staticmethod
    def cache_dtype(model: Model, kv_cache_dtype: str) -> torch.dtype:
        """The dtype of the cache; ValueError for an unknown name."""
        return model.dtype if kv_cache_dtype == "auto" else fp8_dtype(kv_cache_dtype)

    @staticmethod
    def page_bytes(model: Model, page_size: int, kv_cache_dtype: str = "auto") -> int:
        """The number of bytes of a page in the caches of all layers."""
        heads = [layer.heads for layer in model.layers]
        elements = sum(h.num_kv_heads * (h.head_dim_qk + h.head_dim_vo) for h in heads)
        return elements * page_size * Runner.cache_dtype(model, kv_cache_dtype).itemsize

    def new_wrappers(self) -> Wrappers:
        """A wrapper for each kind of heads that the layers have."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.model.device)
        options: Any = {"backend": self._backend, "batch_invariant": self._batch_invariant or None}
        kinds = {layer.heads for layer in self.model.layers}
        return {heads: BatchPrefillWithPagedKVCacheWrapper(empty, **options) for heads in kinds}

    def warm_up(self) -> None:
        """Compute a few tokens of two requests in shared steps, in chunks and one by one, and compare the logits with
        those of Transformers' attention. Unsupported models are thus refused before requests arrive.

        Raises:
            ValueError: no kernel family, or not the requested one, supports a layer; or the logits of a request depend
                on chunks or on other requests, in their bits if they must not.
        """
        # Rounding to 16 bits routes a token to other experts where two are nearly as good, and all tokens after it see
        # that: up to 1.5% of random models differ for given tokens. A wrong model is wrong for any tokens.
        attempts = 1 if self.kv_dtype == torch.float32 else 5
        reasons = list(takewhile(bool, map(self._difference, range(attempts))))
        if len(reasons) == attempts:
            reason = reasons[0]
            if self.kv_dtype.itemsize == 1:
                reason += ", or its keys and values do not fit an fp8 cache with these scales (`quire calibrate`)"
            raise ValueError(f"{self.model.folder} can't be run: its logits are not those of Transformers: {reason}")
        check_positions(self.model)
        if self._batch_invariant and self._varies():
            size, threads = f"{self.model.width} tokens", f"{torch.get_num_threads()} threads"
            what = f"its logits depend on the other requests of a step, of {size} and with {threads}"
            raise ValueError(f"{self.model.folder} can't be run with batch_invariant: {what}")

    def _difference(self, seed: int) -> str:
        """Why logits differ from Transformers' for tokens that all depend on `seed`; "" if they do not."""
        model, batch = self.model, min(2, self.num_pages)
        pages = self.num_pages // batch  # per request
        n = min(7, model.context, pages * self.page_size)
        first = model.vocab_size // 3  # special tokens have the lowest or the highest ids
        rows = [[first + (11 - 2 * seed) * i * i + 5 * seed + 3 * b for i in range(n)] for b in range(batch)]
        tokens = [[token % model.vocab_size for token in row] for row in rows]
        self.run([self._probe_chunk(tokens[0], 0, 0, 1)])  # raises if no kernel family supports a layer
        own = model.own_logits(torch.tensor(tokens, device=model.device))

        def differ(steps: list[list[tuple[int, int, int]]]) -> list[bool]:
            """For each chunk (request, start, end) of the steps, whether the logits of its last token differ."""
            differing = []
            for step in filter(None, steps):
                chunks = [self._probe_chunk(tokens[b], b * pages, start, end) for b, start, end in step]
                logits = self.run(chunks)
                differing += [
                    _differ(row, own[b, end - 1], self.kv_dtype == torch.float32)
                    for row, (b, _, end) in zip(logits, step, strict=True)
                ]
            return differing

        # Of n = 7 tokens, request 0 computes 3, 2 and 2; request 1 computes 5, 1 and 1, that is, it decodes. Request 1
        # comes first in the second step.
        cuts = [(0, 0), (-(-3 * n // 7), max(1, n - 2)), (-(-5 * n // 7), max(1, n - 1)), (n, n)]
        orders = [range(batch), range(batch)[::-1], range(batch)]
        steps = zip(cuts, cuts[1:], orders, strict=False)
        wrong = differ([[(b, start[b], end[b]) for b in order if start[b] < end[b]] for start, end, order in steps])
        if sum(wrong) <= len(wrong) // 3:  # rounding may route a token or two to other experts
            return ""
        whole = [(b, 0, n) for b in range(batch)]
        if any(differ([[request] for request in whole])):
            return "its attention is not what it asks the attention function for"
        if any(differ([whole])):
            return "requests of a step change each other, since it ignores position_ids or mixes neighbouring tokens"
        return "a request that is computed in several steps does not become what it is in one"

    def _varies(self) -> bool:
        """Whether the logits of a request depend, by a bit, on a request before it in the step, or on its chunks."""
        pages, vocab, width = self.num_pages // 2, self.model.vocab_size, self.model.width or 0
        most = min(self.model.context, pages * self.page_size)
        n = min(17, most, width // 2)
        if n < 2:
            return False
        # How many tokens come before the request in the step: few, and so many that it is in the middle or at the end.
        before = {min(count, most, width - n) for count in (1, n // 2, n, width // 3, width // 2, width)}
        tokens = [[(vocab // 3 + 7 * i * i + b) % vocab for i in range(max(before))] for b in range(2)]
        whole = self._probe_chunk(tokens[0][:n], 0, 0, n)
        alone = self.run([whole])
        others = [self._probe_chunk(tokens[1], pages, 0, count) for count in before]
        found = [self.run([other, whole])[1:] for other in others]
        self.run([self._probe_chunk(tokens[0], 0, 0, n - 1)])
        found.append(self.run([self._probe_chunk(tokens[0], 0, n - 1, n)]))
        return not all(torch.equal(alone.nan_to_num(), logits.nan_to_num()) for logits in found)

    def _probe_chunk(self, tokens: list[int], first_page: int, start: int, end: int) -> Chunk:
        request = Request(tokens[:end], SamplingParams(), None, frozenset(), lambda update: None)
        request.pages = array("i", range(first_page, first_page + -(-end // self.page_size)))
        return Chunk(request, start, end - start, samples=True)

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Compute a step of the largest size: `num_tokens` tokens of `num_seqs` requests that all sample, or fewer if
        the cache has no room for them.
        """
        num_seqs = max(1, min(num_seqs, num_tokens, self.num_pages))
        each = min(-(-num_tokens // num_seqs), self.model.context, self.num_pages // num_seqs * self.page_size)
        pages = -(-each // self.page_size)
        logits = self.run([self._probe_chunk([0] * each, b * pages, 0, each) for b in range(num_seqs)])
        params = SamplingParams(temperature=1.0).over(LIBRARY_DEFAULTS)
        requests = [Request([0], params, None, frozenset(), lambda update: None) for _ in range(num_seqs)]
        Sampler(self.model.device, num_seqs).launch(logits, requests).read()

    def forward(self, chunks: Sequence[Chunk]) -> Computed:
        """Compute the chunks, by a graph if there is one for them."""
        if self.step_graphs is not None:
            computed = self.step_graphs.run(chunks)
            if computed is not None:
                return computed
        return Computed(chunks, self.run(chunks))

    def capture(self, max_rows: int, max_batched_tokens: int, progress: Any = iter) -> None:
        """Capture CUDA graphs of steps with up to so many requests and drafts, and tokens (`StepGraphs`), if the runner
        can.
        """
        if not self.overlaps:
            return
        rows, tokens, page_size = min(max_rows, MAX_ROWS), min(max_batched_tokens, MAX_TOKENS), self.page_size
        width = min(-(-self.model.context // page_size), self.num_pages)
        buffers = InputBuffers(Shape(rows, max(rows, tokens)), width, page_size, self.model.device)
        wrappers = self.new_wrappers()  # whose plans no step without a graph replaces

        def compute(inputs: Inputs, shape: Shape) -> Tensor:
            ids = torch.where(inputs.ids < 0, self.sampler.last[inputs.source], inputs.ids)
            pages = PageTable(inputs.kv_indptr, inputs.kv_indices, inputs.last_page_len, page_size)
            self.plan(wrappers, inputs.qo_indptr, pages, inputs.slots, shape.longest)
            logits = self.model.logits(ids, inputs.positions, inputs.sampled, self)
            for wrapper in wrappers.values():
                # The graph will be replayed, which is safe: it reads the tables of `buffers` themselves, and the
                # workspace of `wrappers`, and `StepGraphs` keeps both.
                wrapper.forget_cuda_graph()
            return logits

        graphs = StepGraphs(compute, self.sampler.sample_greedy, buffers, rows, tokens)
        if graphs.capture(progress):
            self.step_graphs = graphs

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks without graphs; return the logits of the last tokens of each (`Chunk.rows`)."""
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
        tokens = [t for c in chunks for t in (*c.request.tokens[c.start : c.start + c.count], *c.drafts)]
        ends = list(accumulate(c.count for c in chunks))
        rows = [row for end, c in zip(ends, chunks, strict=True) for row in range(end - c.rows, end)]
        if not ends or len(tokens) == ends[-1]:
            ids, last = (upload(np.array(x, dtype=np.int64), self.model.device) for x in (tokens, rows))
            return ids, last
        return self._pending_inputs(chunks, rows)

    def _pending_inputs(self, chunks: Sequence[Chunk], rows: list[int]) -> tuple[Tensor, Tensor]:
        """`inputs` of a step with tokens that the host does not know, and without drafts."""
        tokens: list[int] = []
        places: list[tuple[int, int]] = []  # of pending tokens in this step, and in `Sampler.last`
        for chunk in chunks:
            known = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
            tokens += known
            if len(known) < chunk.count:
                places.append((len(tokens), chunk.request.row))
                tokens.append(0)
        device, (to, source) = self.model.device, zip(*places, strict=True)
        packed = upload(np.array([*tokens, *rows, *to, *source], dtype=np.int64), device)
        ids, last, at, pending = packed.split([len(tokens), len(rows), len(to), len(source)])
        return ids.index_copy(0, at, self.sampler.last[pending]), last

    def begin(self, chunks: Sequence[Chunk], tables: StepTables) -> None:
        """Plan a step, for which `attend` is then called once per layer."""
        self.plan(self.wrappers, tables.qo_indptr, tables.pages, tables.slots, max(chunk.count for chunk in chunks))

    def plan(self, wrappers: Wrappers, qo_indptr: Tensor, pages: PageTable, slots: Tensor, longest: int) -> None:
        """Plan wrappers for a step whose requests have at most `longest` new tokens each."""
        self._active, self._slots = wrappers, slots
        options: Any = {"causal": True, "max_token_per_sequence": longest}
        for heads, wrapper in wrappers.items():
            plan(wrapper, pages, heads, self.model.dtype, self.kv_dtype, qo_indptr, **options)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """The attention of a layer, see `quire.engine.hf_attention.StepAttention`."""
        cache, (k_scale, v_scale) = self.caches[index], self.scales[index]
        store(cache, k, v, self._slots, k_scale, v_scale)
        out = self._active[layer.heads].run(
            q.contiguous(),
            cache,
            sm_scale=layer.sm_scale,
            window_left=layer.window_left,
            logits_soft_cap=layer.logits_soft_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        assert isinstance(out, Tensor)
        return out

    def _new_cache(self, layer: Layer) -> tuple[Tensor, Tensor]:
        heads = layer.heads
        shape = (self.num_pages, self.page_size, heads.num_kv_heads)
        options: Any = {"dtype": self.kv_dtype, "device": self.model.device}
        return torch.empty(*shape, heads.head_dim_qk, **options), torch.empty(*shape, heads.head_dim_vo, **options)


def _differ(logits: Tensor, own: Tensor, exact: bool) -> bool:
    """Whether logits differ from Transformers' by more than rounding, of 16-bit or 8-bit elements unless `exact`; False
    if Transformers' are not finite.
    """
    own = own.float()
    error, size = (logits.float() - own).norm(), (own - own.mean()).norm()
    bound = 1e-3 if exact else 0.2  # 16-bit elements are rounded in many layers
    return bool(own.isfinite().all()) and not bool(error <= bound * size)
