"""Head and layer sizes of models with multi-head latent attention (MLA); public in `quire.mla`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MLAHeadDimensions:
    """The sizes of a head in multi-head latent attention.

    Attributes:
        qk_nope_head_dim: elements of a query or key without RoPE, before its projection is absorbed.
        qk_rope_head_dim: elements of a query or key with RoPE.
        v_head_dim: elements of a value, before its projection is absorbed.
        kv_lora_rank: elements of the latent vector that all heads share.
    """

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """The sizes of a layer in multi-head latent attention: those of its heads, and the number of query heads."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(128, 64, 128, 512)
smaller_mla_dimensions = MLAHeadDimensions(64, 64, 128, 256)
nope_mla_dimensions = MLAHeadDimensions(256, 0, 256, 512)
supported_mla_head_dimensions = [deepseek_mla_dimensions, smaller_mla_dimensions, nope_mla_dimensions]
supported_mla_layer_dimensions = [
    MLALayerDimensions(deepseek_mla_dimensions, 128),
    MLALayerDimensions(deepseek_mla_dimensions, 64),
    MLALayerDimensions(smaller_mla_dimensions, 32),
]
