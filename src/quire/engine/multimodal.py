"""Checkpoints of models that also see images: their language model runs, on text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_REMOVED = "quire_removed_parts"


def is_multimodal(config: Any) -> bool:
    """Whether a configuration of Transformers is of a model that takes images and text, with a language model that can
    run alone.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT

    is_known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not is_known or config.is_encoder_decoder or config.get_text_config() is config:
        return False
    # Some types have a class for text alone, too, which a checkpoint may have been saved by.
    saved_by = set(config.architectures or ())
    return not saved_by & (set(CAUSAL.values()) - set(IMAGE_TEXT.values()))


def auto_class(config: Any) -> Any:
    """The class of Transformers that loads a model with this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM


def keep_language_model(network: Any) -> None:
    """Remove from a network all modules with weights that text does not pass through: the encoders of images, and what
    maps their outputs to embeddings.

    Args:
        network: Transformers' model of a configuration for which `is_multimodal` holds.
    """
    kept = {id(network.get_decoder()), id(network.get_output_embeddings())}
    setattr(network, _REMOVED, tuple(_remove_others(network, kept, "")))


def removed_parts(network: Any) -> tuple[str, ...]:
    """The paths of the modules that `keep_language_model` has removed from a network."""
    return getattr(network, _REMOVED, ())


def _remove_others(module: nn.Module, kept: set[int], prefix: str) -> list[str]:
    """Replace by None the parts of a module that have weights and neither are nor contain one of those to keep, and
    return their paths, which begin with the module's.
    """
    removed = []
    for name, part in list(module.named_children()):
        if id(part) in kept:
            continue
        if any(id(inner) in kept for inner in part.modules()):
            removed += _remove_others(part, kept, f"{prefix}{name}.")
        elif next(part.parameters(), None) is not None:
            setattr(module, name, None)
            removed.append(f"{prefix}{name}")
    return removed


def media_tokens(config: Any) -> dict[int, str]:
    """What the tokens are that stand for images, videos and sounds in a prompt: {151655: "image"}."""
    found = ((_PLACEHOLDER.fullmatch(name), value) for name, value in config.to_dict().items())
    return {value: match[1] for match, value in found if match and isinstance(value, int)}


def check_text(name: str, tokens: Collection[int], media: Mapping[int, str]) -> None:
    """Raise a ValueError, with the name of the prompt, if one of its tokens is one of `media_tokens`."""
    found = media.keys() & set(tokens) if media else ()
    for token in found:
        raise ValueError(f"{name} has token {token}, which stands for {media[token]} data: only text can be run")
