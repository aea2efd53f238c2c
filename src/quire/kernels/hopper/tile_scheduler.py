"""Which work units there are, in which order programs take them, and what the producer tells the consumers of one.

A tile is c.tile_rows query rows of one KV head of one request, with all keys that they see. A work unit is a tile, or,
with split-KV, the key blocks of a tile in one of several ranges of `Split.size` blocks. Programs take units one at a
time from a counter in device memory. Units are ordered by the power of two in their request's number of key blocks,
the largest first, so that the last units to be taken are short; then by request, and in a request by heads whose keys
and values fill at most a part of the L2 cache, from the last tile, which sees most keys, to the first one. The producer
of each program finds units from the tables in device memory, 32 requests at a time: the host makes no list of work.

How tiles are cut depends on the whole batch, so those of batch-invariant layers are not cut (c.split is False). All
else that a tile's bits depend on, its rows, blocks and masks, derives from its own request.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.hopper.mask import bitwise_or, tile_keys
from quire.kernels.hopper.schedule import add, leading_zeros, load_request, quotient, select

LANES = gl.constexpr(32)  # requests that are looked at together, one for each thread of a warp
L2_BYTES = gl.constexpr(32 << 20)  # of keys and values that are read at the same time
UNSPLIT = gl.constexpr(1 << 20)  # blocks: more than any request has
UNIT_COST, SPLIT_COST = gl.constexpr(2.0), gl.constexpr(6.0)  # of a work unit, in times of a block: see plan_units
END = gl.constexpr(-1)  # the KV head of a job that says that there are no more
# Fields of a Job.
B, H, ROW, ROWS, Q_START, Q_LEN, KV_START, KV_LEN, FIRST, LAST, SLOT, SPLITS, INDEX = map(gl.constexpr, range(13))


class Job(NamedTuple):
    """A work unit: of KV head h of request b, a tile of query rows from `row` on, and key blocks `first` to `last`.

    rows: how many query rows the request has; q_start, q_len: its first query token, and their number; kv_start,
    kv_len: its first entry in the page table or its first row of keys, and the number of keys. slot, splits: the slot
    of the tile's first partial state, and how many it has, 1 if the unit is the whole tile; index: which of them is
    this unit's.
    """

    b: tl.tensor
    h: tl.tensor
    row: tl.tensor
    rows: tl.tensor
    q_start: tl.tensor
    q_len: tl.tensor
    kv_start: tl.tensor
    kv_len: tl.tensor
    first: tl.tensor
    last: tl.tensor
    slot: tl.tensor
    splits: tl.tensor
    index: tl.tensor


class Mailbox(NamedTuple):
    """Two jobs in shared memory, and mbarriers: the producer arrives at `full`, the consumers at `empty`."""

    jobs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def allocate_mailbox(c: gl.constexpr):
    mailbox = Mailbox(
        gl.allocate_shared_memory(gl.int32, [2 * 32 * c.load_warps, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(2):
        mbarrier.init(mailbox.full.index(i), count=1)
        mbarrier.init(mailbox.empty.index(i), count=c.consumers)
    return mailbox


@gluon.jit
def post_job(mailbox, i, job, c: gl.constexpr):
    """Tell the consumers the i-th job of this program, once there is room."""
    threads: gl.constexpr = 32 * c.load_warps  # each of which stores a word
    field = gl.arange(0, threads, gl.BlockedLayout([1], [32], [c.load_warps], [0]))
    x = field * 0
    for f in gl.static_range(INDEX + 1):
        x = gl.where(field == f, job[f], x)
    mbarrier.wait(mailbox.empty.index(i % 2), (i // 2 & 1) ^ 1)
    jobs = mailbox.jobs._reinterpret(gl.int32, [2, threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    jobs.index(i % 2).store(x)
    mbarrier.arrive(mailbox.full.index(i % 2), count=1)


@gluon.jit
def wait_for_job(mailbox, i):
    mbarrier.wait(mailbox.full.index(i % 2), i // 2 & 1)


@gluon.jit
def release_job(mailbox, i):
    mbarrier.arrive(mailbox.empty.index(i % 2), count=1)


@gluon.jit
def job_field(mailbox, i, field: gl.constexpr):
    """A field of the i-th job. Consumers read fields where they use them, since they have no registers to keep them."""
    at = i % 2 * (mailbox.jobs.shape[0] // 2) + field
    return gl.max(mailbox.jobs.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


class JobRequest(NamedTuple):
    """What `mask.py` knows of a job's request."""

    b: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor


@gluon.jit
def job_request(mailbox, i):
    """The request of the i-th job."""
    return JobRequest(job_field(mailbox, i, B), job_field(mailbox, i, Q_LEN), job_field(mailbox, i, KV_LEN))


class Split(NamedTuple):
    """total: the number of work units of the batch; size: the most key blocks of one; levels: a bit for each power of
    two that is the largest one in some request's number of key blocks; l2_tokens: of how many tokens the keys and
    values of a KV head fill L2_BYTES.
    """

    total: tl.tensor
    size: tl.tensor
    levels: tl.tensor
    l2_tokens: tl.tensor


class Walk(NamedTuple):
    """Where the search for units has come to. levels: as in Split, those that are left, the highest of which is being
    searched; b0: the first of 32 requests. units, slots: of those of the 32 that are of this level, the numbers of
    their work units, and of their slots for partial states; ends, slot_ends: where these end; end, slot_end: where the
    last ones end.
    """

    levels: tl.tensor
    b0: tl.tensor
    units: tl.tensor
    ends: tl.tensor
    end: tl.tensor
    slots: tl.tensor
    slot_ends: tl.tensor
    slot_end: tl.tensor


@gluon.jit
def _level(blocks):
    """The largest power of two in a number of blocks, as an exponent."""
    return 31 - gl.minimum(leading_zeros(blocks), 31)


@gluon.jit
def _tiles(request, c: gl.constexpr):
    """Tiles of each KV head of a request."""
    return (request.q_len * c.group + c.tile_rows - 1) // c.tile_rows


@gluon.jit
def _lanes(c: gl.constexpr):
    return gl.arange(0, LANES, gl.BlockedLayout([1], [32], [c.load_warps], [0]))


@gluon.jit
def _splits(request, split):
    """The number of ranges that the key blocks of a request's tiles are cut into."""
    return gl.maximum(quotient(request.units + split.size - 1, split.size), 1)


@gluon.jit
def _mean_blocks(request, c: gl.constexpr):
    """The mean number of key blocks of a request's tiles."""
    blocks = request.units.to(gl.float32)
    if c.right >= 0:
        hidden = request.q_len.to(gl.float32) * (0.5 / c.block_n)
        blocks = gl.maximum(blocks - hidden, blocks * 0.5)
    return blocks


@gluon.jit
def _unit_size(total, longest, all_blocks, mean_blocks, slots, c: gl.constexpr):
    """The most key blocks of a work unit, with partial states for at most `slots` units. total: tiles of the batch;
    longest: the most blocks of one; all_blocks, mean_blocks: those of all tiles, if each had all of its request's, and
    with causal order.

    Each thread estimates, in times of a block, how long the batch takes if the longest tile is cut into another number
    of units. Tiles of about one length are computed in as many rounds as programs need; others fill the gaps. A unit
    takes as long as UNIT_COST blocks beyond its own, and one that is not a whole tile, as SPLIT_COST.
    """
    lanes, programs = _lanes(c), gl.num_programs(0).to(gl.float32)
    size = (longest + lanes) // (lanes + 1)
    each = size.to(gl.float32) + gl.where(lanes == 0, UNIT_COST, SPLIT_COST)
    units = (lanes + 1).to(gl.float32) * total.to(gl.float32)
    rounds = gl.ceil(units / programs) * each
    filled = gl.maximum(each, (mean_blocks + units * (each - size.to(gl.float32))) / programs)
    time = gl.where(mean_blocks >= 0.8 * total.to(gl.float32) * longest.to(gl.float32), rounds, filled)
    # The units of all tiles that are cut are at most twice as many as units of full size.
    fits = 2.0 * all_blocks <= slots.to(gl.float32) * size.to(gl.float32)
    time = gl.where(fits | (lanes == 0), time, float("inf"))
    best = gl.min(gl.where(time == gl.min(time, 0), lanes, LANES), 0)
    return gl.where(best == 0, UNSPLIT, (longest + best) // (best + 1))


@gluon.jit
def plan_units(tables, slots, c: gl.constexpr):
    """The Split of a batch, with partial states for at most `slots` units."""
    lanes = _lanes(c)
    tiles, levels, longest, all_blocks = lanes * 0, lanes * 0, lanes * 0, lanes.to(gl.float32) * 0.0
    mean_blocks = all_blocks
    for b0 in range(0, tables.batch, LANES):
        request = load_request(tables, b0 + lanes, 0, c)
        mine = _tiles(request, c) * c.heads
        tiles += mine
        all_blocks += mine.to(gl.float32) * request.units.to(gl.float32)
        mean_blocks += mine.to(gl.float32) * _mean_blocks(request, c)
        longest = gl.maximum(longest, request.units)
        levels = levels | gl.where(mine > 0, gl.full_like(lanes, 1) << _level(request.units), 0)
    total, levels, longest = gl.sum(tiles, 0), gl.reduce(levels, 0, bitwise_or), gl.maximum(gl.max(longest, 0), 1)
    size = gl.maximum(longest, UNSPLIT)  # not UNSPLIT: the compiler of Triton 3.6 fails over a constant
    if c.split:
        size = _unit_size(total, longest, gl.sum(all_blocks, 0), gl.sum(mean_blocks, 0), slots, c)
    split = Split(total, size, levels, total * 0 + L2_BYTES // (2 * (c.dim_qk + c.dim)))
    if size < UNSPLIT:
        count = lanes * 0
        for b0 in range(0, tables.batch, LANES):
            request = load_request(tables, b0 + lanes, 0, c)
            count += _tiles(request, c) * c.heads * _splits(request, split)
        split = Split(gl.sum(count, 0), size, levels, split.l2_tokens)
    return split


@gluon.jit
def next_unit(counter, split):
    """Take the next work unit from the counter, which is 0 again once all programs have found that no unit is left."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == split.total - 1:
        gl.store(counter, 0)  # nobody asks any more
    return taken + gl.num_programs(0)


@gluon.jit
def first_walk(split, c: gl.constexpr):
    """The Walk before any unit."""
    none, zero = _lanes(c) * 0, split.total * 0
    return Walk(split.levels, zero - LANES, none, none, zero, none, none, zero)


@gluon.jit
def _walk_on(walk, tables, split, c: gl.constexpr):
    """Go on to the next 32 requests, or to the next level."""
    more = (walk.b0 < 0) | (walk.b0 + LANES < tables.batch)
    b0 = gl.where(more, walk.b0 + LANES, 0)
    levels = gl.where(more, walk.levels, walk.levels & ~((walk.levels * 0 + 1) << _level(walk.levels)))
    request = load_request(tables, b0 + _lanes(c), 0, c)
    units = gl.where(_level(request.units) == _level(levels), _tiles(request, c) * c.heads * _splits(request, split), 0)
    slots = gl.where(_splits(request, split) > 1, units, 0)
    ends = walk.end + gl.associative_scan(units, 0, add)
    slot_ends = walk.slot_end + gl.associative_scan(slots, 0, add)
    return Walk(levels, b0, units, ends, gl.max(ends, 0), slots, slot_ends, gl.max(slot_ends, 0))


@gluon.jit
def find_unit(walk, unit, tables, split, c: gl.constexpr):
    """Walk on to a unit, which is not before the last one. Returns the Walk and the unit's Job, whose first block
    is after the last one if it has no keys to read. After the last unit comes a job of head END.
    """
    at = gl.minimum(unit, split.total - 1)
    while at >= walk.end:
        walk = _walk_on(walk, tables, split, c)
    chosen = (walk.ends - walk.units <= at) & (at < walk.ends)
    b, u = select(walk.b0 + _lanes(c), chosen), at - select(walk.ends - walk.units, chosen)
    slot = select(walk.slot_ends - walk.slots, chosen)
    request = load_request(tables, b, 0, c)
    tiles, splits = _tiles(request, c), _splits(request, split)
    # Heads of a section are read at the same time.
    heads = gl.minimum(gl.maximum(quotient(split.l2_tokens, gl.maximum(request.kv_len, 1)), 1), c.heads)
    h0 = quotient(u, heads * tiles * splits) * heads
    u -= h0 * (tiles * splits)
    heads = gl.minimum(heads, c.heads - h0)
    cut = quotient(u, heads)
    h = h0 + u - cut * heads
    tile = quotient(cut, splits)
    index, tile = splits - 1 - (cut - tile * splits), tiles - 1 - tile  # from the last tile to the first
    row = tile * c.tile_rows
    last_row = gl.minimum(row + c.tile_rows, request.q_len * c.group) - 1
    past = request.kv_len - request.q_len
    start, end = tile_keys(past, row, last_row, request.first_key, request.kv_len, tables.mask, c)
    last = gl.maximum((end - 1) // c.block_n, 0)
    first = gl.minimum(gl.maximum(start, 0) // c.block_n, last)
    # Of the ranges that the request's blocks are cut into, the tile has blocks in several.
    origin = request.first_key // c.block_n
    low, high = quotient(first - origin, split.size), quotient(last - origin, split.size)
    slot += (h * tiles + tile) * splits + low
    first = gl.maximum(first, origin + index * split.size)
    last = gl.where(splits > 1, gl.minimum(last, origin + index * split.size + (split.size - 1)), last)
    over = unit >= split.total
    first, last = gl.where(over, 0, first), gl.where(over, 0, last)
    job = Job(
        b, gl.where(over, END, h), row, request.q_len * c.group, request.q_start, request.q_len, request.kv_start,
        request.kv_len, first, last, slot, high - low + 1, index - low,
    )  # fmt: skip
    return walk, job
