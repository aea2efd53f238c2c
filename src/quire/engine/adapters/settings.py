"""The adapter_config.json of PEFT: what it says of a LoRA, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.config import MAX_ADAPTER_RANK
from quire.engine.reading import read_json

FILE = "adapter_config.json"
# PEFT's defaults for fields that the file does not have.
_DEFAULT_RANK = _DEFAULT_ALPHA = 8

# Fields that make an adapter compute something else than y + scale (x A^T) B^T, and how the result differs.
_OTHER_METHODS = {
    "use_dora": "DoRA rescales the rows of the adapted weights",
    "modules_to_save": "whole modules of the base were trained, and only LoRA's factors are read",
    "trainable_token_indices": "rows of the embedding were trained, and only LoRA's factors are read",
    "lora_bias": "the factors B have biases, which are not read",
    "target_parameters": "parameters that are not linear layers, as those of experts, were adapted",
    "layer_replication": "layers of the base are repeated",
    "alora_invocation_tokens": "an activated LoRA begins in the middle of a prompt",
    "use_qalora": "QALoRA averages groups of inputs",
    "use_bdlora": "BD-LoRA has factors of diagonal blocks",
    "arrow_config": "Arrow mixes several adapters for each token",
    "kasa_config": "KaSA truncates the base's weights, and has singular values between the factors",
    "monteclora_config": "MonteCLoRA draws its factors at random",
}
# Fields about how an adapter was trained and where it comes from. Their effects are in the tensors.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "unsloth_fixed",
    "velora_config",
}
_READ = {
    "peft_type",
    "bias",
    "init_lora_weights",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
}
# Values of init_lora_weights that, like true and false, leave the base's weights unchanged. Other methods subtract the
# product of the initial factors from them. If such an adapter was converted when it was saved, the file has true.
_INITIALIZATIONS = {"gaussian", "eva", "orthogonal", "mica"}


@dataclass(frozen=True)
class PeftSettings:
    """What a LoRA's adapter_config.json says of its factors.

    Attributes:
        rank, alpha: of modules that no pattern matches.
        use_rslora: whether the scale is alpha / sqrt(rank) instead of alpha / rank.
        rank_pattern, alpha_pattern: ranks and alphas of other modules, by regular expressions for the ends of their
            names.
        base_model_name: of the model that the adapter was trained on, "" if the file does not have it.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_model_name: str

    def rank_of(self, module: str) -> int:
        """The rank of a module, by its name in the adapter."""
        return _matched(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module's factors is multiplied by."""
        rank = self.rank_of(module)
        return _matched(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _matched(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches a module's name: all of it, or what follows a dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_settings(folder: Path) -> PeftSettings:
    """Read what the adapter_config.json of a folder says.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is broken, not that of a LoRA, or says something that is not supported.
    """
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {FILE}: it is not an adapter in PEFT's format")
    content = read_json(folder / FILE)
    try:
        _check_method(content)
        return PeftSettings(
            rank=_rank("r", content.get("r", _DEFAULT_RANK)),
            alpha=_alpha("lora_alpha", content.get("lora_alpha", _DEFAULT_ALPHA)),
            use_rslora=_flag("use_rslora", content.get("use_rslora") or False),
            rank_pattern=_pattern("rank_pattern", content.get("rank_pattern") or {}, _rank),
            alpha_pattern=_pattern("alpha_pattern", content.get("alpha_pattern") or {}, _alpha),
            base_model_name=str(content.get("base_model_name_or_path") or ""),
        )
    except ValueError as error:
        raise ValueError(f"{folder} can't be used as an adapter: {error}") from error


def _check_method(content: Mapping[str, Any]) -> None:
    """Raise a ValueError if the adapter is not a plain LoRA, with nothing but two factors for each module."""
    kind, bias = content.get("peft_type"), content.get("bias", "none")
    start = content.get("init_lora_weights", True)
    if kind != "LORA":
        raise ValueError(f"peft_type = {kind!r} in {FILE}: only 'LORA' is supported")
    for field, value in content.items():
        if not value or field in _HARMLESS or field in _READ:
            continue
        if field in _OTHER_METHODS:
            raise ValueError(f"{field} = {value!r} in {FILE} is not supported: {_OTHER_METHODS[field]}")
        what = "the field is not known, and might change what the adapter computes"
        raise ValueError(f"{field} = {value!r} in {FILE} is not supported: {what}")
    if bias != "none":
        raise ValueError(f"bias = {bias!r} in {FILE} is not supported: biases of the base were trained; only 'none' is")
    if not isinstance(start, bool | None) and not (isinstance(start, str) and start in _INITIALIZATIONS):
        what = "it changes the base's weights before the training; convert the adapter to a LoRA of the unchanged base "
        what += "when it is saved (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        raise ValueError(f"init_lora_weights = {start!r} in {FILE} is not supported: {what}")


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ADAPTER_RANK:
        raise ValueError(f"{name} = {value!r} in {FILE}: a rank must be an integer from 1 to {MAX_ADAPTER_RANK}")
    return value


def _alpha(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r} in {FILE}: an alpha must be a finite number")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} in {FILE}: it must be true or false")
    return value


def _pattern(name: str, value: Any, check: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} = {value!r} in {FILE}: it must be an object")
    for key, each in value.items():
        check(f"{name}[{key!r}]", each)
        try:
            re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            raise ValueError(f"{name} has {key!r} in {FILE}, which is no regular expression: {error}") from error
    return value
