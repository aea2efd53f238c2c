"""A mark for tests that need a Hopper GPU, and a launcher that records its arguments instead of launching."""

from __future__ import annotations

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
