"""Private internals of torch. No other file reads any, but for those of torch.compile in `engine/inductor_passes.py`.

They are those of KNOWN_VERSIONS. `tests/kernels/test_torch_internals.py` compares them with public functions of the
installed version, and fails on others until somebody has compared this file with torch's code.

Public functions for the current device and stream take 0.1 and 1 us longer, which each layer of a step would pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = [
    "KNOWN_VERSIONS",
    "assert_async",
    "current_device",
    "current_raw_stream",
    "scaled_mm",
    "tree_flatten",
    "tree_map_only",
]

KNOWN_VERSIONS = ("2.11", "2.13")


def _no_cuda(*args: Any) -> int:
    raise RuntimeError("this build of torch has no CUDA")


# The index of the current CUDA device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)
# The address of the current stream of a CUDA device, by the index of the device.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
# The product of two fp8 matrices with scales. `torch.nn.functional.scaled_mm` computes it by another operator.
scaled_mm: Callable[..., Tensor] = torch._scaled_mm
# An assertion of a bool tensor with a message, which makes the device fail and never waits for it.
assert_async: Callable[[Tensor, str], None] = torch._assert_async
