"""The part of a model that one rank computes, by Transformers' tensor-parallel plan of the model.

The plan names linear layers of two styles. Those whose outputs are independent ("colwise") keep the outputs of this
rank: its heads, and its part of the intermediate size. Those that follow them ("rowwise") keep the inputs of this rank,
and their products are summed over all ranks. Experts have these parts of each expert's weights, where the first two of
its products are one ("packed_colwise"), and the sum over the experts of a token is summed over all ranks
("moe_tp_experts"). Where a model needs all outputs of a layer between the two, as for a norm over all heads, they are
gathered ("colwise_gather_output"), and the second one takes its part of them ("rowwise_split_input"). All other modules
are computed by every rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.engine.parallel.ranks import Ranks
from quire.steps import product

_OUTPUTS = ("colwise", "packed_colwise", "colwise_gather_output")
_INPUTS = ("rowwise", "rowwise_split_input")
_EXPERTS = "moe_tp_experts"
_OF_KV_HEADS = (".k_proj", ".v_proj")
# Norms of single heads; the word for gradients is without meaning here.
_WHOLE = ("replicate", "replicated_with_grad_allreduce")


class RowwiseLinear(nn.Linear):
    """A linear layer with a part of the inputs, whose products are summed over all ranks. One rank has the bias."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.sum(product(input, self.weight, self.bias))


class RowwiseLinearOfAll(RowwiseLinear):
    """A `RowwiseLinear` that is given the inputs of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.chunk(self.ranks.size, dim=-1)[self.ranks.rank])


class GatheredLinear(nn.Linear):
    """A linear layer, or a head, with a part of the outputs, which returns those of all ranks."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.concatenated(F.linear(input, self.weight, self.bias))


_CLASSES = {
    "rowwise": RowwiseLinear,
    "rowwise_split_input": RowwiseLinearOfAll,
    "colwise_gather_output": GatheredLinear,
}


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
    plan = _planned(network, getattr(config, "base_model_tp_plan", None) or {}, refused)
    kv_heads = _divided_kv_heads(plan, config, size, refused)
    for name, (style, part) in plan.items():
        parent = network.get_submodule(name.rpartition(".")[0])
        if style == _EXPERTS:
            _exchange_of_experts(part, ranks)
            continue
        halves = 2 if style == "packed_colwise" else 1
        parts = min(size, kv_heads) if name.endswith(_OF_KV_HEADS) else size
        weight = part if isinstance(part, nn.Parameter) else part.weight
        features = weight.shape[-1 if style in _INPUTS else -2]
        if features % (parts * halves):
            raise ValueError(f"{refused}: the {features} features of {name} are not divisible by it")
        first, count = _part(features // halves, parts, ranks)
        if isinstance(part, nn.Parameter):
            _set(parent, name.rpartition(".")[2], _kept(part, style, first, count))
        elif style in _INPUTS:
            _keep_inputs(part, first, count, ranks)
        else:
            _keep_outputs(part, first, count, halves)
        if style in _CLASSES and not isinstance(part, nn.Parameter):
            _replace_class(part, _CLASSES[style], ranks)
    if kv_heads < size:
        for module in network.modules():
            # Transformers' own attention repeats each head of keys so often.
            if hasattr(module, "num_key_value_groups"):
                module.num_key_value_groups = config.num_attention_heads // size
    head = network.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % size == 0:
        _keep_outputs(head, *_part(head.out_features, size, ranks), copy=False)
        _replace_class(head, GatheredLinear, ranks)


def _planned(network: nn.Module, plan: dict[str, str], refused: str) -> dict[str, tuple[str, Any]]:
    """The modules and parameters that are divided, with their styles, by their names."""
    found: dict[str, tuple[str, Any]] = {}
    everything: dict[str, Any] = {**dict(network.named_modules()), **dict(network.named_parameters())}
    for pattern, style in plan.items():
        expression = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name in everything if expression.fullmatch(name)]
        if not names or style in _WHOLE:
            continue
        if style not in (*_OUTPUTS, *_INPUTS, _EXPERTS):
            what = f'Transformers\' plan has the style "{style}" for {pattern}, which is not supported'
            raise ValueError(f"{refused}: {what}")
        for name in names:
            part = everything[name]
            if style != _EXPERTS and type(part) not in (nn.Linear, nn.Parameter):
                raise ValueError(f"{refused}: {name} is a {type(part).__name__}, and only linear layers are divided")
            found[name] = style, part
    if not found:
        raise ValueError(f"{refused}: Transformers has no tensor-parallel plan for {type(network).__name__}")
    return found


def _divided_kv_heads(plan: dict[str, tuple[str, Any]], config: Any, size: int, refused: str) -> int:
    """The heads of keys and values that the ranks divide among them; `size` if each has all."""
    if not any(name.endswith(_OF_KV_HEADS) and style == "colwise" for name, (style, _) in plan.items()):
        return size
    heads, kv_heads = config.num_attention_heads, int(config.num_key_value_heads)
    if heads % size:
        raise ValueError(f"{refused}: its {heads} query heads are not divisible by it")
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"{refused}: its {kv_heads} heads of keys and values can neither be divided nor replicated")
    return kv_heads


def _part(features: int, parts: int, ranks: Ranks) -> tuple[int, int]:
    """The first feature of this rank and the number of them. With fewer parts than ranks, neighbours have the same."""
    count = features // parts
    return ranks.rank * parts // ranks.size * count, count


def _kept(weight: Tensor, style: str, first: int, count: int) -> Tensor:
    """Some inputs of a weight, or some outputs, of each half if there are two, [..., outputs, inputs]."""
    if style in _INPUTS:
        return weight[..., first : first + count]
    halves = weight.chunk(2 if style == "packed_colwise" else 1, dim=-2)
    return torch.cat([half[..., first : first + count, :] for half in halves], dim=-2)


def _keep_outputs(linear: nn.Linear, first: int, count: int, halves: int = 1, copy: bool = True) -> None:
    """Keep some outputs of a layer; without a copy, of a weight that is the embedding's, too."""
    for name in ("weight", "bias"):
        values = getattr(linear, name)
        if values is not None:
            kept = [half[first : first + count] for half in values.detach().chunk(halves)]
            _set(linear, name, torch.cat(kept) if copy else kept[0])
    linear.out_features = count * halves


def _keep_inputs(linear: nn.Linear, first: int, count: int, ranks: Ranks) -> None:
    """Keep some inputs of a layer."""
    _set(linear, "weight", linear.weight[:, first : first + count])
    if ranks.rank:
        linear.register_parameter("bias", None)
    linear.in_features = count


def _replace_class(linear: nn.Linear, kind: type[nn.Linear], ranks: Ranks) -> None:
    linear.__class__ = kind
    linear.__dict__["ranks"] = ranks


def _exchange_of_experts(experts: nn.Module, ranks: Ranks) -> None:
    """Choose the experts of a token by rank 0, since equal sums may be rounded otherwise in other ranks, and sum what
    the parts of the experts return.
    """

    def choose(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, index, weights = args
        return states, ranks.of_first(index), ranks.of_first(weights)

    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return ranks.sum(output)

    experts.register_forward_pre_hook(choose)
    experts.register_forward_hook(add)


def _set(module: nn.Module, name: str, values: Tensor) -> None:
    """Replace a parameter. A part of a larger tensor is copied where it is not contiguous."""
    module.register_parameter(name, nn.Parameter(values.detach().contiguous(), requires_grad=False))
