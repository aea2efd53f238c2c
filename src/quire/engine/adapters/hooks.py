"""What modules of a network do besides their own products, in steps with adapters: they add those of the adapters.

The tensors of the step are not arguments of the modules. Compiled code calls one operation with the number of the
product, as it does for attention, and is compiled once with that call and once without.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# The part of a product that means all of them.
ALL_PARTS = -1


class Additions(Protocol):
    """A forward pass with adapters, which adds what they compute to the products of the network."""

    def add(self, index: int, y: Tensor, x: Tensor, part: int) -> None:
        """Add the adapters' part of product `index` to y [..., out_features], whose input is x; `part` is the only one
        of its merged layers that y is of, or ALL_PARTS.
        """


class _NoAdditions:
    """Stands for the forward pass where none is in progress."""

    def add(self, index: int, y: Tensor, x: Tensor, part: int) -> None:
        raise ValueError(f"product {index} is to be computed with adapters outside of a step with adapters")


class _RunningAdditions(threading.local):
    """The forward pass in progress; each engine runs in a thread of its own."""

    step: Additions = _NoAdditions()


_running = _RunningAdditions()


class AdapterSwitch:
    """Whether the products of a network add those of adapters; one for all of its modules, which compiled code reads.

    Attributes:
        on: whether they do now.
    """

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def adding(self, step: Additions) -> Iterator[None]:
        """A context in which products, computed in this thread, add those of the adapters of `step`."""
        _running.step, self.on = step, True
        try:
            yield
        finally:
            _running.step, self.on = _NoAdditions(), False


@torch.library.custom_op("quire::add_adapters", mutates_args=("y",))
def _add(y: Tensor, x: Tensor, index: Tensor, part: int) -> None:
    """`Additions.add` of the forward pass in progress, as one operation for torch.compile. `index` is an int64 [] on
    the host and not a number, for which each layer would be compiled anew.
    """
    _running.step.add(int(index), y, x, part)


@_add.register_fake
def _(y: Tensor, x: Tensor, index: Tensor, part: int) -> None:
    return None


class AdapterHook:
    """What a product is followed by.

    Args:
        switch: of the network.
        index: the number of the product in the pool.
    """

    def __init__(self, switch: AdapterSwitch, index: int) -> None:
        self.switch, self._number = switch, index
        self._index = torch.tensor(index, device="cpu")

    def add(self, y: Tensor, x: Tensor, part: int = ALL_PARTS) -> None:
        """Add to a product y of x what the rows' adapters add to it, if the step has adapters."""
        if not self.switch.on:
            return
        if torch.compiler.is_compiling():
            torch.ops.quire.add_adapters(y, x, self._index, part)
        else:
            _running.step.add(self._number, y, x, part)


def hook_module(module: nn.Module, hook: AdapterHook) -> None:
    """Let a module that computes one product alone, as linear layers and embeddings do, call a hook after it."""
    kind: Any = type(module)
    module.__dict__["quire_hook"] = hook
    module.__class__ = _hooked(kind)


@lru_cache(maxsize=256)
def _hooked(kind: Any) -> Any:
    """The class of modules of this class that call their hook."""
    # A layer of several ranks computes the product of its part alone by another method.
    name = "product" if hasattr(kind, "product") else "forward"
    compute = getattr(kind, name)

    def compute_and_add(self: Any, input: Tensor) -> Tensor:
        output: Tensor = compute(self, input)
        self.quire_hook.add(output, input)
        return output

    return type(f"{kind.__name__}WithAdapters", (kind,), {name: compute_and_add, "__module__": kind.__module__})
