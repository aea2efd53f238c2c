"""Computing the chunks of a step: tables of the batch, keys and values written to pages, attention over pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.definition.pages import PageTable
from quire.engine.adapters.pool import AdapterPool
from quire.engine.adapters.step import AdapterStep
from quire.engine.batch import Chunk, ForwardOutput, StepBatch
from quire.engine.graph_inputs import CapturedInputs, GraphInputs, StepShape
from quire.engine.graphs import MAX_ROWS, MAX_TOKENS, StepGraphs
from quire.engine.inputs import adapter_slots, logit_indices, token_ids, with_last_tokens
from quire.engine.model import Model
from quire.engine.sampler import Sampler
from quire.engine.scales import Scales
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.steps import Heads, Layer, StepTables, fp8_dtype, plan, store, upload

if TYPE_CHECKING:
    from quire.engine.parallel.channel import RankStep
    from quire.engine.parallel.leader import Leader
    from quire.engine.parallel.ranks import Ranks

# The wrapper for each kind of heads; subclasses may use wrappers of other classes.
Wrappers = dict[Heads, Any]


class Runner:
    """A model and its paged cache. Subclasses that override `run`, or `begin` and `attend`, run a serving backend in
    `LLM`, and say by the class attributes what their steps can do.

    Args:
        model: the model.
        num_pages, page_size: of each layer's cache; a page id denotes one page in the caches of all layers.
        backend: "auto" or a kernel family.
        kv_cache_dtype: "auto" for the model's dtype, "fp8" or "fp8_e4m3" or "fp8_e5m2".
        batch_invariant: compute attention so that the bits of a request do not depend on the other requests;
            `Model.width` pads steps for that.
        kv_cache_scales: what keys and values of each layer are divided by before they are rounded to fp8; None: 1.

    Attributes:
        supports_overlap: of the class; whether a step can be launched before the host knows the tokens of the step
            before it, and can be captured in a CUDA graph. False for a subclass whose `run`, `begin` or `attend` needs
            these tokens, waits for the device or has graphs of its own.
        supports_all_logits: of the class; whether `run` returns the logits of all tokens that `Chunk.rows` counts.
            False for a subclass whose `run` returns those of the last token alone: requests then have neither drafts
            nor log-probabilities of their prompts, nor embeddings.
        supports_adapters: of the class; whether `run` computes requests with their adapters. False for a subclass with
            a `run` of its own that does not say otherwise.
        adapters: those on the device; None: requests have none.
        caches: each layer's keys and values, [num_pages, page_size, num_kv_heads, head_dim].
        scales: of each layer's keys and values.
        step_graphs: CUDA graphs of steps, if there are any; see `StepGraphs`.
        ranks: those that compute each step together; None: this process alone does.
        leader: has the other ranks compute each step, too; None: there are no others, or this is one of them.
    """

    supports_overlap = True
    supports_all_logits = True
    supports_adapters = True
    adapters: AdapterPool | None = None
    step_graphs: StepGraphs | None = None
    ranks: Ranks | None = None
    leader: Leader | None = None

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
        self.model = model
        self.num_pages, self.page_size = num_pages, page_size
        self.kv_dtype = self.cache_dtype(model, kv_cache_dtype)
        self.caches = [self._new_cache(layer) for layer in model.layers]
        self._backend, self.batch_invariant = backend, batch_invariant
        self.scales = kv_cache_scales or [(1.0, 1.0)] * len(model.layers)
        self.wrappers = self._active = self.new_wrappers()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "run" in vars(cls) and "supports_adapters" not in vars(cls):
            cls.supports_adapters = False

    @property
    def overlaps(self) -> bool:
        """Whether a step should be launched before the host knows the tokens of the step before it."""
        return self.supports_overlap and self.model.device.type == "cuda"

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
        options: Any = {"backend": self._backend, "batch_invariant": self.batch_invariant or None}
        kinds = {layer.heads for layer in self.model.layers}
        return {heads: BatchPrefillWithPagedKVCacheWrapper(empty, **options) for heads in kinds}

    def forward(self, batch: StepBatch, last_tokens: Tensor) -> ForwardOutput:
        """Compute a step, by a graph if there is one for it.

        Args:
            batch: the step.
            last_tokens: `Sampler.last`, the tokens that the last launched step has sampled, for requests with a token
                in flight.
        """
        if self.step_graphs is not None:
            output = self.step_graphs.run(batch, self._has_adapters(batch))
            if output is not None:
                return output
        return self.forward_eagerly(batch, last_tokens)

    def forward_eagerly(self, batch: StepBatch, last_tokens: Tensor | None = None) -> ForwardOutput:
        """`forward` without graphs; last_tokens is None if no token is in flight."""
        # A subclass may compute logits without the network.
        self.model.hidden_states.last = None
        with nullcontext() if self.leader is None else self.leader.computing(batch, self._has_adapters(batch)):
            logits = self.run(batch, last_tokens) if self.supports_overlap else self.run(batch)
        return ForwardOutput(batch, logits, hidden=self.model.hidden_states.last)

    def capture(self, sampler: Sampler | None, max_rows: int, max_batched_tokens: int, progress: Any = iter) -> None:
        """Capture CUDA graphs of steps, if the runner can. It is called once, after all checks of the runner, and by
        all ranks.

        Args:
            sampler: samples the tokens of steps, in graphs too; None: this is not the first rank.
            max_rows: the largest number of requests and drafts of a step.
            max_batched_tokens: the largest number of tokens of a step.
            progress: of `StepGraphs.capture`.
        """
        if not self.overlaps:
            return
        if self.leader is not None:
            self.leader.capture(max_rows, max_batched_tokens)
        rows, tokens = min(max_rows, MAX_ROWS), min(max_batched_tokens, MAX_TOKENS)
        page_size = self.page_size
        width = min(-(-self.model.context // page_size), self.num_pages)
        largest = StepShape(rows, max(rows, tokens), self.adapters is not None)
        inputs = GraphInputs(largest, width, page_size, self.model.device)
        # Only graphs use these wrappers, so that steps without a graph do not replace their plans.
        wrappers = self.new_wrappers()

        def compute(inputs: CapturedInputs, shape: StepShape) -> tuple[Tensor, Tensor | None]:
            ids = inputs.ids if sampler is None else with_last_tokens(inputs.ids, inputs.source, sampler.last)
            ids = self._ids_of_leader(ids)
            pages = PageTable(inputs.kv_indptr, inputs.kv_indices, inputs.last_page_len, page_size)
            self.plan(wrappers, inputs.qo_indptr, pages, inputs.slots, shape.max_row_tokens)
            adapters = self.step_adapters(inputs.adapter_slots, inputs.logit_indices)
            logits = self.model.logits(ids, inputs.positions, inputs.logit_indices, self, adapters)
            for wrapper in wrappers.values():
                # The graph will be replayed, which is safe: it reads the tables of `inputs` themselves, and the
                # workspace of `wrappers`, and `StepGraphs` keeps both.
                wrapper.forget_cuda_graph()
            return logits, self.model.hidden_states.last

        variants = [False] if self.adapters is None else [True] if self.batch_invariant else [True, False]
        sample_greedy = None if sampler is None else sampler.sample_greedy
        announce = None if self.leader is None else self.leader.replay
        graphs = StepGraphs(compute, sample_greedy, inputs, rows, tokens, variants, announce)
        are_captured = graphs.capture(progress)
        if self.ranks is not None and not self.ranks.least(int(are_captured)):
            raise ValueError(f"{self.model.folder} can't be run on several GPUs without CUDA graphs of its steps")
        if are_captured:
            self.step_graphs = graphs

    def run(self, chunks: Sequence[Chunk], last_tokens: Tensor | None = None) -> Tensor:
        """Compute the chunks without graphs; return the logits of the last tokens of each (`Chunk.rows`). `last_tokens`
        is that of `forward`, and is passed if the runner supports overlap; None: no token is in flight.
        """
        tokens, rows = self.inputs(chunks, last_tokens)
        tables, batch = self.tables(chunks), StepBatch.of(chunks)
        self.begin(chunks, tables)
        slots = upload(adapter_slots(batch), self.model.device) if self._has_adapters(batch) else None
        return self.model.logits(tokens, tables.positions, rows, self, self.step_adapters(slots, rows))

    def _has_adapters(self, batch: StepBatch) -> bool:
        """Whether a step is computed with adapters. In a batch-invariant engine that takes adapters, every step is, so
        that the bits of requests without an adapter do not depend on the others.
        """
        return self.adapters is not None and (self.batch_invariant or self.adapters.are_in(batch.requests))

    def step_adapters(self, slots: Tensor | None, rows: Tensor) -> AdapterStep | None:
        """The adapters of a step; None if it is computed without adapters, that is, if `slots` is None."""
        if slots is None or self.adapters is None:
            return None
        return AdapterStep(self.adapters.tables, slots, rows, self.model.width)

    def tables(self, chunks: Sequence[Chunk], pad_to: int = 0) -> StepTables:
        """The tables of the chunks, on the model's device."""
        pages = [c.request.pages for c in chunks]
        return self.host_tables(pages, [c.start + c.count for c in chunks], [c.count for c in chunks], pad_to)

    def host_tables(
        self, pages: Sequence[Any], lengths: Sequence[int], counts: Sequence[int], pad_to: int = 0
    ) -> StepTables:
        """The tables of a step, on the model's device; the arguments are those of `StepTables.from_host`."""
        return StepTables.from_host(
            pages, lengths, counts, self.page_size, self.num_pages, self.model.device, pad_to=pad_to
        )

    def inputs(self, chunks: Sequence[Chunk], last_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tokens of the chunks, and the indices of those whose logits are needed; int64, on the model's device."""
        batch = StepBatch.of(chunks)
        known, source = token_ids(batch)
        vectors = [known, logit_indices(batch)]
        if (known < 0).any():
            vectors.append(source)
        packed = upload(np.concatenate(vectors), self.model.device)
        ids, logits, *in_flight = packed.split_with_sizes([len(x) for x in vectors])
        if in_flight:
            assert last_tokens is not None, "the host does not know a token in flight"
            ids = with_last_tokens(ids, in_flight[0], last_tokens)
        return self._ids_of_leader(ids), logits

    def _ids_of_leader(self, ids: Tensor) -> Tensor:
        """The tokens of a step as the leader has them, since only its GPU has the tokens in flight."""
        return ids if self.ranks is None or self.ranks.exchange is None else self.ranks.of_first(ids)

    def compute_step(self, step: RankStep) -> None:
        """Compute a step of the leader together with the other ranks."""
        tables = self.host_tables(step.pages, step.lengths, step.counts)
        self.plan(self.wrappers, tables.qo_indptr, tables.pages, tables.slots, max(step.counts))
        ids, rows = (upload(vector, self.model.device) for vector in (step.ids, step.rows))
        slots = None if step.slots is None else upload(step.slots, self.model.device)
        self.model.logits(self._ids_of_leader(ids), tables.positions, rows, self, self.step_adapters(slots, rows))

    def begin(self, chunks: Sequence[Chunk], tables: StepTables) -> None:
        """Plan a step, for which `attend` is then called once per layer."""
        self.plan(self.wrappers, tables.qo_indptr, tables.pages, tables.slots, max(chunk.count for chunk in chunks))

    def plan(self, wrappers: Wrappers, qo_indptr: Tensor, pages: PageTable, slots: Tensor, max_count: int) -> None:
        """Plan wrappers for a step whose requests have at most `max_count` new tokens each."""
        self._active, self._slots = wrappers, slots
        options: Any = {"causal": True, "max_token_per_sequence": max_count}
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
        shape = (self._cache_pages(), self.page_size, heads.num_kv_heads)
        options: Any = {"dtype": self.kv_dtype, "device": self.model.device}
        return torch.empty(*shape, heads.head_dim_qk, **options), torch.empty(*shape, heads.head_dim_vo, **options)

    def _cache_pages(self) -> int:
        """The pages that this process has of each layer's cache."""
        return self.num_pages
