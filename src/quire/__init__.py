"""Quire: attention for LLM serving over paged key/value caches, in Python.

`import quire as flashinfer` is how code for FlashInfer uses it. Names are imported when they are first used, so that
importing Quire needs no GPU, no Triton and no Transformers, and takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "decode": (
        "BatchDecodeMlaWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
    ),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    ),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "page": ("append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "mla": ("BatchMLAPagedAttentionWrapper",),
    "attention": ("BatchAttention", "BatchAttentionWithAttentionSinkWrapper", "BlockTableAttention"),
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "rope": (
        "apply_llama31_rope",
        "apply_llama31_rope_inplace",
        "apply_llama31_rope_pos_ids",
        "apply_llama31_rope_pos_ids_inplace",
        "apply_rope",
        "apply_rope_inplace",
        "apply_rope_pos_ids",
        "apply_rope_pos_ids_inplace",
        "apply_rope_with_cos_sin_cache",
        "apply_rope_with_cos_sin_cache_inplace",
    ),
    "quantization": ("packbits", "segment_packbits"),
    "gemm": ("SegmentGEMMWrapper",),
    "norm": (
        "fused_add_rmsnorm",
        "fused_add_rmsnorm_quant",
        "fused_qk_rmsnorm_rope_append_paged_kv_cache",
        "gemma_fused_add_rmsnorm",
        "gemma_rmsnorm",
        "layernorm",
        "layernorm_quant",
        "rmsnorm",
        "rmsnorm_quant",
    ),
    "activation": (
        "gelu_and_mul",
        "gelu_and_mul_quant",
        "gelu_tanh_and_mul",
        "gelu_tanh_and_mul_quant",
        "silu_and_mul",
        "silu_and_mul_quant",
    ),
    "sampling": (
        "chain_speculative_sampling",
        "min_p_sampling_from_probs",
        "sampling_from_logits",
        "sampling_from_probs",
        "softmax",
        "top_k_mask_logits",
        "top_k_renorm_probs",
        "top_k_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
        "top_k_top_p_sampling_from_probs",
        "top_p_renorm_probs",
        "top_p_sampling_from_probs",
    ),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
    "core": ("BatchDecodeWithPagedKVCache", "BatchPrefillWithRaggedKVCache", "PagedKVCache"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_MODULES = (*_HOME, "backends", "batch", "cache", "concat_ops", "engine", "steps")

if TYPE_CHECKING:
    from quire.activation import gelu_and_mul as gelu_and_mul
    from quire.activation import gelu_and_mul_quant as gelu_and_mul_quant
    from quire.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
    from quire.activation import gelu_tanh_and_mul_quant as gelu_tanh_and_mul_quant
    from quire.activation import silu_and_mul as silu_and_mul
    from quire.activation import silu_and_mul_quant as silu_and_mul_quant
    from quire.attention import BatchAttention as BatchAttention
    from quire.attention import BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper
    from quire.attention import BlockTableAttention as BlockTableAttention
    from quire.cascade import (
        BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    )
    from quire.cascade import (
        BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    )
    from quire.cascade import MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper
    from quire.cascade import merge_state as merge_state
    from quire.cascade import merge_state_in_place as merge_state_in_place
    from quire.cascade import merge_states as merge_states
    from quire.core import BatchDecodeWithPagedKVCache as BatchDecodeWithPagedKVCache
    from quire.core import BatchPrefillWithRaggedKVCache as BatchPrefillWithRaggedKVCache
    from quire.core import PagedKVCache as PagedKVCache
    from quire.decode import BatchDecodeMlaWithPagedKVCacheWrapper as BatchDecodeMlaWithPagedKVCacheWrapper
    from quire.decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper
    from quire.decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper
    from quire.decode import fast_decode_plan as fast_decode_plan
    from quire.decode import single_decode_with_kv_cache as single_decode_with_kv_cache
    from quire.gemm import SegmentGEMMWrapper as SegmentGEMMWrapper
    from quire.mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
    from quire.norm import fused_add_rmsnorm as fused_add_rmsnorm
    from quire.norm import fused_add_rmsnorm_quant as fused_add_rmsnorm_quant
    from quire.norm import fused_qk_rmsnorm_rope_append_paged_kv_cache as fused_qk_rmsnorm_rope_append_paged_kv_cache
    from quire.norm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
    from quire.norm import gemma_rmsnorm as gemma_rmsnorm
    from quire.norm import layernorm as layernorm
    from quire.norm import layernorm_quant as layernorm_quant
    from quire.norm import rmsnorm as rmsnorm
    from quire.norm import rmsnorm_quant as rmsnorm_quant
    from quire.page import append_paged_kv_cache as append_paged_kv_cache
    from quire.page import append_paged_mla_kv_cache as append_paged_mla_kv_cache
    from quire.page import get_batch_indices_positions as get_batch_indices_positions
    from quire.page import get_seq_lens as get_seq_lens
    from quire.pod import BatchPODWithPagedKVCacheWrapper as BatchPODWithPagedKVCacheWrapper
    from quire.pod import PODWithPagedKVCacheWrapper as PODWithPagedKVCacheWrapper
    from quire.prefill import BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper
    from quire.prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper
    from quire.prefill import single_prefill_with_kv_cache as single_prefill_with_kv_cache
    from quire.prefill import single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse
    from quire.quantization import packbits as packbits
    from quire.quantization import segment_packbits as segment_packbits
    from quire.rope import apply_llama31_rope as apply_llama31_rope
    from quire.rope import apply_llama31_rope_inplace as apply_llama31_rope_inplace
    from quire.rope import apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids
    from quire.rope import apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace
    from quire.rope import apply_rope as apply_rope
    from quire.rope import apply_rope_inplace as apply_rope_inplace
    from quire.rope import apply_rope_pos_ids as apply_rope_pos_ids
    from quire.rope import apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace
    from quire.rope import apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache
    from quire.rope import apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace
    from quire.sampling import chain_speculative_sampling as chain_speculative_sampling
    from quire.sampling import min_p_sampling_from_probs as min_p_sampling_from_probs
    from quire.sampling import sampling_from_logits as sampling_from_logits
    from quire.sampling import sampling_from_probs as sampling_from_probs
    from quire.sampling import softmax as softmax
    from quire.sampling import top_k_mask_logits as top_k_mask_logits
    from quire.sampling import top_k_renorm_probs as top_k_renorm_probs
    from quire.sampling import top_k_sampling_from_probs as top_k_sampling_from_probs
    from quire.sampling import top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits
    from quire.sampling import top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs
    from quire.sampling import top_p_renorm_probs as top_p_renorm_probs
    from quire.sampling import top_p_sampling_from_probs as top_p_sampling_from_probs
    from quire.sparse import BlockSparseAttentionWrapper as BlockSparseAttentionWrapper
    from quire.sparse import VariableBlockSparseAttentionWrapper as VariableBlockSparseAttentionWrapper

__all__ = [*_MODULE_OF, *_MODULES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"quire.{_MODULE_OF[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"quire.{name}")
    else:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
