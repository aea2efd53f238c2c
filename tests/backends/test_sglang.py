"""SGLang's backend: random schedules against the definition of attention, graphs, and what is refused."""

from __future__ import annotations

from enum import IntEnum, auto
from types import SimpleNamespace

import pytest
import torch

from helpers import sglang_engine
from helpers.token_engine import DEVICES, DIM, DTYPES, HEADS, KV_HEADS, Engine, Layer, models, schedule, with_graphs
from quire.backends.pymllm import WrapperDispatch
from quire.backends.sglang import FlashInferAttnBackend


class ForwardMode(IntEnum):
    """SGLang's modes, as far as tests go."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    DLLM_EXTEND = auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_decode_or_idle(self):
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return self == ForwardMode.DRAFT_EXTEND_V2

    def is_dllm_extend(self):
        return self == ForwardMode.DLLM_EXTEND


class OlderMode:
    """A mode of an engine that does not know speculative decoding."""

    def is_decode(self):
        return False

    is_idle = is_decode_or_idle = is_decode


def runner(engine, cross_attention=False, sliding_window_size=None, devices=1):
    """A model runner, with what a backend reads of it."""
    config = {"num_attention_heads": HEADS * devices, "head_dim": DIM, "context_len": engine.width}
    config |= {"get_num_kv_heads": lambda n: KV_HEADS * devices // n, "is_encoder_decoder": cross_attention}
    return SimpleNamespace(
        device=engine.device,
        dtype=engine.dtype,
        kv_cache_dtype=engine.dtype,
        sliding_window_size=sliding_window_size,
        req_to_token_pool=SimpleNamespace(req_to_token=engine.req_to_token, size=engine.rows),
        token_to_kv_pool=engine.pool,
        model_config=SimpleNamespace(**config),
        tp_size=devices,
    )


class Face:
    """How SGLang talks to its backend."""

    lengths_dtype = torch.int64

    def backend(self, engine, **options):
        return FlashInferAttnBackend(runner(engine, **options))

    def batch(self, engine, mode, **fields):
        usual = dict.fromkeys(("spec_info", "encoder_lens", "encoder_lens_cpu", "encoder_out_cache_loc", "mm_inputs"))
        return SimpleNamespace(**{**usual, **fields}, forward_mode=ForwardMode[mode])

    def capture(self, backend, batch):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)

    def replay(self, backend, batch):
        backend.init_forward_metadata_out_graph(batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["default", "windows", "cross"])
def test_random_schedule_matches_the_oracle(model, device, dtype, rng):
    layers, options = models(device)[model]
    engine = with_graphs(Engine(rng, Face(), layers, device=device, dtype=dtype, **options), rng.random() < 0.7)
    schedule(engine, rng, 50)


@pytest.mark.parametrize("device", DEVICES)
def test_graph_with_masks_of_another_size_takes_what_it_needs(device, rng):
    """SGLang's masks are longer than the batch asks for, and leave out the requests that fill it up."""
    engine = with_graphs(Engine(rng, Face(), [Layer(0)], device=device), masked=True)
    requests = [engine.arrive(), engine.arrive()]
    engine.step("EXTEND", requests, [4, 7])
    whole = engine.face.replay

    def replay(change):
        def other(backend, batch):
            batch.seq_lens_sum = int(batch.seq_lens.sum())
            batch.spec_info.custom_mask = change(batch.spec_info.custom_mask)
            whole(backend, batch)

        return other

    for change in (lambda x: x[:-24], lambda x: torch.cat([x, torch.zeros_like(x)])):  # two requests of 3 * (1 + 3)
        engine.face.replay = replay(change)
        masks = [torch.ones(3, 3, dtype=torch.bool).tril() for _ in requests]
        engine.replay("TARGET_VERIFY", 4, requests, 3, masks)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_pool_random_schedule_equals_oracle(device, rng):
    """Over the pools of SGLang, which divide keys by scales in place and do not saturate; layers with scales and
    without. Prompts without a prefix are attended to as they are given, all else as it is stored.
    """
    layers = [sglang_engine.layer(0, scales=(0.5, 2.0)), sglang_engine.layer(1, sinks=True)]
    options = {"kv_dtype": rng.choice((torch.float8_e4m3fn, torch.float8_e5m2)), "make": FlashInferAttnBackend}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = sglang_engine.Engine(rng, layers, device=device, dtype=dtype, **options)
    sglang_engine.schedule(sglang_engine.with_graphs(engine, rng.random() < 0.5), rng, 25)


def test_fp8_pool_large_values_saturate_and_inputs_stay(rng):
    options = {"kv_dtype": torch.float8_e4m3fn, "make": FlashInferAttnBackend}
    engine = sglang_engine.Engine(rng, [sglang_engine.layer(0, scales=(0.5, 0.5))], **options)
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
    engine.step("DECODE", [request], [1])


def test_scales_are_without_effect_in_a_wider_pool(rng):
    engine = sglang_engine.Engine(rng, [sglang_engine.layer(0, scales=(0.5, 2.0))], make=FlashInferAttnBackend)
    request = engine.arrive()
    engine.step("EXTEND", [request], [4])
    engine.step("DECODE", [request], [1])


def test_pool_is_called_with_the_layer_and_its_slots(rng):
    layer = Layer(0)
    engine = Engine(rng, Face(), [layer])
    calls = []
    engine.pool.set_kv_buffer = lambda *args: calls.append(args)
    batch = engine.batch("EXTEND", [engine.arrive()], [3])
    engine.backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(3, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    engine.backend.forward(q, k, v, layer, batch)
    [(whose, slots, keys, values)] = calls
    assert whose is layer
    assert slots is batch.out_cache_loc
    assert torch.equal(keys.flatten(1), k)
    assert torch.equal(values.flatten(1), v)


def test_batch_of_an_older_engine_is_computed(rng):
    engine = Engine(rng, Face(), [Layer(0)])
    requests = [engine.arrive()]
    batch = engine.batch("EXTEND", requests, [5])
    batch.forward_mode = OlderMode()
    del batch.spec_info, batch.mm_inputs, batch.encoder_lens
    engine.backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(5, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    engine.check(engine.layers[0], requests, [5], engine.backend.forward(q, k, v, engine.layers[0], batch), q, k, v)


def test_backend_attributes_are_those_of_the_runner(rng):
    engine = Engine(rng, Face(), [Layer(0)], sliding_window_size=7)
    backend = engine.backend
    assert backend.dispatch_reason is WrapperDispatch.SLIDING_WINDOW
    assert (backend.data_type, backend.kv_cache_dtype, backend.q_dtype) == (torch.float32,) * 3
    assert (backend.num_heads, backend.num_kv_heads, backend.max_context_len) == (HEADS, KV_HEADS, 48)
    assert backend.token_to_kv_pool is engine.pool
    assert backend.support_triton()
    assert backend.get_indexer_metadata(0, None) is None
    assert FlashInferAttnBackend(runner(engine, devices=2)).num_heads == HEADS
    assert FlashInferAttnBackend(runner(engine), attn_tp_size=2).num_kv_heads == KV_HEADS // 2
    backend.init_cuda_graph_state(9, 9)  # more than the pool has requests
    assert len(backend.kv_last_page_len) == 9
    engine.pool.translate_loc_from_full_to_swa = None
    with pytest.raises(ValueError, match="token_to_kv_pool gives windows slots of their own"):
        FlashInferAttnBackend(runner(engine))


def test_unsupported_modes_and_layers_are_refused(rng):
    engine = with_graphs(Engine(rng, Face(), [Layer(0)]), masked=False)
    request = engine.arrive()
    for mode, name in (("DRAFT_EXTEND_V2", "draft_extend_v2"), ("DLLM_EXTEND", "dllm_extend")):
        batch = engine.batch(mode, [request], [2])
        for prepare in (engine.backend.init_forward_metadata, engine.backend.init_forward_metadata_out_graph):
            with pytest.raises(ValueError, match=f"{name} is not supported"):
                prepare(batch)
    batch = engine.batch("EXTEND", [request], [2])
    for in_capture in (True, False):
        with pytest.raises(ValueError, match="for decode and target-verify only"):
            engine.backend.init_forward_metadata_out_graph(batch, in_capture)
    with pytest.raises(ValueError, match=r"bs = 3: graphs of this mode have been captured for \[1, 2, 4\]"):
        engine.backend.init_forward_metadata_out_graph(engine.batch("DECODE", [request], [1], padding=2))
    engine.backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(2, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    layer = Layer(0)
    layer.pos_encoding_mode = "ROPE_LLAMA"
    with pytest.raises(ValueError, match="layer 0 has pos_encoding_mode 'ROPE_LLAMA'"):
        engine.backend.forward(q, k, v, layer, batch)
    with pytest.raises(ValueError, match="k_rope is not supported"):
        engine.backend.forward(q, k, v, Layer(0), batch, k_rope=k)
