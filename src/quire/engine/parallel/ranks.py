"""The processes that compute one model together, and what they exchange during a forward pass."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceOp, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from quire.engine.parallel.errors import RankError
from quire.steps import Exchange, add_norm

_HOST = "127.0.0.1"
# Ranks read a checkpoint and compile kernels at different speeds.
LOAD_SECONDS = 600.0
# The name of the group in the store. Each process has one group of a name.
_GROUP = "quire/group"


class Ranks:
    """One of `size` processes of this machine that call the same methods in the same order. On CPUs, each method
    returns when all have called it, and raises a RankError if one does not in time or its process has ended. On GPUs,
    methods launch what waits for the others.

    Args:
        rank: of this process, 0 <= rank < size.
        size: the number of ranks.
        device: of this rank: the CPU, or a GPU that no other rank has.
        port: of the store where they find each other; None: this rank makes it.

    Attributes:
        port: of the store.
        exchange: how tensors on GPUs are exchanged; None on the CPU.
        timeout: seconds within which every rank is to call a method; those for loading a model, until they are set.

    Raises:
        RankError: there is no store at the port.
    """

    exchange: Exchange | None = None

    def __init__(self, rank: int, size: int, device: torch.device, port: int | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = device
        self.timeout = LOAD_SECONDS
        self._options: dict[str, Any] = {"timeout": timedelta(seconds=LOAD_SECONDS), "wait_for_workers": False}
        with _exchanging():
            self._store = TCPStore(_HOST, port or 0, is_master=port is None, **self._options)
        self.port: int = self._store.port
        self._number = next(_numbers)
        _ranks[self._number] = self

    def connect(self) -> None:
        """Wait until all ranks have called this method, which is the first one."""
        with _exchanging():
            self._group: Any = ProcessGroupGloo(self._store, self.rank, self.size, self._options["timeout"])
            if self.device.type == "cuda":
                if self.rank == 0:
                    self._store.set(_GROUP, f"quire-{os.getpid()}-{self._number}")
                group = self._store.get(_GROUP).decode()
                self.exchange = Exchange(self.rank, self.size, self.device, self._store, group)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the tensors of all ranks, which has equal bits in all of them. It may replace x."""
        if torch.compiler.is_compiling():
            total: Tensor = torch.ops.quire.all_reduce(x, self._number)
            return total
        return self.add(x)

    def of_first(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, for one of the same shape."""
        if torch.compiler.is_compiling():
            first: Tensor = torch.ops.quire.broadcast(x, self._number)
            return first
        return self.broadcast(x)

    def concatenated(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of equal shapes, one after another along the last dimension."""
        if torch.compiler.is_compiling():
            gathered: Tensor = torch.ops.quire.all_gather(x, self._number)
            return gathered
        return self.gather(x)

    def least(self, number: int) -> int:
        """The smallest of the numbers of all ranks, which may compile kernels before they call this."""
        tensor = torch.tensor([number])
        self._reduce(tensor, ReduceOp(ReduceOp.MIN), LOAD_SECONDS)
        return int(tensor)

    def add(self, x: Tensor) -> Tensor:
        """`sum`, outside of compiled layers."""
        if self.exchange is not None:
            return self.exchange.sum(x)
        self._reduce(x, ReduceOp(ReduceOp.SUM), self.timeout)
        return x

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`sum` plus the residual [..., features], and the RMS norm of that times the weight [features], outside of
        compiled layers.
        """
        if self.exchange is not None:
            return self.exchange.sum_norm(x, residual, weight, eps)
        return add_norm(self.add(x.clone(memory_format=torch.contiguous_format)), residual, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        """`concatenated`, outside of compiled layers."""
        return torch.cat(self.stack(x).unbind(), dim=-1)

    def stack(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of equal shapes, [size, *x.shape], outside of compiled layers."""
        if self.exchange is not None:
            return self.exchange.gather(x)
        parts = x.new_empty(self.size, *x.shape)
        with _exchanging():
            options = self._with_timeout(AllgatherOptions())
            self._group.allgather([list(parts.unbind())], [x.contiguous()], options).wait()
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """`of_first`, outside of compiled layers."""
        if self.exchange is not None:
            return self.exchange.gather(x)[0]
        x = x.contiguous().clone()
        with _exchanging():
            self._group.broadcast([x], self._with_timeout(BroadcastOptions())).wait()
        return x

    def _reduce(self, x: Tensor, operation: ReduceOp, seconds: float) -> None:
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=seconds)
        options.reduceOp = operation
        with _exchanging():
            self._group.allreduce([x], options).wait()

    def _with_timeout(self, options: Any) -> Any:
        options.timeout = timedelta(seconds=self.timeout)
        return options


@contextmanager
def _exchanging() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(str(error)) from error


# An operation of torch takes numbers, and no objects.
_numbers = itertools.count()
_ranks: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()


@torch.library.custom_op("quire::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, ranks: int) -> Tensor:
    """`Ranks.sum` as one operation for torch.compile; `ranks` is the number of a `Ranks` of this process."""
    return _ranks[ranks].add(x if x.is_cuda else x.clone())


@torch.library.custom_op("quire::broadcast", mutates_args=())
def _broadcast(x: Tensor, ranks: int) -> Tensor:
    """`Ranks.of_first`, likewise."""
    return _ranks[ranks].broadcast(x)


@torch.library.custom_op("quire::all_gather", mutates_args=())
def _all_gather(x: Tensor, ranks: int) -> Tensor:
    """`Ranks.concatenated`, likewise."""
    return _ranks[ranks].gather(x)


@torch.library.custom_op("quire::all_reduce_norm", mutates_args=())
def _all_reduce_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, ranks: int) -> tuple[Tensor, Tensor]:
    """`Ranks.add_norm`, likewise."""
    return _ranks[ranks].add_norm(x, residual, weight, eps)


@_all_reduce_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, ranks: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


@_all_reduce.register_fake
@_broadcast.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_all_gather.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * _ranks[ranks].size)
