"""The first of the largest elements of each row of logits, in two launches: of parts of rows, on all multiprocessors,
and then of the parts' largest elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire.kernels.gpu.launch import SmallLauncher, has_dependent_launch, wait_for_launch_before

# The number of elements of a part of a row, which one program searches.
PART = 4096


@dataclass(frozen=True)
class GreedyConfig:
    """The constants that the kernels are compiled for."""

    # Elements of a part.
    part: int
    # Parts of a row, padded to a power of two.
    parts: int
    num_warps: int
    # If true, a launch overlaps the one before.
    launch_pdl: bool


@lru_cache(maxsize=1024)
def greedy_config(vocab: int, device: torch.device) -> GreedyConfig:
    """The constants for rows of `vocab` elements."""
    parts = triton.next_power_of_2(triton.cdiv(vocab, PART))
    return GreedyConfig(PART, parts, 4, has_dependent_launch(device))


@triton.jit
def largest_of_parts(x, largest, places, x_row, vocab, c: tl.constexpr):
    """The largest element of a part of a row, +inf if there is a NaN, and the index of the first one as large."""
    wait_for_launch_before(c.launch_pdl)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * c.part + tl.arange(0, c.part)
    values = tl.load(x + row * x_row + at, at < vocab, -float("inf")).to(tl.float32)
    values = tl.where(values == values, values, float("inf"))
    top = tl.max(values, 0)
    tl.store(largest + row * c.parts + part, top)
    tl.store(places + row * c.parts + part, tl.min(tl.where(values == top, at, vocab), 0))


@triton.jit(do_not_specialize=["count"])
def first_largest_part(largest, places, tokens, valid, marked, count, c: tl.constexpr):
    """The token of a row, from its `count` parts. If its largest element is not finite, tokens has 0, valid has 0, and
    marked, which may be None as valid may, has -1 in place of the token.
    """
    wait_for_launch_before(c.launch_pdl)
    row, part = tl.program_id(0), tl.arange(0, c.parts)
    values = tl.load(largest + row * c.parts + part, part < count, -float("inf"))
    place = tl.load(places + row * c.parts + part, part < count, 0)
    top = tl.max(values, 0)
    good = tl.abs(top) < float("inf")
    first = tl.min(tl.where((values == top) & (part < count), place, 2147483647), 0)
    tl.store(tokens + row, tl.where(good, first, 0).to(tokens.dtype.element_ty))
    if valid is not None:
        tl.store(valid + row, good.to(tl.int8))
    if marked is not None:
        tl.store(marked + row, tl.where(good, first, -1))


_launch_parts, _launch_rows = SmallLauncher(largest_of_parts), SmallLauncher(first_largest_part)


def choose(tokens: Tensor, valid: Tensor | None, marked: Tensor | None, x: Tensor) -> None:
    """`quire.kernels.sampling.sample_rows` of logits [rows, vocab] with a temperature of 0, and `greedy_rows`."""
    rows, vocab = x.shape
    if not rows:
        return
    c, count = greedy_config(vocab, x.device), triton.cdiv(vocab, PART)
    largest = torch.empty(rows, c.parts, dtype=torch.float32, device=x.device)
    places = torch.empty(rows, c.parts, dtype=torch.int32, device=x.device)
    flags = None if valid is None else valid.view(torch.int8)
    _launch_parts((rows, count), (x, largest, places), (), (x.stride(0), vocab), c)
    _launch_rows((rows, 1), (largest, places, tokens, flags, marked), (count,), (), c)
