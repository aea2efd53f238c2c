"""Packing booleans into bits, the format of packed custom masks.

Names, parameters and meanings are those of `flashinfer.quantization`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.pages import check_indptr
from quire.definition.tensors import check_tensors
from quire.kernels.pack import pack_ragged, pack_vector

__all__ = ["packbits", "segment_packbits"]


def _check(x: Tensor, bitorder: str) -> None:
    if not isinstance(x, Tensor) or x.ndim != 1:
        kind = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"x is {kind}: it must be a tensor with one dimension")
    check(bitorder in ("big", "little"), "bitorder", bitorder, "big or little")


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Pack eight booleans into a byte, as `numpy.packbits` does.

    Args:
        x: [n], bool or any other dtype, of which values other than 0 are true.
        bitorder: whether the first of eight booleans becomes the highest bit of a byte ("big") or the lowest ("little",
            as in packed custom masks).

    Returns:
        uint8 [ceil(n / 8)]; unused bits are 0.

    Raises:
        ValueError: x is not a vector, or bitorder is unknown.
    """
    _check(x, bitorder)
    return pack_vector(x.bool(), bitorder == "big")


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack segments of booleans, each on a new byte. Waits for the device, to learn the number of bytes.

    Args:
        x, bitorder: as in `packbits`.
        indptr: int32 or int64 [segments + 1], on x's device; segment i is ``x[indptr[i]:indptr[i + 1]]``.

    Returns:
        (packed, new_indptr): uint8 [new_indptr[-1]], and int32 [segments + 1], the offset of each segment's bytes.

    Raises:
        ValueError: x, indptr or bitorder does not fit; on the host also an indptr that decreases or leaves x.
    """
    _check(x, bitorder)
    check_tensors(indptr=indptr)
    vector = indptr.ndim == 1 and len(indptr) > 0 and indptr.dtype in (torch.int32, torch.int64)
    check(vector, "indptr", f"{indptr.dtype} {list(indptr.shape)}", "an int32 or int64 vector, at least [0]")
    check(indptr.device == x.device, "indptr.device", str(indptr.device), f"{x.device}, where x lies")
    check_indptr(indptr, "indptr", len(x), "the length of x")
    return pack_ragged(x.bool(), indptr.long(), bitorder == "big")
