"""How decode work is cut: equal shares for P programs, cut anywhere, no list made by anybody.

A row is a (request, KV head) with n blocks of keys; it costs n + overhead units, and rows lie on one line, request by
request, head by head. Program p takes units [p * share, (p + 1) * share): a prefix sum over requests tells it where it
starts, so nothing has to be planned ahead. A row that spans programs leaves one partial state with each of them: a
program holds at most two (the end of a row begun before it, the begin of one that goes on), whatever the batch.

The functions are plain loops over numbers and arrays, which the CPU's kernels compile as they are.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable


@register_jitable
def row_starts(blocks: np.ndarray, num_kv_heads: int, overhead: int) -> np.ndarray:
    """The first unit of each request's rows: int64 [batch_size + 1], from its number of blocks, int64 [batch_size]."""
    starts = np.zeros(len(blocks) + 1, np.int64)
    for b in range(len(blocks)):
        starts[b + 1] = starts[b] + (blocks[b] + overhead) * num_kv_heads
    return starts


@register_jitable
def request_at(starts: np.ndarray, unit: int) -> int:
    """The request that owns a unit, by bisection: the last one that starts at or before it."""
    low, high = 0, len(starts) - 2
    while low < high:
        middle = (low + high + 1) // 2
        if starts[middle] <= unit:
            low = middle
        else:
            high = middle - 1
    return low


@register_jitable
def pieces(program: int, num_programs: int, starts: np.ndarray, blocks: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """The work of one program: int64 [pieces, 5] of (request, head, first block, end block, row's blocks).

    A piece is its whole row if it runs from 0 to row's blocks. Rows without blocks appear once, as (b, h, 0, 0, 0), so
    that somebody writes their outputs.
    """
    total = starts[-1]
    share = (total + num_programs - 1) // num_programs
    unit, end = program * share, min((program + 1) * share, total)
    found = np.empty((max(end - unit, 0), 5), np.int64)
    count = 0
    while unit < end:
        b = request_at(starts, unit)
        cost = (starts[b + 1] - starts[b]) // num_kv_heads
        h = (unit - starts[b]) // cost
        row = starts[b] + h * cost
        first, last = unit - row, min(end - row, blocks[b])
        if first < last or (first == 0 and blocks[b] == 0):
            found[count, 0], found[count, 1], found[count, 2] = b, h, first
            found[count, 3], found[count, 4] = max(first, last), blocks[b]
            count += 1
        unit = row + cost
    return found[:count]
