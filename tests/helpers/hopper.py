"""A mark for tests that need a Hopper GPU, a launcher that records its arguments instead of launching, and what kernels
need to run on the host.
"""

from __future__ import annotations

import functools
from dataclasses import make_dataclass

import pytest
import torch

here = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not here, reason="there is no Hopper GPU")]


def gpu(test):
    for mark in on_hopper:
        test = mark(test)
    return test


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A copy of x whose address is one element past an aligned one."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


class Recorded:
    """A launcher that only keeps what it is given, by the names of the kernel's arguments."""

    def __init__(self, kernel, constants, **options):
        self.names, self.constants = kernel.arg_names, constants

    def __call__(self, programs, tensors, others, numbers, strides, matrices=None):
        values = (*tensors, *others, *numbers, *strides, self.constants)
        Recorded.last = {"programs": programs, "matrices": matrices, **dict(zip(self.names, values, strict=True))}


class HostGluon:
    """What schedulers use of Gluon, on torch tensors and scalars."""

    int32, int64 = torch.int32, torch.int64
    float32, where = torch.float32, staticmethod(torch.where)
    uint32 = torch.int64  # which torch can shift
    constexpr = BlockedLayout = SliceLayout = staticmethod(lambda *x: x)
    convert_layout, static_range = staticmethod(lambda x, layout: x), range
    full = staticmethod(lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype))
    full_like, ceil = staticmethod(torch.full_like), staticmethod(torch.ceil)
    to_tensor = staticmethod(torch.as_tensor)
    maximum = staticmethod(lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))
    minimum = staticmethod(lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)))
    arange = staticmethod(lambda a, b, layout: torch.arange(a, b))
    sum = staticmethod(lambda x, axis: x.sum())
    max = staticmethod(lambda x, axis: x.max())
    min = staticmethod(lambda x, axis: x.min())
    associative_scan = staticmethod(lambda x, axis, function: x.cumsum(0))
    reduce = staticmethod(lambda x, axis, function: functools.reduce(torch.bitwise_or, x.unbind(axis)))
    load = staticmethod(lambda at, mask=True, other=0: torch.where(torch.as_tensor(mask), at.read(), other))


class Pointer:
    """An address of a tensor's element, or addresses of several."""

    def __init__(self, values: torch.Tensor, at: int | torch.Tensor = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, offset: int | torch.Tensor) -> Pointer:
        return Pointer(self.values, self.at + offset)

    def read(self) -> torch.Tensor:
        return self.values[torch.as_tensor(self.at).clamp(0, len(self.values) - 1)]


def on_host(monkeypatch: pytest.MonkeyPatch, *modules) -> HostGluon:
    """Let the functions and aggregates of modules run on the host, with the Gluon that is returned."""
    gl = HostGluon()
    for module in modules:
        monkeypatch.setattr(module, "gl", gl)
        for name, x in vars(module).copy().items():
            if hasattr(x, "fn"):
                monkeypatch.setattr(module, name, x.fn)
            elif hasattr(x, "__triton_aggregate__"):
                monkeypatch.setattr(module, name, host_class(x))
        # One thread runs all of a program.
        monkeypatch.setattr(module, "thread_barrier", lambda: None, raising=False)
    return gl


@functools.lru_cache
def host_class(aggregate: type) -> type:
    """An aggregate as a dataclass with its methods, for the host."""
    methods = {name: method.fn for name, method in vars(aggregate).items() if hasattr(method, "fn")}
    return make_dataclass(aggregate.__name__, aggregate.fields, namespace=methods)


def listed(mask, request, row: int, last_row: int, first: int, last: int, warps: int = 1) -> tuple[set[int], set[int]]:
    """Of a request's key blocks from the first to the last, by `Mask.visible_blocks`: those of which some row may see a
    key, and those of which all rows see all keys.
    """
    found: tuple[set[int], set[int]] = set(), set()
    for base in range(last - 31, first - 32, -32):
        words = mask.visible_blocks(request, row, last_row, first, base, warps)
        for blocks, word in zip(found, words, strict=True):
            blocks |= {base + i for i in range(32) if int(word) >> i & 1 and base + i >= first}
    return found


def ragged_tables(q_lens: list[int], kv_lens: list[int], window: int, mask_config, config):
    """The `Tables` of requests whose keys are ragged rows, for a MaskConfig and a ScheduleConfig. The modules `mask`
    and `schedule` must be on the host.
    """
    from quire.kernels.hopper import mask, schedule

    qo_indptr, kv_indptr = (Pointer(torch.tensor([0, *n]).cumsum(0)) for n in (q_lens, kv_lens))
    sizes = len(q_lens), sum(q_lens), sum(kv_lens), sum(kv_lens)
    masks = mask.BatchMask(window, *[None] * 6, mask_config)
    return schedule.Tables(qo_indptr, kv_indptr, None, None, *sizes, masks, config)
