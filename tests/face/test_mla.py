"""Latent attention against the definition with both parts of heads in one, in float64."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

import quire
from helpers.interpret import INTERPRETED
from helpers.latent import (
    BACKEND,
    BF16,
    DEVICES,
    E4M3,
    F16,
    F32,
    PRECISION,
    check,
    exact,
    inputs,
    latent_batch,
)
from quire.bench.batches import Batch, relative_error
from quire.definition import PageTable, RaggedLayout
from quire.kernels import registry
from quire.kernels.call import Call
from quire.mla import MLAPlanMetadata


def wrapper_on(device, *graph, **options):
    workspace = torch.empty(1 << 27 if device == "cuda" else 0, dtype=torch.int8, device=device)
    return quire.BatchMLAPagedAttentionWrapper(workspace, *graph, **{"backend": BACKEND} | options)


def tables(batch: Batch, device="cpu"):
    kv = batch.kv
    return [x.to(device) for x in (batch.qo.indptr, kv.indptr, kv.indices, kv.lengths())]


def layer(batch: Batch):
    spec, width = batch.spec, batch.spec.head_dim_vo
    dims = (spec.num_qo_heads, width, spec.head_dim_qk - width, batch.kv.page_size)
    return (*dims, spec.mask.causal, spec.sm_scale, spec.q_dtype, spec.kv_dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_latent_run_of_a_mixed_batch_matches_the_oracle(dtype, device, rng):
    """Requests that decode, verify some tokens, prefill or are empty; tables on the host, the device, or both."""
    kv_lens = [rng.choice((0, 1, 33, 90)) for _ in range(3)] + [
        rng.choice((97, 150, 400) if not INTERPRETED else (60,))
    ]
    q_lens = [rng.choice((0, 1, 3, 17)) for _ in kv_lens]
    batch = latent_batch(rng, q_lens, kv_lens, dtype, padding=rng.choice((0, 2)))
    wrapper = wrapper_on(device)
    where = rng.choice((("cpu",) * 4, (device,) * 4, ("cpu", device, device, "cpu")))
    wrapper.plan(*(x.to(d) for x, d in zip(tables(batch), where, strict=True)), *layer(batch))
    given = inputs(batch, device, apart=rng.choice((True, False)))
    check(batch, *wrapper.run(*given, return_lse=True))
    check(batch, *wrapper.run(*given, return_lse=True, return_lse_base_on_e=True), base_e=True)
    out = torch.full(batch.q.shape[:1] + given[0].shape[1:], torch.nan, device=device, dtype=dtype)
    lse = torch.full(out.shape[:2], torch.nan, device=device)
    for _ in range(2):
        out.fill_(torch.nan)
        assert wrapper.run(*given, out, lse) is out
        check(batch, out, lse)
    other = replace(batch, q=torch.randn(batch.q.shape).to(dtype))
    check(other, wrapper.run(*inputs(other, device)))


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_latent_run_without_keys_is_zero(device, rng):
    batch = latent_batch(rng, [3, 1], [0, 0], F16, heads=16)
    wrapper = wrapper_on(device)
    wrapper.plan(*tables(batch, device), *layer(batch))
    ckv, kpe = (x[:0] for x in inputs(batch, device)[2:])
    out, lse = wrapper.run(*inputs(batch, device)[:2], ckv, kpe, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["cpu", "the device"])
def test_latent_plan_with_changed_tables_matches_the_oracle(where, device, rng):
    """Pages and lengths differ, as in an engine's steps; last pages are not full, and some have spare pages."""
    first = latent_batch(rng, [1, 1, 1], [300, 200, 100], F16, heads=16, dims=(512, 64))
    wrapper, given, size = wrapper_on(device), inputs(first, device), first.kv.page_size
    qo, indptr, indices, _ = tables(first)
    for _ in range(4):
        lengths = torch.tensor([rng.randint(1, n) for n in (300, 200, 100)], dtype=torch.int32)
        wrapper.plan(
            *(x.to(device if where != "cpu" else where) for x in (qo, indptr, indices, lengths)), *layer(first)
        )
        used = -(-lengths // size)
        pages = torch.cat([indices[a : a + n] for a, n in zip(indptr.tolist(), used.tolist(), strict=False)])
        table = PageTable(RaggedLayout.from_lengths(used).indptr, pages, lengths - (used - 1) * size, size)
        for _ in range(2):
            check(replace(first, kv=table), *wrapper.run(*given, return_lse=True))


def test_latent_plan_with_an_equal_layer_keeps_the_layer(monkeypatch):
    """All but tables that lie on the device; nothing is launched for those."""
    monkeypatch.setattr("quire.kernels.registry.choose", lambda *given: registry.family("reference"))
    wrapper = quire.BatchMLAPagedAttentionWrapper(torch.empty(16, device="meta"))
    planned = (16, 512, 64, 16, True, 0.1, F16, F16)

    def made():
        return [torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 9, 2)]

    qo, first, second = torch.empty(3, dtype=torch.int32, device="meta"), made(), made()
    for given, like_the_last in ((first, False), (second, True), ([*first[:2], second[2]], True)):
        last = wrapper.planned
        wrapper.plan(qo, *given, *planned)
        assert (last is not None and wrapper.planned.layer is last.layer) == like_the_last
        assert wrapper.planned.kv.indices is given[1]
        assert wrapper.planned.kv.kv_lens is given[2]
    with pytest.raises(ValueError, match="kv_len_arr is needed"):
        wrapper.plan(qo, *first[:2], None, *planned)
    wrapper.plan(qo, *first, *planned)
    pages = torch.empty(2, 5, dtype=torch.int32, device="meta")
    wrapper.plan(*[None] * 4, *planned, cum_seq_lens_q=qo, block_tables=pages, seq_lens=first[2])
    assert wrapper.planned.kv.indices is not first[1]


def test_latent_plan_with_graph_buffers_reads_these_alone(monkeypatch):
    """Buffers that the next plan fills, and nothing that was made of them in between."""
    monkeypatch.setattr("quire.kernels.registry.choose", lambda *given: registry.family("reference"))
    buffers = graph_buffers("meta", 2)
    wrapper = quire.BatchMLAPagedAttentionWrapper(torch.empty(16, device="meta"), True, *buffers)
    for _ in range(2):
        made = [torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 3, 9, 2)]
        wrapper.plan(*made, 16, 512, 64, 16, True, 0.1, F16, F16)
        assert wrapper.planned.kv.last_page_len is not wrapper.planned.kv.last_page_len
        plan = wrapper.planned
        page_size, indices, lengths, by_length, _ = Call(*buffers[:3], plan.qo, plan.kv, plan.spec).table()
        assert (page_size, by_length) == (16, True)
        assert indices is buffers[2]
        assert lengths is buffers[3]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_run_of_16_and_128_heads_matches_the_oracle(heads, device, rng):
    batch = latent_batch(rng, [1, 2], [70, 40], F16, heads=heads, dims=(512, 64))
    wrapper = wrapper_on(device)
    wrapper.plan(*tables(batch, device), *layer(batch))
    check(batch, *wrapper.run(*inputs(batch, device), return_lse=True))


@pytest.mark.parametrize("device", DEVICES)
def test_latent_plan_with_each_form_of_tables_matches_the_oracle(device, rng):
    batch = latent_batch(rng, [1, 4, 2], [40, 4, 77], F16, heads=3, dims=(128, 64))
    qo, indptr, indices, lengths = tables(batch, device)
    pages = torch.full((3, 80), 1 << 30, dtype=torch.int32, device=device)
    for b, (begin, end) in enumerate(zip(batch.kv.indptr.tolist(), batch.kv.indptr[1:].tolist(), strict=False)):
        pages[b, : end - begin] = indices[begin:end]
    # Request 2 has two pages more than it fills; what follows the last request's entries is ignored.
    more = torch.cat([indices, indices[:2]])
    longer = torch.cat([indptr[:-1], indptr[-1:] + 2, indptr[-1:] + 7])
    flat = {"qo_indptr": qo, "kv_indptr": longer, "kv_indices": more, "kv_len_arr": lengths}
    names = ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale")
    rest = dict(zip((*names, "q_data_type", "kv_data_type"), layer(batch), strict=True))
    dense = {"cum_seq_lens_q": qo, "block_tables": pages, "seq_lens": lengths}
    for plan in (
        flat,
        dense,
        {"metadata": MLAPlanMetadata.csr(qo, indptr, indices, lengths)},
        {"metadata": MLAPlanMetadata.dense(*dense.values(), max_q_len=4)},
        {"metadata": MLAPlanMetadata.dual(qo, indptr, indices, lengths, **dense)},
    ):
        wrapper = wrapper_on(device, check=rng.choice((True, False)))
        wrapper.plan(**plan, **rest, lse_mode="base2")
        q_nope, q_pe, ckv, kpe = inputs(batch, device)
        q, k = batch.q.to(device), batch.k.squeeze(2).to(device)
        check(batch, *wrapper.run(query=(q_nope, q_pe), kv_cache=(ckv, kpe), return_lse=True))
        check(batch, *wrapper.run(query=q, kv_cache=((ckv, kpe), k), return_lse=True))
        with pytest.raises(ValueError, match="LSE mode mismatch"):
            wrapper.run(query=q, kv_cache=k)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(512, 64), (512, 0)])
def test_latent_run_over_fp8_caches_matches_the_oracle(dims, device, rng):
    """Caches have one scale per part, or one per token and 128 elements of the first part."""
    heads = rng.choice((16, 64))
    batch = latent_batch(rng, [1, 3], [50, 90], BF16, kv_dtype=E4M3, heads=heads, dims=dims)
    wrapper = wrapper_on(device)
    wrapper.plan(*tables(batch, device), *layer(batch))
    given = inputs(batch, device)
    for scales in ((0.5, 3.0), (2.0, 0.01)):
        result = wrapper.run(*given, ckv_scale=scales[0], kpe_scale=scales[1], return_lse=True)
        check(batch, *result, expected=exact(batch, *scales))
    scale = torch.rand(*given[2].shape[:2], dims[0] // 128) + 0.5
    expected = exact(batch, scale.repeat_interleave(128, -1)[:, :, None], 0.3)
    out = wrapper.run(*given, ckv_scale_arr=scale.to(device), kpe_scale=0.3)
    assert relative_error(out.float().cpu(), expected[0]) < 2 * PRECISION[BF16]  # the copy is rounded too


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_latent_run_batch_invariant_has_equal_bits_alone(device, products_in_order, rng):
    q_lens, kv_lens = [1, 3, 1], [30, 80, 300] if INTERPRETED else [30, 700, 1500]
    batch = latent_batch(rng, q_lens, kv_lens, F16, heads=16, dims=(512, 64))
    wrapper = wrapper_on(device, batch_invariant=True)
    wrapper.plan(*tables(batch, device), *layer(batch))
    q_nope, q_pe, *cache = inputs(batch, device)
    out, lse = wrapper.run(q_nope, q_pe, *cache, return_lse=True)
    check(batch, out, lse)
    qo, indptr, indices, lengths = tables(batch)
    # Tables on the host say how many tokens a request has.
    for b, where in enumerate(("cpu", device, "cpu")):
        rows, pages = slice(int(qo[b]), int(qo[b + 1])), slice(int(indptr[b]), int(indptr[b + 1]))
        own = [qo[b : b + 2] - qo[b], indptr[b : b + 2] - indptr[b], indices[pages], lengths[b : b + 1]]
        wrapper.plan(*(x.to(where) for x in own), *layer(batch))
        alone, alone_lse = wrapper.run(q_nope[rows], q_pe[rows], *cache, return_lse=True)
        assert torch.equal(alone, out[rows])
        assert torch.equal(alone_lse, lse[rows])


@pytest.mark.parametrize("device", DEVICES)
def test_latent_run_with_sinks_matches_the_oracle(device, rng):
    batch = latent_batch(rng, [1, 5], [30, 60], F16, sinks=True)
    wrapper = wrapper_on(device)
    wrapper.plan(*tables(batch, device), *layer(batch), use_sinks=True)
    check(batch, *wrapper.run(*inputs(batch, device), sinks=batch.sinks.to(device), return_lse=True))
    with pytest.raises(ValueError, match="sinks is missing"):
        wrapper.run(*inputs(batch, device))


def graph_buffers(device, batch_size):
    sizes = (batch_size + 1, batch_size + 1, 500, batch_size)
    return [torch.full((n,), 1 << 30, dtype=torch.int32, device=device) for n in sizes]


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", BACKEND), *(pytest.param("cuda", x, marks=pytest.mark.gpu) for x in ("auto", "triton"))],
)
def test_latent_graph_after_another_plan_reads_its_buffers(device, backend, rng):
    """On a GPU the graph is captured before the second plan, and replayed after it."""
    first = latent_batch(rng, [2, 2], [0, 60], F16, heads=16, dims=(512, 64), causal=True)
    buffers = graph_buffers(device, 2)
    wrapper = wrapper_on(device, True, *buffers, backend=backend)
    wrapper.plan(*tables(first, device), *layer(first))
    given = inputs(first, device, apart=True)
    check(first, *wrapper.run(*given, return_lse=True))
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = wrapper.run(*given)
    kv = first.kv
    second = replace(first, kv=type(kv)(torch.tensor([0, 1, 2]).int(), kv.indices, torch.ones(2).int(), kv.page_size))
    wrapper.plan(*tables(second, device), *layer(second))
    assert [x.data_ptr() for x in (wrapper.planned.kv.indptr, wrapper.planned.kv.indices)] == [
        x.data_ptr() for x in buffers[1:3]
    ]
    if device == "cuda":
        graph.replay()
    else:
        out = wrapper.run(*given)
    check(second, out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=str)
def test_compiled_latent_run_matches_the_oracle(kv_dtype, device, rng):
    batch = latent_batch(rng, [1, 3], [20, 30], BF16, kv_dtype=kv_dtype, heads=16, dims=(128, 64))
    wrapper = wrapper_on(device)
    wrapper.plan(*tables(batch, device), *layer(batch))
    scales = {} if kv_dtype is None else {"ckv_scale": 0.5, "kpe_scale": 2.0}
    compiled = torch.compile(wrapper.run, backend="aot_eager", fullgraph=True)
    result = compiled(*inputs(batch, device), return_lse=True, **scales)
    check(batch, *result, expected=exact(batch, *scales.values()))


def test_attend_of_a_latent_layer_passes_opcheck(rng):
    batch = latent_batch(rng, [1], [20], F16, heads=2, dims=(128, 64))
    q_nope, q_pe, ckv, kpe = inputs(batch, "cpu")
    out, lse, kv = torch.empty_like(q_nope), torch.empty(1, 2), batch.kv
    parts = (q_nope, ckv[:, :, None], ckv[:, :, None], q_pe, kpe[:, :, None])
    pages = (batch.qo.indptr, kv.indptr, kv.indices, kv.last_page_len, kv.page_size)
    nothing = (None, None, None, None, 0, None, None, None, None)
    rest = ([1.0, 1.0, 1.0, 1.0], 1, batch.spec.replace(latent=True).text, "auto", None, None, None)
    torch.library.opcheck(torch.ops.quire.attend.default, (out, lse, None, *parts, *pages, *nothing, *rest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": None, "sm_scale": None}, "plan\\(\\) needs num_heads, sm_scale"),
        ({"page_size": 0}, "page_size = 0"),
        ({"head_dim_ckv": 500}, "head_dim_ckv = 500"),
        ({"head_dim_kpe": 32}, "head_dim_kpe = 32"),
        ({"q_data_type": F16, "kv_data_type": E4M3}, "q_data_type=torch.bfloat16"),
        ({"scale_mode": "kv-per-tensor"}, "scale_mode = 'kv-per-tensor'"),
        ({"output_scale": "per-tensor"}, "output_scale = 'per-tensor'"),
        ({"lse_mode": "basee "}, "lse_mode = 'basee '"),
        ({"use_profiler": True}, "use_profiler"),
        ({"skip_softmax": True}, "skip_softmax"),
        ({"kv_len_arr": None}, "kv_len_arr is needed, besides qo_indptr"),
        ({"kv_len_arr": torch.tensor([41, 4]).int()}, r"kv_len_arr\[0\] = 41 is out of range"),
        ({"kv_len_arr": torch.tensor([40, -1]).int()}, r"kv_len_arr\[1\] = -1 is out of range"),
        ({"kv_len_arr": torch.tensor([40.0, 4])}, "kv_len_arr is torch.float32"),
        ({"kv_indptr": torch.tensor([0, 5]).int()}, "kv_indptr has 2 entries: 3 are needed"),
        ({"kv_indices": torch.arange(5).int()}, r"kv_indptr\[-1\] = 6 is beyond"),
        ({"qo_indptr": torch.tensor([0, 5]).int()}, r"len\(qo_indptr\) = 2"),
        ({"qo_indptr": torch.tensor([0, 5, 3]).int()}, "falls at request 1"),
        ({"metadata": MLAPlanMetadata()}, "metadata and tables"),
        ({"qo_indptr": None, "kv_indptr": None, "kv_indices": None, "kv_len_arr": None}, "tables are needed"),
    ],
)
def test_latent_plan_with_wrong_arguments_is_refused(changes, message):
    given = {
        "qo_indptr": torch.tensor([0, 1, 3]).int(), "kv_indptr": torch.tensor([0, 5, 6]).int(),
        "kv_indices": torch.arange(6).int(), "kv_len_arr": torch.tensor([40, 4]).int(), "num_heads": 16,
        "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 8, "causal": False, "sm_scale": 0.1,
        "q_data_type": BF16, "kv_data_type": BF16,
    }  # fmt: skip
    buffers = graph_buffers("cpu", 2)
    wrapper = wrapper_on("cpu", True, *buffers)
    with pytest.raises((ValueError, TypeError), match=message):
        wrapper.plan(**{**given, **changes})
    assert all((x == 1 << 30).all() for x in buffers)
    for i, name in enumerate(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")):
        buffers = graph_buffers("cpu", 2)
        buffers[i] = None if i % 2 else buffers[i][:1]
        with pytest.raises(ValueError, match=name):
            wrapper_on("cpu", True, *buffers).plan(**given)


def test_latent_run_with_wrong_arguments_is_refused(rng):
    batch = latent_batch(rng, [1, 3], [20, 30], BF16, kv_dtype=E4M3, heads=16, dims=(512, 64))
    wrapper = wrapper_on("cpu")
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    given = dict(zip(names, inputs(batch, "cpu"), strict=True)) | {"ckv_scale": 1.0, "kpe_scale": 1.0}
    with pytest.raises(RuntimeError, match=r"run\(\) called before plan\(\)"):
        wrapper.run(**given)
    wrapper.plan(*tables(batch), *layer(batch))
    pages, size = given["ckv_cache"].shape[:2]
    for changes, message in (
        ({"q_nope": given["q_nope"].half()}, "q_nope.dtype = torch.float16"),
        ({"ckv_cache": given["ckv_cache"].bfloat16()}, "ckv_cache.dtype = torch.bfloat16"),
        ({"q_pe": given["q_pe"][:, :8]}, r"q_pe has shape \[4, 8, 64\]"),
        ({"kpe_cache": given["kpe_cache"][:-1]}, "kpe_cache has shape"),
        ({"kpe_cache": None}, "kv_cache must be a tensor of both parts, or a pair"),
        ({"query": given["q_nope"]}, "query is given besides q_nope"),
        ({"q_nope": None, "q_pe": None}, "needs query, or q_nope and q_pe"),
        ({"ckv_scale": None}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"ckv_scale_arr": torch.ones(pages, size, 4)}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"ckv_scale": None, "ckv_scale_arr": torch.ones(pages, size, 3)}, "Invalid shape of ckv_scale_arr"),
        ({"kpe_scale": None}, "kpe_scale is needed"),
        ({"ckv_scale": 0.0}, "ckv_scale = 0.0"),
        ({"kpe_scale": float("nan")}, "kpe_scale = nan"),
        ({"o_scale": 1.0}, "o_scale"),
        ({"kv_len": torch.ones(2)}, "kv_len"),
        ({"sinks": torch.zeros(16)}, "sinks is given"),
        ({"out": torch.empty(4, 16, 512)}, "out is torch.float32"),
        ({"lse": torch.empty(4, 8)}, "lse has shape"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            wrapper.run(**{**given, **changes})
    unquantized = latent_batch(rng, [1], [20], BF16, heads=16, dims=(512, 64))
    wrapper.plan(*tables(unquantized), *layer(unquantized))
    with pytest.raises(ValueError, match=r"ckv_scale = 1.0 .* is not fp8"):
        wrapper.run(*inputs(unquantized, "cpu"), ckv_scale=1.0)
    with pytest.raises(ValueError, match="backend = 'fa9' is unknown"):
        quire.BatchMLAPagedAttentionWrapper(None, backend="fa9")


def test_latent_run_takes_scales_by_keyword_alone():
    parameters = inspect.signature(quire.BatchMLAPagedAttentionWrapper.run).parameters
    for name in ("ckv_scale", "ckv_scale_arr", "kpe_scale"):
        assert parameters[name].kind == inspect.Parameter.KEYWORD_ONLY
