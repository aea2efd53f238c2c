"""What a checkpoint says about sampling: its generation_config.json, as Transformers' `generate` understands it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from quire.engine.params import LIBRARY_DEFAULTS, SamplingParams

# Transformers' names of what `SamplingParams` has.
_OURS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
# What changes no token of a completion: special tokens, caches, what is reported, how it is computed (speculative
# decoding is exact), and what counts with beams alone. `max_length` includes the prompt, which `max_tokens` does not.
_WITHOUT_EFFECT = (
    "do_sample max_length bos_token_id pad_token_id eos_token_id decoder_start_token_id "
    "use_cache cache_config cache_implementation max_cache_len prefill_chunk_size low_memory "
    "compile_config disable_compile continuous_batching_config "
    "output_attentions output_hidden_states output_logits output_scores return_dict_in_generate renormalize_logits "
    "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind is_assistant "
    "max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens "
    "speculation_type target_lookbehind use_mtp "
    "diversity_penalty early_stopping length_penalty num_beam_groups "
    "transformers_version _from_model_config"
)


def read_generation_config(folder: Path, network: Any) -> tuple[SamplingParams, list[int] | int | None]:
    """The sampling parameters of requests that say nothing, and the end tokens (None: the file does not say).

    Where the checkpoint does not ask for sampling, it is greedy. Where it does, settings that it leaves out are
    Transformers' own, as in `generate`. A warning names settings that change tokens and that Quire does not have.

    Args:
        folder: the checkpoint.
        network: its Transformers model.

    Raises:
        ValueError: the file is broken, or a value in it is not allowed.
    """
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if path.is_file():  # Transformers takes one that it can't read for one that is not there
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} could not be loaded: {error}") from error
    config = network.generation_config or GenerationConfig()
    said = {name: value for name, value in config.to_dict().items() if value not in (None, [], {})}
    usual = GenerationConfig._get_default_generation_params()
    _warn_of_others(path, said, usual, set(GenerationConfig().to_dict()))
    values = {**usual, **said} if said.get("do_sample") is True else {**said, "temperature": 0.0}
    try:
        params = SamplingParams(**{ours: values[name] for name, ours in _OURS.items() if name in values})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return params.over(LIBRARY_DEFAULTS), said.get("eos_token_id")


def _warn_of_others(path: Path, said: dict[str, Any], usual: dict[str, Any], known: set[str]) -> None:
    """Tell which of Transformers' settings would change tokens; what it does not know either changes none."""
    others = sorted(known & set(said) - set(_OURS) - set(_WITHOUT_EFFECT.split()))
    names = [f"{name} = {said[name]!r}" for name in others if said[name] != usual.get(name)]
    if names:
        warnings.warn(
            f"{path} has settings that Quire does not have, so tokens may differ from those of Transformers' generate: "
            + ", ".join(names),
            stacklevel=2,
        )
