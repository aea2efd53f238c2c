"""Prefill and decode in one call, against the definition of each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import quire as flashinfer
from quire.bench.batches import random_batch, relative_error
from quire.definition import attention_spec
from quire.definition.oracle import attend

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SPEC = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype=torch.float32, window_left=20)
TABLES = ("indptr", "indices", "last_page_len")


def on(device, batch):
    """Queries, caches and tables there."""
    return (
        batch.q.to(device),
        (batch.k.to(device), batch.v.to(device)),
        [getattr(batch.kv, x).to(device) for x in TABLES],
    )


@pytest.fixture
def decodes(rng):
    return random_batch(SPEC, [1, 1, 1], [rng.randrange(1, 60) for _ in range(3)], rng.choice((1, 4, 16)))


def planned(decodes, device, **layer):
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(torch.empty(0, device=device))
    layer = {"window_left": 20, "q_data_type": torch.float32, **layer}
    wrapper.plan(*on(device, decodes)[2], 4, 2, 32, decodes.kv.page_size, **layer)
    return wrapper


@devices
@pytest.mark.parametrize("layer", ["default", "causal", "mask", "HND"])
def test_pod_of_a_prefill_and_decodes_matches_the_oracle(layer, device, decodes, rng):
    q_p, k_p, v_p = (torch.randn(n, heads, 32) for n, heads in ((7, 4), (19, 2), (19, 2)))
    mask = torch.rand(7, 19) < 0.7 if layer == "mask" else None
    options = {"causal_p": layer == "causal", "custom_mask_p": None if mask is None else mask.to(device)}
    rows = (k_p, v_p)
    if layer == "HND":
        rows, options["kv_layout_p"] = (k_p.transpose(0, 1), v_p.transpose(0, 1)), "HND"
    q_d, caches, _ = on(device, decodes)
    wrapper = planned(decodes, device)
    out_p, out_d = wrapper.run(q_p.to(device), *(x.to(device) for x in rows), q_d, caches, **options)
    spec = SPEC.replace(window_left=-1, causal=layer == "causal")
    assert relative_error(out_p.cpu(), attend(q_p, k_p, v_p, spec, mask=mask)[0]) < 2e-6
    assert relative_error(out_d.cpu(), decodes.exact()[0]) < 2e-6


@devices
def test_pod_with_a_layer_for_each_part_matches_the_oracle(device, decodes):
    q_p, k_p, v_p = (torch.randn(9, heads, 32) for heads in (4, 2, 2))
    q_d, caches, _ = on(device, decodes)
    wrapper = planned(decodes, device, sm_scale=0.3)
    own = {"sm_scale_d": 0.3, "window_left_d": 20, "kv_layout_d": "NHD", "rope_theta_d": 1e4}
    rows = [x.to(device) for x in (q_p, k_p, v_p)]
    out_p, out_d = wrapper.run(
        *rows,
        q_d,
        caches,
        window_left_p=3,
        sm_scale_p=0.1,
        pos_encoding_mode_p="ALIBI",
        k_scale=0.5,
        v_scale=2.0,
        **own,
    )
    spec = SPEC.replace(window_left=3, sm_scale=0.1, pos_encoding="ALIBI", causal=False)
    assert relative_error(out_p.cpu(), attend(q_p, k_p, v_p, spec)[0]) < 2e-6
    exact = replace(decodes, spec=SPEC.replace(sm_scale=0.15)).exact()[0] * 2
    assert relative_error(out_d.cpu(), exact) < 2e-6


def test_pod_run_with_wrong_arguments_is_refused(decodes):
    q_p, k_p, v_p = (torch.randn(9, heads, 32) for heads in (4, 2, 2))
    q_d, caches, _ = on("cpu", decodes)
    wrapper = planned(decodes, "cpu")
    for given, message in (
        ({"window_left_d": -1}, "window_left_d = -1 differs from the value planned, 20"),
        ({"kv_layout_d": "HND"}, "kv_layout_d = 'HND'"),
        ({"pos_encoding_mode_d": "ALIBI"}, "pos_encoding_mode_d = 'ALIBI'"),
        ({"custom_mask_d": torch.ones(3, 3)}, "custom_mask_d is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(q_p, k_p, v_p, q_d, caches, **given)
    with pytest.raises(ValueError, match="window_left_d = 3 differs from the value planned, -1"):
        planned(decodes, "cpu", window_left=None).run(q_p, k_p, v_p, q_d, caches, window_left_d=3)
    planned(decodes, "cpu", window_left=None).run(q_p, k_p, v_p, q_d, caches, window_left_d=-1)
    # Both are 1/sqrt(72), and differ in the last bit.
    planned(decodes, "cpu", sm_scale=1 / math.sqrt(72)).run(q_p, k_p, v_p, q_d, caches, sm_scale_d=72**-0.5)
    with pytest.raises(ValueError, match=r"sm_scale_d = 0\.118 differs from the value planned"):
        planned(decodes, "cpu", sm_scale=72**-0.5).run(q_p, k_p, v_p, q_d, caches, sm_scale_d=0.118)
    with pytest.raises(ValueError, match="jit_args is not supported"):
        flashinfer.PODWithPagedKVCacheWrapper(torch.empty(0), jit_args=["variant"])
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called"):
        flashinfer.PODWithPagedKVCacheWrapper(torch.empty(0)).run(q_p, k_p, v_p, q_d, caches)
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called"):
        flashinfer.BatchPODWithPagedKVCacheWrapper(torch.empty(0)).run(q_d, caches, q_d, caches)


@devices
def test_pod_with_graph_buffers_fills_them(device, decodes):
    q_d, caches, tables = on(device, decodes)
    buffers = [torch.zeros_like(x) for x in tables]
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(torch.empty(0, device=device), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*tables, 4, 2, 32, decodes.kv.page_size, window_left=20, data_type=torch.float32)
    assert torch.equal(buffers[0], tables[0])
    _, out_d = wrapper.run(q_d, *(torch.randn(2, 3, 2, 32, device=device)), q_d, caches)
    assert relative_error(out_d.cpu(), decodes.exact()[0]) < 2e-6


@devices
def test_batch_pod_of_prefills_and_decodes_matches_the_oracle(device, rng):
    """Masks and causality may change from run to run of one plan."""
    spec, page_size = SPEC.replace(window_left=-1, custom_mask=True), rng.choice((1, 4, 16))
    prefills = random_batch(spec, [3, 1, 8], [rng.randrange(8, 50) for _ in range(3)], page_size)
    decodes = random_batch(spec.replace(causal=False, custom_mask=False), [1, 2, 1], [40, 17, 2], page_size)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(torch.empty(0, device=device))
    assert not wrapper.is_cuda_graph_enabled
    (q_p, cache_p, tables_p), (q_d, cache_d, tables_d) = on(device, prefills), on(device, decodes)
    wrapper.plan(
        prefills.qo.indptr.to(device), *tables_p, decodes.qo.indptr.to(device), *tables_d,
        4, 2, 32, page_size, data_type=torch.float32,
    )  # fmt: skip
    mask = prefills.bool_mask.to(device)
    unmasked = replace(prefills, spec=spec.replace(custom_mask=False), bool_mask=None)
    for options, exact in (
        ({}, replace(unmasked, spec=unmasked.spec.replace(causal=False)).exact()),
        ({"causal_p": True}, unmasked.exact()),
        ({"causal_p": True, "custom_mask_p": mask}, replace(prefills, spec=spec.replace(causal=False)).exact()),
        ({"causal_p": True}, unmasked.exact()),
    ):
        (out_p, out_d), (lse_p, lse_d) = wrapper.run(q_p, cache_p, q_d, cache_d, return_lse=True, **options)
        for result, wanted in (
            (out_p, exact[0]),
            (lse_p, exact[1]),
            *zip((out_d, lse_d), decodes.exact(), strict=True),
        ):
            torch.testing.assert_close(result.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    out_p, out_d = wrapper.run(q_p, cache_p, q_d, cache_d, causal_p=True, q_scale=1.0, v_scale=3.0)
    assert relative_error(out_p.cpu(), unmasked.exact()[0]) < 2e-6
    assert relative_error(out_d.cpu(), 3 * decodes.exact()[0]) < 2e-6


def test_batch_pod_plans_prefills_as_they_were_run_last(decodes, monkeypatch):
    """Once in a step, where steps are alike."""
    paged, planned = flashinfer.BatchPrefillWithPagedKVCacheWrapper, []
    plan = paged.plan
    monkeypatch.setattr(
        paged,
        "plan",
        lambda self, *args, **given: planned.append((self, given.get("causal"))) or plan(self, *args, **given),
    )
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(torch.empty(0))
    q, cache, tables = on("cpu", decodes)
    rows = decodes.qo.indptr
    for causal, expected in ((False, [False]), (True, [False, True]), (True, [True]), (False, [True, False])):
        planned.clear()
        wrapper.plan(rows, *tables, rows, *tables, 4, 2, 32, decodes.kv.page_size, data_type=torch.float32)
        for _ in range(2):
            wrapper.run(q, cache, q, cache, causal_p=causal)
        assert [given for each, given in planned if each is wrapper._prefill] == expected
        assert len(planned) == len(expected) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("batched", [False, True])
def test_captured_pod_replayed_reads_changed_tables_and_caches(batched, rng):
    """A captured plan and run of prefills and decodes compute what tables and caches hold when they are replayed."""
    spec = attention_spec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=torch.bfloat16)
    lengths, empty = [400, 900, 70], torch.empty(0, device="cuda")

    def drawn(q_lens):
        return random_batch(spec, q_lens, rng.sample(lengths, 3), 16, device="cuda")

    def contents():
        """Prefills, decodes, and the rows of one prefill."""
        return drawn([300, 1, 20]), drawn([1, 1, 1]), torch.randn(3, 333, 8, 64, dtype=torch.bfloat16, device="cuda")

    def read(prefills, decodes, rows):
        of_both = [x for batch in (prefills, decodes) for x in (batch.q, batch.k, batch.v, *batch.kv.tables)]
        return [*of_both, rows]

    first = contents()
    held = [x.clone() for x in read(*first)]
    (q_p, k_p, v_p, *tables_p), (q_d, k_d, v_d, *tables_d), (one,) = held[:6], held[6:12], held[12:]
    layer = (8, 2, 64, 16)
    if batched:
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(empty)
        rows = [batch.qo.indptr for batch in first[:2]]
    else:
        wrapper = flashinfer.PODWithPagedKVCacheWrapper(empty)

    def step():
        if batched:
            wrapper.plan(rows[0], *tables_p, rows[1], *tables_d, *layer, data_type=torch.bfloat16)
            return wrapper.run(q_p, (k_p, v_p), q_d, (k_d, v_d), causal_p=True)
        wrapper.plan(*tables_d, *layer, data_type=torch.bfloat16)
        return wrapper.run(one[0], one[1, :, :2], one[2, :, :2], q_d, (k_d, v_d), causal_p=True)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_p, out_d = step()
    for prefills, decodes, rows_of_one in (first, contents(), contents()):
        for x, new in zip(held, read(prefills, decodes, rows_of_one), strict=True):
            x.copy_(new)
        out_p.fill_(torch.nan), out_d.fill_(torch.nan)
        graph.replay()
        q, k, v = rows_of_one.cpu()
        exact = prefills.exact()[0] if batched else attend(q, k[:, :2], v[:, :2], spec)[0]
        assert relative_error(out_p.cpu(), exact.cpu()) < 3e-3
        assert relative_error(out_d.cpu(), decodes.exact()[0].cpu()) < 3e-3


@devices
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_batch_pod_with_one_mask_for_all_layers_plans_it_once(packed, inference, device, rng, monkeypatch):
    """It is planned again if another mask is passed, if it was changed in place, or if the batch is planned again."""
    spec, page_size = SPEC.replace(window_left=-1, custom_mask=True, causal=False), rng.choice((1, 4, 16))
    batch = random_batch(spec, [3, 1, 8], [rng.randrange(8, 50) for _ in range(3)], page_size)
    batches = [replace(batch, bool_mask=torch.rand(len(batch.bool_mask)) < 0.7) for _ in range(3)]
    masks = [(x.mask.bits if packed else x.bool_mask).to(device) for x in batches]
    (q, cache, tables), rows = on(device, batch), batch.qo.indptr.to(device)
    name, planned = "packed_custom_mask_p" if packed else "custom_mask_p", []
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    pack = paged._pack_mask
    monkeypatch.setattr(paged, "_pack_mask", lambda *args: planned.append(args[1:3] != (None, None)) or pack(*args))

    def plan():
        wrapper.plan(rows, *tables, rows, *tables, 4, 2, 32, page_size, data_type=torch.float32)

    def check(mask, exact, **options):
        """The layers of a step: how many masks were planned for them."""
        planned.clear()
        for _ in range(4):
            out_p, _ = wrapper.run(q, cache, q, cache, **{name: mask}, **options)
            assert relative_error(out_p.cpu(), exact.exact()[0]) < 2e-6
        return sum(planned)

    with torch.inference_mode(inference):
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(torch.empty(0, device=device))
        plan()
        a, b, c = (x.clone() for x in masks)
        assert [check(a, batches[0]), check(b, batches[1]), check(a, batches[0]), check(a, batches[0])] == [1, 1, 1, 0]
        a.copy_(c)
        if inference:  # where torch does not count changes
            plan()
        assert check(a, batches[2]) == 1
        plan()
        assert check(a, batches[2]) == 1
        unmasked = replace(batch, spec=spec.replace(custom_mask=False, causal=True), bool_mask=None)
        assert check(None, unmasked, causal_p=True) == 0
        assert check(a, batches[2], causal_p=True) == 1
