"""Attention of one request over keys and values that are not in pages."""

from __future__ import annotations

import pytest
import torch

import quire as flashinfer
from helpers.flashinfer_calls import DEVICES, F16, SPEC, close
from quire.bench.batches import random_batch


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def test_single_prefill_scales_by_position_multiply_those_by_name(rng, device):
    batch = random_batch(SPEC, [7], [40], 16, device=device)
    k, v, _ = batch.rows()
    out = flashinfer.single_prefill_with_kv_cache(
        batch.q, k, v, 0.5, 0.5, torch.tensor([3.0, 1.0], device=device), causal=True, k_scale=2.0, v_scale=0.5
    )
    close(out, batch, k_scale=0.5, v_scale=torch.tensor([1.5, 0.5], device=device))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"custom_mask": torch.ones(3, 9, dtype=torch.bool)}, r"custom_mask.shape = \[3, 9\] .* = 30 entries"),
        ({"custom_mask": torch.ones(3, 10)}, r"custom_mask is torch.float32"),
        ({"packed_custom_mask": torch.ones(3, dtype=torch.uint8)}, r"uint8 of shape \[3\].* = 4 bytes"),
        ({"scale_k": torch.ones(5)}, r"scale_k = \[5\] .* 2 heads"),
        ({"kv_cache_sf": 1}, "kv_cache_sf is not supported"),
        ({"backend": "nobody"}, "backend = 'nobody' is unknown"),
        ({"window_left": -2}, "window_left = -2"),
        ({"pos_encoding_mode": "XPOS"}, "pos_encoding_mode = 'XPOS'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_single_prefill_with_wrong_options_is_refused(options, message):
    q, k = torch.randn(3, 8, 64), torch.randn(10, 2, 64)
    with pytest.raises(ValueError, match=message):
        flashinfer.single_prefill_with_kv_cache(q, k, k, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (10, 3, 64)}, "num_qo_heads = 8 .* multiple of num_kv_heads = 3"),
        ({"v": (9, 2, 64)}, r"v has shape \[9, 2, 64\]: it must be \[10, 2, 64\]"),
        ({"k": (10, 2, 32)}, r"k has shape \[10, 2, 32\]"),
        ({"q": (8, 64)}, r"q.shape = \[8, 64\]"),
        ({"k": (10, 64)}, r"k has shape \[10, 64\]: it must be 3-D"),
    ],
)
def test_single_prefill_with_wrong_shapes_is_refused(change, message):
    shapes = {"q": (3, 8, 64), "k": (10, 2, 64), "v": (10, 2, 64), **change}
    with pytest.raises(ValueError, match=message):
        flashinfer.single_prefill_with_kv_cache(*(torch.randn(shape) for shape in shapes.values()))


def test_single_prefill_without_keys_or_queries_is_empty(device):
    q, k = torch.randn(3, 8, 64, device=device), torch.randn(10, 2, 64, device=device)
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(q, k[:0], k[:0])
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(q[:0], k, k)
    assert (out.shape, lse.shape) == ((0, 8, 64), (0, 8))


@pytest.mark.gpu
def test_captured_single_prefill_replayed_reads_new_input():
    q, k, v = (torch.randn(n, h, 64, dtype=F16, device="cuda") for n, h in ((40, 8), (90, 2), (90, 2)))
    mask = torch.rand(40, 90, device="cuda") < 0.5

    def both():
        masked = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
        return masked, flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    torch.testing.assert_close(captured, both(), rtol=0, atol=0)


@pytest.mark.gpu
def test_single_prefill_compiled_with_graphs_equals_eager():
    q, k, v = (torch.randn(n, h, 64, dtype=F16, device="cuda") for n, h in ((40, 8), (90, 2), (90, 2)))
    compiled = torch.compile(flashinfer.single_prefill_with_kv_cache, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn_like(q)
        expected = flashinfer.single_prefill_with_kv_cache(x, k, v, causal=True)
        torch.testing.assert_close(compiled(x, k, v, causal=True), expected, rtol=0, atol=0)
