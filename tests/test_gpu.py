"""The face on a GPU: the definition, Triton, and what surrounds them, which must not wait for the device."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import quire
from quire.attention import AttentionSpec
from quire.bench.batches import Batch, random_batch, relative_error

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture
def batch(rng):
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16, window_left=40, sinks=True)
    return random_batch(spec, [1, 1, 1], [30, 1, 90], 16)


@contextmanager
def no_waiting():
    """Fail where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tables(batch: Batch):
    return [x.cuda() for x in (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)]


def planned(batch: Batch, backend: str):
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), backend=backend
    )
    wrapper.plan(*tables(batch), 8, 2, 64, 16, q_data_type=BF16, window_left=40)
    return wrapper


def test_the_definition_computes_there(batch):
    out, lse = planned(batch, "reference").run(
        batch.q.cuda(), (batch.k.cuda(), batch.v.cuda()), sinks=batch.sinks.cuda(), return_lse=True
    )
    exact, exact_lse = batch.exact()
    assert out.is_cuda
    assert relative_error(out.cpu(), exact) < 2.8e-3
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_auto_is_triton_and_sees_tables_that_change_in_place(batch):
    """Also in a captured graph."""
    wrapper = planned(batch, "auto")
    assert wrapper.backend == "triton"
    q, kv, sinks = batch.q.cuda(), (batch.k.cuda(), batch.v.cuda()), batch.sinks.cuda()
    exact, _ = batch.exact()
    assert relative_error(wrapper.run(q, kv, sinks=sinks).cpu(), exact) < 3e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, kv, sinks=sinks)
    wrapper._paged_kv_last_page_len_buf[0] -= 3
    batch.kv.last_page_len[0] -= 3
    graph.replay()
    assert relative_error(out.cpu(), batch.exact()[0]) < 3e-3


def test_plan_does_not_wait_for_the_device(batch):
    kv = tables(batch)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), backend="reference"
    )
    with no_waiting():
        wrapper.plan(*kv, 8, 2, 64, 16, q_data_type=BF16)


def test_append_writes_where_it_does_on_the_cpu(batch):
    key, value = torch.randn(2, 6, 2, 64).to(BF16)
    requests, positions = torch.tensor([0, 2, 2, -1, 1, 2]).int(), torch.tensor([29, 88, 89, 0, 0, 17]).int()
    here = (batch.k.clone(), batch.v.clone())
    there = (batch.k.cuda(), batch.v.cuda())
    host = (batch.kv.indices, batch.kv.indptr, batch.kv.last_page_len)
    quire.append_paged_kv_cache(key, value, requests, positions, here, *host)
    args = [x.cuda() for x in (key, value, requests, positions)]
    quire.append_paged_kv_cache(*args, there, *(x.cuda() for x in host))
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)


def test_append_writes_nothing_where_tables_lead_outside(batch):
    key = torch.ones(5, 2, 64, dtype=BF16, device="cuda")
    caches = (batch.k.cuda(), batch.v.cuda())
    before = [x.clone() for x in caches]
    requests, positions = torch.tensor([0, 3, 1 << 30, 1, 2]).int(), torch.tensor([32, 0, 0, -1, 1 << 30]).int()
    indices, indptr, last = (x.cuda() for x in (batch.kv.indices, batch.kv.indptr, batch.kv.last_page_len))
    quire.append_paged_kv_cache(key, key, requests.cuda(), positions.cuda(), caches, indices, indptr, last)
    wild = torch.full_like(indices, 1 << 30)
    zero = torch.zeros(5, dtype=torch.int32, device="cuda")
    quire.append_paged_kv_cache(key, key, zero, zero, caches, wild, indptr, last)
    for a, b in zip(before, caches, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def test_states_merge_there():
    v, s = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 4)
    here = quire.merge_state(v[0], s[0], v[1], s[1])
    there = quire.merge_state(v[0].cuda(), s[0].cuda(), v[1].cuda(), s[1].cuda())
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.cpu(), a)


def test_the_engine_runs_there():
    pytest.importorskip("transformers")
    from quire.engine import LLM, SamplingParams

    params, prompts = SamplingParams(temperature=0, max_tokens=8), ["import os\n", "def add(a, b):\n    return"]
    with LLM() as cpu, LLM(device="cuda", dtype="float32", backend="reference", num_pages=64) as gpu:
        assert [c.text for c in gpu.generate(prompts, params)] == [c.text for c in cpu.generate(prompts, params)]


def test_env_names_the_gpu(capsys):
    from quire.cli import main

    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert torch.cuda.get_device_name() in out
    assert "it computes on the CPU, not on cuda" in out
