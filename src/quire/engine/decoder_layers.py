"""Finding decoder layers in a network: all of them, the first ones of all kinds, the norms beside them, and which norms
follow a layer.
"""

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


def num_layers_of_all_kinds(network: Any) -> int:
    """The smallest number of the first decoder layers among which there is one of every kind. Layers are of one kind if
    their modules are of the same classes, their parameters have equal shapes and dtypes, and the configuration has the
    same `layer_types` for them.
    """
    layers = _owner_of_layers(network).layers
    types = [*(getattr(network.config.get_text_config(), "layer_types", None) or ()), *[None] * len(layers)]
    kinds = [(_structure(layer), kind) for layer, kind in zip(layers, types, strict=False)]
    return max(kinds.index(kind) for kind in kinds) + 1


@contextmanager
def first_layers(network: Any, count: int) -> Iterator[None]:
    """A context in which the network has only its first `count` decoder layers."""
    owner = _owner_of_layers(network)
    layers = owner.layers
    owner.layers = layers[:count]
    try:
        yield
    finally:
        owner.layers = layers


def _owner_of_layers(network: Any) -> Any:
    """The module whose attribute `layers` is the list of the decoder layers, as Transformers' plans name it.

    Raises:
        ValueError: there is none.
    """
    for module in network.get_decoder().modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            return module
    raise ValueError(f"{type(network).__name__} has no list of decoder layers named layers")


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    modules = ((name, type(module)) for name, module in layer.named_modules())
    params = ((name, param.shape, param.dtype) for name, param in layer.named_parameters())
    return *modules, *params


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
    """For each layer, the module that norms its input (`first`), and the one that norms its output (`following`). Each
    is called once in a forward pass.
    """

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
