"""Which keys a query row sees. No other file of this family knows causal masks, windows, custom masks and items.

Query token i of a request is at position kv_len - q_len + i, and key j at position j. A new kind of mask is a field of
`MaskKinds`, an argument in `Mask`, a bound in `first_key` or `key_ends` where it bounds the keys of a tile, and a
condition in `visible`.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import triton
from torch import Tensor
from triton import language as tl

from quire.definition.spec import AttentionSpec
from quire.kernels.call import Call

# The fields of MaskSpec that this file computes.
MASKS = frozenset({"causal", "window_left", "window_right", "custom_mask", "items"})


@dataclass(frozen=True, slots=True)
class MaskKinds:
    """The kinds of masks that a kernel is compiled for. `right`: how many keys to the right of its position a query
    sees, 0 for causal attention and -1 for all; models have few such numbers, so that each gets a kernel of its own.
    """

    right: int
    window: bool
    custom: bool
    items: bool

    @classmethod
    def of(cls, spec: AttentionSpec) -> MaskKinds:
        mask = spec.mask
        right = 0 if mask.causal else mask.window_right
        return cls(right, mask.window_left >= 0, mask.custom_mask, mask.items)

    @property
    def has_full_blocks(self) -> bool:
        """Whether a tile's keys begin with blocks that all of its rows see, which need no mask."""
        return not (self.window or self.custom or self.items)


# The kernel's arguments for masks: see `quire.definition.masks` and `quire.definition.items`.
Mask = namedtuple("Mask", "bits indptr prefix_lens item_positions window_left num_bytes items_len")


def mask_of(call: Call) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """The fields of `Mask` for a call: its tensors, and its numbers."""
    packed, items = call.mask, call.items
    bits, indptr = (None, None) if packed is None else (packed.bits, packed.indptr)
    prefix_lens, positions = (None, None) if items is None else (items.prefix_lens, items.positions)
    numbers = call.spec.mask.window_left, 0 if bits is None else bits.shape[0], 0 if items is None else items.length
    return (bits, indptr, prefix_lens, positions), numbers


# What masks need of a tile: each row's position in its item, then the request's length of the prefix before its items,
# and the first byte of its custom mask.
TileMask = namedtuple("TileMask", "item_position prefix_len first_byte")


@triton.jit
def load_row_mask(mask, request, position, valid, c: tl.constexpr):
    """Read what masks need of a request's rows at these positions."""
    item_position = position
    prefix_len = request.b * 0
    if c.mask.items:
        prefix_len = tl.load(mask.prefix_lens + request.b).to(tl.int32)
        at = position - prefix_len
        inside = valid & (at >= 0) & (at < mask.items_len)
        row = mask.item_positions + request.b.to(tl.int64) * mask.items_len
        item_position = tl.load(row + at, inside, 0).to(tl.int32)
    first_byte = request.b * 0
    if c.mask.custom:
        first_byte = tl.maximum(tl.load(mask.indptr + request.b), 0)
    return TileMask(item_position, prefix_len, first_byte)


@triton.jit
def first_key(request, i, mask, c: tl.constexpr):
    """The first key that query token i, or a later one, sees. Requests may be a vector."""
    key = request.kv_len * 0
    if c.mask.window:
        key = tl.maximum(request.kv_len - request.q_len + i - mask.window_left, 0)
    return key


@triton.jit
def key_ends(request, i_first, i_last, mask, c: tl.constexpr):
    """The end of the keys that query tokens i_first to i_last see, and the end of those that all of these tokens see,
    which counts only if the mask has full blocks.
    """
    end, full_end = request.kv_len, request.kv_len
    if c.mask.right >= 0:
        past = request.kv_len - request.q_len
        end = tl.minimum(request.kv_len, past + i_last + (c.mask.right + 1))
        full_end = tl.maximum(tl.minimum(request.kv_len, past + i_first + (c.mask.right + 1)), 0)
    return end, full_end


@triton.jit
def visible(rows, request, j, mask, c: tl.constexpr):
    """Which keys j each row sees: bool [rows, keys]."""
    seen = (j < request.kv_len)[None, :] & rows.valid[:, None]
    key, position = j[None, :], rows.position[:, None]
    if c.mask.right >= 0:
        seen &= key <= position + c.mask.right
    if c.mask.window:
        seen &= key >= position - mask.window_left
    if c.mask.items:
        prefix_len, item_position = rows.mask.prefix_len, rows.mask.item_position[:, None]
        seen &= (position < prefix_len) | (key < prefix_len) | (key > position - item_position)
    if c.mask.custom:
        bit = rows.i[:, None].to(tl.int64) * request.kv_len + key
        byte = tl.minimum(rows.mask.first_byte + (bit >> 3), mask.num_bytes - 1)
        seen &= ((tl.load(mask.bits + byte, seen, 0) >> (bit & 7).to(tl.uint8)) & 1) != 0
    return seen
