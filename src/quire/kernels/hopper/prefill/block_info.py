"""Which key blocks of a work tile are loaded and computed, from the last to the first.

Without custom masks and items they are all blocks of the work tile, and consumers find from its bounds which of them
need a mask. Custom masks and items can hide any block, depending on their data (MaskConfig.listed): the producer
looks at 32 blocks together, leaves out those of which no row of the tile sees a key, and passes a BlockInfo for each
other one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.pipeline import allocate_mbarriers
from quire.kernels.hopper.schedule import leading_zeros

# Bits of a BlockInfo, and where its block begins.
MORE, MASKED, FLAGS = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)


@aggregate
class BlockInfo:
    """A block that is loaded, as a word: its number, whether it needs a mask, and whether the work tile has another one
    after it.
    """

    word: gl.tensor

    @gluon.jit
    def block(self):
        """The number of the block."""
        return self.word // FLAGS

    @gluon.jit
    def is_masked(self):
        """Whether it needs a mask."""
        return (self.word & MASKED) != 0

    @gluon.jit
    def has_more(self):
        """Whether the work tile has another block after it."""
        return (self.word & MORE) != 0


@gluon.jit
def block_info(block, masked=0, more=0):
    """The BlockInfo of a block; masked, more: 1 or 0."""
    return BlockInfo(block * FLAGS + masked * MASKED + more * MORE)


@aggregate
class BlockInfos:
    """A BlockInfo in shared memory for each stage of keys, of a word for each of the producer's threads, and mbarriers
    by which it is committed. Consumers release it with the stage.
    """

    words: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    warps: gl.constexpr

    @gluon.jit
    def put(self, keys, state, info):
        """Write the BlockInfo of the pipeline's next block, once its stage of keys is empty."""
        threads: gl.constexpr = 32 * self.warps
        x = gl.full([threads], 0, gl.int32, gl.BlockedLayout([1], [32], [self.warps], [0])) + info.word
        keys.barriers.producer_acquire(state)
        shape: gl.constexpr = [self.words.shape[0] // threads, threads]
        words = self.words._reinterpret(gl.int32, shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
        words.index(state.stage()).store(x)
        mbarrier.arrive(self.full.index(state.stage()), count=1)

    @gluon.jit
    def get(self, state):
        """Wait for the BlockInfo of the pipeline's next block."""
        mbarrier.wait(self.full.index(state.stage()), state.phase())
        word = self.words.index(state.stage() * 32 * self.warps)
        return BlockInfo(gl.max(word.load(gl.BlockedLayout([1], [32], [4], [0])), 0))


@gluon.jit
def allocate_block_infos(stages: gl.constexpr, warps: gl.constexpr):
    """The BlockInfos of empty stages, of a producer of so many warps."""
    words = gl.allocate_shared_memory(gl.int32, [stages * 32 * warps, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return BlockInfos(words, allocate_mbarriers(stages, 1), warps)


@aggregate
class BlockIterator:
    """The position of the producer in a work tile. block: the next block to be loaded, or a number below the work
    tile's first one if there is none left; masked: 1 if some row of the tile may not see all keys of that block, else
    0. Of the 32 blocks from `base` on, `seen` has a bit for each that is loaded after `block`, and `whole` a bit for
    each that needs no mask.
    """

    block: gl.tensor
    masked: gl.tensor
    base: gl.tensor
    seen: gl.tensor
    whole: gl.tensor

    @gluon.jit
    def next(self, tile, mask, warps: gl.constexpr):
        """The iterator at the block that is loaded after this one, by a producer of so many warps."""
        base, seen, whole = self.base, self.seen, self.whole
        last_row = gl.minimum(tile.row + mask.config.tile.rows, tile.rows) - 1
        while (seen == 0) & (base > tile.first):
            base -= 32
            seen, whole = mask.visible_blocks(tile, tile.row, last_row, tile.first, base, warps)
        i = 31 - gl.minimum(leading_zeros(seen), 31)
        bit = (seen * 0 + 1) << i
        block = gl.where(seen == 0, tile.first - 1, base + i)
        masked = gl.where((whole & bit) == 0, 1, 0)
        return BlockIterator(block, masked, base, seen & ~bit, whole)

    @gluon.jit
    def info(self, following):
        """The BlockInfo of the block, if `following` is after it."""
        return block_info(self.block, self.masked, following.to(gl.int32))


@gluon.jit
def first_block(tile, mask, warps: gl.constexpr):
    """The BlockIterator at the block of a work tile that is loaded first. There is one even if no row sees a key."""
    none = tile.last * 0
    it = BlockIterator(tile.last, none, tile.last + 1, none, none).next(tile, mask, warps)
    empty = it.block < tile.first
    block, masked = gl.where(empty, tile.last, it.block), gl.where(empty, 1, it.masked)
    return BlockIterator(block, masked, it.base, it.seen, it.whole)
