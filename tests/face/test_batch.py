"""Mixed batches planned at once, and sinks, against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quire as flashinfer
from helpers.interpret import INTERPRETED
from quire.bench.batches import random_batch, relative_error
from quire.definition import PageTable, attention_spec

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SPEC = attention_spec(num_qo_heads=6, num_kv_heads=2, head_dim_qk=32, head_dim_vo=24, q_dtype=torch.float32)
SHAPE = (6, 2, 32, 24)


@pytest.fixture
def batch(rng):
    """A decode, a prefill, a chunk, and requests without queries or keys."""
    return random_batch(SPEC, [1, 9, 5, 0, 2], [50, 9, rng.randrange(5, 60), 7, 0], rng.choice((1, 4, 16)))


def tables(batch, device):
    """The tables of a batch with more pages than the lengths fill, which nothing may read."""
    pages = [x.tolist() for x in batch.kv.indices.tensor_split(batch.kv.indptr[1:-1].long())]
    spare = [[*own, *([1 << 30] * extra)] for own, extra in zip(pages, (0, 2, 1, 0, 3), strict=True)]
    indptr = torch.tensor([0, *(len(own) for own in spare)]).cumsum(0)
    indices = torch.tensor([page for own in spare for page in own])
    return [x.int().to(device) for x in (batch.qo.indptr, indptr, indices, batch.kv.lengths())]


def inputs(batch, device):
    return batch.q.to(device), (batch.k.to(device), batch.v.to(device))


def assert_is(result, exact):
    for a, b in zip(result, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("causal", [False, True])
def test_batch_attention_of_a_mixed_batch_matches_the_oracle(causal, device, batch):
    wrapper = flashinfer.BatchAttention(device=device)
    wrapper.plan(*tables(batch, device), *SHAPE, batch.kv.page_size, causal, None, 20.0, torch.float32, torch.float32)
    wrapper.prewarm_paged_kv_stride_variant()
    q, cache = inputs(batch, device)
    for cap, given in ((20.0, {}), (20.0, {"logits_soft_cap": 20.0}), (3.0, {"logits_soft_cap": 3.0})):
        exact = replace(batch, spec=SPEC.replace(causal=causal, logits_soft_cap=cap)).exact()
        assert_is(wrapper.run(q, cache, **given), exact)
    out, lse = torch.full((17, 6, 24), torch.nan, device=device), torch.full((17, 6), torch.nan, device=device)
    result = wrapper.run(q, cache, out, lse, k_scale=0.5, v_scale=torch.tensor([2.0, 3.0], device=device))
    assert result[0] is out
    assert result[1] is lse
    scales = {"k_scale": 0.5, "v_scale": torch.tensor([2.0, 3.0])}
    assert_is(result, replace(batch, spec=SPEC.replace(causal=causal, logits_soft_cap=20.0), **scales).exact())


@devices
def test_plan_with_tables_on_two_devices_matches_the_oracle(device, batch):
    """Offsets may lie on the host, where engines count, and page ids on the device."""
    qo_indptr, kv_indptr, kv_indices, kv_len = tables(batch, "cpu")
    wrapper = flashinfer.BatchAttention("NHD", device)
    layer = {"causal": True, "q_data_type": torch.float32, "kv_data_type": torch.float32}
    wrapper.plan(qo_indptr, kv_indptr, kv_indices.to(device), kv_len, *SHAPE, batch.kv.page_size, **layer)
    assert_is(wrapper.run(*inputs(batch, device)), batch.exact())


@devices
def test_plan_with_wrong_lengths_in_checked_mode_is_refused(device, batch, monkeypatch):
    monkeypatch.setenv("QUIRE_CHECK", "1")
    wrapper, given = flashinfer.BatchAttention("NHD", device), tables(batch, device)
    rest = (*SHAPE, batch.kv.page_size, True, None, None, torch.float32, torch.float32)
    wrapper.plan(*given, *rest)
    assert_is(wrapper.run(*inputs(batch, device)), batch.exact())
    given[3][0] = 1 << 20
    with pytest.raises(ValueError, match=r"kv_len_arr\[0\] = 1048576 is out of range"):
        wrapper.plan(*given, *rest)


@pytest.mark.gpu
def test_plan_does_not_wait_for_the_device(batch):
    wrapper, given = flashinfer.BatchAttention(), tables(batch, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrapper.plan(*given, *SHAPE, batch.kv.page_size, True, None, None, torch.float32, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_is(wrapper.run(*inputs(batch, "cuda")), batch.exact())


def test_page_table_from_lengths_has_the_pages_that_they_fill(rng):
    lengths = [rng.randrange(0, 40) for _ in range(6)]
    spare = [rng.randrange(0, 3) for _ in lengths]
    counts = [-(-length // 8) + extra for length, extra in zip(lengths, spare, strict=True)]
    indptr = torch.tensor([3, *counts]).cumsum(0).int()
    indices = torch.randperm(int(indptr[-1]) + 4).int()
    table = PageTable.from_lengths(indptr, indices, torch.tensor(lengths).int(), 8)
    assert table.lengths().tolist() == lengths
    for b, length in enumerate(lengths):
        own = table.indices[int(table.indptr[b]) : int(table.indptr[b + 1])]
        assert torch.equal(own, indices[int(indptr[b]) :][: -(-length // 8)])
    none = torch.zeros(0, dtype=torch.int32)
    assert PageTable.from_lengths(torch.zeros(1, dtype=torch.int32), none, none, 8).batch_size == 0


def test_batch_attention_with_wrong_arguments_is_refused(batch):
    given, size = tables(batch, "cpu"), batch.kv.page_size
    wrapper = flashinfer.BatchAttention(device="cpu")
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called"):
        wrapper.run(*inputs(batch, "cpu"))
    with pytest.raises(ValueError, match="use_profiler is not supported"):
        wrapper.plan(*given, *SHAPE, size, use_profiler=True)
    long = given[3] + 1000 * torch.tensor([0, 0, 1, 0, 0]).int()
    with pytest.raises(ValueError, match=rf"kv_len_arr\[2\] = {int(long[2])} is out of range"):
        wrapper.plan(*given[:3], long, *SHAPE, size)
    with pytest.raises(ValueError, match="kv_indptr has 6 entries: 5 are needed"):
        wrapper.plan(*given[:3], given[3][:-1], *SHAPE, size)
    with pytest.raises(ValueError, match="variant = 'shared' is not supported"):
        wrapper.prewarm_paged_kv_stride_variant("shared")
    wrapper.plan(*given, *SHAPE, size, q_data_type=torch.float32, kv_data_type=torch.float32)
    with pytest.raises(ValueError, match=r"logits_soft_cap = 3\.0 .* none was planned"):
        wrapper.run(*inputs(batch, "cpu"), logits_soft_cap=3.0)
    with pytest.raises(ValueError, match="kv_cache_sf is not supported"):
        wrapper.run(*inputs(batch, "cpu"), kv_cache_sf=torch.zeros(1))


@pytest.mark.interpret
@devices
def test_sinks_of_minus_infinity_are_none(device, rng):
    """Also for rows that see no key: requests without keys, and the first rows of one with more queries than keys."""
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype=torch.float32, sinks=True)
    batch = random_batch(spec, [1, 5, 2, 1], [9, 3, 0, 0], 4)
    batch.sinks[1::2] = -torch.inf
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(0, device=device), backend="triton" if INTERPRETED else "auto"
    )
    kv = [x.to(device) for x in (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)]
    wrapper.plan(batch.qo.indptr.to(device), *kv, 4, 2, 32, 4, causal=True, q_data_type=torch.float32)
    assert_is(wrapper.run(*inputs(batch, device), sinks=batch.sinks.to(device), return_lse=True), batch.exact())


@devices
@pytest.mark.parametrize("window_left", [-1, 6])
def test_attention_sink_wrapper_matches_the_oracle(window_left, device, rng):
    spec = attention_spec(
        num_qo_heads=6, num_kv_heads=2, head_dim_qk=32, q_dtype=torch.float32, sinks=True, window_left=window_left
    )
    batch = random_batch(spec, [1, 9, 5], [50, 9, 30], rng.choice((1, 4, 16)))
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        torch.empty(0, device=device), backend="fa2", q_data_type=torch.float32, head_dim_qk=32, window_left=window_left
    )
    assert isinstance(wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    kv = [x.to(device) for x in (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)]
    layer = {"causal": True, "window_left": window_left, "q_data_type": torch.float32}
    wrapper.plan(batch.qo.indptr.to(device), *kv, 6, 2, 32, batch.kv.page_size, **layer)
    q, cache = inputs(batch, device)
    sink = batch.sinks.to(device)
    exact = replace(batch, spec=spec.replace(sm_scale=0.3)).exact()
    assert relative_error(wrapper.run(q, cache, sink, 0.3).cpu(), exact[0]) < 2e-6
    assert relative_error(wrapper.forward(q, cache, sink).cpu(), batch.exact()[0]) < 2e-6
    assert_is(wrapper.run_return_lse(q, cache, sink, 0.3), exact)
    assert_is(wrapper.forward_return_lse(q, cache, sink, 0.3, v_scale=1.0), exact)
    with pytest.raises(TypeError, match="sink"):
        wrapper.run(q, cache)
    with pytest.raises(ValueError, match=r"sinks has shape \[5\]"):
        wrapper.run(q, cache, sink[:5])
