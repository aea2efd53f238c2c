"""All tiles of a decode batch on a line, and the share of it that is a program's.

A tile is one KV head of one request over all its keys: all its query rows or, where tiles have c.tile_rows of them, as
many tiles as that makes. Tiles lie request by request, head by head, each as long as it has units of keys; a unit is a
block or several of them. Programs take equal shares, so that mixed lengths cost no more than equal ones; which is whose
they find out themselves, from the tables.
"""

from __future__ import annotations

from typing import NamedTuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FEW = gl.constexpr(6)  # blocks per program
ALONE = gl.constexpr(128)  # requests that each warp looks at alone


class Tables(NamedTuple):
    """Whose rows and keys; `tokens`, `entries` and `pages` bound what the tables may say. With c.by_length
    last_page_len has all tokens of a request. Where page_size is 0, keys lie one after another, and kv_indptr counts
    them.
    """

    qo_indptr: tl.tensor
    kv_indptr: tl.tensor
    last_page_len: tl.tensor
    indices: tl.tensor
    batch: tl.tensor
    tokens: tl.tensor
    entries: tl.tensor
    pages: tl.tensor
    window: tl.tensor


class Request(NamedTuple):
    """Request b (a number or a vector), whose tiles begin at `start`: its first query token and how many, the first
    entry of its keys in the table, how many keys, the first of them that is read, and how many units that makes.
    """

    b: tl.tensor
    start: tl.tensor
    q_begin: tl.tensor
    q_len: tl.tensor
    entry: tl.tensor
    kv_len: tl.tensor
    low: tl.tensor
    cost: tl.tensor


class Span(NamedTuple):
    """Units `unit` to `end` of the line, the share of `share` units that is the `program`-th; request b, whose tiles
    begin at `start`, has the first of them.
    """

    program: tl.tensor
    unit: tl.tensor
    end: tl.tensor
    share: tl.tensor
    b: tl.tensor
    start: tl.tensor


class Piece(NamedTuple):
    """Units first to last (of `cost`) of head h's tile, whose keys low + first * unit to `stop` are read."""

    h: tl.tensor
    first: tl.tensor
    last: tl.tensor
    stop: tl.tensor


@gluon.jit
def extent(tables, b, start, c: gl.constexpr):
    """Request b, which begins at start; beyond the batch it has no rows and no keys, and costs nothing."""
    inside = b < tables.batch
    q_begin = gl.minimum(gl.maximum(gl.load(tables.qo_indptr + b, inside, 0), 0), tables.tokens)
    q_end = gl.minimum(gl.maximum(gl.load(tables.qo_indptr + b + 1, inside, 0), q_begin), tables.tokens)
    begin = gl.minimum(gl.maximum(gl.load(tables.kv_indptr + b, inside, 0), 0), tables.entries)
    end = gl.minimum(gl.maximum(gl.load(tables.kv_indptr + b + 1, inside, 0), begin), tables.entries)
    q_len, kv_len = q_end - q_begin, end - begin
    if c.page_size > 0:
        last = gl.load(tables.last_page_len + b, inside, 0)
        if not c.by_length:
            last = (kv_len - 1) * c.page_size + gl.minimum(last, c.page_size)
        kv_len = gl.maximum(gl.minimum(last, kv_len * c.page_size), 0)
    low = kv_len * 0
    if c.window:
        low = gl.maximum(kv_len - q_len - tables.window, 0) // c.unit * c.unit
    cost = gl.where(q_len > 0, gl.maximum((kv_len - low + c.unit - 1) // c.unit, 1), 0)
    return Request(b, start, q_begin, q_len, begin, kv_len, low, cost)


@gluon.jit
def length(request, c: gl.constexpr):
    """How long a request's tiles are together."""
    if c.tile_rows > 0:
        return request.cost * c.heads * ((request.q_len * c.group + c.tile_rows - 1) // c.tile_rows)
    return request.cost * c.heads


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _ends(tables, b0, passed, c: gl.constexpr):
    """Where tiles of c.scan requests from b0 on end, if those before end at `passed`; the requests' numbers, and how
    long their longest tile is.
    """
    # If they are few, each warp has all of them, and waits for no other's sums.
    b = b0 + gl.arange(0, c.scan, gl.BlockedLayout([c.scan // (32 if c.scan <= ALONE else 128)], [32], [4], [0]))
    request = extent(tables, b, 0, c)
    return passed + gl.associative_scan(length(request, c), 0, _sum), b, gl.max(request.cost, 0)


@gluon.jit
def _before(ends, b, unit, tables):
    """How many of these requests end before a unit, and where the last of them does."""
    before = (ends <= unit) & (b < tables.batch)
    return gl.sum(before.to(gl.int32), 0), gl.max(gl.where(before, ends, 0), 0)


@gluon.jit
def _least_share(longest, c: gl.constexpr):
    """Units that a share has at least, a power of two. A program computes those of its share one after another, and
    then one adds up the longest tile's parts, one after another: both together take least where the square of a share
    is as many units as the tile has, times what a part costs. Where that makes many parts, they come together in two
    steps, and smaller shares pay.
    """
    least = longest * 0 + 1
    for i in gl.static_range(8):
        least += gl.where(longest * c.part_cost > 32 << 2 * i, 1 << i, 0)
    return gl.where(least < 8, least, least // 4)


@gluon.jit
def my_span(tables, program, programs, c: gl.constexpr):
    """The share of one of as many programs as share the line, from its end on: who waits for programs after it on the
    line waits for such as started before it.
    """
    ends, requests, longest = _ends(tables, 0, 0, c)
    passed = gl.max(ends, 0)
    total = passed
    for b0 in range(c.scan, tables.batch, c.scan):
        more, _, long = _ends(tables, b0, total, c)
        total, longest = gl.max(more, 0), gl.maximum(longest, long)
    if c.programs > 1:  # where there is little to read, one program per multiprocessor is faster
        programs = gl.where(total * (c.unit // c.block) <= programs * FEW, programs // c.programs, programs)
    share = gl.maximum((total + programs - 1) // programs, _least_share(longest, c))
    # Parts cost more than shares that are a little longer, of whole tiles.
    whole = (share + longest - 1) // gl.maximum(longest, 1) * longest
    share = gl.where(whole * 16 <= share * 17, whole, share)
    program = programs - 1 - program
    unit = gl.where(program < 0, total, program * share)
    b, start = _before(ends, requests, unit, tables)
    for b0 in range(c.scan, tables.batch, c.scan):
        ends, requests, _ = _ends(tables, b0, passed, c)
        more, further = _before(ends, requests, unit, tables)
        b, start, passed = b + more, gl.maximum(start, further), gl.max(ends, 0)
    if c.scan > ALONE:
        # The compiler passes all this to other warps through the memory that the sums used, without a barrier between.
        gl.thread_barrier()
    return Span(program, unit, gl.minimum(unit + share, total), share, b, start)


@gluon.jit
def first_request(tables, span, c: gl.constexpr):
    """The request that has the first unit of a share."""
    return request_at(tables, extent(tables, span.b, span.start, c), span.unit, span.end, c)


@gluon.jit
def request_at(tables, request, unit, end, c: gl.constexpr):
    """The request that has a unit before `end`, this one or one after it."""
    while (unit < end) & (unit >= request.start + length(request, c)):
        request = extent(tables, request.b + 1, request.start + length(request, c), c)
    return request


@gluon.jit
def next_tile(tables, request, unit, end, c: gl.constexpr):
    """Where the next tile begins, and its request: where tiles are whole, programs have those that begin in their
    shares.
    """
    cost = gl.maximum(request.cost, 1)
    unit = request.start + (unit - request.start + cost - 1) // cost * cost
    return unit, request_at(tables, request, unit, end, c)


@gluon.jit
def piece_at(request, unit, end, c: gl.constexpr):
    """What of a request lies at `unit`, up to `end`."""
    h = (unit - request.start) // request.cost
    first = unit - request.start - h * request.cost
    last = gl.minimum(first + end - unit, request.cost)
    if c.whole:
        last = request.cost
    return Piece(h, first, last, gl.minimum(request.low + last * c.unit, request.kv_len))
