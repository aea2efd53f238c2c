"""A tiny engine over a pool with one slot per token, for the backends of pymllm and SGLang.

It knows what every request's keys and values are, and so what each output must be. What no request owns in the pool is
NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quire.backends.pymllm import VerifyInput
from quire.bench.batches import relative_error
from quire.definition import attention_spec, oracle
from quire.steps import store

HEADS, KV_HEADS, DIM = 4, 2, 16
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 6e-3}


@dataclass
class Layer:
    """What the backends read of a layer."""

    layer_id: int
    tp_q_head_num: int = HEADS
    tp_k_head_num: int = KV_HEADS
    tp_v_head_num: int = KV_HEADS
    head_dim: int = DIM
    v_head_dim: int = DIM
    scaling: float = 0.3
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    is_cross_attention: bool = False
    attn_type: Any = "decoder"
    sinks: torch.Tensor | None = None

    def spec(self, dtype):
        return attention_spec(
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim_qk=DIM,
            q_dtype=dtype,
            sm_scale=self.scaling,
            logits_soft_cap=self.logit_cap,
            causal=not self.is_cross_attention,
            window_left=self.sliding_window_size,
        )


class Pool:
    """Keys and values of all layers."""

    def __init__(self, layers, slots, dtype, device):
        empty = torch.full((slots, KV_HEADS, DIM), torch.nan, device=device).to(dtype)
        self.buffers = [(empty.clone(), empty.clone()) for _ in range(layers)]

    def get_kv_buffer(self, layer_id):
        return self.buffers[layer_id]

    def set_kv_buffer(self, layer, indices, k, v, k_scale=None, v_scale=None):
        """Store keys and values; pymllm passes a layer's id, SGLang a layer and scales."""
        k_cache, v_cache = self.buffers[getattr(layer, "layer_id", layer)]
        scales = (1.0 if x is None else x for x in (k_scale, v_scale))
        store((k_cache.unsqueeze(1), v_cache.unsqueeze(1)), k, v, indices, *scales)

    def forget(self, slots):
        for pair in self.buffers:
            for x in pair:
                x[torch.tensor(slots, dtype=torch.int64, device=x.device)] = torch.nan


@dataclass(eq=False)
class Request:
    row: int
    encoder: int  # tokens
    slots: list[int] = field(default_factory=list)  # those of its encoder's tokens first
    past: dict[int, Any] = field(default_factory=dict)  # keys and values of each layer

    def __len__(self):
        return len(self.slots) - self.encoder


@dataclass
class Graph:
    batch: Any
    inputs: list[list[torch.Tensor]]
    masked: bool
    replay: Any = None
    out: Any = None


def by_heads(x):
    return x.view(-1, x.shape[1] // DIM, DIM)


def tree(drafted, rng):
    """Bool [drafted, drafted]: each drafted token follows one before it, or none."""
    mask = torch.eye(drafted, dtype=torch.bool)
    for i in range(1, drafted):
        parent = rng.randrange(-1, i)
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def captured(run):
    """A replay of what `run` does, as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Engine:
    """Requests and steps.

    Args:
        face: makes backends and batches, see the tests.
        layers: the model's.
        options: the backend's.
    """

    def __init__(self, rng, face, layers, *, device="cpu", dtype=torch.float32, rows=6, width=48, **options):
        self.rng, self.face = rng, face
        self.layers, self.device = layers, device
        self.dtype = dtype
        self.cross = any(layer.is_cross_attention for layer in layers)
        self.rows, self.width, self.size = rows, width, rows * width
        self.pool = Pool(len(layers), self.size + 1, dtype, device)
        self.req_to_token = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.free = list(range(1, self.size + 1))  # slot 0 takes what fills batches up
        rng.shuffle(self.free)
        self.owners = [0] * (self.size + 1)
        self.requests: list[Request] = []
        self.graphs: dict[Any, Graph] = {}
        self.backend = face.backend(self, **options)

    def arrive(self, encoder=0):
        """A request, which may begin like one that is there and share its slots."""
        taken = {request.row for request in self.requests}
        request = Request(self.rng.choice([i for i in range(self.rows) if i not in taken]), encoder)
        others = [r for r in self.requests if len(r) > 1 and not self.cross]
        if others and self.rng.random() < 0.6:
            other = self.rng.choice(others)
            shared = self.rng.randrange(1, len(other))
            request.slots = other.slots[:shared]
            request.past = {i: (k[:shared], v[:shared]) for i, (k, v) in other.past.items()}
            for slot in request.slots:
                self.owners[slot] += 1
        self.requests.append(request)
        self._grow(request, encoder)
        return request

    def leave(self, request):
        """Forget a request; what nobody else owns is NaN again."""
        self.requests.remove(request)
        self._shrink(request, len(request.slots))

    def step(self, mode, requests, counts, *, keys="written", masks=None):
        """New tokens of some requests through all layers, each compared with the definition.

        Args:
            keys: "written" by the backend; "apart": given, but not written; "there": in the pool before, not given.
            masks: bool [drafted, drafted] of each request, for TARGET_VERIFY.
        """
        batch = self.batch(mode, requests, counts, masks=masks)
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = self._inputs(layer, requests, counts)
            if keys == "there" and not layer.is_cross_attention:
                self._store(layer, batch, k, v)
            none = keys == "there" and not layer.is_cross_attention
            written = keys == "written" or layer.is_cross_attention
            given = (None, None) if none else (k, v)
            out = self.backend.forward(q, *given, layer, batch, save_kv_cache=written, sinks=layer.sinks)
            self.check(layer, requests, counts, out, q, k, v, masks)
            if keys == "apart" and not layer.is_cross_attention:
                self._store(layer, batch, k, v)
        if mode == "TARGET_VERIFY":
            self.reject(requests, counts)

    def check(self, layer, requests, counts, out, q, k, v, masks=None):
        """Compare a layer's output with the definition, and remember its keys, unless they are drafts'."""
        q, out, exact, at = by_heads(q).cpu(), by_heads(out[: len(q)]).cpu(), [], 0
        self._learn(layer, requests, counts, k, v)
        for b, (request, n) in enumerate(zip(requests, counts, strict=True)):
            options = {"sinks": None if layer.sinks is None else layer.sinks.cpu()}
            keys, values = request.past.get(layer.layer_id, (torch.zeros(0, KV_HEADS, DIM),) * 2)
            if masks is not None and not layer.is_cross_attention:
                options["mask"] = torch.ones(n, len(keys), dtype=torch.bool)
                options["mask"][:, len(keys) - n :] = masks[b]
            exact.append(oracle.attend(q[at : at + n], keys, values, layer.spec(self.dtype), **options)[0])
            at += n
        exact = torch.cat(exact)
        assert out.dtype == self.dtype
        assert torch.equal(out.double(), exact) or relative_error(out, exact) < BOUNDS[self.dtype], layer

    def reject(self, requests, counts):
        """Forget the last tokens of requests."""
        for request, n in zip(requests, counts, strict=True):
            self._shrink(request, n)

    def batch(self, mode, requests, counts, padding=0, masks=None, drafted=0):
        """A batch in which requests have so many new tokens, for which they get slots, filled up by `padding`."""
        drafted = (drafted or counts[0]) if mode == "TARGET_VERIFY" else 0
        encoders = [slot for r in requests if not r.past for slot in r.slots[: r.encoder]]
        prefixes = [len(r) for r in requests]
        slots = [slot for r, n in zip(requests, counts, strict=True) for slot in self._grow(r, n)]
        slots += [0] * (padding * max(drafted, 1))
        lengths = [len(r) - drafted for r in requests] + [1] * padding
        fields = {
            "batch_size": len(lengths),
            "input_ids": self._tensor([0] * len(slots)),
            "req_pool_indices": self._tensor([r.row for r in requests] + [0] * padding),
            "seq_lens": self._tensor(lengths, self.face.lengths_dtype),
            "seq_lens_cpu": self._perhaps(torch.tensor(lengths)),
            "seq_lens_sum": self._perhaps(sum(lengths)),
            "out_cache_loc": self._tensor(slots),
        }
        if self.cross:
            each = [r.encoder for r in requests] + [0] * padding
            fields |= {"encoder_lens": self._tensor(each), "encoder_lens_cpu": self._perhaps(each)}
            fields["encoder_out_cache_loc"] = self._tensor(encoders)
        if mode in ("EXTEND", "MIXED"):
            fields |= {"extend_prefix_lens": self._tensor(prefixes), "extend_seq_lens": self._tensor(counts)}
            fields["extend_seq_lens_cpu"] = self._perhaps(counts)
            fields["extend_prefix_lens_cpu"] = self._perhaps(prefixes)
        if drafted:
            blocks = [torch.ones(drafted, n + drafted, dtype=torch.bool) for n in lengths]
            for block, own in zip(blocks, masks or [], strict=False):
                block[:, -drafted:] = own
            mask = torch.cat([x.flatten() for x in blocks]).to(self.device)
            fields["spec_info"] = VerifyInput(drafted, None if masks is None else mask)
        return self.face.batch(self, mode, **fields)

    def capture(self, mode, bs, drafted=1, masked=False):
        """Capture a graph of a batch size; on the CPU, what it would do."""
        batch = self.batch(mode, [], [], padding=bs, masks=[] if masked else None, drafted=drafted)
        self.face.capture(self.backend, batch)
        inputs = [[self._random(bs * drafted, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in self.layers]
        graph = self.graphs[mode, bs] = Graph(batch, inputs, masked)

        def run():
            graph.out = []
            for layer, (q, k, v) in zip(self.layers, inputs, strict=True):
                given = (None, None) if layer.is_cross_attention else (k, v)
                graph.out.append(self.backend.forward(q, *given, layer, batch, sinks=layer.sinks))

        graph.replay = captured(run) if self.device == "cuda" else run

    def replay(self, mode, bs, requests, drafted=1, masks=None):
        """A step in a graph of `bs` requests, of which some may fill the batch up."""
        counts, graph = [drafted] * len(requests), self.graphs[mode, bs]
        batch = self.batch(mode, requests, counts, bs - len(requests), masks)
        self.face.replay(self.backend, batch)
        graph.batch.out_cache_loc.copy_(batch.out_cache_loc)
        real = sum(counts)
        for tensors in graph.inputs:
            for x in tensors:
                x.copy_(torch.randn_like(x.float()))
        graph.replay()
        for layer, (q, k, v), out in zip(self.layers, graph.inputs, graph.out, strict=True):
            k, v = (None, None) if layer.is_cross_attention else (k[:real], v[:real])
            self.check(layer, requests, counts, out, q[:real], k, v, masks)
        if mode == "TARGET_VERIFY":
            self.reject(requests, counts)

    def _inputs(self, layer, requests, counts):
        """Random q, k and v of a layer; k and v of cross-attention are those of new encoders."""
        q, count = self._random(sum(counts), HEADS), sum(counts)
        if layer.is_cross_attention:
            count = sum(r.encoder for r in requests if layer.layer_id not in r.past)
        return (q, None, None) if count == 0 else (q, self._random(count, KV_HEADS), self._random(count, KV_HEADS))

    def _learn(self, layer, requests, counts, k, v):
        if k is None:
            return
        at = 0
        for request, n in zip(requests, counts, strict=True):
            if layer.is_cross_attention:
                n = 0 if layer.layer_id in request.past else request.encoder
            fresh = [by_heads(x)[at : at + n].cpu() for x in (k, v)]
            past = request.past.get(layer.layer_id, [x[:0] for x in fresh])
            request.past[layer.layer_id] = tuple(torch.cat(pair) for pair in zip(past, fresh, strict=True))
            at += n

    def _store(self, layer, batch, k, v):
        self.pool.set_kv_buffer(layer.layer_id, batch.out_cache_loc, by_heads(k), by_heads(v))

    def _grow(self, request, count):
        new = [self.free.pop() for _ in range(count)]
        for slot in new:
            self.owners[slot] += 1
        request.slots += new
        row = self._tensor(request.slots, torch.int32)
        self.req_to_token[request.row, : len(row)] = row
        return new

    def _shrink(self, request, count):
        left = len(request.slots) - count
        gone, request.slots = request.slots[left:], request.slots[:left]
        own = left - request.encoder
        for layer in self.layers:
            if layer.layer_id in request.past and not layer.is_cross_attention:
                request.past[layer.layer_id] = tuple(x[: max(own, 0)] for x in request.past[layer.layer_id])
        for slot in gone:
            self.owners[slot] -= 1
        gone = [slot for slot in gone if not self.owners[slot]]
        self.free += gone
        self.pool.forget(gone)

    def _perhaps(self, x):
        return x if self.rng.random() < 0.7 else None

    def _tensor(self, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _random(self, tokens, heads):
        return torch.randn(tokens, heads * DIM, device=self.device).to(self.dtype)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]


def models(device):
    """Layers, and the options of a backend for them."""
    sinks = torch.randn(HEADS, device=device)
    return {
        "default": ([Layer(0), Layer(1, logit_cap=4.0, sinks=sinks)], {}),
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
