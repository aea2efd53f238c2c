"""Runs that are repeated without the checks of the first: over other tensors, and over the tables of later plans."""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest
import torch

import quire
from quire.definition import PageTable
from quire.definition.pages import LengthTable
from quire.kernels import registry
from quire.wrappers.buffers import same

launch = pytest.importorskip("quire.kernels.gpu.launch")


def table_of(entries: int, device: str = "cpu") -> PageTable:
    counts = torch.tensor([0, entries // 2, entries], dtype=torch.int32, device=device)
    return PageTable(counts, torch.zeros(entries, dtype=torch.int32, device=device), counts[1:] * 0 + 1, 16)


class Compiled:
    """A kernel that only keeps what it is launched with."""

    function = packed_metadata = "the kernel"
    global_scratch_size, profile_scratch_size = 1, 0

    def __init__(self):
        self.run, self.launched = self, []

    def __call__(self, *given):
        self.launched.append(given[-6:])


def test_a_launch_over_another_page_table():
    """Its addresses and its number of page ids take the first one's place; all else stays."""
    first, second, part = table_of(8), table_of(20), torch.zeros(4)
    compiled = Compiled()
    others = (part, first.indptr, first.indices, first.last_page_len)
    repeat = launch.LaunchReplay(compiled, 1, others, (8, 0.5), entries=4)
    for which in (repeat, repeat.moved(first, second), repeat.moved(first, second).moved(second, first)):
        assert which(0, None, 0, 0, None, 0, None, None, 0)
    tables = [[x.data_ptr() for x in (y.indptr, y.indices, y.last_page_len)] for y in (first, second, first)]
    counts = (8, 20, 8)
    assert compiled.launched == [
        (part.data_ptr(), *addresses, count, 0.5) for addresses, count in zip(tables, counts, strict=True)
    ]
    assert not repeat(0, None, 8, 0, None, 0, None, None, 0), "an address that is not aligned"


def test_a_launch_that_read_no_pages_is_not_moved():
    first = table_of(8)
    others = (torch.zeros(4), first.indptr, first.indices, first.last_page_len)
    assert launch.LaunchReplay(Compiled(), 1, others, (0, 0.5), entries=4).moved(first, table_of(20)) is None


def test_a_launch_with_programs_for_few():
    first, second = table_of(8), table_of(20)
    others = (first.indptr, first.indices, first.last_page_len)
    repeat = launch.LaunchReplay(Compiled(), 1, others, (8,), entries=3)
    repeat.max_entries = 19
    assert repeat.moved(first, second) is None
    repeat.max_entries = 20
    assert repeat.moved(first, second).max_entries == 20


def test_a_launch_that_read_lengths():
    """It goes on with lengths, and only with those."""
    plain, lengths = table_of(20), [torch.tensor(x, dtype=torch.int32) for x in ([5, 64], [17, 3])]
    tables = zip((table_of(8), plain), lengths, strict=True)
    first, second = (LengthTable.of(t.indptr, t.indices, x, 16, "kv_lens") for t, x in tables)
    compiled, others = Compiled(), (torch.zeros(4), first.indptr, first.indices, first.kv_lens)
    repeat = launch.LaunchReplay(compiled, 1, others, (8, 0.5), entries=4)
    assert repeat.moved(first, second)(0, None, 0, 0, None, 0, None, None, 0)
    assert compiled.launched[0][1:4] == tuple(x.data_ptr() for x in (second.indptr, second.indices, second.kv_lens))
    assert repeat.moved(first, plain) is None
    others = (torch.zeros(4), plain.indptr, plain.indices, plain.last_page_len)
    assert launch.LaunchReplay(compiled, 1, others, (20, 0.5), entries=4).moved(plain, first) is None


class Repeat:
    """What remembers a run of a plan over some tables."""

    def __init__(self, table, done):
        self.table, self.done = table, done

    def __call__(self, *addresses):
        self.done.append(self.table)
        return True

    def moved(self, table, other):
        assert table is self.table
        return Repeat(other, self.done)


@pytest.fixture
def computed(monkeypatch):
    """The tables of (runs computed with all checks, runs replayed). Wrappers are patched to replay without a GPU."""
    first, again = [], []

    def attend(call, *given):
        first.append(call.kv)
        return Repeat(call.kv, again)

    monkeypatch.setattr("quire.wrappers.plan.attend", attend)
    monkeypatch.setattr(registry, "choose", lambda *given: "cpu")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return first, again


def test_plans_that_differ_in_tables_alone_repeat_runs(computed):
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="meta"))
    wrapper._replays.enabled = True
    bf16, first, again = torch.bfloat16, *computed
    q = torch.empty(2, 4, 64, dtype=bf16, device="meta")
    cache = torch.empty(9, 2, 16, 2, 64, dtype=bf16, device="meta")

    def plan(entries, **changes):
        table = table_of(entries, "meta")
        wrapper.plan(table.indptr, table.indices, table.last_page_len, 4, 2, 64, 16, q_data_type=bf16, **changes)
        return wrapper.planned.kv

    def runs():
        first.clear(), again.clear()
        for options in ({}, {"return_lse": True}, {}):
            wrapper.run(q, cache, **options)
        return [x.indices.shape[0] for x in first], [x.indices.shape[0] for x in again]

    plan(8)
    assert runs() == ([8, 8], [8])
    plan(12)
    assert runs() == ([], [12, 12, 12])
    plan(14), plan(16)
    assert runs() == ([], [16, 16, 16]), "a plan without runs is between"
    plan(16, window_left=5)
    assert runs() == ([16, 16], [16]), "another layer is checked anew"
    wrapper.reset_workspace_buffer(torch.empty(0, device="meta"), torch.empty(16, dtype=torch.uint8, device="meta"))
    plan(18, window_left=5)
    assert runs() == ([18, 18], [18]), "and so is other memory"


@pytest.mark.parametrize("kind", [float, np.int64, bool])
def test_what_equals_an_argument_has_not_been_checked(kind, computed):
    """Neither as a plan's, nor as a run's."""
    wrapper, table = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="meta")), table_of(8, "meta")
    wrapper._replays.enabled = True
    q, cache = torch.empty(2, 1, 64, device="meta"), torch.empty(9, 2, 16, 1, 64, device="meta")
    given = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 16, "window_left": 1}
    given |= {"q_len_per_req": 1, "q_data_type": torch.float32}
    tables = (table.indptr, table.indices, table.last_page_len)
    for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "window_left", "q_len_per_req"):
        if kind is bool and name in ("head_dim", "page_size"):
            continue  # True is neither
        wrapper.plan(*tables, **given)
        with pytest.raises(ValueError, match=name):
            wrapper.plan(*tables, **{**given, name: kind(given[name])})
    wrapper.plan(*tables, **given)
    first, again = computed
    for _ in range(2):
        for window in (1, kind(1)):
            wrapper.run(q, cache, window_left=window)
    assert (len(first), len(again)) == (2, 2), "kernels' own layers are checked below, once for each"
    latent = quire.mla.BatchMLAPagedAttentionWrapper(torch.empty(0, device="meta"))
    numbers = {"num_heads": 1, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 1}
    options = {"causal": True, "sm_scale": 0.1, "q_data_type": torch.float32, "kv_data_type": torch.float32}
    rows = torch.empty(3, dtype=torch.int32, device="meta")
    for name in numbers:
        latent.plan(rows, rows, rows, rows[1:], **numbers, **options)
        if kind is not bool or numbers[name] == 1:
            with pytest.raises(ValueError, match=f"{name} = |num_qo_heads = |head_dim_.. = "):
                latent.plan(rows, rows, rows, rows[1:], **{**numbers, name: kind(numbers[name])}, **options)


LAYER = {
    "num_qo_heads": 8, "num_kv_heads": 1, "head_dim": 128, "page_size": 8, "pos_encoding_mode": "ALIBI",
    "window_left": 5, "logits_soft_cap": 3.0, "q_data_type": "float16", "kv_data_type": "float8_e5m2",
    "o_data_type": "float32", "data_type": "float8_e4m3fn", "sm_scale": 0.5, "rope_scale": 2.0, "rope_theta": 5e5,
    "fixed_split_size": 512, "disable_split_kv": True, "q_len_per_req": 2, "head_dim_vo": 32, "window_right": 1,
    "is_causal": False, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYER)
def test_all_that_a_plan_says_of_its_layer_is_compared(name, computed):
    others = {"indptr", "indices", "last_page_len", "block_tables", "seq_lens", "non_blocking", "shared_prefix", "self"}
    assert set(LAYER) == set(signature(quire.BatchDecodeWithPagedKVCacheWrapper.plan).parameters) - others
    wrapper, table = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="meta")), table_of(8, "meta")
    given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_data_type": "bfloat16"}
    given |= {"pos_encoding_mode": "ALIBI"} if name == "alibi_slopes" else {}

    def plan(**layer):
        wrapper.plan(table.indptr, table.indices, table.last_page_len, **layer)
        return wrapper.planned.layer  # a plan that does all its work makes its own

    layer = plan(**given)
    assert plan(**given) is layer
    if name == "window_right":
        with pytest.raises(ValueError, match="window_right is not supported"):
            plan(**given, window_right=1)
    else:
        assert plan(**{**given, name: LAYER[name]}) is not layer


def test_plans_of_latent_caches_repeat_runs(computed):
    """Runs are replayed for other pages and lengths of as many requests with equal query rows."""
    wrapper = quire.mla.BatchMLAPagedAttentionWrapper(torch.empty(0, device="meta"))
    wrapper._replays.enabled = True
    bf16, first, again = torch.bfloat16, *computed
    q, q_pe = (torch.empty(2, 4, dim, dtype=bf16, device="meta") for dim in (512, 64))
    cache = [torch.empty(9, 16, dim, dtype=bf16, device="meta") for dim in (512, 64)]
    rows = torch.empty(3, dtype=torch.int32, device="meta")

    def runs(entries, rows=rows, sm_scale=0.1):
        table = table_of(entries, "meta")
        lengths = torch.empty(2, dtype=torch.int32, device="meta")
        first.clear(), again.clear()
        wrapper.plan(rows, table.indptr, table.indices, lengths, 4, 512, 64, 16, True, sm_scale, bf16, bf16)
        for _ in range(2):
            wrapper.run(q, q_pe, *cache)
        return [x.indices.shape[0] for x in first], [x.indices.shape[0] for x in again]

    assert runs(8) == ([8], [8])
    assert runs(12) == ([], [12, 12])
    assert runs(14, rows[:]) == ([], [14, 14]), "a view of the same rows"
    assert runs(16, torch.empty(6, dtype=torch.int32, device="meta")[::2]) == ([16], [16]), "other rows"
    assert runs(18, sm_scale=0.2) == ([18], [18]), "another layer"


def test_the_same_numbers():
    x = torch.arange(6)
    assert all(same(x[which], x[which]) for which in (slice(None), slice(2, 4), slice(None, None, 2)))
    for other in (x.clone(), x[1:], x[:5], x.view(2, 3), x.view(torch.float64), None):
        assert not same(other, x)
