"""How tiles are dealt to programs. Each program finds its tiles itself from the tables.

A tile is `block_m` query rows of one KV head of one request. A row is a (query token, head) pair: row r of a request is
token r // group and head h * group + r % group. Work units are numbered consecutively over the batch: request by
request, tile by tile, head by head. Without split-KV a tile is one work unit; with it, one for each `unit` keys.
"""

from __future__ import annotations

from collections import namedtuple

import triton
from triton import language as tl

from quire.kernels.triton.mask import first_key

# The tables of a batch. `tokens` and `entries` bound what offsets may say. With c.has_kv_lens, `last_page_len` has the
# requests' numbers of keys.
BatchTables = namedtuple("BatchTables", "qo_indptr kv_indptr last_page_len batch tokens entries")

# Request b: its first query token and their number, the first entry of its page table and its number of keys.
RequestSpan = namedtuple("RequestSpan", "b q_start q_len kv_start kv_len")


@triton.jit
def load_offsets(indptr, b, total, inside):
    """Start and end of request b (a number or a vector), clamped to [0, total]."""
    start = tl.minimum(tl.maximum(tl.load(indptr + b, inside, 0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(indptr + b + 1, inside, 0), start), total)
    return start, end


@triton.jit
def load_request(tables, b, c: tl.constexpr):
    """Request b (a number or a vector); those beyond the batch have no rows and no keys."""
    inside = b < tables.batch
    q_start, q_end = load_offsets(tables.qo_indptr, b, tables.tokens, inside)
    kv_start, kv_end = load_offsets(tables.kv_indptr, b, tables.entries, inside)
    kv_len = kv_end - kv_start
    if c.page_size > 0:
        last = tl.load(tables.last_page_len + b, inside, 0)
        if not c.has_kv_lens:
            last = (kv_len - 1) * c.page_size + tl.minimum(last, c.page_size)
        kv_len = tl.maximum(tl.minimum(last, kv_len * c.page_size), 0)
    return RequestSpan(b, q_start, q_end - q_start, kv_start, kv_len)


@triton.jit
def tiles_and_units(request, mask, c: tl.constexpr):
    """The number of a request's tiles per head, and of the work units of each."""
    tiles = (request.q_len * c.group + c.block_m - 1) // c.block_m
    units = tiles * 0 + 1
    if c.split_kv:
        keys = request.kv_len - first_key(request, 0, mask, c) // c.unit * c.unit
        units = tl.maximum((keys + c.unit - 1) // c.unit, 1)
    return tiles, units


@triton.jit
def find_request(tables, mask, unit, c: tl.constexpr):
    """The number of all work units, the request that work unit `unit` belongs to, and that request's first unit."""
    total = unit * 0
    owner = unit * 0
    start = unit * 0
    for b0 in range(0, tables.batch, c.scan):
        b = b0 + tl.arange(0, c.scan)
        tiles, units = tiles_and_units(load_request(tables, b, c), mask, c)
        ends = total + tl.cumsum(tiles * units * c.heads)
        before = (ends <= unit) & (b < tables.batch)
        owner += tl.sum(before.to(tl.int32))
        start = tl.maximum(start, tl.max(tl.where(before, ends, 0)))
        total = tl.max(ends)
    return total, owner, start
