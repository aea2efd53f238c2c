"""Fields of other servers' bodies that change an answer, and that this server does not have: they are refused by name,
unless their value has no effect. Fields without effect on an answer (of caches, priorities, names) are ignored, and so
are unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.server.errors import bad

# Without effect if they are null, false, 0 or empty.
_NAMES = (
    # OpenAI
    "suffix audio moderation "
    # vLLM
    "use_beam_search early_stopping watermarking guided_regex guided_choice guided_grammar guided_json_object "
    "guided_whitespace_pattern structural_tag logits_processors prompt_embeds logprob_token_ids repetition_detection "
    "prompt_logprob_token_ids chat_template documents echo return_prompt_text return_token_strs reasoning_effort "
    "cache_salt kv_transfer_params ec_transfer_params vllm_xargs "
    # SGLang
    "regex ebnf stop_regex no_stop_trim lora_path session_params custom_params custom_logit_processor input_ids task "
    "reasoning return_hidden_states return_routed_experts return_cached_tokens_details return_prompt_token_ids "
    "return_meta_info return_logprob top_logprobs_num token_ids_logprob sampling_params "
    # llama.cpp
    "grammar dynatemp_range dry_multiplier xtc_probability mirostat n_indent n_probs min_keep samplers lora "
    "return_tokens return_progress timings_per_token post_sampling_probs response_fields verbose with_pieces "
    "thinking_forced_open "
    # Text Generation Inference, and Transformers' names
    "truncate watermark details decoder_input_details top_n_tokens adapter_id guideline return_full_text "
    "stop_sequences stop_strings min_new_tokens min_length no_repeat_ngram_size penalty_alpha bad_words_ids "
    "force_words_ids suppress_tokens begin_suppress_tokens sequence_bias "
    # Embeddings of Cohere, Jina, NVIDIA and others
    "input_type instruction late_chunking prompt_name "
    # Loading adapters
    "load_inplace is_3d_lora_weight"
)
_UNLESS_EMPTY = frozenset(_NAMES.split())
_EMPTY: tuple[Any, ...] = (False, "", [], {})
# Without effect if they are null or have one of these values.
_UNLESS: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "truncation_side": ("left",),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "guided_json": (),
    "json_schema": (),
    "enable_thinking": (),
    "thinking": (),
    "thinking_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "reasoning_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
    "reasoning_format": ("none",),
    "n_predict": (),
    "n_cmpl": (1,),
    "typical_p": (1,),
    "repeat_penalty": (1,),
    "repeat_last_n": (-1,),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
    "t_max_predict_ms": (-1, 0),
    "do_sample": (),
    "max_new_tokens": (),
    "max_length": (),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "guidance_scale": (1,),
    # Of embeddings
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
_INSTEAD = {
    "response_format": "json_schema guided_json guided_json_object",
    "structured_outputs": "regex ebnf grammar guided_regex guided_choice guided_grammar",
    "chat_template_kwargs": "reasoning_effort reasoning enable_thinking thinking",
    "max_tokens": "n_predict max_new_tokens max_length max_completion_tokens",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs return_logprob top_logprobs top_n_tokens",
    "return_token_ids": "return_tokens return_prompt_token_ids",
    "prompt_logprobs": "decoder_input_details",
    "include_stop_str_in_output": "no_stop_trim",
    "truncate_prompt_tokens": "truncate",
    "min_tokens": "min_new_tokens",
    "stop": "stop_sequences stop_strings",
    "temperature": "do_sample",
    "n": "n_cmpl num_return_sequences",
    "model": "lora lora_path adapter_id",
}
_HINTS = {name: f": use {ours}" for ours, names in _INSTEAD.items() for name in names.split()}


def refuse(extra: Mapping[str, Any], n: int | None = None, special: bool = True) -> None:
    """Raise the ApiError for a field that is not supported.

    Args:
        extra: the fields of a body that this server does not have.
        n: the number of completions of a prompt.
        special: the value of `add_special_tokens` that has no effect.
    """
    neutral = {**_UNLESS, "add_special_tokens": (special,), "best_of": (n or 1,)}
    for name, value in extra.items():
        if value is None:
            continue
        if (name in neutral and value not in neutral[name]) or (name in _UNLESS_EMPTY and value not in _EMPTY):
            hint = _HINTS.get(name, "")
            raise bad(name, f"{name} is not supported by this server{hint}", "unsupported_parameter")
    _refuse_tools(extra)


def _refuse_tools(extra: Mapping[str, Any]) -> None:
    """Refuse tools, unless the model must not use them anyway."""
    for offered, chosen in (("tools", "tool_choice"), ("functions", "function_call")):
        choice = extra.get(chosen)
        if choice == "none":
            continue
        if extra.get(offered) not in (None, *_EMPTY):
            message = f'{offered} is not supported by this server, unless {chosen} is "none"'
            raise bad(offered, message, "unsupported_parameter")
        if choice not in (None, "auto"):
            raise bad(chosen, f"{chosen} needs {offered}, which this server does not support", "unsupported_parameter")
