"""Which format of quantized weights a checkpoint has, by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.engine.weights import awq, compressed_tensors, fp8, gptq, modelopt, mxfp4
from quire.engine.weights.format import Format

_READERS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "awq": awq.read,
    "gptq": gptq.read,
    "mxfp4": mxfp4.read,
}


def find_format(folder: Path, model_opt: Mapping[str, Any] | None, config: Any) -> Format | None:
    """The format of a checkpoint's quantized weights.

    Args:
        folder: the checkpoint.
        model_opt: the object `quantization` of its hf_quant_config.json, which ModelOpt writes.
        config: Transformers' configuration of it.

    Returns:
        None if its weights are not quantized; its cache may be.

    Raises:
        ImportError: reading the format needs a package that is not installed.
        ValueError: the format is not supported, or the configuration is broken.
    """
    found = []
    if model_opt:
        what = f"hf_quant_config.json: quant_algo = {model_opt.get('quant_algo')!r}"
        found.append((what, {**model_opt, "quant_method": "modelopt"}))
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings:
            settings = settings if isinstance(settings, dict) else settings.to_dict()
            found.append(
                (f"config.json: quantization_config.quant_method = {settings.get('quant_method')!r}", settings)
            )
    for what, settings in found:
        if not _is_of_cache(settings):
            return _read(f"{folder} is quantized ({what})", settings)
    return None


def _read(what: str, settings: Mapping[str, Any]) -> Format:
    """The format that a `quantization_config` describes; `what` begins messages."""
    method = settings.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ValueError(f"{what}: only formats of {', '.join(_READERS)} can be run")
    try:
        return reader(settings)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{what}: {error}") from error


def _is_of_cache(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration of compressed-tensors or ModelOpt quantizes the cache and no weights."""
    has_cache = "kv_cache_scheme" in settings or "kv_cache_quant_algo" in settings
    weights = settings.get("config_groups") or settings.get("quant_algo")
    return settings.get("quant_method") in ("compressed-tensors", "modelopt") and has_cache and not weights
