"""The schedule: a linear index of all work units of a batch, and the span of it that each program computes.

A tile is one KV head of one request with all its keys and all its query rows or, if `TileConfig.rows` > 0, that
number of them. The keys of a tile are cut into work units of `TileConfig.unit_size` keys. Units are numbered request by
request, head by head, tile by tile. Programs take equal spans of units, so that a batch of mixed lengths takes no
longer than one of equal lengths. Each program finds its span itself from the tables in device memory: the host makes no
list of work.

A batch-invariant batch may be computed by two launches, decode's and prefill's: each has the requests with as many
query tokens as min_q_len and max_q_len say, and takes the others for empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.definition.spec import AttentionSpec
from quire.kernels.gpu.gluon import thread_barrier
from quire.kernels.gpu.triton_internals import aggregate
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.mask import BatchMask

# Query rows of a request, per KV head, up to which decode computes it.
DECODE_ROWS = 64
# Blocks per program up to which one program per multiprocessor is faster than several.
FEW_BLOCKS = gl.constexpr(6)
# Requests up to which each warp computes the prefix sum alone.
WARP_SCAN = gl.constexpr(128)
# Requests in one prefix sum. Larger batches take several.
MAX_SCAN = gl.constexpr(1024)


def scan_size(batch: int) -> int:
    """Requests in one prefix sum of a batch: a power of two, and whole warps."""
    return max(32, min(MAX_SCAN.value, triton.next_power_of_2(batch)))


def decode_tokens(spec: AttentionSpec) -> int:
    """The most query tokens of a request that decode computes. In batch-invariant layers, prefill computes longer
    requests, so that the kernel and the bits depend on the request alone. In others they depend on the longest request.
    """
    return DECODE_ROWS // spec.group_size


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """What tables have, and which of their requests a launch computes.

    Attributes:
        tile: how requests are cut.
        page_size: tokens in a page; 0: keys are ragged rows, and kv_indptr counts rows.
        by_length: last_page_len has the key counts of whole requests.
        int64_offsets: the cache has 2**31 elements or more.
        min_q_len, max_q_len: query tokens of the requests that the launch computes; 0: any number.
        whole_tiles: whether a program computes all of each tile that starts in its span, and nothing else.
    """

    tile: TileConfig
    page_size: int
    by_length: bool
    int64_offsets: bool
    min_q_len: int = 0
    max_q_len: int = 0
    whole_tiles: bool = False


@dataclass(frozen=True, slots=True)
class SpanConfig:
    """How spans are found.

    Attributes:
        scan: requests in one prefix sum.
        programs: programs that run on a multiprocessor at once.
        partial_cost: time to merge a partial state, in 32nds of the time of a work unit.
    """

    scan: int
    programs: int = 1
    partial_cost: int = 0


@gluon.jit
def _approximate_quotient(a, b):
    """Return a // b, or one more or less, for quotients below 2**20, a >= 0 and b > 0. An integer division takes three
    times as many instructions, and all of them delay the first load of keys.
    """
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b.to(gl.float32)], gl.float32, True, 1)
    return (a.to(gl.float32) * inverse).to(gl.int32)


@gluon.jit
def quotient(a, b):
    """Return a // b exactly, for quotients below 2**20, a >= 0 and b > 0."""
    q = _approximate_quotient(a, b)
    rest = a - q * b
    return q + (rest >= b).to(gl.int32) - (rest < 0).to(gl.int32)


@gluon.jit
def leading_zeros(x):
    """How many of the highest of 32 bits are 0."""
    return gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [x], gl.int32, True, 1)


@gluon.jit
def add(a, b):
    """The operation of a prefix sum."""
    return a + b


@gluon.jit
def select(x, chosen):
    """The element of x that is chosen; 0 if none is."""
    return gl.sum(gl.where(chosen, x, 0), 0)


@aggregate
class Segment:
    """What a span has of one tile: units start to end of the h-th tile of a request; kv_end: the end of their keys."""

    h: gl.tensor
    start: gl.tensor
    end: gl.tensor
    kv_end: gl.tensor


@aggregate
class RequestUnits:
    """Request b, as scalars or, for several requests, as vectors. start: its first work unit; q_start, q_len: its query
    tokens; kv_start: its first entry in the page table; kv_len: its keys; first_key: the first key that is read; units:
    work units of each of its tiles; config: a ScheduleConfig.
    """

    b: gl.tensor
    start: gl.tensor
    q_start: gl.tensor
    q_len: gl.tensor
    kv_start: gl.tensor
    kv_len: gl.tensor
    first_key: gl.tensor
    units: gl.tensor
    config: gl.constexpr

    @gluon.jit
    def rows(self):
        """Query rows of each KV head."""
        return self.q_len * self.config.tile.group

    @gluon.jit
    def tiles(self):
        """Tiles of each KV head."""
        return (self.rows() + self.config.tile.rows - 1) // self.config.tile.rows

    @gluon.jit
    def total_units(self):
        """Work units of all tiles."""
        units = self.units * self.config.tile.heads
        if self.config.tile.rows > 0:
            units *= self.tiles()
        return units

    @gluon.jit
    def segment(self, unit, end):
        """The Segment that starts with `unit` and ends before or at `end`."""
        h = quotient(unit - self.start, self.units)
        first = unit - self.start - h * self.units
        last = gl.minimum(first + end - unit, self.units)
        if self.config.whole_tiles:
            last = self.units
        return Segment(h, first, last, gl.minimum(self.first_key + last * self.config.tile.unit_size, self.kv_len))


@aggregate
class Span:
    """Work units start to end, those of the `program`-th of equal spans of `size` units; request: the one that has the
    first unit, if the span is not empty.
    """

    program: gl.tensor
    start: gl.tensor
    end: gl.tensor
    size: gl.tensor
    request: RequestUnits

    @gluon.jit
    def owner(self, unit):
        """The program that has a unit."""
        return quotient(unit, self.size)


@aggregate
class Tables:
    """The batch: indptr of queries and keys, page ids, and masks. tokens, entries and pages are sizes of q, of the page
    table and of the cache: indices are clamped to them. config: a ScheduleConfig.
    """

    qo_indptr: gl.tensor
    kv_indptr: gl.tensor
    last_page_len: gl.tensor
    indices: gl.tensor
    batch: gl.tensor
    tokens: gl.tensor
    entries: gl.tensor
    pages: gl.tensor
    mask: BatchMask
    config: gl.constexpr

    @gluon.jit
    def request(self, b, start=0):
        """Request b, whose first work unit is `start`. One that another launch computes has no rows and no units;
        beyond the batch there are no keys, either.
        """
        c: gl.constexpr = self.config
        valid = b < self.batch
        q_start = gl.minimum(gl.maximum(gl.load(self.qo_indptr + b, valid, 0), 0), self.tokens)
        q_end = gl.minimum(gl.maximum(gl.load(self.qo_indptr + b + 1, valid, 0), q_start), self.tokens)
        kv_start = gl.minimum(gl.maximum(gl.load(self.kv_indptr + b, valid, 0), 0), self.entries)
        kv_end = gl.minimum(gl.maximum(gl.load(self.kv_indptr + b + 1, valid, 0), kv_start), self.entries)
        q_len, kv_len = q_end - q_start, kv_end - kv_start
        if c.min_q_len > 0:
            q_len = gl.where(q_len >= c.min_q_len, q_len, 0)
        if c.max_q_len > 0:
            q_len = gl.where(q_len <= c.max_q_len, q_len, 0)
        if c.page_size > 0:
            last = gl.load(self.last_page_len + b, valid, 0)
            if not c.by_length:
                last = (kv_len - 1) * c.page_size + gl.minimum(last, c.page_size)
            kv_len = gl.maximum(gl.minimum(last, kv_len * c.page_size), 0)
        return self._request(b, gl.to_tensor(start), q_start, q_len, kv_start, kv_len)

    @gluon.jit
    def _request(self, b, start, q_start, q_len, kv_start, kv_len):
        """A RequestUnits of these lengths, with its first key and its units per tile."""
        first = self.mask.first_key(q_len, kv_len)
        unit_size: gl.constexpr = self.config.tile.unit_size
        units = gl.where(q_len > 0, gl.maximum((kv_len - first + unit_size - 1) // unit_size, 1), 0)
        return RequestUnits(b, start, q_start, q_len, kv_start, kv_len, first, units, self.config)

    @gluon.jit
    def page_ids(self, request, j):
        """Page ids of keys j, or row numbers if keys are ragged rows, clamped to the cache."""
        if self.config.page_size > 0:
            page = gl.load(self.indices + request.kv_start + j // self.config.page_size, j < request.kv_len, 0)
        else:
            page = request.kv_start + j
        page = gl.minimum(gl.maximum(page, 0), self.pages - 1)
        return page.to(gl.int64) if self.config.int64_offsets else page

    @gluon.jit
    def request_at(self, request, unit, end):
        """The request that has `unit`: `request` or one after it. Returns `request` if the unit is not before `end`."""
        while (unit < end) & (unit >= request.start + request.total_units()):
            request = self.request(request.b + 1, request.start + request.total_units())
        return request

    @gluon.jit
    def next_tile(self, request, unit, end):
        """The first unit from `unit` on that is the first one of a tile, and its request."""
        units = gl.maximum(request.units, 1)
        unit = request.start + (unit - request.start + units - 1) // units * units
        return unit, self.request_at(request, unit, end)

    @gluon.jit
    def _scan(self, b0, start, scan: gl.constexpr):
        """`scan` requests from b0 on as vectors (RequestUnits.start is not set), and the end of each one's work units,
        where those of b0 start at `start`.
        """
        # A small batch lies in each warp as a whole, so that no warp waits for another one's part of the prefix sum.
        layout: gl.constexpr = gl.BlockedLayout([scan // (32 if scan <= WARP_SCAN else 128)], [32], [4], [0])
        requests = self.request(b0 + gl.arange(0, scan, layout))
        return requests, start + gl.associative_scan(requests.total_units(), 0, add)

    @gluon.jit
    def _find_request(self, request, requests, ends, unit):
        """Add the one of `requests` that has a work unit to `request`, field by field; if none has it, add nothing.
        Over all scans of a batch, a request of zeros becomes the one that has the unit.
        """
        starts = ends - requests.total_units()
        chosen = (starts <= unit) & (unit < ends)
        return self._request(
            request.b + select(requests.b, chosen),
            request.start + select(starts, chosen),
            request.q_start + select(requests.q_start, chosen),
            request.q_len + select(requests.q_len, chosen),
            request.kv_start + select(requests.kv_start, chosen),
            request.kv_len + select(requests.kv_len, chosen),
        )

    @gluon.jit
    def find_span(self, program, programs, processors, config: gl.constexpr):
        """The span of one of `programs` programs, of which only as many as there are processors get one if there is
        little to read. Spans are given out from the end of the index on: see `decode/combine.py`. config: a SpanConfig.
        """
        scan: gl.constexpr = config.scan
        requests, ends = self._scan(0, 0, scan)
        scanned, longest = gl.max(ends, 0), gl.max(requests.units, 0)
        total = scanned
        if scan == MAX_SCAN:
            for b0 in range(MAX_SCAN, self.batch, MAX_SCAN):
                more, ends_more = self._scan(b0, total, scan)
                total, longest = gl.max(ends_more, 0), gl.maximum(longest, gl.max(more.units, 0))
        if config.programs > 1:
            little = processors * (config.programs * FEW_BLOCKS)
            blocks = total * (self.config.tile.unit_size // self.config.tile.block_n)
            programs = gl.where(blocks <= little, gl.minimum(programs, processors), programs)
        size = _span_size(total, longest, programs, config.partial_cost)
        program = programs - 1 - program
        unit = gl.where(program < 0, total, program * size)
        zero = unit * 0
        request = RequestUnits(zero, zero, zero, zero, zero, zero, zero, zero, self.config)
        request = self._find_request(request, requests, ends, unit)
        if scan == MAX_SCAN:
            for b0 in range(MAX_SCAN, self.batch, MAX_SCAN):
                requests, ends = self._scan(b0, scanned, scan)
                scanned = gl.max(ends, 0)
                request = self._find_request(request, requests, ends, unit)
        if scan > WARP_SCAN:
            # The compiler passes the span to other warp groups through the shared memory of the prefix sum, and sets no
            # barrier between the two uses.
            thread_barrier()
        return Span(program, unit, gl.minimum(unit + size, total), size, request)


@gluon.jit
def _min_span(longest, partial_cost: gl.constexpr):
    """The least work units per span, a power of two, for a longest tile of so many units. A program computes its span
    unit by unit, and the owner of the longest tile then merges its partial states one by one. The sum of both times is
    least where the square of the span is the tile's units times partial_cost. Tiles with many partial states are
    combined in two levels, for which smaller spans pay.
    """
    squared = gl.maximum(longest * partial_cost - 1, 0) >> 5
    steps = gl.minimum((33 - leading_zeros(squared)) >> 1, 8)
    return gl.where(steps < 3, 1 << steps, 1 << steps >> 2)


@gluon.jit
def _span_size(total, longest, programs, partial_cost: gl.constexpr):
    """Work units per span, so that the programs' spans together have at least `total` units."""
    size = quotient(total + programs - 1, programs)
    size = gl.maximum(size + (size >> 20), _min_span(longest, partial_cost))
    # Up to a 16th longer, spans of whole tiles are faster, since no partial states have to be combined.
    whole = _approximate_quotient(size, gl.maximum(longest, 1)) * longest
    whole += gl.where(whole < size, longest, 0)
    return gl.where((whole >= size) & (whole * 16 <= size * 17), whole, size)
