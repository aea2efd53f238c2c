"""All tiles of a batch on a line: how long it is, and whose tile lies where. Read from the tables by every program.

A tile is `block_m` rows of one KV head of one request; a row is a (query token, head): row r is token r // group and
head h * group + r % group.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl


class Tables(NamedTuple):
    """Whose rows and keys; `tokens` and `entries` bound what the tables may say. With c.by_length last_page_len has all
    tokens of a request.
    """

    qo_indptr: tl.tensor
    kv_indptr: tl.tensor
    last_page_len: tl.tensor
    batch: tl.tensor
    tokens: tl.tensor
    entries: tl.tensor
    window: tl.tensor


class Request(NamedTuple):
    """Request b: its first query token and how many, the first entry of its keys in the table and how many keys."""

    b: tl.tensor
    q_begin: tl.tensor
    q_len: tl.tensor
    kv_begin: tl.tensor
    kv_len: tl.tensor


@triton.jit
def bounds(indptr, b, total, inside):
    """First and end of request b (a number or a vector), inside [0, total] whatever the table says."""
    begin = tl.minimum(tl.maximum(tl.load(indptr + b, inside, 0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(indptr + b + 1, inside, 0), begin), total)
    return begin, end


@triton.jit
def extent(tables, b, c: tl.constexpr):
    """Request b, a number or a vector; beyond the batch it has no rows and no keys."""
    inside = b < tables.batch
    q_begin, q_end = bounds(tables.qo_indptr, b, tables.tokens, inside)
    kv_begin, kv_end = bounds(tables.kv_indptr, b, tables.entries, inside)
    kv_len = kv_end - kv_begin
    if c.page_size > 0:
        last = tl.load(tables.last_page_len + b, inside, 0)
        if not c.by_length:
            last = (kv_len - 1) * c.page_size + tl.minimum(last, c.page_size)
        kv_len = tl.maximum(tl.minimum(last, kv_len * c.page_size), 0)
    return Request(b, q_begin, q_end - q_begin, kv_begin, kv_len)


@triton.jit
def first_key(request, window, i, size: tl.constexpr, c: tl.constexpr):
    """The first key that query i, or a later one, sees, rounded down to a multiple of `size`."""
    key = request.kv_len * 0
    if c.window:
        key = tl.maximum(request.kv_len - request.q_len + i - window, 0) // size * size
    return key


@triton.jit
def cost_of(request, window, c: tl.constexpr):
    """Tiles of a request per head, and the length of each on the line."""
    tiles = (request.q_len * c.group + c.block_m - 1) // c.block_m
    cost = tiles * 0 + 1
    if c.split:
        keys = request.kv_len - first_key(request, window, 0, c.unit, c)
        cost = tl.maximum((keys + c.unit - 1) // c.unit, 1)
    return tiles, cost


@triton.jit
def line(tables, unit, c: tl.constexpr):
    """The line's length, the request that owns a unit of it, and where that request starts."""
    total = unit * 0
    owner = unit * 0
    start = unit * 0
    for b0 in range(0, tables.batch, c.scan):
        b = b0 + tl.arange(0, c.scan)
        tiles, cost = cost_of(extent(tables, b, c), tables.window, c)
        ends = total + tl.cumsum(tiles * cost * c.heads)
        before = (ends <= unit) & (b < tables.batch)
        owner += tl.sum(before.to(tl.int32))
        start = tl.maximum(start, tl.max(tl.where(before, ends, 0)))
        total = tl.max(ends)
    return total, owner, start
