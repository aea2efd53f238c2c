"""Finding what is compiled in a network: its decoder layers, the norms beside them, and which norms follow a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


def decoder_layers(network: nn.Module, attentions: Iterable[nn.Module]) -> list[nn.Module]:
    """The elements of a ModuleList that contain the modules of attention, in their order."""
    names = {module: name for name, module in network.named_modules()}
    layers: dict[nn.Module, None] = {}
    for attention in attentions:
        path = names[attention].split(".")
        for end in range(len(path), 0, -1):
            if isinstance(network.get_submodule(".".join(path[: end - 1])), nn.ModuleList):
                layers[network.get_submodule(".".join(path[:end]))] = None
                break
    return list(layers)


def last_norms(network: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """The modules beside the decoder layers that are of a class of the modelling code that layers contain, too. Run
    eagerly, they launch a kernel for each of their operations. Rotary embeddings, which are beside the layers as well,
    would be as fast, but Inductor writes their result in an order in which each layer reads it slowly.
    """
    names = {module: name for name, module in network.named_modules()}
    owner = network.get_submodule(".".join(names[layers[0]].split(".")[:-2]))
    inside = {type(module) for layer in layers for module in layer.modules()}
    return [
        child for child in owner.children() if type(child) in inside and not type(child).__module__.startswith("torch.")
    ]


@dataclass(frozen=True)
class Norms:
    """By layers, the norm of a layer's input and that of its output, each computed once in a forward pass."""

    first: dict[nn.Module, nn.Module] = field(default_factory=dict)
    following: dict[nn.Module, nn.Module] = field(default_factory=dict)


@contextmanager
def recorded_norms(layers: list[nn.Module], norms: list[nn.Module]) -> Iterator[Norms]:
    """Record the norms of layers' inputs and outputs in a forward pass within the context. There are none, unless all
    layers begin with a norm, and one follows the last layer.

    Args:
        norms: modules beside the layers; norms within layers are modules of the same classes.

    Yields:
        the norms, once the context has ended.
    """
    kinds = {type(norm) for norm in norms}
    within = [child for layer in layers for child in layer.children() if type(child) in kinds]
    # The tensors are kept, so that none has the id of another.
    inputs: list[tuple[nn.Module, tuple[Any, ...]]] = []
    outputs: list[tuple[nn.Module, Any]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: inputs.append((module, args)))
        for module in (*layers, *within, *norms)
    ]
    hooks += [layer.register_forward_hook(lambda layer, _, output: outputs.append((layer, output))) for layer in layers]
    found = Norms()
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    calls = [module for module, _ in inputs]

    def norm_of(x: Any) -> nn.Module | None:
        takers = [m for m, args in inputs if type(m) in kinds and len(args) == 1 and args[0] is x]
        alone = isinstance(x, Tensor) and len(takers) == 1 and calls.count(takers[0]) == 1
        return takers[0] if alone else None

    starts = [(module, args[0]) for module, args in inputs if module in layers and args]
    first = {layer: norm for layer, x in starts if (norm := norm_of(x)) is not None}
    following = {layer: norm for layer, output in outputs if (norm := norm_of(output)) is not None}
    # Layers are alike then, and share compiled code.
    if len(first) == len(following) == len(layers):
        found.first.update(first)
        found.following.update(following)
