"""Calls as programs written for FlashInfer make them: by position, with its caches, buffers, plans and attributes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import quire as flashinfer
from helpers.flashinfer_calls import DEVICES, F8, F16, SPEC, close
from quire.bench.batches import Batch, random_batch

HEADS = (8, 2, 64)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def batch(rng, device):
    return random_batch(SPEC, [1] * 5, [30, 1, 16, 90, 17], 16, device=device)


@pytest.fixture
def prompts(rng, device):
    return random_batch(SPEC, [5, 1, 40], [30, 1, 40], 16, device=device)


def workspace(device: str, size: int = 1 << 25) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def tables(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len


def decoder(batch: Batch, *args, **options):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(batch.q.device), *args, **options)
    wrapper.plan(*tables(batch), *HEADS, batch.kv.page_size, q_data_type=F16)
    return wrapper


def prefiller(batch: Batch, *args, **options):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(batch.q.device), *args, **options)
    wrapper.plan(batch.qo.indptr, *tables(batch), *HEADS, batch.kv.page_size, causal=True, q_data_type=F16)
    return wrapper


# Workspaces.


def test_workspace_of_the_size_of_workspace_size_suffices(batch, prompts):
    for one, make, before in ((batch, decoder, ()), (prompts, prefiller, (prompts.qo.indptr,))):
        wrapper = make(one)
        earlier = wrapper.planned.spec
        sizes = wrapper.workspace_size(*before, *tables(one), 8, 2, 64, 16, q_data_type=F16)
        assert all(isinstance(size, int) and size > 0 for size in sizes)
        assert wrapper.planned.spec is earlier
        close(wrapper.run(one.q, (one.k, one.v), return_lse=True), one)
        wrapper.reset_workspace_buffer(*(workspace(one.q.device, size) for size in sizes))
        wrapper.plan(*before, *tables(one), *HEADS, 16, q_data_type=F16, **({"causal": True} if before else {}))
        close(wrapper.run(one.q, (one.k, one.v), return_lse=True), one)
        assert wrapper._plan_info is not None


def test_workspace_size_takes_arguments_by_position(batch, prompts):
    heads = (8, 2, 64, 16)
    wrapper = decoder(batch)
    layer = ("NONE", -1, 0.0, F16, None, None, None, None, None, None)
    sizes = wrapper.workspace_size(*tables(batch), *heads, *layer, None, None, None, False, 4)
    assert sizes == wrapper.workspace_size(*tables(batch), *heads, q_data_type=F16, q_len_per_req=4)
    with pytest.raises(TypeError, match="too many positional"):
        wrapper.workspace_size(*tables(batch), *heads, *layer, None, None, None, False, 4, True)
    with pytest.raises(ValueError, match="head_dim_qk = 60"):
        wrapper.workspace_size(*tables(batch), 8, 2, 60, 16)
    layer = (None, None, None, True, "NONE", False, None, -1, None, None, None, F16, F16, F16)
    rest = (None, None, 0, None, None, None, None, None, None, 16, False)
    assert prefiller(prompts).workspace_size(prompts.qo.indptr, *tables(prompts), *heads, *layer, *rest)[0] > 0


def test_workspace_size_of_a_graph_wrapper_leaves_its_buffers(batch, device):
    buffers = [torch.full((n,), 7, dtype=torch.int32, device=device) for n in (6, 64, 5)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    assert min(wrapper.workspace_size(*tables(batch), *HEADS, 16, q_data_type=F16)) > 0
    assert all(bool((x == 7).all()) for x in buffers)


# Caches and scales.


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cache_of_pages_of_one_token_needs_no_page_dimension(layout, rng, device):
    batch = random_batch(SPEC, [3, 3], [30, 17], 1, device=device)
    k, v = batch.k[:, 0], batch.v[:, 0]
    for cache in ((k, v), torch.stack((k, v), 1)):
        close(prefiller(batch, layout).run(batch.q, cache, return_lse=True), batch)
    empty = torch.zeros(2, *k.shape, dtype=F16, device=device)
    new = torch.randn(2, 4, 2, 64, dtype=F16, device=device)
    requests, positions = torch.tensor([[0, 0, 1, 1], [0, 2, 1, 16]], dtype=torch.int32, device=device)
    flashinfer.append_paged_kv_cache(
        *new, requests, positions, (empty[0], empty[1]), batch.kv.indices, *tables(batch)[::2], layout
    )
    places = batch.kv.indices[batch.kv.indptr[requests] + positions].long()
    assert torch.equal(empty[:, places], new)
    assert empty.count_nonzero() == new.count_nonzero()


def test_scales_by_position_multiply_those_by_name(batch, prompts):
    half, per_head = torch.full((8,), 0.5), torch.tensor([2.0, 0.5])
    for one, make in ((batch, decoder), (prompts, prefiller)):
        wrapper, scales = make(one), (half.to(one.q.device), per_head.to(one.q.device))
        scaled = {"k_scale": per_head.to(one.q.device) * 0.5, "v_scale": 3.0}
        close(wrapper.run(one.q, (one.k, one.v), *scales, v_scale=3.0), one, **scaled)
        close(wrapper.run(one.q, (one.k, one.v), *scales, 1.5, v_scale=2.0, return_lse=True), one, **scaled)
        with pytest.raises(ValueError, match=r"arguments by position = 5 .* at most 4"):
            wrapper.run(one.q, (one.k, one.v), 1.0, 1.0, 1.0, True, None)


def test_ragged_prefill_with_fp8_queries_matches_the_oracle(rng, device):
    spec = SPEC.replace(q_dtype=F8, kv_dtype=F8, o_dtype=F16)
    batch = random_batch(spec, [5, 9], [30, 17], 16, device=device)
    k, v, indptr = batch.rows()
    ones = [torch.ones(n, device=device) for n in (8, 2, 2)]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(batch.qo.indptr, indptr, *HEADS, causal=True, q_data_type=F8, kv_data_type=F8, o_data_type=F16)
    close(wrapper.run(batch.q, k, v, *ones, return_lse=True), batch)
    wrapper.plan(batch.qo.indptr, indptr, *HEADS, causal=True, q_data_type=F8)
    assert wrapper.run(batch.q, k, v).dtype == torch.bfloat16


# Sinks.

SINK = (
    "uri",
    F16,
    F16,
    F16,
    torch.int32,
    64,
    64,
    ["sink"],
    ["float"],
    ["sm_scale"],
    ["double"],
    "AttentionSink",
    "decl",
)


def test_sink_and_scale_by_position_match_the_oracle(prompts, batch):
    device, scale = prompts.q.device, 0.3
    sink = torch.randn(8, device=device)
    changes = {"spec": SPEC.replace(sinks=True, sm_scale=scale), "sinks": sink}
    k, v, indptr = prompts.rows()
    jit = {"jit_args": SINK, "jit_kwargs": {"use_sliding_window": False}}
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", **jit)
    ragged.plan(prompts.qo.indptr, indptr, *HEADS, causal=True, q_data_type=F16)
    for _ in range(2):
        close(ragged.run(prompts.q, k, v, sink, scale), prompts, **changes)
    close(ragged.run_return_lse(prompts.q, k, v, sink, sm_scale=scale), prompts, **changes)
    close(ragged.run(prompts.q, k, v, sinks=sink, sm_scale=scale), prompts, **changes)
    paged = prefiller(prompts, **jit)
    close(paged.run(prompts.q, (prompts.k, prompts.v), sink, scale), prompts, **changes)
    close(decoder(batch, jit_args=SINK).run(batch.q, (batch.k, batch.v), sink, scale), batch, **changes)
    with pytest.raises(ValueError, match=r"arguments by position = 3 .* at most 2"):
        paged.run(prompts.q, (prompts.k, prompts.v), sink, scale, 1.0)


def test_attention_sink_wrapper_over_pages_of_one_token_matches_the_oracle(rng, device):
    batch, sink = random_batch(SPEC, [3, 4], [30, 17], 1, device=device), torch.randn(8, device=device)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device), backend="fa3", head_dim_qk=64)
    wrapper.plan(batch.qo.indptr.cpu(), *(x.cpu() for x in tables(batch)), *HEADS, 1, causal=True, q_data_type=F16)
    cache = (batch.k[:, 0], batch.v[:, 0])
    spec = SPEC.replace(sinks=True, sm_scale=0.2)
    close(wrapper.run(batch.q, cache, sink, 0.2), batch, spec=spec, sinks=sink)


@pytest.mark.parametrize("wrapper", ["BatchDecode", "BatchPrefill"])
def test_jit_args_of_an_unknown_variant_are_refused(wrapper):
    make = getattr(flashinfer, f"{wrapper}WithPagedKVCacheWrapper")
    for jit_args in ((*SINK[:11], "FlashSigmoid", "decl"), ("uri",)):
        with pytest.raises(ValueError, match=r"jit_args = .* AttentionSink"):
            make(workspace("cpu", 16), jit_args=jit_args)


# Plans.


def test_plan_with_arguments_by_position_matches_the_oracle(batch):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(batch.q.device))
    layer = ("NONE", 7, 2.0, "float16", None, "float32", None, 0.25, None, None, True, None, None, None, False, 1)
    wrapper.plan(*tables(batch), *HEADS, 16, *layer)
    out = wrapper.run(batch.q, (batch.k, batch.v))
    assert out.dtype == torch.float32
    close(out, batch, spec=SPEC.replace(window_left=7, logits_soft_cap=2.0, sm_scale=0.25))


def test_fast_decode_plan_as_engines_call_it_matches_the_oracle(batch, device):
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (6, 64, 5)]
    graph = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    for wrapper in (decoder(batch), graph):
        wrapper.plan(*tables(batch), *HEADS, 16, q_data_type=F16, o_data_type=torch.float32)
        wrapper.plan = partial(flashinfer.fast_decode_plan, wrapper)
        for host in (None, batch.kv.indptr.cpu()):
            wrapper.plan(*tables(batch), *HEADS, 16, q_data_type=F16, data_type=F16, global_override_indptr_cpu=host)
            result = wrapper.run(batch.q, (batch.k, batch.v), return_lse=True)
            assert result[0].dtype == torch.float32
            close(result, batch)
        assert wrapper.workspace_size(*tables(batch), *HEADS, 16)[0] > 0
    graph.plan(*(torch.zeros_like(x) for x in tables(batch)), *HEADS, 16, q_data_type=F16)  # only their sizes count
    close(graph.run(batch.q, (batch.k, batch.v)), batch)


def test_plan_with_strided_tables_on_any_device_gives_equal_results(batch, prompts):
    strided = [torch.stack((x, x + 99), 1)[:, 0] for x in tables(batch)]
    wrapper = decoder(batch)
    expected = wrapper.run(batch.q, (batch.k, batch.v))
    wrapper.plan(*strided, *HEADS, 16, q_data_type=F16)
    assert torch.equal(wrapper.run(batch.q, (batch.k, batch.v)), expected)
    wrapper.plan(*strided[:2], strided[2].cpu(), *HEADS, 16, q_data_type=F16)
    assert torch.equal(wrapper.run(batch.q, (batch.k, batch.v)), expected)
    paged = prefiller(prompts)
    expected = paged.run(prompts.q, (prompts.k, prompts.v))
    indptr, indices, last = tables(prompts)
    paged.plan(prompts.qo.indptr.cpu(), indptr.cpu(), indices, last.cpu(), *HEADS, 16, causal=True, q_data_type=F16)
    assert torch.equal(paged.run(prompts.q, (prompts.k, prompts.v)), expected)


def test_request_without_pages_is_zero(rng, device):
    batch = random_batch(SPEC, [1, 1], [0, 130], 16, device=device)
    for wrapper in (decoder(batch, "NHD"), prefiller(batch)):
        out, lse = wrapper.run(batch.q, (batch.k, batch.v), return_lse=True)
        assert not out[0].any()
        assert bool((lse[0] == -torch.inf).all())
        close((out, lse), batch)


def test_wrapper_attributes_after_plan_are_those_that_engines_read(batch, prompts):
    for one, make in ((batch, decoder), (prompts, prefiller)):
        wrapper = make(one, backend="fa2")
        assert type(wrapper._max_kv_len) is int
        assert wrapper._max_kv_len == int(one.kv.lengths().max())
        assert wrapper._backend == "fa2"
        assert wrapper.prewarm_paged_kv_stride_variant() is None
        assert wrapper.prewarm_paged_kv_stride_variant("independent") is None
        with pytest.raises(ValueError, match="variant = 'shared'"):
            wrapper.prewarm_paged_kv_stride_variant("shared")
    assert [decoder(batch, backend=name).resolved_backend for name in ("auto", "fa2", "fa3")] == ["fa2", "fa2", "fa3"]
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 16)).prewarm_paged_kv_stride_variant()


def test_decode_of_several_query_tokens_with_tensor_cores_matches_the_oracle(rng, device):
    batch = random_batch(SPEC, [3, 3], [30, 17], 16, device=device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 64, 2)]
    graph = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers, use_tensor_cores=True)
    for wrapper in (decoder(batch, use_tensor_cores=True), graph):
        wrapper.plan(*tables(batch), *HEADS, 16, q_data_type=F16, q_len_per_req=3)
        assert wrapper._qo_indptr_buf.tolist() == [0, 3, 6]
        close(wrapper.run(batch.q, (batch.k, batch.v)), batch)
        with pytest.raises(ValueError, match=r"q_len_per_req must be >= 1"):
            wrapper.plan(*tables(batch), *HEADS, 16, q_data_type=F16, q_len_per_req=0)
        with pytest.raises(ValueError, match=r"6 tokens, batch size \* q_len_per_req"):
            wrapper.run(batch.q[:2], (batch.k, batch.v))
        close(wrapper.run(batch.q, (batch.k, batch.v)), batch)
    with pytest.raises(ValueError, match="frozen cudagraph shape"):
        graph.plan(*tables(batch), *HEADS, 16, q_data_type=F16)
    close(graph.run(batch.q, (batch.k, batch.v)), batch)


def test_run_with_an_option_of_another_architecture_is_refused(prompts):
    for option in ("use_fp16_softmax", "uses_spcompress"):
        with pytest.raises(ValueError, match=f"{option} is not supported"):
            prefiller(prompts).run(prompts.q, (prompts.k, prompts.v), **{option: True})
        close(prefiller(prompts).run(prompts.q, (prompts.k, prompts.v), **{option: None}), prompts)


# Buffers of CUDA graphs.


def integers(*sizes):
    return [torch.zeros(n, dtype=torch.int32) for n in sizes]


@pytest.mark.parametrize(
    ("wrapper", "buffers", "message"),
    [
        ("BatchDecodeWithPaged", [], "paged_kv_indptr_buffer should be a torch.Tensor in cudagraph mode"),
        ("BatchDecodeWithPaged", integers(6), "paged_kv_indices_buffer should be a torch.Tensor in cudagraph mode"),
        ("BatchDecodeWithPaged", integers(6, 9), "paged_kv_last_page_len_buffer should be a torch.Tensor in cudagraph"),
        ("BatchDecodeWithPaged", integers(6, 9, 6), r"size of paged_kv_indptr_buffer should be batch_size \+ 1: .* 6 "),
        ("BatchDecodeWithPaged", [torch.zeros(6)], "paged_kv_indptr_buffer is torch.float32"),
        ("BatchDecodeWithPaged", [integers(12)[0][::2]], r"paged_kv_indptr_buffer.stride\(\) = \(2,\) .* contiguous"),
        ("BatchPrefillWithPaged", [], "qo_indptr_buf should be a torch.Tensor in CUDA graph mode"),
        ("BatchPrefillWithPaged", integers(6, 6, 9), "paged_kv_last_page_len_buf should be a torch.Tensor in CUDA"),
        ("BatchPrefillWithPaged", integers(6, 5, 9, 5), r"length of paged_kv_indptr_buf should be batch_size \+ 1"),
        ("BatchPrefillWithPaged", integers(6, 6, 9, 4), r"length of paged_kv_last_page_len_buf should be batch_size"),
        ("BatchPrefillWithRagged", integers(6), "kv_indptr_buf should be a torch.Tensor in CUDA graph mode"),
        ("BatchPrefillWithRagged", integers(6, 5), r"length of kv_indptr_buf should be batch_size \+ 1"),
    ],
)
def test_graph_wrapper_with_wrong_buffers_is_refused(wrapper, buffers, message):
    make = getattr(flashinfer, f"{wrapper}KVCacheWrapper")
    before = (False,) if "Decode" in wrapper else ()
    with pytest.raises(ValueError, match=message):
        make(workspace("cpu", 16), "NHD", True, *before, *buffers)


# One request.


def test_begin_forward_as_engines_call_it_matches_the_oracle(device, prompts):
    """begin_forward, forward and end_forward with arguments that engines have passed since FlashInfer 0.1."""
    indptr, indices, last = tables(prompts)
    counts = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    cache = {"paged_kv_indptr": indptr, "paged_kv_indices": indices, "paged_kv_last_page_len": last, "page_size": 16}
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout="NHD", use_cuda_graph=False)
    paged.begin_forward(qo_indptr=prompts.qo.indptr, **cache, **counts, q_data_type=F16)
    close(paged.forward(prompts.q, paged_kv_cache=(prompts.k, prompts.v), causal=True, window_left=-1), prompts)
    paged.end_forward()

    whole = random_batch(SPEC, [30, 1, 40], [30, 1, 40], 16, device=device)
    k, v, kv_indptr = whole.rows()
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), kv_layout="NHD", use_cuda_graph=False)
    ragged.begin_forward(qo_indptr=kv_indptr, kv_indptr=kv_indptr, **counts, q_data_type="float16")
    close(ragged.forward_return_lse(whole.q, k, v, causal=True, sm_scale=0.125, logits_soft_cap=None), whole)
    ragged.end_forward()


def test_merge_of_a_paged_prefix_and_new_rows_matches_the_oracle(device, rng):
    """How engines extend a cached prefix: new keys as rows, the prefix over pages of one, states merged."""
    batch = random_batch(SPEC, [5, 2, 40], [30, 9, 41], 1, device=device)
    k, v, kv_indptr = batch.rows()
    news = torch.cat([torch.arange(int(e) - n, int(e)) for e, n in zip(kv_indptr[1:], (5, 2, 40), strict=True)])
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD")
    ragged.begin_forward(batch.qo.indptr, batch.qo.indptr, *HEADS, q_data_type=F16)
    o1, s1 = ragged.forward_return_lse(batch.q, k[news], v[news], causal=True, sm_scale=0.125, logits_soft_cap=None)

    prefix = torch.tensor([25, 7, 1], dtype=torch.int32, device=device)
    indptr = torch.nn.functional.pad(prefix.cumsum(0), (1, 0)).int()
    entries = torch.cat([torch.arange(int(b), int(b) + n) for b, n in zip(kv_indptr, (25, 7, 1), strict=False)])
    indices = torch.cat([batch.kv.indices[entries], batch.kv.indices.new_zeros(256)])
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD")
    paged.begin_forward(
        batch.qo.indptr, indptr, indices, torch.ones_like(prefix), *HEADS, 1, q_data_type=F16, kv_data_type=F16,
        non_blocking=True,
    )  # fmt: skip
    o2, s2 = paged.forward_return_lse(batch.q, (batch.k, batch.v), causal=False, sm_scale=0.125, logits_soft_cap=None)
    close(flashinfer.merge_state(o1, s1, o2, s2), batch)


def test_fast_decode_plan_with_the_wrappers_own_buffer_matches_the_oracle(device, batch):
    """Engines write page ids into the wrapper's own buffer, `_paged_kv_indices_buf`, and plan with it, by
    fast_decode_plan from the second time on.
    """
    one = random_batch(SPEC, [1] * 5, [30, 1, 16, 90, 17], 1, device=device)
    ints = {"dtype": torch.int32, "device": device}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.zeros(6, **ints), paged_kv_indices_buffer=torch.zeros(900, **ints),
        paged_kv_last_page_len_buffer=torch.ones(5, **ints),
    )  # fmt: skip
    for turn in range(2):
        wrapper._paged_kv_indices_buf[: len(one.kv.indices)] = one.kv.indices
        wrapper.begin_forward(
            one.kv.indptr, wrapper._paged_kv_indices_buf, one.kv.last_page_len, *HEADS, 1, data_type=F16,
            q_data_type=F16, non_blocking=True,
        )  # fmt: skip
        close(wrapper.forward(one.q, (one.k, one.v), sm_scale=0.125, logits_soft_cap=None), one)
        if turn == 0:
            wrapper.begin_forward = partial(flashinfer.fast_decode_plan, wrapper)
