"""The face on a GPU: the definition, Triton, and what surrounds them, which must not wait for the device."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch

import quire
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import AttentionSpec, PageTable, RaggedLayout, attention_spec

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture
def batch(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16, window_left=40, sinks=True)
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
        torch.empty(1 << 22, dtype=torch.uint8, device="cuda"), backend=backend
    )
    wrapper.plan(*tables(batch), 8, 2, 64, 16, q_data_type=BF16, window_left=40)
    return wrapper


def test_reference_family_on_a_gpu_matches_the_oracle(batch):
    out, lse = planned(batch, "reference").run(
        batch.q.cuda(), (batch.k.cuda(), batch.v.cuda()), sinks=batch.sinks.cuda(), return_lse=True
    )
    exact, exact_lse = batch.exact()
    assert out.is_cuda
    assert relative_error(out.cpu(), exact) < 2.8e-3
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_auto_on_a_gpu_reads_tables_that_changed_in_place(batch):
    """Runs read the changed tables, called directly and replayed in a captured graph."""
    wrapper = planned(batch, "auto")
    assert wrapper.backend == ("hopper" if torch.cuda.get_device_capability()[0] == 9 else "triton")
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


def test_append_on_a_gpu_equals_append_on_the_cpu(batch):
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


def test_append_with_tables_that_lead_outside_writes_nothing(batch):
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


def test_merge_state_on_a_gpu_equals_that_on_the_cpu():
    v, s = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 4)
    here = quire.merge_state(v[0], s[0], v[1], s[1])
    there = quire.merge_state(v[0].cuda(), s[0].cuda(), v[1].cuda(), s[1].cuda())
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.cpu(), a)


def test_engine_on_a_gpu_has_the_text_of_the_cpu():
    pytest.importorskip("transformers")
    from quire.engine import LLM, SamplingParams

    params, prompts = SamplingParams(temperature=0, max_tokens=8), ["import os\n", "def add(a, b):\n    return"]
    with LLM() as cpu, LLM(device="cuda", dtype="float32", backend="reference", num_pages=64) as gpu:
        assert [c.text for c in gpu.generate(prompts, params)] == [c.text for c in cpu.generate(prompts, params)]


def test_env_on_a_gpu_names_it(capsys):
    from quire.cli import main

    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert torch.cuda.get_device_name() in out
    assert "it computes on the CPU, not on cuda" in out


def reserved(spec: AttentionSpec, requests: int, pages: int, page_size: int = 16):
    """A CUDA-graph wrapper with room for so many requests and pages, and its buffers."""
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (requests + 1, pages, requests)]
    return quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers), buffers


def test_captured_plan_and_run_replayed_reads_changed_tables(rng):
    """Requests grow over the ends of pages, and fewer of them come, padded with empty ones."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16)
    lengths, size, widest = torch.tensor([15, 1, 600, 47]), 16, 40
    pool = torch.randperm(4 * widest).int().view(4, widest)
    k, v = torch.randn(2, 4 * widest, size, 2, 64, dtype=BF16, device="cuda")
    q = torch.randn(4, 8, 64, dtype=BF16, device="cuda")
    wrapper, (indptr, indices, last) = reserved(spec, 4, 4 * widest)

    def fill(lengths):
        table = PageTable.from_block_tables(pool, lengths.int(), size)
        for buffer, values in ((indptr, table.indptr), (indices, table.indices), (last, table.last_page_len)):
            buffer.copy_(values)
        return Batch(spec, q.cpu(), k.cpu(), v.cpu(), RaggedLayout(torch.arange(5).int()), table)

    def step():
        wrapper.plan(indptr, indices, last, 8, 2, 64, size, q_data_type=BF16)
        return wrapper.run(q, (k, v))

    fill(lengths)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(5):
        lengths = (lengths + torch.randint(1, 9, (4,))) * torch.tensor([1, 1, 1, rng.choice((0, 1))])
        batch = fill(lengths)
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out.cpu(), batch.exact()[0]) < 3e-3
        assert not out[lengths.cuda() == 0].any()


def test_plan_after_a_captured_run_is_refused(batch):
    wrapper = planned(batch, "auto")
    q, kv = batch.q.cuda(), (batch.k.cuda(), batch.v.cuda())
    wrapper.run(q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, kv)
    again = (*tables(batch), 8, 2, 64, 16)
    with pytest.raises(RuntimeError, match=r"captured in a CUDA graph.*use_cuda_graph=True.*forget_cuda_graph"):
        wrapper.plan(*again, q_data_type=BF16)
    del graph
    wrapper.forget_cuda_graph()
    wrapper.plan(*again, q_data_type=BF16, window_left=40)
    assert relative_error(wrapper.run(q, kv, sinks=batch.sinks.cuda()).cpu(), batch.exact()[0]) < 3e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, kv)
    with pytest.raises(RuntimeError, match="forget_cuda_graph"):
        wrapper.plan(*again, q_data_type=BF16)


@pytest.mark.parametrize("kind", ["Paged", "Ragged"])
def test_forget_cuda_graph_with_kept_tables_leaves_graphs_right(kind, rng):
    """Graphs of one prefill wrapper are replayed after later plans, and after freed memory was overwritten."""
    layer, graphs = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16), []
    empty = torch.empty(0, dtype=torch.uint8, device="cuda")
    wrapper = getattr(quire, f"BatchPrefillWith{kind}KVCacheWrapper")(empty)
    for requests in (1, 3, 3, 8, 2, 2):
        q_lens = [rng.randint(1, 40) for _ in range(requests)]
        batch = random_batch(layer, q_lens, [n + rng.randint(0, 900) for n in q_lens], 16, device="cuda")
        tables, cache = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len), ((batch.k, batch.v),)
        if kind == "Ragged":
            k, v, kv_indptr = batch.rows()
            tables, cache = (kv_indptr,), (k, v)
        sizes = (8, 2, 64, 16) if kind == "Paged" else (8, 2, 64)
        wrapper.plan(batch.qo.indptr, *tables, *sizes, causal=True, q_data_type=BF16)
        wrapper.run(batch.q, *cache)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = wrapper.run(batch.q, *cache)
        wrapper.forget_cuda_graph()
        graphs.append((graph, out, batch, tables, cache))
    others = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (2, 3, 4, 8, 9, 60, 200) for _ in range(99)]
    for graph, out, batch, *_ in graphs * 2:
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, batch.exact()[0]) < 3e-3
    assert not any(x.any() for x in others)


def test_plan_and_run_never_wait_for_the_device(batch):
    wrapper, kv = planned(batch, "auto"), (batch.k.cuda(), batch.v.cuda())
    q, given = batch.q.cuda(), tables(batch)
    wrapper.run(q, kv)
    with no_waiting():
        wrapper.plan(*given, 8, 2, 64, 16, q_data_type=BF16)
        for _ in range(2):
            wrapper.run(q, kv, return_lse=True)


def test_repeated_run_with_other_tensors_matches_the_oracle(batch):
    """Runs that skip the checks of those before them: other tensors, other values of the layer, other alignments."""
    wrapper, sinks = planned(batch, "auto"), batch.sinks.cuda()
    wide = torch.randn(3, 8, 65, dtype=BF16, device="cuda")
    for _ in range(2):
        for q in (batch.q.cuda(), wide[..., :64], wide[..., 1:]):
            for scale, sink in ((None, None), (0.3, sinks), (-0.2, None)):
                caches = (batch.k.cuda() * 0.5, batch.v.cuda() * 2)
                both = torch.stack(caches, 1)
                spec = batch.spec.replace(sm_scale=scale or batch.spec.sm_scale, sinks=sink is not None)
                here = Batch(spec, q.cpu(), caches[0].cpu(), caches[1].cpu(), batch.qo, batch.kv)
                here = here if sink is None else replace(here, sinks=batch.sinks)
                exact, exact_lse = here.exact()
                for cache in (caches, both):
                    out, lse = torch.full_like(q, torch.nan).contiguous(), torch.full((3, 8), torch.nan, device="cuda")
                    wrapper.run(q, cache, sm_scale=scale, sinks=sink, out=out, lse=lse)
                    assert relative_error(out.cpu(), exact) < 3e-3
                    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-4, atol=1e-4)
                    assert torch.equal(wrapper.run(q, cache, sm_scale=scale, sinks=sink), out)
    assert wrapper.planned.launches


def test_plan_with_other_tables_and_layers_matches_the_oracle(batch):
    """They skip the checks of those before them; another layer, or another batch size, does not."""
    wrapper = planned(batch, "auto")
    for lengths, layer in (([90, 2, 17], {"window_left": 40}), ([1, 60, 9], {"window_left": 40}), ([5, 70], {})):
        other = random_batch(batch.spec.replace(window_left=-1, sinks=False), [1] * len(lengths), lengths, 16)
        other = replace(other, spec=other.spec.replace(**layer))
        wrapper.plan(*tables(other), 8, 2, 64, 16, q_data_type=BF16, **layer)
        out = wrapper.run(other.q.cuda(), (other.k.cuda(), other.v.cuda()))
        assert relative_error(out.cpu(), other.exact()[0]) < 3e-3
    with pytest.raises(ValueError, match=r"indptr is torch\.float32"):
        wrapper.plan(tables(other)[0].float(), *tables(other)[1:], 8, 2, 64, 16, q_data_type=BF16)


def test_repeated_run_after_another_plan_reads_its_tables(batch):
    """Requests in another order, more page ids than are used."""
    wrapper, cache, sinks = planned(batch, "auto"), (batch.k.cuda(), batch.v.cuda()), batch.sinks.cuda()
    ends, exact = batch.kv.indptr.tolist(), batch.exact()[0]
    pages = [batch.kv.indices[begin:end] for begin, end in pairwise(ends)]
    for spare, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 2, 0])):
        given = [pages[b] for b in order]
        indptr = torch.tensor([0, *(len(x) for x in given)]).cumsum(0).int()
        indices = torch.cat([*given, torch.zeros(spare, dtype=torch.int32)])
        new = [x.cuda() for x in (indptr, indices, batch.kv.last_page_len[order])]
        wrapper.plan(*new, 8, 2, 64, 16, q_data_type=BF16, window_left=40)
        for _ in range(2):
            out = wrapper.run(batch.q[order].cuda(), cache, sinks=sinks)
            assert relative_error(out.cpu(), exact[order]) < 3e-3
        assert len(wrapper.planned.launches) == 1


def test_repeated_run_over_ragged_rows_reads_its_plans_rows():
    """Requests in another order: as many tokens together, and the same longest one."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, device="cuda"))
    for lengths in permutations([(30, 90), (1, 64), (200, 333)]):
        step = random_batch(spec, *zip(*lengths, strict=True), 16)
        k, v, kv_indptr = step.rows()
        wrapper.plan(step.qo.indptr, kv_indptr.cuda(), 8, 2, 64, causal=True, q_data_type=BF16)
        for _ in range(2):
            out = wrapper.run(step.q.cuda(), k.cuda(), v.cuda())
            assert relative_error(out.cpu(), step.exact()[0]) < 3e-3
        assert len(wrapper.planned.launches) == 1


def test_run_with_wrong_tables_in_checked_mode_names_the_value(batch):
    workspace = torch.empty(0, device="cuda")
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace, check=True)
    indptr, indices, last = tables(batch)
    wrapper.plan(indptr, indices, last, 8, 2, 64, 16, q_data_type=BF16)
    for table, i, value, words in (
        (indptr, 1, 9, r"kv_indptr falls at request 1, from 9"),
        (last, 2, 17, r"kv_last_page_len\[2\] = 17 is out of range: 1 to page_size = 16"),
        (indices, 0, -3, r"kv_indices\[0\] = -3 is out of range"),
    ):
        good = int(table[i])
        table[i] = value
        with pytest.raises(ValueError, match=words):
            wrapper.plan(indptr, indices, last, 8, 2, 64, 16, q_data_type=BF16)
        table[i] = good
    indices[1] = 1 << 20
    with pytest.raises(ValueError, match=r"kv_indices\[1\] = 1048576 of request 0 is out of range: 0 to"):
        wrapper.run(batch.q.cuda(), (batch.k.cuda(), batch.v.cuda()))


def test_append_with_wrong_positions_in_checked_mode_names_the_value(batch, monkeypatch):
    monkeypatch.setenv("QUIRE_CHECK", "1")
    indptr, indices, last = tables(batch)
    caches, key = (batch.k.cuda(), batch.v.cuda()), torch.ones(2, 2, 64, dtype=BF16, device="cuda")
    places = torch.tensor([[-1, 1], [0, 16]], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"positions\[1\] = 16 is out of range for request 1, which has pages for 16"):
        quire.append_paged_kv_cache(key, key, *places, caches, indices, indptr, last)
    quire.append_paged_kv_cache(key, key, places[0], places[1] - 1, caches, indices, indptr, last)


def test_plan_with_a_small_workspace_names_the_size_that_is_needed(batch):
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 10, dtype=torch.uint8, device="cuda"), backend="triton"
    )
    with pytest.raises(ValueError, match=r"float_workspace_buffer = '1024 bytes' .* (\d+) bytes are needed") as refusal:
        wrapper.plan(*tables(batch), 8, 2, 64, 16, q_data_type=BF16)
    size = int(str(refusal.value).split()[-4])
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(size, dtype=torch.uint8, device="cuda"), backend="triton"
    )
    wrapper.plan(*tables(batch), 8, 2, 64, 16, q_data_type=BF16, window_left=40)
    out = wrapper.run(batch.q.cuda(), (batch.k.cuda(), batch.v.cuda()), sinks=batch.sinks.cuda())
    assert relative_error(out.cpu(), batch.exact()[0]) < 3e-3


@pytest.mark.parametrize("ragged", [False, True])
def test_plan_of_a_prefill_with_tables_on_the_host_does_not_wait(ragged, batch, rng):
    """Steps whose rows, or all of whose tables, lie on the host. A plan returns while the device is busy, and what it
    was given may be overwritten then, unless that is pinned: then only `non_blocking=False` makes a plan wait. Its
    kernel is that for the longest request, which changes between few rows, many and few.
    """
    planned(batch, "auto")  # imports the kernels, which takes long
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16)
    heads, layer = (8, 2, 64) if ragged else (8, 2, 64, 16), {"causal": True, "q_data_type": BF16}
    kind = quire.BatchPrefillWithRaggedKVCacheWrapper if ragged else quire.BatchPrefillWithPagedKVCacheWrapper
    wrapper = kind(torch.empty(0, device="cuda"))
    steps = ((3, 1, False), (200, 1, True), (7, 4, False), (200, 4, True), (200, 1, False), (2, 4, False), (2, 1, True))
    for longest, on_host, pinned in steps:
        q_lens = [longest, *(rng.randint(0, longest) for _ in range(3))]
        step = random_batch(spec, q_lens, [n + rng.randint(0, 300) for n in q_lens], 16)
        k, v, kv_indptr = step.rows()
        tables = [step.qo.indptr, *([kv_indptr] if ragged else step.kv.tables)]
        given = [(x.pin_memory() if pinned else x.clone()) if i < on_host else x.cuda() for i, x in enumerate(tables)]
        q, cache = step.q.cuda(), [x.cuda() for x in ((k, v) if ragged else (step.k, step.v))]
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 28)
        wrapper.plan(*given, *heads, **layer, non_blocking=not pinned)
        assert torch.cuda.current_stream().query() == pinned, "whether the plan has waited for the device"
        for x in given[:on_host]:
            x.fill_(-1)
        for _ in range(2):
            out = wrapper.run(q, *cache) if ragged else wrapper.run(q, tuple(cache))
            assert relative_error(out.cpu(), step.exact()[0]) < 3e-3
        assert wrapper.planned.max_q_len == longest
        assert wrapper.backend == ("hopper" if torch.cuda.get_device_capability()[0] == 9 else "triton")
        wrong = step.qo.indptr.clone()
        wrong[1] = 1 << 20
        with pytest.raises(ValueError, match="indptr falls at request 1, from 1048576"):
            wrapper.plan(wrong, *tables[1:], *heads, **layer)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_cache_of_more_than_two_to_the_31_elements_matches_the_oracle(kv_layout):
    """The last pages of a cache whose elements 32 bits do not count."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=8, head_dim_qk=128, q_dtype=BF16)
    batch = random_batch(spec, [1, 30], [40, 90], 16, kv_layout=kv_layout)
    pages, used = (1 << 31) // (16 * 8 * 128) + 100, len(batch.k)
    order = (0, 2, 1, 3) if kv_layout == "HND" else (0, 1, 2, 3)
    caches = []
    for small in (batch.k, batch.v):
        cache = torch.empty([pages, *small.permute(order).shape[1:]], dtype=BF16, device="cuda")
        cache[-used:] = small.permute(order).cuda()
        caches.append(cache)
    indices = (batch.kv.indices + (pages - used)).cuda()
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), kv_layout)
    indptr, last = batch.kv.indptr.cuda(), batch.kv.last_page_len.cuda()
    wrapper.plan(batch.qo.indptr.cuda(), indptr, indices, last, 8, 8, 128, 16, causal=True, q_data_type=BF16)
    out = wrapper.run(batch.q.cuda(), tuple(caches))
    assert relative_error(out.cpu(), batch.exact()[0]) < 3e-3
    key, value = torch.randn(2, 1, 8, 128, dtype=BF16, device="cuda")
    one = torch.tensor([1], dtype=torch.int32, device="cuda")
    quire.append_paged_kv_cache(key, value, one, one + 88, tuple(caches), indices, indptr, last, kv_layout)
    page = int(indices[int(indptr[1]) + 89 // 16])
    assert torch.equal(caches[0].permute(order)[page, 89 % 16], key[0])
