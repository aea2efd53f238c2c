"""Which work tiles there are, in which order programs take them, and how the producer passes them to the consumers.

A tile is `TileConfig.rows` query rows of one KV head of one request, with all keys that they see. A work tile is a
tile, or, with split-KV, the key blocks of a tile in one of several ranges of `split_size` blocks. Programs take work
tiles one at a time from a counter in device memory. They are ordered by the power of two in their request's number of
key blocks, the largest first, so that the last work tiles to be taken are short; then by request, and in a request by
heads whose keys and values fill at most a part of the L2 cache, from the last tile, which sees most keys, to the first
one. The producer of each program finds work tiles from the tables in device memory, 32 requests at a time: the host
makes no list of work.

How tiles are cut depends on the whole batch, so those of batch-invariant layers are not cut. All else that a tile's
bits depend on, its rows, blocks and masks, derives from its own request.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.mask import SeqlenInfo, bitwise_or
from quire.kernels.hopper.pipeline import Pipeline, allocate_pipeline
from quire.kernels.hopper.schedule import Tables, add, leading_zeros, quotient, select

# Requests that are looked at together, one for each thread of a warp.
LANES = gl.constexpr(32)
# More blocks than any request has, as the size of work tiles of which none is cut.
UNSPLIT = gl.constexpr(1 << 20)
# The costs of a work tile, and of one that is only a part of a tile, in times of a block: see `_split_size`.
TILE_COST, SPLIT_COST = gl.constexpr(2.0), gl.constexpr(6.0)
# The KV head of the work tile after the last one.
END = gl.constexpr(-1)
# The bytes of the L2 cache that keys and values which are read at the same time may fill.
_L2_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class TileSchedulerConfig:
    """How work tiles are found.

    Attributes:
        warps: of the producer, which finds them.
        split: whether tiles may be cut into several work tiles; not if batch-invariant.
        l2_tokens: the number of tokens whose keys and values are read at the same time, summed over KV heads.
    """

    warps: int
    split: bool
    l2_tokens: int

    @classmethod
    def of(cls, warps: int, split: bool, head_dim: int) -> TileSchedulerConfig:
        """head_dim: elements of keys and values of a KV head together, which have 16 bits."""
        return cls(warps, split, _L2_BYTES // (2 * head_dim))


@aggregate
class WorkTile:
    """Query rows from `row` on, and key blocks `first` to `last`, of KV head h of request b.

    rows: how many query rows the request has; q_start, q_len: its first query token, and their number; kv_start,
    kv_len: its first entry in the page table or its first row of keys, and the number of keys. slot, splits: the slot
    of the tile's first partial state, and how many it has, 1 if the work tile is the whole tile; split: the index of
    this work tile's partial state among these.
    """

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    kv_start: gl.tensor
    kv_len: gl.tensor
    first: gl.tensor
    last: gl.tensor
    slot: gl.tensor
    splits: gl.tensor
    split: gl.tensor


@gluon.constexpr_function
def _word(field):
    """The index of the word that holds a field in a slot."""
    return list(WorkTile.fields).index(field)  # type: ignore[attr-defined]


@aggregate
class WorkTileSlot:
    """A WorkTile in shared memory, in the words from `at` on. Consumers load fields where they use them, since they
    have no registers to keep them.
    """

    words: gl.shared_memory_descriptor
    at: gl.tensor

    @gluon.jit
    def load(self, field: gl.constexpr):
        """A field of the WorkTile, by its name."""
        word = self.words.index(self.at + _word(field))
        return gl.max(word.load(gl.BlockedLayout([1], [32], [4], [0])), 0)

    @gluon.jit
    def seqlens(self):
        """The SeqlenInfo of the request."""
        return SeqlenInfo(self.load("b"), self.load("q_len"), self.load("kv_len"))


@aggregate
class WorkTilePipeline:
    """Two WorkTileSlots in shared memory, of a word for each of the producer's threads."""

    words: gl.shared_memory_descriptor
    barriers: Pipeline
    warps: gl.constexpr

    @gluon.jit
    def put(self, state, tile):
        """Pass the next work tile to the consumers, once there is room."""
        threads: gl.constexpr = 32 * self.warps
        lane = gl.arange(0, threads, gl.BlockedLayout([1], [32], [self.warps], [0]))
        x = lane * 0
        for i in gl.static_range(len(WorkTile.fields)):  # type: ignore[attr-defined]
            x = gl.where(lane == i, getattr(tile, WorkTile.fields[i]), x)  # type: ignore[attr-defined]
        self.barriers.producer_acquire(state)
        words = self.words._reinterpret(gl.int32, [2, threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        words.index(state.stage()).store(x)
        self.barriers.producer_commit_once(state)

    @gluon.jit
    def wait(self, state):
        """Wait for the next work tile."""
        self.barriers.consumer_wait(state)

    @gluon.jit
    def slot(self, state):
        """The slot of the next work tile, which has been waited for."""
        return WorkTileSlot(self.words, state.stage() * (32 * self.warps))

    @gluon.jit
    def release(self, state):
        """Release the slot."""
        self.barriers.consumer_release_once(state)


@gluon.jit
def allocate_work_tiles(warps: gl.constexpr, consumers: gl.constexpr):
    """A WorkTilePipeline of a producer of so many warps."""
    words = gl.allocate_shared_memory(gl.int32, [2 * 32 * warps, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return WorkTilePipeline(words, allocate_pipeline(2, 1, consumers), warps)


@aggregate
class TileIterator:
    """The `index`-th work tile, and how far the search for it has come: at 32 requests from b0 on, and at one level.
    levels: as in TileScheduler, but only the levels that are left; the highest one is being searched. tiles, slots: for
    each of the 32 requests its numbers of work tiles and of slots for partial states, 0 if it is of another level;
    ends, slot_ends: their running sums over all requests so far; end, slot_end: the last of these sums.
    """

    index: gl.tensor
    levels: gl.tensor
    b0: gl.tensor
    tiles: gl.tensor
    ends: gl.tensor
    end: gl.tensor
    slots: gl.tensor
    slot_ends: gl.tensor
    slot_end: gl.tensor


@aggregate
class TileScheduler:
    """The work tiles of a batch.

    counter: of the work tiles that have been taken, 0 before and after a launch. num_tiles: the number of work tiles;
    split_size: the most key blocks of one; levels: a bit for each power of two that is the largest one in some
    request's number of key blocks; config: a TileSchedulerConfig.
    """

    tables: Tables
    counter: gl.tensor
    num_tiles: gl.tensor
    split_size: gl.tensor
    levels: gl.tensor
    config: gl.constexpr

    @gluon.jit
    def splits(self, request):
        """The number of ranges that the key blocks of a request's tiles are cut into."""
        return gl.maximum(quotient(request.units + self.split_size - 1, self.split_size), 1)

    @gluon.jit
    def begin(self):
        """The iterator at this program's first work tile."""
        none, zero = _lanes(self.config.warps) * 0, self.num_tiles * 0
        return TileIterator(gl.program_id(0), self.levels, zero - LANES, none, none, zero, none, none, zero)

    @gluon.jit
    def advance(self, it):
        """The iterator at the next work tile from the counter, which is 0 again once all programs have found that no
        work tile is left.
        """
        taken = gl.atomic_add(self.counter, 1, sem="relaxed")
        if taken == self.num_tiles - 1:
            gl.store(self.counter, 0)
        index = taken + gl.num_programs(0)
        return TileIterator(
            index, it.levels, it.b0, it.tiles, it.ends, it.end, it.slots, it.slot_ends, it.slot_end
        )  # fmt: skip

    @gluon.jit
    def _next_requests(self, it):
        """Go on to the next 32 requests, or to the next level."""
        more = (it.b0 < 0) | (it.b0 + LANES < self.tables.batch)
        b0 = gl.where(more, it.b0 + LANES, 0)
        levels = gl.where(more, it.levels, it.levels & ~((it.levels * 0 + 1) << _level(it.levels)))
        request = self.tables.request(b0 + _lanes(self.config.warps))
        heads: gl.constexpr = self.tables.config.tile.heads
        splits = self.splits(request)
        tiles = gl.where(_level(request.units) == _level(levels), request.tiles() * heads * splits, 0)
        slots = gl.where(splits > 1, tiles, 0)
        ends = it.end + gl.associative_scan(tiles, 0, add)
        slot_ends = it.slot_end + gl.associative_scan(slots, 0, add)
        return TileIterator(it.index, levels, b0, tiles, ends, gl.max(ends, 0), slots, slot_ends, gl.max(slot_ends, 0))

    @gluon.jit
    def find(self, it):
        """Go on to the iterator's work tile, which is not before the last one that was found. Returns the iterator and
        the WorkTile, whose first block is after the last one if it has no keys to read. After the last work tile comes
        one of head END.
        """
        config: gl.constexpr = self.tables.config.tile
        at = gl.minimum(it.index, self.num_tiles - 1)
        while at >= it.end:
            it = self._next_requests(it)
        chosen = (it.ends - it.tiles <= at) & (at < it.ends)
        b, u = select(it.b0 + _lanes(self.config.warps), chosen), at - select(it.ends - it.tiles, chosen)
        slot = select(it.slot_ends - it.slots, chosen)
        request = self.tables.request(b)
        tiles, splits = request.tiles(), self.splits(request)
        # Heads of a section are read at the same time.
        l2_tokens = gl.to_tensor(self.config.l2_tokens)
        heads = gl.minimum(gl.maximum(quotient(l2_tokens, gl.maximum(request.kv_len, 1)), 1), config.heads)
        h0 = quotient(u, heads * tiles * splits) * heads
        u -= h0 * (tiles * splits)
        heads = gl.minimum(heads, config.heads - h0)
        cut = quotient(u, heads)
        h = h0 + u - cut * heads
        tile = quotient(cut, splits)
        # From the last tile to the first.
        split, tile = splits - 1 - (cut - tile * splits), tiles - 1 - tile
        row = tile * config.rows
        last_row = gl.minimum(row + config.rows, request.rows()) - 1
        past = request.kv_len - request.q_len
        start, end = self.tables.mask.tile_keys(past, row, last_row, request.first_key, request.kv_len)
        last = gl.maximum((end - 1) // config.block_n, 0)
        first = gl.minimum(gl.maximum(start, 0) // config.block_n, last)
        # The tile has blocks in several of the ranges that the request's blocks are cut into.
        origin = request.first_key // config.block_n
        low, high = quotient(first - origin, self.split_size), quotient(last - origin, self.split_size)
        slot += (h * tiles + tile) * splits + low
        first = gl.maximum(first, origin + split * self.split_size)
        last = gl.where(splits > 1, gl.minimum(last, origin + split * self.split_size + (self.split_size - 1)), last)
        over = it.index >= self.num_tiles
        first, last = gl.where(over, 0, first), gl.where(over, 0, last)
        h = gl.where(over, END, h)
        work_tile = WorkTile(
            b, h, row, request.rows(), request.q_start, request.q_len, request.kv_start, request.kv_len, first, last,
            slot, high - low + 1, split - low,
        )  # fmt: skip
        return it, work_tile


@gluon.jit
def _level(blocks):
    """The largest power of two in a number of blocks, as an exponent."""
    return 31 - gl.minimum(leading_zeros(blocks), 31)


@gluon.jit
def _lanes(warps: gl.constexpr):
    return gl.arange(0, LANES, gl.BlockedLayout([1], [32], [warps], [0]))


@gluon.jit
def _split_size(total, longest, all_blocks, mean_blocks, slots, warps: gl.constexpr):
    """The most key blocks of a work tile, with partial states for at most `slots` of them. total: tiles of the batch;
    longest: the most blocks of one; all_blocks, mean_blocks: those of all tiles, if each had all of its request's, and
    with causal order.

    Each thread estimates, in times of a block, how long the batch takes if the longest tile is cut into another number
    of work tiles. Tiles of about one length are computed in as many rounds as programs need; others fill the gaps. A
    work tile takes as long as TILE_COST blocks beyond its own, and one that is not a whole tile, as SPLIT_COST.
    """
    lanes, programs = _lanes(warps), gl.num_programs(0).to(gl.float32)
    size = (longest + lanes) // (lanes + 1)
    each = size.to(gl.float32) + gl.where(lanes == 0, TILE_COST, SPLIT_COST)
    work_tiles = (lanes + 1).to(gl.float32) * total.to(gl.float32)
    rounds = gl.ceil(work_tiles / programs) * each
    filled = gl.maximum(each, (mean_blocks + work_tiles * (each - size.to(gl.float32))) / programs)
    time = gl.where(mean_blocks >= 0.8 * total.to(gl.float32) * longest.to(gl.float32), rounds, filled)
    # The work tiles of all tiles that are cut are at most twice as many as those of full size.
    fits = 2.0 * all_blocks <= slots.to(gl.float32) * size.to(gl.float32)
    time = gl.where(fits | (lanes == 0), time, float("inf"))
    best = gl.min(gl.where(time == gl.min(time, 0), lanes, LANES), 0)
    return gl.where(best == 0, UNSPLIT, (longest + best) // (best + 1))


@gluon.jit
def tile_scheduler(tables, counter, slots, config: gl.constexpr):
    """The TileScheduler of a batch, with partial states for at most `slots` work tiles."""
    heads: gl.constexpr = tables.config.tile.heads
    lanes = _lanes(config.warps)
    num_tiles, levels = lanes * 0, lanes * 0
    longest, all_blocks = lanes * 0, lanes.to(gl.float32) * 0.0
    mean_blocks = all_blocks
    for b0 in range(0, tables.batch, LANES):
        request = tables.request(b0 + lanes)
        mine = request.tiles() * heads
        num_tiles += mine
        all_blocks += mine.to(gl.float32) * request.units.to(gl.float32)
        mean_blocks += mine.to(gl.float32) * tables.mask.mean_blocks(request.q_len, request.units)
        longest = gl.maximum(longest, request.units)
        levels = levels | gl.where(mine > 0, gl.full_like(lanes, 1) << _level(request.units), 0)
    total, levels, longest = gl.sum(num_tiles, 0), gl.reduce(levels, 0, bitwise_or), gl.maximum(gl.max(longest, 0), 1)
    # This equals UNSPLIT, but is not a constant, on which the compiler of Triton 3.6 fails.
    size = gl.maximum(longest, UNSPLIT)
    if config.split:
        size = _split_size(total, longest, gl.sum(all_blocks, 0), gl.sum(mean_blocks, 0), slots, config.warps)
    scheduler = TileScheduler(tables, counter, total, size, levels, config)
    if size < UNSPLIT:
        count = lanes * 0
        for b0 in range(0, tables.batch, LANES):
            request = tables.request(b0 + lanes)
            count += request.tiles() * heads * scheduler.splits(request)
        scheduler = TileScheduler(tables, counter, gl.sum(count, 0), size, levels, config)
    return scheduler
