"""pymllm's backend: random schedules against the definition of attention, graphs, and what is refused."""

from __future__ import annotations

import pytest
import torch

from helpers.token_engine import (
    DEVICES,
    DIM,
    DTYPES,
    HEADS,
    KV_HEADS,
    Engine,
    Layer,
    Pool,
    by_heads,
    models,
    schedule,
    tree,
    with_graphs,
)
from quire.backends.pymllm import (
    DecodeMetadata,
    FlashInferAttnBackend,
    ForwardBatch,
    ForwardMode,
    PrefillMetadata,
    VerifyInput,
    WrapperDispatch,
    should_use_tensor_core,
)
from quire.bench.batches import relative_error
from quire.definition import oracle
from quire.steps import pack_mask, prefix_window_mask


class Face:
    """How pymllm's engine talks to its backend."""

    lengths_dtype = torch.int32

    def backend(self, engine, **options):
        options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, **options}
        own = {"max_context_len": engine.width, "req_to_token": engine.req_to_token, "device": engine.device}
        dtypes = {"kv_cache_dtype": engine.dtype, "q_dtype": engine.dtype}
        return FlashInferAttnBackend(**{**own, **dtypes, "max_req_pool_size": engine.rows, **options})

    def batch(self, engine, mode, **fields):
        return ForwardBatch(ForwardMode[mode], token_to_kv_pool=engine.pool, attn_backend=engine.backend, **fields)

    def capture(self, backend, batch):
        tokens = (batch.batch_size, len(batch.out_cache_loc))
        tables = (batch.req_pool_indices, batch.seq_lens, batch.forward_mode)
        backend.init_forward_metadata_capture_cuda_graph(*tokens, *tables, **self.extras(batch))

    def replay(self, backend, batch):
        backend.init_forward_metadata_replay_cuda_graph(
            batch.batch_size,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.seq_lens_sum,
            batch.forward_mode,
            batch.seq_lens_cpu,
            **self.extras(batch),
        )

    def extras(self, batch):
        mask = None if batch.spec_info is None else batch.spec_info.custom_mask
        return {"custom_mask": mask, "encoder_lens": batch.encoder_lens}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["default", "windows", "windows of one wrapper", "cross"])
def test_random_schedule_matches_the_oracle(model, device, dtype, rng):
    layers, options = models(device)[model]
    engine = with_graphs(Engine(rng, Face(), layers, device=device, dtype=dtype, **options), rng.random() < 0.7)
    schedule(engine, rng, 50)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_cache_with_scales_divides_what_is_stored(device, rng):
    """What is stored is divided by the layer's scales, and multiplied by them when it is read."""
    layer = Layer(0, sliding_window_size=9)
    layer.k_scale, layer.v_scale = torch.tensor(0.5, device=device), torch.tensor(2.0, device=device)
    engine = Engine(rng, Face(), [layer], device=device, dtype=torch.bfloat16, kv_cache_dtype=torch.float8_e4m3fn)
    engine.pool = Pool(1, engine.size + 1, torch.float8_e4m3fn, device)
    request = engine.arrive()
    for n, mode in ((7, "EXTEND"), (6, "EXTEND"), (1, "DECODE")):
        batch = engine.batch(mode, [request], [n])
        q, k, v = (torch.randn(n, heads * DIM, device=device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
        engine.backend.init_forward_metadata(batch)
        rows_alone = getattr(engine.backend.forward_metadata, "extend_no_prefix", False)  # and they are not rounded
        out, seen = by_heads(engine.backend.forward(q, k, v, layer, batch)), []
        for x, buffer, scale in zip((k, v), engine.pool.buffers[0], (0.5, 2.0), strict=True):
            rounded = (by_heads(x) / scale).to(torch.float8_e4m3fn)
            assert torch.equal(buffer[batch.out_cache_loc].view(torch.uint8), rounded.view(torch.uint8))
            slots = torch.tensor(request.slots, device=device)
            seen.append(by_heads(x) if rows_alone else buffer[slots].float() * scale)
        exact, _ = oracle.attend(by_heads(q), *seen, layer.spec(torch.bfloat16))
        assert relative_error(out, exact) < 6e-3


@pytest.mark.parametrize("device", DEVICES)
def test_encoder_layer_sees_earlier_and_later_tokens(device, rng):
    layer = Layer(0, attn_type="encoder_only")
    engine = Engine(rng, Face(), [Layer(0)], device=device)
    requests, counts = [engine.arrive(), engine.arrive()], [5, 8]
    batch = engine.batch("EXTEND", requests, counts)
    batch.extend_prefix_lens_cpu = [0, 0]
    q, k, v = (torch.randn(13, heads * DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    engine.backend.init_forward_metadata(batch)
    out = by_heads(engine.backend.forward(q, k, v, layer, batch))
    for rows in (slice(0, 5), slice(5, 13)):
        one = (by_heads(x)[rows] for x in (q, k, v))
        exact, _ = oracle.attend(*one, layer.spec(torch.float32).replace(causal=False))
        assert relative_error(out[rows], exact) < 3e-6
    assert all(x.isnan().all() for x in engine.pool.buffers[0])  # nobody looks at them again
    engine.backend.init_forward_metadata(engine.batch("EXTEND", requests, counts))
    with pytest.raises(ValueError, match="layer 0 is encoder-only: it needs k and v, and no request a prefix"):
        engine.backend.forward(q, k, v, layer, batch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", ["written", "apart"])
def test_query_rows_of_padding_give_zeros(keys, device, rng):
    engine = Engine(rng, Face(), [Layer(0, sliding_window_size=4)], device=device)
    requests = [engine.arrive(), engine.arrive()]
    for _ in range(2):
        batch = engine.batch("MIXED", requests, [3, 6])
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(4, dtype=torch.int64, device=device)])
        engine.backend.init_forward_metadata(batch)
        q, k, v = (torch.randn(13, heads * DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out = engine.backend.forward(q, k, v, engine.layers[0], batch, save_kv_cache=keys == "written")
        assert (out[9:] == 0).all()
        engine.check(engine.layers[0], requests, [3, 6], out, q[:9], k[:9], v[:9])
        engine.pool.set_kv_buffer(0, batch.out_cache_loc, by_heads(k), by_heads(v))


def test_idle_batch_gives_zeros(rng):
    engine = Engine(rng, Face(), [Layer(0)])
    batch = engine.batch("IDLE", [], [])
    engine.backend.init_forward_metadata(batch)
    q = torch.full((3, HEADS * DIM), torch.nan)
    out = engine.backend.forward(q, None, None, engine.layers[0], batch)
    assert out.shape == (3, HEADS * DIM)
    assert (out == 0).all()


@pytest.mark.gpu
def test_steps_never_wait_for_the_device(rng):
    """All kinds of steps, where the batch carries the host's numbers: eager, and graphs' replays."""
    layers, options = models("cuda")["windows"]
    engine = with_graphs(Engine(rng, Face(), layers, device="cuda", **options), masked=True)
    engine._perhaps = lambda x: x
    requests = [engine.arrive(), engine.arrive()]
    engine.step("EXTEND", requests, [5, 8])
    for waits in ("default", "error"):  # kernels are compiled the first time
        for mode, n, keys in (("EXTEND", 4, "apart"), ("MIXED", 3, "written"), ("DECODE", 1, "written")):
            batch = engine.batch(mode, requests, [n, n])
            inputs = [[engine._random(2 * n, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in layers]
            torch.cuda.set_sync_debug_mode(waits)
            try:
                engine.backend.init_forward_metadata(batch)
                for layer, (q, k, v) in zip(layers, inputs, strict=True):
                    engine.backend.forward(q, k, v, layer, batch, save_kv_cache=keys == "written", sinks=layer.sinks)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for mode, bs, n in (("DECODE", 2, 1), ("TARGET_VERIFY", 4, 3)):
            masks = [tree(3, rng) for _ in requests] if n == 3 else None
            batch = engine.batch(mode, requests, [n, n], bs - 2, masks)
            torch.cuda.set_sync_debug_mode(waits)
            try:
                engine.face.replay(engine.backend, batch)
                engine.graphs[mode, bs].replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            engine.reject(requests, [n, n])


def test_pack_mask_starts_each_request_at_a_byte(rng):
    q_lens, kv_lens = [rng.randint(0, 5) for _ in range(4)], [rng.randint(0, 13) for _ in range(4)]
    blocks = [torch.rand(a, b) < 0.5 for a, b in zip(q_lens, kv_lens, strict=True)]
    lengths = (torch.tensor(q_lens, dtype=torch.int32), torch.tensor(kv_lens, dtype=torch.int32))
    bits = pack_mask(torch.cat([b.flatten() for b in blocks]), *lengths).tolist()
    for block in blocks:
        flat = block.flatten().tolist()
        count = -(-len(flat) // 8)
        own, bits = bits[:count], bits[count:]
        assert [bool(own[i // 8] >> i % 8 & 1) for i in range(len(flat))] == flat
    with pytest.raises(ValueError, match=r"custom_mask is torch\.int64: it must be bool"):
        pack_mask(torch.zeros(3, dtype=torch.int64), *lengths)


def test_prefix_window_mask_of_random_lengths_equals_the_condition(rng):
    for _ in range(20):
        window = rng.randint(0, 7)
        new, tails = [rng.randint(0, 9) for _ in range(4)], [rng.randint(0, window) for _ in range(4)]
        parts = [
            torch.tensor([[j - t >= i - window for j in range(t)] for i in range(n)], dtype=torch.bool).flatten()
            for n, t in zip(new, tails, strict=True)
        ]
        exact = torch.cat(parts)
        lengths = (torch.tensor(new, dtype=torch.int32), torch.tensor(tails, dtype=torch.int32))
        assert torch.equal(prefix_window_mask(*lengths, window, sum(new), len(exact)), exact)


def test_should_use_tensor_core_equals_the_choice_of_flashinfer():
    assert should_use_tensor_core(torch.float8_e4m3fn, 8, 8)
    assert should_use_tensor_core(torch.bfloat16, 8, 2)
    assert not should_use_tensor_core(torch.bfloat16, 8, 4)
    assert not should_use_tensor_core(torch.float32, 8, 1)


def test_backend_attributes_are_those_that_pymllm_reads(rng):
    own = {
        "kv_indptr_buf": torch.zeros(7, dtype=torch.int32),
        "kv_last_page_len_buf": torch.ones(6, dtype=torch.int32),
        "init_new_workspace": True,
    }
    backend = Engine(rng, Face(), [Layer(0)], **own).backend
    assert backend.kv_indptr == [own["kv_indptr_buf"]]
    assert backend.kv_last_page_len is own["kv_last_page_len_buf"]
    assert backend.dispatch_reason is None
    assert backend.prefill_wrapper_ragged is not None
    assert (len(backend.prefill_wrappers_paged), len(backend.decode_wrappers)) == (1, 1)
    other = Engine(rng, Face(), [Layer(0)], sliding_window_size=3, skip_prefill=True).backend
    assert other.workspace_buffer is not backend.workspace_buffer
    assert other.dispatch_reason is WrapperDispatch.SLIDING_WINDOW
    assert (other.prefill_wrapper_ragged, other.prefill_wrappers_paged, len(other.decode_wrappers)) == (None, [], 2)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert Engine(rng, Face(), [Layer(0)], cross_attention=True).backend.dispatch_reason.name == "CROSS_ATTENTION"
    indices = torch.zeros(100, dtype=torch.int32)
    backend.init_cuda_graph_state(2, 2, indices)
    assert backend.cuda_graph_kv_indices == [indices]
    batch = ForwardBatch(ForwardMode.DECODE, 1, *[torch.zeros(1, dtype=torch.int64)] * 2, torch.ones(1), torch.ones(1))
    assert isinstance(DecodeMetadata(other.decode_wrappers).decode_wrappers, list)
    assert PrefillMetadata([], True, False).step is None
    assert [mode.name for mode in ForwardMode if mode.is_extend()] == ["EXTEND", "MIXED", "TARGET_VERIFY"]
    assert [mode.name for mode in ForwardMode if mode.is_decode_or_idle()] == ["DECODE", "IDLE"]
    assert ForwardMode.MIXED.is_mixed()
    assert batch.attn_backend is None


BAD_ARGUMENTS = [
    ({"num_heads": 3}, "num_heads = 3 is not a multiple of num_kv_heads = 2"),
    ({"max_context_len": 49}, "req_to_token has 48 columns: max_context_len is 49"),
    ({"req_to_token": torch.zeros(6, 48)}, r"req_to_token is torch\.float32 \[6, 48\] on cpu: it must be an int32"),
    ({"max_req_pool_size": 0}, "max_req_pool_size = 0: it must be positive"),
    ({"sliding_window_size": 3, "cross_attention": True}, "sliding_window_size and cross_attention do not go together"),
    ({"sliding_window_size": 3, "kv_indptr_buf": torch.zeros(7).int()}, "can't be shared by two wrappers"),
    ({"kv_indptr_buf": torch.zeros(6).int()}, "kv_indptr_buf has 6 entries: 7 are needed"),
    ({"kv_last_page_len_buf": torch.zeros(5).int()}, "kv_last_page_len_buf has 5 entries: 6 are needed"),
]


@pytest.mark.parametrize(("options", "message"), BAD_ARGUMENTS)
def test_backend_with_wrong_arguments_is_refused(options, message, rng):
    with pytest.raises(ValueError, match=message):
        Engine(rng, Face(), [Layer(0)], **options)


def bad(engine, mode="EXTEND", layer=None, save=True, give=(HEADS, KV_HEADS, KV_HEADS), rows=7, **changes):
    """A step of two requests with something wrong, after which the pool must be as before."""
    requests = [engine.arrive(), engine.arrive()]
    batch = engine.batch(mode, requests, [3, 4] if mode != "DECODE" else [1, 1])
    before = [x.clone() for pair in engine.pool.buffers for x in pair]
    for name, value in changes.items():
        setattr(batch, name, value)
    try:
        engine.backend.init_forward_metadata(batch)
        q, k, v = (None if heads is None else torch.randn(rows, heads * DIM) for heads in give)
        engine.backend.forward(q, k, v, layer or engine.layers[0], batch, save_kv_cache=save)
    finally:
        after = [x for pair in engine.pool.buffers for x in pair]
        assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(before, after, strict=True))


def longs(*values):
    return torch.tensor(values)


BAD_STEPS = [
    ({"layer": Layer(1)}, "layer_id = 1: the pool has no such layer"),
    ({"layer": Layer(-1)}, "layer_id = -1: the pool has no such layer"),
    ({"layer": Layer(0, tp_k_head_num=1, tp_v_head_num=1)}, "layer 0 has Heads.*: the backend was made for Heads"),
    ({"layer": Layer(0, tp_v_head_num=1)}, "layer 0 has Heads"),
    ({"layer": Layer(0, attn_type="other")}, "attn_type = 'other' is not known"),
    ({"layer": Layer(0, is_cross_attention=True)}, "layer 0 is cross-attention: the backend was made without"),
    (
        {"layer": Layer(0, attn_type="decoder_bidirectional"), "pixel_values": torch.zeros(1)},
        "layer 0: pictures whose tokens see each other are not supported",
    ),
    ({"token_to_kv_pool": Pool(1, 9, torch.float16, "cpu")}, r"the pool's keys of layer 0 are torch\.float16 .*needed"),
    ({"out_cache_loc": longs(1, 2, 3)}, r"out_cache_loc is torch\.int64 \[3\]: 7 new tokens need as many slots"),
    ({"out_cache_loc": None}, "out_cache_loc is None: 7 new tokens need as many slots"),
    ({"out_cache_loc": longs(1, 2, 3, 4, 5, 6, 289)}, r"out_cache_loc\[6\] = 289 is out of range: .* 0 to 288"),
    ({"out_cache_loc": longs(1, 2, -1, 4, 5, 6, 7)}, r"out_cache_loc\[2\] = -1 is out of range"),
    ({"give": (HEADS, KV_HEADS, None)}, "k and v belong together"),
    ({"give": (HEADS, HEADS, KV_HEADS)}, r"k has shape \[7, 64\]: it must be \[tokens, 2 \* 16\]"),
    ({"rows": 6, "extend_seq_lens_cpu": [3, 4]}, "q has 6 tokens: the batch has 7 new ones"),
    ({"seq_lens": longs(3, 49)}, r"lengths\[1\] = 49 is out of range: 0 to max_context = 48"),
    ({"seq_lens": longs(3)}, "req_pool_indices has 2 requests, seq_lens 1"),
    ({"req_pool_indices": longs(0, 6)}, r"req_pool_indices\[1\] = 6 is out of range: 0 to 5"),
    ({"seq_lens_cpu": longs(3, 50)}, r"seq_lens\[1\] = 50 is out of range"),
    ({"extend_prefix_lens": None}, "extend_prefix_lens is None"),
    ({"mode": "DECODE", "rows": 3}, "q has 3 tokens: the batch has 2"),
    ({"mode": "DECODE", "rows": 2, "out_cache_loc": longs(1, 289)}, r"out_cache_loc\[1\] = 289 is out of range"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_STEPS)
def test_step_with_wrong_arguments_is_refused_and_writes_nothing(wrong, message, rng):
    engine = Engine(rng, Face(), [Layer(0)])
    with pytest.raises(ValueError, match=message):
        bad(engine, **{"extend_prefix_lens_cpu": None, **wrong})


def test_forward_before_its_metadata_or_graph_state_is_refused(rng):
    engine = Engine(rng, Face(), [Layer(0)])
    backend, request = engine.backend, engine.arrive()
    prefill, decode = engine.batch("EXTEND", [request], [3]), engine.batch("DECODE", [request], [1])
    q, k, v = (torch.randn(1, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"init_forward_metadata\(\) must be called with this batch"):
            backend.forward(q, k, v, engine.layers[0], decode)
        backend.init_forward_metadata(prefill)
    backend.init_forward_metadata(decode)
    with pytest.raises(ValueError, match="q_rope is not supported"):
        backend.forward(q, k, v, engine.layers[0], decode, q_rope=q)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state"):
        engine.capture("DECODE", 1)
    decoder = Engine(rng, Face(), [Layer(0)], skip_prefill=True)
    with pytest.raises(RuntimeError, match="skip_prefill=True: it only decodes"):
        decoder.backend.init_forward_metadata(prefill)
    decoder.backend.init_cuda_graph_state(1, 3)
    with pytest.raises(RuntimeError, match="skip_prefill=True: it only decodes"):
        decoder.capture("TARGET_VERIFY", 1, 3)


def test_cross_attention_without_encoder_lens_is_refused(rng):
    layers, options = models("cpu")["cross"]
    engine = Engine(rng, Face(), layers, **options)
    for mode in ("DECODE", "TARGET_VERIFY"):
        batch = engine.batch(mode, [engine.arrive()], [1])
        batch.encoder_lens = None
        with pytest.raises(ValueError, match="encoder_lens is None"):
            engine.backend.init_forward_metadata(batch)


def test_graph_of_wrong_sizes_is_refused(rng):
    engine = Engine(rng, Face(), [Layer(0)])
    backend = engine.backend
    for sizes, message in (((7, 7), "max_bs = 7: it must be 1 to max_req_pool_size = 6"), ((4, 3), "max_num_tokens")):
        with pytest.raises(ValueError, match=message):
            backend.init_cuda_graph_state(*sizes)
    with_graphs(engine, masked=True)
    one = longs(1, 1, 1, 1)
    for mode in ("EXTEND", "MIXED"):
        with pytest.raises(ValueError, match="graphs are captured for decode and target-verify only"):
            backend.init_forward_metadata_capture_cuda_graph(4, 4, one, one, ForwardMode[mode])
        with pytest.raises(ValueError, match="graphs are replayed for decode and target-verify only"):
            backend.init_forward_metadata_replay_cuda_graph(4, one, one, 4, ForwardMode[mode], None)
    for bs, tokens in ((4, 8), (4, 5), (4, 16), (0, 0)):
        with pytest.raises(ValueError, match=f"num_tokens = {tokens}"):
            backend.init_forward_metadata_capture_cuda_graph(bs, tokens, one, one, ForwardMode.DECODE)
    with pytest.raises(ValueError, match="a graph of 5 requests does not fit buffers made for 4"):
        backend.init_forward_metadata_capture_cuda_graph(5, 5, one, one, ForwardMode.DECODE)
    with pytest.raises(ValueError, match="seq_lens has 3 requests: the graph has bs = 4"):
        backend.init_forward_metadata_replay_cuda_graph(4, one, one[:3], 4, ForwardMode.DECODE, None)
    with pytest.raises(ValueError, match=r"bs = 5: graphs of this mode have been captured for \[1, 2, 4\]"):
        backend.init_forward_metadata_replay_cuda_graph(5, one, one, 5, ForwardMode.DECODE, None)
    for mask, message in (
        (None, "custom_mask: the graph for bs = 4 was captured with one"),
        (torch.ones(47, dtype=torch.bool), r"custom_mask has 47 entries: the sum of draft tokens \* kv_len is 48"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.init_forward_metadata_replay_cuda_graph(
                4, one, one, 4, ForwardMode.TARGET_VERIFY, None, custom_mask=mask
            )
    batch = engine.batch("TARGET_VERIFY", [engine.arrive()], [3])
    batch.spec_info = None
    with pytest.raises(ValueError, match="spec_info is None"):
        backend.init_forward_metadata(batch)
    assert VerifyInput(3).custom_mask is None
