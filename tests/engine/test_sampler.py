"""Sampling: each option does what its name says, and a row never depends on the others."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.engines import add_output, read, sample
from quire.engine.params import LIBRARY_DEFAULTS, SamplingParams
from quire.engine.request import UNDEFINED, Request
from quire.engine.sampler import Sampler

VOCAB = 50


def request(prompt=(1, 2), output=(), temperature=1.0, **params):
    complete = SamplingParams(temperature=temperature, **params).over(LIBRARY_DEFAULTS)
    made = Request(prompt, complete, None, frozenset(), lambda update: None)
    add_output(made, output)
    return made


def draw(logits, count, **params):
    """`count` samples from one row."""
    requests = [request(**params) for _ in range(count)]
    return [choice.token for choice in sample(logits.expand(count, -1), requests)]


@pytest.fixture
def logits(rng):
    return torch.randn(VOCAB) * 2


def test_sampler_with_temperature_0_takes_the_most_likely_token(logits):
    assert draw(logits, 3, temperature=0) == [int(logits.argmax())] * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampler_with_a_temperature_follows_its_distribution(logits, temperature):
    count = 20_000
    expected = torch.softmax(logits.double() / temperature, -1) * count
    seen = torch.bincount(torch.tensor(draw(logits, count, temperature=temperature)), minlength=VOCAB)
    common = expected >= 5
    chi2 = ((seen - expected) ** 2 / expected)[common].sum()
    freedom = int(common.sum())
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom) + 10  # six standard deviations


def test_sampler_with_top_k_takes_one_of_the_k_most_likely_tokens(logits):
    best = set(logits.topk(4).indices.tolist())
    assert set(draw(logits, 3000, top_k=4, temperature=5.0)) == best
    assert len(set(draw(logits, 3000, top_k=-1, temperature=50.0))) == VOCAB
    assert len(set(draw(logits, 50, top_k=10**6, temperature=50.0))) > 4


def test_sampler_with_top_p_takes_one_of_the_first_tokens_that_reach_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, 2000, top_p=0.7)) == {0, 1}
    assert set(draw(logits, 2000, top_p=0.81)) == {0, 1, 2}
    assert set(draw(logits, 50, top_p=1e-9)) == {0}


def test_sampler_with_min_p_takes_no_token_less_likely():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, 2000, min_p=0.2)) == {0, 1, 2}
    assert set(draw(logits, 50, min_p=1.0)) == {0}


def test_sampler_with_a_temperature_near_0_is_greedy(logits):
    assert set(draw(logits, 200, temperature=1e-6)) == {int(logits.argmax())}


def test_sampler_with_penalties_takes_the_token_computed_by_hand():
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


def test_sampler_with_logprobs_reports_those_before_temperature_and_penalties(logits):
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


def test_sampler_row_beside_others_has_the_token_that_it_has_alone(rng):
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
def test_sampler_row_that_is_not_finite_is_undefined_alone(logits, poison):
    rows = torch.stack([logits, logits, torch.full_like(logits, -math.inf)])
    rows[1, 3] = poison
    requests = [request(), request(temperature=0), request()]
    sampled = Sampler(rows.device, 3).launch(rows, requests).tokens()
    assert [token == UNDEFINED for token in sampled] == [False, True, True]
    for one, token in zip(requests, sampled, strict=True):
        one.push([token])
    assert [one.error for one in requests] == [None] + ["the model's logits are not finite"] * 2


def test_sampler_with_impossible_tokens_takes_the_others():
    logits = torch.full((VOCAB,), -math.inf)
    logits[7] = logits[9] = 0.0
    assert set(draw(logits, 200)) == {7, 9}


BAD = {
    "temperature": [-0.1, math.nan, math.inf, "hot", True, 10**400],
    "top_k": [-2, 1.5, True, 2**63, "all"],
    "top_p": [0, -0.1, 1.01, math.nan, True, 10**400],
    "min_p": [-0.1, 1.1, math.nan, False],
    "seed": [1.5, "seven", True, 2**64, -(2**63) - 1],
    "repetition_penalty": [0, -1, math.nan, math.inf, 10**400],
    "presence_penalty": [math.nan, "much", None, -(10**400)],
    "frequency_penalty": [math.inf, True],
    "max_tokens": [-1, 2.5, True, 2**63, "all"],
    "min_tokens": [-1, 2.5, True, None, 2**63],
    "stop": [[""], [3], 3, b"x", {"x": 1}, "\ud83d", ["x", "\udcff"]],
    "stop_token_ids": [["a"], [1.5], 7, [-1], [True], [2**63], b"abc", {1: 2}],
    "include_stop_str_in_output": [1, "no", None],
    "skip_special_tokens": [0, "yes", None],
    "ignore_eos": [1, "no", None],
    "logit_bias": [{"a": 1}, {1.5: 1}, {-1: 1}, {True: 1}, {2**63: 1}, {1: 101}, {1: -100.5}, {1: math.nan}, [1], 7],
    "allowed_token_ids": [[], ["a"], [1.5], 7, [-1], [True], [2**63], b"abc", {1: 2}],
    "bad_words": ["word", [""], ["  "], [3], 3, b"x", {"x": 1}, ["\ud83d"]],
    "truncate_prompt_tokens": [0, -2, 1.5, True, "2", 2**63],
    "prompt_logprobs": [-1, 0.5, True, 2**63],
    "logprobs": [-1, 0.5, True, 2**63],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_params_with_an_invalid_value_name_it(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_params_with_min_tokens_beyond_max_tokens_are_refused():
    with pytest.raises(ValueError, match="min_tokens = 5: it must be at most max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="min_tokens = 200: it must be at most max_tokens, which is 128"):
        SamplingParams(min_tokens=200).over(LIBRARY_DEFAULTS)
    assert SamplingParams(min_tokens=200, max_tokens=None).min_tokens == 200


# The ends of what is allowed, and what lies just inside.
ENDS = {
    "temperature": [0, 5e-324, 1e-300, 1e-6, 1.0, 1e300, 10**300, 1.7e308],
    "top_k": [-1, 0, 1, VOCAB, VOCAB + 1, 2**31, 2**63 - 1],
    "top_p": [5e-324, 1e-9, 1 - 2**-53, 1],
    "min_p": [0, 5e-324, 1 - 2**-53, 1],
    "seed": [-(2**63), -1, 0, 2**64 - 1],
    "repetition_penalty": [5e-324, 1e-300, 1, 10**300, 1.7e308],
    "presence_penalty": [-1.7e308, -2, 0, 2, 10**300, 1.7e308],
    "frequency_penalty": [-1.7e308, -2, 0, 2, 10**300, 1.7e308],
    "max_tokens": [9, 2**63 - 1, None, "auto"],
    "min_tokens": [0, 1, 9],
    "logit_bias": [{}, {0: -100}, {VOCAB - 1: 100, 5: -0.5}],
    "allowed_token_ids": [range(VOCAB), None],
    "truncate_prompt_tokens": [-1, 1, 2**63 - 1],
    "stop_token_ids": [[0], [2**63 - 1], range(9)],
    "logprobs": [0, 1, 2**63 - 1],
}


def test_sampler_with_extreme_parameters_takes_a_possible_token(rng):
    """Every end of every parameter beside any others, over logits with ties, large numbers and impossible tokens."""
    for _ in range(60):
        options = [{name: rng.choice(values) for name, values in ENDS.items() if rng.random() < 0.5} for _ in range(8)]
        options += [{name: rng.choice(values)} for name, values in ENDS.items()]
        requests = [
            request(
                output=rng.choices(range(VOCAB), k=rng.choice((0, 1, 30))), prompt=range(rng.choice((1, VOCAB))), **o
            )
            for o in options
        ]
        rows = torch.randn(len(options), VOCAB) * rng.choice((0, 1, 30, 1e38))
        rows = rows.clamp(-3e38, 3e38)
        rows[torch.rand(rows.shape) < 0.3] = -torch.inf
        rows[:, rng.randrange(VOCAB)] = rng.choice((-5.0, 0.0, 5.0))
        for row, choice, option in zip(rows, sample(rows, requests), options, strict=True):
            assert choice.token is not None
            assert row[choice.token] > -torch.inf, option


def test_sampler_with_extreme_temperatures_is_greedy_or_uniform(logits):
    assert set(draw(logits, 50, temperature=5e-324)) == {int(logits.argmax())}
    assert len(set(draw(logits, 3000, temperature=1e300))) == VOCAB


def test_sampler_with_equal_outputs_repeats_its_tokens(logits):
    requests = [request(seed=i) for i in range(40)]
    rows = logits.expand(40, -1)
    first = [c.token for c in sample(rows, requests)]
    assert [c.token for c in sample(rows, requests)] == first
    for made, token in zip(requests, first, strict=True):
        add_output(made, [token])
    assert [c.token for c in sample(rows, requests)] != first


def test_params_over_others_keep_their_own_values():
    usual = SamplingParams(temperature=0.5, top_k=3, max_tokens=7, stop="a").over(LIBRARY_DEFAULTS)
    assert usual == SamplingParams(
        temperature=0.5, top_k=3, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=7, stop="a"
    )
    said = SamplingParams(temperature=0, max_tokens=None, stop=[], seed=1)
    assert said.over(usual) == SamplingParams(
        temperature=0, top_k=3, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=None, stop=(), seed=1
    )
    assert SamplingParams().over(usual) == usual


def test_sampler_with_changing_batches_draws_as_a_new_one(rng):
    """A sampler that goes on from step to step draws what a new one draws for the same requests, with results that are
    read one step late, requests that miss steps, and ends.
    """
    options = [
        {"repetition_penalty": 1.7, "seed": 1},
        {"frequency_penalty": 0.8, "temperature": 0},
        {"presence_penalty": 0.5, "frequency_penalty": -0.3, "seed": 2, "logprobs": 2},
        {"seed": 3},
        {"temperature": 0},
        {"repetition_penalty": 0.6, "temperature": 0, "logprobs": 0},
    ]
    going, uploads = [], []
    kept = Sampler(torch.device("cpu"), 8)
    write = kept._lists._write
    kept._lists._write = lambda requests: (uploads.append(len(requests)), write(requests))
    late, steps = None, 120
    for _ in range(steps):
        if rng.random() < 0.2:
            going = [r for r in going if rng.random() < 0.8]
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 30, 90)))]
            going = [*going, request(prompt=prompt, **rng.choice(options))][-8:]
        batch = [r for r in going if rng.random() < 0.98]
        if not batch or any(r.num_inflight_tokens and r not in late.requests for r in batch):
            continue
        rows = torch.randn(len(batch), VOCAB)
        sampled = kept.launch(rows, batch)
        for row, r in enumerate(batch):
            r.num_total_tokens += 1
            r.row = row
        for r, choice in zip(late.requests, read(late), strict=True) if late else ():
            r.tokens.append(choice.token)
        for r in batch:
            r.num_total_tokens -= 1
        expected = sample(rows, batch)  # what the host knows now is all before this step's tokens
        for r in batch:
            r.num_total_tokens += 1
        assert [(c.token, c.logprobs) for c in read(sampled)] == [(c.token, c.logprobs) for c in expected]
        late = sampled
    assert 0 < sum(uploads) < steps  # not all tokens of all requests in each step


def test_sample_greedy_before_a_launch_gives_the_tokens_of_plain_batches(rng):
    """Whether `sample_greedy` comes before or in a launch, plain and other batches have the tokens that a new sampler
    draws, also when they are read after the next batch, and as the tokens of the next step.
    """
    kinds = [{"temperature": 0}] * 6 + [{"seed": 3}, {"temperature": 0, "frequency_penalty": 0.5}, {"logprobs": 1}]
    kept, going, late = Sampler(torch.device("cpu"), 8), [], None
    plain = 0
    for _ in range(200):
        if not going or rng.random() < 0.3:
            going = [request(prompt=[rng.randrange(VOCAB)], **rng.choice(kinds)) for _ in range(rng.randint(1, 6))]
        padded = torch.randn(8, VOCAB)
        padded[rng.randrange(8), 7] = rng.choice((0.0, torch.nan, torch.inf))
        logits, done = padded[: len(going)], rng.random() < 0.8
        expected = [choice.token for choice in sample(logits, going)]
        if done:
            kept.sample_greedy(padded)
        sampled = kept.launch(logits, going, greedy_done=done)
        assert kept.last[: len(going)].tolist() == [token or 0 for token in expected]
        if late is not None:
            assert [choice.token for choice in read(late[0])] == late[1]
        late = sampled, expected
        plain += done and all(r.plain for r in going)
        for r, token in zip(going, expected, strict=True):
            add_output(r, [token or 0])
    assert 10 < plain < 190
