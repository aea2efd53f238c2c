"""Code that the drivers of this folder share: arguments, prompts, and the comparison with the engine.

A driver is a `Runner` whose steps call a serving backend. The engine's scheduler sends it chunks of prompts over cached
prefixes, decodes between them, and preemptions, since the cache is small.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.engine import LLM, Completion, SamplingParams
from quire.engine.runner import Runner
from quire.steps import StepTables

START = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
PROMPTS = (
    "import os\n\n\ndef read(path):\n",
    START,
    START + "        self.items.append(item)\n\n    def pop(self):\n",
    START + "        self.items.append(item)\n\n    def __len__(self):\n",
    "for i in range(",
)
CLOSE = {"float32": 1e-3, "bfloat16": 0.1}  # log-probabilities that differ by less may swap by rounding


def arguments(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of every driver."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=list(CLOSE))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layout", default="NHD", choices=["NHD", "HND"], help="of the backend's cache")
    parser.add_argument("--window", type=int, default=-1, help="keys to the left that a token sees, in all layers")
    parser.add_argument("--max-tokens", type=int, default=24)
    return parser.parse_args(argv)


def set_up(runner: type[Runner], args: argparse.Namespace) -> type[Runner]:
    """A subclass of the runner with the arguments as its attribute `args`, and --window as the window of all layers."""

    class Chosen(runner):  # type: ignore[valid-type,misc]
        def attend(self, index: int, layer: Any, *tensors: Any) -> Any:
            return super().attend(index, replace(layer, window_left=args.window), *tensors)

    Chosen.args = args
    return Chosen


def generate(runner: type[Runner], args: argparse.Namespace) -> tuple[list[Completion], Any]:
    """The greedy completions of the prompts, and the engine's counts. The cache is too small to avoid preemptions."""
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=2)
    options: Any = {"page_size": args.page_size, "max_batched_tokens": 24, "num_pages": -(-160 // args.page_size)}
    with LLM(device=args.device, dtype=args.dtype, runner=set_up(runner, args), **options) as llm:
        return llm.generate(PROMPTS, params), llm.stats


class DecodeGraph:
    """A captured forward pass of `size` decodes, which reads buffers that are filled before each replay."""

    def __init__(self, runner: Runner, size: int) -> None:
        def zeros() -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=runner.model.device)

        self.tokens, self.positions, self.slots = zeros(), zeros(), zeros()
        self.rows = torch.arange(size, device=runner.model.device)
        self.runner, self.logits, self.graph = runner, None, torch.cuda.CUDAGraph()

    def run(self, tokens: Tensor, tables: StepTables) -> Tensor:
        """The logits of `tokens`, one per request. The rest of the batch is padding with slot -1."""
        count = len(tokens)
        self.slots.fill_(-1)
        for buffer, values in ((self.tokens, tokens), (self.positions, tables.positions), (self.slots, tables.slots)):
            buffer[:count] = values
        inputs = (self.tokens, self.positions, self.rows, self.runner)
        if self.logits is None:
            self.runner.model.logits(*inputs)  # compiles kernels, which a capture must not do
            with torch.cuda.graph(self.graph):
                self.logits = self.runner.model.logits(*inputs)
        self.graph.replay()
        return self.logits[:count]


def same(ours: Completion, engines: Completion, close: float) -> bool:
    """Whether two completions are equal, or the first tokens that differ have nearly equal probabilities."""
    assert engines.logprobs is not None
    for a, b, likely in zip(ours.token_ids, engines.token_ids, engines.logprobs, strict=True):
        if a != b:
            return a in likely and likely[b] - likely[a] < close
    return True


def compare(runner: type[Runner], args: argparse.Namespace) -> int:
    """Complete the prompts through the backend and through the engine alone; 0 if the completions agree, else 1."""
    (ours, stats), (engines, _) = generate(runner, args), generate(Runner, args)
    differ = [i for i, pair in enumerate(zip(ours, engines, strict=True)) if not same(*pair, CLOSE[args.dtype])]
    print(
        f"{runner.__name__}: {len(ours) - len(differ)} of {len(ours)} prompts as the engine completes them, in "
        f"{stats.steps} steps, {stats.cached_tokens} tokens of prompts reused, {stats.preemptions} preemptions"
    )
    for i in differ:
        print(f"prompt {i}\n  backend: {ours[i].text!r}\n  engine:  {engines[i].text!r}")
    return 1 if differ else 0
