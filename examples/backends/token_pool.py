"""Code that the drivers of pymllm and SGLang share: the engine's pages as a pool with one slot per token, and steps.

In both engines, a request has a row of `req_to_token` with the slots of its tokens' keys and values. Page p of Quire's
engine has the slots from p * page_size to (p + 1) * page_size - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import DecodeGraph
from torch import Tensor

from quire.engine.runner import Runner
from quire.engine.scheduler import Chunk
from quire.steps import Layer, StepTables, store


class KVPool:
    """The keys and values of all layers, [slots, num_kv_heads, head_dim], as views of the runner's paged caches."""

    def __init__(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.buffers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in caches]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.buffers[layer_id]

    def set_kv_buffer(self, layer_id: int, indices: Tensor, k: Tensor, v: Tensor) -> None:
        k_cache, v_cache = self.buffers[layer_id]
        store((k_cache.unsqueeze(1), v_cache.unsqueeze(1)), k, v, indices)


@dataclass
class RadixAttention:
    """The parameters of a layer, with the names that both engines use."""

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    tp_v_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float
    logit_cap: float
    sliding_window_size: int
    is_cross_attention: bool = False
    attn_type: str = "decoder"


class TokenRunner(Runner):
    """A runner of models whose layers all have the same heads. Each driver says how its backend is made and called.

    The backend's requests are rows 0, 1, ... of req_to_token, anew in each step. On a GPU, steps of nothing but decodes
    replay a graph for the next power of two of requests.
    """

    supports_overlap = supports_all_logits = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pool = KVPool(self.caches)
        self.max_reqs = 1 << (self.num_pages - 1).bit_length()  # each request has at least one page
        self.width = min(self.model.context, self.num_pages * self.page_size)
        self.req_to_token = torch.zeros(self.max_reqs, self.width, dtype=torch.int32, device=self.model.device)
        self.backend = self.make_backend()
        self.graphs: dict[int, DecodeGraph] = {}
        if self.model.device.type == "cuda":
            self.backend.init_cuda_graph_state(self.max_reqs, self.max_reqs)

    def make_backend(self) -> Any:
        """The backend, over the pool and req_to_token."""
        raise NotImplementedError

    def make_batch(self, mode: str, **fields: Any) -> Any:
        """A batch of the engine's class."""
        raise NotImplementedError

    def prepare_graph(self, batch: Any, in_capture: bool) -> None:
        """Plan for the capture or the replay of a graph."""
        raise NotImplementedError

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        if self.model.device.type == "cuda" and all(c.count == 1 for c in chunks):
            return self.replay(chunks)
        return super().run(chunks)

    def begin(self, chunks: Sequence[Chunk], tables: StepTables) -> None:
        """Plan an eager step of chunks of prompts, of decodes, or of both."""
        counts, prefixes = [c.count for c in chunks], [c.start for c in chunks]
        if max(counts) == 1:
            mode, extend = "DECODE", {}
        else:
            mode = "MIXED" if min(counts) == 1 else "EXTEND"
            extend = {"extend_num_tokens": sum(counts), "extend_seq_lens_cpu": counts}
            extend |= {"extend_prefix_lens_cpu": prefixes, "extend_seq_lens": tables.qo_indptr.diff()}
            extend["extend_prefix_lens"] = tables.lengths - extend["extend_seq_lens"]
        self.batch = self.make_batch(mode, **self.fields(chunks), out_cache_loc=tables.slots, **extend)
        self.backend.init_forward_metadata(self.batch)

    def replay(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute decodes by a graph, which is captured when it is first needed."""
        size = 1 << (len(chunks) - 1).bit_length()
        new = size not in self.graphs
        if new:
            self.graphs[size] = DecodeGraph(self, size)
        graph = self.graphs[size]
        self.batch = self.make_batch("DECODE", **self.fields(chunks, size), out_cache_loc=graph.slots)
        self.prepare_graph(self.batch, in_capture=new)
        tokens, rows = self.inputs(chunks)
        return graph.run(tokens, self.tables(chunks))[rows]

    def fields(self, chunks: Sequence[Chunk], size: int = 0) -> dict[str, Any]:
        """The fields of a batch in all modes; requests of padding up to `size` have one token, that of row 0."""
        device, padding = self.model.device, max(size - len(chunks), 0)
        lengths = [c.start + c.count for c in chunks]
        offsets = np.arange(self.page_size, dtype=np.int32)
        rows = np.zeros((len(chunks), max(lengths)), dtype=np.int32)
        for row, chunk, length in zip(rows, chunks, lengths, strict=True):
            pages = np.frombuffer(chunk.request.pages, dtype=np.int32)
            row[:length] = (pages[:, None] * self.page_size + offsets).ravel()[:length]
        self.req_to_token[: len(rows), : rows.shape[1]] = torch.from_numpy(rows).to(device)

        lengths += [self.backend.get_cuda_graph_seq_len_fill_value()] * padding
        seq_lens, indices = torch.tensor(lengths, dtype=torch.int32), [*range(len(chunks)), *[0] * padding]
        return {
            "batch_size": len(lengths),
            "input_ids": torch.zeros(size or sum(c.count for c in chunks), dtype=torch.int64, device=device),
            "req_pool_indices": torch.tensor(indices, dtype=torch.int64, device=device),
            "seq_lens": seq_lens.to(device),
            "seq_lens_cpu": seq_lens,
            "seq_lens_sum": sum(lengths),
        }

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        h = layer.heads
        heads = (h.num_qo_heads, h.num_kv_heads, h.num_kv_heads, h.head_dim_qk, h.head_dim_vo)
        radix = RadixAttention(index, *heads, layer.sm_scale, layer.logits_soft_cap, layer.window_left)
        out = self.backend.forward(q.contiguous(), k, v, radix, self.batch, sinks=sinks)
        return out.view(len(q), h.num_qo_heads, h.head_dim_vo)
