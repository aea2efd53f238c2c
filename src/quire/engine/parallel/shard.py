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

from quire.engine.parallel.experts import choose_by_first
from quire.engine.parallel.ranks import Ranks
from quire.engine.parallel.weight_shard import WeightShard
from quire.engine.projections import multiply
from quire.engine.weights.modules import QuantizedLinear, QuantizedWeight

_OUTPUTS = ("colwise", "packed_colwise", "colwise_gather_output")
_INPUTS = ("rowwise", "rowwise_split_input")
_EXPERTS = "moe_tp_experts"
_OF_KV_HEADS = (".k_proj", ".v_proj")
# Norms of single heads, and latent keys and values. What these styles say of gradients is without meaning here.
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "embedding_rowwise")


class DividedLinear(nn.Linear):
    """A linear layer that exchanges something with the other ranks before or after the product of its part."""

    ranks: Ranks

    def product(self, input: Tensor) -> Tensor:
        """The product of this rank's part, to which adapters add theirs."""
        return multiply(input, self.weight, self.bias)


class RowwiseLinear(DividedLinear):
    """A linear layer with a part of the inputs, whose products are summed over all ranks. One rank has the bias."""

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.sum(self.product(input))


class RowwiseLinearOfAll(RowwiseLinear):
    """A `RowwiseLinear` that is given the inputs of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.chunk(self.ranks.size, dim=-1)[self.ranks.rank])


class GatheredLinear(DividedLinear):
    """A linear layer, or a head, with a part of the outputs, which returns those of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.concatenated(self.product(input))


# The classes of divided layers. Layers of other styles keep their class.
_CLASSES: dict[str, type[DividedLinear]] = {
    "rowwise": RowwiseLinear,
    "rowwise_split_input": RowwiseLinearOfAll,
    "colwise_gather_output": GatheredLinear,
}


def shard(network: Any, ranks: Ranks, folder: object, device: torch.device) -> None:
    """Keep this rank's part of a network. Divided weights are copied to the device one after another, and so is an
    embedding that shares its weight with the head; everything else stays where it is.

    Args:
        network: Transformers' model, whose weights may be quantized.
        ranks: those that compute it.
        folder: the checkpoint, for messages.
        device: of the parts.

    Raises:
        ValueError: Transformers has no plan for the model, or one with a style that is not supported; or a number of
            heads, features or blocks is not divisible by that of ranks.
    """
    config, size = network.config.get_text_config(), ranks.size
    refused = refusal(folder, ranks)
    plan = planned(network, ranks, folder)
    kv_heads = _divided_kv_heads(plan, config, size, refused)
    for name, (style, found) in plan.items():
        path, _, attribute = name.rpartition(".")
        parts = min(size, kv_heads) if name.endswith(_OF_KV_HEADS) else size
        try:
            if style == _EXPERTS:
                _exchange_of_experts(found, ranks)
            elif isinstance(found, nn.Linear):
                _divide_linear(found, style, parts, ranks, device)
            else:
                own = _shard_of(found, style, parts, ranks).weight_of(ranks.rank, found, device)
                setattr(network.get_submodule(path), attribute, own)
        except ValueError as error:
            raise ValueError(f"{refused}: {name}: {error}") from error
    if kv_heads < size:
        for module in network.modules():
            # Transformers' own attention repeats each head of keys so often.
            if hasattr(module, "num_key_value_groups"):
                module.num_key_value_groups = config.num_attention_heads // size
    divide_head(network, ranks, device)


def refusal(folder: object, ranks: Ranks) -> str:
    """The beginning of messages that a model can't be divided."""
    return f"{folder} can't be run with tensor_parallel_size = {ranks.size}"


def divide_head(network: Any, ranks: Ranks, device: torch.device) -> None:
    """Keep a part of the head's vocabulary on a device, if it has equal parts. A weight that the head shares with the
    embedding stays shared; on the meta device, which has no memory to share, the head stays whole.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if type(head) is not nn.Linear or head.out_features % ranks.size:
        return
    part = _shard_of(head.weight, "colwise", ranks.size, ranks)
    if head.weight is not embedding.weight:
        head.weight = part.weight_of(ranks.rank, head.weight, device)
    elif head.weight.is_meta:
        return
    else:
        embedding.to(device)
        (start,) = part.starts(ranks.rank)
        head.weight = nn.Parameter(embedding.weight.detach().narrow(0, start, part.size), requires_grad=False)
    _divide_outputs(head, part, ranks.rank, device)
    head.__dict__["quire_shard"] = part
    _replace_class(head, GatheredLinear, ranks)


def planned(network: Any, ranks: Ranks, folder: object) -> dict[str, tuple[str, Any]]:
    """The modules and parameters that Transformers' plan divides, with their styles, by their names; the arguments are
    those of `shard`.

    Raises:
        ValueError: there is no plan, or one with a style that is not supported.
    """
    plan, refused = getattr(network.config.get_text_config(), "base_model_tp_plan", None) or {}, refusal(folder, ranks)
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
            kind = type(everything[name])
            if style != _EXPERTS and kind not in (nn.Linear, QuantizedLinear, nn.Parameter, QuantizedWeight):
                raise ValueError(f"{refused}: {name} is a {kind.__name__}, and only linear layers are divided")
            found[name] = style, everything[name]
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


def _shard_of(weight: Any, style: str, parts: int, ranks: Ranks) -> WeightShard:
    return WeightShard.of(
        weight, -1 if style in _INPUTS else -2, parts, ranks.size, halves=2 if style == "packed_colwise" else 1
    )


def _divide_linear(linear: nn.Linear, style: str, parts: int, ranks: Ranks, device: torch.device) -> None:
    part = _shard_of(linear.weight, style, parts, ranks)
    linear.weight = part.weight_of(ranks.rank, linear.weight, device)
    if part.dim == -1:
        linear.in_features = part.size
        if ranks.rank:
            linear.register_parameter("bias", None)
    else:
        _divide_outputs(linear, part, ranks.rank, device)
    linear.__dict__["quire_shard"] = part
    if style in _CLASSES:
        _replace_class(linear, _CLASSES[style], ranks)


def _divide_outputs(linear: nn.Linear, part: WeightShard, rank: int, device: torch.device) -> None:
    """Keep the attributes and the bias that go with some of the outputs."""
    linear.out_features = part.size
    if linear.bias is not None:
        linear.bias = nn.Parameter(part.tensor_of(rank, linear.bias.detach(), 0, device), requires_grad=False)


def _replace_class(linear: nn.Linear, kind: type[DividedLinear], ranks: Ranks) -> None:
    linear.__class__ = kind
    linear.__dict__["ranks"] = ranks


def _exchange_of_experts(experts: nn.Module, ranks: Ranks) -> None:
    """Compute the same experts in all ranks, and sum what the parts of the experts return."""

    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return ranks.sum(output)

    choose_by_first(experts, ranks)
    experts.register_forward_hook(add)
