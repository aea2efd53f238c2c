"""What a sink finds when it is called: counts, pages and the step log include all that the step has done, for every way
in which a request is reported.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from helpers.engines import pages_add_up, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.engine.runner import Runner
from quire.engine.sampler import Sampler

TEXT = "def f(x):\n    return [1, 2, 3, 4, 5, 6, 7, 8, 9]\n\n\n"
PROMPTS = [TEXT * 2, TEXT + "def g(", TEXT, "import os\n", "x = [1, 2, 3, 1, 2, 3, 1, 2,", TEXT + "class A:\n"]
SIZES = {"page_size": 4, "num_pages": 30, "max_num_seqs": 4, "max_batched_tokens": 40}


@pytest.fixture(scope="module")
def model():
    with LLM(**SIZES) as llm:
        return llm.model


def engine_of(model, depth=0, speculative_tokens=0):
    """An engine that nothing but the test steps."""
    runner = Runner(model, SIZES["num_pages"], SIZES["page_size"])
    return Engine(runner, SIZES["max_num_seqs"], SIZES["max_batched_tokens"], depth, speculative_tokens)


def found(engine, requests):
    """All that a caller can ask for."""
    known = [(r.output, r.text, r.finish_reason, r.error) for r in requests]
    return engine.scheduler.snapshot(), engine.step_log.steps(), known


def run(engine, params, cancelled=()):
    """Complete the prompts step by step; those of the indices `cancelled` are cancelled after the third step. Each sink
    must find what is found after the step. Returns the requests and, for each, its updates.
    """
    requests, seen = [], []
    updates = [[] for _ in PROMPTS]
    for i, prompt in enumerate(PROMPTS):

        def sink(update, to=updates[i]):
            to.append(update)
            seen.append(found(engine, requests))

        requests.append(engine.request(prompt, params, sink))
        engine.add(requests[-1])
    steps = 0
    while engine.busy:
        actions = [lambda i=i: engine.cancel(requests[i]) for i in cancelled if steps == 3]
        for action in (*actions, engine.step):
            seen.clear()
            action()
            after = found(engine, requests)
            assert all(before == after for before in seen)
        steps += 1
    state, log, _ = found(engine, requests)
    assert (state.running, state.waiting, state.held_pages) == (0, 0, 0)
    assert state.generated_tokens == sum(len(r.output) for r in requests)
    assert log[-1].number >= state.steps
    assert pages_add_up(SimpleNamespace(_engine=engine))
    for request, parts in zip(requests, updates, strict=True):
        reported = [t for part in parts for t in part.token_ids]
        assert reported == request.output[: len(reported)]
        # The error is that of the token that was added last.
        assert len(reported) == len(request.output) or "no such token" in request.error
        assert "".join(part.text for part in parts) == request.text
        assert [part.finish_reason is None for part in parts] == [True] * (len(parts) - 1) + [False]
    return requests, updates


PARAMS = {
    "default": {},
    "log-probabilities": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "temperature": 1.0, "seed": 5},
    "stop strings": {"stop": ["return", "self"]},
    "a grammar": {"regex": r"[a-z ]{3,40}\."},
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", PARAMS)
def test_sink_that_is_called_finds_the_state_after_the_step(model, kind, depth):
    if kind == "a grammar":
        pytest.importorskip("llguidance")
    engine = engine_of(model, depth)
    given = {"temperature": 0, "max_tokens": 24, "ignore_eos": kind not in ("stop strings", "a grammar")}
    requests, _ = run(engine, SamplingParams(**{**given, **PARAMS[kind]}), cancelled=(1, 5))
    assert {r.finish_reason for r in requests} >= {"length" if given["ignore_eos"] else "stop", "cancelled"}
    assert engine.scheduler.stats.preemptions > 0 or kind != "default"


def test_sink_that_is_called_after_drafts_finds_all_accepted_ones(model):
    engine = engine_of(model, speculative_tokens=4)
    _, updates = run(engine, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert engine.scheduler.stats.accepted_tokens > 0
    assert max(len(part.token_ids) for parts in updates for part in parts) > 1


def not_finite(engine, monkeypatch):
    """Logits of the first request of each step that are not finite, from the sixth step on."""
    logits = engine.model.logits

    def spoilt(*given):
        rows = logits(*given)
        return rows.index_fill(0, torch.tensor([0]), torch.nan) if engine.scheduler.stats.steps > 4 else rows

    monkeypatch.setattr(engine.model, "logits", spoilt)


def unsampled(engine, monkeypatch):
    """Batches whose sampling raises, and of which one request raises alone."""
    launch = Sampler._launch

    def raising(self, *given):
        requests = next(x for x in given if isinstance(x, list))
        if any(len(r.output) >= 5 and r.prompt[0] == engine.prompts.encode("x", "")[0] for r in requests):
            raise OverflowError("too large")
        return launch(self, *given)

    monkeypatch.setattr(Sampler, "_launch", raising)


def uncomputed(engine, monkeypatch):
    """Batches whose computation raises, and of which one request raises alone."""
    compute = engine.runner.run

    def raising(chunks, *given):
        if any(c.start > 20 and c.request.prompt[0] == engine.prompts.encode("x", "")[0] for c in chunks):
            raise ArithmeticError("spoilt")
        return compute(chunks, *given)

    monkeypatch.setattr(engine.runner, "run", raising)


def undecoded(engine, monkeypatch):
    """Tokens whose text cannot be decoded."""
    decode, calls = engine.model.tokenizer.decode, []

    def raising(tokens, **options):
        calls.append(tokens)
        if len(calls) == 20:
            raise LookupError("no such token")
        return decode(tokens, **options)

    monkeypatch.setattr(engine.model.tokenizer, "decode", raising)


def unscheduled(engine, monkeypatch):
    """A step that raises before it belongs to any request."""
    schedule = engine.scheduler.schedule

    def raising():
        if engine.scheduler.stats.steps == 6:
            raise ZeroDivisionError("no")
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", raising)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["default", pytest.param("log-probabilities", marks=pytest.mark.slow)])
@pytest.mark.parametrize("spoil", [not_finite, unsampled, uncomputed, undecoded, unscheduled])
def test_sink_that_is_called_with_an_error_finds_the_state_after_the_step(model, spoil, kind, depth, monkeypatch):
    engine = engine_of(model, depth)
    spoil(engine, monkeypatch)
    requests, _ = run(engine, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **PARAMS[kind]))
    assert "error" in {r.finish_reason for r in requests}


def test_stats_when_generate_returns_have_all_its_tokens():
    """In the caller's thread, which the last update wakes up while the engine's thread still runs."""
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    with LLM(**SIZES) as llm:
        for i in range(1, 30):
            llm.generate(PROMPTS[:3], params)
            stats = llm.stats
            assert stats.generated_tokens == 21 * i
            assert (stats.running, stats.held_pages) == (0, 0)
            assert llm.step_log.steps()[-1].number == stats.steps


def test_parts_before_an_error_have_no_error(monkeypatch):
    """Though the request has failed when the caller's thread looks at its first part."""
    with LLM(**SIZES) as llm:
        undecoded(llm._engine, monkeypatch)
        parts = []

        def late(index, part):
            until_idle(llm)
            parts.append(part)

        llm.generate(PROMPTS[3], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), on_update=late)
        assert parts[-1].error == "LookupError: no such token"
        assert len(parts) > 1
        assert all(part.error is None for part in parts[:-1])
