"""vLLM's backend, driven by plain objects: random schedules against the oracle, and what must be refused."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from quire.bench.batches import relative_error
from quire.serving import vllm
from quire.serving.base import quantize
from vllm_engine import Engine, Graphs, Sequence, make_impl

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOPES = (0.3, 0.1, 0.02, 0.7)
MIXED = [
    {},
    {"window_left": 9, "sm_scale": 0.3},
    {"logits_soft_cap": 4.0, "sm_scale": 0.5},
    {"pos_encoding": "ALIBI"},
    {"pos_encoding": "ALIBI", "slopes": SLOPES},
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["NHD", "HND"])
def layout(request, monkeypatch):
    monkeypatch.setattr(vllm, "FLASHINFER_KV_CACHE_LAYOUT", request.param)
    return request.param


def engine_of(device, rng, layers=None, **options):
    heads = {"num_kv_heads": rng.choice((1, 2, 4)), "num_qo_heads": 4, "head_dim_qk": 16}
    return Engine(device, MIXED if layers is None else layers, **{"page_size": 4, **heads, **options})


def prompt(engine, length):
    return Sequence(engine.impls), length, True


def started(engine, *lengths):
    """Sequences of these lengths, computed."""
    step = [prompt(engine, n) for n in lengths]
    engine.run(step)
    return [sequence for sequence, _, _ in step]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_random_schedules(device, layout, page_size, kind, rng):
    """Arrivals, chunks, prefix hits, decodes of one token and of several, evictions, padding for graphs."""
    kinds = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "bfloat16"), "fp8": ("bfloat16", "fp8")}
    dtype, cache = kinds[kind]
    blocks = 700 if page_size == 1 else 64
    options = {"dtype": getattr(torch, dtype), "kv_cache_dtype": cache, "blocks": blocks, "page_size": page_size}
    engine = engine_of(device, rng, rng.choice((MIXED, MIXED[:1], MIXED[3:])), **options)
    graphs = Graphs(engine, [1, 2, 4, 8])
    alive: list[Sequence] = []
    prefilling: dict[int, int] = {}
    for _ in range(14):
        for _ in range(rng.randint(0, 2)):
            if len(alive) < 6:
                known = [s for s in alive if s.length and rng.random() < 0.4]
                new = engine.share(known[0]) if known else Sequence(engine.impls)
                alive.append(new)
                prefilling[id(new)] = rng.choice((1, 3, 16, rng.randint(1, 40)))
        if len(alive) > 4:
            engine.drop(gone := alive.pop(rng.randrange(len(alive))), alive)
            prefilling.pop(id(gone), None)
        prompts, decoding = [], [s for s in alive if id(s) not in prefilling and s.length]
        for s in alive:
            if (left := prefilling.get(id(s))) and rng.random() < 0.7:
                count = left if rng.random() < 0.6 else rng.randint(1, left)
                prompts.append((s, count, True))
                if count == left:
                    del prefilling[id(s)]
                else:
                    prefilling[id(s)] = left - count
        if not prompts and decoding and rng.random() < 0.8:
            graphs.run([(s, 1, False) for s in decoding])
        elif prompts or decoding:
            several = rng.choice((1, 1, 3))
            engine.run(prompts + [(s, several, False) for s in decoding])


def test_metadata_is_what_the_seed_says(rng):
    engine = engine_of("cpu", rng)
    (a, b) = started(engine, 6, 3)
    step = [prompt(engine, 5), (a, 1, False), (b, 1, False)]
    metadata = engine.build(step)
    assert (metadata.num_prefills, metadata.num_prefill_tokens, metadata.num_decode_tokens) == (1, 5, 2)
    assert metadata.max_prefill_seq_len == 5
    assert metadata.decode_query_len == 1
    assert metadata.prefill_metadata is metadata is metadata.decode_metadata
    assert metadata.query_start_loc.tolist() == [0, 5, 6, 7]
    assert metadata.seq_start_loc.tolist() == [0, 5, 12, 16]
    assert metadata.seq_lens_tensor.tolist() == [5, 7, 4]
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 4, 5]
    assert metadata.paged_kv_last_page_len.tolist() == [1, 3, 4]
    assert metadata.block_table_bound.tolist() == [2, 2, 1]
    assert metadata.paged_kv_indices.tolist() == [*step[0][0].pages, *a.pages, *b.pages]
    assert metadata.block_tables.tolist() == [step[0][0].pages, a.pages, [*b.pages, -1]]
    slots = [p * 4 + i for p in step[0][0].pages for i in range(4)][:5]
    assert metadata.slot_mapping.tolist() == [*slots, a.pages[1] * 4 + 2, b.pages[0] * 4 + 3]
    assert (metadata.page_size, metadata.num_qo_heads, metadata.is_profile_run) == (4, 4, False)
    names = [f.name for f in fields(metadata)]
    assert names[:7] == [
        "num_prefills", "num_prefill_tokens", "num_decode_tokens", "slot_mapping",
        "multi_modal_placeholder_index_maps", "enable_kv_scales_calculation", "max_prefill_seq_len",
    ]  # fmt: skip
    engine.plan(metadata)
    given = metadata.asdict_zerocopy(skip := {"device"})
    assert skip == {"device"}
    assert list(given) == [n for n in names if n not in ("device", "prefill_wrapper", "decode_wrapper")]
    assert given["slot_mapping"] is metadata.slot_mapping


def test_padding_for_graphs(rng):
    engine = engine_of("cpu", rng)
    a, b = started(engine, 6, 3)
    engine.runner.graph_block_tables.fill(77)
    metadata = engine.build([(a, 1, False), (b, 1, False)], pad_size=2)
    assert metadata.use_cuda_graph
    assert metadata.num_decode_tokens == 4
    assert metadata.slot_mapping[2:].tolist() == [-1, -1]
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 3, 3, 3]
    assert metadata.paged_kv_last_page_len[2:].tolist() == [0, 0]
    assert metadata.block_tables.shape == (4, 64)
    assert metadata.block_tables[0, :3].tolist() == [*a.pages, -1]
    with pytest.raises(ValueError, match=r"no graph was captured for 4 requests: \[\] were"):
        engine.plan(metadata, 4)


def test_prefix_hits_and_prompts_without_chunks(rng):
    engine = engine_of("cpu", rng)
    (a,) = started(engine, 9)
    engine.input.chunked_prefill_enabled = False
    shared = engine.share(a)
    metadata = engine.build([(shared, 3, True), prompt(engine, 5)])
    assert metadata.block_tables.tolist() == [shared.pages, [-1] * 3]
    assert shared.pages[:2] == a.pages[:2]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_advance_step(device, page_size, turned, padding, rng):
    """Several steps without a builder; prompts of the first one decode in the next."""
    engine = engine_of(device, rng, page_size=page_size)
    sequences = started(engine, 7, 4, 1)
    step = [(sequences[0], 5 if turned else 1, turned), *((s, 1, False) for s in sequences[1:])]
    for s in sequences:
        engine.reserve(s, s.length + 12)
    metadata = engine.build(step, padding or -1)
    count, size = len(step), len(step) + padding
    graphs = Graphs(engine, [size]) if padding else None
    tokens = metadata.num_prefill_tokens + metadata.num_decode_tokens
    made = engine.plan(metadata, tokens)
    new = engine.new_tokens(tokens)
    real = sum(n for _, n, _ in step)
    outputs = engine.forward(new, metadata) if turned or not graphs else graphs.replay(metadata, new)
    engine.grow(step, [[x[:real] for x in qkv] for qkv in new])
    engine.check(step, new, outputs)

    made.input_tokens = made.input_tokens[:size].fill_(9)
    made.input_positions = made.input_positions[:size].fill_(9)
    step = [(s, 1, False) for s in sequences]
    for i in range(4):
        sampled = torch.arange(count, device=device)[:, None] + 10 * i
        metadata.advance_step(made, sampled, page_size, size, count, turn_prefills_into_decodes=turned and i == 0)
        assert made.input_tokens.tolist() == [*sampled.flatten().tolist(), *[0] * padding]
        assert made.input_positions.tolist() == [*(s.length for s in sequences), *[0] * padding]
        assert metadata.slot_mapping[count:].tolist() == [-1] * padding
        bounds = [-(-(s.length + 1) // page_size) for s in sequences]
        assert metadata.block_table_bound.tolist() == [*bounds, *[0] * padding]
        engine.state.begin_forward(made)
        new = engine.new_tokens(size)
        outputs = graphs.replay(metadata, new) if graphs else engine.forward(new, metadata)
        engine.grow(step, [[x[:count] for x in qkv] for qkv in new])
        engine.check(step, new, outputs)


def test_advance_step_refuses(rng):
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


def test_profile_runs_have_no_cache(device, rng):
    engine = engine_of(device, rng)
    engine.runner.cache_config.num_gpu_blocks = None
    step = [prompt(engine, n) for n in (5, 1, 9)]
    metadata = engine.build(step, block_tables=None)
    assert metadata.is_profile_run
    assert metadata.slot_mapping.tolist() == [-1] * 15
    engine.plan(metadata)
    new = engine.new_tokens(15)
    cache, engine.caches = engine.caches, [torch.tensor([], device=device)] * len(engine.impls)
    outputs = engine.forward(new, metadata)
    engine.grow(step, new)
    engine.check(step, new, outputs)
    engine.caches = cache
    with pytest.raises(ValueError, match="must be empty in a profile run"):
        engine.forward(new, metadata)
    engine.input.inter_data_list = [engine.group(*step[0]), engine.group(*step[1], block_tables={0: None})]
    engine.builder.prepare()
    with pytest.raises(ValueError, match="1 of 2 sequences have no block table"):
        engine.builder.build([10, 2], [5, 1], -1, 6)


def test_prompts_longer_than_the_sliding_window(device, rng):
    """Tokens that no later one sees have no slot, and yet all outputs are right; also of later decodes."""
    engine = engine_of(device, rng, [{"window_left": 5}, {"window_left": 5}])
    engine.builder.sliding_window = 6
    for cache in engine.caches:
        cache.fill_(1e4)  # what is never stored must at least be finite, as in vLLM's caches
    step = [prompt(engine, 15), prompt(engine, 4)]
    metadata = engine.run(step)
    assert metadata.prefill_over_rows
    assert (metadata.slot_mapping < 0).tolist() == [True] * 9 + [False] * 10
    (a, _, _), (b, _, _) = step
    engine.run([prompt(engine, 9), (a, 1, False), (b, 1, False)])
    chunks = engine.run([(a, 12, True), prompt(engine, 9), (b, 1, False)])
    assert (chunks.slot_mapping >= 0).all()
    assert not chunks.prefill_over_rows


def test_layers_that_see_further_keep_their_keys(rng):
    engine = engine_of("cpu", rng, [{"window_left": 5}, {}])
    engine.builder.sliding_window = 6
    assert not engine.run([prompt(engine, 15)]).prefill_over_rows


def test_output_buffers(device, rng):
    """Written in place, in either shape; quantised where that is asked for."""
    engine = engine_of(device, rng, [{}], dtype=torch.bfloat16)
    (a,) = started(engine, 6)
    step = [prompt(engine, 4), (a, 1, False)]
    metadata = engine.build(step)
    engine.plan(metadata)
    new = engine.new_tokens(5)
    (plain,) = engine.forward(new, metadata)
    spec = engine.specs[0]
    given = torch.full((5, spec.num_qo_heads, spec.head_dim_qk), torch.nan, device=device, dtype=torch.bfloat16)
    (out,) = engine.forward(new, metadata, output=given)
    assert out.data_ptr() == given.data_ptr()
    assert out.shape == plain.shape
    assert torch.equal(out, plain)
    scale = torch.tensor(0.02, device=device)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        small = torch.empty(plain.shape, dtype=dtype, device=device)
        engine.forward(new, metadata, output=small, output_scale=scale)
        assert torch.equal(small.float(), quantize(plain, dtype, scale).float())
        assert relative_error(small.float() * scale, plain.double()) < 0.1
    with pytest.raises(ValueError, match="output_scale is given without output"):
        engine.forward(new, metadata, output_scale=scale)
    with pytest.raises(ValueError, match=r"output has torch\.float32"):
        engine.forward(new, metadata, output=plain.float())
    with pytest.raises(ValueError, match=r"output has torch\.bfloat16"):
        engine.forward(new, metadata, output=plain, output_scale=scale)


def test_cache_shapes_and_layouts(layout, rng):
    shape = vllm.FlashInferBackend.get_kv_cache_shape(5, 4, 2, 16)
    assert shape == (5, 2, 4, 2, 16)
    order = vllm.FlashInferBackend.get_kv_cache_stride_order()
    assert order == ((0, 1, 2, 3, 4) if layout == "NHD" else (0, 1, 3, 2, 4))
    engine = engine_of("cpu", rng)
    assert engine.state.get_kv_cache_layout() == layout
    assert engine.caches[0].permute(*order).is_contiguous()


def test_an_unknown_layout_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "FLASHINFER_KV_CACHE_LAYOUT", "DHN")
    with pytest.raises(ValueError, match="kv_layout = 'DHN' is not supported"):
        vllm.FlashInferBackend.get_kv_cache_stride_order()


def test_swapping_and_copying_blocks(device, layout, rng):
    """Both keys and values move, and sequences go on where their pages went."""
    engine = engine_of(device, rng, dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3")
    (a, b) = started(engine, 10, 7)
    target = [engine.free.pop() for _ in a.pages]
    mapping = torch.tensor(list(zip(a.pages, target, strict=True)))
    host = [torch.empty_like(cache, device="cpu") for cache in engine.caches]
    for cache, other in zip(engine.caches, host, strict=True):
        vllm.FlashInferBackend.swap_blocks(cache, other, torch.tensor([[p, p] for p in b.pages]))
        cache[b.pages] = 0x7F
    vllm.FlashInferBackend.copy_blocks(engine.caches, mapping)
    for cache, other in zip(engine.caches, host, strict=True):
        cache[a.pages] = 0x7F
        vllm.FlashInferBackend.swap_blocks(other, cache, torch.tensor([[p, p] for p in b.pages]))
    a.pages = target
    engine.run([(a, 1, False), (b, 1, False)])


def test_names(rng):
    backend = vllm.FlashInferBackend
    assert backend.get_name() == "FLASHINFER"
    assert backend.get_impl_cls() is vllm.FlashInferImpl
    assert backend.get_metadata_cls() is vllm.FlashInferMetadata
    assert backend.get_builder_cls() is vllm.FlashInferMetadataBuilder
    assert backend.get_state_cls() is vllm.FlashInferState
    assert {64, 128, 256} < set(backend.get_supported_head_sizes())
    names = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    assert all(backend.get_fp8_dtype_for_flashinfer(n) == getattr(torch, d) for n, d in names.items())
    with pytest.raises(ValueError, match="fp8 dtype 'fp8_e3m4' is not known"):
        backend.get_fp8_dtype_for_flashinfer("fp8_e3m4")
    with pytest.raises(ValueError, match="head_dim = 20 is not supported"):
        backend.make_metadata(0, 0, 1, torch.tensor([0]), None, False, 0, head_dim=20)


def test_parameters_of_layers(rng):
    same, mixed = engine_of("cpu", rng, [{"window_left": 5}] * 2), engine_of("cpu", rng)
    params = vllm.get_per_layer_parameters(same.runner.vllm_config)
    shared = vllm.PerLayerParameters(5, None, same.specs[0].sm_scale)
    assert params == {"layer.0": shared, "layer.1": shared}
    assert vllm.infer_global_hyperparameters(params) == shared
    with pytest.raises(ValueError, match=r"layers differ: 'layer\.0' has .*'layer\.1' has"):
        vllm.infer_global_hyperparameters(vllm.get_per_layer_parameters(mixed.runner.vllm_config))
    with pytest.raises(ValueError, match="no attention layer"):
        vllm.infer_global_hyperparameters({})
    step = [prompt(same, 4)]
    assert same.build(step).window_left == 5
    assert mixed.build([prompt(mixed, 4)]).window_left == -1
    same.runner.vllm_config.compilation_config.static_forward_context["layer.1"].impl = object()
    with pytest.raises(ValueError, match=r"attention of layer 'layer\.1' is a object"):
        vllm.get_per_layer_parameters(same.runner.vllm_config)


def test_layers_that_cannot_be_computed(caplog, rng):
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
    impl = vllm.FlashInferImpl(4, 16, 0.25, 2, None, 8, "auto", use_irope=True)
    assert "use_irope" in caplog.text
    assert impl.sliding_window == (7, 0)
    assert impl.num_queries_per_kv == 2
    assert (impl.scale, impl.logits_soft_cap, impl.kv_cache_dtype) == (0.25, None, "auto")


def test_bad_steps_are_refused(rng):
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


def test_nothing_is_written_when_a_call_is_refused(rng):
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


def test_slots_of_minus_one_are_skipped(device, rng):
    engine = engine_of(device, rng, [{}])
    (a,) = started(engine, 6)
    metadata = engine.build([(a, 1, False)])
    metadata.slot_mapping.fill_(-1)
    engine.plan(metadata, 1)
    before = engine.caches[0].nan_to_num(7)
    engine.forward(engine.new_tokens(1), metadata)
    assert torch.equal(engine.caches[0].nan_to_num(7), before)


def test_capture_is_for_decodes_within_its_context(device, rng):
    engine = engine_of(device, rng)
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


def test_placeholders_of_several_prompts(rng):
    class Placeholders:
        def __init__(self, *found):
            self.found = list(found)

        def extend(self, other):
            self.found += other.found

        def index_map(self):
            return self.found

    engine = engine_of("cpu", rng)
    step = [prompt(engine, 3), prompt(engine, 2)]
    metadata = engine.build(step, multi_modal_placeholder_maps={"image": Placeholders(4, 2)})
    assert metadata.multi_modal_placeholder_index_maps == {"image": [4, 2, 4, 2]}


@pytest.mark.gpu
def test_steps_never_wait_for_the_device(rng):
    engine = engine_of("cuda", rng)
    a, b = started(engine, 6, 5)
    for s in (a, b):
        engine.reserve(s, 12)
    new = engine.new_tokens(2)
    made = engine.plan(engine.build([(a, 1, False), (b, 1, False)]), 2)
    engine.forward(new, made.attn_metadata)  # compiles
    sampled = torch.zeros(2, dtype=torch.int64, device="cuda")
    made.attn_metadata.advance_step(made, sampled, 4, 2, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = engine.plan(engine.build([(a, 1, False), (b, 1, False)]), 2)
        engine.forward(new, made.attn_metadata)
        made.attn_metadata.advance_step(made, sampled, 4, 2, 2)
        engine.state.begin_forward(made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
