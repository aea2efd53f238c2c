"""All tiles of a decode batch on a line, and the share of it that is a program's.

A tile is one KV head of one request over all its keys: all its query rows or, where tiles have c.tile_rows of them, as
many tiles as that makes. Tiles lie request by request, head by head, each as long as it has units of keys; a unit is a
block or several of them. Programs take equal shares, so that mixed lengths cost no more than equal ones; which is whose
they find out themselves, from the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FEW = gl.constexpr(6)  # blocks per program: up to so many, one program on a multiprocessor is faster than more
ALONE = gl.constexpr(128)  # requests that each warp looks at alone
SCAN = gl.constexpr(1024)  # requests that are looked at together, at most; fewer are looked at once


def scanned(batch: int) -> int:
    """How many requests of such a batch are looked at together: a power of two, for whole warps."""
    return max(32, min(SCAN.value, triton.next_power_of_2(batch)))


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
    """Units `unit` to `end` of the line, the share of `share` units that is the `program`-th; the request that has the
    first of them, if there are any.
    """

    program: tl.tensor
    unit: tl.tensor
    end: tl.tensor
    share: tl.tensor
    request: Request


class Piece(NamedTuple):
    """Units first to last (of `cost`) of head h's tile, whose keys low + first * unit to `stop` are read."""

    h: tl.tensor
    first: tl.tensor
    last: tl.tensor
    stop: tl.tensor


@gluon.jit
def _about(a, b):
    """The whole part of a / b, or one off where that is below 2**20, for a >= 0 and b > 0. A program waits for all that
    it executes before it reads its first keys, and a division takes three times as many instructions.
    """
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b.to(gl.float32)], gl.float32, True, 1)
    return (a.to(gl.float32) * inverse).to(gl.int32)


@gluon.jit
def quotient(a, b):
    """The same exactly, if it is below 2**20."""
    q = _about(a, b)
    rest = a - q * b
    return q + (rest >= b).to(gl.int32) - (rest < 0).to(gl.int32)


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
    return measured(b, start, q_begin, q_len, begin, kv_len, tables, c)


@gluon.jit
def measured(b, start, q_begin, q_len, entry, kv_len, tables, c: gl.constexpr):
    """A request, and what it costs."""
    low = kv_len * 0
    if c.window:
        low = gl.maximum(kv_len - q_len - tables.window, 0) // c.unit * c.unit
    cost = gl.where(q_len > 0, gl.maximum((kv_len - low + c.unit - 1) // c.unit, 1), 0)
    return Request(b, start, q_begin, q_len, entry, kv_len, low, cost)


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
def _requests(tables, b0, passed, c: gl.constexpr):
    """As many requests from b0 on as are looked at together, whose tiles begin where those before end, at `passed`; and
    where theirs end.
    """
    # If they are few, each warp has all of them, and waits for no other's sums.
    b = b0 + gl.arange(0, c.scan, gl.BlockedLayout([c.scan // (32 if c.scan <= ALONE else 128)], [32], [4], [0]))
    request = extent(tables, b, 0, c)
    return request, passed + gl.associative_scan(length(request, c), 0, _sum)


@gluon.jit
def _one(x, here):
    """The number of x that is here, if there is one, or 0."""
    return gl.sum(gl.where(here, x, 0), 0)


@gluon.jit
def _holder(request, requests, ends, unit, tables, c: gl.constexpr):
    """The one of these requests that has a unit; `request` if none has it, which is 0 throughout if it is of others."""
    start = ends - length(requests, c)
    here = (start <= unit) & (unit < ends)
    return measured(
        request.b + _one(requests.b, here),
        request.start + _one(start, here),
        request.q_begin + _one(requests.q_begin, here),
        request.q_len + _one(requests.q_len, here),
        request.entry + _one(requests.entry, here),
        request.kv_len + _one(requests.kv_len, here),
        tables,
        c,
    )


@gluon.jit
def _least_share(longest, c: gl.constexpr):
    """Units that a share has at least, a power of two. A program computes those of its share one after another, and
    then one adds up the longest tile's parts, one after another: both together take least where the square of a share
    is as many units as the tile has, times what a part costs. Where that makes many parts, they come together in two
    steps, and smaller shares pay.
    """
    squared = gl.maximum(longest * c.part_cost - 1, 0) >> 5
    zeros = gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [squared], gl.int32, True, 1)
    steps = gl.minimum((33 - zeros) >> 1, 8)
    return gl.where(steps < 3, 1 << steps, 1 << steps >> 2)


@gluon.jit
def _share(total, longest, programs, c: gl.constexpr):
    """Units for each program, so that all are somebody's."""
    share = quotient(total + programs - 1, programs)
    share = gl.maximum(share + (share >> 20), _least_share(longest, c))
    # Parts cost more than shares that are a little longer, of whole tiles.
    whole = _about(share, gl.maximum(longest, 1)) * longest
    whole += gl.where(whole < share, longest, 0)
    return gl.where((whole >= share) & (whole * 16 <= share * 17), whole, share)


@gluon.jit
def my_span(tables, program, programs, enough, c: gl.constexpr):
    """The share of one of as many programs as share the line, from its end on: who waits for programs after it on the
    line waits for such as started before it. enough: programs, where there is little to read.
    """
    requests, ends = _requests(tables, 0, 0, c)
    passed, longest = gl.max(ends, 0), gl.max(requests.cost, 0)
    total = passed
    if c.scan == SCAN:
        for b0 in range(SCAN, tables.batch, SCAN):
            more, ends_more = _requests(tables, b0, total, c)
            total, longest = gl.max(ends_more, 0), gl.maximum(longest, gl.max(more.cost, 0))
    if c.programs > 1:
        little = enough * (c.programs * FEW)
        programs = gl.where(total * (c.unit // c.block) <= little, gl.minimum(programs, enough), programs)
    share = _share(total, longest, programs, c)
    program = programs - 1 - program
    unit = gl.where(program < 0, total, program * share)
    zero = unit * 0
    request = Request(zero, zero, zero, zero, zero, zero, zero, zero)
    request = _holder(request, requests, ends, unit, tables, c)
    if c.scan == SCAN:
        for b0 in range(SCAN, tables.batch, SCAN):
            requests, ends = _requests(tables, b0, passed, c)
            passed = gl.max(ends, 0)
            request = _holder(request, requests, ends, unit, tables, c)
    if c.scan > ALONE:
        # The compiler passes all this to other warps through the memory that the sums used, without a barrier between.
        gl.thread_barrier()
    return Span(program, unit, gl.minimum(unit + share, total), share, request)


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
    h = (unit - request.start) // request.cost if c.whole else quotient(unit - request.start, request.cost)
    first = unit - request.start - h * request.cost
    last = gl.minimum(first + end - unit, request.cost)
    if c.whole:
        last = request.cost
    return Piece(h, first, last, gl.minimum(request.low + last * c.unit, request.kv_len))
