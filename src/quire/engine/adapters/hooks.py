"""Hooks by which the modules of a network add the products of adapters to their own, in steps with adapters.

The modules do not take the step's tensors as arguments. Compiled code calls one operation with the index of the
product, as it does for attention, and is compiled twice: with that call and without it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# As `part` of `Additions.add`: y is the product of all merged layers.
ALL_PARTS = -1


class Additions(Protocol):
    """A forward pass that adds what adapters compute to the products of the network."""

    def add(self, index: int, y: Tensor, x: Tensor, part: int) -> None:
        """Add what adapters compute to y [..., out_features], the output of product `index` for x [..., in_features].
        If y is the output of only one of several merged layers, `part` is the index of that layer; otherwise it is
        ALL_PARTS.
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
    """Turns the products of adapters on and off for all modules of a network. Compiled code reads it.

    Attributes:
        on: whether the modules add the products of adapters now.
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
    """`Additions.add` of the forward pass in progress, as one operation for torch.compile. `index` is an int64 []
    tensor on the host: with a Python number, torch.compile would compile each layer anew.
    """
    _running.step.add(int(index), y, x, part)


@_add.register_fake
def _(y: Tensor, x: Tensor, index: Tensor, part: int) -> None:
    return None


class AdapterHook:
    """Adds the products of adapters to one product of the network.

    Args:
        switch: that of the network.
        index: the index of the product in the pool.
    """

    def __init__(self, switch: AdapterSwitch, index: int) -> None:
        self.switch, self._number = switch, index
        self._index = torch.tensor(index, device="cpu")

    def add(self, y: Tensor, x: Tensor, part: int = ALL_PARTS) -> None:
        """Add what the adapters of the rows compute to y, the product of x, if the step has adapters."""
        if not self.switch.on:
            return
        if torch.compiler.is_compiling():
            torch.ops.quire.add_adapters(y, x, self._index, part)
        else:
            _running.step.add(self._number, y, x, part)


def hook_module(module: nn.Module, hook: AdapterHook) -> None:
    """Have a module that computes a single product, such as a linear layer or an embedding, call a hook after it."""
    kind: Any = type(module)
    module.__dict__["quire_hook"] = hook
    module.__class__ = _hooked(kind)


@lru_cache(maxsize=256)
def _hooked(kind: Any) -> Any:
    """A subclass of `kind` whose modules call their hook after the product."""
    # A layer that is divided among ranks computes the product of its own part in the method `product`.
    name = "product" if hasattr(kind, "product") else "forward"
    compute = getattr(kind, name)

    def compute_and_add(self: Any, input: Tensor) -> Tensor:
        output: Tensor = compute(self, input)
        self.quire_hook.add(output, input)
        return output

    return type(f"{kind.__name__}WithAdapters", (kind,), {name: compute_and_add, "__module__": kind.__module__})
