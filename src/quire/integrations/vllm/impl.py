"""The attention of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl

from quire.cascade import merge_state_in_place
from quire.definition.checks import check
from quire.definition.tensors import check_tensor
from quire.integrations.vllm.builder import QuireMetadata
from quire.integrations.vllm.launches import LayerKind
from quire.kernels.append import write, write_quantized
from quire.steps import fp8_dtype

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


class QuireAttentionImpl(AttentionImpl[QuireMetadata]):
    """The attention of a decoder's layer.

    Args:
        num_heads, num_kv_heads, head_size, scale: the layer's heads, and the factor of its logits.
        alibi_slopes: a slope per head.
        sliding_window: the number of keys that a query sees, with its own.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
        logits_soft_cap: c replaces logits x by c * tanh(x / c).
        attn_type: "decoder".
        kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM then writes no keys for it.
        sinks: [num_heads], a logit per head in the softmax's denominator.

    Raises:
        ValueError: an argument that is not supported.
    """

    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        check(attn_type == "decoder", "attn_type", str(attn_type), "decoder")
        check(kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", kv_cache_dtype, ", ".join(KV_CACHE_DTYPES))
        self.num_heads, self.head_size = num_heads, head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.sliding_window = -1 if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._fp8 = fp8_dtype(kv_cache_dtype) if kv_cache_dtype.startswith("fp8") else None
        self._cache: Tensor | None = None
        self._kind: LayerKind | None = None
        self._measures_scales: bool | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: QuireMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache, which has the new keys and values already.

        Args:
            layer: vLLM's, which has the scales of an fp8 cache.
            query: [tokens, num_heads, head_size].
            kv_cache: [blocks, num_kv_heads, block_size, 2 * head_size], any strides.
            attn_metadata: None fills the output with 0, as vLLM's profiling wants.
            output: [tokens, num_heads, head_size], which is written.

        Raises:
            NotImplementedError: a quantized output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("outputs of attention that are quantized are not part of Quire")
        if attn_metadata is None:
            return output.fill_(0)
        cache = self._views(kv_cache)
        kind = self._kind
        if kind is None or kind.q_dtype != query.dtype or kind.kv_dtype != cache[0].dtype:
            kind = self._kind = self._layer_kind(query.dtype, cache[0].dtype)
        options: dict[str, Any] = {} if self.sinks is None else {"sinks": self.sinks}
        if self._fp8 is not None:
            options["k_scale"], options["v_scale"] = self._scales(layer)
        if attn_metadata.cascade:
            self._cascade(kind, query, cache, output, attn_metadata, options)
            return output
        for launch in attn_metadata.launches:
            launch.run(kind, query, cache, output, **options)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to their slots, where -1 is none.

        Args:
            key, value: [tokens, num_kv_heads, head_size], of which there may be more than slots.
            slot_mapping: int64 [tokens], block * block_size + offset.
        """
        k, v = self._views(kv_cache)
        count = slot_mapping.shape[0]
        if key.shape[0] != count:
            key, value = key[:count], value[:count]
        if self._fp8 is None:
            write(k, v, key, value, slot_mapping)
            return
        k_scale, v_scale = self._scales(layer)
        if isinstance(k_scale, Tensor):
            write_quantized(k, v, key, value, slot_mapping, k_scale, v_scale, 1.0, 1.0)
        else:
            write_quantized(k, v, key, value, slot_mapping, None, None, k_scale, v_scale)

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and v of the cache, [blocks, block_size, num_kv_heads, head_size], which are made and checked once."""
        if kv_cache is not self._cache:
            typed = kv_cache if self._fp8 is None else kv_cache.view(self._fp8)
            shape = (None, self.num_kv_heads, None, 2 * self.head_size)
            check_tensor(typed, "kv_cache", shape, typed.dtype, kv_cache.device)
            nhd = typed.transpose(1, 2)
            self._k, self._v = nhd[..., : self.head_size], nhd[..., self.head_size :]
            self._cache = kv_cache
        return self._k, self._v

    def _layer_kind(self, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> LayerKind:
        return LayerKind(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_size=self.head_size, scale=self.scale,
            window=self.sliding_window, soft_cap=self.logits_soft_cap, q_dtype=q_dtype, kv_dtype=kv_dtype,
            slopes=tuple(self.alibi_slopes or ()),
        )  # fmt: skip

    def _scales(self, layer: Any) -> tuple[Any, Any]:
        """The scales of keys and values. Those that vLLM measures in its first step stay on the device, because graphs
        are captured before; all others are numbers, which cost no launch.
        """
        if self._measures_scales is None:
            self._measures_scales = bool(getattr(layer, "calculate_kv_scales", False))
        if self._measures_scales:
            return layer._k_scale, layer._v_scale
        return layer._k_scale_float, layer._v_scale_float

    def _cascade(
        self,
        kind: LayerKind,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        output: Tensor,
        metadata: QuireMetadata,
        options: dict[str, Any],
    ) -> None:
        """Attend to a shared prefix and to what follows it. Sinks count once, in the second."""
        prefix, suffix = metadata.launches
        _, lse = suffix.run(kind, query, cache, output, return_lse=True, **options)
        options.pop("sinks", None)
        shared, shared_lse = prefix.run(kind, query, cache, torch.empty_like(output), return_lse=True, **options)
        merge_state_in_place(output, lse, shared, shared_lse)
