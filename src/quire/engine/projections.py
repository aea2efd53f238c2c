"""Linear layers: those that share their input, as q_proj, k_proj and v_proj do, are computed by one matrix product, and
products of one token or a few by a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.adapters.hooks import AdapterHook
from quire.engine.weights.modules import QuantizedLinear, RowsOf, can_join, joined
from quire.steps import max_skinny_rows, product


class Linear(nn.Linear):
    """A linear layer that is computed by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


class Merged:
    """Linear layers of one input, in the order of their calls. Their weights become rows of one weight, so that the
    first of them computes the product of all, and the others return their columns of it.

    A layer that is called with another tensor than the first one was computes its own product. The product is held from
    the first layer's call to the last one's.

    Args:
        linears: at least two layers with equal `in_features`, dtypes and devices, all with a bias or none.

    Attributes:
        hook: called after the product; None: there are no adapters.
    """

    hook: AdapterHook | None = None

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.linears = linears
        self._kind = type(linears[0])
        self.sizes = [linear.out_features for linear in linears]
        self.weight, weights = self._join_weights()
        self.bias = None if linears[0].bias is None else self._join([linear.bias for linear in linears])
        biases = [None] * len(linears) if self.bias is None else self.bias.split(self.sizes)
        for index, (linear, weight, bias) in enumerate(zip(linears, weights, biases, strict=True)):
            linear.weight = weight
            linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
            linear.__dict__.update(quire_merged=self, quire_place=index)
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()
        self.enable(True)

    def _join_weights(self) -> tuple[Any, list[Any]]:
        """The weight of all layers, and that of each one, which is a part of it."""
        parts: list[Any] = [linear.weight for linear in self.linears]
        if self._kind is nn.Linear:
            weight = self._join(parts)
            return weight, [nn.Parameter(part, requires_grad=False) for part in weight.split(self.sizes)]
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        whole = joined(parts)
        return whole, [RowsOf(whole, start, size) for start, size in zip(starts, self.sizes, strict=True)]

    @staticmethod
    def _join(parts: list[Tensor]) -> nn.Parameter:
        """The parts one below another. torch.compile takes the shape of a Parameter, unlike a tensor's, as constant."""
        return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)

    def enable(self, on: bool) -> None:
        """Compute the layers together, or each for itself."""
        self.on = on
        self.input, self.outputs = None, ()
        for linear in self.linears:
            linear.__class__ = _Part if on else self._kind


def multiply(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` with a weight, which may be quantized."""
    output: Tensor = weight(x, bias) if isinstance(weight, nn.Module) else product(x, weight, bias)
    return output


class _Part(nn.Linear):
    """One of the layers of `Merged`."""

    quire_merged: Merged
    quire_place: int

    def forward(self, input: Tensor) -> Tensor:
        merged, place = self.quire_merged, self.quire_place
        if place == 0:
            whole = multiply(input, merged.weight, merged.bias)
            if merged.hook is not None:
                merged.hook.add(whole, input)
            merged.input, merged.outputs = input, whole.split(merged.sizes, dim=-1)
        elif input is not merged.input:
            own = multiply(input, self.weight, self.bias)
            if merged.hook is not None:
                merged.hook.add(own, input, place)
            return own
        output = merged.outputs[place]
        if place == len(merged.sizes) - 1:
            merged.input, merged.outputs = None, ()
        return output


@contextmanager
def recorded(network: nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """Record which linear layers of one module are called with one tensor while the context lasts.

    Yields:
        a list that has, after the context, the layers that may be merged, in the order of their calls.
    """
    # The tensors are kept, so that none has the id of another.
    calls: list[tuple[nn.Module, nn.Linear, Tensor]] = []
    hooks = []

    def record(parent: nn.Module, linear: nn.Linear, args: tuple[Tensor, ...]) -> None:
        if args:
            calls.append((parent, linear, args[0]))

    for parent in network.modules():
        for child in parent.children():
            if type(child) in (nn.Linear, QuantizedLinear):
                hooks.append(child.register_forward_pre_hook(partial(record, parent)))
    found: list[list[nn.Linear]] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[object, ...], list[nn.Linear]] = {}
    counts: dict[nn.Linear, int] = {}
    for parent, linear, tensor in calls:
        kind = (*_kind(linear), linear.bias is None)
        groups.setdefault((parent, id(tensor), *kind), []).append(linear)
        counts[linear] = counts.get(linear, 0) + 1
    found += [group for group in groups.values() if _can_merge(group) and all(counts[linear] == 1 for linear in group)]


def _kind(linear: nn.Linear) -> tuple[Hashable, ...]:
    """What layers must have in common to be merged."""
    if isinstance(linear, QuantizedLinear):
        return (linear.weight.join_key,)
    return linear.weight.dtype, linear.weight.device


def _can_merge(group: list[nn.Linear]) -> bool:
    quantized = [linear.weight for linear in group if isinstance(linear, QuantizedLinear)]
    return len(group) > 1 and (not quantized or can_join(quantized))


def merge(groups: Iterable[list[nn.Linear]]) -> list[Merged]:
    """Merge each group of layers. No more memory is used, but for the weights of one group at a time."""
    return [Merged(group) for group in groups]


def max_few_tokens(layers: Iterable[nn.Module]) -> int:
    """The most tokens that `product` multiplies by the kernel for few rows in these layers, which have compiled code of
    their own; 1 where there are no such products, since torch.compile always compiles a single token apart.
    """
    linears = [m for layer in layers for m in layer.modules() if isinstance(m, Linear | _Part)]
    return max([1, *(max_skinny_rows(m.weight.dtype) for m in linears if isinstance(m.weight, Tensor))])


def replace_linears(layers: Iterable[nn.Module]) -> None:
    """Compute the linear layers in `layers` that are not merged by `product`, which merged ones do anyway."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
