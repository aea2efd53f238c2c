from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.cpu.schedule import request_at, request_starts, segments


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
def test_every_block_belongs_to_one_program(programs, rng):
    heads, overhead = rng.choice((1, 2, 8)), rng.choice((1, 2, 5))
    blocks = np.array([rng.choice((0, 1, 2, 30, 400)) for _ in range(rng.randrange(1, 40))], np.int64)
    starts = request_starts(blocks, heads, overhead)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    share = -(-int(starts[-1]) // programs)
    for program in range(programs):
        work = segments(program, programs, starts, blocks, heads)
        assert sum(last - first for _, _, first, last, _ in work) <= share
        partial = [(first, last, n) for _, _, first, last, n in work if not (first == 0 and last == n)]
        assert sum(first > 0 for first, _, _ in partial) <= 1, "one row that began before"
        assert sum(first == 0 for first, _, _ in partial) <= 1, "one row that goes on"
        for b, h, first, last, n in work:
            assert n == blocks[b]
            seen.setdefault((b, h), []).append((first, last))
    assert set(seen) == {(b, h) for b in range(len(blocks)) for h in range(heads)}
    for (b, _), parts in seen.items():
        assert [p for part in parts for p in range(*part)] == list(range(blocks[b])), "in order, without gaps"


def test_shares_are_equal(rng):
    blocks = np.array([rng.randrange(1, 500) for _ in range(50)], np.int64)
    starts = request_starts(blocks, 8, 2)
    work = [sum(last - first for _, _, first, last, _ in segments(p, 132, starts, blocks, 8)) for p in range(132)]
    assert max(work) <= -(-int(starts[-1]) // 132)


def test_request_at_is_the_last_that_starts_before():
    starts = np.array([0, 3, 3, 10], np.int64)
    assert [request_at(starts, unit) for unit in (0, 2, 3, 9)] == [0, 0, 2, 2]
