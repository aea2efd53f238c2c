"""The schedule: a linear index of all work units of a batch, and the span of it that each program computes.

A tile is one KV head of one request with all its keys and all its query rows or, if c.tile_rows > 0, c.tile_rows of
them. The keys of a tile are cut into work units of c.unit_size keys, one block or several. Units are numbered request
by request, head by head, tile by tile. Programs take equal spans of units, so that a batch of mixed lengths takes no
longer than one of equal lengths. Each program finds its span itself from the tables in device memory: the host makes
no list of work.

A batch-invariant batch may be computed by two launches, decode's and prefill's: each has the requests with as many
query tokens as c.least_q_len and c.most_q_len say, and takes the others for empty.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.definition.spec import AttentionSpec
from quire.kernels.hopper.mask import Mask, first_key

DECODE_ROWS = 64  # query rows of a request, per KV head, up to which decode computes it
FEW_BLOCKS = gl.constexpr(6)  # per program: up to so many, one program per multiprocessor is faster than several
WARP_SCAN = gl.constexpr(128)  # up to so many requests, each warp computes the prefix sum alone
MAX_SCAN = gl.constexpr(1024)  # requests in one prefix sum; larger batches take several


def scan_size(batch: int) -> int:
    """Requests in one prefix sum of a batch: a power of two, and whole warps."""
    return max(32, min(MAX_SCAN.value, triton.next_power_of_2(batch)))


def decode_tokens(spec: AttentionSpec) -> int:
    """The most query tokens of a request that decode computes. Of a batch-invariant layer, prefill has the longer ones,
    so that the kernel, and with it the bits, depend on the request alone; otherwise they depend on the longest request.
    """
    return DECODE_ROWS // spec.group_size


class Tables(NamedTuple):
    """The batch: indptr of queries and keys, page ids, and masks. tokens, entries and pages are sizes of q, of the page
    table and of the cache: indices are clamped to them. With c.by_length last_page_len has the key counts of whole
    requests. If c.page_size is 0, keys are ragged rows, and kv_indptr counts rows.
    """

    qo_indptr: tl.tensor
    kv_indptr: tl.tensor
    last_page_len: tl.tensor
    indices: tl.tensor
    batch: tl.tensor
    tokens: tl.tensor
    entries: tl.tensor
    pages: tl.tensor
    mask: Mask


class Request(NamedTuple):
    """Request b, as scalars or, for several requests, as vectors. start: its first work unit; q_start, q_len: its query
    tokens; kv_start: its first entry in the page table; kv_len: its keys; first_key: the first key that is read; units:
    work units of each of its tiles.
    """

    b: tl.tensor
    start: tl.tensor
    q_start: tl.tensor
    q_len: tl.tensor
    kv_start: tl.tensor
    kv_len: tl.tensor
    first_key: tl.tensor
    units: tl.tensor


class Span(NamedTuple):
    """Work units start to end, those of the `program`-th of equal spans of `size` units; request: the one that has the
    first unit, if the span is not empty.
    """

    program: tl.tensor
    start: tl.tensor
    end: tl.tensor
    size: tl.tensor
    request: Request


class Segment(NamedTuple):
    """What a span has of one tile: units start to end of the h-th tile of a request; kv_end: the end of their keys."""

    h: tl.tensor
    start: tl.tensor
    end: tl.tensor
    kv_end: tl.tensor


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
def load_request(tables, b, start, c: gl.constexpr):
    """Request b, whose first work unit is `start`. One that another launch computes has no rows and no units; beyond
    the batch there are no keys, either.
    """
    valid = b < tables.batch
    q_start = gl.minimum(gl.maximum(gl.load(tables.qo_indptr + b, valid, 0), 0), tables.tokens)
    q_end = gl.minimum(gl.maximum(gl.load(tables.qo_indptr + b + 1, valid, 0), q_start), tables.tokens)
    kv_start = gl.minimum(gl.maximum(gl.load(tables.kv_indptr + b, valid, 0), 0), tables.entries)
    kv_end = gl.minimum(gl.maximum(gl.load(tables.kv_indptr + b + 1, valid, 0), kv_start), tables.entries)
    q_len, kv_len = q_end - q_start, kv_end - kv_start
    if c.least_q_len > 0:
        q_len = gl.where(q_len >= c.least_q_len, q_len, 0)
    if c.most_q_len > 0:
        q_len = gl.where(q_len <= c.most_q_len, q_len, 0)
    if c.page_size > 0:
        last = gl.load(tables.last_page_len + b, valid, 0)
        if not c.by_length:
            last = (kv_len - 1) * c.page_size + gl.minimum(last, c.page_size)
        kv_len = gl.maximum(gl.minimum(last, kv_len * c.page_size), 0)
    return _request(b, start, q_start, q_len, kv_start, kv_len, tables, c)


@gluon.jit
def _request(b, start, q_start, q_len, kv_start, kv_len, tables, c: gl.constexpr):
    """A Request of these lengths, with its first key and its units per tile."""
    first = first_key(q_len, kv_len, tables.mask, c)
    units = gl.where(q_len > 0, gl.maximum((kv_len - first + c.unit_size - 1) // c.unit_size, 1), 0)
    return Request(b, start, q_start, q_len, kv_start, kv_len, first, units)


@gluon.jit
def total_units(request, c: gl.constexpr):
    """Work units of all tiles of a request."""
    if c.tile_rows > 0:
        return request.units * c.heads * ((request.q_len * c.group + c.tile_rows - 1) // c.tile_rows)
    return request.units * c.heads


@gluon.jit
def page_of(tables, request, j, c: gl.constexpr):
    """Page ids of keys j, or row numbers if keys are ragged rows, clamped to the cache."""
    if c.page_size > 0:
        page = gl.load(tables.indices + request.kv_start + j // c.page_size, j < request.kv_len, 0)
    else:
        page = request.kv_start + j
    page = gl.minimum(gl.maximum(page, 0), tables.pages - 1)
    return page.to(gl.int64) if c.int64_offsets else page


@gluon.jit
def add(a, b):
    """The operation of a prefix sum."""
    return a + b


@gluon.jit
def _scan_requests(tables, b0, start, c: gl.constexpr):
    """c.scan requests from b0 on as vectors (Request.start is not set), and the end of each one's work units, where
    those of b0 start at `start`.
    """
    # A small batch lies in each warp as a whole, so that no warp waits for another one's part of the prefix sum.
    b = b0 + gl.arange(0, c.scan, gl.BlockedLayout([c.scan // (32 if c.scan <= WARP_SCAN else 128)], [32], [4], [0]))
    requests = load_request(tables, b, 0, c)
    return requests, start + gl.associative_scan(total_units(requests, c), 0, add)


@gluon.jit
def select(x, chosen):
    """The element of x that is chosen; 0 if none is."""
    return gl.sum(gl.where(chosen, x, 0), 0)


@gluon.jit
def _find_request(request, requests, ends, unit, tables, c: gl.constexpr):
    """Add the one of `requests` that has a work unit to `request`, field by field; if none has it, add nothing. Over
    all scans of a batch, a request of zeros becomes the one that has the unit.
    """
    starts = ends - total_units(requests, c)
    chosen = (starts <= unit) & (unit < ends)
    return _request(
        request.b + select(requests.b, chosen),
        request.start + select(starts, chosen),
        request.q_start + select(requests.q_start, chosen),
        request.q_len + select(requests.q_len, chosen),
        request.kv_start + select(requests.kv_start, chosen),
        request.kv_len + select(requests.kv_len, chosen),
        tables,
        c,
    )


@gluon.jit
def _least_span(longest, c: gl.constexpr):
    """The least work units per span, a power of two, for a longest tile of so many units. A program computes its span
    unit by unit, and the owner of the longest tile then merges its partial states one by one. The sum of both times is
    least where the square of the span is the tile's units times c.partial_cost. Tiles with many partial states are
    combined in two levels, for which smaller spans pay.
    """
    squared = gl.maximum(longest * c.partial_cost - 1, 0) >> 5
    steps = gl.minimum((33 - leading_zeros(squared)) >> 1, 8)
    return gl.where(steps < 3, 1 << steps, 1 << steps >> 2)


@gluon.jit
def _span_size(total, longest, programs, c: gl.constexpr):
    """Work units per span, so that the programs' spans together have at least `total` units."""
    size = quotient(total + programs - 1, programs)
    size = gl.maximum(size + (size >> 20), _least_span(longest, c))
    # Up to a 16th longer, spans of whole tiles are faster, since no partial states have to be combined.
    whole = _approximate_quotient(size, gl.maximum(longest, 1)) * longest
    whole += gl.where(whole < size, longest, 0)
    return gl.where((whole >= size) & (whole * 16 <= size * 17), whole, size)


@gluon.jit
def find_span(tables, program, programs, processors, c: gl.constexpr):
    """The span of one of `programs` programs, of which only as many as there are processors get one if there is little
    to read. Spans are given out from the end of the index on: a program only waits for partial states of later units,
    and those belong to programs that have started before it.
    """
    requests, ends = _scan_requests(tables, 0, 0, c)
    scanned, longest = gl.max(ends, 0), gl.max(requests.units, 0)
    total = scanned
    if c.scan == MAX_SCAN:
        for b0 in range(MAX_SCAN, tables.batch, MAX_SCAN):
            more, ends_more = _scan_requests(tables, b0, total, c)
            total, longest = gl.max(ends_more, 0), gl.maximum(longest, gl.max(more.units, 0))
    if c.programs > 1:
        little = processors * (c.programs * FEW_BLOCKS)
        programs = gl.where(total * (c.unit_size // c.block_n) <= little, gl.minimum(programs, processors), programs)
    size = _span_size(total, longest, programs, c)
    program = programs - 1 - program
    unit = gl.where(program < 0, total, program * size)
    zero = unit * 0
    request = Request(zero, zero, zero, zero, zero, zero, zero, zero)
    request = _find_request(request, requests, ends, unit, tables, c)
    if c.scan == MAX_SCAN:
        for b0 in range(MAX_SCAN, tables.batch, MAX_SCAN):
            requests, ends = _scan_requests(tables, b0, scanned, c)
            scanned = gl.max(ends, 0)
            request = _find_request(request, requests, ends, unit, tables, c)
    if c.scan > WARP_SCAN:
        # The compiler passes the span to other warp groups through the shared memory of the prefix sum, and sets no
        # barrier between the two uses.
        gl.thread_barrier()
    return Span(program, unit, gl.minimum(unit + size, total), size, request)


@gluon.jit
def request_at(tables, request, unit, end, c: gl.constexpr):
    """The request that has a unit before `end`: `request` or one after it."""
    while (unit < end) & (unit >= request.start + total_units(request, c)):
        request = load_request(tables, request.b + 1, request.start + total_units(request, c), c)
    return request


@gluon.jit
def next_tile(tables, request, unit, end, c: gl.constexpr):
    """The first unit from `unit` on that is the first one of a tile, and its request. With c.whole_tiles a program
    computes the tiles that start in its span.
    """
    units = gl.maximum(request.units, 1)
    unit = request.start + (unit - request.start + units - 1) // units * units
    return unit, request_at(tables, request, unit, end, c)


@gluon.jit
def segment_at(request, unit, end, c: gl.constexpr):
    """The segment of a request that starts with `unit` and ends before or at `end`."""
    h = quotient(unit - request.start, request.units)
    first = unit - request.start - h * request.units
    last = gl.minimum(first + end - unit, request.units)
    if c.whole_tiles:
        last = request.units
    return Segment(h, first, last, gl.minimum(request.first_key + last * c.unit_size, request.kv_len))
