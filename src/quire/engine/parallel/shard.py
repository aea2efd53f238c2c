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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.parallel.ranks import Ranks
from quire.engine.projections import multiply
from quire.engine.weights.modules import QuantizedLinear, QuantizedWeight, can_join, joined

_OUTPUTS = ("colwise", "packed_colwise", "colwise_gather_output")
_INPUTS = ("rowwise", "rowwise_split_input")
_EXPERTS = "moe_tp_experts"
_OF_KV_HEADS = (".k_proj", ".v_proj")
# Norms of single heads, and latent keys and values. What these styles say of gradients is without meaning here.
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")


class RowwiseLinear(nn.Linear):
    """A linear layer with a part of the inputs, whose products are summed over all ranks. One rank has the bias."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.sum(multiply(input, self.weight, self.bias))


class RowwiseLinearOfAll(RowwiseLinear):
    """A `RowwiseLinear` that is given the inputs of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.chunk(self.ranks.size, dim=-1)[self.ranks.rank])


class GatheredLinear(nn.Linear):
    """A linear layer, or a head, with a part of the outputs, which returns those of all ranks."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        return self.ranks.concatenated(multiply(input, self.weight, self.bias))


# What computes a divided layer. Of other styles, the layer itself does.
_CLASSES: dict[str, type[nn.Linear]] = {
    "rowwise": RowwiseLinear,
    "rowwise_split_input": RowwiseLinearOfAll,
    "colwise_gather_output": GatheredLinear,
}


@dataclass(frozen=True, slots=True)
class _Shard:
    """What this rank keeps of a weight [..., outputs, inputs].

    Attributes:
        dim: -2 for some outputs, -1 for some inputs.
        starts: the first of them, or the first of each half.
        count: of these, the number from each start.
    """

    dim: int
    starts: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, weight: Any, style: str, parts: int, ranks: Ranks) -> _Shard:
        """The part of a weight that is divided into so many. With fewer parts than ranks, neighbours have the same.

        Raises:
            ValueError: the parts are not equal.
        """
        dim = -1 if style in _INPUTS else -2
        if isinstance(weight, QuantizedWeight):
            features = weight.columns if dim == -1 else weight.rows
        else:
            features = weight.shape[dim]
        halves = 2 if style == "packed_colwise" else 1
        if features % (parts * halves):
            raise ValueError(f"its {features} features are not divisible by it")
        half = features // halves
        first = ranks.rank * parts // ranks.size * (half // parts)
        return cls(dim, tuple(first + index * half for index in range(halves)), half // parts)

    def kept(self, weight: Any) -> Any:
        """A copy of this part of a weight; ValueError if it has no whole blocks of a quantized one."""
        if not isinstance(weight, QuantizedWeight):
            return self.of_tensor(weight, self.dim)
        parts = [weight.part(self.dim, start, self.count) for start in self.starts]
        if len(parts) == 1:
            return parts[0]
        if not can_join(parts):
            raise ValueError(f"{self.count} of its rows are not whole blocks of {weight.block[0]}")
        return joined(parts)

    def of_tensor(self, x: Tensor, dim: int) -> nn.Parameter:
        """A copy of the elements of a tensor that have this part's places in a dimension."""
        parts = [x.detach().narrow(dim, start, self.count) for start in self.starts]
        return nn.Parameter(torch.cat(parts, dim), requires_grad=False)


def shard(network: Any, ranks: Ranks, folder: object) -> None:
    """Keep this rank's part of a network.

    Args:
        network: Transformers' model, whose weights may be quantized.
        ranks: those that compute it.
        folder: the checkpoint, for messages.

    Raises:
        ValueError: Transformers has no plan for the model, or one with a style that is not supported; or a number of
            heads, features or blocks is not divisible by that of ranks.
    """
    config, size = network.config.get_text_config(), ranks.size
    refused = f"{folder} can't be run with tensor_parallel_size = {size}"
    plan = _planned(network, getattr(config, "base_model_tp_plan", None) or {}, refused)
    kv_heads = _divided_kv_heads(plan, config, size, refused)
    for name, (style, found) in plan.items():
        path, _, attribute = name.rpartition(".")
        parts = min(size, kv_heads) if name.endswith(_OF_KV_HEADS) else size
        try:
            if style == _EXPERTS:
                _exchange_of_experts(found, ranks)
            elif isinstance(found, nn.Linear):
                _divide_linear(found, style, parts, ranks)
            else:
                part = _Shard.of(found, style, parts, ranks)
                setattr(network.get_submodule(path), attribute, part.kept(found))
        except ValueError as error:
            raise ValueError(f"{refused}: {name}: {error}") from error
    if kv_heads < size:
        for module in network.modules():
            # Transformers' own attention repeats each head of keys so often.
            if hasattr(module, "num_key_value_groups"):
                module.num_key_value_groups = config.num_attention_heads // size
    _divide_head(network, ranks)


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


def _divide_linear(linear: nn.Linear, style: str, parts: int, ranks: Ranks) -> None:
    part = _Shard.of(linear.weight, style, parts, ranks)
    linear.weight = part.kept(linear.weight)
    if part.dim == -1:
        linear.in_features = part.count
        if ranks.rank:
            linear.register_parameter("bias", None)
    else:
        linear.out_features = part.count * len(part.starts)
        if linear.bias is not None:
            linear.bias = part.of_tensor(linear.bias, 0)
    if style in _CLASSES:
        _replace_class(linear, _CLASSES[style], ranks)


def _divide_head(network: Any, ranks: Ranks) -> None:
    """Keep a part of the head's vocabulary, if there are equal ones. A weight that is the embedding's, too, stays."""
    head = network.get_output_embeddings()
    if type(head) is not nn.Linear or head.out_features % ranks.size:
        return
    is_tied = head.weight is network.get_input_embeddings().weight
    part = _Shard.of(head.weight, "colwise", ranks.size, ranks)
    own = head.weight.detach().narrow(0, part.starts[0], part.count)
    head.weight = nn.Parameter(own if is_tied else own.clone(), requires_grad=False)
    head.out_features = part.count
    if head.bias is not None:
        head.bias = part.of_tensor(head.bias, 0)
    _replace_class(head, GatheredLinear, ranks)


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
