"""Which modules of a model adapters can change: those whose rows are the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.adapters.targets import Target, adapter_targets
from quire.engine.hf_attention import AttentionRecorder
from quire.engine.model import Model

# Tokens of the recorded forward pass: so many that no expert is chosen by all of them.
_TOKENS = 64


def seen_targets(model: Model) -> dict[str, Target]:
    """The modules that adapters may change. A module is left out if its rows are not the tokens of the step (a single
    expert), if its dtype is not the model's, if it returns more than one tensor (a router), or if it is not called. A
    head may compute only the rows whose logits are needed.

    Returns:
        the modules by their paths.
    """
    targets = adapter_targets(model.network)
    count = min(_TOKENS, model.context)
    rows = _rows_of_calls(model, targets, count)
    return {
        path: target
        for path, target in targets.items()
        if set(rows[path]) in ({count}, {1} if target.kind == "head" else {count})
        and _dtype(model.network.get_submodule(path)) == model.dtype
    }


def _rows_of_calls(model: Model, targets: Mapping[str, Target], count: int) -> dict[str, list[int]]:
    """How many rows each module computes, by its calls, in a pass of so many tokens of which one needs logits."""
    positions = torch.arange(count, device=model.device)
    tokens = (model.vocab_size // 3 + 7 * positions) % model.vocab_size
    rows: dict[str, list[int]] = {path: [] for path in targets}

    def record(path: str, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        if args and isinstance(output, Tensor):
            x = args[0]
            rows[path].append(x.numel() if isinstance(module, nn.Embedding) else x.numel() // x.shape[-1])

    hooks = [model.network.get_submodule(path).register_forward_hook(partial(record, path)) for path in targets]
    try:
        with model.unchanged(), model.refusing(positions.tolist()):
            model.logits(tokens, positions, positions[:1], AttentionRecorder())
    finally:
        for hook in hooks:
            hook.remove()
    return rows


def _dtype(module: Any) -> torch.dtype:
    """The dtype of a module's outputs."""
    dtype: torch.dtype = module.weight.dtype
    return dtype
