"""Requests to engines of several ranks, whose completions are those of one rank; and ranks that are threads."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.engines import pages_add_up, same, until_idle
from quire.engine import LLM, Completion, SamplingParams


def random_prompts(rng: random.Random, count: int, vocab_size: int = 97) -> list[list[int]]:
    """Short and long prompts, some of which begin alike."""
    first = [rng.randrange(1, vocab_size) for _ in range(40)]
    return [
        first[: rng.choice((0, 17, 40))] + [rng.randrange(1, vocab_size) for _ in range(rng.choice((1, 5, 33, 90)))]
        for _ in range(count)
    ]


def random_params(rng: random.Random, count: int) -> list[SamplingParams]:
    """Parameters of greedy and of seeded requests."""
    return [
        SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=i, max_tokens=rng.randint(1, 24), logprobs=2)
        for i in range(count)
    ]


def check_completions(
    one: LLM, several: LLM, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[Completion]:
    """Compare the completions of several ranks with those of one rank, which are returned."""
    expected = one.generate(prompts, params, **options)
    same(several.generate(prompts, params, **options), expected, one, prompts, params)
    until_idle(several)
    assert pages_add_up(several)
    return expected


def torchrun(folder: Path, processes: int, program: str) -> tuple[int, str, str]:
    """The exit code of a program that torchrun has started, which is written to a folder, and what it has printed."""
    file = folder / "program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=180)
    return done.returncode, done.stdout, done.stderr


class ThreadRank:
    """A rank that is a thread, in place of `quire.engine.parallel.ranks.Ranks`."""

    def __init__(self, rank: int, tensors: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(tensors)
        self._tensors, self._barrier = tensors, barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self._tensors[self.rank] = x.clone()
        self._barrier.wait()
        found = list(self._tensors)
        self._barrier.wait()
        return found

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def of_first(self, x: Tensor) -> Tensor:
        return self._all(x)[0]

    def concatenated(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)


def thread_ranks(size: int) -> list[ThreadRank]:
    """Ranks for the threads of `in_threads`."""
    tensors, barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=60)
    return [ThreadRank(rank, tensors, barrier) for rank in range(size)]


def in_threads(size: int, function: Callable[[int], Any]) -> list[Any]:
    """What a function returns for each rank, which call it at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size)))
