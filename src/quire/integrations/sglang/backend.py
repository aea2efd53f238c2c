"""The attention backend: tables once per step, and a run for each layer, eager or in SGLang's CUDA graphs.

A step is planned from tensors on the device alone. In a CUDA graph, its tables are written by the graph itself, from
the buffers that SGLang fills before a replay, so that a replay needs nothing from the backend. The packed masks of
trees of drafted tokens are the exception.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from quire.integrations.sglang.pools import Pools, scales
from quire.integrations.sglang.refusals import (
    attention_type,
    check_call,
    check_drafts,
    check_images,
    check_layer,
    check_mode,
    check_runner,
    has_mutual_images,
)
from quire.integrations.sglang.tables import (
    PageBuffers,
    QueryRows,
    equal_rows,
    extend_rows,
    fill,
    max_pages,
)
from quire.integrations.sglang.wrappers import StepWrappers, WrapperPool
from quire.steps import pack_mask


class StepMetadata(NamedTuple):
    """What the layers of a step share.

    Attributes:
        wrappers: planned wrappers by layer kind.
        window_slots: where layers with slots of their own write new keys; None without such layers.
        alone: whether no request has keys before its new tokens.
    """

    wrappers: StepWrappers
    window_slots: Tensor | None
    alone: bool


class SGLangAttentionBackend(AttentionBackend):
    """Quire's attention for SGLang: decode, extend, mixed steps, and target-verify, over any page size.

    Args:
        model_runner: SGLang's.

    Raises:
        ValueError: an option of the runner that is not supported, by name.
    """

    needs_cpu_seq_lens = False
    forward_metadata: StepMetadata | None

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        check_runner(model_runner)
        self.device = torch.empty(0, device=model_runner.device).device
        self.kv_cache_dtype = self.data_type = model_runner.kv_cache_dtype
        self.page_size: int = model_runner.page_size
        self.max_context_len: int = model_runner.model_config.context_len
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool, self.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self.pools = Pools(model_runner.token_to_kv_pool, self.page_size, self.kv_cache_dtype)
        invariant = bool(model_runner.server_args.enable_deterministic_inference)
        self.wrapper_pool = WrapperPool(self.device, self.page_size, self.kv_cache_dtype, invariant)
        self.forward_metadata = None
        self._checked: WeakSet[Any] = WeakSet()
        self._has_mutual_images = has_mutual_images(model_runner)
        self._graph_tables: list[PageBuffers] = []
        self._graph_mask: Tensor | None = None
        self._drafts = model_runner.server_args.speculative_algorithm is not None
        self._masked: dict[tuple[Any, int], bool] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step that is computed without a graph.

        Raises:
            ValueError: the mode is not supported.
        """
        mode = forward_batch.forward_mode
        check_mode(mode, False)
        if mode.is_idle():
            self.forward_metadata = None
            return
        if mode.is_decode() or mode.is_target_verify():
            rows = self._equal_rows(forward_batch, self._mask(forward_batch))
        else:
            rows = extend_rows(forward_batch)
        pages = max_pages(forward_batch, self.req_to_token, self.page_size, rows.extra)
        count = 1 + self.pools.has_windows
        tables = [PageBuffers.allocate(forward_batch.batch_size, pages, self.device) for _ in range(count)]
        self._plan(forward_batch, rows, tables)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the tables of CUDA graphs of up to max_bs requests and max_num_tokens tokens."""
        width = self.req_to_token.shape[1]
        pages = max_bs * -(-width // self.page_size)
        count = 1 + self.pools.has_windows
        self._graph_tables = [PageBuffers.allocate(max_bs, pages, self.device) for _ in range(count)]
        if self._drafts:
            size = max_num_tokens * width // 8 + max_bs
            self._graph_mask = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture of a graph, or its replay, for which masks of drafted tokens are packed.

        Raises:
            ValueError: the mode is not supported in graphs, or a mask does not fit the graph's buffer.
            RuntimeError: there are no buffers.
        """
        check_mode(forward_batch.forward_mode, in_capture)
        if not self._graph_tables:
            raise RuntimeError("init_cuda_graph_state() must be called before graphs are captured")
        mask, graph = self._mask(forward_batch), (forward_batch.forward_mode, forward_batch.batch_size)
        if in_capture:
            self._masked[graph] = mask is not None
        if self._masked.get(graph, False) != (mask is not None):
            captured = "with" if self._masked.get(graph) else "without"
            raise ValueError(f"custom_mask: the graph of {graph[1]} requests was captured {captured} one")
        if mask is not None:
            self._keep_mask(mask)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan a step by operations that a graph captures."""
        size = forward_batch.batch_size
        masked = self._masked[forward_batch.forward_mode, size]
        rows = self._equal_rows(forward_batch, self._graph_mask if masked else None)
        self._plan(forward_batch, rows, [x.first(size) for x in self._graph_tables])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a batch: 1, because requests without keys would be a special case."""
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer with one new token per request, over the keys in the pool.

        Args:
            q: [tokens, heads * head_dim], or [tokens, heads, head_dim].
            k, v: keys and values of the new tokens, in either shape; None: they are in the pool.
            save_kv_cache: whether to write k and v to the pool; False: they are there.
            sinks: [heads], a logit per head that joins the denominator of the softmax.

        Returns:
            [tokens, heads * v_head_dim].

        Raises:
            ValueError: a layer or an option that is not supported, or a pool that does not fit the layer.
            RuntimeError: the step has not been planned.
        """
        step = self._step(layer, forward_batch, kwargs)
        if k is not None and v is not None and save_kv_cache:
            self._write(step, layer, forward_batch, *_keys_by_heads(k, v, layer))
        return self._attend(step, q, layer, sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer with any number of new tokens per request.

        Where no request has earlier keys, those of k and v are read; else those in the pool, after k and v have been
        written to it. Rows of q beyond the requests' tokens are padding, whose output is 0. The arguments, results and
        errors are those of `forward_decode`.
        """
        step = self._step(layer, forward_batch, kwargs)
        causal = attention_type(layer) != "encoder_only"
        if k is None or v is None or not (step.alone and len(k) == len(q)):
            if not causal:
                raise ValueError(f"layer {layer.layer_id} is encoder_only: it needs k and v, and no request a prefix")
            if k is not None and v is not None and save_kv_cache:
                self._write(step, layer, forward_batch, *_keys_by_heads(k, v, layer))
            return self._attend(step, q, layer, sinks)
        q = _by_heads(q, layer.tp_q_head_num, layer.qk_head_dim)
        k, v = _keys_by_heads(k, v, layer)
        out: Tensor = step.wrappers.ragged(q, k, v, causal).run(q, k, v, sinks=sinks, **_options(layer))
        if save_kv_cache and causal:
            self._write(step, layer, forward_batch, k, v)
        return out.flatten(1)

    def _attend(self, step: StepMetadata, q: Tensor, layer: Any, sinks: Tensor | None) -> Tensor:
        """Attention over the keys in the pool."""
        q = _by_heads(q, layer.tp_q_head_num, layer.qk_head_dim)
        k, v = self.pools.pages(layer)
        wrapper = step.wrappers.paged(q, k, v, self.pools.is_window_layer(layer.layer_id))
        k_scale, v_scale = scales(layer, self.kv_cache_dtype)
        out: Tensor = wrapper.run(q, (k, v), k_scale=k_scale, v_scale=v_scale, sinks=sinks, **_options(layer))
        return out.flatten(1)

    def _write(self, step: StepMetadata, layer: Any, batch: Any, k: Tensor, v: Tensor) -> None:
        self.pools.write(layer, batch, step.window_slots, k, v)

    def _step(self, layer: Any, batch: Any, options: dict[str, Any]) -> StepMetadata:
        """The metadata of the step, after checks of the layer and its call."""
        if layer not in self._checked:
            check_layer(layer)
            self._checked.add(layer)
        check_call(layer, options)
        if self._has_mutual_images:
            check_images(batch)
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata() must be called with this batch before its layers run")
        return self.forward_metadata

    def _plan(self, batch: Any, rows: QueryRows, tables: list[PageBuffers]) -> None:
        """Write the tables of a step, and let its layers plan their wrappers."""
        maps = [None, self.pools.slot_map] if self.pools.has_windows else [None]
        for buffers, slot_map in zip(tables, maps, strict=True):
            fill(buffers, batch, self.req_to_token, slot_map, self.page_size, rows.extra)
        wrappers = StepWrappers(self.wrapper_pool, rows, tables)
        self.forward_metadata = StepMetadata(wrappers, self.pools.window_slots(batch), rows.alone)

    def _equal_rows(self, batch: Any, mask: Tensor | None) -> QueryRows:
        """The query rows of decode or target-verify."""
        drafted = 0
        if batch.forward_mode.is_target_verify():
            check_drafts(batch.spec_info)
            drafted = batch.spec_info.draft_token_num
        q_len = drafted or 1
        return QueryRows(equal_rows(batch.batch_size, q_len, self.device), q_len, drafted, mask)

    def _mask(self, batch: Any) -> Tensor | None:
        """The packed masks of a step of target-verify whose drafted tokens are trees, else None.

        Masks may be shorter than the step, which then has requests that fill up a graph, or longer.
        """
        spec = batch.spec_info
        if not batch.forward_mode.is_target_verify():
            return None
        # With topk = 1, drafted tokens follow each other: their masks are causal.
        if spec.custom_mask is None or getattr(spec, "topk", None) == 1:
            return None
        lengths = batch.seq_lens[: batch.batch_size].int() + spec.draft_token_num
        return pack_mask(spec.custom_mask.flatten(), torch.full_like(lengths, spec.draft_token_num), lengths)

    def _keep_mask(self, mask: Tensor) -> None:
        """Copy packed masks to the buffer that graphs read."""
        capacity = 0 if self._graph_mask is None else len(self._graph_mask)
        if self._graph_mask is None or len(mask) > capacity:
            raise ValueError(f"custom_mask has {len(mask)} packed bytes: graphs have room for {capacity}")
        self._graph_mask[: len(mask)] = mask


def _options(layer: Any) -> dict[str, Any]:
    """The parameters of a layer, as arguments of a wrapper's run; a window leaves out the token itself."""
    window = layer.sliding_window_size
    return {
        "sm_scale": float(layer.scaling),
        "window_left": -1 if window is None else window,
        "logits_soft_cap": max(layer.logit_cap or 0.0, 0.0),
    }


def _keys_by_heads(k: Tensor, v: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    heads = layer.tp_k_head_num
    return _by_heads(k, heads, layer.qk_head_dim), _by_heads(v, heads, layer.v_head_dim)


def _by_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    return x.reshape(-1, heads, dim)
