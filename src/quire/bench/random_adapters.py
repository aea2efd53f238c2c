"""Adapters of random values, for timing: folders in PEFT's format that fit a model, without a trained one."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.engine.adapters.targets import adapter_targets

_WEIGHTS = "adapter_model.safetensors"


def write_adapters(config: Any, folder: Path, count: int, rank: int, seed: int = 0) -> dict[str, Path]:
    """Write adapters of all linear layers but the head, in bfloat16. Their factors are those of one file, which all of
    them link to, and differ in their scales, so that no two of them are equal for an engine.

    Args:
        config: Transformers' configuration of the model.
        folder: where to write; it is made.
        count, rank: of the adapters.
        seed: of the random values.

    Returns:
        their folders by their names, "adapter-0" and so on.

    Raises:
        ValueError: count or rank is below 1.
    """
    from transformers import AutoModelForCausalLM

    for name, value in (("adapters", count), ("adapter_rank", rank)):
        if value < 1:
            raise ValueError(f"{name} = {value}: it must be 1 or more")
    with torch.device("meta"):
        targets = adapter_targets(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def factor(*shape: int) -> torch.Tensor:
        # Products of such factors change what a model computes by less than its own layers do.
        values = torch.empty(prod(shape), dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)
        return values.mul_(0.5 * shape[-1] ** -0.5).view(shape)

    tensors = {}
    for path, target in targets.items():
        if target.kind == "linear":
            tensors[f"base_model.model.{path}.lora_A.weight"] = factor(rank, target.in_features)
            tensors[f"base_model.model.{path}.lora_B.weight"] = factor(target.out_features, rank)
    save_file(tensors, folder / _WEIGHTS)
    modules = sorted({path.rpartition(".")[2] for path, target in targets.items() if target.kind == "linear"})
    folders = {f"adapter-{i}": folder / f"adapter-{i}" for i in range(count)}
    for i, each in enumerate(folders.values()):
        each.mkdir(exist_ok=True)
        (each / _WEIGHTS).unlink(missing_ok=True)
        (each / _WEIGHTS).symlink_to(Path("..") / _WEIGHTS)
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * (1 + i / count), "target_modules": modules}
        (each / "adapter_config.json").write_text(json.dumps(settings) + "\n")
    return folders
