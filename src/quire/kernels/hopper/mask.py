"""Which keys a query row sees. No other file of this family knows causal order, windows, custom masks and items.

Row r of a request, which has `group` rows per query token, stands at position kv_len - q_len + r // group among the
keys. `first_key`, `tile_keys`, `visible_blocks` and `needed_keys` of a BatchMask bound what is loaded and computed for
whole requests and tiles; a RowMask decides for each row and key.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.definition.spec import AttentionSpec
from quire.kernels.call import Call
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.config import TileConfig

# The fields of MaskSpec that this file computes.
MASKS = frozenset({"causal", "window_left", "window_right", "custom_mask", "items"})


def has_items(spec: AttentionSpec) -> bool:
    """Whether a layer's prompts have several items."""
    return spec.mask.items


def hides_blocks(spec: AttentionSpec) -> bool:
    """Whether a layer's masks can hide any block of keys, so that only their data say which blocks are visible."""
    return spec.mask.custom_mask or spec.mask.items


@dataclass(frozen=True, slots=True)
class MaskConfig:
    """The masks of a layer.

    Attributes:
        tile: the tiles that they are applied to.
        right: how many keys to the right of its position a row sees: 0 in causal layers, -1 for all of them.
        window: whether rows see at most `BatchMask.window` keys before their positions.
        custom: whether there are custom masks.
        items: whether there are prompts of several items.
    """

    tile: TileConfig
    right: int
    window: bool
    custom: bool
    items: bool

    @classmethod
    def of(cls, spec: AttentionSpec, tile: TileConfig, max_q_len: int = 0) -> MaskConfig:
        """The masks of a layer whose requests have at most max_q_len query tokens (0: any number). The only
        query token of a request has no keys to its right, and needs no causal mask.
        """
        right = -1 if max_q_len == 1 else 0 if spec.mask.causal else spec.mask.window_right
        return cls(tile, right, spec.mask.window_left >= 0, spec.mask.custom_mask, spec.mask.items)

    @property
    def cuts_first_blocks(self) -> bool:
        """Whether some rows of a tile may not see all keys of its first blocks, where blocks are not listed."""
        return self.window

    @property
    def listed(self) -> bool:
        """Whether a tile's blocks are found in the masks' data: see `hides_blocks`."""
        return self.custom or self.items


def mask_arguments(call: Call) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """The tensors (bits, indptr, prefix_lens, item_positions) and numbers (size, items_len, window) of a BatchMask."""
    mask, items = call.mask, call.items
    bits, indptr, size = (None, None, 0) if mask is None else (mask.bits, mask.indptr, mask.bits.shape[0])
    prefix_lens, positions, length = (
        (None, None, 0) if items is None else (items.prefix_lens, items.positions, items.length)
    )
    return (bits, indptr, prefix_lens, positions), (size, length, call.spec.mask.window_left)


@aggregate
class BatchMask:
    """The masks of a batch, compiled for a MaskConfig. window: how many keys before its own position a row sees. bits,
    indptr, size: packed custom masks as in `quire.definition.masks` and their number of bytes. prefix_lens,
    item_positions, items_len: the tensors and the length of `quire.definition.items`.
    """

    window: gl.tensor | None
    bits: gl.tensor | None
    indptr: gl.tensor | None
    size: gl.tensor | None
    prefix_lens: gl.tensor | None
    item_positions: gl.tensor | None
    items_len: gl.tensor | None
    config: gl.constexpr

    @gluon.jit
    def first_key(self, q_len, kv_len):
        """The first key that a request reads, rounded down to a work unit. Takes and returns scalars or vectors."""
        low = kv_len * 0
        if self.config.window:
            unit_size: gl.constexpr = self.config.tile.unit_size
            low = gl.maximum(kv_len - q_len - self.window, 0) // unit_size * unit_size
        return low

    @gluon.jit
    def tile_keys(self, past, row, last_row, start, end):
        """Which of keys start to end a tile reads: those that any of its rows, `row` to last_row, sees, and those
        before them in a block. past: the position of its request's first query token.
        """
        tile: gl.constexpr = self.config.tile
        # The last row of a request sees all keys.
        if self.config.right >= 0 and tile.rows > 0:
            end = gl.minimum(end, past + last_row // tile.group + (self.config.right + 1))
        # `first_key` has left out keys before a tile of all rows, if a unit is a block.
        if self.config.window and (tile.rows > 0 or tile.unit_size > tile.block_n):
            start = gl.maximum(start, (past + row // tile.group - self.window) // tile.block_n * tile.block_n)
        return start, end

    @gluon.jit
    def mean_blocks(self, q_len, blocks):
        """The mean number of key blocks of a request's tiles, each of which has at most `blocks`."""
        blocks = blocks.to(gl.float32)
        if self.config.right >= 0:
            hidden = q_len.to(gl.float32) * (0.5 / self.config.tile.block_n)
            blocks = gl.maximum(blocks - hidden, blocks * 0.5)
        return blocks

    @gluon.jit
    def needed_keys(self, request, j, start=0):
        """Which of keys start + j are loaded, because a row of the request may see them."""
        # The start is subtracted once, so that j may be constant.
        end = request.kv_len - start
        needed = j < end
        if self.config.window:
            needed = needed & (j >= end - request.q_len - self.window)
        return needed

    @gluon.jit
    def partly_needed(self, request, start, end):
        """Whether some of keys start to end are not needed."""
        partly = end > request.kv_len
        if self.config.window:
            partly = partly | (start < request.kv_len - request.q_len - self.window)
        return partly

    @gluon.jit
    def position(self, request, r):
        """Positions of rows r among the keys."""
        return request.kv_len - request.q_len + r // self.config.tile.group

    @gluon.jit
    def unmasked_end(self, request, row):
        """Keys before this one are seen by `row` and all rows after it, in layers without window and custom mask."""
        end = request.kv_len
        if self.config.right >= 0:
            end = gl.minimum(self.position(request, row) + (self.config.right + 1), end)
        return end

    @gluon.jit
    def unmasked_keys(self, request, row, last_row):
        """The start and the end of the keys that all of rows `row` to last_row see, in layers without custom masks."""
        start, end = request.kv_len * 0, self.unmasked_end(request, row)
        if self.config.window:
            start = self.position(request, last_row) - self.window
        if self.config.items:
            end = gl.minimum(end, gl.load(self.prefix_lens + request.b).to(gl.int32))
        return start, end

    @gluon.jit
    def unmasked_blocks(self, request, row, last_row, first, last):
        """Blocks low to high - 1 of blocks first to last need no mask, in layers whose blocks are not listed."""
        block_n: gl.constexpr = self.config.tile.block_n
        start, end = self.unmasked_keys(request, row, last_row)
        high = gl.minimum(gl.maximum(gl.maximum(end, 0) // block_n, first), last)
        low = gl.minimum(gl.maximum(gl.maximum(start + (block_n - 1), 0) // block_n, first), high)
        return low, high

    @gluon.jit
    def visible_blocks(self, request, row, last_row, first, base, warps: gl.constexpr):
        """Two words with a bit for each of the 32 key blocks from `base` on. A bit of the first is set if the block is
        not before `first` and some of rows `row` to last_row of a request may see a key of it; a bit of the second, if
        all of these rows see all keys of the block.
        """
        block_n: gl.constexpr = self.config.tile.block_n
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [warps], [0]))
        block = base + lanes
        start, end = self.unmasked_keys(request, row, last_row)
        some, every = block >= first, (block * block_n >= start) & ((block + 1) * block_n <= end)
        if self.config.items:
            prefix_len, item_start = self._visible_items(request, row, last_row, warps)
            some = some & ((block * block_n < prefix_len) | ((block + 1) * block_n > item_start))
        if self.config.custom:
            ones, zeros = self._bits_of_blocks(request, row, last_row, base, warps)
            some, every = some & (ones != 0), every & (zeros == 0)
        bit = gl.full_like(lanes, 1) << lanes
        return gl.reduce(gl.where(some, bit, 0), 0, bitwise_or), gl.reduce(gl.where(every, bit, 0), 0, bitwise_or)

    @gluon.jit
    def _visible_items(self, request, row, last_row, warps: gl.constexpr):
        """The end of the prefix, and the first key beyond it that one of rows `row` to last_row sees."""
        group: gl.constexpr = self.config.tile.group
        tokens: gl.constexpr = triton.next_power_of_2(self.config.tile.rows)
        i = row // group + gl.arange(0, tokens, gl.BlockedLayout([1], [32], [warps], [0]))
        position = request.kv_len - request.q_len + gl.minimum(i, last_row // group)
        prefix_len = gl.load(self.prefix_lens + request.b).to(gl.int32)
        return prefix_len, gl.min(self._item_starts(request.b, position, prefix_len), 0)

    @gluon.jit
    def _item_starts(self, b, position, prefix_len):
        """The first key, beyond the prefix, that a row at each of these positions sees: 0 in the prefix itself."""
        at = position - prefix_len
        inside = (at >= 0) & (at < self.items_len)
        in_item = gl.load(self.item_positions + b.to(gl.int64) * self.items_len + at, inside, 0).to(gl.int32)
        return gl.where(at >= 0, position + 1 - in_item, 0)

    @gluon.jit
    def _bits_of_blocks(self, request, row, last_row, base, warps: gl.constexpr):
        """Two numbers for each of the 32 key blocks from `base` on: the first is not 0 if the custom mask has a 1 in
        the block for one of rows `row` to last_row, the second if it has a 0 there. Bits after a request's last key
        count like others.
        """
        group: gl.constexpr = self.config.tile.group
        block_n: gl.constexpr = self.config.tile.block_n
        # The number of query tokens that all threads look at together.
        step: gl.constexpr = 4 * warps
        layout: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [warps, 1], [1, 0])
        token = gl.arange(0, step, gl.SliceLayout(1, layout))
        block = base + gl.arange(0, 32, gl.SliceLayout(0, layout))
        words = self._words()
        ones = gl.full([step, 32], 0, gl.uint32, layout)
        zeros = ones
        for i in range(row // group, last_row // group + 1, step):
            bit = self._first_bits(request, gl.minimum(i + token, last_row // group)) + words.first
            at = (bit >> 5)[:, None] + (block * (block_n // 32))[None, :]
            low = words.load(at)
            for j in gl.static_range(block_n // 32):
                high = words.load(at + (j + 1))
                word = _shift_word(low, high, (bit & 31).to(gl.uint32)[:, None])
                ones, zeros, low = ones | word, zeros | (word ^ 0xFFFFFFFF), high
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
        ones = gl.convert_layout(gl.reduce(ones, 0, bitwise_or), flat)
        return ones, gl.convert_layout(gl.reduce(zeros, 0, bitwise_or), flat)

    @gluon.jit
    def _first_bits(self, request, i):
        """The index of the first bit of each of query tokens i of a request in the custom masks."""
        return gl.maximum(gl.load(self.indptr + request.b), 0).to(gl.int64) * 8 + i.to(gl.int64) * request.kv_len

    @gluon.jit
    def _words(self):
        """The Words of the custom masks."""
        # The bytes of the first word that lie before the masks.
        before = (self.bits.to(gl.int64) & 3).to(gl.int32)  # type: ignore[union-attr]
        at = (self.bits - before).to(gl.pointer_type(gl.uint32), bitcast=True)
        count = (self.size.to(gl.int64) + before + 3) // 4  # type: ignore[union-attr]
        return Words(at, count, before * 8)

    @gluon.jit
    def rows(self, request, r):
        """The RowMask of rows r of a request."""
        position, bit = self.position(request, r), r.to(gl.int64)
        end = position * 0 + request.kv_len
        if self.config.right >= 0:
            end = gl.minimum(position + (self.config.right + 1), end)
        if self.config.custom:
            bit = self._first_bits(request, r // self.config.tile.group)
            # Rows after the request's last one have no bits.
            end = gl.where(position < request.kv_len, end, 0)
        prefix_len, item_start = position, position
        if self.config.items:
            prefix_len = gl.load(self.prefix_lens + request.b).to(gl.int32)
            item_start = self._item_starts(request.b, position, prefix_len)
        return RowMask(self, position, end, bit, prefix_len, item_start)


@aggregate
class RowMask:
    """For each row of a tile, its position among the keys, the end of the keys that it may see and, with custom masks,
    the index of its first bit. With items, the keys from prefix_len to item_start are hidden from the row.
    """

    mask: BatchMask
    position: gl.tensor
    end: gl.tensor
    bit: gl.tensor
    prefix_len: gl.tensor
    item_start: gl.tensor

    @gluon.jit
    def visible(self, j):
        """Whether rows, the columns of the result, see keys j, [keys, 1], in layers without items."""
        seen = self._in_bounds(j, self.position[None, :], self.end[None, :])
        if self.mask.config.custom:
            at = self.bit[None, :] + j
            last_byte = self.mask.size - 1  # type: ignore[operator]
            byte = gl.load(self.mask.bits + gl.minimum(at >> 3, last_byte), seen, 0)
            seen = seen & (((byte.to(gl.int32) >> (at & 7).to(gl.int32)) & 1) != 0)
        return seen

    @gluon.jit
    def _in_bounds(self, j, position, end):
        """Whether keys j are seen, but for custom masks and items. position, end: in shapes that broadcast with j."""
        seen = j < end
        if self.mask.config.window:
            seen = seen & (j >= position - self.mask.window)
        return seen

    @gluon.jit
    def visible_in_block(self, start, layout: gl.constexpr):
        """Which of the block_n keys from `start` on each row sees, where logits have the layout of a product.

        The columns of a thread are 0, 1, 8, 9, 16, ... and an offset, which is taken from the rows' side of each
        comparison: what is left of the columns is constant.
        """
        config: gl.constexpr = self.mask.config
        block_n: gl.constexpr = config.tile.block_n
        columns = gl.arange(0, block_n, gl.SliceLayout(0, layout))
        offset, j = (columns & 6)[None, :], (columns & ~6)[None, :]
        first = offset + start
        seen = self._in_bounds(j, self.position[:, None] - first, self.end[:, None] - first)
        if config.items:
            seen = seen & ((j < self.prefix_len - first) | (j >= self.item_start[:, None] - first))
        if config.custom:
            # Words of 32 bits, aligned as those of memory, are shifted to words of 32 keys.
            words = self.mask._words()
            bit = self.bit + (start + words.first)
            shift, at = (bit & 31).to(gl.uint32), bit >> 5
            low, picked = words.load(at), seen.to(gl.uint32) * 0
            for i in gl.static_range(block_n // 32):
                high = words.load(at + (i + 1))
                word = _shift_word(low, high, shift)
                picked = gl.where(j // 32 == i, word[:, None] >> offset.to(gl.uint32), picked)
                low = high
            seen = seen & (((picked >> (j % 32).to(gl.uint32)) & 1) != 0)
        return seen


@aggregate
class Words:
    """Custom masks as `count` words of 32 bits at aligned addresses from `at` on. first: which bit is the masks' first.
    Up to three bytes before and behind the masks are read, those that share a word with the masks.
    """

    at: gl.tensor
    count: gl.tensor
    first: gl.tensor

    @gluon.jit
    def load(self, i):
        """Words i, 0 beyond the masks."""
        return gl.load(self.at + i, (i >= 0) & (i < self.count), 0)


@gluon.jit
def _shift_word(low, high, shift):
    """The 32 bits from bit `shift` of a word on, of that and the next one."""
    return (low >> shift) | ((high << 1) << (31 - shift))


@gluon.jit
def bitwise_or(a, b):
    """The operation of a reduction."""
    return a | b


@aggregate
class SeqlenInfo:
    """What masks need of request b: its query tokens and its keys."""

    b: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
