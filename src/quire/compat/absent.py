"""FlashInfer's names that have nothing to do with Quire, for programs that import them whether they use them or not.

They exist, and raise NotImplementedError when they are called. What is not in this table does not exist. Where Quire
has an operation of the name, that one is found.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["CUDNN_AVAILABLE", "is_cuda_tile_available"]

CUDNN_AVAILABLE = False

_FP4 = (
    "e2m1_and_ufp8sf_scale_to_float nvfp4_kv_dequantize nvfp4_kv_quantize nvfp4_quantize nvfp4_quantize_paged_kv_cache"
)
_CUDNN_DECODE, _CUDNN_PREFILL = "cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"
_ACTIVATION = "gelu_and_mul gelu_tanh_and_mul silu_and_mul"
_GEMM = "SegmentGEMMWrapper bmm_bf16 bmm_fp8 mm_bf16 mm_fp4 mm_fp8"
_NORM = "fused_add_rmsnorm gemma_fused_add_rmsnorm gemma_rmsnorm layernorm rmsnorm"
_SAMPLING = (
    "chain_speculative_sampling min_p_sampling_from_probs sampling_from_logits sampling_from_probs softmax "
    "top_k_mask_logits top_k_renorm_probs top_k_sampling_from_probs top_k_top_p_sampling_from_logits "
    "top_k_top_p_sampling_from_probs top_p_renorm_probs top_p_sampling_from_probs"
)
_PAGE = "nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_mla_kv_cache"
_MLA = "trtllm_batch_decode_with_kv_cache_mla xqa_batch_decode_with_kv_cache_mla"

NAMES: dict[str, tuple[str, ...]] = {
    f"flashinfer{module}": tuple(" ".join(names).split())
    for module, *names in (
        ("", _ACTIVATION, _GEMM, _NORM, _SAMPLING, _PAGE, _FP4, _CUDNN_DECODE, _CUDNN_PREFILL),
        (".activation", _ACTIVATION),
        (".cudnn", _CUDNN_DECODE, _CUDNN_PREFILL),
        (".cudnn.decode", _CUDNN_DECODE),
        (".cudnn.prefill", _CUDNN_PREFILL),
        (".decode", _CUDNN_DECODE, _MLA, "trtllm_batch_decode_with_kv_cache xqa_batch_decode_with_kv_cache"),
        (".fp4_quantization", _FP4),
        (".gemm", _GEMM),
        (".mla", _MLA),
        (".norm", _NORM),
        (".page", _PAGE),
        (
            ".prefill",
            "fmha_v2_prefill_deepseek trtllm_batch_context_with_kv_cache trtllm_fmha_v2_prefill",
            "trtllm_ragged_attention_deepseek",
        ),
        (".quantization", _FP4),
        (".quantization.fp4_quantization", _FP4),
        (".sampling", _SAMPLING),
        (".xqa", "xqa xqa_mla"),
    )
}


def is_cuda_tile_available(*args: object) -> bool:
    """False: Quire has no kernels in cuTile."""
    return False


def absent(module: str, name: str) -> Any:
    """What stands for a name in the table: a function or, where it begins with a capital, a class."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        hint = " (nor is NVFP4)" if "nvfp4" in name or name.endswith("_mla") else ""
        raise NotImplementedError(f"{module}.{name} is not part of Quire{hint}")

    refuse.__module__, refuse.__name__, refuse.__qualname__ = module, name, name
    refuse.__doc__ = "Not part of Quire: raises NotImplementedError."
    if not name[0].isupper():
        return refuse
    members = {"__init__": refuse, "plan": refuse, "run": refuse, "__module__": module, "__doc__": refuse.__doc__}
    return type(name, (), members)
