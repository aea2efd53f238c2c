"""The shipped model through vLLM's FlashInfer backend, with plain objects in place of vLLM's runner.

A step is one forward pass, prompts first. The builder makes its metadata from lists of blocks, the state plans it, and
each layer's `FlashInferImpl` stores keys and values and computes attention. Steps without prompts are padded to the
next captured batch size and replay its graph; on the CPU, the pass over the graph's buffers runs without a graph.

    python examples/backends/vllm.py --layout HND --dtype bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, __file__.rpartition("/")[0])
from common import arguments, compare

from quire.backends import vllm
from quire.engine.runner import Runner
from quire.engine.scheduler import Chunk
from quire.steps import Layer

SIZES = (1, 2, 4, 8)  # batch sizes to capture


def is_prompt(chunk: Chunk) -> bool:
    return chunk.count > 1 or chunk.start == 0


class VllmRunner(Runner):
    """A runner of models whose layers all have the same heads, and no sinks."""

    supports_overlap = supports_all_logits = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        vllm.FLASHINFER_KV_CACHE_LAYOUT = self.args.layout  # the environment's VLLM_KV_CACHE_LAYOUT sets it too
        layers = [replace(layer, window_left=self.args.window) for layer in self.model.layers]
        self.impls = [self.new_impl(layer) for layer in layers]
        self.caches = [self.new_cache() for _ in layers]
        ones = {"_k_scale": torch.ones((), device=self.model.device), "_k_scale_float": 1.0}
        self.layer = SimpleNamespace(**ones, _v_scale=ones["_k_scale"], _v_scale_float=1.0)
        self.metadata: vllm.FlashInferMetadata
        self.engine_objects()

    def new_impl(self, layer: Layer) -> vllm.FlashInferImpl:
        heads = layer.heads
        window = layer.window_left + 1 if layer.window_left >= 0 else None
        sizes = (heads.num_qo_heads, heads.head_dim_qk, layer.sm_scale, heads.num_kv_heads)
        return vllm.FlashInferImpl(*sizes, None, window, "auto", logits_soft_cap=layer.logits_soft_cap)

    def new_cache(self) -> Tensor:
        """The cache of a layer, whose dimensions in memory have the order of the layout."""
        heads, backend = self.model.layers[0].heads, vllm.FlashInferBackend
        shape = backend.get_kv_cache_shape(self.num_pages, self.page_size, heads.num_kv_heads, heads.head_dim_qk)
        order = backend.get_kv_cache_stride_order()
        options: Any = {"dtype": self.model.dtype, "device": self.model.device}
        return torch.zeros([shape[i] for i in order], **options).permute(*order)

    def engine_objects(self) -> None:
        """Objects with the attributes that the backend reads of vLLM's model runner and input builder."""
        heads, most = self.model.layers[0].heads, max(SIZES)
        layers = {f"model.layers.{i}.attn": SimpleNamespace(impl=impl) for i, impl in enumerate(self.impls)}
        self.engine = SimpleNamespace(
            device=self.model.device,
            kv_cache_dtype="auto",
            block_size=self.page_size,
            model_config=SimpleNamespace(
                dtype=self.model.dtype,
                get_num_attention_heads=lambda parallel: heads.num_qo_heads,
                get_num_kv_heads=lambda parallel: heads.num_kv_heads,
                get_head_size=lambda: heads.head_dim_qk,
            ),
            parallel_config=None,
            cache_config=SimpleNamespace(num_gpu_blocks=self.num_pages),
            vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
            attn_backend=vllm.FlashInferBackend,
            graph_block_tables=np.zeros((most, self.num_pages), dtype=np.int32),
            graph_runners=[{}],
        )
        self.input_builder = SimpleNamespace(
            runner=self.engine,
            sliding_window=None,  # each layer has its own window
            block_size=self.page_size,
            chunked_prefill_enabled=True,
            inter_data_list=[],
        )
        self.builder = vllm.FlashInferMetadataBuilder(self.input_builder)
        self.state = vllm.FlashInferState(self.engine)

    def capture(self, *_: Any) -> None:
        """Capture graphs, the largest first. The checks of the runner have compiled their kernels."""
        with self.state.graph_capture(max(SIZES)):
            for size in reversed(SIZES):
                self.engine.graph_runners[0][size, False] = GraphRunner(self, size)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute one pass, prompts first; the logits are in the order of the chunks."""
        order = sorted(range(len(chunks)), key=lambda i: not is_prompt(chunks[i]))
        step = [chunks[i] for i in order]
        size = None if is_prompt(step[0]) else next((n for n in SIZES if n >= len(step)), None)
        padding = -1 if size is None else size - len(step)
        self.metadata = self.build(step, padding)
        tokens, rows = self.inputs(step)
        positions = self.positions(step)
        model_input = SimpleNamespace(
            attn_metadata=self.metadata,
            input_tokens=tokens if size is None else torch.nn.functional.pad(tokens, (0, padding)),
            input_positions=positions if size is None else torch.nn.functional.pad(positions, (0, padding)),
            inputs_embeds=None,
            virtual_engine=0,
        )
        self.state.begin_forward(model_input)
        if size is None:
            logits = self.model.logits(tokens, positions, rows, self)
        else:
            logits = self.engine.graph_runners[0][size, False].replay(model_input)[rows]
        sampled = [i for i in order if chunks[i].samples]
        return logits[[sampled.index(i) for i in sorted(sampled)]]

    def build(self, step: Sequence[Chunk], padding: int) -> vllm.FlashInferMetadata:
        """The metadata of a step; a chunk is a sequence group in vLLM."""
        self.input_builder.inter_data_list = [self.group(i, chunk) for i, chunk in enumerate(step)]
        lengths, counts = [c.start + c.count for c in step], [c.count for c in step]
        self.builder.prepare()
        more = max(padding, 0)
        return self.builder.build([*lengths, *[1] * more], counts, padding, sum(counts) + more)

    def group(self, seq_id: int, chunk: Chunk) -> Any:
        total = chunk.start + chunk.count
        return SimpleNamespace(
            seq_ids=[seq_id],
            is_prompt=is_prompt(chunk),
            input_tokens=[chunk.request.tokens[chunk.start : total]],
            orig_seq_lens=[total],
            context_lens=[chunk.start],
            query_lens=[chunk.count],
            block_tables={seq_id: chunk.request.pages.tolist()},
            computed_block_nums=None,
            prefix_cache_hit=False,  # chunks over a cached prefix need no special case
            multi_modal_placeholder_maps=None,
        )

    def positions(self, step: Sequence[Chunk]) -> Tensor:
        listed = [p for c in step for p in range(c.start, c.start + c.count)]
        return torch.tensor(listed, dtype=torch.int64).to(self.model.device, non_blocking=True)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        out = self.impls[index].forward(self.layer, q, k, v, self.caches[index], self.metadata)
        return out.view(len(q), layer.heads.num_qo_heads, -1)


class GraphRunner:
    """A pass of `size` decodes that reads buffers, captured on a GPU and computed without a graph on the CPU."""

    def __init__(self, runner: VllmRunner, size: int) -> None:
        self.runner, self.metadata = runner, runner.state.graph_capture_get_metadata_for_batch(size)
        self.tokens, self.positions = (
            torch.zeros(size, dtype=torch.int64, device=runner.model.device) for _ in range(2)
        )
        self.rows = torch.arange(size, device=runner.model.device)
        self.buffers = runner.state.get_graph_input_buffers(self.metadata)
        self.attn_state = runner.state.graph_clone(size)
        self.graph = None
        if runner.model.device.type == "cuda":
            self.compute()  # compiles kernels, which a capture must not do
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.compute()

    def compute(self) -> Tensor:
        self.runner.metadata = self.metadata
        return self.runner.model.logits(self.tokens, self.positions, self.rows, self.runner)

    def replay(self, model_input: Any) -> Tensor:
        """The logits of a step that has been planned into the buffers of this graph's wrapper."""
        self.tokens.copy_(model_input.input_tokens)
        self.positions.copy_(model_input.input_positions)
        self.attn_state.prepare_graph_input_buffers(self.buffers, model_input.attn_metadata)
        if self.graph is None:
            return self.compute()
        self.graph.replay()
        return self.logits


def main(argv: Sequence[str] | None = None) -> int:
    return compare(VllmRunner, arguments(__doc__, argv))


if __name__ == "__main__":
    sys.exit(main())
