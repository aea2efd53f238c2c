"""The sampling parameters of a checkpoint: its generation_config.json, as Transformers' `generate` reads it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from quire.engine.params import LIBRARY_DEFAULTS, SamplingParams
from quire.engine.reading import read_json
from quire.engine.transformers_internals import generation_defaults

# Transformers' names of the attributes of `SamplingParams`.
_OURS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
# Settings that change no token of a completion: special tokens, caches, reports, ways of computing (speculative
# decoding is exact), and settings of beam search. `max_length` includes the prompt, unlike `max_tokens`.
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
    """The sampling parameters for requests that leave them out, and the end tokens (None: the file has none).

    A checkpoint without do_sample is greedy. With do_sample, settings that it leaves out have Transformers' defaults.
    A warning names settings that change tokens and that Quire does not have.

    Args:
        folder: the checkpoint.
        network: its Transformers model.

    Raises:
        ValueError: the file is broken, or a value in it is invalid.
    """
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    # Transformers ignores a file that it cannot parse.
    read_json(path)
    config = network.generation_config or GenerationConfig()
    settings = {name: value for name, value in config.to_dict().items() if value not in (None, [], {})}
    defaults = generation_defaults()
    _warn_of_others(path, settings, defaults, set(GenerationConfig().to_dict()))
    values = {**defaults, **settings} if settings.get("do_sample") is True else {**settings, "temperature": 0.0}
    try:
        params = SamplingParams(**{ours: values[name] for name, ours in _OURS.items() if name in values})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return params.over(LIBRARY_DEFAULTS), settings.get("eos_token_id")


def _warn_of_others(path: Path, settings: dict[str, Any], defaults: dict[str, Any], known: set[str]) -> None:
    """Warn of settings known to Transformers that change tokens and that Quire does not have."""
    others = sorted(known & set(settings) - set(_OURS) - set(_WITHOUT_EFFECT.split()))
    names = [f"{name} = {settings[name]!r}" for name in others if settings[name] != defaults.get(name)]
    if names:
        warnings.warn(
            f"{path} has settings that Quire does not have, so tokens may differ from those of Transformers' generate: "
            + ", ".join(names),
            stacklevel=2,
        )
