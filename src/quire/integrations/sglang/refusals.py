"""What the backend does not compute: runners, layers and calls that are refused by name."""

from __future__ import annotations

from typing import Any

_ATTENTION_TYPES = ("decoder", "encoder_only")
# Models in which the tokens of an image see each other. SGLang makes the mask for that in its Triton backend alone.
_MUTUAL_IMAGES = {"Gemma3ForConditionalGeneration"}


def check_runner(runner: Any) -> None:
    """Refuse a model runner whose options need what the backend lacks.

    Raises:
        ValueError: with the option's name.
    """
    args, pool = runner.server_args, runner.token_to_kv_pool
    for refused, what in (
        (runner.model_config.is_encoder_decoder, "encoder-decoder models are"),
        (args.dcp_size > 1, f"--dcp-size {args.dcp_size} is"),
        (args.attn_cp_size > 1, f"--attn-cp-size {args.attn_cp_size} is"),
        (args.enable_prefill_cp, "--enable-prefill-cp is"),
        (args.enable_mis, "--enable-mis is"),
        (runner.kv_index_translator.is_translating, "--enable-unified-memory is"),
        (getattr(pool, "use_hnd", False), "SGLANG_USE_HND_KVCACHE=1 is"),
    ):
        _refuse(refused, what)
    method = pool.get_kv_cache_quant_method()
    name = getattr(method, "name", "unquantized")
    _refuse(name != "unquantized", f"--kv-cache-dtype of the method {name!r} is")


def check_mode(mode: Any, in_capture: bool) -> None:
    """Refuse forward modes that are neither decode, extend, mixed, idle nor target-verify, and graphs of extend.

    Raises:
        ValueError: with the mode's name.
    """
    _refuse(mode.is_dllm_extend(), "forward_mode DLLM_EXTEND, of diffusion models, is")
    draft = "forward_mode DRAFT_EXTEND_V2 is not supported: --speculative-draft-attention-backend triton computes it"
    if mode.is_draft_extend_v2():
        raise ValueError(draft)
    extends = mode.is_extend() and not mode.is_target_verify()
    _refuse(in_capture and extends, "a CUDA graph of whole prefills, --cuda-graph-backend-prefill full, is")


def check_drafts(spec: Any) -> None:
    """Refuse a step in which requests have different numbers of drafted tokens.

    Raises:
        ValueError: the numbers differ.
    """
    _refuse(getattr(spec, "ragged_verify_layout", None) is not None, "SGLANG_RAGGED_VERIFY_MODE is")


def check_layer(layer: Any) -> None:
    """Refuse a layer that the backend does not compute.

    Raises:
        ValueError: with the number of the layer, and its setting.
    """
    of, cap = f"layer {layer.layer_id}:", max(layer.logit_cap or 0.0, 0.0)
    kind = attention_type(layer)
    for refused, what in (
        (layer.is_cross_attention, "cross-attention is"),
        (layer.use_irope, "chunks of attention (use_irope) are"),
        (layer.xai_temperature_len > 0, f"xai_temperature_len = {layer.xai_temperature_len} is"),
        (layer.pos_encoding_mode != "NONE", f"pos_encoding_mode = {layer.pos_encoding_mode!r} is"),
        (cap > 0 and layer.logit_capping_method != "tanh", f"logit_capping_method {layer.logit_capping_method!r} is"),
        (kind not in _ATTENTION_TYPES, f"attn_type = {kind!r} is"),
        (kind == "encoder_only" and layer.sliding_window_size >= 0, "a window on both sides (encoder_only) is"),
    ):
        _refuse(refused, f"{of} {what}")


def check_call(layer: Any, options: dict[str, Any]) -> None:
    """Refuse options of a layer's call, where None and False leave an option out.

    Raises:
        ValueError: with the name of the option.
    """
    for name, value in options.items():
        _refuse(value is not None and value is not False, f"layer {layer.layer_id}: {name} is")


def has_mutual_images(runner: Any) -> bool:
    """Whether the tokens of an image see each other in a runner's model, see `check_images`."""
    architectures = getattr(runner.model_config.hf_config, "architectures", None) or ()
    return not _MUTUAL_IMAGES.isdisjoint(architectures)


def check_images(batch: Any) -> None:
    """Refuse a step with images, for a model that `has_mutual_images`.

    Raises:
        ValueError: there are images.
    """
    _refuse(any(batch.mm_inputs or ()), "images whose tokens see each other (Gemma 3) are")


def attention_type(layer: Any) -> str:
    """The layer's attn_type, such as "decoder" or "encoder_only"."""
    kind: str = getattr(layer.attn_type, "value", layer.attn_type)
    return kind


def _refuse(refused: bool, what: str) -> None:
    if refused:
        raise ValueError(f"{what} not supported by --attention-backend quire")
