"""Batch-invariant attention on Hopper GPUs, compared bit by bit; without a GPU, who stores and merges what."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import quire
from helpers.families import alone, check, compute
from helpers.hopper import Recorded, gpu
from quire.bench.batches import Batch, random_batch
from quire.definition import AttentionSpec, PageTable, RaggedLayout
from quire.kernels import registry
from quire.kernels.call import Call

hopper = pytest.importorskip("quire.kernels.hopper.host")
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
LAYERS = {
    "plain": {},
    "window": {"window_left": 5000},
    "narrow window": {"window_left": 70},
    "sinks and cap": {"sinks": True, "logits_soft_cap": 5.0},
    "mask": {"custom_mask": True},
    "not causal": {"causal": False},
}
# head_dim, dtype of the cache, KV heads, query heads of each
SHAPES = [
    (128, BF16, 2, 4),
    (128, BF16, 1, 16),
    (128, BF16, 3, 7),
    (128, E4M3, 2, 1),
    (128, E5M2, 2, 7),
    (64, BF16, 2, 4),
    (64, FP16, 1, 16),
    (256, BF16, 1, 4),
    (256, E4M3, 1, 1),
]


def layer(shape, **changes) -> AttentionSpec:
    dim, kv_dtype, kv_heads, group = shape
    return AttentionSpec(
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim_qk=dim,
        q_dtype=kv_dtype if kv_dtype.itemsize > 1 else BF16,
        kv_dtype=kv_dtype,
        o_dtype=torch.float32,
        batch_invariant=True,
        **changes,
    )


def chunk(batch: Batch, b: int, begin: int, end: int) -> Batch:
    """Query tokens begin to end of request b alone, with their rows of the mask."""
    part = alone(batch, b, begin, end)
    if batch.bool_mask is None:
        return part
    q_lens, kv_lens = batch.qo.lengths().tolist(), batch.kv.lengths().tolist()
    start = sum(q * kv for q, kv in zip(q_lens[:b], kv_lens[:b], strict=True))
    mask = batch.bool_mask[start : start + q_lens[b] * kv_lens[b]].view(q_lens[b], kv_lens[b])
    return replace(part, bool_mask=mask[begin:end, : int(part.kv.lengths()[0])].flatten())


def together(parts: list[Batch]) -> Batch:
    """Chunks as one batch over their common cache."""
    counts = torch.tensor([0, *(len(x.kv.indices) for x in parts)])
    table = PageTable(
        counts.cumsum(0).int(),
        torch.cat([x.kv.indices for x in parts]),
        torch.cat([x.kv.last_page_len for x in parts]),
        parts[0].kv.page_size,
    )
    qo = RaggedLayout.from_lengths(torch.tensor([len(x.q) for x in parts]).int())
    mask = None if parts[0].bool_mask is None else torch.cat([x.bool_mask for x in parts])
    return replace(parts[0], q=torch.cat([x.q for x in parts]), qo=qo, kv=table, bool_mask=mask)


def same(batch: Batch, chunks: list[tuple[int, int, int]], out, lse, max_q_len: int, **changes) -> None:
    """Chunks (request, first token, end), computed together, have the bits of the whole."""
    part = together([chunk(batch, *each) for each in chunks])
    begins = batch.qo.indptr.tolist()
    rows = torch.cat([torch.arange(begins[b] + begin, begins[b] + end) for b, begin, end in chunks])
    got, sums = compute(part, "hopper", max_q_len=max_q_len, **changes)
    assert torch.equal(got.view(torch.int32), out[rows].view(torch.int32)), (chunks, max_q_len)
    assert torch.equal(sums.view(torch.int32), lse[rows].view(torch.int32)), (chunks, max_q_len)


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(LAYERS))
def test_bits_do_not_depend_on_the_batch(name, shape, rng):
    """Prefilled whole and in chunks, decoded alone and among others, with the most query tokens known or not."""
    spec = layer(shape, **LAYERS[name])
    kv_lens = [rng.randint(8300, 9500), rng.randint(4100, 4400), rng.randint(200, 700), 1, 4096]
    q_lens = [rng.randint(70, 130), 40, rng.randint(130, 200), 1, 3]
    batch = random_batch(spec, q_lens, kv_lens, rng.choice((1, 16, 64)))
    batch.v[..., 3] = 0  # zeros have a sign
    out, lse = compute(batch, "hopper")
    check(batch, out, lse, "hopper")
    few = max(1, 64 // spec.group_size)
    if spec.causal:
        chunks = [(b, begin, q_len) for b, q_len in enumerate(q_lens) for begin in {0, rng.randrange(q_len)}]
        chunks += [(0, 3, 50), (2, 64, 100), (0, 17, 18), (1, 0, 1), (2, 100, 100 + min(few, 30))]
    else:  # all see the keys of the last
        chunks = [(b, rng.randrange(q_len), q_len) for b, q_len in enumerate(q_lens)]
        chunks += [(b, q_len - min(few, q_len), q_len) for b, q_len in enumerate(q_lens)]
    for each in chunks:
        for known in {0, each[2] - each[1]}:
            same(batch, [each], out, lse, known)
    short = [(b, max(begin, end - few), end) for b, begin, end in chunks]
    last = [(b, end - 1, end) for b, begin, end in chunks]
    for some in (short, last, last[:2] * 7, last[::-1] * 40):
        for known in (0, max(end - begin for _, begin, end in some)):
            same(batch, some, out, lse, known)


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_long_requests_with_partial_states(shape, rng):
    """Decoded by all programs, with few and with many others, and prefilled."""
    spec = layer(shape)
    few = max(1, 64 // spec.group_size)
    batch = random_batch(spec, [few, few, few + 1], [60_001, 4095, 33_000], 16)
    batch.v[..., 3] = 0
    out, lse = compute(batch, "hopper")
    check(batch, out, lse, "hopper")
    device = torch.device("cuda", 0)
    zeros = torch.zeros(32 << 20, dtype=torch.int32, device=device)
    for q_len in {1, min(few, 4), few}:
        for which in ([0], [2], [1, 0], [2, 0, 1] * 5, [1] * 300 + [0]):
            chunks = [(b, int(batch.qo.lengths()[b]) - q_len, int(batch.qo.lengths()[b])) for b in which]
            keys = sum(-(-int(batch.kv.lengths()[b]) // 16) * 16 for b in which)
            size = hopper.FAMILY.int_workspace_size(spec, device, q_len, len(which), keys) // 4
            zeros[size:] = 7
            same(batch, chunks, out, lse, q_len, int_workspace=zeros[:size])
            assert not zeros[:size].any()
            assert (zeros[size:] == 7).all()
            zeros[size:] = 0


@gpu
def test_rows_that_are_not_in_pages(rng):
    batch = random_batch(layer((128, BF16, 2, 4)), [1, 1, 1], [9000, 1, 5000], 16)
    k, v, indptr = batch.rows()
    out, lse = compute(batch, "hopper")
    for known in (0, 1):
        got = compute(batch, "hopper", max_q_len=known, k=k, v=v, kv=RaggedLayout(indptr))
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)


@gpu
def test_zeros_end_where_it_was_said_to(rng):
    """Requests whose tables overlap have more keys together, and so more partial states, than a plan can know of."""
    spec, device = layer((128, BF16, 2, 4)), torch.device("cuda", 0)
    batch = random_batch(spec, [1] * 6, [9000, 1, 1, 1, 1, 1], 16)
    every = int(batch.kv.indptr[-1])
    batch.kv.indptr.copy_(torch.tensor([0, every, 0, every, 0, every, 0]))
    size = hopper.FAMILY.int_workspace_size(spec, device, 1, 6, every * 16) // 4
    memory = torch.full((size + 100_000,), 7, dtype=torch.int32, device=device)
    memory[:size] = 0
    compute(batch, "hopper", max_q_len=1, int_workspace=memory[:size])
    assert (memory[size:] == 7).all()
    assert not memory[:size].any()


@gpu
def test_wrappers_choose_it(rng):
    """Decode and prefill of one layer are computed by one family, whatever their rows."""
    device = torch.device("cuda", 0)
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=BF16, batch_invariant=True)
    for max_q_len in (0, 1, 16, 17, 1000):
        assert registry.choose(spec, device, max_q_len=max_q_len) == "hopper"
        assert registry.choose(spec.but(pos_encoding="ALIBI"), device, max_q_len=max_q_len) == "triton"
    batch = random_batch(spec, [100, 40], [9000, 40], 16, device="cuda")
    table = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)
    prefill = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), batch_invariant=True)
    prefill.plan(batch.qo.indptr, *table, 8, 2, 128, 16, causal=True, q_data_type=BF16)
    decode = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), batch_invariant=True)
    decode.plan(*table, 8, 2, 128, 16, q_data_type=BF16)
    assert prefill.backend == decode.backend == "hopper"
    last = batch.qo.indptr[1:].long() - 1
    whole, cache = prefill.run(batch.q, (batch.k, batch.v)), (batch.k, batch.v)
    for _ in range(3):
        assert torch.equal(decode.run(batch.q[last], cache), whole[last])


@pytest.mark.parametrize(
    ("shape", "max_q_len", "spills"),
    [((128, BF16, 8, 4), 1, 16), ((64, BF16, 8, 4), 1, 16), ((128, E4M3, 8, 4), 1, 16), ((256, BF16, 8, 4), 1, 0),
     ((128, BF16, 8, 4), 0, 250)],
    ids=str,
)  # fmt: skip
def test_kernels_compile(shape, max_q_len, spills):
    """Many columns spill the states of runs and tiles, which blocks of keys do not touch."""
    from helpers.triton_compile import compile_decode

    spec = layer(shape)
    usage = compile_decode(spec, max_q_len)
    assert hopper.decode_host.tune(spec, max_q_len).programs * (usage.shared + 1024) <= 228 << 10
    assert usage.spills <= spills


def test_blocks_are_alike_whatever_the_rows():
    for shape in SHAPES:
        for max_q_len in (0, 1, 2, 4, 1000):
            tuning = hopper.decode_host.tune(layer(shape), max_q_len)
            assert tuning.block_n == 64
            assert tuning.stages >= 2


def test_partial_states_take_128_mib_at_most():
    """Whole tiles have none."""
    for group, dim in ((4, 128), (64, 128), (16, 256)):
        spec = layer((dim, BF16, 8, group))
        assert 0 < hopper.decode_host.int_workspace_size(spec, 132, 1, 64, 64 << 12) <= 128 << 20
        assert hopper.decode_host.int_workspace_size(spec, 132, 0, 64, 64 << 12) == 0
        assert hopper.decode_host.int_workspace_size(spec, 132, 65, 64, 64 << 12) == 0


def test_what_a_launch_passes_is_what_the_kernel_takes(monkeypatch, rng):
    """Decode has memory for partial states; whole tiles need none."""
    monkeypatch.setattr(hopper.decode_host, "Launcher", Recorded)
    hopper.decode_host._launcher.cache_clear()
    batch = random_batch(layer((128, BF16, 2, 4)), [1, 1], [9000, 64], 16)
    size = hopper.decode_host.int_workspace_size(batch.spec, 132, 1, 2, len(batch.kv.indices) * 16) // 4
    zeros = torch.zeros(size, dtype=torch.int32)
    call = Call(
        q=batch.q, k=batch.k, v=batch.v, qo=batch.qo, kv=batch.kv, spec=batch.spec, max_q_len=1, int_workspace=zeros
    )
    hopper.decode_host.launch(call, batch.q, None, 132)
    given = Recorded.last
    assert given["programs"] == 132
    assert given["partials"] is zeros
    assert size == given["slots"] * 4 * 130
    assert (given["c"].unit_size, given["c"].run, given["c"].whole_tiles, given["c"].right) == (128, 8, False, -1)
    call.int_workspace = zeros[1:]
    hopper.decode_host.launch(call, batch.q, None, 132)
    assert Recorded.last["partials"].numel() == size
    call.max_q_len = 0
    hopper.decode_host.launch(call, batch.q, None, 132)
    given = Recorded.last
    assert given["programs"] == 264
    assert given["partials"] is None
    assert (given["c"].unit_size, given["c"].run, given["c"].whole_tiles, given["c"].right) == (128, 8, True, 0)
    hopper.decode_host._launcher.cache_clear()


class Simulated:
    """Programs of a launch one after another, as they start; states are tuples of what was folded into them."""

    def __init__(self, monkeypatch, c, requests, programs, window):
        from quire.kernels.hopper import mask, schedule
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

    def attend_keys(self, queries, rows, request, pipeline, start, end, n, mask, c):
        here = tuple(range(start, end, c.block_n))
        loaded, self.blocks = tuple(self.blocks[: len(here)]), self.blocks[len(here) :]
        assert here == loaded
        return here, 0, 0, n + len(here)

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
