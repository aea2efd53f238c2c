"""vLLM's FlashInfer backend.

Names, parameters and meanings are those of `vllm.attention.backends.flashinfer`. vLLM itself is not needed: any object
with the attributes in `quire.backends.vllm.protocols` is accepted. In a step, the builder makes the metadata,
`FlashInferState.begin_forward` plans it, and each layer's `FlashInferImpl.forward` stores keys and values and computes
attention::

    builder.prepare()
    model_input.attn_metadata = builder.build(seq_lens, query_lens, cuda_graph_pad_size=-1, batch_size=tokens)
    state.begin_forward(model_input)
    ...  # in each layer:
    out = impl.forward(layer, query, key, value, kv_cache, model_input.attn_metadata)

Layers may differ in window, soft cap, scale and ALiBi slopes: each passes its own to its runs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from quire.backends.vllm.builder import FlashInferMetadataBuilder
from quire.backends.vllm.impl import FlashInferImpl, logger
from quire.backends.vllm.metadata import (
    HEAD_SIZES,
    FlashInferMetadata,
    PerLayerParameters,
    get_per_layer_parameters,
    infer_global_hyperparameters,
)
from quire.backends.vllm.state import FLASHINFER_WORKSPACE_BUFFER_SIZE, FlashInferState
from quire.cache import block_copies
from quire.definition.tensors import check_layout
from quire.steps import fp8_dtype

__all__ = [
    "FLASHINFER_KV_CACHE_LAYOUT",
    "FLASHINFER_WORKSPACE_BUFFER_SIZE",
    "FlashInferBackend",
    "FlashInferImpl",
    "FlashInferMetadata",
    "FlashInferMetadataBuilder",
    "FlashInferState",
    "PerLayerParameters",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "logger",
]

FLASHINFER_KV_CACHE_LAYOUT: str = os.environ.get("VLLM_KV_CACHE_LAYOUT") or "NHD"


class FlashInferBackend:
    """The classes of the backend, and the shape and layout of its cache.

    A cache has shape [num_blocks, 2, block_size, num_kv_heads, head_size]. In memory its dimensions are permuted by
    `get_kv_cache_stride_order`, which follows FLASHINFER_KV_CACHE_LAYOUT (the environment's VLLM_KV_CACHE_LAYOUT).
    """

    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        return FlashInferImpl

    @staticmethod
    def get_metadata_cls() -> type[FlashInferMetadata]:
        return FlashInferMetadata

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        return FlashInferMetadataBuilder

    @staticmethod
    def get_state_cls() -> type[FlashInferState]:
        return FlashInferState

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> FlashInferMetadata:
        """Make the metadata of a step from its fields."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @classmethod
    def make_metadata_builder(cls, *args: Any, **kwargs: Any) -> FlashInferMetadataBuilder:
        """Make a metadata builder for a runner's input builder."""
        return cls.get_builder_cls()(*args, **kwargs)

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """The order of the cache's dimensions in memory.

        Raises:
            ValueError: the layout is neither NHD nor HND.
        """
        return (0, 1, 2, 3, 4) if check_layout(FLASHINFER_KV_CACHE_LAYOUT) == "NHD" else (0, 1, 3, 2, 4)

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        """Copy pages of one cache to another: see `quire.cache.block_copies.swap_blocks`."""
        block_copies.swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)

    @staticmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        """Copy pages within each of several caches: see `quire.cache.block_copies.copy_blocks`."""
        block_copies.copy_blocks(kv_caches, src_to_dists)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_fp8_dtype_for_flashinfer(kv_cache_dtype: str) -> torch.dtype:
        """The dtype of the names fp8, fp8_e4m3 and fp8_e5m2; ValueError for any other name."""
        return fp8_dtype(kv_cache_dtype)
