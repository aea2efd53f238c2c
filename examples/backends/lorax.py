"""The shipped model through the LoRAX backend, whose states are planned per batch and set within a context.

A step with both decodes and prompts becomes two forward passes, as in LoRAX. Each enters the context of its phase, and
the layers read the state from the context variable. Prompts without a cached prefix read the new keys as ragged rows,
and chunks after a prefix read pages. On a GPU, decodes replay a graph that is captured once per batch size.

    python examples/backends/lorax.py --page-size 1 --dtype bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, __file__.rpartition("/")[0])
from common import DecodeGraph, arguments, compare

from quire.backends import lorax
from quire.engine.runner import Runner
from quire.engine.scheduler import Chunk
from quire.steps import Layer, StepTables, store


class LoraxRunner(Runner):
    """A runner of models whose layers all have the same heads."""

    supports_overlap = supports_all_logits = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        heads, device = self.model.layers[0].heads, self.model.device
        self.heads = {"num_heads": heads.num_qo_heads, "num_kv_heads": heads.num_kv_heads}
        self.head_size = heads.head_dim_qk
        self.ragged = lorax.create_prefill_state(device=device)
        self.paged = lorax.create_prefill_with_paged_kv_state(device=device)
        self.decode = lorax.create_decode_state(device=device, **self.heads)
        self.graphs: dict[int, DecodeGraph] = {}
        self.graph_states: dict[int, Any] = {}

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute decodes before prompts, since a prompt may share a page that a decode of this step fills."""
        decodes, prompts = self.split(chunks)
        logits: dict[int, Tensor] = {}
        for group in (decodes, prompts):
            if group:
                with ExitStack() as self.context:
                    captured = group is decodes and self.model.device.type == "cuda"
                    rows = self.replay(group) if captured else super().run(group)
                logits |= dict(zip((id(c) for c in group if c.samples), rows, strict=True))
        sampled = [logits[id(c)] for c in chunks if c.samples]
        return torch.stack(sampled) if sampled else rows

    def split(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """The decodes and the prompts of a step. A chunk of one token belongs to the prompts if it reads pages that a
        prompt of this step writes. That prompt comes before it in the step.
        """
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        written: set[int] = set()
        for chunk in chunks:
            pages = chunk.request.pages
            if chunk.count == 1 and written.isdisjoint(pages):
                decodes.append(chunk)
            else:
                prompts.append(chunk)
                written.update(pages[chunk.start // self.page_size :])
        return decodes, prompts

    def replay(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute decodes by a graph for the next power of two of requests, whose state copies this batch's tables."""
        size = 1 << (len(chunks) - 1).bit_length()
        if size not in self.graphs:
            device = self.model.device
            ptr, last = (torch.zeros(n, dtype=torch.int32, device=device) for n in (size + 1, size))
            pages = torch.zeros(size * self.num_pages, dtype=torch.int32, device=device)
            self.graphs[size] = DecodeGraph(self, size)
            self.graph_states[size] = lorax.create_decode_state_cuda_graphs(
                device=device, block_tables=pages, block_tables_ptr=ptr, last_page_len=last, **self.heads
            )
        tables = self.tables(chunks, pad_to=size)
        self.slots = self.graphs[size].slots
        self.context.enter_context(
            lorax.use_decode_state(
                state=self.graph_states[size],
                input_lengths=tables.lengths,
                block_tables=tables.pages.indices,
                head_size=self.head_size,
                page_size=self.page_size,
                dtype=self.model.dtype,
                window_left=-1,
                **self.heads,
            )
        )
        tokens, rows = self.inputs(chunks)
        return self.graphs[size].run(tokens, tables)[rows]

    def begin(self, chunks: Sequence[Chunk], tables: StepTables) -> None:
        """Enter the context of the phase."""
        self.slots = tables.slots
        common = {**self.heads, "head_size": self.head_size, "window_left": -1}  # layers pass their windows to run
        cached = {"input_lengths": tables.lengths, "block_tables": tables.pages.indices, "page_size": self.page_size}
        dtype = self.model.dtype
        if all(c.count == 1 for c in chunks):
            use = lorax.use_decode_state(state=self.decode, dtype=dtype, **cached, **common)
        elif all(c.start == 0 for c in chunks):
            use = lorax.use_prefill_state(state=self.ragged, cu_seqlens=tables.qo_indptr, query_dtype=dtype, **common)
        else:
            use = lorax.use_prefill_with_paged_kv_state(
                state=self.paged, cu_seqlens=tables.qo_indptr, dtype=dtype, **cached, **common
            )
        self.context.enter_context(use)

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        cache, params = self.caches[index], {"window_left": layer.window_left, "sm_scale": layer.sm_scale}
        store(cache, k, v, self.slots)
        for variable in (lorax.decode_state, lorax.prefill_with_paged_kv_state):
            if (state := variable.get(None)) is not None:
                return state.run(q.contiguous(), cache, sinks=sinks, logits_soft_cap=layer.logits_soft_cap, **params)
        state = lorax.prefill_state.get()
        return state.run(q.contiguous(), k, v, sinks=sinks, logits_soft_cap=layer.logits_soft_cap, **params)


def main(argv: Sequence[str] | None = None) -> int:
    return compare(LoraxRunner, arguments(__doc__, argv))


if __name__ == "__main__":
    sys.exit(main())
