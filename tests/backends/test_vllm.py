"""vLLM's backend, driven by stand-ins of its objects: random schedules against the oracle."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from helpers.vllm_engine import MIXED, Graphs, Sequence, engine_of, prompt, started
from quire.backends import vllm
from quire.bench.batches import relative_error
from quire.steps import quantize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["NHD", "HND"])
def layout(request, monkeypatch):
    monkeypatch.setattr(vllm, "FLASHINFER_KV_CACHE_LAYOUT", request.param)
    return request.param


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_random_schedule_matches_the_oracle(device, layout, page_size, kind, rng):
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


def test_metadata_of_a_mixed_step_has_its_counts(rng):
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


def test_build_with_padding_fills_the_graphs_buffers(rng):
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


def test_build_of_prefix_hits_without_chunked_prefill_has_block_tables(rng):
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
def test_advance_step_of_several_steps_matches_the_oracle(device, page_size, turned, padding, rng):
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


def test_profile_run_without_block_tables_has_no_slots(device, rng):
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


def test_prompt_longer_than_the_sliding_window_matches_the_oracle(device, rng):
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


def test_prompt_of_layers_with_different_windows_keeps_all_keys(rng):
    engine = engine_of("cpu", rng, [{"window_left": 5}, {}])
    engine.builder.sliding_window = 6
    assert not engine.run([prompt(engine, 15)]).prefill_over_rows


def test_forward_with_an_output_writes_to_it(device, rng):
    """Outputs are written in place, in either shape, and quantised if a scale is passed."""
    engine = engine_of(device, rng, [{}], dtype=torch.bfloat16)
    (a,) = started(engine, 6)
    step = [prompt(engine, 4), (a, 1, False)]
    metadata = engine.build(step)
    engine.plan(metadata)
    new = engine.new_tokens(5)
    (expected,) = engine.forward(new, metadata)
    spec = engine.specs[0]
    given = torch.full((5, spec.num_qo_heads, spec.head_dim_qk), torch.nan, device=device, dtype=torch.bfloat16)
    (out,) = engine.forward(new, metadata, output=given)
    assert out.data_ptr() == given.data_ptr()
    assert out.shape == expected.shape
    assert torch.equal(out, expected)
    scale = torch.tensor(0.02, device=device)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        small = torch.empty(expected.shape, dtype=dtype, device=device)
        engine.forward(new, metadata, output=small, output_scale=scale)
        assert torch.equal(small.float(), quantize(expected, dtype, scale).float())
        assert relative_error(small.float() * scale, expected.double()) < 0.1
    with pytest.raises(ValueError, match="output_scale is given without output"):
        engine.forward(new, metadata, output_scale=scale)
    with pytest.raises(ValueError, match=r"output has torch\.float32"):
        engine.forward(new, metadata, output=expected.float())
    with pytest.raises(ValueError, match=r"output has torch\.bfloat16"):
        engine.forward(new, metadata, output=expected, output_scale=scale)


def test_cache_shape_of_each_layout_is_that_of_vllm(layout, rng):
    shape = vllm.FlashInferBackend.get_kv_cache_shape(5, 4, 2, 16)
    assert shape == (5, 2, 4, 2, 16)
    order = vllm.FlashInferBackend.get_kv_cache_stride_order()
    assert order == ((0, 1, 2, 3, 4) if layout == "NHD" else (0, 1, 3, 2, 4))
    engine = engine_of("cpu", rng)
    assert engine.state.get_kv_cache_layout() == layout
    assert engine.caches[0].permute(*order).is_contiguous()


def test_swap_and_copy_blocks_move_keys_and_values(device, layout, rng):
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


def test_backend_names_and_classes_are_those_of_vllm(rng):
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


def test_per_layer_parameters_of_differing_layers_are_refused(rng):
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


def test_forward_with_slots_of_minus_one_writes_nothing(device, rng):
    engine = engine_of(device, rng, [{}])
    (a,) = started(engine, 6)
    metadata = engine.build([(a, 1, False)])
    metadata.slot_mapping.fill_(-1)
    engine.plan(metadata, 1)
    before = engine.caches[0].nan_to_num(7)
    engine.forward(engine.new_tokens(1), metadata)
    assert torch.equal(engine.caches[0].nan_to_num(7), before)


def test_placeholders_of_several_prompts_are_joined(rng):
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
