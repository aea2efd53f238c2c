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
    from quire.activation import (
        gelu_and_mul,
        gelu_and_mul_quant,
        gelu_tanh_and_mul,
        gelu_tanh_and_mul_quant,
        silu_and_mul,
        silu_and_mul_quant,
    )
    from quire.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper, BlockTableAttention
    from quire.cascade import (
        BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
        MultiLevelCascadeAttentionWrapper,
        merge_state,
        merge_state_in_place,
        merge_states,
    )
    from quire.core import BatchDecodeWithPagedKVCache, BatchPrefillWithRaggedKVCache, PagedKVCache
    from quire.decode import (
        BatchDecodeMlaWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper,
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
        fast_decode_plan,
        single_decode_with_kv_cache,
    )
    from quire.mla import BatchMLAPagedAttentionWrapper
    from quire.norm import (
        fused_add_rmsnorm,
        fused_add_rmsnorm_quant,
        fused_qk_rmsnorm_rope_append_paged_kv_cache,
        gemma_fused_add_rmsnorm,
        gemma_rmsnorm,
        layernorm,
        layernorm_quant,
        rmsnorm,
        rmsnorm_quant,
    )
    from quire.page import (
        append_paged_kv_cache,
        append_paged_mla_kv_cache,
        get_batch_indices_positions,
        get_seq_lens,
    )
    from quire.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
    from quire.prefill import (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        single_prefill_with_kv_cache,
        single_prefill_with_kv_cache_return_lse,
    )
    from quire.quantization import packbits, segment_packbits
    from quire.rope import (
        apply_llama31_rope,
        apply_llama31_rope_inplace,
        apply_llama31_rope_pos_ids,
        apply_llama31_rope_pos_ids_inplace,
        apply_rope,
        apply_rope_inplace,
        apply_rope_pos_ids,
        apply_rope_pos_ids_inplace,
        apply_rope_with_cos_sin_cache,
        apply_rope_with_cos_sin_cache_inplace,
    )
    from quire.sampling import (
        chain_speculative_sampling,
        min_p_sampling_from_probs,
        sampling_from_logits,
        sampling_from_probs,
        softmax,
        top_k_mask_logits,
        top_k_renorm_probs,
        top_k_sampling_from_probs,
        top_k_top_p_sampling_from_logits,
        top_k_top_p_sampling_from_probs,
        top_p_renorm_probs,
        top_p_sampling_from_probs,
    )
    from quire.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

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
