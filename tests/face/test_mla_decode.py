"""FlashInfer's older wrapper for decode over a latent cache, and the sizes of such models."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

import quire
from helpers.latent import BACKEND, BF16, DEVICES, E4M3, F16, F32, check, exact, inputs, latent_batch
from quire import mla
from quire.definition import PageTable

on_each = pytest.mark.parametrize("device", DEVICES)


def decodes(rng, dtype, kv_lens, dims=None, **layer):
    dims = dims or rng.choice([(512, 64), (128, 64), (256, 64)])
    return latent_batch(rng, [1] * len(kv_lens), kv_lens, dtype, dims=dims, heads=rng.choice((3, 16)), **layer)


def tables(batch, device="cpu"):
    return [x.to(device) for x in (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)]


def wrapper_on(device, *graph):
    workspace = torch.empty(1 << 27 if device == "cuda" else 0, dtype=torch.int8, device=device)
    return quire.BatchDecodeMlaWithPagedKVCacheWrapper(workspace, *graph, backend=BACKEND)


def plan(wrapper, batch, device="cpu", **more):
    spec = batch.spec
    layer = {"data_type": spec.kv_dtype, "q_data_type": spec.q_dtype} | more
    sizes = (spec.num_qo_heads, spec.head_dim_vo, batch.kv.page_size, spec.sm_scale)
    wrapper.plan(*tables(batch, device), *sizes, **layer)


@on_each
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_latent_decode_of_a_batch_matches_the_oracle(dtype, device, rng):
    batch = decodes(rng, dtype, [rng.choice((1, 33, 90)), 0, 150])
    wrapper = wrapper_on(device)
    plan(wrapper, batch, device, rope_theta=1e4)  # which rotates nothing
    given = inputs(batch, device, apart=rng.choice((True, False)))
    for _ in range(2):
        check(batch, *wrapper.run(*given, return_lse=True))
    check(batch, *wrapper.run_return_lse(*given))
    out, lse = torch.full_like(given[0], torch.nan), torch.full(given[0].shape[:2], torch.nan, device=device)
    assert wrapper.run(*given, out=out, lse=lse) is out
    check(batch, out, lse)
    scaled = replace(batch, spec=batch.spec.replace(sm_scale=batch.spec.sm_scale * 0.5 * 3.0))
    wanted, wanted_lse = exact(scaled)
    result = wrapper.run(*given, q_scale=0.5, k_scale=3.0, v_scale=2.0, return_lse=True)
    check(batch, *result, expected=(wanted * 2.0, wanted_lse))


@on_each
@pytest.mark.parametrize("layer", [{"window_left": 20}, {"logits_soft_cap": 3.0}, {"window_left": 0}], ids=str)
def test_latent_decode_with_windows_and_soft_caps_matches_the_oracle(layer, device, rng):
    batch = decodes(rng, F16, [40, 5, 70], **layer, causal=True)
    wrapper = wrapper_on(device)
    plan(wrapper, batch, device, **layer)
    check(batch, *wrapper.run(*inputs(batch, device), return_lse=True))


@on_each
def test_latent_decode_over_an_fp8_cache_matches_the_oracle(device, rng):
    batch = decodes(rng, BF16, [40, 5], kv_dtype=E4M3, dims=(512, 64))
    wrapper = wrapper_on(device)
    plan(wrapper, batch, device)
    result = wrapper.run(*inputs(batch, device), k_scale=0.5, v_scale=0.5, return_lse=True)
    check(batch, *result, expected=exact(batch, 0.5, 0.5))


@on_each
def test_latent_decode_graph_after_another_plan_reads_its_buffers(device, rng):
    """Which are the plan's own tables first, as in FlashInfer's test; a graph sees the plans after it."""
    first = decodes(rng, F16, [40, 60], dims=(512, 64))
    buffers = tables(first, device)
    wrapper = wrapper_on(device, True, True, *buffers)
    given = inputs(first, device, apart=True)
    wrapper.plan(*buffers, first.spec.num_qo_heads, 512, first.kv.page_size, first.spec.sm_scale)
    check(first, *wrapper.run(*given, return_lse=True))
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = wrapper.run(*given)
    kv = first.kv
    ends = torch.tensor([0, 1, 2]).int()
    second = replace(first, kv=PageTable(ends, kv.indices.flip(0), torch.ones(2).int(), kv.page_size))
    plan(wrapper, second, device)
    if device == "cuda":
        graph.replay()
    else:
        out = wrapper.run(*given)
    check(second, out)
    assert buffers[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_compressed_kv": 500}, "head_dim_compressed_kv = 500"),
        ({"data_type": E4M3}, "q_data_type=torch.bfloat16"),
        ({"last_page_len": torch.tensor([9]).int()}, r"kv_last_page_len\[0\] = 9"),
        ({"sm_scale": float("nan")}, "sm_scale = nan"),
    ],
)
def test_latent_decode_plan_with_wrong_arguments_is_refused(changes, message):
    given = {
        "indptr": torch.tensor([0, 2]).int(), "indices": torch.tensor([0, 1]).int(),
        "last_page_len": torch.tensor([3]).int(), "num_qo_heads": 16, "head_dim_compressed_kv": 512, "page_size": 8,
        "sm_scale": 0.1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        wrapper_on("cpu").plan(**{**given, **changes})


def test_latent_decode_run_with_wrong_arguments_is_refused(rng):
    batch = decodes(rng, F16, [9, 4], dims=(512, 64))
    wrapper, given = wrapper_on("cpu"), inputs(batch, "cpu")
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(*given)
    plan(wrapper, batch)
    with pytest.raises(ValueError, match=r"q_nope\.shape = \[1, .* 2 rows"):
        wrapper.run(given[0][:1], given[1][:1], *given[2:])
    with pytest.raises(ValueError, match="paged_kv_indices_buffer should be a"):
        wrapper_on("cpu", True, False, torch.zeros(3).int(), None, torch.zeros(2).int())


def test_dimensions_of_deepseek_are_supported():
    assert asdict(mla.deepseek_mla_dimensions) == {
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
    }  # fmt: skip
    layer = mla.MLALayerDimensions(head_dimensions=mla.smaller_mla_dimensions, num_heads=32)
    assert layer in mla.supported_mla_layer_dimensions
    assert layer.head_dimensions in mla.supported_mla_head_dimensions
    other = mla.MLAHeadDimensions(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)
    assert other not in mla.supported_mla_head_dimensions
