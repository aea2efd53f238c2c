"""The wrappers under FlashInfer's names: parameters, layouts, buffers, errors."""

from __future__ import annotations

import pytest
import torch

import quire as flashinfer
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import attention_spec

BF16 = torch.bfloat16


@pytest.fixture
def batch(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16)
    return random_batch(spec, [1] * 5, [30, 1, 16, 90, 17], 16)


@pytest.fixture
def prompts(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16)
    return random_batch(spec, [5, 1, 40], [30, 1, 40], 16)


def heads(batch: Batch) -> tuple[int, int, int]:
    return batch.spec.num_qo_heads, batch.spec.num_kv_heads, batch.spec.head_dim_qk


def tables(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len


def caches(batch: Batch) -> dict[str, object]:
    """One cache in every form that is accepted, by layout and form."""
    pair = (batch.k, batch.v)
    hnd = tuple(x.transpose(1, 2).contiguous() for x in pair)
    return {
        "NHD pair": pair,
        "NHD tensor": torch.stack(pair, 1),
        "HND pair": hnd,
        "HND tensor": torch.stack(hnd, 1),
        "HND pair of views": tuple(x.transpose(1, 2) for x in pair),
    }


def close(out, lse, batch, **changes):
    exact, exact_lse = (Batch(**{**vars(batch), **changes}) if changes else batch).exact()
    assert relative_error(out, exact) < 2.8e-3
    if lse is not None:
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def decoder(batch: Batch, layout: str = "NHD", **plan):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8), layout)
    wrapper.plan(*tables(batch), *heads(batch), 16, q_data_type=BF16, **plan)
    return wrapper


def prefiller(batch: Batch, layout: str = "NHD", **plan):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8), layout)
    wrapper.plan(batch.qo.indptr, *tables(batch), *heads(batch), 16, q_data_type=BF16, **{"causal": True, **plan})
    return wrapper


def test_documented_example_of_decode_runs():
    device = "cpu"
    num_layers, num_qo_heads = 3, 64
    num_kv_heads, head_dim = 8, 128
    max_num_pages, page_size = 128, 16
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    kv_page_indices = torch.arange(max_num_pages).int().to(device)
    kv_page_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device)
    kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    shape = (max_num_pages, 2, page_size, num_kv_heads, head_dim)
    kv_cache_at_layer = [torch.randn(*shape, dtype=torch.float16, device=device) for _ in range(num_layers)]
    decode_wrapper.plan(
        kv_page_indptr,
        kv_page_indices,
        kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        data_type=torch.float16,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(batch_size, num_qo_heads, head_dim).half().to(device)
        outputs.append(decode_wrapper.run(q, kv_cache_at_layer[i]))
    assert outputs[0].shape == torch.Size([7, 64, 128])
    assert all(o.isfinite().all() for o in outputs)


@pytest.mark.parametrize("form", ["NHD pair", "NHD tensor", "HND pair", "HND tensor", "HND pair of views"])
def test_run_over_each_form_of_cache_matches_the_oracle(form, batch, prompts):
    for one, wrapper in ((batch, decoder(batch, form[:3])), (prompts, prefiller(prompts, form[:3]))):
        close(*wrapper.run(one.q, caches(one)[form], return_lse=True), one)
        close(wrapper.run(one.q, caches(one)[form]), None, one)
        close(*wrapper.run_return_lse(one.q, caches(one)[form]), one)


def test_run_with_out_and_lse_writes_to_them(batch):
    wrapper = decoder(batch)
    out, lse = torch.full_like(batch.q, torch.nan), torch.full(batch.q.shape[:2], torch.nan)
    result = wrapper.run(batch.q, (batch.k, batch.v), out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    close(out, lse, batch)
    lse.fill_(torch.nan)
    assert wrapper.run(batch.q, (batch.k, batch.v), out=out, lse=lse) is out
    assert lse.isfinite().all()


def test_run_with_scales_and_layer_values_matches_the_oracle(batch):
    wrapper, cache = decoder(batch), (batch.k, batch.v)
    scaled = {"k": (batch.k.double() * 0.5 * 0.25), "v": batch.v.double() * 3.0}
    close(wrapper.run(batch.q, cache, q_scale=0.5, k_scale=0.25, v_scale=3.0), None, batch, **scaled)
    close(wrapper.run(batch.q, cache, 0.5, 0.25, 3.0), None, batch, **scaled)
    per_head = torch.tensor([0.5, 2.0])
    close(
        wrapper.run(batch.q, cache, k_scale=per_head, v_scale=per_head), None, batch, k_scale=per_head, v_scale=per_head
    )
    for change in ({"window_left": 7}, {"logits_soft_cap": 3.0}, {"sm_scale": 0.3}):
        close(wrapper.run(batch.q, cache, **change), None, batch, spec=batch.spec.replace(**change))
    sinks = torch.randn(8)
    close(wrapper.run(batch.q, cache, sinks=sinks), None, batch, spec=batch.spec.replace(sinks=True), sinks=sinks)
    close(wrapper.run(batch.q, cache), None, batch)  # and the plan is what it was


@pytest.mark.parametrize(
    "layer",
    [
        {"window_left": 5},
        {"logits_soft_cap": 2.0},
        {"sm_scale": 0.2},
        {"pos_encoding_mode": "ALIBI"},
        {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 500.0, "rope_scale": 4.0},
    ],
    ids=lambda d: next(iter(d)),
)
def test_plan_of_each_layer_matches_the_oracle(layer, batch, prompts):
    renamed = {("pos_encoding" if k == "pos_encoding_mode" else k): v for k, v in layer.items()}
    for one, make in ((batch, decoder), (prompts, prefiller)):
        spec = one.spec.replace(**renamed)
        close(*make(one, **layer).run(one.q, (one.k, one.v), return_lse=True), one, spec=spec)
        # The deprecated names give the layer again with each call.
        old = make(one)
        arguments = {**layer, "causal": True} if make is prefiller else layer
        close(old.forward(one.q, (one.k, one.v), **arguments), None, one, spec=spec)
        close(*old.forward_return_lse(one.q, (one.k, one.v), **arguments), one, spec=spec)
        old.end_forward()


def test_plan_with_alibi_slopes_matches_the_oracle(batch, prompts, rng):
    slopes = [rng.uniform(0, 0.5) for _ in range(8)]
    alibi = {"pos_encoding_mode": "ALIBI", "alibi_slopes": slopes}
    for one, make in ((batch, decoder), (prompts, prefiller)):
        spec = one.spec.replace(pos_encoding="ALIBI", slopes=tuple(slopes))
        close(make(one, **alibi).run(one.q, (one.k, one.v)), None, one, spec=spec)
        with pytest.raises(ValueError, match=r"alibi_slopes .* 8 finite numbers, one per head"):
            make(one, **{**alibi, "alibi_slopes": slopes[:5]})


def test_begin_forward_with_arguments_by_position_plans(batch):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    wrapper.begin_forward(*tables(batch), *heads(batch), 16, "NONE", -1, 0.0, "bfloat16", None, None, None, 0.125)
    close(wrapper.forward(batch.q, (batch.k, batch.v)), None, batch)


def test_plan_with_old_and_new_names_of_dtypes_matches_the_oracle(batch):
    for names in ({"data_type": "bfloat16"}, {"q_data_type": BF16}, {"q_data_type": None, "data_type": BF16}):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.device = torch.device("cpu")
        wrapper.plan(*tables(batch), *heads(batch), 16, **names)
        close(wrapper.run(batch.q, (batch.k, batch.v)), None, batch)


def test_decode_of_several_query_tokens_matches_the_oracle(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16)
    batch = random_batch(spec, [3, 3], [30, 17], 16)
    wrapper = decoder(batch, q_len_per_req=3)
    close(wrapper.run(batch.q, (batch.k, batch.v), q_len_per_req=3), None, batch)
    with pytest.raises(ValueError, match=r"q_len_per_req = 2 .* 3, planned"):
        wrapper.run(batch.q, (batch.k, batch.v), q_len_per_req=2)


def test_decode_over_fp8_caches_matches_the_oracle(rng):
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16, kv_dtype=kv_dtype)
        batch = random_batch(spec, [1, 1], [30, 17], 16, k_scale=0.3, v_scale=1.7)
        wrapper = decoder(batch, kv_data_type=kv_dtype)
        close(wrapper.run(batch.q, (batch.k, batch.v), k_scale=0.3, v_scale=1.7), None, batch)


def test_prefill_with_bool_and_packed_masks_matches_the_oracle(rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16, custom_mask=True, causal=False)
    batch = random_batch(spec, [5, 1, 40], [30, 1, 40], 16)
    masks = [{"custom_mask": batch.bool_mask}, {"custom_mask": batch.bool_mask.byte() * 2}]
    for mask in (*masks, {"packed_custom_mask": batch.mask.bits}):
        close(prefiller(batch, **mask).run(batch.q, (batch.k, batch.v)), None, batch)
    with pytest.raises(ValueError, match=r"custom_mask is torch.float32: it must be bool or of integers"):
        prefiller(batch, custom_mask=batch.bool_mask.float())
    with pytest.raises(ValueError, match=r"custom_mask has 3 entries: .* is 1751"):
        prefiller(batch, custom_mask=batch.bool_mask[:3])
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    k, v, indptr = batch.rows()
    ragged.plan(batch.qo.indptr, indptr, *heads(batch), custom_mask=batch.bool_mask, q_data_type=BF16)
    close(ragged.run(batch.q, k, v), None, batch)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_prefill_in_each_layout_matches_the_oracle(layout, prompts):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8), layout)
    k, v, indptr = prompts.rows()
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    wrapper.plan(prompts.qo.indptr, indptr, *heads(prompts), causal=True, q_data_type=BF16)
    close(*wrapper.run(prompts.q, k, v, return_lse=True), prompts)
    close(*wrapper.forward_return_lse(prompts.q, k, v, causal=True), prompts)
    close(wrapper.run(prompts.q, k, v, o_scale=0.5) / 2, None, prompts)
    with pytest.raises(ValueError, match=r"k.shape = .* at least kv_indptr\[-1\] = 71"):
        wrapper.run(prompts.q, *((k[:5], v[:5]) if layout == "NHD" else (k[:, :5], v[:, :5])))


def test_run_with_arguments_by_position_takes_the_order_of_flashinfer(batch):
    """Their order is that of FlashInfer's documentation."""
    out, lse = decoder(batch).run(batch.q, (batch.k, batch.v), None, None, 2.0, True)
    exact, exact_lse = batch.exact()
    assert relative_error(out, 2 * exact) < 3e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="arguments by position = 5"):
        decoder(batch).run(batch.q, (batch.k, batch.v), None, None, None, True, None)


def test_run_with_lse_base_and_layout_converts_the_lse(prompts):
    wrapper = prefiller(prompts)
    cache = (prompts.k, prompts.v)
    _, base_2 = wrapper.run(prompts.q, cache, return_lse=True)
    _, natural = wrapper.run(prompts.q, cache, return_lse=True, lse_base="ln", lse_layout="HN")
    torch.testing.assert_close(natural.T / torch.tensor(2.0).log(), base_2)
    given = torch.empty(8, len(prompts.q))
    wrapper.run(prompts.q, cache, lse=given, lse_base="ln", lse_layout="HN")
    torch.testing.assert_close(given, natural)


def test_rows_beyond_the_batch_are_zero(prompts):
    q = torch.cat([prompts.q, torch.full_like(prompts.q[:3], torch.nan)])
    out, lse = prefiller(prompts).run(q, (prompts.k, prompts.v), return_lse=True)
    close(out[:-3], lse[:-3], prompts)
    assert not out[-3:].any()
    assert (lse[-3:] == -torch.inf).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False])
def test_single_prefill_and_decode_match_the_oracle(layout, causal, rng):
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16, causal=causal)
    batch = random_batch(spec, [40], [90], 16)
    k, v, _ = batch.rows()
    k, v = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(batch.q, k, v, causal=causal, kv_layout=layout)
    close(out, lse, batch)
    out, lse = flashinfer.single_decode_with_kv_cache(batch.q[-1], k, v, kv_layout=layout, return_lse=True)
    last = Batch(spec, batch.q[-1:], batch.k, batch.v, type(batch.qo)(torch.tensor([0, 1]).int()), batch.kv)
    close(out[None], lse[None], last)
    mask = torch.rand(40, 90) < 0.5
    masked = flashinfer.single_prefill_with_kv_cache(batch.q, k, v, custom_mask=mask, kv_layout=layout)
    close(masked, None, batch, spec=spec.replace(causal=False, custom_mask=True), bool_mask=mask.flatten())


def test_decode_wrapper_with_graph_buffers_keeps_and_fills_them(batch):
    indptr, indices, last = torch.empty(6).int(), torch.full((64,), -1).int(), torch.empty(5).int()
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.empty(0, dtype=torch.uint8), indptr, indices, last
    )
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*tables(batch), *heads(batch), 16, q_data_type=BF16)
    assert torch.equal(indices[: len(batch.kv.indices)], batch.kv.indices)
    close(wrapper.run(batch.q, (batch.k, batch.v)), None, batch)
    last[3] -= 1  # contents change in place, as between replays
    shorter = type(batch.kv)(batch.kv.indptr, batch.kv.indices, last.clone(), 16)
    close(wrapper.run(batch.q, (batch.k, batch.v)), None, batch, kv=shorter)
    with pytest.raises(ValueError, match=r"the batch has 2 requests: .* was made for 5"):
        wrapper.plan(batch.kv.indptr[:3], batch.kv.indices, batch.kv.last_page_len[:2], *heads(batch), 16)
    small = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, indptr, indices[:3], last)
    small.device = torch.device("cpu")
    with pytest.raises(ValueError, match=r"paged_kv_indices_buf holds 3 entries: this plan needs"):
        small.plan(*tables(batch), *heads(batch), 16)


def test_prefill_wrapper_with_graph_buffers_keeps_and_fills_them(prompts):
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 4, 64, 3)]
    masks = [torch.zeros(999, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, *buffers, *masks)
    wrapper.device = torch.device("cpu")
    wrapper.plan(prompts.qo.indptr, *tables(prompts), *heads(prompts), 16, causal=True, q_data_type=BF16)
    close(wrapper.run(prompts.q, (prompts.k, prompts.v)), None, prompts)
    assert wrapper._qo_indptr_buf is buffers[0]
    mask = torch.rand(5 * 30 + 1 + 1600) < 0.5
    wrapper.plan(prompts.qo.indptr, *tables(prompts), *heads(prompts), 16, custom_mask=mask, q_data_type=BF16)
    spec = prompts.spec.replace(custom_mask=True, causal=False)
    close(wrapper.run(prompts.q, (prompts.k, prompts.v)), None, prompts, spec=spec, bool_mask=mask)


def test_reset_workspace_buffer_replaces_both_buffers(batch):
    wrapper = decoder(batch)
    float_buffer, int_buffer = torch.empty(8, dtype=torch.uint8), torch.full((1 << 14,), 7, dtype=torch.uint8)
    wrapper.reset_workspace_buffer(float_buffer, int_buffer)
    assert wrapper._float_workspace_buffer is float_buffer
    assert wrapper._int_workspace_buffer is int_buffer
    assert not int_buffer.any()
    close(wrapper.run(batch.q, (batch.k, batch.v)), None, batch)
    with pytest.raises(ValueError, match=r"float_workspace_buffer.device = 'meta'"):
        wrapper.reset_workspace_buffer(torch.empty(8, device="meta"), int_buffer)
    with pytest.raises(ValueError, match=r"int_workspace_buffer = '8 bytes' .* at least 16 bytes"):
        wrapper.reset_workspace_buffer(float_buffer, torch.empty(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(torch.empty(64, dtype=torch.uint8)[1:], int_buffer)


def test_int_workspace_grows_with_a_plan_that_needs_more(batch, monkeypatch):
    """Only batch-invariant layers may need more, on some GPUs, so the size is made up."""
    size = 100
    monkeypatch.setattr("quire.kernels.family.Family.int_workspace_size", lambda *given: size)
    wrapper = decoder(batch)
    again = (*tables(batch), *heads(batch), 16)
    first = wrapper._workspace.zeros
    wrapper.plan(*again, q_data_type=BF16)
    assert wrapper._workspace.zeros is first
    wrapper.invariant = True
    for size, there in ((100, 100), (104, 200), (50, 200), (2000, 2000)):
        wrapper.plan(*again, q_data_type=BF16)
        assert wrapper._workspace.zeros.nbytes == there
        assert not wrapper._workspace.zeros.any()
        assert wrapper.workspace_size(*again, q_data_type=BF16)[1] == max(size, 16)
        assert wrapper._workspace.zeros.nbytes == there
        close(wrapper.run(batch.q, (batch.k, batch.v)), None, batch)
    assert any(x is first for x in wrapper._workspace.outgrown)  # graphs may still use it
    with pytest.raises(ValueError, match=r"int_workspace_buffer = '512 bytes' .* at least 2000 bytes"):
        wrapper.reset_workspace_buffer(torch.empty(8, dtype=torch.uint8), torch.empty(512, dtype=torch.uint8))


def test_plan_takes_its_float_workspace_from_the_current_buffer(batch, monkeypatch):
    """Kernels for the CPU need none, so the size is made up."""
    size = 64
    monkeypatch.setattr("quire.wrappers.plan._float_workspace_size", lambda *given: size)
    wrapper = decoder(batch)
    again = (*tables(batch), *heads(batch), 16)
    for buffer in (torch.empty(128, dtype=torch.uint8), torch.empty(128, dtype=torch.uint8)):
        wrapper.reset_workspace_buffer(buffer, torch.empty(1 << 14, dtype=torch.uint8))
        for size in (64, 128, 0, 128, 64):
            for _ in range(2):
                wrapper.plan(*again, q_data_type=BF16)
                found = wrapper.planned.float_workspace
                assert found is None if size == 0 else (found.data_ptr(), found.nbytes) == (buffer.data_ptr(), size)
        size = 129
        for _ in range(2):
            with pytest.raises(ValueError, match=r"float_workspace_buffer = '128 bytes' .* 129 bytes are needed"):
                wrapper.plan(*again, q_data_type=BF16)


def test_wrapper_attributes_after_plan_are_those_that_engines_read(prompts):
    wrapper = prefiller(prompts, window_left=9, logits_soft_cap=4.0, sm_scale=0.25)
    seen = (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale, wrapper._backend)
    assert seen == (True, 9, 4.0, 0.25, "auto")
    assert wrapper.backend == "cpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda q: q[:3]}, r"q.shape = \[3, 8, 64\] .*: 5 tokens"),
        ({"q": lambda q: q[:, :4]}, r"q has shape \[5, 4, 64\]: it must be \[any, 8, 64\]"),
        ({"q": lambda q: q.half()}, r"q is torch.float16: it must be torch.bfloat16"),
        ({"q": lambda q: q.to("meta")}, r"q lies on meta: it must lie on cpu"),
        ({"q": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)}, r"q has strides .*: the last one must be 1"),
        ({"k": lambda k: k[:, :8]}, r"page size of the cache = 8 .*: 16, as planned"),
        ({"k": lambda k: k[..., :32]}, r"k has shape .*: it must be \[\d+, 16, 2, 64\]"),
        (
            {"k": lambda k: k[:2], "v": lambda v: v[:2]},
            r"kv_indices\[\d+\] = \d+ of request \d+ is out of range: 0 to 1",
        ),
        ({"v": lambda v: v[:-1]}, r"v has shape"),
        ({"k": lambda k: k[0]}, r"a pair must be 4-D each"),
    ],
)
def test_run_with_tensors_of_another_plan_is_refused(change, message, batch):
    tensors = {name: change.get(name, lambda x: x)(getattr(batch, name)) for name in ("q", "k", "v")}
    with pytest.raises(ValueError, match=message):
        decoder(batch).run(tensors["q"], (tensors["k"], tensors["v"]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, b: w.run(b.q, torch.zeros(3, 16, 2, 64)), r"one tensor must be 5-D with 2 at dim 1"),
        (
            lambda w, b: w.run(b.q, (b.k, b.v), out=torch.empty(5, 8, 64)),
            r"out is torch.float32: it must be torch.bfloat16",
        ),
        (lambda w, b: w.run(b.q, (b.k, b.v), lse=torch.empty(5, 7)), r"lse has shape \[5, 7\]: it must be \[5, 8\]"),
        (lambda w, b: w.run(b.q, (b.k, b.v), sinks=torch.ones(3)), r"sinks has shape \[3\]: it must be \[8\]"),
        (lambda w, b: w.run(b.q, (b.k, b.v), k_scale=torch.ones(3)), r"k_scale = \[3\] .* 2 heads"),
        (lambda w, b: w.run(b.q, (b.k, b.v), window_left=-5), r"window_left = -5"),
        (lambda w, b: w.run(b.q, (b.k, b.v), kv_cache_sf=1), r"kv_cache_sf is not supported"),
    ],
)
def test_run_with_wrong_arguments_is_refused(call, message, batch):
    with pytest.raises(ValueError, match=message):
        call(decoder(batch), batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_qo_heads": 9}, r"num_qo_heads = 9 .* multiple of num_kv_heads = 2"),
        ({"head_dim": 60}, r"head_dim_qk = 60"),
        ({"page_size": 0}, r"page_size = 0"),
        ({"pos_encoding_mode": "XPOS"}, r"pos_encoding_mode = 'XPOS'"),
        ({"q_data_type": "float99"}, r"q_data_type = 'float99'"),
        ({"q_len_per_req": 0}, r"q_len_per_req must be >= 1"),
        ({"window_right": 3}, r"window_right is not supported"),
    ],
)
def test_plan_with_wrong_arguments_is_refused(arguments, message, batch):
    given = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), heads(batch), strict=True))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match=message):
        wrapper.plan(*tables(batch), **{**given, "page_size": 16, **arguments})


def test_run_without_a_plan_is_refused(batch):
    for wrapper in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0)),
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0)),
    ):
        with pytest.raises(RuntimeError, match=r"plan\(\) must be called"):
            wrapper.run(batch.q, (batch.k, batch.v))
    with pytest.raises(ValueError, match="kv_layout = 'HDN'"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), "HDN")
    with pytest.raises(ValueError, match="backend = 'cudaa' is unknown"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), backend="cudaa")
