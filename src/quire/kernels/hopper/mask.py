"""Which keys a query row sees. No other file of this family knows causal order, windows, custom masks and items.

Row r of a request, which has c.group rows per query token, stands at position kv_len - q_len + r // c.group among the
keys. `first_key`, `tile_keys`, `visible_blocks` and `needed_keys` bound what is loaded and computed for whole requests
and tiles; `visible` decides for each row and key.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.definition.spec import AttentionSpec

# The fields of AttentionSpec that this file computes.
MASKS = frozenset({"causal", "window_left", "window_right", "custom_mask", "items"})


def keys_to_the_right(spec: AttentionSpec, max_q_len: int = 0) -> int:
    """How many keys to the right of its position a row sees, which kernels are compiled for: 0 in causal layers, -1 for
    all of them. Nothing is to the right of a request's only query token.
    """
    return -1 if max_q_len == 1 else 0 if spec.mask.causal else spec.mask.window_right


class Mask(NamedTuple):
    """Arguments of masks. window: how many keys before its own position a row sees, with c.window. bits, indptr, size:
    packed custom masks as in `quire.definition.masks` and their number of bytes, with c.mask. prefix_lens,
    item_positions, items_len: the tensors and the length of `quire.definition.items`, with c.items.
    """

    window: tl.tensor
    bits: tl.tensor
    indptr: tl.tensor
    size: tl.tensor
    prefix_lens: tl.tensor
    item_positions: tl.tensor
    items_len: tl.tensor


class RowMask(NamedTuple):
    """For each row of a tile, its position among the keys, the end of the keys that it may see and, with c.mask, the
    index of its first bit. With c.items, the keys from prefix_len to item_start are hidden from the row.
    """

    position: tl.tensor
    end: tl.tensor
    bit: tl.tensor
    prefix_len: tl.tensor
    item_start: tl.tensor


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
def needed_keys(request, j, mask, c: gl.constexpr, start=0):
    """Which of keys start + j are loaded, because a row of the request may see them."""
    end = request.kv_len - start  # subtracted once, so that j may be constant
    needed = j < end
    if c.window:
        needed = needed & (j >= end - request.q_len - mask.window)
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
    """The start and the end of the keys that all of rows `row` to last_row see, in layers without custom masks."""
    start, end = request.kv_len * 0, unmasked_end(request, row, c)
    if c.window:
        start = position_of(request, last_row, c) - mask.window
    if c.items:
        end = gl.minimum(end, gl.load(mask.prefix_lens + request.b).to(gl.int32))
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
        bit = _first_bits(request, r // c.group, mask)
        end = gl.where(position < request.kv_len, end, 0)  # rows after the request's last one have no bits
    prefix_len, item_start = position, position
    if c.items:
        prefix_len = gl.load(mask.prefix_lens + request.b).to(gl.int32)
        item_start = _item_starts(request.b, position, prefix_len, mask)
    return RowMask(position, end, bit, prefix_len, item_start)


@gluon.jit
def _item_starts(b, position, prefix_len, mask):
    """The first key, beyond the prefix, that a row at each of these positions sees: 0 in the prefix itself."""
    at = position - prefix_len
    inside = (at >= 0) & (at < mask.items_len)
    in_item = gl.load(mask.item_positions + b.to(gl.int64) * mask.items_len + at, inside, 0).to(gl.int32)
    return gl.where(at >= 0, position + 1 - in_item, 0)


@gluon.jit
def _first_bits(request, i, mask):
    """The index of the first bit of each of query tokens i of a request in the custom masks."""
    return gl.maximum(gl.load(mask.indptr + request.b), 0).to(gl.int64) * 8 + i.to(gl.int64) * request.kv_len


@gluon.jit
def bitwise_or(a, b):
    return a | b


@gluon.jit
def visible_blocks(request, row, last_row, first, base, mask, c: gl.constexpr):
    """Of the 32 key blocks from `base` on, bit by bit: those of which some of rows `row` to last_row of a request may
    see a key, none of which is before block `first`; and those of which all of these rows see all keys.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [c.load_warps], [0]))
    block = base + lanes
    start, end = unmasked_keys(request, row, last_row, mask, c)
    some, every = block >= first, (block * c.block_n >= start) & ((block + 1) * c.block_n <= end)
    if c.items:
        prefix_len, item_start = _visible_items(request, row, last_row, mask, c)
        some = some & ((block * c.block_n < prefix_len) | ((block + 1) * c.block_n > item_start))
    if c.mask:
        ones, zeros = _bits_of_blocks(request, row, last_row, base, mask, c)
        some, every = some & (ones != 0), every & (zeros == 0)
    bit = gl.full_like(lanes, 1) << lanes
    return gl.reduce(gl.where(some, bit, 0), 0, bitwise_or), gl.reduce(gl.where(every, bit, 0), 0, bitwise_or)


@gluon.jit
def _visible_items(request, row, last_row, mask, c: gl.constexpr):
    """The end of the prefix, and the first key beyond it that one of rows `row` to last_row sees."""
    tokens: gl.constexpr = triton.next_power_of_2(c.tile_rows)
    i = row // c.group + gl.arange(0, tokens, gl.BlockedLayout([1], [32], [c.load_warps], [0]))
    position = request.kv_len - request.q_len + gl.minimum(i, last_row // c.group)
    prefix_len = gl.load(mask.prefix_lens + request.b).to(gl.int32)
    return prefix_len, gl.min(_item_starts(request.b, position, prefix_len, mask), 0)


@gluon.jit
def _bits_of_blocks(request, row, last_row, base, mask, c: gl.constexpr):
    """For each of the 32 key blocks from `base` on, whether the custom mask has a 1 in one of rows `row` to last_row,
    and whether it has a 0: numbers that are then not 0. Bits behind a request's last key count like others.
    """
    step: gl.constexpr = 4 * c.load_warps  # query tokens
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [c.load_warps, 1], [1, 0])
    token = gl.arange(0, step, gl.SliceLayout(1, layout))
    block = base + gl.arange(0, 32, gl.SliceLayout(0, layout))
    words = _words_of(mask)
    ones = gl.full([step, 32], 0, gl.uint32, layout)
    zeros = ones
    for i in range(row // c.group, last_row // c.group + 1, step):
        bit = _first_bits(request, gl.minimum(i + token, last_row // c.group), mask) + words.first
        at = (bit >> 5)[:, None] + (block * (c.block_n // 32))[None, :]
        low = _load_word(words, at)
        for j in gl.static_range(c.block_n // 32):
            high = _load_word(words, at + (j + 1))
            word = _shift_word(low, high, (bit & 31).to(gl.uint32)[:, None])
            ones, zeros, low = ones | word, zeros | (word ^ 0xFFFFFFFF), high
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [c.load_warps], [0])
    ones = gl.convert_layout(gl.reduce(ones, 0, bitwise_or), flat)
    return ones, gl.convert_layout(gl.reduce(zeros, 0, bitwise_or), flat)


@gluon.jit
def visible(j, position, end, bit, mask, c: gl.constexpr):
    """Whether rows see keys j, in layers without items. position, end and bit: of RowMask, in shapes that broadcast
    with j.
    """
    seen = _in_bounds(j, position, end, mask, c)
    if c.mask:
        at = bit + j
        byte = gl.load(mask.bits + gl.minimum(at >> 3, mask.size - 1), seen, 0)
        seen = seen & (((byte.to(gl.int32) >> (at & 7).to(gl.int32)) & 1) != 0)
    return seen


@gluon.jit
def _in_bounds(j, position, end, mask, c: gl.constexpr):
    """`visible` but for custom masks."""
    seen = j < end
    if c.window:
        seen = seen & (j >= position - mask.window)
    return seen


@gluon.jit
def visible_in_block(rows, start, layout: gl.constexpr, mask, c: gl.constexpr):
    """Which of the c.block_n keys from `start` on each row of a tile sees, where logits have the layout of a product.

    The columns of a thread are 0, 1, 8, 9, 16, ... and an offset, which is taken from the rows' side of each
    comparison: what is left of the columns is constant.
    """
    flat: gl.constexpr = gl.SliceLayout(0, layout)
    columns = gl.arange(0, c.block_n, flat)
    offset, j = (columns & 6)[None, :], (columns & ~6)[None, :]
    first = offset + start
    seen = _in_bounds(j, rows.position[:, None] - first, rows.end[:, None] - first, mask, c)
    if c.items:
        seen = seen & ((j < rows.prefix_len - first) | (j >= rows.item_start[:, None] - first))
    if c.mask:
        # Words of 32 bits, aligned as those of memory, are shifted to words of 32 keys.
        words = _words_of(mask)
        bit = rows.bit + (start + words.first)
        shift, at = (bit & 31).to(gl.uint32), bit >> 5
        low, picked = _load_word(words, at), seen.to(gl.uint32) * 0
        for i in gl.static_range(c.block_n // 32):
            high = _load_word(words, at + (i + 1))
            word = _shift_word(low, high, shift)
            picked = gl.where(j // 32 == i, word[:, None] >> offset.to(gl.uint32), picked)
            low = high
        seen = seen & (((picked >> (j % 32).to(gl.uint32)) & 1) != 0)
    return seen


class Words(NamedTuple):
    """Custom masks as `count` words of 32 bits at aligned addresses from `at` on. first: which bit is the masks' first.
    Up to three bytes before and behind the masks are read, of words that have bytes of theirs.
    """

    at: tl.tensor
    count: tl.tensor
    first: tl.tensor


@gluon.jit
def _words_of(mask):
    before = (mask.bits.to(gl.int64) & 3).to(gl.int32)  # bytes of the first word that are not the masks'
    at = (mask.bits - before).to(gl.pointer_type(gl.uint32), bitcast=True)
    return Words(at, (mask.size.to(gl.int64) + before + 3) // 4, before * 8)


@gluon.jit
def _load_word(words, i):
    return gl.load(words.at + i, (i >= 0) & (i < words.count), 0)


@gluon.jit
def _shift_word(low, high, shift):
    """The 32 bits from bit `shift` of a word on, of that and the next one."""
    return (low >> shift) | ((high << 1) << (31 - shift))
