"""The record of the last steps: whole, in order, and readable while the engine runs."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest

pytest.importorskip("transformers")

from quire.engine import LLM, SamplingParams
from quire.engine.batch import Chunk, StepBatch
from quire.engine.engine import Engine
from quire.engine.step_log import StepLog


class OfAPrompt:
    prompt_len = 100


def chunk_of(request, start, count):
    return Chunk(request, start, count, True)


def test_step_log_counts_tokens_by_their_chunks():
    log, request = StepLog(), OfAPrompt()
    begin = time.perf_counter()
    log.launch(StepBatch.of([chunk_of(request, 100, 1), chunk_of(request, 64, 36), chunk_of(request, 99, 1)]))
    time.sleep(0.02)
    log.read(0)
    log.launch(StepBatch.of([chunk_of(request, 120, 4)]))  # several tokens after the prompt
    log.read(0)
    first, second = log.steps()
    assert (first.number, first.requests, first.prompt_tokens, first.decode_tokens) == (1, 3, 36, 2)
    assert (second.number, second.requests, second.prompt_tokens, second.decode_tokens) == (2, 1, 0, 4)
    assert 0.02 <= first.duration <= time.perf_counter() - begin
    assert first.start + first.duration <= second.start <= log.now


def test_step_log_of_a_launched_step_ends_when_it_is_read():
    log = StepLog()
    for _ in range(3):
        log.launch(StepBatch.of([chunk_of(OfAPrompt(), 100, 1)]))
        log.read(1)
    assert [step.number for step in log.steps()] == [1, 2]
    first, second = log.steps()
    assert second.start < first.start + first.duration  # they overlap
    log.read(0)
    assert [step.number for step in log.steps(after=1)] == [2, 3]


def test_step_log_beyond_its_size_keeps_the_last_steps_in_order(rng):
    size, count = rng.randint(1, 20), rng.randint(21, 60)
    log = StepLog(size)
    for _ in range(count):
        log.launch(StepBatch.of([chunk_of(OfAPrompt(), 100, 1)]))
        log.read(0)
    assert [step.number for step in log.steps()] == list(range(count - size + 1, count + 1))
    assert log.steps(after=count) == []


def test_step_log_read_beside_the_writer_has_whole_steps():
    log, ended = StepLog(16), threading.Event()

    def write():
        for i in range(1, 20001):
            log.launch(StepBatch.of([chunk_of(OfAPrompt(), 0, i + 1)]))
            log.read(0)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    reads = 0
    while not ended.is_set():
        steps = log.steps()
        assert all(step.prompt_tokens == step.number + 1 for step in steps)
        assert all(a.number < b.number for a, b in pairwise(steps))
        reads += 1
    thread.join()
    assert reads > 1


@pytest.mark.parametrize("depth", [0, 1])
def test_step_log_of_the_engine_has_every_token(rng, depth):
    """Tokens of prompts are those that were admitted and not in the cache; the others follow prompts. Steps overlap
    where results are read after the next launch.
    """
    with LLM(num_pages=300, page_size=8, max_batched_tokens=64) as llm:
        llm._engine.depth = depth
        prompts = [[rng.randrange(4000) for _ in range(rng.randint(10, 150))] for _ in range(6)]
        done = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True))
    stats, steps = llm.stats, llm.step_log.steps()
    assert len(steps) == steps[-1].number == stats.steps
    singles = sum(step.decode_tokens for step in steps) - sum(len(c.token_ids) - 1 for c in done)
    assert 0 <= singles <= len(prompts)  # a prompt's last token alone
    assert sum(step.prompt_tokens for step in steps) + singles == stats.admitted_tokens - stats.cached_tokens
    assert max(step.requests for step in steps) <= 6
    assert all(step.duration > 0 for step in steps)
    assert any(a.start + a.duration > b.start for a, b in pairwise(steps)) == bool(depth)


def test_step_log_of_a_step_that_raises_has_it(monkeypatch):
    def broken(self, chunks):
        raise RuntimeError("broken")

    with LLM(num_pages=50) as llm:
        monkeypatch.setattr(Engine, "_forward", broken)
        assert llm.generate([[1, 2, 3]])[0].finish_reason == "error"
        monkeypatch.undo()
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finish_reason == "length"
        assert [step.number for step in llm.step_log.steps()] == [1, 2, 3]
