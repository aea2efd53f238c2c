"""Which key blocks of a job are loaded and computed, from the last to the first.

Without custom masks and items (c.listed is False) they are all blocks of the job, and consumers find from its bounds
which of them need a mask. Custom masks and items hide blocks anywhere, which only their data tell: the producer looks
at 32 blocks together, leaves out those of which no row of the tile sees a key, and writes a note for each other one.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.hopper.mask import visible_blocks
from quire.kernels.hopper.schedule import leading_zeros

MORE, MASKED, FLAGS = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)  # bits of a note, and where its block begins


class Cursor(NamedTuple):
    """The position of the producer in a job. block: the next block to be loaded, or a number below the job's first one
    if there is none left; masked: 1 if some row of the tile may not see all keys of that block, else 0. Of the 32
    blocks from `base` on, the bits of `seen` tell which are loaded after it, and those of `whole` which need no mask.
    """

    block: tl.tensor
    masked: tl.tensor
    base: tl.tensor
    seen: tl.tensor
    whole: tl.tensor


@gluon.jit
def first_block(job, mask, c: gl.constexpr):
    """The Cursor at the block of a job that is loaded first. There is one even if no row sees a key."""
    none = job.last * 0
    cursor = next_block(Cursor(job.last, none, job.last + 1, none, none), job, mask, c)
    empty = cursor.block < job.first
    block, masked = gl.where(empty, job.last, cursor.block), gl.where(empty, 1, cursor.masked)
    return Cursor(block, masked, cursor.base, cursor.seen, cursor.whole)


@gluon.jit
def next_block(cursor, job, mask, c: gl.constexpr):
    """The Cursor at the block that is loaded after another."""
    base, seen, whole = cursor.base, cursor.seen, cursor.whole
    last_row = gl.minimum(job.row + c.tile_rows, job.rows) - 1
    while (seen == 0) & (base > job.first):
        base -= 32
        seen, whole = visible_blocks(job, job.row, last_row, job.first, base, mask, c)
    i = 31 - gl.minimum(leading_zeros(seen), 31)
    bit = (seen * 0 + 1) << i
    block = gl.where(seen == 0, job.first - 1, base + i)
    return Cursor(block, gl.where((whole & bit) == 0, 1, 0), base, seen & ~bit, whole)


class Notes(NamedTuple):
    """A note in shared memory for each stage of keys: its block, times FLAGS, with MASKED if it needs a mask, and MORE
    if the job has another one after it. The producer arrives at `full`. Consumers release a note with the stage.
    """

    words: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def write_note(pipeline, state, cursor, more, c: gl.constexpr):
    """Write the note of the pipeline's next block, once its stage is empty."""
    threads: gl.constexpr = 32 * c.load_warps  # each of which stores a word
    note = cursor.block * FLAGS + cursor.masked * MASKED + more.to(gl.int32) * MORE
    x = gl.full([threads], 0, gl.int32, gl.BlockedLayout([1], [32], [c.load_warps], [0])) + note
    pipeline.k.barriers.producer_acquire(state)
    words = pipeline.notes.words._reinterpret(gl.int32, [c.stages, threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    words.index(state.stage()).store(x)
    mbarrier.arrive(pipeline.notes.full.index(state.stage()), count=1)


@gluon.jit
def read_note(pipeline, state, c: gl.constexpr):
    """Wait for the note of the pipeline's next block."""
    mbarrier.wait(pipeline.notes.full.index(state.stage()), state.phase())
    word = pipeline.notes.words.index(state.stage() * 32 * c.load_warps)
    return gl.max(word.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
