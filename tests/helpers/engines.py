"""What tests of the engine share."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.definition.pages import PageTable
from quire.engine import LLM, Completion, SamplingParams
from quire.engine.batch import Chunk
from quire.engine.grammar import masked
from quire.engine.graph_inputs import CapturedInputs, GraphInputs, StepShape
from quire.engine.graphs import StepGraphs
from quire.engine.inputs import with_last_tokens
from quire.engine.request import UNDEFINED, Request
from quire.engine.sampler import SampledTokens, Sampler


@dataclass
class SampledToken:
    """The next token of a request, None where it is undefined, and its log-probabilities."""

    token: int | None
    logprobs: dict[int, float] | None


def add_output(request: Request, tokens: Sequence[int]) -> None:
    """Add tokens to the output of a request, as if steps had sampled them and the host had read them."""
    request.tokens += tokens
    request.num_total_tokens += len(tokens)


def read(sampled: SampledTokens) -> list[SampledToken]:
    """The next token of each request of a batch."""
    tokens = [None if token == UNDEFINED else token for token in sampled.tokens()]
    logprobs = sampled.logprobs() or [None] * len(tokens)
    return [SampledToken(*pair) for pair in zip(tokens, logprobs, strict=True)]


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """The next token of each request, drawn by a new sampler from its row of logits."""
    return read(Sampler(logits.device, len(requests)).launch(logits, requests))


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


def tokens_of_rounded_logits(
    llm: LLM, prompt: str | list[int], params: SamplingParams, output: list[int]
) -> set[int | None]:
    """The tokens that may follow `output` if logits have rounding errors, of which those of float32 are up to 5e-6."""
    engine, scheduler = llm._engine, llm._engine.scheduler
    tokens = engine.prompts.encode(prompt, "prompt")
    request = engine.request([*tokens, *output], params, lambda update: None)
    request.prompt_len = len(tokens)
    scheduler.tree.clear()
    request.pages = array("i", scheduler.allocator.allocate(-(-len(request.tokens) // engine.runner.page_size)))
    logits = engine.runner.run([Chunk(request, 0, len(request.tokens), True)])
    scheduler.allocator.release(request.pages)
    if request.matcher is not None:
        for token in output:
            request.matcher.push(token)
        logits, request.matcher = masked(logits, [request.matcher]), None
    errors = 1e-5 * torch.rand(500, logits.shape[1], device=logits.device).mul_(2).sub_(1)
    return {choice.token for choice in sample(logits + errors, [request] * len(errors))}


def same(
    ours: Sequence[Completion],
    expected: Sequence[Completion],
    llm: LLM,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
) -> None:
    """Assert that completions are equal, log-probabilities up to rounding, and tokens unless rounding decides between
    them: about one of 20,000 random numbers is so near the border between two tokens.
    """
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=False))
        first = next((j for j, (x, y) in pairs if x != y), None)
        if first is not None:
            assert a.token_ids[first] in tokens_of_rounded_logits(llm, prompts[i], params[i], b.token_ids[:first])
            continue
        assert (a.token_ids, a.finish_reason, a.text, a.error) == (b.token_ids, b.finish_reason, b.text, b.error)
        assert (a.logprobs is None) == (b.logprobs is None)
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert list(x) == list(y)
            assert list(x.values()) == pytest.approx(list(y.values()), abs=1e-4)


class _Replay:
    """What a captured graph does, computed on the host each time."""

    def __init__(self, graphs: HostGraphs, shape: StepShape) -> None:
        self.graphs, self.shape, self.inputs = graphs, shape, graphs._inputs.views(shape)

    @torch.inference_mode()
    def replay(self) -> None:
        graphs = self.graphs
        graphs.replays += 1
        for kept, computed in zip(graphs._outputs[self.shape], graphs._compute(self.inputs, self.shape), strict=True):
            kept[:] = computed


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
    runner, sampler, most = llm._engine.runner, llm._engine.sampler, llm._engine.scheduler.max_num_seqs
    width = min(-(-runner.model.context // runner.page_size), runner.num_pages)
    largest = StepShape(most, max(most, max_tokens), runner.adapters is not None)
    buffers = GraphInputs(largest, width, runner.page_size, torch.device("cpu"))
    wrappers = runner.new_wrappers()

    def compute(inputs: CapturedInputs, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = with_last_tokens(inputs.ids, inputs.source, sampler.last)
        lengths = inputs.last_page_len + (width - 1) * runner.page_size
        pages = PageTable.from_lengths(inputs.kv_indptr, inputs.kv_indices, lengths, runner.page_size)
        runner.plan(wrappers, inputs.qo_indptr, pages, inputs.slots, shape.max_row_tokens)
        adapters = runner.step_adapters(inputs.adapter_slots, inputs.logit_indices)
        logits = runner.model.logits(ids, inputs.positions, inputs.logit_indices, runner, adapters)
        return logits, runner.model.hidden_states.last

    variants = [False] if runner.adapters is None else [True, False]
    graphs = HostGraphs(compute, sampler.sample_greedy, buffers, most, max_tokens, variants)
    logits = torch.full((most, runner.model.vocab_size), torch.nan)
    hidden = torch.full((max(most, max_tokens), runner.model.hidden_states.size), torch.nan)
    graphs._outputs = {shape: (logits[: shape.rows], hidden[: shape.tokens]) for shape in graphs.shapes}
    runner.step_graphs = graphs
