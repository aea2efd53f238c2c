"""Cells, timing and the tables made of them."""

from __future__ import annotations

import math
import re
import time
from types import SimpleNamespace

import pytest
import torch

import quire
from quire.bench import calls, cpu, dense
from quire.bench.calls import Sample, planned
from quire.bench.cells import Cell


def test_cell_parse_of_names_returns_their_fields():
    assert Cell.parse("decode gqa4 p16 8x2k") == Cell("decode", 8, 2048)
    assert Cell.parse("decode mha p1 fp8 64 mixed 256k") == Cell(
        "decode", 64, 256 * 1024, num_kv_heads=32, page_size=1, dtype="fp8", mixed=True
    )
    assert Cell.parse("prefill ragged 28:4 d64 8x512") == Cell(
        "prefill", 8, 512, q_len=512, num_qo_heads=28, num_kv_heads=4, head_dim=64, ragged=True
    )
    assert Cell.parse("decode mla128 p64 64x4k") == Cell(
        "decode", 64, 4096, num_qo_heads=128, num_kv_heads=1, head_dim=576, page_size=64, latent=True
    )
    assert Cell.parse("prefill 4x256@2k") == Cell("prefill", 4, 2048, q_len=256)
    assert Cell.parse("prefill 4x256@2k device") == Cell("prefill", 4, 2048, q_len=256, device_tables=True)
    mixed = Cell.parse("prefill p16 3x1@4k+2x500@4k+1x7")
    assert mixed == Cell("prefill", 3, 4096, q_len=1, more=((2, 500, 4096), (1, 7, 7)))
    assert (mixed.q_lens, mixed.kv_lens) == ([1, 1, 1, 500, 500, 7], [4096] * 5 + [7])
    assert mixed.tokens == 5 * 4096 + 7
    assert not mixed.whole


@pytest.mark.parametrize(
    "name",
    ["", "paint 8x2k", "decode", "decode 8x", "decode 0x5", "decode gqa5 8x2k", "decode 8"]
    + [f"decode mla2 {word} 2x9" for word in ("ragged", "d64", "gqa4")],
)
def test_cell_parse_of_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="cell"):
        Cell.parse(name)


NONSENSE = [
    *("decode p0 2x16", "decode 0:0 2x16", "decode 4:0 2x9", "decode 0:4 2x9", "decode mla0 2x9", "decode 7:2 2x9"),
    *("decode d0 2x9", "decode d7 2x9", "decode d1000 2x9", "decode 2x0", "decode 0x2", "prefill 0x0@5"),
    *("prefill 2x0@5", "prefill 2x9@4", "decode 2x4@9", "decode 64 256k", "decode 8x2k mixed", "decode 64 mixed 63"),
    *("decode 2x3+2x5", "prefill 2x3@9+0x5", "prefill 2x3@9+1x7@6", "prefill 2x3++2x5", "prefill 2x3+5"),
    *("decode 2x3 device", "prefill mla2 2x3 device", "prefill 2x3 device device", "prefill 2x3+9999999x99999999"),
    *("decode mixed 5", "decode 5 mixed", "decode 3 mixed 9 9", "decode 3x3 4x4", "prefill 3 mixed 9"),
    *(
        "decode 9999999999999999x1",
        "decode 2x9999999999999999k",
        "decode p99999999999 2x9",
        "decode 64k mixed 9999999k",
    ),
    *(
        "decode fp8 bf16 2x9",
        "decode mha gqa4 2x9",
        "decode d64 d64 2x9",
        "decode p1 p1 2x9",
        "decode -1x5",
        "decode p-1 2x9",
    ),
]


@pytest.mark.parametrize("name", NONSENSE)
def test_cell_parse_of_an_impossible_cell_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^{re.escape(f'cell {name!r}: ')}"):
        Cell.parse(name)


def test_cell_parse_of_random_words_makes_a_batch_or_is_refused(rng):
    words = ["p0", "p1", "p16", "d8", "d12", "0:1", "2:1", "3:2", "mla2", "mla0", "fp32", "fp8", "ragged"]
    sizes = ["2x3", "0x3", "2x0", "2x3@5", "2x5@3", "5 mixed 9", "5 mixed 3", "5 3", "mixed", "2x1@7+1x5", "2x3 device"]
    made = 0
    for _ in range(400):
        name = " ".join([rng.choice(("decode", "prefill")), *rng.sample(words, rng.randint(0, 3)), rng.choice(sizes)])
        try:
            cell = Cell.parse(name)
        except ValueError:
            continue
        batch = cell.make()
        lengths = batch.kv.lengths()
        assert (len(lengths), int(lengths.sum())) == (len(cell.q_lens), cell.tokens)
        assert batch.qo.lengths().tolist() == cell.q_lens
        assert bool((lengths >= batch.qo.lengths()).all())
        assert cell.kv_bytes(batch) > 0
        assert cell.flops(batch) > 0
        made += 1
    assert made > 10


def test_cell_of_mixed_lengths_has_their_sum():
    lengths = Cell.parse("decode 64 mixed 32k").kv_lens
    assert len(lengths) == 64
    assert sum(lengths) == 32 * 1024
    assert min(lengths) >= 1
    assert max(lengths) > 4 * min(lengths)


def test_cell_bytes_and_flops_equal_numbers_by_hand():
    cell = Cell.parse("decode 4:2 d8 p4 3x10")
    assert cell.kv_bytes(cell.make()) == 3 * 10 * 2 * (8 + 8) * 2
    cell = Cell.parse("decode mla3 p4 3x10")
    assert cell.kv_bytes(cell.make()) == 3 * 10 * (512 + 64) * 2
    cell = Cell.parse("prefill 4:2 d8 2x3@5")
    assert cell.flops(cell.make()) == 2 * (3 + 4 + 5) * 4 * 4 * 8
    cell = Cell.parse("prefill 4:2 d8 2x3@5+1x2+1x1@6")
    assert cell.flops(cell.make()) == (2 * (3 + 4 + 5) + (1 + 2) + 6) * 4 * 4 * 8


def test_medians_of_two_calls_times_them_in_turns():
    order = []
    fast, slow = cpu.medians([lambda: order.append("a"), lambda: (order.append("b"), time.sleep(0.01))], 3)
    assert order == ["a", "b"] * 4
    assert fast < slow
    assert slow >= 0.01


@pytest.mark.parametrize(
    "name",
    ["decode 4:2 d64 5x100", "decode 6:2 d64 p4 5 mixed 300", "prefill 4:2 d64 3x20", "prefill 4:2 d64 3x20@50"],
)
def test_torch_baseline_of_a_cell_equals_quire(name):
    cell = Cell.parse(name)
    batch = cell.make()
    ours, theirs = planned(cell, batch, "auto")(batch.k, batch.v), cpu._torch(cell, batch)()
    if cell.operation == "prefill":
        theirs = theirs.transpose(1, 2).reshape(ours.shape)
    torch.testing.assert_close(theirs, ours, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["decode 4:2 d64 fp8 2x20", "prefill 4:2 d64 2x1@20+1x5"])
def test_measure_of_a_cell_without_a_torch_baseline_has_no_torch_time(name):
    row = cpu.measure(name, rounds=1)
    assert row["torch_ms"] is None
    assert row["error"] < 3e-3


@pytest.mark.parametrize(
    "name",
    ["prefill 4:2 d64 3x20", "prefill p4 12:2 d64 2x600@700", "prefill p4 8:1 d64 1x1@50+2x300", "decode mla3 p4 3x40"],
)
def test_sample_of_a_batch_equals_the_oracle(name):
    batch = Cell.parse(name).make()
    exact, _ = batch.exact()
    sample = Sample.of(batch)
    torch.testing.assert_close(sample.exact, exact[sample.rows][:, sample.heads], rtol=1e-9, atol=1e-9)
    assert sample.error(exact) < 1e-12
    assert {0, len(exact) - 1} <= set(sample.rows.tolist())
    kv_head = sample.heads * batch.spec.num_kv_heads // batch.spec.num_qo_heads
    assert kv_head.unique().tolist() == list(range(batch.spec.num_kv_heads))
    wrong = exact.clone()
    wrong[sample.rows[-1], sample.heads[-1]] += 1
    assert sample.error(wrong) > 1e-3
    wrong[sample.rows[0], sample.heads[0]] = torch.nan
    assert math.isnan(sample.error(wrong))


def test_sampled_rows_of_long_requests_are_few():
    assert calls._sampled_rows(16384, 16384) == [(0, 32), (16352, 16384)]
    assert calls._sampled_rows(1, 1 << 20) == [(0, 1)]
    assert calls._sampled_rows(250, 300) == [(0, 250)]


@pytest.mark.parametrize("word", ["", " device"])
def test_planned_device_cell_gets_no_host_copy_of_qo_indptr(word, monkeypatch):
    """The host has no copy of qo_indptr in a `device` cell; elsewhere plan gets one."""
    given, cell = [], Cell.parse(f"prefill 4:2 d64 3x4@9{word}")

    class Wrapper(quire.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args, **options):
            given.append(args)

    batch = cell.make()
    copies = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.clone()) or copies[-1])
    plan, _ = calls.prepared(cell, batch, SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    plan()
    (qo_indptr, *tables) = given[0][:4]
    assert (qo_indptr is batch.qo.indptr) == bool(word)
    assert (not copies) == bool(word)
    assert qo_indptr.tolist() == [0, 4, 8, 12]
    assert all(x is y for x, y in zip(tables, (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len), strict=True))


def test_dense_decode_beyond_its_bytes_is_none():
    batch = Cell.parse("decode 4:2 d64 3x100").make()
    needed = 2 * 3 * 100 * 2 * 64 * 2
    assert dense.decode(batch, needed) is not None
    assert dense.decode(batch, needed - 1) is None


def test_listed_cells_are_parsed_and_different():
    pytest.importorskip("triton")
    from quire.bench import gpu

    for names in (cpu.DECODE, cpu.PREFILL, gpu.DECODE, gpu.PREFILL):
        assert len(set(map(Cell.parse, names))) == len(names)
