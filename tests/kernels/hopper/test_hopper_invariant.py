"""Batch-invariant attention on Hopper GPUs, compared bit by bit; without a GPU, what is launched and compiled."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import quire
from helpers.families import BOUNDS, alone, check, compute, oracle_result
from helpers.hopper import Recorded, gpu
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import AttentionSpec, PageTable, RaggedLayout, attention_spec
from quire.kernels import registry
from quire.kernels.call import Call

hopper = pytest.importorskip("quire.kernels.hopper.host")
BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYERS = {
    "default": {},
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
    return attention_spec(
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


def few_tokens(spec: AttentionSpec) -> int:
    """Query tokens of a request up to which decode computes it."""
    return 64 // spec.group_size


class Expected:
    """The bits of all rows of a batch, as rows of requests of few query rows and, where a request has more, of many."""

    def __init__(self, batch: Batch) -> None:
        self.few, spec = few_tokens(batch.spec), batch.spec
        self.many = compute(batch, "hopper")
        check(batch, *self.many, "hopper")
        chunks, begins = [], batch.qo.indptr.tolist()
        for b, q_len in enumerate(batch.qo.lengths().tolist()):
            starts = range(0, q_len, self.few) if spec.mask.causal else (max(q_len - self.few, 0),)
            chunks += [(b, begin, min(begin + self.few, q_len)) for begin in starts]
        self.rows = [slice(n, m) for n, m in pairwise(begins)]
        rows = torch.cat([self.of(each) for each in chunks])
        self.short = tuple(torch.full_like(x, torch.nan) for x in self.many)
        got = compute(together([chunk(batch, *each) for each in chunks]), "hopper", max_q_len=self.few)
        for whole, x in zip(self.short, got, strict=True):
            whole[rows] = x
        assert relative_error(got[0], oracle_result(batch)[0][rows]) < BOUNDS["hopper"][spec.q_dtype]

    def of(self, chunk: tuple[int, int, int]) -> torch.Tensor:
        """The rows of a chunk (request, first token, end)."""
        b, begin, end = chunk
        return torch.arange(self.rows[b].start + begin, self.rows[b].start + end)

    def compare(self, batch: Batch, chunks: list[tuple[int, int, int]], max_q_len: int, **changes) -> None:
        """Chunks, computed together as requests of their own, have the bits of their rows."""
        got = compute(together([chunk(batch, *each) for each in chunks]), "hopper", max_q_len=max_q_len, **changes)
        at = 0
        for b, begin, end in chunks:
            expected = self.short if end - begin <= self.few else self.many
            for x, y in zip(got, expected, strict=True):
                part, whole = x[at : at + end - begin], y[self.of((b, begin, end))]
                assert torch.equal(part.view(torch.int32), whole.view(torch.int32)), (b, begin, end, max_q_len, chunks)
            at += end - begin


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(LAYERS))
def test_invariant_request_in_any_batch_has_equal_bits(name, shape, rng):
    """Computed whole and in chunks, alone and among short and long others, with the most query tokens known or not."""
    spec = layer(shape, **LAYERS[name])
    kv_lens = [rng.randint(8300, 9500), rng.randint(4100, 4400), rng.randint(200, 700), 1, 4096]
    q_lens = [rng.randint(70, 130), 40, rng.randint(130, 200), 1, 3]
    batch = random_batch(spec, q_lens, kv_lens, rng.choice((1, 16, 64)))
    batch.v[..., 3] = 0  # zeros have a sign
    expected, few = Expected(batch), few_tokens(spec)
    chunks = [(b, 0, q_len) for b, q_len in enumerate(q_lens)]
    if spec.mask.causal:
        chunks += [(b, rng.randrange(q_len), q_len) for b, q_len in enumerate(q_lens)]
        chunks += [(0, 3, 50), (2, 64, 100), (2, 5, 90), (0, 17, 18), (1, 0, 1), (2, 100, 100 + min(few, 30))]
    else:  # all see the keys of the last
        chunks += [(b, rng.randrange(q_len), q_len) for b, q_len in enumerate(q_lens)]
        chunks += [(b, q_len - min(few, q_len), q_len) for b, q_len in enumerate(q_lens)]
    for each in chunks:
        for known in {0, each[2] - each[1]}:
            expected.compare(batch, [each], known)
    short = [(b, max(begin, end - few), end) for b, begin, end in chunks]
    last = [(b, end - 1, end) for b, begin, end in chunks]
    for some in (chunks, short + chunks[::-1], short, last, last[:2] * 7, last[::-1] * 40):
        for known in (0, max(end - begin for _, begin, end in some)):
            expected.compare(batch, some, known)


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_invariant_decode_of_long_requests_in_any_batch_has_equal_bits(shape, rng):
    """Decoded by all programs, with few and with many others, and in whole tiles."""
    spec = layer(shape)
    few = few_tokens(spec)
    batch = random_batch(spec, [few] * 3, [60_001, 4095, 33_000], 16)
    batch.v[..., 3] = 0
    expected = Expected(batch)
    device = torch.device("cuda", 0)
    zeros = torch.zeros(32 << 20, dtype=torch.int32, device=device)
    for q_len in {1, min(few, 4), few}:
        for which in ([0], [2], [1, 0], [2, 0, 1] * 5, [1] * 300 + [0]):
            chunks = [(b, few - q_len, few) for b in which]
            keys = sum(-(-int(batch.kv.lengths()[b]) // 16) * 16 for b in which)
            size = hopper.FAMILY.int_workspace_size(spec, device, q_len, len(which), keys) // 4
            zeros[size:] = 7
            expected.compare(batch, chunks, q_len, int_workspace=zeros[:size])
            assert not zeros[:size].any()
            assert (zeros[size:] == 7).all()
            zeros[size:] = 0


@gpu
def test_invariant_run_over_ragged_rows_has_the_bits_of_pages(rng):
    batch = random_batch(layer((128, BF16, 2, 4)), [1, 100, 1, 1], [9000, 300, 1, 5000], 16)
    k, v, indptr = batch.rows()
    out, lse = compute(batch, "hopper")
    for known in (0, 100):
        got = compute(batch, "hopper", max_q_len=known, k=k, v=v, kv=RaggedLayout(indptr))
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)


@gpu
@pytest.mark.parametrize("q_lens", [[100, 0, 1, 4, 30, 0], [0, 3, 1], [90, 200], [0, 0]], ids=str)
def test_invariant_rows_without_keys_or_requests_are_zero(q_lens, rng):
    """One of the two launches writes them, whatever the others are; the int workspace is zeros afterwards."""
    batch = random_batch(layer((128, BF16, 2, 4)), q_lens, [200, 50, 0, 3, 0, 0][: len(q_lens)], 16, padding=5)
    zeros = torch.zeros(2 << 20, dtype=torch.int32, device="cuda")
    for known in {0, max(q_lens)}:
        for _ in range(2):
            out, lse = compute(batch, "hopper", max_q_len=known, int_workspace=zeros)
            check(batch, out, lse, "hopper")
            assert (out[sum(q_lens) :] == 0).all()
            assert (lse[sum(q_lens) :] == -torch.inf).all()
            assert not zeros.any()


@gpu
def test_invariant_decode_of_overlapping_tables_writes_inside_its_workspace(rng):
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
def test_invariant_wrappers_on_hopper_choose_hopper(rng):
    """Decode and prefill of one layer are computed by one family, whatever their rows, and whatever `plan` knows."""
    device = torch.device("cuda", 0)
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=BF16, batch_invariant=True)
    for max_q_len in (0, 1, 16, 17, 1000):
        assert registry.choose(spec, device, max_q_len=max_q_len).name == "hopper"
        assert registry.choose(spec.replace(pos_encoding="ALIBI"), device, max_q_len=max_q_len).name == "triton"
    batch = random_batch(spec, [100, 40, 1], [9000, 40, 700], 16, device="cuda")
    table, cache = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len), (batch.k, batch.v)
    results = []
    for qo_indptr in (batch.qo.indptr, batch.qo.indptr.cpu()):
        prefill = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), batch_invariant=True)
        prefill.plan(qo_indptr, *table, 8, 2, 128, 16, causal=True, q_data_type=BF16)
        assert prefill.backend == "hopper"
        results += [prefill.run(batch.q, cache) for _ in range(3)]
        assert len(prefill.planned.launches) == 1
    assert all(torch.equal(results[0], x) for x in results)
    assert relative_error(results[0], oracle_result(batch)[0]) < 3e-3
    # Requests of one query token, which two wrappers plan.
    last, ones = batch.qo.indptr[1:].long() - 1, torch.arange(4, dtype=torch.int32, device="cuda")
    decode = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), batch_invariant=True)
    decode.plan(*table, 8, 2, 128, 16, q_data_type=BF16)
    prefill.plan(ones, *table, 8, 2, 128, 16, causal=True, q_data_type=BF16)
    assert decode.backend == prefill.backend == "hopper"
    expected = prefill.run(batch.q[last], cache)
    assert torch.equal(expected[2], results[0][-1])
    for _ in range(3):
        assert torch.equal(decode.run(batch.q[last], cache), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "max_q_len", "spills"),
    [((128, BF16, 8, 4), 1, 16), ((64, BF16, 8, 4), 1, 16), ((128, E4M3, 8, 4), 1, 16), ((256, BF16, 8, 4), 1, 0),
     ((128, BF16, 8, 4), 0, 0), ((128, BF16, 8, 32), 0, 250)],
    ids=str,
)  # fmt: skip
def test_invariant_decode_kernels_compile_within_their_memory(shape, max_q_len, spills):
    """Many columns spill the states of runs and tiles, which blocks of keys do not touch."""
    from helpers.triton_compile import compile_decode

    spec = layer(shape)
    usage = compile_decode(spec, max_q_len)
    assert hopper.decode_host.tune(spec, max_q_len).programs * (usage.shared + 1024) <= 228 << 10
    assert usage.spills <= spills


def test_invariant_tuning_of_any_rows_has_equal_blocks():
    for shape in SHAPES:
        for max_q_len in (0, 1, 2, 4, 1000):
            tuning = hopper.decode_host.tune(layer(shape), max_q_len)
            assert tuning.block_n == 64
            assert tuning.stages >= 2


def test_invariant_workspace_size_is_at_most_128_mib():
    """Whole tiles have none."""
    for group, dim in ((4, 128), (64, 128), (16, 256)):
        spec = layer((dim, BF16, 8, group))
        assert 0 < hopper.decode_host.int_workspace_size(spec, 132, 1, 64, 64 << 12) <= 128 << 20
        assert hopper.decode_host.int_workspace_size(spec, 132, 0, 64, 64 << 12) == 0
        assert hopper.decode_host.int_workspace_size(spec, 132, 65, 64, 64 << 12) == 0


def split_of(c) -> tuple[int, int, bool, int]:
    """How a decode kernel's Config cuts tiles, and how far rows see to the right."""
    return c.tile.unit_size, c.split_group, c.schedule.whole_tiles, c.mask.right


def test_invariant_launch_passes_the_arguments_of_the_kernel(monkeypatch, rng):
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
    assert split_of(given["c"]) == (128, 8, False, -1)
    call.int_workspace = zeros[1:]
    hopper.decode_host.launch(call, batch.q, None, 132)
    assert Recorded.last["partials"].numel() == size
    call.max_q_len = 0
    hopper.decode_host.launch(call, batch.q, None, 132)
    given = Recorded.last
    assert given["programs"] == 264
    assert given["partials"] is None
    assert split_of(given["c"]) == (128, 8, True, 0)
    hopper.decode_host._launcher.cache_clear()


@pytest.mark.parametrize(
    ("group", "max_q_len", "names"),
    [(4, 1, ["decode"]), (4, 16, ["decode"]), (4, 17, ["prefill", "decode"]), (4, 0, ["prefill", "decode"]),
     (64, 1, ["decode"]), (65, 1, ["prefill"]), (65, 0, ["prefill"])],
)  # fmt: skip
def test_invariant_launch_starts_the_kernels_of_the_query_lengths(group, max_q_len, names, monkeypatch, rng):
    """The kernel of each request's length, and no other; between them they compute each request once."""
    launched = []

    class Named(Recorded):
        def __init__(self, kernel, constants, **options):
            super().__init__(kernel, constants, **options)
            self.kernel = kernel.__name__

        def __call__(self, *given):
            super().__call__(*given)
            launched.append((self.kernel, Recorded.last))

    for host in (hopper.decode_host, hopper.prefill_host):
        monkeypatch.setattr(host, "Launcher", Named)
        host._launcher.cache_clear()
    monkeypatch.setattr(hopper, "_processors", lambda device: 132)
    batch = random_batch(layer((128, BF16, 2, group)), [max_q_len or 30, 1], [200, 64], 16)
    call = Call(q=batch.q, k=batch.k, v=batch.v, qo=batch.qo, kv=batch.kv, spec=batch.spec, max_q_len=max_q_len)
    assert hopper.FAMILY.launch(call, batch.q, None) is None
    assert [name for name, _ in launched] == names
    schedules = [given["c"].schedule for _, given in launched]
    limits = [(x.min_q_len, x.max_q_len) for x in schedules]
    few = 64 // group
    assert limits == {1: [(few + 1, 0)] if names == ["prefill"] else [(0, 0)], 2: [(few + 1, 0), (0, few)]}[len(names)]
    for name, given in launched:
        assert name == "decode" or (given["partials"], given["slots"], given["c"].scheduler.split) == (None, 0, False)
    for host in (hopper.decode_host, hopper.prefill_host):
        host._launcher.cache_clear()
