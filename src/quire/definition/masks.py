"""Masks: the settings that say which keys a query sees, and custom masks with one bit per (query, key): row-major
within a request, lowest bit first, requests at whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.definition.checks import check_settings, is_int, setting

_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def _is_window(value: object) -> bool:
    return is_int(value) and value >= -1  # type: ignore[operator]


def _window(side: str) -> str:
    return f"-1 or None for no window, or an int, the keys to the {side} that stay visible"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """The masks of one layer: which keys a query sees. Each field's default, or None, means that there is no such mask,
    except that layers are causal by default.

    Query token i of a request with q_len query and kv_len key tokens is at position p = i + kv_len - q_len, and sees
    key j when

    - ``j <= p`` if `causal` (aligned to the bottom right),
    - ``j >= p - window_left`` if `window_left` >= 0,
    - ``j <= p + window_right`` if `window_right` >= 0,
    - its bit in the custom mask is set, if `custom_mask`,
    - the items of its prompt allow it, if `items` (see `quire.definition.items`).

    Attributes:
        causal: whether queries see no later keys.
        window_left, window_right: how many keys before and after its own position a query sees; -1 or None: all.
        custom_mask, items: whether calls pass a mask, or the items of prompts.

    Raises:
        ValueError: a setting that is not supported, named with its value and what is allowed.
    """

    causal: bool = setting(True, bool)
    window_left: int = setting(-1, int, _is_window, _window("left"))
    window_right: int = setting(-1, int, _is_window, _window("right"))
    custom_mask: bool = setting(False, bool)
    items: bool = setting(False, bool)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def depends_on_positions(self) -> bool:
        """Whether a key's visibility depends on more than causal order. Code that cuts a request into parts with
        positions of their own, or computes causal order alone, must refuse such layers. Masks that are added to this
        class later count, too.
        """
        return replace(self, causal=True) != MaskSpec()

    def visible(self, q_len: int, kv_len: int, device: torch.device) -> Tensor:
        """Which keys each query token of a request sees, by its position alone: bool [q_len, kv_len]."""
        i = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
        j = torch.arange(kv_len, device=device)[None, :]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
        if self.causal:
            seen &= j <= i
        if self.window_left >= 0:
            seen &= j >= i - self.window_left
        if self.window_right >= 0:
            seen &= j <= i + self.window_right
        return seen


def pack_bits(x: Tensor, big: bool = False) -> Tensor:
    """Pack bool [n] into uint8 [ceil(n / 8)]: bit i of byte j is x[8 * j + i], or 0 beyond x. Bit 0 is a byte's lowest
    bit, or its highest if `big`.
    """
    return _pack_bytes(pad(x.flatten(), (0, -x.numel() % 8)).view(-1, 8), big)


def _pack_bytes(x: Tensor, big: bool) -> Tensor:
    """Pack bool [bytes, 8] into uint8 [bytes]."""
    bit = torch.arange(8, dtype=torch.uint8, device=x.device)
    return (x * torch.bitwise_left_shift(1, 7 - bit if big else bit)).sum(1, dtype=torch.uint8)


def byte_indptr(sizes: Tensor) -> Tensor:
    """The byte offsets of packed segments with these numbers of bits, each on a new byte: int64 [segments + 1]."""
    return pad(((sizes.long() + 7) // 8).cumsum(0), (1, 0))


def pack_segments(x: Tensor, indptr: Tensor, byte_offsets: Tensor, count: int, big: bool = False) -> Tensor:
    """Pack bool [n] segment by segment, each on a new byte.

    Args:
        indptr: int64 [segments + 1], the segments' offsets in x.
        byte_offsets: int64 [segments + 1], the segments' offsets in the output, from `byte_indptr`.
        count: the number of bytes to return, at least byte_offsets[-1]; bytes beyond that are 0.
    """
    byte = torch.arange(count, device=x.device)
    owner = (torch.searchsorted(byte_offsets, byte, right=True) - 1).clamp(max=len(indptr) - 2)
    first = (indptr[owner] + 8 * (byte - byte_offsets[owner])).clamp(0, x.numel())
    inside = torch.arange(8, device=x.device) < (indptr[owner + 1] - first)[:, None]
    return _pack_bytes(pad(x, (0, 8)).unfold(0, 8, 1)[first] & inside, big)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """Unpack uint8 [ceil(count / 8)] into bool [count], the inverse of `pack_bits`."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=bits.device)
    return (bits[: -(-count // 8), None] & weights).flatten()[:count] != 0


def as_bool(mask: Tensor) -> Tensor:
    """A mask of bool or integers as bool. Refuses floating-point masks, which may be meant to be added to logits."""
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise ValueError(f"custom_mask is {mask.dtype}: it must be bool or of integers")
    return mask.bool()


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The packed custom masks of a batch.

    Attributes:
        bits: uint8 [bytes].
        indptr: int32 [batch_size + 1], in bytes: request b's q_len * kv_len bits start at byte indptr[b].
    """

    bits: Tensor
    indptr: Tensor

    @classmethod
    def from_bool(cls, mask: Tensor, q_lens: Tensor, kv_lens: Tensor) -> PackedMask:
        """From the requests' masks, flattened and concatenated, bool or integers [sum(q_len * kv_len)]. Lengths are
        int32 [batch_size]; lengths on a device are read once, to check the number of entries.
        """
        mask = as_bool(mask)
        areas = q_lens.long() * kv_lens.to(q_lens.device).long()
        indptr, byte_offsets = pad(areas.cumsum(0), (1, 0)), byte_indptr(areas)
        area, count = torch.stack([indptr[-1], byte_offsets[-1]]).tolist()
        if mask.numel() != area:
            raise ValueError(f"custom_mask has {mask.numel()} entries: the sum of q_len * kv_len is {area}")
        byte_offsets = byte_offsets.to(mask.device)
        bits = pack_segments(mask.flatten(), indptr.to(mask.device), byte_offsets, count)
        return cls(bits, byte_offsets.int())

    @classmethod
    def from_packed(cls, bits: Tensor, q_lens: Tensor, kv_lens: Tensor) -> PackedMask:
        """From bits that are packed already, request by request; q_lens and kv_lens are int32 [batch_size]."""
        if bits.dtype != torch.uint8 or bits.ndim != 1:
            raise ValueError(
                f"packed_custom_mask is {bits.dtype} of shape {list(bits.shape)}: a uint8 vector is needed"
            )
        indptr = byte_indptr(q_lens.long() * kv_lens.to(q_lens.device).long()).int()
        if indptr.device.type == "cpu" and int(indptr[-1]) > len(bits):
            raise ValueError(f"packed_custom_mask has {len(bits)} bytes: the requests need {int(indptr[-1])}")
        return cls(bits, indptr.to(bits.device))
