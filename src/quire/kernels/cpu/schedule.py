"""How work is divided among programs: sizes of blocks and tiles, split-KV segments, and tiles of queries.

Requests of few query rows (`stream.py`) are divided by split-KV. A request with n key blocks costs n + 1 work units.
All units have one linear index, request by request, and program p computes units [p * share, (p + 1) * share). A prefix
sum over requests gives each program its start, so that no list has to be written. A program has at most two
partial states, whatever the batch: of a request that an earlier program started, and of one that a later one continues.

The functions for split-KV are not decorated: kernels compile them, and tests call them uncompiled.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from quire.kernels.cpu.mask import key_range
from quire.kernels.cpu.simd import WIDE

# The number of keys in a block of `stream`.
BLOCK = 32
# The number of query rows of `stream` that share a loaded key.
ROWS = 4
# The number of query rows in a panel of `tile`.
PANEL = 4 * WIDE
# The most query rows in a tile of `tile`, in whole panels; more if one query token has more.
TILE_ROWS = 256
# The number of keys in a tile of `tile`.
TILE_KEYS = 128


@register_jitable
def block_range(p, b):
    """(start, end) of the key blocks that the queries of request b see."""
    start, end = key_range(p, b, 0, p.q_len[b])
    return start // BLOCK, (end + BLOCK - 1) // BLOCK


@register_jitable
def request_starts(blocks: np.ndarray) -> np.ndarray:
    """The first work unit of each request: int64 [batch_size + 1], from its number of blocks, int64 [batch_size]."""
    starts = np.zeros(len(blocks) + 1, np.int64)
    for b in range(len(blocks)):
        starts[b + 1] = starts[b] + blocks[b] + 1
    return starts


@register_jitable
def segments(program: int, num_programs: int, starts: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """The work of one program: int64 [segments, 3] of (request, start block, end block).

    A request without blocks is a segment of one program, (b, 0, 0), which writes the request's output.
    """
    total = starts[-1]
    share = (total + num_programs - 1) // num_programs
    unit, end = program * share, min((program + 1) * share, total)
    found = np.empty((max(end - unit, 0), 3), np.int64)
    count, b = 0, np.searchsorted(starts, unit, side="right") - 1
    while unit < end:
        start_block, end_block = unit - starts[b], min(end - starts[b], blocks[b])
        if start_block < end_block or blocks[b] == 0:
            found[count, 0], found[count, 1], found[count, 2] = b, start_block, end_block
            count += 1
        b += 1
        unit = starts[b]
    return found[:count]


def query_tiles(p, requests: np.ndarray) -> np.ndarray:
    """Tiles of queries for `tile`: int64 [n, 4] of (request, KV head, first query, end query), costliest first."""
    step = max(1, TILE_ROWS // p.group)
    starts = [(b, i) for b in requests.tolist() for i in range(0, int(p.q_len[b]), step)]
    tiles = np.array([(b, 0, i, min(i + step, int(p.q_len[b]))) for b, i in starts], np.int64)
    keys = np.array([key_range(p, b, i0, i1) for b, _, i0, i1 in tiles.tolist()])
    costs = (tiles[:, 3] - tiles[:, 2]) * (keys[:, 1] - keys[:, 0])
    work = np.repeat(tiles[np.argsort(-costs, kind="stable")], p.num_kv_heads, 0)
    work[:, 1] = np.tile(np.arange(p.num_kv_heads), len(tiles))
    return work
