"""The attention backend of SGLang over its pools: fp8, slots of windows, latent keys, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from helpers.sglang_engine import KV_HEADS, Engine, layer, schedule, with_graphs
from helpers.sglang_package import SGLANG

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", FLOATS8, ids=str)
def test_fp8_pool_random_schedule_equals_oracle(kv_dtype, device, rng):
    """Layers with scales and without; prompts are attended to as they are given, all else as it is stored."""
    layers = [layer(0, scales=(0.5, 2.0)), layer(1, sinks=True), layer(2, scales=(0.25, 1.0), logit_cap=8.0)]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = Engine(rng, layers, device=device, dtype=dtype, kv_dtype=kv_dtype, page_size=rng.choice((1, 16)))
    schedule(with_graphs(engine, rng.random() < 0.5), rng, 25)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_pool_large_values_saturate_and_inputs_stay(device, rng):
    """SGLang's pools would give NaN beyond the largest value, and divide k and v in place."""
    engine = Engine(rng, [layer(0, scales=(0.5, 0.5))], device=device, kv_dtype=torch.float8_e4m3fn)
    request = engine.arrive()
    batch = engine.batch("EXTEND", [request], [3])
    engine.backend.init_forward_metadata(batch)
    q, k, v = engine.inputs(engine.layers[0], 3)
    k[1], v[2] = 1e4, -1e4
    kept = k.clone(), v.clone()
    out = engine.backend.forward(q, k, v, engine.layers[0], batch)
    engine.check(engine.layers[0], [request], [3], out, q, k, v, alone=True)
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])
    stored = engine.pool.get_kv_buffer(0)[0][request.slots[1]].float()
    assert (stored == 448).all()
    engine.step("DECODE", [request], [1])


def test_scales_on_the_device_alone_are_refused(rng):
    engine = Engine(rng, [layer(0)], kv_dtype=torch.float8_e4m3fn)
    engine.layers[0].k_scale = torch.tensor(0.5)
    with pytest.raises(ValueError, match="layer 0 has k_scale, but k_scale_float is None"):
        engine.step("EXTEND", [engine.arrive()], [2])


def test_scales_are_without_effect_in_a_wider_pool(rng):
    engine = Engine(rng, [layer(0, scales=(0.5, 2.0))])
    request = engine.arrive()
    engine.step("EXTEND", [request], [4])
    engine.step("DECODE", [request], [1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_of_windows_random_schedule_equals_oracle(page_size, device, rng):
    layers = [layer(0, sliding_window_size=6, sinks=True), layer(1), layer(2, sliding_window_size=6), layer(3)]
    dtype = rng.choice((torch.float32, torch.bfloat16))
    engine = Engine(rng, layers, device=device, dtype=dtype, page_size=page_size, windows=True)
    schedule(with_graphs(engine, rng.random() < 0.5), rng, 25)


@pytest.mark.parametrize("device", DEVICES)
def test_slots_behind_a_window_are_not_read(device, rng):
    """SGLang frees them, and their entries in its map become 0. What these slots then hold is another request's."""
    layers = [layer(0, sliding_window_size=4), layer(1)]
    engine = Engine(rng, layers, device=device, windows=True)
    request = engine.arrive()
    engine.step("EXTEND", [request], [30])
    behind = torch.tensor(request.slots[:20], device=device)
    mapping = engine.pool.full_to_swa_index_mapping
    for x in engine.pool.swa_kv_pool.k_buffer + engine.pool.swa_kv_pool.v_buffer:
        x[mapping[behind]] = x[0] = 1e4
    mapping[behind] = 0
    engine.step("DECODE", [request], [1])
    engine.step("EXTEND", [request], [5])


def test_map_of_windows_that_is_missing_is_refused(rng):
    engine = Engine(rng, [layer(0, sliding_window_size=4), layer(1)], windows=True)
    engine.pool.full_to_swa_index_mapping = None
    batch = engine.batch("DECODE", [engine.arrive()], [1])
    with pytest.raises(ValueError, match="full_to_swa_index_mapping is None"):
        engine.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_latent_pool_random_schedule_equals_oracle(page_size, device, rng):
    """Absorbed MLA: one KV head, whose values are the first elements of its keys."""
    one = layer(0, num_heads=8, num_kv_heads=1, head_dim=96, v_head_dim=64)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = Engine(rng, [one], device=device, dtype=dtype, page_size=page_size, latent=64)
    schedule(with_graphs(engine, False), rng, 20)


def test_pool_of_other_heads_is_refused(rng):
    engine = Engine(rng, [layer(0)])
    batch = engine.batch("DECODE", [engine.arrive()], [1])
    engine.backend.init_forward_metadata(batch)
    other = layer(0, num_heads=8, num_kv_heads=4)
    q, k, v = engine.inputs(other, 1)
    needed = rf"are torch.float32 \[\d+, {KV_HEADS}, 16\]: torch.float32 \[slots, 4, 16\] is needed"
    with pytest.raises(ValueError, match=needed):
        engine.backend.forward(q, k, v, other, batch, save_kv_cache=False)


def test_quantized_pools_are_refused(rng):
    engine = Engine(rng, [layer(0)])
    runner = engine.runner()
    runner.token_to_kv_pool.get_kv_cache_quant_method = lambda: type("Method", (), {"name": "nvfp4"})
    with pytest.raises(ValueError, match="--kv-cache-dtype of the method 'nvfp4' is not supported"):
        type(engine.backend)(runner)
    runner.token_to_kv_pool.use_hnd = True
    with pytest.raises(ValueError, match="SGLANG_USE_HND_KVCACHE=1 is not supported"):
        type(engine.backend)(runner)


def test_stand_ins_have_the_names_of_the_package():
    """What tests take from SGLang is there under its name, in the package or as a stand-in."""
    assert SGLANG.KVWriteLoc(torch.zeros(1)).swa_loc is None
    assert {"loc", "swa_loc", "physical"} <= set(SGLANG.KVWriteLoc.__dataclass_fields__)
