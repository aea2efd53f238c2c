"""A tiny engine over SGLang's pools. It knows every request's keys and values, and so what each output must be.

Slots that no request owns are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from helpers.sglang_package import SGLANG, SGLangAttentionBackend
from quire.bench.batches import relative_error
from quire.definition import attention_spec, oracle

HEADS, KV_HEADS, DIM = 4, 2, 16
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 6e-3}


def layer(layer_id: int, *, sinks: bool = False, scales: tuple[float, float] | None = None, **options: Any) -> Any:
    """A layer of SGLang, with sinks and the scales of an fp8 pool."""
    options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "scaling": 0.3, **options}
    made = SGLANG.RadixAttention(layer_id=layer_id, **options)
    if scales is not None:
        made.k_scale_float, made.v_scale_float = scales
        made.k_scale, made.v_scale = (torch.tensor(x) for x in scales)
    made.sinks_of_test = torch.randn(options["num_heads"]) if sinks else None
    return made


@dataclass(eq=False)
class Request:
    """A request.

    Attributes:
        row: of req_to_token.
        slots: of its tokens.
        past: its keys and values by layer, as they are stored.
    """

    row: int
    slots: list[int] = field(default_factory=list)
    past: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Engine:
    """Requests and steps.

    Args:
        layers: from `layer`.
        dtype, kv_dtype: of queries and of the pool.
        windows: whether layers with windows have slots of their own.
        latent: the rank of latent keys, in an MLA pool; 0 for another pool.
        make: makes the backend of a model runner.
        options: attributes of SGLang's server_args.
    """

    def __init__(
        self, rng, layers, *, device="cpu", dtype=torch.float32, kv_dtype=None, page_size=1, windows=False, latent=0,
        rows=5, width=96, make=SGLangAttentionBackend, **options,
    ):  # fmt: skip
        self.rng, self.layers = rng, layers
        self.device, self.dtype = device, dtype
        self.page_size = page_size
        self.kv_dtype = kv_dtype or dtype
        self.rows, self.width = rows, width
        pages = rows * -(-width // page_size)
        self.pool = self._make_pool(pages * page_size, windows, latent)
        self.free = list(range(1, pages + 1))  # page 0 takes what fills up batches
        rng.shuffle(self.free)
        self.requests: list[Request] = []
        self.req_to_token = torch.zeros(rows, width, dtype=torch.int32, device=device)
        # A graph cannot copy them from the host.
        self.sinks = {
            one.layer_id: {"sinks": one.sinks_of_test.to(device)} for one in layers if one.sinks_of_test is not None
        }
        self.backend = make(self.runner(**options))
        self.graphs: dict[Any, Any] = {}

    def runner(self, **options: Any) -> Any:
        """What the backend reads of SGLang's model runner."""
        config = SimpleNamespace(architectures=[options.pop("architecture", "LlamaForCausalLM")])
        usual = {"dcp_size": 1, "attn_cp_size": 1, "enable_prefill_cp": False}
        usual |= {"enable_mis": False, "enable_deterministic_inference": False, "speculative_algorithm": "NGRAM"}
        args = SimpleNamespace(**usual | options)
        model = {"is_encoder_decoder": False, "context_len": self.width, "num_attention_heads": HEADS, "head_dim": DIM}
        return SimpleNamespace(
            sliding_window_size=None,
            device=self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_dtype,
            page_size=self.page_size,
            server_args=args,
            model_config=SimpleNamespace(**model, hf_config=config, get_num_kv_heads=lambda size: KV_HEADS),
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token, size=self.rows),
            token_to_kv_pool=self.pool,
            kv_index_translator=SimpleNamespace(is_translating=False),
        )

    def step(self, mode, requests, counts, *, stored=False, masks=None, known=True):
        """New tokens of some requests through all layers, each compared with the definition.

        Args:
            stored: whether the keys are in the pool before the call, which is not given them.
            masks: bool [drafted, drafted] of each request, for TARGET_VERIFY.
            known: whether lengths are on the host.
        """
        batch = self.batch(mode, requests, counts, masks=masks, known=known)
        self.backend.init_forward_metadata(batch)
        alone = mode in ("EXTEND", "MIXED") and known and not stored and not any(batch.extend_prefix_lens_cpu)
        for one in self.layers:
            q, k, v = self.inputs(one, sum(counts))
            if stored:
                self._store(one, batch, k, v)
            given = (None, None) if stored else (k.clone(), v.clone())
            out = self.backend.forward(
                q, *given, one, batch, save_kv_cache=not stored, **self.sinks.get(one.layer_id, {})
            )
            self.check(one, requests, counts, out, q, k, v, masks, alone)
        if mode == "TARGET_VERIFY":
            for request, n in zip(requests, counts, strict=True):
                self.shrink(request, n)

    def batch(self, mode, requests, counts, *, padding=0, masks=None, known=True, drafted=0):
        """A batch in which requests get so many new tokens, filled up by `padding` requests."""
        drafted = (drafted or counts[0]) if mode == "TARGET_VERIFY" else 0
        prefixes = [len(r.slots) for r in requests]
        slots = [slot for r, n in zip(requests, counts, strict=True) for slot in self._grow(r, n)]
        slots += [0] * (padding * max(drafted, 1))
        lengths = [len(r.slots) - drafted for r in requests] + [1] * padding
        fields: dict[str, Any] = {
            "batch_size": len(lengths),
            "input_ids": self._ids([0] * len(slots)),
            "req_pool_indices": self._ids([r.row for r in requests] + [0] * padding),
            "seq_lens": self._ids(lengths),
            "seq_lens_sum": sum(lengths),
            "seq_lens_cpu": torch.tensor(lengths) if known else None,
            "out_cache_loc": self._ids(slots),
        }
        if mode in ("EXTEND", "MIXED"):
            fields |= {"extend_prefix_lens": self._ids(prefixes), "extend_seq_lens": self._ids(counts)}
            if known:
                fields |= {"extend_prefix_lens_cpu": prefixes, "extend_seq_lens_cpu": counts}
        if drafted:
            fields["spec_info"] = SimpleNamespace(
                draft_token_num=drafted, custom_mask=self._mask(lengths, masks, drafted)
            )
        return SGLANG.ForwardBatch(forward_mode=SGLANG.ForwardMode[mode], **fields)

    def capture(self, mode, size, drafted=1, masked=False):
        """Capture a graph of `size` requests; on the CPU, keep what it would do."""
        batch = self.batch(mode, [], [], padding=size, masks=[] if masked else None, drafted=drafted)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        inputs = [self.inputs(one, size * drafted) for one in self.layers]
        graph = SimpleNamespace(batch=batch, inputs=inputs, outs=[])

        def run():
            self.backend.init_forward_metadata_in_graph(batch)
            outs = [
                self.backend.forward(*given, one, batch, **self.sinks.get(one.layer_id, {}))
                for one, given in zip(self.layers, inputs, strict=True)
            ]
            graph.outs = outs

        graph.replay = run
        if self.device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
            graph.replay = captured.replay
        self.graphs[mode, size] = graph

    def replay(self, mode, size, requests, drafted=1, masks=None):
        """A step in a graph of `size` requests, of which some may fill the batch up."""
        graph, counts = self.graphs[mode, size], [drafted] * len(requests)
        fresh = self.batch(mode, requests, counts, padding=size - len(requests), masks=masks, known=False)
        self.backend.init_forward_metadata_out_graph(fresh)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(graph.batch, name).copy_(getattr(fresh, name))
        for one, given in zip(self.layers, graph.inputs, strict=True):
            for x, new in zip(given, self.inputs(one, size * drafted), strict=True):
                x.copy_(new)
        graph.replay()
        real = sum(counts)
        for one, (q, k, v), out in zip(self.layers, graph.inputs, graph.outs, strict=True):
            self.check(one, requests, counts, out, q[:real], k[:real], v[:real], masks)
        if mode == "TARGET_VERIFY":
            for request, n in zip(requests, counts, strict=True):
                self.shrink(request, n)

    def check(self, one, requests, counts, out, q, k, v, masks=None, alone=False):
        """Compare a layer's output with the definition, and remember its keys.

        Args:
            alone: whether the keys are read as they are given, and not as they are stored.
        """
        q = q.cpu().view(len(q), one.tp_q_head_num, -1)
        out = out[: len(q)].cpu().view(len(q), one.tp_q_head_num, -1)
        exact, at = [], 0
        for b, (request, n) in enumerate(zip(requests, counts, strict=True)):
            new = [x[at : at + n].cpu().view(n, one.tp_k_head_num, -1) for x in (k, v)]
            kept = [self._as_stored(x, scale) for x, scale in zip(new, self._scales(one), strict=True)]
            past = request.past.get(one.layer_id, tuple(x[:0] for x in kept))
            request.past[one.layer_id] = tuple(torch.cat(pair) for pair in zip(past, kept, strict=True))
            keys, values = new if alone else request.past[one.layer_id]
            options: dict[str, Any] = {key: x.cpu() for key, x in self.sinks.get(one.layer_id, {}).items()}
            if masks is not None:
                options["mask"] = torch.ones(n, len(keys), dtype=torch.bool)
                options["mask"][:, len(keys) - n :] = masks[b]
            exact.append(oracle.attend(q[at : at + n], keys, values, self._spec(one, keys.dtype), **options)[0])
            at += n
        bound = BOUNDS[self.dtype]
        assert out.dtype == self.dtype
        assert relative_error(out, torch.cat(exact)) < bound, (one.layer_id, counts)

    def arrive(self):
        """A request, which may begin with the first pages of another one."""
        taken = {request.row for request in self.requests}
        request = Request(self.rng.choice([i for i in range(self.rows) if i not in taken]))
        self.requests.append(request)
        return request

    def leave(self, request):
        """Forget a request."""
        self.shrink(request, len(request.slots))
        self.requests.remove(request)

    def shrink(self, request, count):
        """Forget the last tokens of a request; pages that are then unused are NaN again."""
        left = len(request.slots) - count
        request.slots, gone = request.slots[:left], request.slots[left:]
        request.past = {i: (k[:left], v[:left]) for i, (k, v) in request.past.items()}
        self._forget(gone)
        kept = {slot // self.page_size for slot in request.slots}
        self.free += sorted({slot // self.page_size for slot in gone} - kept)

    def inputs(self, one, tokens):
        """Random q, k and v of a layer."""
        dims = (one.tp_q_head_num * one.qk_head_dim, one.tp_k_head_num * one.qk_head_dim)
        q, k, v = (
            torch.randn(tokens, n, device=self.device).to(self.dtype)
            for n in (*dims, one.tp_k_head_num * one.v_head_dim)
        )
        if one.qk_head_dim != one.v_head_dim and one.tp_k_head_num == 1:
            v = k[:, : one.v_head_dim].clone()  # latent keys contain the values
        return q, k, v

    def _make_pool(self, size, windows, latent):
        of = {"size": size, "page_size": self.page_size, "dtype": self.kv_dtype, "device": self.device}
        if windows:
            ids = {True: [], False: []}
            for one in self.layers:
                ids[one.sliding_window_size >= 0].append(one.layer_id)
            pool = SGLANG.SWAKVPool(
                **of, size_swa=size, head_num=KV_HEADS, head_dim=DIM, swa_attention_layer_ids=ids[True],
                full_attention_layer_ids=ids[False],
            )  # fmt: skip
            pages = torch.randperm(size // self.page_size) + 1
            slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
            mapping = torch.cat([torch.arange(self.page_size), slots.flatten()])
            pool.register_mapping(mapping.to(self.device))
            self.buffers = [x for part in (pool.full_kv_pool, pool.swa_kv_pool) for x in part.k_buffer + part.v_buffer]
        elif latent:
            rope = self.layers[0].qk_head_dim - latent
            of |= {"kv_lora_rank": latent, "qk_rope_head_dim": rope, "layer_num": len(self.layers)}
            pool = SGLANG.MLATokenToKVPool(**of, enable_memory_saver=False)
            # Else the pool asks how many ranks share a context, which only a server's processes know.
            pool.write_loc_is_dcp_resolved = True
            self.buffers = pool.kv_buffer
        else:
            of |= {"head_num": KV_HEADS, "head_dim": DIM, "layer_num": len(self.layers)}
            pool = SGLANG.MHATokenToKVPool(**of, enable_memory_saver=False)
            self.buffers = pool.k_buffer + pool.v_buffer
        for x in self.buffers:
            x.copy_(torch.full(x.shape, torch.nan).to(self.kv_dtype).view(x.dtype))
        return pool

    def _forget(self, slots):
        """Make slots NaN; those of windows are found by the pool's own map."""
        at = self._ids(slots)
        mapped = at
        if hasattr(self.pool, "full_to_swa_index_mapping"):
            mapped = self.pool.full_to_swa_index_mapping[at]
        own = {id(x) for x in getattr(getattr(self.pool, "swa_kv_pool", None), "k_buffer", [])}
        own |= {id(x) for x in getattr(getattr(self.pool, "swa_kv_pool", None), "v_buffer", [])}
        for x in self.buffers:
            nan = torch.full((1,), torch.nan).to(self.kv_dtype).view(x.dtype).to(self.device)
            x[mapped if id(x) in own else at] = nan

    def _grow(self, request, count):
        """Slots of new tokens: those left in the last page, then those of other pages."""
        new = []
        for _ in range(count):
            slots = request.slots + new
            if len(slots) % self.page_size:
                new.append(slots[-1] + 1)
            else:
                new.append(self.free.pop() * self.page_size)
        request.slots += new
        self.req_to_token[request.row, : len(request.slots)] = self._ids(request.slots).int()
        return new

    def _store(self, one, batch, k, v):
        stored = [
            (x.float() / scale).to(self.kv_dtype).view(len(x), one.tp_k_head_num, -1)
            for x, scale in zip((k, v), self._scales(one), strict=True)
        ]
        loc = SGLANG.KVWriteLoc(batch.out_cache_loc)
        if hasattr(self.pool, "translate_loc_from_full_to_swa"):
            loc.swa_loc = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        self.pool.set_kv_buffer(one, loc, *stored)

    def _as_stored(self, x, scale):
        if self.kv_dtype.itemsize > 1:
            return x
        largest = torch.finfo(self.kv_dtype).max
        return (x.float() / scale).clamp(-largest, largest).to(self.kv_dtype).float() * scale

    def _scales(self, one):
        if self.kv_dtype.itemsize > 1 or one.k_scale_float is None:
            return 1.0, 1.0
        return one.k_scale_float, one.v_scale_float

    def _spec(self, one, kv_dtype):
        return attention_spec(
            num_qo_heads=one.tp_q_head_num,
            num_kv_heads=one.tp_k_head_num,
            head_dim_qk=one.qk_head_dim,
            head_dim_vo=one.v_head_dim,
            q_dtype=self.dtype,
            sm_scale=one.scaling,
            logits_soft_cap=one.logit_cap,
            window_left=one.sliding_window_size,
            causal=getattr(one.attn_type, "value", one.attn_type) != "encoder_only",
        )

    def _mask(self, lengths, masks, drafted):
        """The masks of requests over all their keys, one after another; those of padding are left out."""
        if masks is None:
            return None
        blocks = [torch.ones(drafted, n + drafted, dtype=torch.bool) for n in lengths[: len(masks) or None]]
        for block, own in zip(blocks, masks, strict=False):
            block[:, -drafted:] = own
        return torch.cat([x.flatten() for x in blocks]).to(self.device)

    def _ids(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def tree(drafted, rng):
    """Bool [drafted, drafted]: each drafted token follows one before it, or none."""
    mask = torch.eye(drafted, dtype=torch.bool)
    for i in range(1, drafted):
        parent = rng.randrange(-1, i)
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def schedule(engine, rng, steps):
    """Random arrivals, chunks, decodes, drafts and departures, eager and in the graphs of `with_graphs`."""
    for _ in range(steps):
        if len(engine.requests) < engine.rows and (not engine.requests or rng.random() < 0.5):
            engine.arrive()
        for request in [r for r in engine.requests if len(r.slots) > engine.width - 24]:
            engine.leave(request)
        if engine.requests and rng.random() < 0.2:
            engine.leave(rng.choice(engine.requests))
        chosen = rng.sample(engine.requests, rng.randint(0, len(engine.requests)))
        if chosen:
            _random_step(engine, rng, chosen)


def _random_step(engine, rng, chosen):
    begun = all(r.slots for r in chosen)
    kind = rng.choice(("EXTEND", "MIXED", "DECODE", "TARGET_VERIFY", "graph", "verify in a graph"))
    known, stored, drafted = rng.random() < 0.6, rng.random() < 0.2, rng.randint(1, 4)
    if kind in ("EXTEND", "MIXED") or not begun:
        counts = [rng.choice((1, rng.randint(1, 20))) for _ in chosen]
        engine.step("MIXED" if kind == "MIXED" else "EXTEND", chosen, counts, stored=stored, known=known)
    elif kind == "DECODE":
        engine.step("DECODE", chosen, [1] * len(chosen), stored=stored, known=known)
    elif kind == "TARGET_VERIFY":
        masks = rng.choice((None, [tree(drafted, rng) for _ in chosen]))
        engine.step("TARGET_VERIFY", chosen, [drafted] * len(chosen), masks=masks, known=known)
    elif len(chosen) > 4:
        return
    elif kind == "graph":
        engine.replay("DECODE", 4 if len(chosen) > 2 else 2, chosen)
    else:
        masks = [tree(3, rng) for _ in chosen] if engine.masked else None
        engine.replay("TARGET_VERIFY", 4, chosen, 3, masks)


def with_graphs(engine, masked):
    """The engine, with graphs for decode of 2 and 4 requests, and for drafts of 3 tokens of 4 requests."""
    engine.masked = masked
    engine.backend.init_cuda_graph_state(4, 12)
    engine.capture("TARGET_VERIFY", 4, 3, masked)
    for size in (4, 2):
        engine.capture("DECODE", size)
    return engine
