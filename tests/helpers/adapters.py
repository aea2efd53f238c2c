"""Adapters that PEFT writes, and changes of their folders."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.adapters.peft import AdapterTensors
from quire.engine.adapters.targets import adapter_targets

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(model: Any, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """An adapter of random factors, saved by PEFT.

    Args:
        model: a model of Transformers, which is as it was afterwards.
        dtype: of the factors.
        settings: of PEFT's LoraConfig.
    """
    with warnings.catch_warnings():
        # About tied embeddings, and embeddings that are saved with their factors.
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**{"init_lora_weights": False, **settings}))
        randomize(adapted)
        adapted.to(dtype).save_pretrained(folder)
    adapted.to(torch.float32).unload()
    return folder


def randomize(adapted: Any) -> None:
    """Random factors, that change what the model computes, but not beyond all measure."""
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def merged(model: Any, folder: Path) -> Any:
    """A model with the adapter of a folder in its weights, as PEFT merges it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder).merge_and_unload()


def with_factors(model: Any, adapter: AdapterTensors) -> Any:
    """A copy of a model, with the products of the factors in its weights."""
    model = copy.deepcopy(model)
    targets = adapter_targets(model)
    for path, (a, b) in adapter.factors.items():
        change, module = b @ a, model.get_submodule(path)
        is_embedding = targets[path].kind == "embedding"
        module.weight = torch.nn.Parameter(
            module.weight + (change.T / targets[path].output_scale if is_embedding else change)
        )
    return model


def change_config(folder: Path, **changes: Any) -> Path:
    """The adapter, with other values in its adapter_config.json; those of None are removed."""
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The adapter, whose tensors are changed in place."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


@torch.no_grad()
def assert_greedy(network: Any, prompt: list[int], tokens: list[int], tolerance: float = 1e-4) -> None:
    """Assert that each token is the most likely one after those before it, by a network of Transformers, or as likely
    up to rounding errors of float32, which logits have.
    """
    logits = network(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (chosen >= logits.amax(1) - tolerance).all(), f"{tokens} after {prompt} is not {logits.argmax(1).tolist()}"
