"""The part of a model that one rank computes, by Transformers' tensor-parallel plan of the model.

The plan names linear layers of two styles. Those whose outputs are independent ("colwise") keep the outputs of this
rank: its heads, and its part of the intermediate size. Those that follow them ("rowwise") keep the inputs of this rank,
and their products are summed over all ranks. All other modules are computed by every rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.engine.parallel.ranks import Ranks
from quire.steps import product

_SPLIT = ("colwise", "rowwise")
# Norms of single heads; the word for gradients is without meaning here.
_WHOLE = ("replicate", "replicated_with_grad_allreduce")


class RowwiseLinear(nn.Linear):
    """A linear layer with a part of the inputs, whose products are summed over all ranks. One rank has the bias."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.sum(product(input, self.weight, self.bias))


class ShardedHead(nn.Linear):
    """A language-model head with a part of the vocabulary, which returns the logits of all ranks."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.concatenated(F.linear(input, self.weight, self.bias))


def shard(network: Any, ranks: Ranks, folder: object) -> None:
    """Keep this rank's part of a network.

    Args:
        network: Transformers' model, with weights that are not quantized.
        ranks: those that compute it.
        folder: the checkpoint, for messages.

    Raises:
        ValueError: Transformers has no plan for the model, or one with a style that is not supported; or a number of
            heads or features is not divisible by that of ranks.
    """
    config, size = network.config.get_text_config(), ranks.size
    refused = f"{folder} can't be run with tensor_parallel_size = {size}"
    layers = _planned_layers(network, getattr(config, "base_model_tp_plan", None) or {}, refused)
    _check_heads(config, size, refused)
    for name, (style, linear) in layers.items():
        features = linear.out_features if style == "colwise" else linear.in_features
        parts = min(size, config.num_key_value_heads) if name.endswith((".k_proj", ".v_proj")) else size
        if features % parts:
            raise ValueError(f"{refused}: the {features} features of {name} are not divisible by it")
        if style == "colwise":
            _keep_rows(linear, *_part(features, parts, ranks))
        else:
            _keep_columns(linear, *_part(features, parts, ranks), ranks)
    if config.num_key_value_heads < size:
        for module in network.modules():
            # Transformers' own attention repeats each head of keys so often.
            if hasattr(module, "num_key_value_groups"):
                module.num_key_value_groups = config.num_attention_heads // size
    head = network.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % size == 0:
        _keep_rows(head, *_part(head.out_features, size, ranks), copy=False)
        head.__class__ = ShardedHead
        head.__dict__["ranks"] = ranks


def _planned_layers(network: nn.Module, plan: dict[str, str], refused: str) -> dict[str, tuple[str, nn.Linear]]:
    """The layers that are split, with their styles, by their names."""
    found: dict[str, tuple[str, nn.Linear]] = {}
    modules = dict(network.named_modules())
    for pattern, style in plan.items():
        expression = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name in modules if expression.fullmatch(name)]
        if not names or style in _WHOLE:
            continue
        if style not in _SPLIT:
            what = f'Transformers\' plan has the style "{style}" for {pattern}, and {", ".join(_SPLIT)} are supported'
            raise ValueError(f"{refused}: {what}")
        for name in names:
            module = modules[name]
            if type(module) is not nn.Linear:
                raise ValueError(f"{refused}: {name} is a {type(module).__name__}, and only linear layers are split")
            found[name] = style, module
    if not found:
        raise ValueError(f"{refused}: Transformers has no tensor-parallel plan for {type(network).__name__}")
    return found


def _check_heads(config: Any, size: int, refused: str) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % size:
        raise ValueError(f"{refused}: its {heads} query heads are not divisible by it")
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"{refused}: its {kv_heads} heads of keys and values can neither be divided nor replicated")


def _part(features: int, parts: int, ranks: Ranks) -> tuple[int, int]:
    """The first feature of this rank and the number of them. With fewer parts than ranks, neighbours have the same."""
    count = features // parts
    return ranks.rank * parts // ranks.size * count, count


def _keep_rows(linear: nn.Linear, first: int, count: int, copy: bool = True) -> None:
    """Keep some outputs of a layer; without a copy, of a weight that is the embedding's, too."""
    _set(linear, "weight", linear.weight[first : first + count], copy)
    if linear.bias is not None:
        _set(linear, "bias", linear.bias[first : first + count], copy)
    linear.out_features = count


def _keep_columns(linear: nn.Linear, first: int, count: int, ranks: Ranks) -> None:
    """Keep some inputs of a layer."""
    _set(linear, "weight", linear.weight[:, first : first + count])
    if ranks.rank:
        linear.register_parameter("bias", None)
    linear.in_features = count
    linear.__class__ = RowwiseLinear
    linear.__dict__["ranks"] = ranks


def _set(linear: nn.Linear, name: str, values: Tensor, copy: bool = True) -> None:
    values = values.detach().clone(memory_format=torch.contiguous_format) if copy else values.detach()
    linear.register_parameter(name, nn.Parameter(values, requires_grad=False))
