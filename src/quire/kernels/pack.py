"""Packing booleans into bits: by torch, on a GPU by a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.blocks import mask_by_rows
from quire.definition.masks import byte_indptr, pack_bits, pack_segments
from quire.kernels.ops import on_triton, operation


@operation("packbits", "bits")
def pack(x: Tensor, indptr: Tensor | None, bytes_at: Tensor | None, bits: Tensor, big: bool) -> None:
    """Write x, bool [n], into bits, uint8: all of it, or segment by segment.

    bits has ceil(n / 8) bytes without segments. Segment i is ``x[indptr[i]:indptr[i + 1]]`` and goes to byte
    bytes_at[i] and those after it (see `quire.definition.masks.byte_indptr`); both are int64 [segments + 1]. Bytes
    beyond bytes_at[-1] become 0.
    """
    if on_triton(x.device):
        from quire.kernels.triton.pack import pack as pack_by_triton

        pack_by_triton(x, indptr, bytes_at, bits, big)
    elif indptr is None or bytes_at is None:
        bits.copy_(pack_bits(x, big))
    else:
        bits.copy_(pack_segments(x, indptr, bytes_at, len(bits), big))


def pack_blocks(mask: Tensor, indptr: Tensor) -> Tensor:
    """The masks of a block-sparse matrix's rows of blocks, packed for attention: uint8, with spare bytes at the end.

    mask: bool [blocks, R, C]; indptr: int32 [rows of blocks + 1], where each one's blocks begin. Never waits for a
    device, hence the spare bytes.
    """
    indptr = indptr.to(mask.device)
    begins = indptr.long() * (mask.shape[1] * mask.shape[2])
    bits = torch.empty(mask.numel() // 8 + len(indptr), dtype=torch.uint8, device=mask.device)
    pack(mask_by_rows(mask, indptr), begins, byte_indptr(begins.diff()), bits, False)
    return bits
