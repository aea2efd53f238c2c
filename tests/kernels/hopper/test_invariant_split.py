"""The batch-invariant split on Hopper GPUs, by the kernels' own code on the host: which launch computes a request, and
who stores and merges what.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from helpers.hopper import on_host, ragged_tables

pytest.importorskip("quire.kernels.hopper.host")

from quire.kernels.hopper import mask, pipeline, schedule
from quire.kernels.hopper.config import TileConfig
from quire.kernels.hopper.decode import invariant, tile


def test_invariant_launches_take_each_request_once(monkeypatch, rng):
    """By the number of query tokens alone: each launch takes the other's requests for empty."""
    on_host(monkeypatch, mask, schedule)
    for group in (1, 4, 7, 64):
        q_lens = torch.tensor([rng.choice((0, 1, 64 // group, 64 // group + 1, 300)) for _ in range(40)])
        kv_lens = [rng.randint(0, 900) for _ in range(40)]
        tile, found = TileConfig(heads=1, group=group, rows=0, block_n=64, unit_size=128), []
        for least, most in ((0, 64 // group), (64 // group + 1, 0)):
            config = schedule.ScheduleConfig(tile, 0, False, False, least, most)
            masks = mask.MaskConfig(tile, 0, rng.random() < 0.5, custom=False, items=False)
            tables = ragged_tables(q_lens.tolist(), kv_lens, 70, masks, config)
            found.append(tables.request(torch.arange(41)))
            assert torch.equal(found[-1].units > 0, found[-1].q_len > 0)
        assert torch.equal(sum(x.q_len for x in found)[:40], q_lens)
        assert not (found[0].q_len * found[1].q_len).any()
        assert (found[0].rows() <= 64).all()
        assert found[0].q_len[40] == found[1].q_len[40] == 0


class Simulated:
    """Programs of a launch one after another, as they start; the acc of a state is a tuple of what was folded into
    it.
    """

    def __init__(self, monkeypatch, c, requests, programs, window):
        self.c, self.programs = c, programs
        self.slots, self.written = {}, {}
        self.blocks, self.states = [], {}
        on_host(monkeypatch, mask, schedule, pipeline, tile, invariant)
        gl = MagicMock()
        gl.minimum, gl.maximum, gl.cdiv = min, max, lambda a, b: -(-a // b)
        gl.where = lambda condition, a, b: a if condition else b
        gl.num_programs, gl.to_tensor = lambda axis: programs, lambda x: x
        for module in (mask, schedule, tile, invariant):
            monkeypatch.setattr(module, "gl", gl)
        monkeypatch.setattr(schedule, "quotient", lambda a, b: a // b)
        monkeypatch.setattr(invariant, "MAX_ROWS", 16)
        self.state, self._tile_of = invariant.SoftmaxState, invariant.tile_of
        monkeypatch.setattr(invariant, "_no_keys", lambda c: self.state((), 0, 0))
        monkeypatch.setattr(invariant, "_merge_columns", lambda state, other, c: self.merge(state, other))
        monkeypatch.setattr(invariant, "transposed", lambda state, c: state)
        monkeypatch.setattr(invariant, "one_per_row", lambda state: state)
        monkeypatch.setattr(invariant, "_merge_rows", self.merge)
        monkeypatch.setattr(invariant, "SavedState", self.saved_state)
        for name in ("tile_of", "attend_keys"):
            monkeypatch.setattr(invariant, name, getattr(self, name))
        for name in ("store_slot", "merge_slots", "finish"):
            monkeypatch.setattr(invariant, f"_{name}", getattr(self, name))
        masks = mask.BatchMask(window, *[None] * 6, c.mask)
        self.tables = schedule.Tables(*[None] * 8, masks, c.schedule)
        self.tables.request_at = self.request_at
        self.requests, self.total = [], 0
        for b, (q_len, kv_len) in enumerate(requests):
            self.requests.append(self.tables._request(b, self.total, 0, q_len, 0, kv_len))
            self.total += self.requests[-1].total_units()

    def request_at(self, request, unit, end):
        found = [x for x in self.requests if x.start <= unit < x.start + x.total_units()]
        return found[0] if found else self.requests[-1]

    def tile_of(self, request, segment, masks):
        assert not self.blocks, "blocks that were loaded, and not attended to"
        self.request, found = request, self._tile_of(request, segment, masks)
        self.blocks = list(range(found.kv_start, found.kv_end, self.c.tile.block_n))
        return found

    def attend_keys(self, queries, rows, stages, kv_state, start, end):
        here = tuple(range(start, end, self.c.tile.block_n))
        loaded, self.blocks = tuple(self.blocks[: len(here)]), self.blocks[len(here) :]
        assert here == loaded
        return self.state(here, 0, 0), kv_state.advance(len(here))

    def merge(self, state, other):
        return self.state((*state.acc, other.acc) if other.acc else state.acc, 0, 0)

    def store_slot(self, partials, slot, state, row, row_end):
        assert slot not in self.slots
        assert 0 <= slot < self.c.split_group * self.programs + self.total // self.c.split_group
        self.slots[slot] = state

    def saved_state(self, acc, ml, index, states, c):
        def save(state):
            assert not self.blocks, "blocks that were loaded to where states are saved"
            self.states[index] = state

        def rows(chunk):
            assert chunk == 0
            return self.states[index]

        return SimpleNamespace(save=save, rows=rows)

    def merge_slots(self, state, partials, first, number, row, c):
        for i in range(first, first + number):
            state = self.merge(state, self.slots.pop(i))
        return state

    def finish(self, state, output, q_start, h, row, row_end):
        assert (self.request.b, h, row) not in self.written
        self.written[self.request.b, h, row] = state.acc

    def run(self, longer):
        size = -(-self.total // self.programs)
        # Spans of whole tiles may be longer.
        size += size // 16 if longer else 0
        for program in reversed(range(self.programs)):
            unit = min(program * size, self.total)
            span = schedule.Span(program, unit, min(unit + size, self.total), size, self.request_at(None, unit, 0))
            invariant.consume_invariant(self.tables, MagicMock(), MagicMock(), None, None, span, self.c)
        assert not self.slots, "nothing is left behind"
        return self.written


@pytest.mark.parametrize("whole", [False, True])
def test_invariant_partial_states_of_any_split_merge_in_one_order(whole, monkeypatch, rng):
    """The kernel's own code runs with states that record what was merged into them: equal however work units are cut.
    Programs run in the order of their start, so that none waits for one that starts later.
    """
    for _ in range(60):
        group, window = rng.choice((1, 4)), rng.choice((-1, 70, 5000))
        heads, rows = rng.choice((1, 2, 3)), 32 if whole else 8
        config = TileConfig(heads, group, rows if whole else 0, block_n=64, unit_size=128)
        c = SimpleNamespace(
            tile=config,
            mask=mask.MaskConfig(config, right=0, window=window >= 0, custom=False, items=False),
            schedule=schedule.ScheduleConfig(config, 0, False, False, whole_tiles=whole),
            pipeline=SimpleNamespace(stages=3),
            split_group=8,
            partial_rows=rows,
        )
        kv_lens = [rng.choice((0, 1, 300, 4096, 4097, 9000, 20_000, 70_000)) for _ in range(rng.randint(1, 7))]
        most = 100 if whole else 8 // group
        requests = [(rng.choice((0, 1, rng.randint(1, most))), kv_len) for kv_len in kv_lens]
        if not any(q_len for q_len, _ in requests):
            continue
        programs = rng.choice((1, 2, 7, 132, 264))
        with monkeypatch.context() as patch:
            written = Simulated(patch, c, requests, programs, window).run(rng.random() < 0.5)
        tiles = 0
        for b, (q_len, kv_len) in enumerate(requests):
            for row in range(0, q_len * group, rows):
                end = min(row + rows, q_len * group) if whole else q_len * group
                first = max(kv_len - q_len + row // group - window, 0) // 64 * 64 if window >= 0 else 0
                stop = kv_len - q_len + (end - 1) // group + 1
                seen = range(first, stop, 64)
                groups = [[t0 for t0 in seen if t0 // 1024 == n] for n in range(stop // 1024 + 1)]
                nested = [
                    tuple(x for u in range(8 * n, 8 * n + 8) if (x := tuple(t for t in starts if t // 128 == u)))
                    for n, starts in enumerate(groups)
                ]
                for h in range(heads):
                    assert written[b, h, row] == tuple(x for x in nested if x)
                    tiles += 1
        assert len(written) == tiles
