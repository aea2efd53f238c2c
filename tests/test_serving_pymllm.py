"""pymllm's backend: random schedules against the definition of attention, graphs, and what is refused."""

from __future__ import annotations

import pytest
import torch

from quire.attention import oracle
from quire.bench.batches import relative_error
from quire.serving.base import pack_mask, prefix_window_mask
from quire.serving.pymllm import (
    DecodeMetadata,
    FlashInferAttnBackend,
    ForwardBatch,
    ForwardMode,
    PrefillMetadata,
    VerifyInput,
    WrapperDispatch,
    should_use_tensor_core,
)
from token_engine import DIM, HEADS, KV_HEADS, Engine, Layer, Pool, by_heads, tree

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


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


def models(device):
    """Layers, and the options of a backend for them."""
    sinks = torch.randn(HEADS, device=device)
    return {
        "plain": ([Layer(0), Layer(1, logit_cap=4.0, sinks=sinks)], {}),
        "windows": (
            [Layer(0, sliding_window_size=5, sinks=sinks), Layer(1), Layer(2, sliding_window_size=11)],
            {"sliding_window_size": 5},
        ),
        "windows of one wrapper": ([Layer(0, sliding_window_size=0), Layer(1, sliding_window_size=6)], {}),
        "cross": ([Layer(0), Layer(1, is_cross_attention=True)], {"cross_attention": True}),
    }


def schedule(engine, rng, steps):
    """Random arrivals, chunks, prefix hits, decodes, drafts and departures."""
    for _ in range(steps):
        if len(engine.requests) < engine.rows and (not engine.requests or rng.random() < 0.5):
            engine.arrive(rng.choice((0, 3, 9)) if engine.cross else 0)
        elif engine.requests and rng.random() < 0.2:
            engine.leave(rng.choice(engine.requests))
        for request in [r for r in engine.requests if len(r.slots) > engine.width - 14]:
            engine.leave(request)  # preempted: it would not fit
        chosen = rng.sample(engine.requests, rng.randint(0, len(engine.requests)))
        if not chosen:
            continue
        begun = [r for r in chosen if len(r)]
        kind = rng.choice(("extend", "mixed", "decode", "graph", "verify", "verify in a graph"))
        keys = rng.choice(("written", "written", "apart", "there"))
        drafted = rng.randint(1, 4)
        if kind == "mixed":
            engine.step("MIXED", chosen, [rng.choice((1, rng.randint(1, 9))) for _ in chosen], keys=keys)
        elif kind == "extend" or not begun or len(begun) < len(chosen):
            engine.step("EXTEND", chosen, [rng.randint(1, 9) for _ in chosen], keys=keys)
        elif kind == "decode":
            engine.step("DECODE", chosen, [1] * len(chosen), keys="there" if keys == "apart" else keys)
        elif kind == "graph" and len(chosen) <= 4:
            engine.replay("DECODE", rng.choice([n for n in (1, 2, 4) if n >= len(chosen)]), chosen)
        elif kind == "verify":
            masks = rng.choice((None, [tree(drafted, rng) for _ in chosen]))
            engine.step("TARGET_VERIFY", chosen, [drafted] * len(chosen), masks=masks)
        elif len(chosen) <= 4:
            masks = [tree(3, rng) for _ in chosen] if engine.graphs["TARGET_VERIFY", 4].masked else None
            engine.replay("TARGET_VERIFY", 4, chosen, 3, masks)


def with_graphs(engine, masked):
    """The engine, with graphs for decode of 1, 2 and 4 requests, and for drafts of 3 tokens of 4 requests."""
    engine.backend.init_cuda_graph_state(4, 12)
    for bs in (4, 2, 1):
        engine.capture("DECODE", bs)
    engine.capture("TARGET_VERIFY", 4, 3, masked)
    return engine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["plain", "windows", "windows of one wrapper", "cross"])
def test_random_schedules(model, device, dtype, rng):
    layers, options = models(device)[model]
    engine = with_graphs(Engine(rng, Face(), layers, device=device, dtype=dtype, **options), rng.random() < 0.7)
    schedule(engine, rng, 60)
