"""Stand-ins of the objects of vLLM's engine: sequences with all their keys and values, of which steps are made, and the
oracle's opinion of every output.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from quire.backends.vllm import FlashInferBackend, FlashInferImpl
from quire.bench.batches import relative_error
from quire.definition import attention_spec, oracle
from quire.steps import quantize

SLOPES = (0.3, 0.1, 0.02, 0.7)
MIXED = [
    {},
    {"window_left": 9, "sm_scale": 0.3},
    {"logits_soft_cap": 4.0, "sm_scale": 0.5},
    {"pos_encoding": "ALIBI"},
    {"pos_encoding": "ALIBI", "slopes": SLOPES},
]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 3e-3}


class Sequence:
    """Pages, and the keys and values of all tokens so far, by layer, as the cache holds them."""

    def __init__(self, layers):
        self.pages, self.length = [], 0
        self.k, self.v = [[] for _ in layers], [[] for _ in layers]


class Engine:
    """Layers given as keyword arguments of an AttentionSpec, the runner that knows them, and their caches."""

    def __init__(self, device, layers, *, page_size, dtype=torch.float32, kv_cache_dtype="auto", blocks=64, **heads):
        heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16, **heads}
        self.device, self.dtype, self.kv_cache_dtype = torch.device(device), dtype, kv_cache_dtype
        self.specs = [attention_spec(**{**heads, "q_dtype": dtype, **layer}) for layer in layers]
        self.impls = [make_impl(spec, kv_cache_dtype) for spec in self.specs]
        self.scales = {"_k_scale_float": 0.5, "_v_scale_float": 0.25} if "fp8" in kv_cache_dtype else {}
        self.scales = self.scales or {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
        tensors = {name.removesuffix("_float"): torch.tensor(x, device=device) for name, x in self.scales.items()}
        self.layer = SimpleNamespace(**self.scales, **tensors)
        spec = self.specs[0]
        model = SimpleNamespace(
            dtype=dtype,
            get_num_attention_heads=lambda parallel: spec.num_qo_heads,
            get_num_kv_heads=lambda parallel: spec.num_kv_heads,
            get_head_size=lambda: spec.head_dim_qk,
        )
        named = {f"layer.{i}": SimpleNamespace(impl=impl) for i, impl in enumerate(self.impls)}
        config = SimpleNamespace(static_forward_context={**named, "mlp": object()})
        self.runner = SimpleNamespace(
            device=self.device,
            kv_cache_dtype=kv_cache_dtype,
            block_size=page_size,
            model_config=model,
            parallel_config=None,
            cache_config=SimpleNamespace(num_gpu_blocks=blocks),
            vllm_config=SimpleNamespace(compilation_config=config),
            attn_backend=FlashInferBackend,
            graph_block_tables=np.zeros((8, 64), dtype=np.int32),
            graph_runners=[{}],
        )
        self.input = SimpleNamespace(
            runner=self.runner,
            sliding_window=None,
            block_size=page_size,
            chunked_prefill_enabled=True,
            inter_data_list=[],
        )
        self.builder = FlashInferBackend.make_metadata_builder(self.input)
        self.state = FlashInferBackend.get_state_cls()(self.runner)
        self.free = list(torch.randperm(blocks).tolist())
        self.caches = [self.new_cache() for _ in layers]

    @property
    def page_size(self):
        return self.runner.block_size

    def new_cache(self):
        """NaN all over, in memory as the layout wants it."""
        spec, blocks = self.specs[0], self.runner.cache_config.num_gpu_blocks
        shape = FlashInferBackend.get_kv_cache_shape(blocks, self.page_size, spec.num_kv_heads, spec.head_dim_qk)
        order = FlashInferBackend.get_kv_cache_stride_order()
        stored = torch.uint8 if "fp8" in self.kv_cache_dtype else self.dtype
        fill = 0x7F if stored == torch.uint8 else torch.nan  # a NaN in e4m3 and in e5m2
        return torch.full([shape[i] for i in order], fill, dtype=stored, device=self.device).permute(*order)

    def new_tokens(self, count):
        """Random query, key and value of each layer, [count, heads * head_size]."""
        spec = self.specs[0]
        sizes = [n * spec.head_dim_qk for n in (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)]
        return [[torch.randn(count, n, device=self.device).to(self.dtype) for n in sizes] for _ in self.impls]

    def reserve(self, sequence, length):
        while len(sequence.pages) * self.page_size < length:
            sequence.pages.append(self.free.pop())

    def share(self, other):
        """A sequence that has the full pages of another as its prefix."""
        new = Sequence(self.impls)
        count = (other.length - 1) // self.page_size
        new.pages, new.length = other.pages[:count], count * self.page_size
        for mine, theirs in ((new.k, other.k), (new.v, other.v)):
            for own, all_ in zip(mine, theirs, strict=True):
                own.append(torch.cat(all_)[: new.length])
        return new

    def drop(self, sequence, others):
        """Free the pages that nobody else has, which are NaN from now on."""
        kept = {page for other in others for page in other.pages}
        gone = list(set(sequence.pages) - kept)
        self.free += gone
        for cache, fresh in zip(self.caches, (self.new_cache() for _ in self.caches), strict=True):
            cache[gone] = fresh[gone]

    def group(self, sequence, count, is_prompt, **changes):
        """What vLLM says of `count` new tokens of a sequence."""
        total = sequence.length + count
        self.reserve(sequence, total)
        given = {
            "seq_ids": [id(sequence)],
            "is_prompt": is_prompt,
            "input_tokens": [[0] * count],
            "orig_seq_lens": [total],
            "seq_lens": [total],
            "context_lens": [sequence.length],
            "query_lens": [count],
            "block_tables": {id(sequence): sequence.pages},
            "computed_block_nums": sequence.pages[: sequence.length // self.page_size],
            "prefix_cache_hit": is_prompt and sequence.length > 0,
            "multi_modal_placeholder_maps": None,
            "curr_sliding_window_blocks": [0],
        }
        return SimpleNamespace(**{**given, **changes})

    def build(self, step, pad_size=-1, **changes):
        """Metadata of [(sequence, count, is_prompt), ...]."""
        self.input.inter_data_list = [self.group(*part, **changes) for part in step]
        counts = [count for _, count, _ in step]
        lengths = [sequence.length + count for sequence, count, _ in step] + [1] * max(pad_size, 0)
        self.builder.prepare()
        return self.builder.build(lengths, counts, pad_size, sum(counts) + max(pad_size, 0))

    def plan(self, metadata, tokens=0):
        """What vLLM calls a model input, planned."""
        zeros = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        made = SimpleNamespace(
            attn_metadata=metadata,
            input_tokens=zeros,
            input_positions=zeros.clone(),
            inputs_embeds=None,
            virtual_engine=0,
        )
        self.state.begin_forward(made)
        return made

    def forward(self, new, metadata, **options):
        """Every layer's output."""
        return [
            impl.forward(self.layer, *qkv, cache, metadata, **options)
            for impl, qkv, cache in zip(self.impls, new, self.caches, strict=True)
        ]

    def grow(self, step, new):
        """Remember new tokens: as the cache holds them, where that is fp8."""
        begin = 0
        for sequence, count, _ in step:
            for layer, (_, key, value) in enumerate(new):
                for kept, x, name in ((sequence.k, key, "_k_scale_float"), (sequence.v, value, "_v_scale_float")):
                    rows = x[begin : begin + count].view(count, -1, self.specs[0].head_dim_qk)
                    if "fp8" in self.kv_cache_dtype:
                        stored = FlashInferBackend.get_fp8_dtype_for_flashinfer(self.kv_cache_dtype)
                        rows = quantize(rows, stored, self.scales[name]).float() * self.scales[name]
                    kept[layer].append(rows)
            sequence.length += count
            begin += count

    def check(self, step, new, outputs):
        """Each output is the oracle's, whatever stands in rows of padding."""
        for layer, (spec, out) in enumerate(zip(self.specs, outputs, strict=True)):
            begin, exact = 0, []
            for sequence, count, _ in step:
                q = new[layer][0][begin : begin + count].view(count, -1, spec.head_dim_qk)
                k, v = torch.cat(sequence.k[layer]), torch.cat(sequence.v[layer])
                exact.append(oracle.attend(q.cpu(), k.cpu(), v.cpu(), spec)[0])
                begin += count
            assert relative_error(out[:begin].cpu(), torch.cat(exact).flatten(1)) < BOUND[self.dtype], (layer, step)

    def run(self, step, **options):
        """Build, plan, compute and check a step."""
        metadata = self.build(step)
        self.plan(metadata, metadata.num_prefill_tokens + metadata.num_decode_tokens)
        new = self.new_tokens(sum(count for _, count, _ in step))
        outputs = self.forward(new, metadata, **options)
        self.grow(step, new)
        self.check(step, new, outputs)
        return metadata


class Graphs:
    """Captured forward passes of decodes, by batch size; without a GPU they are computed anew instead of replayed."""

    def __init__(self, engine, sizes):
        self.engine, self.passes = engine, {}
        with engine.state.graph_capture(max(sizes)):
            for size in sorted(sizes, reverse=True):
                metadata = engine.state.graph_capture_get_metadata_for_batch(size)
                new, graph = engine.new_tokens(size), None
                outputs = engine.forward(new, metadata)  # compiles what the capture needs
                if engine.device.type == "cuda":
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        outputs = engine.forward(new, metadata)
                buffers = engine.state.get_graph_input_buffers(metadata)
                engine.runner.graph_runners[0][size, False] = SimpleNamespace(attn_state=engine.state.graph_clone(size))
                self.passes[size] = (metadata, new, graph, outputs, buffers)

    def replay(self, metadata, new):
        """Outputs of a planned step."""
        captured, held, graph, outputs, buffers = self.passes[len(metadata.slot_mapping)]
        self.engine.state.prepare_graph_input_buffers(buffers, metadata)
        for mine, given in zip(held, new, strict=True):
            for buffer, x in zip(mine, given, strict=True):
                buffer[: len(x)] = x
        if graph is None:
            return self.engine.forward(held, captured)
        graph.replay()
        return outputs

    def run(self, step):
        """A step of decodes, padded to the next size."""
        size = min(n for n in self.passes if n >= len(step))
        metadata = self.engine.build(step, size - len(step))
        self.engine.plan(metadata, size)
        new = self.engine.new_tokens(len(step))
        outputs = self.replay(metadata, new)
        self.engine.grow(step, new)
        self.engine.check(step, new, outputs)


def make_impl(spec, kv_cache_dtype="auto", **options):
    """The layer of a spec."""
    return FlashInferImpl(
        spec.num_qo_heads,
        spec.head_dim_qk,
        spec.sm_scale,
        spec.num_kv_heads,
        spec.alibi_slopes().tolist() if spec.pos_encoding == "ALIBI" else None,
        spec.mask.window_left + 1 if spec.mask.window_left >= 0 else None,
        kv_cache_dtype,
        logits_soft_cap=spec.logits_soft_cap or None,
        **options,
    )


def engine_of(device, rng, layers=None, **options):
    heads = {"num_kv_heads": 2, "num_qo_heads": 4, "head_dim_qk": 16}
    return Engine(device, MIXED if layers is None else layers, **{"page_size": 4, **heads, **options})


def prompt(engine, length):
    return Sequence(engine.impls), length, True


def started(engine, *lengths):
    """Sequences of these lengths, computed."""
    step = [prompt(engine, n) for n in lengths]
    engine.run(step)
    return [sequence for sequence, _, _ in step]
