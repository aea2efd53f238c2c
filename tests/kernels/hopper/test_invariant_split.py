"""The batch-invariant split on Hopper GPUs, by the kernels' own code on the host: which launch computes a request, and
who stores and merges what.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from helpers.hopper import HostGluon, host_class, ragged_tables

pytest.importorskip("quire.kernels.hopper.host")


def test_launches_share_the_requests_of_a_batch(monkeypatch, rng):
    """By the number of query tokens alone: each launch takes the other's requests for empty."""
    from quire.kernels.hopper import mask, schedule

    for module in (mask, schedule):
        monkeypatch.setattr(module, "gl", HostGluon())
    for module, name in ((schedule, "first_key"), (schedule, "_request")):
        monkeypatch.setattr(module, name, getattr(module, name).fn)
    for group in (1, 4, 7, 64):
        q_lens = torch.tensor([rng.choice((0, 1, 64 // group, 64 // group + 1, 300)) for _ in range(40)])
        tables = ragged_tables(q_lens.tolist(), [rng.randint(0, 900) for _ in range(40)], 70)
        found = []
        for least, most in ((0, 64 // group), (64 // group + 1, 0)):
            c = SimpleNamespace(
                least_q_len=least, most_q_len=most, page_size=0, window=rng.random() < 0.5, unit_size=128
            )  # fmt: skip
            found.append(schedule.load_request.fn(tables, torch.arange(41), 0, c))
            assert torch.equal(found[-1].units > 0, found[-1].q_len > 0)
        assert torch.equal(sum(x.q_len for x in found)[:40], q_lens)
        assert not (found[0].q_len * found[1].q_len).any()
        assert (found[0].q_len * group <= 64).all()
        assert found[0].q_len[40] == found[1].q_len[40] == 0


class Simulated:
    """Programs of a launch one after another, as they start; states are tuples of what was folded into them."""

    def __init__(self, monkeypatch, c, requests, programs, window):
        from quire.kernels.hopper import mask, pipeline, schedule
        from quire.kernels.hopper.decode import invariant, tile

        self.c, self.programs, self.window, self.invariant, self.schedule = c, programs, window, invariant, schedule
        self.requests, self.slots, self.written, self.blocks, self.states = [], {}, {}, [], {}
        gl = MagicMock()
        gl.minimum, gl.maximum, gl.cdiv = min, max, lambda a, b: -(-a // b)
        gl.where = lambda condition, a, b: a if condition else b
        gl.num_programs, gl.load = lambda axis: programs, lambda *given: 0
        start = 0
        for b, (q_len, kv_len) in enumerate(requests):
            low = max(kv_len - q_len - window, 0) // c.unit_size * c.unit_size if c.window else 0
            cost = max(-(-(kv_len - low) // c.unit_size), 1) if q_len else 0
            self.requests.append(schedule.Request(b, start, 0, q_len, 0, kv_len, low, cost))
            start += schedule.total_units.fn(self.requests[-1], c)
        self.total = start
        for module in (mask, schedule, tile, invariant):
            monkeypatch.setattr(module, "gl", gl)
        state = host_class(pipeline.PipelineState)
        for module in (pipeline, invariant):
            monkeypatch.setattr(module, "PipelineState", state)
        gl.to_tensor = lambda x: x
        rows = MagicMock()
        monkeypatch.setattr(invariant, "load_rows", lambda *given: rows)
        monkeypatch.setattr(schedule, "total_units", schedule.total_units.fn)
        monkeypatch.setattr(schedule, "request_at", self.request_at)
        monkeypatch.setattr(tile, "tile_keys", mask.tile_keys.fn)
        monkeypatch.setattr(invariant, "MAX_ROWS", 16)
        for name in ("segment_at", "next_tile", "_unit_slot", "_run_slot", "_combine"):
            monkeypatch.setattr(invariant, name, getattr(invariant, name).fn)
        for module in (schedule, invariant):
            monkeypatch.setattr(module, "quotient", lambda a, b: a // b)
        monkeypatch.setattr(invariant, "_no_keys", lambda *given: ((), 0, 0))
        monkeypatch.setattr(
            invariant, "_merge_columns", lambda acc, m, l, x, m2, l2, c: ((*acc, x) if x else acc, 0, 0)
        )
        monkeypatch.setattr(invariant, "_merge_rows", lambda acc, m, l, x, m2, l2: ((*acc, x) if x else acc, 0, 0))
        monkeypatch.setattr(invariant, "transpose_acc", lambda acc, c: acc)
        self._tile_of = invariant.tile_of
        for name in ("request_at", "tile_of", "attend_keys", "save_state", "restore_rows"):
            monkeypatch.setattr(invariant, name, getattr(self, name))
        for name in ("store_slot", "merge_slots", "finish"):
            monkeypatch.setattr(invariant, f"_{name}", getattr(self, name))

    def request_at(self, tables, request, unit, end, c):
        found = [x for x in self.requests if x.start <= unit < x.start + self.schedule.total_units(x, c)]
        return found[0] if found else self.requests[-1]

    def tile_of(self, request, segment, mask, c):
        assert not self.blocks, "blocks that were loaded, and not attended to"
        self.request, tile = request, self._tile_of.fn(request, segment, mask, c)
        self.blocks = list(range(tile.kv_start, tile.kv_end, c.block_n))
        return tile

    def attend_keys(self, queries, rows, request, pipeline, state, start, end, mask, c):
        here = tuple(range(start, end, c.block_n))
        loaded, self.blocks = tuple(self.blocks[: len(here)]), self.blocks[len(here) :]
        assert here == loaded
        return here, 0, 0, state.advance(len(here))

    def store_slot(self, slot, acc, m, l, partials, row, row_end, c):
        assert slot not in self.slots
        assert 0 <= slot < c.run * self.programs + self.total // c.run
        self.slots[slot] = acc

    def save_state(self, acc, m, l, free, free_ml, index, states):
        assert not self.blocks, "blocks that were loaded to where states are saved"
        self.states[index] = acc

    def restore_rows(self, free, free_ml, index, states, chunk, c):
        assert chunk == 0
        return self.states[index], 0, 0

    def merge_slots(self, acc, m, l, partials, first, number, row, c):
        for i in range(first, first + number):
            state = self.slots.pop(i)
            acc = (*acc, state) if state else acc
        return acc, 0, 0

    def finish(self, acc, m, l, output, q_start, h, row, row_end, c):
        assert (self.request.b, h, row) not in self.written
        self.written[self.request.b, h, row] = acc

    def run(self, longer):
        c, share = self.c, -(-self.total // self.programs)
        share += share // 16 if longer else 0  # as shares of whole tiles may be
        for program in reversed(range(self.programs)):
            unit = min(program * share, self.total)
            request = self.request_at(None, None, unit, 0, c)
            span = self.schedule.Span(program, unit, min(unit + share, self.total), share, request)
            tables = SimpleNamespace(mask=SimpleNamespace(window=self.window))
            pipeline, queries = SimpleNamespace(k=None, v=None), SimpleNamespace(p_shared=None)
            self.invariant.consume_invariant.fn(tables, queries, pipeline, None, None, span, c)
        assert not self.slots, "nothing is left behind"
        return self.written


@pytest.mark.parametrize("whole", [False, True])
def test_partial_states_are_stored_and_merged_alike(whole, monkeypatch, rng):
    """The kernel's own code runs with states that record what was merged into them: equal however work units are cut.
    Programs run in the order of their start, so that none waits for one that starts later.
    """
    for _ in range(60):
        group, window = rng.choice((1, 4)), rng.choice((-1, 70, 5000))
        heads, rows = rng.choice((1, 2, 3)), 32 if whole else 8
        c = SimpleNamespace(
            unit_size=128, block_n=64, run=8, whole_tiles=whole, tile_rows=rows if whole else 0, heads=heads,
            group=group, block_m=rows, partial_rows=rows, dim=128, stages=3, right=0, window=window >= 0, fp8=False,
        )  # fmt: skip
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
                runs = [[t0 for t0 in seen if t0 // 1024 == run] for run in range(stop // 1024 + 1)]
                nested = [
                    tuple(x for u in range(8 * n, 8 * n + 8) if (x := tuple(t for t in run if t // 128 == u)))
                    for n, run in enumerate(runs)
                ]
                for h in range(heads):
                    assert written[b, h, row] == tuple(x for x in nested if x)
                    tiles += 1
        assert len(written) == tiles
