"""Requests to engines of several ranks, whose completions are those of one rank."""

from __future__ import annotations

import random
from typing import Any

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
