"""Cells, timing and the tables made of them."""

from __future__ import annotations

import time

import pytest
import torch

from quire.bench import cpu, dense
from quire.bench.calls import planned
from quire.bench.cells import Cell


def test_cells_from_their_names():
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
    assert Cell.parse("prefill p16 4x256@2k").shape == "4x256@2k"
    assert Cell.parse("decode 28:4 p1 d64 fp8 64 mixed 256k").shape == "64 mixed 256k"


@pytest.mark.parametrize(
    "name",
    ["", "paint 8x2k", "decode", "decode 8x", "decode 0x5", "decode gqa5 8x2k", "decode 8"]
    + [f"decode mla2 {word} 2x9" for word in ("ragged", "d64", "gqa4")],
)
def test_names_that_are_not_understood(name):
    with pytest.raises(ValueError, match="cell"):
        Cell.parse(name)


def test_mixed_lengths_add_up():
    lengths = Cell.parse("decode 64 mixed 32k").kv_lens
    assert len(lengths) == 64
    assert sum(lengths) == 32 * 1024
    assert min(lengths) >= 1
    assert max(lengths) > 4 * min(lengths)


def test_bytes_and_operations_by_hand():
    cell = Cell.parse("decode 4:2 d8 p4 3x10")
    assert cell.kv_bytes(cell.make()) == 3 * 10 * 2 * (8 + 8) * 2
    cell = Cell.parse("decode mla3 p4 3x10")
    assert cell.kv_bytes(cell.make()) == 3 * 10 * (512 + 64) * 2
    cell = Cell.parse("prefill 4:2 d8 2x3@5")
    assert cell.flops(cell.make()) == 2 * (3 + 4 + 5) * 4 * 4 * 8


def test_medians_take_turns():
    order = []
    fast, slow = cpu.medians([lambda: order.append("a"), lambda: (order.append("b"), time.sleep(0.01))], 3)
    assert order == ["a", "b"] * 4
    assert fast < slow
    assert slow >= 0.01


@pytest.mark.parametrize(
    "name",
    ["decode 4:2 d64 5x100", "decode 6:2 d64 p4 5 mixed 300", "prefill 4:2 d64 3x20", "prefill 4:2 d64 3x20@50"],
)
def test_torchs_way_computes_the_same(name):
    cell = Cell.parse(name)
    batch = cell.make()
    ours, theirs = planned(cell, batch, "auto")(batch.k, batch.v), cpu._torch(cell, batch)()
    if cell.operation == "prefill":
        theirs = theirs.transpose(1, 2).reshape(ours.shape)
    torch.testing.assert_close(theirs, ours, rtol=2e-2, atol=2e-2)


def test_cells_that_torch_has_not():
    row = cpu.measure("decode 4:2 d64 fp8 2x20", rounds=1)
    assert row["torch_ms"] is None
    assert row["error"] < 3e-3


def test_dense_copies_may_be_too_large():
    batch = Cell.parse("decode 4:2 d64 3x100").make()
    needed = 2 * 3 * 100 * 2 * 64 * 2
    assert dense.decode(batch, needed) is not None
    assert dense.decode(batch, needed - 1) is None


def test_every_listed_cell_is_understood():
    for name in (*cpu.DECODE, *cpu.PREFILL):
        Cell.parse(name)
