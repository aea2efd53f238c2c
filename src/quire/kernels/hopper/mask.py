"""Which keys a query row sees. No other file of this family knows causal order, windows or custom masks.

Row r of a request, which has c.group rows per query token, stands at position kv_len - q_len + r // c.group among the
keys. `first_key`, `tile_keys` and `needed_keys` bound what is loaded and computed for whole requests and tiles;
`visible` decides for each row and key.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.definition.spec import AttentionSpec

# The fields of AttentionSpec that this file computes.
MASKS = frozenset({"causal", "window_left", "window_right", "custom_mask"})


def keys_to_the_right(spec: AttentionSpec, max_q_len: int = 0) -> int:
    """How many keys to the right of its position a row sees, which kernels are compiled for: 0 in causal layers, -1 for
    all of them. Nothing is to the right of a request's only query token.
    """
    return -1 if max_q_len == 1 else 0 if spec.causal else spec.window_right


class Mask(NamedTuple):
    """Arguments of masks. window: how many keys before its own position a row sees, with c.window. bits, indptr, size:
    packed custom masks as in `quire.definition.masks` and their number of bytes, with c.mask.
    """

    window: tl.tensor
    bits: tl.tensor
    indptr: tl.tensor
    size: tl.tensor


class RowMask(NamedTuple):
    """For each row of a tile, its position among the keys, the end of the keys that it may see and, with c.mask, the
    index of its first bit.
    """

    position: tl.tensor
    end: tl.tensor
    bit: tl.tensor


@gluon.jit
def first_key(q_len, kv_len, mask, c: gl.constexpr):
    """The first key that a request reads, rounded down to a work unit. Takes and returns scalars or vectors."""
    low = kv_len * 0
    if c.window:
        low = gl.maximum(kv_len - q_len - mask.window, 0) // c.unit_size * c.unit_size
    return low


@gluon.jit
def tile_keys(past, row, last_row, start, end, mask, c: gl.constexpr):
    """Which of keys start to end a tile reads: those that any of its rows, `row` to last_row, sees, and those before
    them in a block. past: the position of its request's first query token.
    """
    if c.right >= 0 and c.tile_rows > 0:  # otherwise the tile has its request's last row, which sees all keys
        end = gl.minimum(end, past + last_row // c.group + (c.right + 1))
    if c.window and (c.tile_rows > 0 or c.unit_size > c.block_n):  # otherwise `first_key` has left these out
        start = gl.maximum(start, (past + row // c.group - mask.window) // c.block_n * c.block_n)
    return start, end


@gluon.jit
def needed_keys(request, j, mask, c: gl.constexpr):
    """Which of keys j are loaded, because a row of the request may see them."""
    needed = j < request.kv_len
    if c.window:
        needed = needed & (j >= request.kv_len - request.q_len - mask.window)
    return needed


@gluon.jit
def position_of(request, r, c: gl.constexpr):
    """Positions of rows r among the keys."""
    return request.kv_len - request.q_len + r // c.group


@gluon.jit
def unmasked_end(request, row, c: gl.constexpr):
    """Keys before this one are seen by `row` and all rows after it, in layers without window and custom mask."""
    end = request.kv_len
    if c.right >= 0:
        end = gl.minimum(position_of(request, row, c) + (c.right + 1), end)
    return end


@gluon.jit
def unmasked_keys(request, row, last_row, mask, c: gl.constexpr):
    """The start and the end of the keys that all of rows `row` to last_row see."""
    start, end = request.kv_len * 0, unmasked_end(request, row, c)
    if c.window:
        start = position_of(request, last_row, c) - mask.window
    if c.mask:
        end = start
    return start, end


@gluon.jit
def partly_needed(request, start, end, mask, c: gl.constexpr):
    """Whether some of keys start to end are not needed: see `needed_keys`."""
    partly = end > request.kv_len
    if c.window:
        partly = partly | (start < request.kv_len - request.q_len - mask.window)
    return partly


@gluon.jit
def row_mask(request, r, mask, c: gl.constexpr):
    """The RowMask of rows r of a request."""
    position, bit = position_of(request, r, c), r.to(gl.int64)
    end = position * 0 + request.kv_len
    if c.right >= 0:
        end = gl.minimum(position + (c.right + 1), end)
    if c.mask:
        start = gl.maximum(gl.load(mask.indptr + request.b), 0).to(gl.int64)
        bit = start * 8 + (r // c.group).to(gl.int64) * request.kv_len
        end = gl.where(position < request.kv_len, end, 0)  # rows after the request's last one have no bits
    return RowMask(position, end, bit)


@gluon.jit
def shifted(rows, offset):
    """A RowMask for keys that are counted from `offset` on, which may differ between columns: [rows, columns]."""
    offset = offset[None, :]
    return RowMask(rows.position[:, None] - offset, rows.end[:, None] - offset, rows.bit[:, None] + offset)


@gluon.jit
def visible(j, position, end, bit, mask, c: gl.constexpr):
    """Whether rows see keys j. position, end and bit: of RowMask, in shapes that broadcast with j."""
    seen = j < end
    if c.window:
        seen = seen & (j >= position - mask.window)
    if c.mask:
        at = bit + j
        byte = gl.load(mask.bits + gl.minimum(at >> 3, mask.size - 1), seen, 0)
        seen = seen & (((byte.to(gl.int32) >> (at & 7).to(gl.int32)) & 1) != 0)
    return seen
