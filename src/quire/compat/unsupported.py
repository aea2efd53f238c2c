"""FlashInfer's names that Quire does not implement, for programs that import them whether they use them or not.

The names in this table exist, and raise NotImplementedError when they are called. A name of FlashInfer that is neither
here nor in Quire does not exist. If Quire implements a name of this table, its implementation is found.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["CUDNN_AVAILABLE", "is_cuda_tile_available"]

CUDNN_AVAILABLE = False

_FP4 = (
    "e2m1_and_ufp8sf_scale_to_float nvfp4_kv_dequantize nvfp4_kv_quantize nvfp4_quantize nvfp4_quantize_paged_kv_cache"
)
_CUDNN_DECODE, _CUDNN_PREFILL = "cudnn_batch_decode_with_kv_cache", "cudnn_batch_prefill_with_kv_cache"
_ACTIVATION = "silu_and_mul_scaled_nvfp4_experts_quantize"
_GEMM = "bmm_bf16 bmm_fp8 mm_bf16 mm_fp4 mm_fp8"
_NORM = (
    "add_rmsnorm_fp4quant fused_add_rmsnorm_fp8_block_quant fused_dit_gate_residual_layernorm_gamma_beta "
    "fused_dit_gate_residual_layernorm_scale_shift fused_dit_residual_layernorm_scale_shift fused_qk_rmsnorm_rope "
    "fused_rmsnorm_silu rmsnorm_fp4quant"
)
_PAGE = (
    "nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_kv_cache_with_slot_mapping "
    "nvfp4_quantize_append_paged_mla_kv_cache"
)
_RANGES, _SAGE = "BatchPrefillWithCausalBidirectionalRangesWrapper", "trtllm_sage_attention_quantize"
_MLA = "trtllm_batch_decode_with_kv_cache_mla xqa_batch_decode_with_kv_cache_mla"

NAMES: dict[str, tuple[str, ...]] = {
    f"flashinfer{module}": tuple(" ".join(names).split())
    for module, *names in (
        (
            "",
            *(_ACTIVATION, _GEMM, _NORM, _PAGE, _FP4, _CUDNN_DECODE, _CUDNN_PREFILL, _RANGES, _SAGE),
            "SfLayout mxfp8_quantize scaled_fp4_grouped_quantize",
        ),
        (".activation", _ACTIVATION),
        (".attention", _RANGES),
        (".cudnn", _CUDNN_DECODE, _CUDNN_PREFILL),
        (".cudnn.decode", _CUDNN_DECODE),
        (".cudnn.prefill", _CUDNN_PREFILL),
        (
            ".decode",
            *(_CUDNN_DECODE, _MLA),
            "single_decode_with_kv_cache_with_jit_module",
        ),
        (".fp4_quantization", _FP4),
        (".gemm", _GEMM, "gemm_fp8_nt_groupwise"),
        # This builds a program's own CUDA sources.
        (".jit", "gen_jit_spec"),
        (".jit.core", "gen_jit_spec"),
        (".mla", _MLA),
        (
            ".msa_ops",
            "MSASparseAttentionWorkspace msa_decode_nvfp4_specialized_stats msa_decode_nvfp4_specialized_warmup",
            "msa_prefill_nvfp4_specialized_stats msa_prefill_nvfp4_specialized_warmup msa_proxy_score",
            "msa_proxy_score_fp4 msa_sparse_attention msa_sparse_decode_attention msa_topk_select",
            "prepare_msa_nvfp4_sparse_decode supports_packed_kv",
        ),
        (".norm", _NORM),
        (".page", _PAGE),
        (
            ".prefill",
            "fmha_v2_prefill_deepseek trtllm_fmha_v2_prefill",
            "trtllm_ragged_attention_deepseek trtllm_prefill_with_kv_cache_mla fmha_v2_prefill_sm120 fmha_varlen",
            "fmha_varlen_plan single_prefill_with_kv_cache_with_jit_module",
            *(_CUDNN_PREFILL, _SAGE),
        ),
        (".quantization", _FP4),
        (".quantization.fp4_quantization", _FP4),
        (
            ".quantization.nvfp4_quantization_utils",
            "NVFP44Over6Config NVFP44Over6ErrMode current_nvfp4_4over6_config make_nvfp4_global_scale",
            "nvfp4_4over6_cache_key nvfp4_4over6_code nvfp4_4over6_fp8_input_error nvfp4_4over6_from_code",
            "nvfp4_4over6_mode_label nvfp4_e4m3_max nvfp4_per_token_scale_inv resolve_nvfp4_4over6",
        ),
        # These return CUDA modules, and states of CUDA generators.
        (".sampling", "get_sampling_module get_seed_and_offset"),
        (".testing.utils", "bench_kineto dequantize_fp8 per_block_cast_to_fp8 per_token_cast_to_fp8 quantize_fp8"),
        (".utils", "FP4Tensor get_trtllm_gen_multi_ctas_kv_counter_bytes"),
        (".xqa", "xqa xqa_mla"),
    )
}


def is_cuda_tile_available(*args: object) -> bool:
    """False: Quire has no kernels in cuTile."""
    return False


def unsupported(module: str, name: str) -> Any:
    """The placeholder of a name in the table: a class if the name starts with a capital, or else a function."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        hint = " (nor is NVFP4)" if "nvfp4" in name or name.endswith("_mla") else ""
        raise NotImplementedError(f"{module}.{name} is not part of Quire{hint}")

    refuse.__module__, refuse.__name__ = module, name
    refuse.__qualname__ = name
    refuse.__doc__ = "Not part of Quire: raises NotImplementedError."
    if not name[0].isupper():
        return refuse
    members = {"__init__": refuse, "plan": refuse, "run": refuse, "__module__": module, "__doc__": refuse.__doc__}
    return type(name, (), members)
