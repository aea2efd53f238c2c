"""The attention of a layer over a planned step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.backends.vllm.metadata import FlashInferMetadata, cache_dtype
from quire.backends.vllm.protocols import AttentionLayer
from quire.definition.spec import attention_spec
from quire.steps import quantize, store

logger = logging.getLogger("quire.backends.vllm")


class FlashInferImpl:
    """The attention of a layer.

    Args:
        num_heads, num_kv_heads, head_size: query heads, KV heads, and their size.
        scale: the softmax scale.
        alibi_slopes: one ALiBi slope per head; None: no ALiBi.
        sliding_window: the number of keys that a query sees, including its own; None: all.
        kv_cache_dtype: "auto" (the model's), a dtype's name, or fp8, fp8_e4m3, fp8_e5m2.
        logits_soft_cap: c replaces logits x by c * tanh(x / c).
        use_irope: logs a warning, since layers with local attention attend to the whole context.

    Attributes:
        sliding_window: (keys to the left that a query sees, 0), or (-1, -1) for no window.

    Raises:
        ValueError: a parameter is invalid.
        NotImplementedError: block-sparse attention, a cache shared with another layer, or attention that is not a
            decoder's self-attention.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Sequence[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        blocksparse_params: dict[str, Any] | None = None,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        use_irope: bool = False,
    ) -> None:
        refused = {
            "blocksparse_params": (blocksparse_params, None),
            "kv_sharing_target_layer_name": (kv_sharing_target_layer_name, None),
            "attn_type": (attn_type, "decoder"),
        }
        for name, (value, allowed) in refused.items():
            if value != allowed:
                raise NotImplementedError(f"{name} = {value!r} is not supported: {allowed!r} is")
        if use_irope:
            logger.warning("use_irope: layers with local attention see the whole context")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window = {sliding_window}: it counts the token itself, so that 1 is the least")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap
        # This refuses unknown names.
        cache_dtype(kv_cache_dtype, torch.float16)
        slopes = () if self.alibi_slopes is None else tuple(self.alibi_slopes.tolist())
        self._positions = {"pos_encoding": "ALIBI" if slopes else "NONE", "slopes": slopes}
        spec = attention_spec(
            num_qo_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_size,
            sm_scale=self.scale,
            logits_soft_cap=logits_soft_cap or 0.0,
            slopes=slopes,
        )
        self.num_queries_per_kv = spec.group_size

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashInferMetadata,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new keys and values and compute attention, without waiting for the device.

        Args:
            layer: holds the scales of an fp8 cache.
            query, key, value: [tokens, heads * head_size] or [tokens, heads, head_size], prefills first.
            kv_cache: see `FlashInferBackend`; uint8 or fp8 if it holds fp8, and empty in a profile run.
            attn_metadata: the metadata of the step, planned.
            output: the output buffer, of query's shape and dtype or, with output_scale, fp8.
            output_scale: the scale by which readers of an fp8 output multiply it.

        Returns:
            [tokens, num_heads * head_size], a view of `output` if that is not None.

        Raises:
            ValueError: a tensor contradicts the step or the cache; nothing has been written then.
            RuntimeError: the step has not been planned.
        """
        meta, n = attn_metadata, attn_metadata.num_prefill_tokens
        self._check(meta, query=query, key=key, value=value)
        q = query.view(-1, self.num_heads, self.head_size)
        k, v = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        cache = self._cache(kv_cache, key.dtype, meta)
        over_rows = cache is None or meta.prefill_over_rows
        prefill = self._with_positions(meta.rows_wrapper if over_rows else meta.prefill_wrapper) if n else None
        decode = self._with_positions(meta.decode_wrapper) if meta.num_decode_tokens else None
        target = self._target(query, output, output_scale)
        out = target if output_scale is None else torch.empty_like(q, memory_format=torch.contiguous_format)

        scales = {}
        if cache is not None:
            store((cache[:, 0], cache[:, 1]), k, v, meta.slot_mapping.flatten(), layer._k_scale, layer._v_scale)
            if cache.element_size() == 1:
                scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        params = {
            "window_left": self.sliding_window[0],
            "logits_soft_cap": self.logits_soft_cap or 0.0,
            "sm_scale": self.scale,
        }
        if prefill is not None and over_rows:
            prefill.run(q[:n], k[:n], v[:n], out=out[:n], **params)
        elif prefill is not None:
            prefill.run(q[:n], _in_memory_order(cache, prefill), out=out[:n], **params, **scales)
        if decode is not None:
            decode.run(q[n:], _in_memory_order(cache, decode), out=out[n:], **params, **scales)
        if output_scale is not None:
            target.copy_(quantize(out, target.dtype, output_scale))
        return target.view(len(q), -1)

    def _with_positions(self, wrapper: Any) -> Any:
        """The wrapper of the step, after setting the position encoding of its plan to this layer's."""
        if wrapper is None:
            raise RuntimeError("the step has no wrappers: FlashInferState.begin_forward sets and plans them")
        plan = wrapper.require_plan()
        if {"pos_encoding": plan.spec.pos_encoding, "slopes": plan.spec.slopes} != self._positions:
            wrapper.planned = plan.replace(**self._positions)
        return wrapper

    def _check(self, meta: FlashInferMetadata, **tensors: Tensor) -> None:
        """Refuse queries, keys and values that contradict the step."""
        tokens = meta.num_prefill_tokens + meta.num_decode_tokens
        for name, x in tensors.items():
            heads = self.num_heads if name == "query" else self.num_kv_heads
            if list(x.shape) not in ([tokens, heads * self.head_size], [tokens, heads, self.head_size]):
                wanted = f"{meta.num_prefill_tokens} + {meta.num_decode_tokens} tokens of {heads} heads"
                raise ValueError(f"{name} has shape {list(x.shape)}: the step has {wanted} of size {self.head_size}")
            if x.dtype != meta.q_data_type:
                raise ValueError(f"{name} is {x.dtype}: the step was planned for {meta.q_data_type}")

    def _cache(self, kv_cache: Tensor, dtype: torch.dtype, meta: FlashInferMetadata) -> Tensor | None:
        """The cache viewed as its dtype; None in a profile run."""
        if kv_cache.numel() == 0:
            if meta.num_decode_tokens:
                raise ValueError(f"kv_cache is empty: {meta.num_decode_tokens} tokens are to be decoded from it")
            return None
        if meta.is_profile_run:
            raise ValueError(f"kv_cache has shape {list(kv_cache.shape)}: it must be empty in a profile run")
        assert meta.page_size is not None
        shape = [len(kv_cache), 2, meta.page_size, self.num_kv_heads, self.head_size]
        if list(kv_cache.shape) != shape:
            raise ValueError(f"kv_cache has shape {list(kv_cache.shape)}: it must be {shape}")
        stored = cache_dtype(self.kv_cache_dtype, dtype)
        if kv_cache.dtype != stored and not (kv_cache.dtype == torch.uint8 and stored.itemsize == 1):
            raise ValueError(f"kv_cache is {kv_cache.dtype}: kv_cache_dtype = {self.kv_cache_dtype!r} is {stored}")
        if meta.data_type != stored:
            raise ValueError(f"kv_cache_dtype = {self.kv_cache_dtype!r}: the step was planned for {meta.data_type}")
        return kv_cache.view(stored)

    def _target(self, query: Tensor, output: Tensor | None, scale: Tensor | None) -> Tensor:
        """The output buffer as [tokens, num_heads, head_size]: a view of `output`, or a new tensor."""
        if output is None:
            if scale is not None:
                raise ValueError("output_scale is given without output, whose dtype says what to quantise to")
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
        allowed = (query.dtype,) if scale is None else (torch.float8_e4m3fn, torch.float8_e5m2)
        if output.numel() != query.numel() or not output.is_contiguous() or output.dtype not in allowed:
            actual = f"{output.dtype}, shape {list(output.shape)} and strides {list(output.stride())}"
            raise ValueError(f"output has {actual}: it must be {list(query.shape)}, contiguous, of {allowed}")
        return output.view(-1, self.num_heads, self.head_size)


def _in_memory_order(cache: Any, wrapper: Any) -> Any:
    """The cache with its dimensions in the order of the wrapper's layout."""
    return cache if wrapper.kv_layout == "NHD" else cache.transpose(2, 3)
