"""torch.compile of a model's decoder layers and last norm: one compiled function for all modules of a class."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn


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


class Regions:
    """Decoder layers and norms of a network whose `forward` can be compiled.

    The number of tokens is dynamic in compiled code; a single token has code of its own. What torch compiles is kept on
    disk, where torch keeps it (TORCHINDUCTOR_CACHE_DIR).

    Args:
        layers: the modules. Those of one class share compiled code, where they differ in weights alone.
        backend: of torch.compile.

    Attributes:
        on: whether the layers run compiled.
    """

    def __init__(self, layers: Iterable[nn.Module], backend: str = "inductor") -> None:
        self.layers = list(layers)
        self.on = False
        self._compiled = {
            kind: torch.compile(_own(kind.forward), fullgraph=True, dynamic=True, backend=backend)
            for kind in {type(layer) for layer in self.layers}
        }

    def enable(self, on: bool) -> None:
        """Run the layers compiled, or as Transformers has them."""
        self.on = on
        for layer in self.layers:
            if on:
                layer.forward = MethodType(self._compiled[type(layer)], layer)
            else:
                layer.__dict__.pop("forward", None)

    def give_up(self, error: Exception) -> None:
        """Run the layers as Transformers has them from now on, and warn of the reason."""
        self.enable(False)
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        kinds = ", ".join(sorted(kind.__name__ for kind in self._compiled))
        message = f"{kinds} can't be compiled and run eagerly, which is slower: {type(error).__name__}: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


@contextmanager
def compiling(tokens: int) -> Iterator[None]:
    """A context for calls with so many tokens, which may compile.

    Numbers of modules, such as a norm's epsilon, are constants. What takes little time, such as the norms of queries
    and of keys, is computed by one kernel. The kernels of a single token take as long as their launches, so each is
    launched while the one before it runs (programmatic dependent launch). Such launches take the host longer, which
    counts where steps of more tokens have no graph. No kernel writes to its inputs: those that did would be tuned with
    copies of them, whose launches take the host longer than most kernels run, so that all configurations looked alike.
    """
    import torch._dynamo.config
    import torch._inductor.config as inductor

    options = {"combo_kernels": True, "inplace_buffers": False}
    if hasattr(inductor.triton, "enable_pdl"):  # since torch 2.10
        options["triton.enable_pdl"] = tokens == 1
    with torch._dynamo.config.patch(specialize_float=True), inductor.patch(options):
        yield


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises for code that it cannot compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _own(function: Any) -> Any:
    """A copy of a function with a code object of its own. torch.compile keeps and counts what it has compiled by code
    objects, which models of one class would share otherwise.
    """
    if not isinstance(function, FunctionType):
        return function
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
