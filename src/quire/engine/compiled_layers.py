"""torch.compile of a model's decoder layers and last norm: one compiled function for all modules of a class.

A layer ends with a sum, and the next one begins with the norm of that. Layers are compiled one by one, so these would
be two kernels. A layer therefore computes in one kernel the sum and the norm with which the next module begins.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.decoder_layers import Norms
from quire.engine.projections import max_few_tokens


class CompiledLayers:
    """Decoder layers and norms of a network whose `forward` can be compiled.

    The number of tokens is dynamic in compiled code. On a GPU a few tokens, whose products have a kernel of their own,
    have code of their own, and so has a single one. What torch compiles is kept on disk, where torch keeps it
    (TORCHINDUCTOR_CACHE_DIR).

    Args:
        layers: the modules. Those of one class share compiled code, where they differ in weights alone.
        norms: modules beside the layers, which are compiled, too.
        handed: norms that a layer computes for the module after it; None: no layer does.
        backend: of torch.compile.

    Attributes:
        on: whether the layers run compiled.
        max_few_tokens: the most tokens that have compiled code apart from that of many (`projections.max_few_tokens`).
        with_adapters: whether layers now run the code that was compiled with the products of adapters.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        norms: Iterable[nn.Module] = (),
        handed: Norms | None = None,
        backend: str = "inductor",
    ) -> None:
        handed = handed or Norms()
        self.layers, self.on = list(layers), False
        self.max_few_tokens = max_few_tokens(self.layers)
        self.with_adapters = False
        self._first, self._norms = handed.first, list(norms)
        for layer in self.layers:
            layer.__dict__.update(quire_first=handed.first.get(layer), quire_following=handed.following.get(layer))
        for norm in self._first.values():
            norm.__dict__.update(quire_normed=None)
        # The output of the last layer that ran, and its norm, until the next module takes it.
        self._output: Tensor | None = None
        self._normed: Tensor | None = None
        forwards = {type(layer): _handing_over(type(layer).forward) for layer in self.layers}
        self._compiled = {
            (kind, with_adapters): _compiled(forward, backend)
            for kind, forward in forwards.items()
            for with_adapters in (False, True)
        }
        norms = [*self._norms, *self._first.values()]
        self._compiled_norms = {kind: _compiled(kind.forward, backend) for kind in {type(norm) for norm in norms}}
        self._modules = [*self.layers, *norms]

    def enable(self, on: bool) -> None:
        """Run the layers compiled, or as Transformers has them."""
        self.on = on
        self._output = self._normed = None
        for module in self._modules:
            module.__dict__.pop("forward", None)
        if on:
            for layer in self.layers:
                layer.forward = partial(self._run_layer, layer)
            for norm in self._norms:
                norm.forward = partial(self._run_norm, norm)
            for norm in self._first.values():
                norm.forward = MethodType(_precomputed, norm)

    def _run_layer(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        normed = self._run_norm(self._first[layer], args[0]) if layer in self._first else None
        output, self._normed = self._compiled[type(layer), self.with_adapters](layer, normed, *args, **kwargs)
        self._output = None if self._normed is None else output
        return output

    def _run_norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The norm of a tensor; that of the last layer's output has been computed by the layer already."""
        normed = self._normed if x is self._output else None
        self._output = self._normed = None
        return self._compiled_norms[type(norm)](norm, x) if normed is None else normed

    def give_up(self, error: Exception) -> None:
        """Run the layers as Transformers has them from now on, and warn of the reason."""
        self.enable(False)
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        kinds = ", ".join(sorted({type(module).__name__ for module in self._modules}))
        message = f"{kinds} can't be compiled and run eagerly, which is slower: {type(error).__name__}: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _handing_over(forward: Any) -> Any:
    """A layer's `forward` that takes its normed input as a further argument, and returns its normed output beside the
    output. Each is None if there is no such norm.
    """

    def run(layer: Any, normed: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        first, following = layer.quire_first, layer.quire_following
        if first is not None:
            first.quire_normed = normed
        output = forward(layer, *args, **kwargs)
        if first is not None:
            first.quire_normed = None
        return output, None if following is None else type(following).forward(following, output)

    return run


def _precomputed(norm: Any, x: Tensor) -> Tensor:
    """The `forward` of a norm that has been computed: see `_handing_over`."""
    normed: Tensor = norm.quire_normed
    return normed


def _compiled(forward: Any, backend: str) -> Any:
    return torch.compile(_with_own_code(forward), fullgraph=True, dynamic=True, backend=backend)


def _with_own_code(function: Any) -> Any:
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
