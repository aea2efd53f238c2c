"""Sampling: each option does what its name says, and a row never depends on the others."""

from __future__ import annotations

import math

import pytest
import torch

from quire.engine.params import SamplingParams
from quire.engine.request import Request
from quire.engine.sampler import sample

VOCAB = 50


def request(prompt=(1, 2), output=(), **params):
    made = Request(prompt, SamplingParams(**params), None, frozenset(), lambda update: None)
    made.tokens += output
    return made


def draw(logits, count, **params):
    """`count` samples from one row."""
    requests = [request(**params) for _ in range(count)]
    return [choice.token for choice in sample(logits.expand(count, -1), requests)]


@pytest.fixture
def logits(rng):
    return torch.randn(VOCAB) * 2


def test_temperature_0_takes_the_likeliest(logits):
    assert draw(logits, 3, temperature=0) == [int(logits.argmax())] * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_distribution(logits, temperature):
    count = 20_000
    expected = torch.softmax(logits.double() / temperature, -1) * count
    seen = torch.bincount(torch.tensor(draw(logits, count, temperature=temperature)), minlength=VOCAB)
    common = expected >= 5
    chi2 = ((seen - expected) ** 2 / expected)[common].sum()
    freedom = int(common.sum())
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom) + 10  # six standard deviations


def test_top_k(logits):
    best = set(logits.topk(4).indices.tolist())
    assert set(draw(logits, 3000, top_k=4, temperature=5.0)) == best
    assert len(set(draw(logits, 3000, top_k=-1, temperature=50.0))) == VOCAB
    assert len(set(draw(logits, 50, top_k=10**6, temperature=50.0))) > 4


def test_top_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, 2000, top_p=0.7)) == {0, 1}
    assert set(draw(logits, 2000, top_p=0.81)) == {0, 1, 2}
    assert set(draw(logits, 50, top_p=1e-9)) == {0}


def test_min_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, 2000, min_p=0.2)) == {0, 1, 2}
    assert set(draw(logits, 50, min_p=1.0)) == {0}


def test_a_temperature_near_0_is_greedy(logits):
    assert set(draw(logits, 200, temperature=1e-6)) == {int(logits.argmax())}


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -1.0, 1.9, 0.5]])

    def best(**params):
        return sample(logits, [request(prompt=(0,), temperature=0, **params)])[0].token

    assert best() == 0
    assert best(repetition_penalty=2.0) == 2  # 2.0 / 2 < 1.9
    assert best(presence_penalty=0.2) == 0  # the prompt does not count
    assert best(output=(0,), presence_penalty=0.2) == 2
    assert best(output=(0,), frequency_penalty=0.06) == 0
    assert best(output=(0, 0), frequency_penalty=0.06) == 2
    assert best(output=(2,), presence_penalty=-0.2) == 2
    negative = torch.tensor([[-1.0, -1.5]])
    assert sample(negative, [request(prompt=(0,), temperature=0, repetition_penalty=2.0)])[0].token == 1


def test_logprobs_are_those_before_temperature_and_penalties(logits):
    exact = torch.log_softmax(logits.double(), -1)
    choice = sample(logits[None], [request(temperature=3.0, repetition_penalty=5.0, logprobs=3)])[0]
    top = exact.topk(3).indices.tolist()
    assert list(choice.logprobs)[:3] == top
    assert choice.token in choice.logprobs
    for token, value in choice.logprobs.items():
        assert value == pytest.approx(float(exact[token]), abs=1e-5)
    only = sample(logits[None], [request(logprobs=0)])[0]
    assert list(only.logprobs) == [only.token]
    assert sample(logits[None], [request()])[0].logprobs is None


def test_a_row_does_not_depend_on_the_others(rng):
    options = [
        {"seed": 1},
        {"seed": 2, "temperature": 0.3},
        {"temperature": 0},
        {"seed": 3, "top_k": 5},
        {"seed": 4, "top_p": 0.5, "repetition_penalty": 1.5},
        {"seed": 5, "min_p": 0.1, "presence_penalty": 1.0, "output": (7, 7)},
    ]
    rows = torch.randn(len(options), VOCAB) * 3
    alone = [sample(rows[i : i + 1], [request(**o)])[0].token for i, o in enumerate(options)]
    order = list(range(len(options)))
    rng.shuffle(order)
    together = sample(rows[order], [request(**options[i]) for i in order])
    assert [c.token for c in together] == [alone[i] for i in order]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_not_numbers_fail_their_row_only(logits, poison):
    rows = torch.stack([logits, logits, torch.full_like(logits, -math.inf)])
    rows[1, 3] = poison
    choices = sample(rows, [request(), request(temperature=0), request()])
    assert [c.token is None for c in choices] == [False, True, True]


def test_some_tokens_may_be_impossible():
    logits = torch.full((VOCAB,), -math.inf)
    logits[7] = logits[9] = 0.0
    assert set(draw(logits, 200)) == {7, 9}


BAD = {
    "temperature": [-0.1, math.nan, math.inf, "hot", None],
    "top_k": [-2, 1.5, True],
    "top_p": [0, -0.1, 1.01, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "seed": [1.5, "seven"],
    "repetition_penalty": [0, -1, math.nan, math.inf],
    "presence_penalty": [math.nan, "much"],
    "frequency_penalty": [math.inf],
    "max_tokens": [-1, 0, 2.5],
    "stop": [[""], [3]],
    "stop_token_ids": [["a"], [1.5]],
    "logprobs": [-1, 0.5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_parameters_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
