"""Custom masks, one bit per (query, key): row-major within a request, little end first, each request on a new byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(x: Tensor, big: bool = False) -> Tensor:
    """Bool [n] to uint8 [ceil(n / 8)], bit i (counted from the top, if `big`) of byte j being x[8 * j + i]; missing
    bits are 0.
    """
    return _pack_eights(pad(x.flatten(), (0, -x.numel() % 8)).view(-1, 8), big)


def _pack_eights(x: Tensor, big: bool) -> Tensor:
    """Bool [bytes, 8] to uint8 [bytes]."""
    place = torch.arange(8, dtype=torch.uint8, device=x.device)
    return (x * torch.bitwise_left_shift(1, 7 - place if big else place)).sum(1, dtype=torch.uint8)


def byte_indptr(sizes: Tensor) -> Tensor:
    """The begins of packed segments of so many bits each, every one on a new byte: int64 [segments + 1]."""
    return pad(((sizes.long() + 7) // 8).cumsum(0), (1, 0))


def pack_segments(x: Tensor, indptr: Tensor, bytes_at: Tensor, count: int, big: bool = False) -> Tensor:
    """Pack bool [n] segment by segment, each from a new byte on.

    Args:
        indptr: int64 [segments + 1], the segments' begins in x; bytes_at: those of their bytes, from `byte_indptr`.
        count: the bytes to return, at least bytes_at[-1]; those beyond it are 0.
    """
    byte = torch.arange(count, device=x.device)
    owner = (torch.searchsorted(bytes_at, byte, right=True) - 1).clamp(max=len(indptr) - 2)
    first = (indptr[owner] + 8 * (byte - bytes_at[owner])).clamp(0, x.numel())
    inside = torch.arange(8, device=x.device) < (indptr[owner + 1] - first)[:, None]
    return _pack_eights(pad(x, (0, 8)).unfold(0, 8, 1)[first] & inside, big)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """uint8 [ceil(count / 8)] to bool [count], the inverse of `pack_bits`."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=bits.device)
    return (bits[: -(-count // 8), None] & weights).flatten()[:count] != 0


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The masks of a batch.

    Attributes:
        bits: uint8 [bytes].
        indptr: int32 [batch_size + 1], in bytes: request b's q_len * kv_len bits start at byte indptr[b].
    """

    bits: Tensor
    indptr: Tensor

    @classmethod
    def from_bool(cls, mask: Tensor, q_lens: Tensor, kv_lens: Tensor) -> PackedMask:
        """From the requests' masks, each flattened and one after another: bool [sum(q_len * kv_len)].
        The lengths are int32 [batch_size]; reads the host's, or once from a device, how many entries they ask for.
        """
        if mask.dtype != torch.bool:
            raise ValueError(f"custom_mask is {mask.dtype}: it must be bool")
        areas = q_lens.long() * kv_lens.to(q_lens.device).long()
        indptr, bytes_at = pad(areas.cumsum(0), (1, 0)), byte_indptr(areas)
        area, count = torch.stack([indptr[-1], bytes_at[-1]]).tolist()
        if mask.numel() != area:
            raise ValueError(f"custom_mask has {mask.numel()} entries: the sum of q_len * kv_len is {area}")
        bytes_at = bytes_at.to(mask.device)
        bits = pack_segments(mask.flatten(), indptr.to(mask.device), bytes_at, count)
        return cls(bits, bytes_at.int())

    @classmethod
    def from_packed(cls, bits: Tensor, q_lens: Tensor, kv_lens: Tensor) -> PackedMask:
        """From bits already packed request by request; q_lens and kv_lens are int32 [batch_size]."""
        if bits.dtype != torch.uint8 or bits.ndim != 1:
            raise ValueError(
                f"packed_custom_mask is {bits.dtype} of shape {list(bits.shape)}: a uint8 vector is needed"
            )
        indptr = byte_indptr(q_lens.long() * kv_lens.to(q_lens.device).long()).int()
        if indptr.device.type == "cpu" and int(indptr[-1]) > len(bits):
            raise ValueError(f"packed_custom_mask has {len(bits)} bytes: the requests need {int(indptr[-1])}")
        return cls(bits, indptr.to(bits.device))
