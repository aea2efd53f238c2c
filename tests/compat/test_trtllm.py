"""FlashInfer's functions over block tables, called as vLLM calls them, against the definition."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import torch

from helpers.block_tables import block_table_of
from quire import compat
from quire.bench.batches import Batch, random_batch, relative_error
from quire.compat.trtllm import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from quire.definition import attention_spec

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BOUND = 3e-3


@pytest.fixture(autouse=True)
def flashinfer():
    compat.install()
    yield import_module("flashinfer")
    compat.uninstall()


def layer(rng, **changes):
    kv_heads = rng.choice((1, 2))
    options = {"num_kv_heads": kv_heads, "num_qo_heads": kv_heads * rng.choice((1, 4)), "head_dim_qk": 64}
    return attention_spec(**{**options, "q_dtype": torch.bfloat16, "window_left": rng.choice((-1, 20)), **changes})


def arguments(batch: Batch, device: str, kv_layout: str) -> dict:
    """The arguments that prefill and decode have in common, as vLLM gives them."""
    k, v = (x.to(device) if kv_layout == "NHD" else x.transpose(1, 2).to(device) for x in (batch.k, batch.v))
    table, lengths = (x.to(device) for x in block_table_of(batch, 2))
    return {
        "query": batch.q.to(device), "kv_cache": (k, v), "workspace_buffer": torch.zeros(16, device=device).byte(),
        "block_tables": table.contiguous(), "seq_lens": lengths, "window_left": batch.spec.mask.window_left,
        "sinks": None if batch.sinks is None else batch.sinks.to(device), "o_sf_scale": None, "kv_cache_sf": None,
        "out": torch.full_like(batch.q, torch.nan, device=device), "kv_layout": kv_layout,
    }  # fmt: skip


@devices
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["xqa", "trtllm-gen"])
def test_decode_of_a_batch_gives_the_oracles_output(device, kv_layout, backend, rng):
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache as decode

    assert decode is trtllm_batch_decode_with_kv_cache
    q_len = rng.choice((1, 3))
    batch = random_batch(
        layer(rng, sinks=True), [q_len] * 3, [rng.randrange(q_len, 70) for _ in range(3)], 16, kv_layout=kv_layout
    )
    given = arguments(batch, device, kv_layout)
    out = decode(
        **given, max_seq_len=1 << 20, bmm1_scale=batch.spec.sm_scale, bmm2_scale=1.0, backend=backend,
        q_len_per_req=q_len, lse=None, return_lse=False,
    )  # fmt: skip
    assert out is given["out"]
    assert relative_error(out.cpu(), batch.exact()[0]) < BOUND


@devices
def test_decode_of_fp8_takes_scales_as_numbers_and_tensors(device, rng):
    spec = layer(rng, kv_dtype=torch.float8_e4m3fn, head_dim_qk=128)
    batch = random_batch(spec, [1] * 3, [rng.randrange(1, 70) for _ in range(3)], 16, k_scale=0.5, v_scale=2.0)
    given = arguments(batch, device, "NHD")
    exact = batch.exact()[0]
    for wrap in (float, lambda x: torch.tensor([x], device=device)):
        out = trtllm_batch_decode_with_kv_cache(
            **given, max_seq_len=128, bmm1_scale=wrap(0.5 * spec.sm_scale), bmm2_scale=wrap(2.0)
        )
        assert relative_error(out.cpu(), exact) < BOUND


@devices
def test_decode_of_ragged_queries_returns_the_lse(device, rng):
    batch = random_batch(layer(rng), [1, 4, 2], [20, rng.randrange(4, 60), 33], 16)
    given = arguments(batch, device, "NHD") | {"out": None}
    out, lse = trtllm_batch_decode_with_kv_cache(
        **given, max_seq_len=128, bmm1_scale=batch.spec.sm_scale, q_len_per_req=None, max_q_len=4,
        cum_seq_lens_q=batch.qo.indptr.to(device), return_lse=True, out_dtype="float16",
    )  # fmt: skip
    exact, exact_lse = batch.exact()
    assert out.dtype == torch.float16
    assert relative_error(out.cpu(), exact) < BOUND
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-5, atol=1e-4)


@devices
@pytest.mark.parametrize("causal", [True, False])
def test_context_of_a_batch_gives_the_oracles_output(device, causal, rng):
    from flashinfer.prefill import trtllm_batch_context_with_kv_cache as context

    assert context is trtllm_batch_context_with_kv_cache
    spec = layer(rng, causal=causal, window_left=-1)
    batch = random_batch(spec, [5, 17, 1], [rng.randrange(5, 60), 17, 40], 16, kv_layout="HND")
    out = context(
        **arguments(batch, device, "HND"), max_q_len=17, max_kv_len=64, bmm1_scale=spec.sm_scale, bmm2_scale=1.0,
        batch_size=3, cum_seq_lens_q=batch.qo.indptr.to(device), cum_seq_lens_kv=batch.kv.indptr.to(device),
        causal=causal,
    )  # fmt: skip
    assert relative_error(out.cpu(), batch.exact()[0]) < BOUND


@devices
def test_tables_with_further_rows_give_the_output_of_the_batch(device, rng):
    batch = random_batch(layer(rng), [2, 2], [rng.randrange(2, 40), 30], 8)
    given, indptr = arguments(batch, device, "NHD"), batch.qo.indptr.to(device)
    given["block_tables"] = torch.nn.functional.pad(given["block_tables"], (0, 0, 0, 3), value=1 << 30)
    given["seq_lens"] = torch.nn.functional.pad(given["seq_lens"], (0, 3), value=1 << 30)
    scales = {"bmm1_scale": batch.spec.sm_scale, "bmm2_scale": 1.0}
    ragged = {"q_len_per_req": None, "max_q_len": 2, "cum_seq_lens_q": indptr}
    for rows in ({"q_len_per_req": 2}, ragged):
        out = trtllm_batch_decode_with_kv_cache(**given, **scales, max_seq_len=64, **rows)
        assert relative_error(out.cpu(), batch.exact()[0]) < BOUND
    given["out"].fill_(torch.nan)
    out = trtllm_batch_context_with_kv_cache(
        **given, **scales, max_q_len=2, max_kv_len=64, batch_size=2, cum_seq_lens_kv=batch.kv.indptr.to(device),
        cum_seq_lens_q=torch.nn.functional.pad(indptr, (0, 3), value=int(indptr[-1])),
    )  # fmt: skip
    assert relative_error(out.cpu(), batch.exact()[0]) < BOUND


@devices
def test_xqa_decode_is_decode_over_nhd(device, rng, flashinfer):
    batch = random_batch(layer(rng), [2, 2], [rng.randrange(2, 40), 30], 8)
    given = arguments(batch, device, "NHD")
    del given["o_sf_scale"], given["kv_layout"]
    given["kv_cache"] = torch.stack(given["kv_cache"], 1)
    for rows in ({}, {"q_cu_seq_lens": batch.qo.indptr.to(device)}):
        out = flashinfer.decode.xqa_batch_decode_with_kv_cache(
            **given, max_seq_len=64, bmm1_scale=batch.spec.sm_scale, q_len_per_req=2, **rows
        )
        assert relative_error(out.cpu(), batch.exact()[0]) < BOUND


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"mask": torch.ones(2)}, "mask is not supported"),
        ({"o_sf_scale": 1.0}, "o_sf_scale is not supported"),
        ({"kv_cache_sf": ()}, "kv_cache_sf is not supported"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor is not supported"),
        ({"o_scale": 2.0}, "o_scale = 2.0 is not supported: 1"),
        ({"cp_world": 2}, "cp_world, cp_rank"),
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx = False"),
        ({"backend": "fastest"}, "backend = 'fastest' is unknown"),
        ({"kv_layout": "DHN"}, "kv_layout = 'DHN'"),
        ({"q_len_per_req": 0}, "q_len_per_req = 0"),
        ({"q_len_per_req": None}, "cum_seq_lens_q is a NoneType"),
        ({"out_dtype": torch.float16}, "out.dtype = torch.bfloat16 is not supported: out_dtype = torch.float16"),
        ({"sinks": [torch.zeros(4)] * 2}, "sinks = '2 tensors'"),
    ],
)
def test_decode_with_an_option_of_another_is_refused(option, words, rng):
    batch = random_batch(layer(rng), [1], [9], 16)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        trtllm_batch_decode_with_kv_cache(**{**arguments(batch, "cpu", "NHD"), "max_seq_len": 64, **option})
    assert words in str(error.value)


def test_autotuner_chooses_nothing(tmp_path, flashinfer):
    from flashinfer.autotuner import AutoTuner, autotune, get_autotune_process_group, set_autotune_process_group

    tuner = AutoTuner.get()
    assert tuner is AutoTuner.get()
    file = tmp_path / "tuning.json"
    with autotune(tune_mode=True, cache=str(file), skip_ops={"x"}), flashinfer.autotune_v2(mode="tune"):
        assert not file.exists()
    tuner.save_configs(str(file))
    assert file.read_text() == "{}"
    assert tuner.load_configs(str(file))
    tuner.clear_cache()
    set_autotune_process_group(None)
    assert get_autotune_process_group() is None
    assert inspect.isclass(import_module("flashinfer.autotuner.autotuner").AutoTuner)


@pytest.mark.gpu
def test_decode_in_a_graph_sees_later_lengths(rng):
    """vLLM captures one call per layer: equal layers, on other caches, over the tables of one batch."""
    spec = layer(rng, window_left=-1, head_dim_qk=128)
    batch = random_batch(spec, [1] * 4, [rng.randrange(20, 70) for _ in range(4)], 16)
    given = arguments(batch, "cuda", "NHD") | {"max_seq_len": 128, "bmm1_scale": spec.sm_scale}
    trtllm_batch_decode_with_kv_cache(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = trtllm_batch_decode_with_kv_cache(**given)
    trtllm_batch_decode_with_kv_cache(**{**given, "seq_lens": given["seq_lens"][:2], "query": given["query"][:2],
                                         "block_tables": given["block_tables"][:2], "out": None})  # fmt: skip
    graph.replay()
    assert relative_error(out.cpu(), batch.exact()[0]) < BOUND
    given["seq_lens"].fill_(1)
    graph.replay()
    first = batch.v[batch.kv.indices[batch.kv.indptr[:-1].long()].long(), 0].repeat_interleave(spec.group_size, 1)
    torch.testing.assert_close(out.cpu(), first)
