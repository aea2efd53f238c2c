"""What tests of the engine share."""

from __future__ import annotations

import time
from typing import Any

import torch

from quire.definition.pages import PageTable
from quire.engine import LLM
from quire.engine.graphs import StepGraphs
from quire.engine.inputs import InputBuffers, Inputs, Shape


def pages_add_up(llm: LLM) -> bool:
    """Whether, with nothing running, each page is free or held once, by the prefix tree."""
    scheduler = llm._engine.scheduler
    allocator, known = scheduler.allocator, set(scheduler.tree.pages)
    assert not scheduler.running
    assert not scheduler.waiting
    assert allocator.num_free + len(known) == allocator.num_pages
    return all(allocator.holders(page) == (page in known) for page in range(allocator.num_pages))


def until_idle(llm: LLM, seconds: float = 20.0) -> None:
    """Wait until the engine has no requests and no launched steps."""
    end = time.monotonic() + seconds
    while llm._engine.busy:
        assert time.monotonic() < end, "the engine goes on"
        time.sleep(0.01)


class _Replay:
    """What a captured graph does, computed on the host each time."""

    def __init__(self, graphs: HostGraphs, shape: Shape) -> None:
        self.graphs, self.shape, self.inputs = graphs, shape, graphs._buffers.views(shape)

    @torch.inference_mode()
    def replay(self) -> None:
        graphs = self.graphs
        graphs.replays += 1
        graphs._logits[: self.shape.rows] = graphs._compute(self.inputs, self.shape)


class HostGraphs(StepGraphs):
    """Graphs whose replays compute the step anew from the inputs, on the host.

    Attributes:
        replays: their number.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._graphs = {shape: _Replay(self, shape) for shape in self.shapes}  # type: ignore[misc]
        self.replays = 0


def captured_on_the_host(llm: LLM, max_tokens: int) -> None:
    """Give a runner on the CPU graphs that are computed on the host, whose kernels read tables without gaps."""
    runner, most = llm._engine.runner, llm._engine.scheduler.max_num_seqs
    width = min(-(-runner.model.context // runner.page_size), runner.num_pages)
    buffers = InputBuffers(Shape(most, max(most, max_tokens)), width, runner.page_size, torch.device("cpu"))
    wrappers = runner.new_wrappers()

    def compute(inputs: Inputs, shape: Shape) -> torch.Tensor:
        ids = torch.where(inputs.ids < 0, runner.last_tokens[inputs.source], inputs.ids)
        lengths = inputs.last_page_len + (width - 1) * runner.page_size
        pages = PageTable.from_lengths(inputs.kv_indptr, inputs.kv_indices, lengths, runner.page_size)
        runner.plan(wrappers, inputs.qo_indptr, pages, inputs.slots, shape.longest)
        return runner.model.logits(ids, inputs.positions, inputs.sampled, runner)

    graphs = HostGraphs(compute, buffers, most, max_tokens)
    graphs._logits = torch.full((most, runner.model.vocab_size), torch.nan)
    runner.step_graphs = graphs
