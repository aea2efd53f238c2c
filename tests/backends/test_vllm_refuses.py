"""What vLLM's backend refuses: before anything is written, and saying what it wants."""

from __future__ import annotations

import pytest
import torch

from helpers.vllm_engine import engine_of, make_impl, prompt, started
from quire.backends import vllm


def test_advance_step_with_wrong_arguments_is_refused(rng):
    engine = engine_of("cpu", rng)
    (a,) = started(engine, 3)
    step = [prompt(engine, 4), (a, 1, False)]
    metadata = engine.build(step)
    made = engine.plan(metadata, 2)
    sampled = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="num_prefills = 1: only decodes advance, or turn_prefills_into_decodes"):
        metadata.advance_step(made, sampled, 4, 2, 2)
    with pytest.raises(ValueError, match="num_seqs = 3: the step has 2 requests"):
        metadata.advance_step(made, sampled, 4, 3, 2, True)
    with pytest.raises(ValueError, match="num_queries = 1: it must be num_seqs = 2, without a graph"):
        metadata.advance_step(made, sampled, 4, 2, 1, True)
    with pytest.raises(ValueError, match="sampled_token_ids has 1 tokens: num_queries = 2"):
        metadata.advance_step(made, sampled[:1], 4, 2, 2, True)
    before = metadata.slot_mapping.clone()
    with pytest.raises(ValueError, match="out of range"):  # both sequences have filled their only page
        metadata.advance_step(made, sampled, 4, 2, 2, True)
    assert metadata.num_prefills == 1
    assert torch.equal(metadata.slot_mapping, before)
    assert made.input_tokens.tolist() == [0, 0]
    made.input_tokens = made.input_tokens[:1]
    with pytest.raises(ValueError, match="input_tokens has 1 entries: 2 are needed"):
        metadata.advance_step(made, sampled, 4, 2, 2, True)
    several = engine.build([(a, 2, False)])
    with pytest.raises(ValueError, match="decode_query_len = 2"):
        several.advance_step(made, sampled[:1], 4, 2, 1)


def test_unknown_layout_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "FLASHINFER_KV_CACHE_LAYOUT", "DHN")
    with pytest.raises(ValueError, match="kv_layout = 'DHN' is not supported"):
        vllm.FlashInferBackend.get_kv_cache_stride_order()


def test_unsupported_layers_are_refused(caplog, rng):
    spec = engine_of("cpu", rng, num_kv_heads=2, head_dim_qk=16).specs[0]
    for options, name in (
        ({"blocksparse_params": {}}, "blocksparse_params"),
        ({"attn_type": "encoder"}, "attn_type = 'encoder'"),
        ({"kv_sharing_target_layer_name": "x"}, "kv_sharing_target_layer_name"),
    ):
        with pytest.raises(NotImplementedError, match=name):
            make_impl(spec, **options)
    with pytest.raises(ValueError, match="fp8 dtype 'fp8_x' is not known"):
        make_impl(spec, "fp8_x")
    slopes = spec.alibi_slopes().tolist()
    arguments = (4, 16, 0.25, 2, slopes, None, "auto")
    assert torch.equal(vllm.FlashInferImpl(*arguments).alibi_slopes, spec.alibi_slopes())
    for wrong in (slopes[:3], [*slopes[:3], float("inf")]):
        with pytest.raises(ValueError, match=r"alibi_slopes = .* 4 finite numbers"):
            vllm.FlashInferImpl(4, 16, 0.25, 2, wrong, None, "auto")
    with pytest.raises(ValueError, match="num_qo_heads = 3"):
        vllm.FlashInferImpl(3, 16, 0.25, 2, None, None, "auto")
    with pytest.raises(ValueError, match="sliding_window = 0"):
        vllm.FlashInferImpl(4, 16, 0.25, 2, None, 0, "auto")
    for unknown in ("int8", "uint8", "float64", "bool", "fp8_e3m4", "fp4", None):
        with pytest.raises(ValueError, match=f"{unknown!r}"):
            vllm.FlashInferImpl(4, 16, 0.25, 2, None, None, unknown)
    for known in ("float16", "half", "bfloat16", "float8_e5m2", "fp8_e5m2", torch.float16):
        vllm.FlashInferImpl(4, 16, 0.25, 2, None, None, known)
    impl = vllm.FlashInferImpl(4, 16, 0.25, 2, None, 8, "auto", use_irope=True)
    assert "use_irope" in caplog.text
    assert impl.sliding_window == (7, 0)
    assert impl.num_queries_per_kv == 2
    assert (impl.scale, impl.logits_soft_cap, impl.kv_cache_dtype) == (0.25, None, "auto")


def test_build_of_an_inconsistent_step_is_refused(rng):
    engine = engine_of("cpu", rng)
    (a,) = started(engine, 7)

    def build(*groups, lengths, counts, pad_size=-1, batch_size=0):
        engine.input.inter_data_list = groups
        engine.builder.prepare()
        engine.builder.build(lengths, counts, pad_size, batch_size)

    group = engine.group(a, 1, False)
    with pytest.raises(ValueError, match="request 0 has 8 tokens, and pages for 4"):
        build(engine.group(a, 1, False, block_tables={id(a): a.pages[:1]}), lengths=[8], counts=[1])
    with pytest.raises(ValueError, match="request 0 has page 64: pages are 0 to 63"):
        build(engine.group(a, 1, False, block_tables={id(a): [64, 1]}), lengths=[8], counts=[1])
    with pytest.raises(ValueError, match="7 context and 1 query tokens of 9"):
        build(engine.group(a, 1, False, orig_seq_lens=[9]), lengths=[9], counts=[1])
    with pytest.raises(ValueError, match="1 query_lens and 1 seq_lens do not fit"):
        build(group, lengths=[8], counts=[2])
    with pytest.raises(ValueError, match="is a prompt after sequences that decode"):
        build(group, engine.group(*prompt(engine, 3)), lengths=[8, 3], counts=[1, 3])
    with pytest.raises(ValueError, match=r"that decode differ: \[1, 2\]"):
        build(group, engine.group(a, 2, False), lengths=[8, 9], counts=[1, 2])
    with pytest.raises(ValueError, match="batch_size = 5: there are 1 tokens and 1 of padding"):
        build(group, lengths=[8, 1], counts=[1], pad_size=1, batch_size=5)
    with pytest.raises(ValueError, match="graphs decode one token, and not 2"):
        build(engine.group(a, 2, False), lengths=[9], counts=[2], pad_size=0, batch_size=2)
    with pytest.raises(ValueError, match="9 sequences, with padding, are more than graphs were made for: 8"):
        build(group, lengths=[8, *[1] * 8], counts=[1], pad_size=8, batch_size=9)


def test_refused_forward_writes_nothing(rng):
    engine = engine_of("cpu", rng, [{}])
    (a,) = started(engine, 6)
    metadata = engine.build([(a, 1, False)])
    (new,) = engine.new_tokens(1)
    (impl,), (cache,) = engine.impls, engine.caches
    before = cache.clone()

    def refused(match, error=ValueError, given=new, kv_cache=cache):
        with pytest.raises(error, match=match):
            impl.forward(engine.layer, *given, kv_cache, metadata)
        assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7))

    refused("FlashInferState.begin_forward sets", RuntimeError)
    with pytest.raises(RuntimeError, match="decode_wrapper is missing"):
        metadata.begin_forward()
    engine.plan(metadata, 1)
    q, k, v = new
    refused("query has shape", given=(torch.cat([q, q]), k, v))
    refused("value has shape", given=(q, k, v[:, 1:]))
    refused("query is torch.float16", given=(q.half(), k.half(), v.half()))
    refused("kv_cache is torch.float16", kv_cache=cache.half())
    refused("kv_cache has shape", kv_cache=cache[:, :, :3])
    refused("kv_cache is empty", kv_cache=cache[:0])
    metadata.slot_mapping = torch.tensor([64 * 4])
    refused("slots.0. = 256 is out of range")
    metadata.slot_mapping = torch.tensor([0, 1])
    refused("key has shape")
    impl.kv_cache_dtype = "fp8"
    refused("kv_cache is torch.float32: kv_cache_dtype = 'fp8'")
    refused("the step was planned for torch.float32", kv_cache=cache.byte())
    for name in ("paged_kv_indices", "page_size", "num_qo_heads"):
        held = getattr(metadata, name)
        setattr(metadata, name, None)
        with pytest.raises(ValueError, match=f"{name} is missing"):
            metadata.begin_forward()
        setattr(metadata, name, held)
    metadata.num_decode_tokens = 2
    with pytest.raises(ValueError, match="num_decode_tokens = 2: the tables have 1 requests"):
        metadata.begin_forward()


def test_graph_capture_outside_its_context_is_refused(rng):
    engine = engine_of("cpu", rng)
    state = engine.state
    with pytest.raises(RuntimeError, match="is for within graph_capture"):
        state.graph_capture_get_metadata_for_batch(2)
    with pytest.raises(RuntimeError, match="graph_clone is for within graph_capture"):
        state.graph_clone(2)
    with pytest.raises(KeyError), state.graph_capture(4):
        raise KeyError
    assert not state._is_graph_capturing
    assert not [name for name in vars(state) if name.startswith("_graph")]
    with state.graph_capture(4):
        with pytest.raises(ValueError, match="a graph of 5 requests does not fit buffers made for 4"):
            state.graph_capture_get_metadata_for_batch(5)
        with pytest.raises(ValueError, match="is_encoder_decoder_model"):
            state.graph_capture_get_metadata_for_batch(2, True)
        metadata = state.graph_capture_get_metadata_for_batch(2)
        with pytest.raises(ValueError, match="batch_size = 4: the last metadata to capture was for 2 requests"):
            state.graph_clone(4)
        with pytest.raises(RuntimeError, match="begin_forward is for outside of graph_capture"):
            engine.plan(metadata, 2)
        with pytest.raises(RuntimeError, match="being captured already"), state.graph_capture(2):
            pass
        buffers = state.get_graph_input_buffers(metadata)
    prompts = engine.build([prompt(engine, 3)])
    with pytest.raises(ValueError, match="num_prefills = 1: only decodes are captured"):
        state.get_graph_input_buffers(prompts)
    (a,) = started(engine, 3)
    large = engine.build([(a, 1, False)], 3)
    with pytest.raises(ValueError, match="the step has 4 tokens: the graph was captured for 2"):
        state.prepare_graph_input_buffers(buffers, large)
    with pytest.raises(ValueError, match=r"max_batch_size = 9: runner\.graph_block_tables has 8 rows"):
        state.graph_capture(9).__enter__()
