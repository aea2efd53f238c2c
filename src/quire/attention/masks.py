"""Custom masks, one bit per (query, key): row-major within a request, little end first, each request on a new byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def pack_bits(x: Tensor) -> Tensor:
    """Bool [n] to uint8 [ceil(n / 8)], bit i of byte j being x[8 * j + i]; missing bits are 0."""
    padded = torch.zeros(-(-x.numel() // 8) * 8, dtype=torch.int32, device=x.device)
    padded[: x.numel()] = x.flatten()
    places = torch.arange(8, dtype=torch.int32, device=x.device)
    return (padded.view(-1, 8) << places).sum(1).to(torch.uint8)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """uint8 [ceil(count / 8)] to bool [count], the inverse of `pack_bits`."""
    places = torch.arange(8, dtype=torch.int32, device=bits.device)
    return (bits[: -(-count // 8), None].int() >> places).flatten()[:count] & 1 != 0


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
        Reads the lengths, int32 [batch_size], on the host.
        """
        if mask.dtype != torch.bool:
            raise ValueError(f"custom_mask is {mask.dtype}: it must be bool")
        areas = (q_lens.long() * kv_lens.long()).tolist()
        if mask.numel() != sum(areas):
            raise ValueError(f"custom_mask has {mask.numel()} entries: the sum of q_len * kv_len is {sum(areas)}")
        parts = [pack_bits(part) for part in mask.flatten().split(areas)] or [mask.new_zeros(0, dtype=torch.uint8)]
        return cls.from_packed(torch.cat(parts), q_lens, kv_lens)

    @classmethod
    def from_packed(cls, bits: Tensor, q_lens: Tensor, kv_lens: Tensor) -> PackedMask:
        """From bits already packed request by request; q_lens and kv_lens are int32 [batch_size]."""
        if bits.dtype != torch.uint8 or bits.ndim != 1:
            raise ValueError(
                f"packed_custom_mask is {bits.dtype} of shape {list(bits.shape)}: a uint8 vector is needed"
            )
        sizes = (q_lens.long() * kv_lens.long() + 7) // 8
        indptr = torch.zeros(len(sizes) + 1, dtype=torch.int32, device=sizes.device)
        torch.cumsum(sizes, 0, out=indptr[1:])
        if indptr.device.type == "cpu" and int(indptr[-1]) > len(bits):
            raise ValueError(f"packed_custom_mask has {len(bits)} bytes: the requests need {int(indptr[-1])}")
        return cls(bits, indptr.to(bits.device))
