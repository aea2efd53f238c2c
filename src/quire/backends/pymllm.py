"""The attention backend of pymllm: `FlashInferAttnBackend` over a pool with one slot per token.

Names, parameters and meanings are those of `pymllm.layers.attention.flashinfer_backend`. This backend adds windows in
every mode, cross-attention, target-verify with trees of drafted tokens, sinks, and fp8 caches.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from quire.backends.token_pool import radix
from quire.backends.token_pool.backend import PlanningBackend, should_use_tensor_core
from quire.backends.token_pool.batch import (
    AttentionBackend,
    ForwardBatch,
    ForwardMode,
    KVPool,
    RadixAttention,
    ReqToTokenPool,
    VerifyInput,
)
from quire.backends.token_pool.slots import WrapperDispatch
from quire.backends.token_pool.updaters import DecodeMetadata, ExtendStep, PrefillMetadata
from quire.cascade import merge_state
from quire.steps import quantize

__all__ = [
    "AttentionBackend",
    "DecodeMetadata",
    "FlashInferAttnBackend",
    "ForwardBatch",
    "ForwardMode",
    "KVPool",
    "PrefillMetadata",
    "RadixAttention",
    "ReqToTokenPool",
    "VerifyInput",
    "WrapperDispatch",
    "logger",
    "should_use_tensor_core",
]

logger = logging.getLogger(__name__)


class FlashInferAttnBackend(PlanningBackend):
    """Attention over a pool of keys and values with one slot per token.

    `init_forward_metadata` is called once per batch, then `forward` once per layer, which writes new keys and values to
    the pool (unless save_kv_cache is False) and computes attention. All layers share one plan and pass their own scale,
    window and soft cap. Nothing waits for the device if a batch has its lengths on the host.

    Args:
        num_heads, num_kv_heads: query heads and KV heads on this device.
        head_dim: size of a query and key head.
        kv_cache_dtype, q_dtype: the dtype of the pool, and that of queries and outputs.
        max_context_len: the largest number of tokens of a request.
        req_to_token: int32 [max_reqs, at least max_context_len], the slots of each request's tokens.
        device: the device of all tensors.
        max_req_pool_size: the largest number of requests of a captured graph.
        sliding_window_size: not None: some layers have a window, and those without use separate wrappers.
        skip_prefill: only decode, without wrappers for prefill.
        kv_indptr_buf, kv_last_page_len_buf: int32 [max_req_pool_size + 1] and [max_req_pool_size], buffers shared with
            backends that plan at other times; only for backends with one wrapper of each kind.
        init_new_workspace: allocate a workspace that is not shared.
        v_head_dim: size of a value head, by default head_dim.
        cross_attention: some layers attend to an encoder's tokens, whose slots come first in a request's row.

    Attributes:
        dispatch_reason: the reason for two wrappers of each kind, or None.
        forward_metadata: the metadata of the current batch.
        decode_cuda_graph_metadata, prefill_cuda_graph_metadata: by batch size, the metadata of the graphs captured for
            decode and for target-verify.
        kv_indptr, kv_last_page_len, cuda_graph_kv_indices: tables that graphs read.

    Raises:
        ValueError: an argument is invalid, or arguments contradict each other.
    """

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer with one new token per request, over all tokens in the pool.

        Args:
            q: [tokens, heads * head_dim], or [tokens, heads, head_dim].
            k, v: keys and values of the new tokens, in either shape too; None: they are in the pool already.
            layer: the layer.
            forward_batch: the batch that `init_forward_metadata` has planned.
            save_kv_cache: whether to write k and v to the pool; False: they are there already.
            sinks: [heads], a logit per head that is added to the denominator of the softmax.

        Returns:
            [tokens, heads * v_head_dim].

        Raises:
            ValueError: tensors, slots, layer or pool contradict the backend or the batch.
            RuntimeError: the batch has not been planned.
        """
        radix.refuse(**kwargs)
        metadata = self._metadata(DecodeMetadata)
        q, k, v = radix.by_heads(q, k, v, layer, self.heads)
        if len(q) != metadata.num_tokens:
            raise ValueError(f"q has {len(q)} tokens: the batch has {metadata.num_tokens}")
        cache = self._cache(layer, forward_batch)
        wrapper = metadata.decode_wrappers[self._get_wrapper_idx(layer)]
        if k is not None and v is not None and save_kv_cache:
            self._save(k, v, cache, layer, forward_batch)
        return wrapper.run(q, radix.pages(cache), sinks=sinks, **radix.options(layer), **self._scales(layer)).flatten(1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer with any number of new tokens per request.

        Without a prefix, keys are read from k and v only. With a prefix, all keys are read from the pool in one pass
        after k and v have been written to it. With a prefix and save_kv_cache=False, attention over k and v and over
        the prefix in the pool are merged; a window then waits for the device unless the batch has
        extend_prefix_lens_cpu and extend_seq_lens_cpu.

        Arguments, results and errors are those of `forward_decode`. Rows of q beyond the requests' tokens are padding,
        whose output is 0. In target-verify, windows count drafted tokens in the order of rows, whatever the mask.
        """
        radix.refuse(**kwargs)
        metadata = self._metadata(PrefillMetadata)
        q, k, v = radix.by_heads(q, k, v, layer, self.heads)
        rows = k is not None and metadata.use_ragged and not layer.is_cross_attention
        if len(q) < metadata.num_tokens:
            raise ValueError(f"q has {len(q)} tokens: the batch has {metadata.num_tokens} new ones")
        if rows and k is not None and len(k) != len(q):
            raise ValueError(f"k has {len(k)} tokens: q has {len(q)}")
        only_rows = rows and metadata.extend_no_prefix
        if radix.encoder_only(layer):
            save_kv_cache = False
            if not only_rows:
                raise ValueError(f"layer {layer.layer_id} is encoder-only: it needs k and v, and no request a prefix")
        causal, options = radix.causal(layer, forward_batch), {"sinks": sinks, **radix.options(layer)}
        index = self._get_wrapper_idx(layer)
        if only_rows and not save_kv_cache:
            return metadata.step.ragged(causal).run(q, k, v, **options).flatten(1)
        cache = self._cache(layer, forward_batch)
        if rows and not only_rows and not save_kv_cache:
            return self._merged(metadata.step, q, k, v, cache, layer, options).flatten(1)
        if only_rows:
            wrapper = metadata.step.ragged(causal)
        else:
            # The plan checks the tables, so it precedes all writes.
            wrapper = metadata.step.paged(index) if metadata.step else metadata.prefill_wrappers[index]
        if k is not None and save_kv_cache:
            self._save(k, v, cache, layer, forward_batch)
        if only_rows:
            return wrapper.run(q, k, v, **options).flatten(1)
        return wrapper.run(q, radix.pages(cache), **options, **self._scales(layer)).flatten(1)

    def _get_wrapper_idx(self, layer: RadixAttention) -> int:
        """The index of a layer's wrapper among those of a kind."""
        if self.dispatch_reason is WrapperDispatch.SLIDING_WINDOW:
            return int(radix.window(layer) < 0)
        if layer.is_cross_attention and self.dispatch_reason is None:
            raise ValueError(f"layer {layer.layer_id} is cross-attention: the backend was made without")
        return int(layer.is_cross_attention)

    def _merged(
        self, step: ExtendStep, q: Tensor, k: Any, v: Any, cache: Any, layer: RadixAttention, options: dict[str, Any]
    ) -> Tensor:
        """Attention over rows merged with attention over the prefix in the pool; one of the two gets the sinks."""
        own = step.ragged(True).run_return_lse(q, k, v, **options)
        # The mask of the prefix applies the window.
        options = {**options, "sinks": None, "window_left": -1}
        prefix = step.prefix(radix.window(layer))
        return merge_state(*own, *prefix.run_return_lse(q, radix.pages(cache), **options, **self._scales(layer)))[0]

    def _metadata(self, kind: type) -> Any:
        if not isinstance(self.forward_metadata, kind):
            raise RuntimeError("init_forward_metadata() must be called with this batch before its layers run")
        return self.forward_metadata

    def _pool(self, forward_batch: Any) -> Any:
        return forward_batch.token_to_kv_pool

    def _cache(self, layer: RadixAttention, forward_batch: Any) -> tuple[Tensor, Tensor]:
        return radix.buffers(self._pool(forward_batch), layer, self.heads, self.kv_cache_dtype)

    def _save(self, k: Any, v: Any, cache: tuple[Tensor, Tensor], layer: RadixAttention, batch: Any) -> None:
        self._write(layer, batch, radix.slots(batch, layer, len(k), len(cache[0])), k, v)

    def _write(self, layer: RadixAttention, batch: Any, slots: Tensor, k: Tensor, v: Tensor) -> None:
        scales = (1.0 if x is None else x for x in self._scales(layer).values())
        k, v = (quantize(x, self.kv_cache_dtype, s) for x, s in zip((k, v), scales, strict=True))
        self._pool(batch).set_kv_buffer(self._named(layer), slots, k, v)

    def _scales(self, layer: RadixAttention) -> dict[str, Any]:
        return radix.scales(layer, self.kv_cache_dtype)

    def _named(self, layer: RadixAttention) -> Any:
        """What the pool calls a layer."""
        return layer.layer_id
