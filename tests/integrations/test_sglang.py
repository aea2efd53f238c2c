"""The attention backend of SGLang: random schedules against the definition of attention, eager and in graphs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from helpers.paths import ROOT
from helpers.sglang_engine import DIM, HEADS, KV_HEADS, Engine, layer, schedule, tree, with_graphs
from helpers.sglang_package import SGLANG, SGLangAttentionBackend, importable
from quire.integrations.sglang import register

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


def layers_of(model):
    return {
        "default": lambda: [layer(0), layer(1, logit_cap=4.0, sinks=True)],
        "windows": lambda: [layer(0, sliding_window_size=5, sinks=True), layer(1), layer(2, sliding_window_size=33)],
    }[model]()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", ["default", "windows"])
def test_backend_random_schedule_equals_oracle(model, page_size, device, dtype, rng):
    engine = Engine(rng, layers_of(model), device=device, dtype=dtype, page_size=page_size)
    schedule(with_graphs(engine, rng.random() < 0.7), rng, 30)


def test_register_twice_offers_the_backend_once(rng):
    with importable():
        register()
        register()
    assert SGLANG.ATTENTION_BACKEND_CHOICES.count("quire") == 1
    engine = Engine(rng, [layer(0)])
    assert isinstance(SGLANG.ATTENTION_BACKENDS["quire"](engine.runner()), SGLangAttentionBackend)


def test_entry_point_names_the_plugin():
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"quire": "quire.integrations.sglang:register"}


def test_backend_attributes_are_those_that_sglang_reads(rng):
    backend = Engine(rng, [layer(0)], page_size=16).backend
    assert isinstance(backend, SGLANG.AttentionBackend)
    assert not backend.needs_cpu_seq_lens
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert (backend.data_type, backend.kv_cache_dtype) == (torch.float32, torch.float32)
    assert (backend.page_size, backend.max_context_len) == (16, 96)


def test_idle_batch_returns_no_rows(rng):
    engine = Engine(rng, [layer(0)])
    batch = engine.batch("IDLE", [], [])
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(torch.empty(0, HEADS * DIM), None, None, layer(0), batch)
    assert out.shape == (0, HEADS * DIM)


@pytest.mark.parametrize("device", DEVICES)
def test_encoder_only_layer_sees_all_tokens_and_stores_none(device, rng):
    one = layer(0, attn_type=SGLANG.AttentionType.ENCODER_ONLY)
    engine = Engine(rng, [one], device=device)
    engine.step("EXTEND", [engine.arrive(), engine.arrive()], [7, 2])
    assert all(x.isnan().all() for x in engine.buffers)
    with pytest.raises(ValueError, match="layer 0 is encoder_only: it needs k and v, and no request a prefix"):
        engine.step("EXTEND", engine.requests, [1, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_query_rows_of_padding_give_zeros(device, rng):
    engine = Engine(rng, [layer(0)], device=device)
    request = engine.arrive()
    engine.step("EXTEND", [request], [5])
    batch = engine.batch("EXTEND", [request], [3])
    engine.backend.init_forward_metadata(batch)
    q, k, v = engine.inputs(engine.layers[0], 8)
    out = engine.backend.forward(q, k[:3], v[:3], engine.layers[0], batch)
    assert (out[3:] == 0).all()
    engine.check(engine.layers[0], [request], [3], out, q[:3], k[:3], v[:3])


def test_chain_of_drafts_needs_no_mask(rng):
    """With topk = 1, drafted tokens are causal, whatever SGLang's mask holds, which is then not packed."""
    engine = with_graphs(Engine(rng, [layer(0)]), masked=False)
    request = engine.arrive()
    engine.step("EXTEND", [request], [9])
    usual = engine.batch

    def batch(*args, **options):
        made = usual(*args, **options)
        if made.spec_info is not None:
            made.spec_info.topk, made.spec_info.custom_mask = 1, torch.zeros(3, dtype=torch.bool)
        return made

    engine.batch = batch
    engine.step("TARGET_VERIFY", [request], [4])
    engine.replay("TARGET_VERIFY", 4, [request], 3)


def test_deterministic_inference_keeps_bits_in_any_batch(rng):
    engine = Engine(rng, [layer(0)], enable_deterministic_inference=True)
    first, second = engine.arrive(), engine.arrive()
    engine.step("EXTEND", [first, second], [40, 7])
    outs = []
    for requests in ([first], [second, first]):
        batch = engine.batch("DECODE", requests, [1] * len(requests))
        engine.backend.init_forward_metadata(batch)
        q = torch.ones(len(requests), HEADS * DIM)
        outs.append(engine.backend.forward(q, *(q[:, : KV_HEADS * DIM],) * 2, engine.layers[0], batch)[-1])
        engine.shrink(first, 1)
    assert torch.equal(*outs)


def test_options_of_runner_that_are_not_supported_are_refused(rng):
    engine = Engine(rng, [layer(0)])
    for change, message in (
        (lambda r: setattr(r.model_config, "is_encoder_decoder", True), "encoder-decoder models are not supported"),
        (lambda r: setattr(r.server_args, "dcp_size", 2), "--dcp-size 2 is not supported"),
        (lambda r: setattr(r.server_args, "attn_cp_size", 2), "--attn-cp-size 2 is not supported"),
        (lambda r: setattr(r.server_args, "enable_prefill_cp", True), "--enable-prefill-cp is not supported"),
        (lambda r: setattr(r.server_args, "enable_mis", True), "--enable-mis is not supported"),
        (lambda r: setattr(r.kv_index_translator, "is_translating", True), "--enable-unified-memory is not supported"),
    ):
        runner = engine.runner()
        change(runner)
        with pytest.raises(ValueError, match=message):
            SGLangAttentionBackend(runner)


def test_modes_that_are_not_supported_are_refused(rng):
    engine = Engine(rng, [layer(0)])
    request = engine.arrive()
    for mode, message in (("DRAFT_EXTEND_V2", "DRAFT_EXTEND_V2 is not supported"), ("DLLM_EXTEND", "DLLM_EXTEND, of")):
        with pytest.raises(ValueError, match=message):
            engine.backend.init_forward_metadata(engine.batch(mode, [request], [2]))
    batch = engine.batch("EXTEND", [request], [2])
    with pytest.raises(ValueError, match="a CUDA graph of whole prefills"):
        engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state"):
        engine.backend.init_forward_metadata_out_graph(engine.batch("DECODE", [request], [1]), in_capture=True)
    with pytest.raises(RuntimeError, match="init_forward_metadata\\(\\) must be called"):
        engine.backend.forward(*engine.inputs(engine.layers[0], 2), engine.layers[0], batch)
    ragged = engine.batch("TARGET_VERIFY", [request], [2])
    ragged.spec_info.ragged_verify_layout = object()
    with pytest.raises(ValueError, match="SGLANG_RAGGED_VERIFY_MODE is not supported"):
        engine.backend.init_forward_metadata(ragged)


def test_graph_without_masks_refuses_masks(rng):
    engine = with_graphs(Engine(rng, [layer(0)]), masked=False)
    request = engine.arrive()
    engine.step("EXTEND", [request], [4])
    with pytest.raises(ValueError, match="custom_mask: the graph of 4 requests was captured without one"):
        engine.replay("TARGET_VERIFY", 4, [request], 3, [tree(3, rng)])


def test_layers_that_are_not_supported_are_refused(rng):
    engine = Engine(rng, [layer(0)])
    batch = engine.batch("EXTEND", [engine.arrive()], [2])
    engine.backend.init_forward_metadata(batch)
    given = engine.inputs(engine.layers[0], 2)
    for options, message in (
        ({"is_cross_attention": True}, "layer 7: cross-attention is not supported"),
        ({"use_irope": True}, "layer 7: chunks of attention"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "layer 7: pos_encoding_mode = 'ROPE_LLAMA'"),
        ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, "layer 7: logit_capping_method 'sigmoid'"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.backend.forward(*given, layer(7, **options), batch)
    with pytest.raises(ValueError, match="layer 0: score_mod is not supported"):
        engine.backend.forward(*given, engine.layers[0], batch, score_mod=print)
    both_sides = layer(8, attn_type=SGLANG.AttentionType.DECODER_BIDIRECTIONAL)
    with pytest.raises(ValueError, match="layer 8: attn_type = 'decoder_bidirectional' is not supported"):
        engine.backend.forward(*given, both_sides, batch)


def test_another_layer_of_a_known_number_is_checked(rng):
    engine = Engine(rng, [layer(0)])
    engine.step("EXTEND", [request := engine.arrive()], [2])
    batch = engine.batch("EXTEND", [request], [1])
    engine.backend.init_forward_metadata(batch)
    other, given = layer(0, logit_cap=3.0, logit_capping_method="sigmoid"), engine.inputs(engine.layers[0], 1)
    with pytest.raises(ValueError, match="layer 0: logit_capping_method 'sigmoid'"):
        engine.backend.forward(*given, other, batch)


@pytest.mark.parametrize(
    ("architecture", "images", "refused"),
    [
        ("Gemma3ForConditionalGeneration", [None, object()], True),
        ("Gemma3ForConditionalGeneration", [None, None], False),
        ("LlavaForConditionalGeneration", [object(), None], False),
    ],
)
def test_images_whose_tokens_see_each_other_are_refused(architecture, images, refused, rng):
    engine = Engine(rng, [layer(0)], architecture=architecture)
    batch = engine.batch("EXTEND", [engine.arrive(), engine.arrive()], [2, 1])
    batch.mm_inputs = images
    engine.backend.init_forward_metadata(batch)
    given = engine.inputs(engine.layers[0], 3)
    if refused:
        with pytest.raises(ValueError, match="images whose tokens see each other"):
            engine.backend.forward(*given, engine.layers[0], batch)
    else:
        engine.backend.forward(*given, engine.layers[0], batch)


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [False, True])
def test_steps_never_wait_for_the_device(windows, rng):
    """Neither eager steps nor replays, with lengths on the device alone; the first of each kind may compile."""
    layers = [layer(0, sliding_window_size=5), layer(1)]
    engine = Engine(rng, layers, device="cuda", dtype=torch.bfloat16, page_size=16, windows=windows)
    request = engine.arrive()
    engine.step("EXTEND", [request], [20])
    for mode, count in (("EXTEND", 3), ("DECODE", 1), ("TARGET_VERIFY", 2)):
        for known in (True, False):
            engine.step(mode, [request], [count], known=known)
            batch = engine.batch(mode, [request], [count], known=known)
            given = [engine.inputs(one, count) for one in layers]
            torch.cuda.synchronize()
            with waits_refused():
                engine.backend.init_forward_metadata(batch)
                for one, (q, k, v) in zip(layers, given, strict=True):
                    engine.backend.forward(q, k, v, one, batch)
            engine.shrink(request, count)


@contextmanager
def waits_refused():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
