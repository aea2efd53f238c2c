"""Attention over the rows of a block table, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.block_tables import block_table_of
from helpers.interpret import INTERPRETED
from quire import BlockTableAttention
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import attention_spec
from quire.definition.block_tables import block_table, row_starts, rows_in_place
from quire.kernels import registry
from quire.kernels.call import Call

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def planned(batch: Batch, device: str, width: int = 0, **options: Any) -> BlockTableAttention:
    """A wrapper with a plan of a batch, whose block table has `width` pages per row more than needed."""
    spec, layout = batch.spec, options.pop("kv_layout", "NHD")
    wrapper = BlockTableAttention(torch.empty(0, device=device), layout)
    wrapper.plan(
        *(x.to(device) for x in block_table_of(batch, width)), spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk,
        batch.kv.page_size, head_dim_vo=spec.head_dim_vo, q_data_type=spec.q_dtype, kv_data_type=spec.kv_dtype,
        window_left=spec.mask.window_left, logits_soft_cap=spec.logits_soft_cap, **options,
    )  # fmt: skip
    return wrapper


@devices
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_plan_ragged_queries_gives_the_oracles_output(device, kv_layout, rng):
    spec = attention_spec(
        num_qo_heads=6, num_kv_heads=2, head_dim_qk=32, head_dim_vo=24, q_dtype=torch.float32,
        window_left=rng.choice((-1, 19)), logits_soft_cap=rng.choice((0.0, 7.0)), sinks=True,
    )  # fmt: skip
    batch = random_batch(spec, [1, 9, 5, 0, 2], [50, 9, rng.randrange(5, 60), 7, 0], 16, kv_layout=kv_layout)
    wrapper = planned(
        batch, device, 3, qo_indptr=batch.qo.indptr.to(device), max_q_len=9, kv_layout=kv_layout
    )  # fmt: skip
    cache = tuple(x.to(device) if kv_layout == "NHD" else x.transpose(1, 2).to(device) for x in (batch.k, batch.v))
    assert batch.sinks is not None
    out, lse = wrapper.run(batch.q.to(device), cache, sinks=batch.sinks.to(device), return_lse=True)
    exact, exact_lse = batch.exact()
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-5, atol=1e-5)


@devices
def test_plan_equal_queries_gives_the_oracles_output(device, rng):
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.float32)
    for q_len in (1, 3):
        batch = random_batch(spec, [q_len] * 4, [rng.randrange(q_len, 70) for _ in range(4)], 8)
        wrapper = planned(batch, device, 2, q_len_per_req=q_len)
        assert wrapper.planned.max_q_len == q_len
        out = wrapper.run(batch.q.to(device), (batch.k.to(device), batch.v.to(device)))
        torch.testing.assert_close(out.cpu().double(), batch.exact()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.interpret(family=["triton"])
@pytest.mark.parametrize("family", ["triton"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("page_size", [4, 16])
def test_rows_in_place_are_read_by_kernels_for_gpus(family, q_len, page_size, rng):
    if not INTERPRETED:
        pytest.skip("kernels that read rows in place run on a GPU or interpreted")
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, q_dtype=torch.float32)
    batch = random_batch(spec, [q_len] * 3, [rng.randrange(q_len, 40) for _ in range(3)], page_size)
    table = rows_in_place(*block_table_of(batch, 2), page_size)
    out, lse = torch.full_like(batch.q, torch.nan), torch.full(batch.q.shape[:2], torch.nan)
    call = Call(batch.q, batch.k, batch.v, batch.qo, table, spec, max_q_len=q_len)
    registry.admit(call, family).attend(call, out, lse)
    exact, exact_lse = batch.exact()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_block_table_on_the_host_checks_lengths():
    with pytest.raises(ValueError, match=r"lengths\[1\] = 33 is out of range: 0 to max_pages \* page_size = 32"):
        block_table(ints(0, 1, 2, 3).view(2, 2), ints(5, 33), 16)


@pytest.mark.parametrize(
    ("tables", "lengths", "words"),
    [
        (torch.zeros(2, 3), ints(1, 1), "block_tables has shape [2, 3]"),
        ([1, 2], ints(1, 1), "block_tables has shape list"),
        (torch.zeros(3, 2, dtype=torch.int32).T, ints(1, 1), "block_tables has strides [1, 2]"),
        (torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int64), "seq_lens is torch.int64"),
        (torch.zeros(2, 3, dtype=torch.int32), ints(1), "seq_lens has 1 entries: 2 are needed"),
        (torch.zeros(2, 3, dtype=torch.int32), ints(1, 9, 1, 9)[::2], "seq_lens has strides [2]"),
    ],
)
def test_block_table_of_wrong_tensors_is_refused(tables, lengths, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        block_table(tables, lengths, 4)
    assert words in str(error.value)


def test_row_starts_of_fewer_rows_are_a_part_of_the_kept_ones():
    first = row_starts(torch.device("cpu"), 5, 7)
    assert first.tolist() == [0, 7, 14, 21, 28, 35]
    assert row_starts(torch.device("cpu"), 900, 7).data_ptr() == first.data_ptr()
    assert row_starts(torch.device("cpu"), 2000, 7)[-1] == 14000
    assert row_starts(torch.device("cpu"), 0, 7).tolist() == [0]


@pytest.mark.gpu
def test_graph_of_a_plan_sees_later_tables_and_does_not_wait(rng):
    """One captured run computes every batch whose tables are written into the tensors of its plan."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, q_dtype=torch.bfloat16)
    count, width, pages = 6, 12, 80
    table, lengths = torch.zeros(count, width + 4, dtype=torch.int32, device="cuda"), torch.zeros(count).int().cuda()
    cache = torch.randn(pages, 2, 16, 2, 128, device="cuda").bfloat16()
    q, out = torch.empty(count, 8, 128, device="cuda").bfloat16(), torch.empty(count, 8, 128, device="cuda").bfloat16()
    wrapper = BlockTableAttention(torch.empty(0, device="cuda"))
    rows = table[:, :width]
    layer = (rows, lengths, 8, 2, 128, 16)
    wrapper.plan(*layer)
    wrapper.run(q, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrapper.plan(*layer)
        with torch.cuda.graph(graph):
            wrapper.run(q, cache, out=out)
        wrapper.plan(rows[:2], lengths[:2], 8, 2, 128, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        batch = random_batch(spec, [1] * count, [rng.randrange(1, width * 16) for _ in range(count)], 16)
        values, filled = block_table_of(batch)
        table[:, : values.shape[1]] = values.cuda()
        lengths.copy_(filled)
        q.copy_(batch.q)
        cache.fill_(torch.nan)
        cache[: len(batch.k), 0], cache[: len(batch.v), 1] = batch.k.cuda(), batch.v.cuda()
        graph.replay()
        assert relative_error(out.cpu(), batch.exact()[0]) < 3e-3
