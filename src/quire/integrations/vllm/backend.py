"""What vLLM asks about the backend before it builds a model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from quire.definition.spec import attention_spec
from quire.integrations.vllm.builder import QuireMetadataBuilder
from quire.integrations.vllm.impl import KV_CACHE_DTYPES, QuireAttentionImpl


class VllmAttentionBackend(AttentionBackend):
    """Attention of decoder layers over vLLM's paged cache, computed by Quire.

    Keys and values of a token and head lie next to each other, as in vLLM's own backends: the cache of a layer is
    [blocks, num_kv_heads, block_size, 2 * head_size], with any strides.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)
    # New keys and values are written by an operation of their own, which piecewise CUDA graphs capture.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM finds a backend of another package."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[QuireAttentionImpl]:
        """The class of a layer's attention."""
        return QuireAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[QuireMetadataBuilder]:
        """The class that prepares the steps of a group of layers."""
        return QuireMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Kernels read pages of any size; vLLM's are multiples of 16."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of a layer's cache, which vLLM 0.33 no longer asks for."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order of dimensions in memory under vLLM's layout NHD or HND, which vLLM 0.33 no longer asks for."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "NHD":
            return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether `AttentionSpec` admits it."""
        try:
            attention_spec(num_qo_heads=1, num_kv_heads=1, head_dim_qk=head_size)
        except ValueError:
            return False
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Why a cache of 16 bits does not fit a model of another dtype; None if all fits."""
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} with dtype {str(dtype).removeprefix('torch.')} not supported"
        return None

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """GPUs since Ampere."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes: a logit per head in the softmax's denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes, for whole batches, as draft models have them."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes: with VLLM_BATCH_INVARIANT=1 the bits of a request do not depend on its batch."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: kernels are chosen by the longest query on the host, and compute no longer one."""
        return False
