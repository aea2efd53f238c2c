"""The host's time of a decode step of the engine: scheduling, inputs, and reading results, without a model.

    PYTHONPATH=src python tools/engine_host.py --requests 256 --length 1024

The runner computes nothing, and logits are random. Requests decode from a prompt of `--length` tokens, and their
updates go to a queue as those of `LLM.generate`. Prints the medians of parts of a step in microseconds of CPU time.
"""

from __future__ import annotations

import argparse
import queue
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from quire.engine import SamplingParams, shipped_model
from quire.engine.batch import ForwardOutput, StepBatch
from quire.engine.engine import Engine
from quire.engine.graph_inputs import CapturedInputs, GraphInputs, StepShape
from quire.engine.graphs import StepGraphs


class DummyRunner:
    """A runner with the inputs of graphs, whose logits are random, but always the same."""

    overlaps = supports_all_logits = True
    adapters = leader = None

    def __init__(self, model: Any, num_pages: int, page_size: int, max_rows: int) -> None:
        self.model = model
        self.num_pages, self.page_size = num_pages, page_size
        self.inputs = GraphInputs(
            StepShape(max_rows, max_rows), -(-model.context // page_size), page_size, model.device
        )
        self.graphs = StepGraphs(self._compute, self._sample_greedy, self.inputs, max_rows, 0)
        self.logits = torch.rand(max_rows, 2 if model.tokenizer is None else 400)
        if model.tokenizer is not None:  # text of whole characters, as models write it
            texts = [model.tokenizer.decode([t], skip_special_tokens=True) for t in range(400)]
            self.logits[:, [t for t, text in enumerate(texts) if not text.isalnum()]] = -1.0

    @staticmethod
    def _compute(inputs: CapturedInputs, shape: StepShape) -> tuple[torch.Tensor, None]:
        return torch.empty(0), None

    @staticmethod
    def _sample_greedy(logits: torch.Tensor) -> None:
        """Nothing."""

    def forward(self, batch: StepBatch, last_tokens: torch.Tensor) -> ForwardOutput:
        """Fill the inputs, as for a graph; a prompt is not computed."""
        shape = self.graphs.shape(batch)
        if shape is not None:
            batch, inputs = self.inputs.prepare(batch, shape)
            self.inputs.copy(inputs)
        return ForwardOutput(batch, self.logits[: batch.num_rows], greedy_done=True)


def main() -> None:
    """Run decode steps and print their times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--last", action="store_true", help="updates of ends alone, as in `generate` without on_update")
    parser.add_argument("--text", action="store_true", help="decode the tokens of the shipped model's tokenizer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = None
    if args.text:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(shipped_model())
    defaults = SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=None, stop=()
    )
    context = args.length + args.steps + 64
    model = SimpleNamespace(
        folder="dummy",
        network=torch.nn.Module(),
        tokenizer=tokenizer,
        device=torch.device("cpu"),
        dtype=torch.float32,
        context=context,
        vocab_size=900,
        default_params=defaults,
        end_ids=frozenset((1 << 20,)),
        media_tokens={},
        is_headless=False,
        pooling="auto",
        hidden_states=SimpleNamespace(size=None),
    )
    pages = args.requests * -(-context // 16)
    engine = Engine(DummyRunner(model, pages, 16, args.requests), args.requests, 8192)  # type: ignore[arg-type]
    # The tokens of plain requests are always the same; a graph would sample them in each step.
    engine.sampler.sample_greedy(engine.runner.logits)  # type: ignore[attr-defined]
    updates: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for i in range(args.requests):
        prompt = [5 + (i + j) % 800 for j in range(args.length)]
        request = engine.request(prompt, SamplingParams(max_tokens=None), updates.put)
        request.final_only = args.last
        engine.add(request)
    while engine.scheduler.waiting or any(r.num_inflight_tokens == 0 for r in engine.scheduler.running):
        engine.step()
    times: dict[str, list[float]] = {"schedule": [], "launch": [], "read": [], "step": []}
    for _ in range(args.steps):
        start = time.thread_time()
        batch = engine.scheduler.schedule()
        scheduled = time.thread_time()
        engine._sample(engine._forward(batch))
        launched = time.thread_time()
        engine._read(1)
        engine._send()
        end = time.thread_time()
        spans = (scheduled - start, launched - scheduled, end - launched, end - start)
        for name, span in zip(times, spans, strict=True):
            times[name].append(span * 1e6)
        while not updates.empty():
            updates.get()
    print(f"{args.requests} requests of {args.length} tokens, medians of {args.steps} steps in us:")
    print("  " + ", ".join(f"{name} {median(values):.0f}" for name, values in times.items()))


if __name__ == "__main__":
    main()
