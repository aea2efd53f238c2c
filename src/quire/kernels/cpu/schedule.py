"""How work is divided among programs: sizes of blocks and tiles, split-KV segments, and tiles of queries.

Requests of few query rows (`stream.py`) are divided by split-KV. A (request, head) pair with n blocks of keys costs
n + overhead work units. All units have one linear index, request by request and head by head, and program p computes
units [p * share, (p + 1) * share). A prefix sum over requests tells each program where it starts, so that nobody has to
write a list. A program stores at most two partial states, whatever the batch: one of a pair that an earlier program
started, and one of a pair that a later program continues.

The functions for split-KV are plain Python, which kernels compile as they are.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from quire.kernels.cpu.mask import key_range
from quire.kernels.cpu.simd import WIDE

BLOCK = 32  # keys in a block of `stream`
ROWS = 4  # query rows that share a loaded key in `stream`
PANEL = 4 * WIDE  # query rows in a panel of `tile`
TILE_ROWS = 256  # query rows in a tile of `tile`: a number of whole panels
TILE_KEYS = 128  # keys in a tile of `tile`


@register_jitable
def block_range(p, b):
    """(start, end) of the key blocks that the queries of request b see."""
    start, end = key_range(p, b, 0, p.q_len[b])
    return start // BLOCK, (end + BLOCK - 1) // BLOCK


@register_jitable
def request_starts(blocks: np.ndarray, num_heads: int, overhead: int) -> np.ndarray:
    """The first work unit of each request: int64 [batch_size + 1], from its number of blocks, int64 [batch_size]."""
    starts = np.zeros(len(blocks) + 1, np.int64)
    for b in range(len(blocks)):
        starts[b + 1] = starts[b] + (blocks[b] + overhead) * num_heads
    return starts


@register_jitable
def request_at(starts: np.ndarray, unit: int) -> int:
    """The request that owns a work unit, by bisection: the last one that starts at or before it."""
    low, high = 0, len(starts) - 2
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] <= unit:
            low = middle
        else:
            high = middle - 1
    return low


@register_jitable
def segments(program: int, num_programs: int, starts: np.ndarray, blocks: np.ndarray, num_heads: int) -> np.ndarray:
    """The work of one program: int64 [segments, 5] of (request, head, first block, end block, blocks of the pair).

    A segment from 0 to the pair's number of blocks is a whole pair. A pair without blocks is a segment of one program,
    (b, h, 0, 0, 0), which writes the pair's output.
    """
    total = starts[-1]
    share = (total + num_programs - 1) // num_programs
    unit, end = program * share, min((program + 1) * share, total)
    found = np.empty((max(end - unit, 0), 5), np.int64)
    count = 0
    while unit < end:
        b = request_at(starts, unit)
        cost = (starts[b + 1] - starts[b]) // num_heads
        h = (unit - starts[b]) // cost
        pair = starts[b] + h * cost
        first, last = unit - pair, min(end - pair, blocks[b])
        if first < last or (first == 0 and blocks[b] == 0):
            found[count, 0], found[count, 1], found[count, 2] = b, h, first
            found[count, 3], found[count, 4] = max(first, last), blocks[b]
            count += 1
        unit = pair + cost
    return found[:count]


def query_tiles(p, requests: np.ndarray) -> np.ndarray:
    """Tiles of queries for `tile`: int64 [n, 4] of (request, KV head, first query, end query), costliest first."""
    step = max(1, TILE_ROWS // p.group)
    tiles, costs = [], []
    for b in requests.tolist():
        for i0 in range(0, int(p.q_len[b]), step):
            i1 = min(i0 + step, int(p.q_len[b]))
            start, end = key_range(p, b, i0, i1)
            tiles.append((b, 0, i0, i1))
            costs.append((end - start) * (i1 - i0))
    order = np.argsort(np.negative(costs), kind="stable")
    work = np.repeat(np.array(tiles, np.int64)[order], p.num_kv_heads, 0)
    work[:, 1] = np.tile(np.arange(p.num_kv_heads), len(tiles))
    return work
