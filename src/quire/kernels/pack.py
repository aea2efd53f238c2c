"""Packing booleans into bits: by torch on the CPU, by a Triton kernel on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.block_sparse import mask_by_rows
from quire.definition.checks import check
from quire.definition.masks import byte_indptr, pack_bits, pack_segments
from quire.kernels.ops import on_triton, operation


@operation("packbits", "bits")
def pack(x: Tensor, indptr: Tensor | None, byte_offsets: Tensor | None, bits: Tensor, big: bool) -> None:
    """Pack x, bool [n], into bits, uint8: all of it, or segment by segment, each segment on a new byte.

    Without segments (indptr None), bits has ceil(n / 8) bytes. Segment i is ``x[indptr[i]:indptr[i + 1]]``, and is
    packed into bytes byte_offsets[i] to byte_offsets[i + 1] (see `quire.definition.masks.byte_indptr`); indptr and
    byte_offsets are int64 [segments + 1]. Bytes beyond byte_offsets[-1] become 0.
    """
    if on_triton(x.device):
        from quire.kernels.triton.pack import pack as pack_on_gpu

        pack_on_gpu(x, indptr, byte_offsets, bits, big)
    elif indptr is None or byte_offsets is None:
        bits.copy_(pack_bits(x, big))
    else:
        bits.copy_(pack_segments(x, indptr, byte_offsets, len(bits), big))


def pack_vector(x: Tensor, big: bool) -> Tensor:
    """Pack bool [n] into uint8 [ceil(n / 8)]."""
    bits = torch.empty((len(x) + 7) // 8, dtype=torch.uint8, device=x.device)
    pack(x, None, None, bits, big)
    return bits


def pack_ragged(x: Tensor, indptr: Tensor, big: bool) -> tuple[Tensor, Tensor]:
    """Pack the segments of bool [n], with indptr int64 [segments + 1]: their bytes, and their int32 indptr. Waits for
    the device.

    Raises:
        ValueError: segments that have 2**31 bytes together, or more.
    """
    byte_offsets = byte_indptr(indptr.diff())
    count = int(byte_offsets[-1])
    check(0 <= count < 1 << 31, "indptr", f"segments of {count} bytes together", "0 to 2**31 - 1")
    bits = torch.empty(count, dtype=torch.uint8, device=x.device)
    pack(x, indptr, byte_offsets, bits, big)
    return bits, byte_offsets.int()


def pack_blocks(mask: Tensor, indptr: Tensor) -> Tensor:
    """The custom masks of a block-sparse matrix, packed, one for each row of blocks: uint8.

    mask: bool [blocks, R, C]; indptr: int32 [rows of blocks + 1], the offset of each row's blocks. Never waits for a
    device, and therefore returns an upper bound of the number of bytes.
    """
    indptr = indptr.to(mask.device)
    offsets = indptr.long() * (mask.shape[1] * mask.shape[2])
    bits = torch.empty(mask.numel() // 8 + len(indptr), dtype=torch.uint8, device=mask.device)
    pack(mask_by_rows(mask, indptr), offsets, byte_indptr(offsets.diff()), bits, False)
    return bits
