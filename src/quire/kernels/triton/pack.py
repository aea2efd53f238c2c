"""Packing booleans into bits."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

# The number of bytes that a program writes.
BLOCK = 256


@triton.jit(do_not_specialize=["length", "count", "segments", "steps"])
def pack_bytes(
    x, indptr, bytes_at, bits, stride, length, count, segments, steps, big: tl.constexpr, block: tl.constexpr
):
    byte = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if indptr is None:
        first, end = byte * 8, length
    else:
        # This is a binary search for the last segment that starts at or before this byte, which skips empty segments.
        owner = tl.full((block,), 0, tl.int32)
        last = owner + (segments - 1)
        for _ in range(steps):
            middle = (owner + last + 1) // 2
            here = tl.load(bytes_at + middle) <= byte
            owner, last = tl.where(here, middle, owner), tl.where(here, last, middle - 1)
        first = tl.load(indptr + owner) + 8 * (byte - tl.load(bytes_at + owner))
        end = tl.minimum(tl.load(indptr + owner + 1), length)[:, None]
    i = tl.arange(0, 8)[None, :]
    at = first[:, None] + i
    bit = tl.load(x + at * stride, (at >= 0) & (at < end), 0) != 0
    packed = tl.sum(bit.to(tl.int32) << (7 - i if big else i), 1)
    tl.store(bits + byte, packed.to(tl.uint8), byte < count)


def pack(x: Tensor, indptr: Tensor | None, bytes_at: Tensor | None, bits: Tensor, big: bool) -> None:
    """`quire.kernels.pack.pack` on a GPU. Of segments that leave x only what lies inside is packed."""
    segments = 0 if indptr is None else len(indptr) - 1
    if not len(bits):
        return
    if indptr is not None and not segments:
        bits.zero_()
        return
    sizes = x.stride(0), len(x), len(bits), segments, segments.bit_length()
    grid = (triton.cdiv(len(bits), BLOCK),)
    pack_bytes[grid](x.view(torch.uint8), indptr, bytes_at, bits, *sizes, big, BLOCK)
