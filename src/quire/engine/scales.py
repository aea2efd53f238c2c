"""The scales of an fp8 cache: what each layer's keys and values are divided by before they are rounded to 8 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.reading import read_json

# The scales of the keys and values of each layer.
Scales = list[tuple[float, float]]

# Names that checkpoints have for scales, behind the number of the layer: `self_attn.k_scale` (compressed-tensors),
# `self_attn.attn.k_scale` (vLLM), `self_attn.k_proj.k_scale` (ModelOpt), `self_attn.k_proj.output_scale` (Quark), and
# `self_attn.kv_scale`, which is one scale for keys and values (AutoFP8).
_NAME = re.compile(r"(.*\.)?(?P<layer>\d+)\.(?:.*\.)?(?:(?P<own>k|v|kv)_scale|(?P<of>k|v)_proj\.output_scale)")


def read_scales(source: Path, num_layers: int) -> Scales | None:
    """The scales that a checkpoint or a file has, one for the keys of each layer and one for its values.

    Args:
        source: a checkpoint folder, or a safetensors file.
        num_layers: the layers of the model.

    Returns:
        None if there are no tensors with names of scales.

    Raises:
        ValueError: a scale is missing, is not one positive number, or contradicts another one; scales are those of
            another kind of cache; or a file is broken.
    """
    # Scales by the prefixes of their names, since a draft head has layers of its own.
    found: dict[str, dict[tuple[int, str], float]] = {}
    for file in [source] if source.is_file() else sorted(source.glob("*.safetensors")):
        for name, match, tensor in _tensors(file):
            scales, scale = found.setdefault(match[1] or "", {}), _number(tensor, f"{file}: {name}")
            for kind in match["own"] or match["of"]:
                known = scales.setdefault((int(match["layer"]), kind), scale)
                if known != scale:
                    raise ValueError(f"{file}: {name} is {scale}, and the same scale is {known} under another name")
    if not found:
        return None
    if source.is_dir():
        _check_kind(source)
    return _of_all_layers(found, num_layers, source)


def write_scales(file: Path, scales: Sequence[tuple[float, float]]) -> None:
    """Write scales as a safetensors file of float32 [1] tensors, with the names of compressed-tensors."""
    from safetensors.torch import save

    tensors = {}
    for i, (k_scale, v_scale) in enumerate(scales):
        tensors[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor([k_scale])
        tensors[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor([v_scale])
    file.write_bytes(save(tensors))


def _tensors(file: Path) -> Iterator[tuple[str, re.Match[str], Tensor]]:
    """The tensors of a file that have names of scales."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                match = _NAME.fullmatch(name)
                if match is not None:
                    yield name, match, tensors.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file} could not be read: {error}") from error


def _number(scale: Tensor, name: str) -> float:
    if scale.numel() != 1:
        raise ValueError(f"{name} has shape {list(scale.shape)}: scales of an fp8 cache must be one number per layer")
    value = float(scale)
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}: it must be a positive number")
    return value


def _of_all_layers(found: dict[str, dict[tuple[int, str], float]], num_layers: int, source: Path) -> Scales:
    """The scales of the prefix that has them for all layers of the model."""
    wanted = [(i, kind) for i in range(num_layers) for kind in "kv"]
    missing = {prefix: [key for key in wanted if key not in scales] for prefix, scales in found.items()}
    whole = [prefix for prefix, keys in missing.items() if not keys]
    if len(whole) > 1:
        raise ValueError(f"{source} has scales of an fp8 cache for several models: {', '.join(whole)}")
    if not whole:
        layer, kind = min(missing.values(), key=len)[0]
        raise ValueError(f"{source} has scales of an fp8 cache, but no {kind}_scale of layer {layer}")
    scales = found[whole[0]]
    return [(scales[i, "k"], scales[i, "v"]) for i in range(num_layers)]


def _check_kind(folder: Path) -> None:
    """Refuse a checkpoint whose scales map keys and values to the range of other elements than those of 8 bits."""
    quantization = read_json(folder / "config.json").get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme") or {}
    bits, model_opt = scheme.get("num_bits", 8), read_json(folder / "hf_quant_config.json").get("quantization") or {}
    algorithm = model_opt.get("kv_cache_quant_algo") or "FP8"
    if bits != 8 or algorithm not in ("FP8", "INT8"):
        kind = f"{bits} bits" if bits != 8 else algorithm
        raise ValueError(f"{folder} has scales for a cache of {kind}, which do not fit an fp8 cache")
