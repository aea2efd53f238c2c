"""Packing booleans into bits, as custom masks are given to attention.

Names, parameters and meanings are those of `flashinfer.quantization`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.definition.masks import byte_indptr
from quire.definition.pages import check_indptr
from quire.definition.spec import check
from quire.definition.tensors import check_tensors
from quire.kernels.pack import pack

__all__ = ["packbits", "segment_packbits"]


def _check(x: Tensor, bitorder: str) -> None:
    if not isinstance(x, Tensor) or x.ndim != 1:
        given = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"x is {given}: it must be a tensor with one dimension")
    check(bitorder in ("big", "little"), "bitorder", bitorder, "big or little")


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Pack eight booleans in a byte, as `numpy.packbits` does.

    Args:
        x: [n], bool, or anything of which what is not 0 counts as true.
        bitorder: whether the first of eight becomes a byte's highest bit ("big") or its lowest ("little", as in the
            packed masks of attention).

    Returns:
        uint8 [ceil(n / 8)]; bits that nothing fills are 0.

    Raises:
        ValueError: x is no vector, or bitorder is something else.
    """
    _check(x, bitorder)
    bits = torch.empty((len(x) + 7) // 8, dtype=torch.uint8, device=x.device)
    pack(x.bool(), None, None, bits, bitorder == "big")
    return bits


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack segments of booleans, each from a new byte on. Waits for the device, since what is returned depends on it.

    Args:
        x, bitorder: as in `packbits`.
        indptr: int32 or int64 [segments + 1], on x's device; segment i is ``x[indptr[i]:indptr[i + 1]]``.

    Returns:
        uint8 [new_indptr[-1]], and new_indptr, int32 [segments + 1]: segment i's bytes begin at new_indptr[i].

    Raises:
        ValueError: x, indptr or bitorder does not fit; on the host also an indptr that falls or leaves x.
    """
    _check(x, bitorder)
    check_tensors(indptr=indptr)
    vector = indptr.ndim == 1 and len(indptr) > 0 and indptr.dtype in (torch.int32, torch.int64)
    check(vector, "indptr", f"{indptr.dtype} {list(indptr.shape)}", "an int32 or int64 vector, at least [0]")
    check(indptr.device == x.device, "indptr.device", str(indptr.device), f"{x.device}, where x lies")
    check_indptr(indptr, "indptr", len(x), "the length of x")
    bytes_at = byte_indptr(indptr.diff())
    count = int(bytes_at[-1])
    check(0 <= count < 1 << 31, "indptr", f"segments of {count} bytes together", "0 to 2**31 - 1")
    bits = torch.empty(count, dtype=torch.uint8, device=x.device)
    pack(x.bool(), indptr.long(), bytes_at, bits, bitorder == "big")
    return bits, bytes_at.int()
