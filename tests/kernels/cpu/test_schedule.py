from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.cpu.schedule import request_starts, segments


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
def test_segments_of_random_requests_have_each_block_once(programs, rng):
    blocks = np.array([rng.choice((0, 1, 2, 30, 400)) for _ in range(rng.randrange(1, 40))], np.int64)
    starts = request_starts(blocks)
    seen: dict[int, list[tuple[int, int]]] = {}
    share = -(-int(starts[-1]) // programs)
    for program in range(programs):
        work = segments(program, programs, starts, blocks)
        assert sum(last - first for _, first, last in work) <= share
        partial = [(first, last) for b, first, last in work if not (first == 0 and last == blocks[b])]
        assert sum(first > 0 for first, _ in partial) <= 1, "one request that an earlier program started"
        assert sum(first == 0 for first, _ in partial) <= 1, "one request that a later program continues"
        for b, first, last in work:
            seen.setdefault(b, []).append((first, last))
    assert set(seen) == set(range(len(blocks)))
    for b, found in seen.items():
        assert [x for segment in found for x in range(*segment)] == list(range(blocks[b])), "in order, without gaps"
        assert blocks[b] > 0 or found == [(0, 0)], "one program writes the output of a request without keys"


def test_segments_of_programs_have_equal_shares(rng):
    blocks = np.array([rng.randrange(1, 500) for _ in range(50)], np.int64)
    starts = request_starts(blocks)
    work = [sum(last - first for _, first, last in segments(p, 132, starts, blocks)) for p in range(132)]
    assert max(work) <= -(-int(starts[-1]) // 132)
