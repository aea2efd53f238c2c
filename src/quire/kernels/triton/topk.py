"""The largest elements of short rows. torch's kernels select them and then sort them, in two launches of 4 to 8 µs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, wait_for_launch_before


@dataclass(frozen=True)
class TopKConfig:
    """The constants that the kernel is compiled for."""

    k: int
    # This is the number of elements of a row, rounded up to a power of two.
    block: int
    num_warps: int
    # If true, the launch overlaps the one before.
    launch_pdl: bool


@lru_cache(maxsize=1024)
def topk_config(size: int, k: int, device: torch.device) -> TopKConfig:
    """The constants for rows of `size` elements, 8 or fewer for each thread."""
    block = triton.next_power_of_2(size)
    return TopKConfig(k, block, max(block // 256, 1), has_dependent_launch(device))


@triton.jit
def choose_largest(x, values, indices, x_row, size, c: tl.constexpr):
    """One program for each row. An element and its index are one integer, so that a maximum finds both at once."""
    wait_for_launch_before(c.launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, c.block)
    element = tl.load(x + row * x_row + i, i < size, 0.0).to(tl.float32)
    bits = element.to(tl.int32, bitcast=True)
    # These integers have the order of the floats.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(element != element, 0x7FFFFFFF, order)
    none = tl.full((c.block,), -(1 << 63), tl.int64)
    pairs = tl.where(i < size, (order.to(tl.int64) << 32) + (c.block - i), none)
    for j in range(c.k):
        largest = tl.max(pairs, 0)
        high = (largest >> 32).to(tl.int32)
        value = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        tl.store(values + row * c.k + j, value.to(values.dtype.element_ty))
        tl.store(indices + row * c.k + j, c.block - (largest & 0xFFFFFFFF))
        pairs = tl.where(pairs == largest, none, pairs)


_launch = SmallLauncher(choose_largest)


def topk(x: Tensor, values: Tensor, indices: Tensor) -> None:
    """`quire.kernels.topk.topk` on a GPU, of rows: x [rows, size]."""
    rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    c = topk_config(size, values.shape[-1], x.device)
    _launch((rows, 1), (x, values, indices), (), (x.stride(0), size), c)
