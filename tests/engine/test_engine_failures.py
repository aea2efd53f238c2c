"""What raises in a step ends the request that caused it; the tokens of the others are what they would be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import VOCAB, save
from helpers.engines import pages_add_up
from quire.engine import LLM, SamplingParams, sampler

BAD = VOCAB - 1  # a token that only bad prompts have


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(9)
    return save("llama", tmp_path_factory.mktemp("llama"))


def params(rng, **more):
    temperature = rng.choice((0, 1.0))
    options = {"seed": rng.randrange(100), "max_tokens": rng.randint(1, 12), "ignore_eos": True, **more}
    return SamplingParams(temperature=temperature, **options)


def prompts(rng, count=9):
    """Prompts without BAD, most of which begin alike."""
    start = [rng.randrange(BAD) for _ in range(20)]
    made = [start[: rng.randint(0, 20)] + [rng.randrange(BAD) for _ in range(rng.randint(1, 6))] for _ in range(count)]
    return start, made


def runs(llm, fails):
    """Make the runner raise for steps with a chunk that `fails`, after it has spoilt what they write."""
    run, size = llm._engine.runner.run, llm._engine.runner.page_size
    raised = []

    def failing(chunks, *given):
        failed = [c for c in chunks if fails(c)]
        if not failed:
            return run(chunks, *given)
        with torch.inference_mode():
            for chunk in chunks:
                for i in range(chunk.start, chunk.start + chunk.count):
                    for cache in llm._engine.runner.caches:
                        for x in cache:
                            x[chunk.request.pages[i // size], i % size] = torch.nan
        raised.append(len(chunks))
        raise ArithmeticError("spoilt")

    llm._engine.runner.run = failing
    return raised


@pytest.mark.parametrize("where", ["prompt", "output"])
def test_chunk_that_raises_ends_its_request_alone(folder, rng, where):
    together = 0
    for _ in range(6):
        sizes = {
            "page_size": rng.choice((1, 2, 4)),
            "max_batched_tokens": rng.choice((7, 30, 200)),
            "max_num_seqs": rng.choice((4, 20)),
            "batch_invariant": True,  # so that no rounding depends on what fails beside
        }
        start, good = prompts(rng)
        given = [params(rng) for _ in good]
        bad = [[*start[: rng.randint(0, 20)], BAD, *start] for _ in range(rng.randint(1, 3))]
        most = 12 if where == "output" else 9  # they raise after some tokens, or before
        batch = [*zip(good, given, strict=True), *((p, params(rng, max_tokens=most)) for p in bad)]
        order = rng.sample(range(len(batch)), len(batch))
        with LLM(folder, num_pages=rng.choice((80, 400)), **sizes) as llm:
            expected = [c.token_ids for c in llm.generate(good, given)]
            llm._engine.scheduler.tree.clear()

            def fails(chunk):
                prompt = chunk.request.tokens[: chunk.request.prompt_len]
                if where == "prompt":
                    return BAD in prompt[chunk.start : chunk.start + chunk.count]
                return BAD in prompt and len(chunk.request.output) == 3

            run = llm._engine.runner.run
            raised = runs(llm, fails)
            done = llm.generate(*(list(x) for x in zip(*(batch[i] for i in order), strict=True)))
            for i, completion in zip(order, done, strict=True):
                if i >= len(good):
                    assert completion.finish_reason == "error"
                    assert completion.error == "ArithmeticError: spoilt"
                    assert len(completion.token_ids) == (0 if where == "prompt" else 3)
                else:
                    assert completion.token_ids == expected[i]
            assert raised
            together += max(raised) > 1
            assert pages_add_up(llm)
            # Nothing that a failed step wrote is found by those who come later.
            llm._engine.runner.run = run
            again = llm.generate([*bad, *good], [SamplingParams(temperature=0, max_tokens=3)] * len(bad) + given)
            assert all(c.finish_reason in ("length", "stop") for c in again[: len(bad)])
            assert [c.token_ids for c in again[len(bad) :]] == expected
            assert pages_add_up(llm)
    assert together


def test_prefix_of_a_failed_chunk_is_computed_by_the_next_request(folder):
    """The second request takes the first one's pages in the step that should have filled them."""
    start = list(range(1, 13))
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(folder, page_size=4) as llm:
        expected = llm.generate([[*start, 7], [*start, 8]], greedy)
        llm._engine.scheduler.tree.clear()
        raised = runs(llm, lambda chunk: BAD in chunk.request.tokens[: chunk.request.prompt_len])
        done = llm.generate([[*start, BAD], [*start, 7], [*start, 8]], greedy)
        assert raised == [3, 1]
        assert [c.finish_reason for c in done] == ["error", "length", "length"]
        assert [c.token_ids for c in done[1:]] == [c.token_ids for c in expected]
        assert pages_add_up(llm)


def listed(given):
    """The requests, or chunks, among the arguments of a call."""
    return next(x for x in given if isinstance(x, Sequence))


# Before and after tokens are drawn and counted.
@pytest.mark.parametrize(("of", "name"), [(sampler.Sampler, "_launch"), (sampler.SampledTokens, "__init__")])
def test_row_whose_sampling_raises_ends_its_request_alone(folder, rng, monkeypatch, of, name):
    original = getattr(of, name)

    def failing(*given):
        if any(BAD in r.tokens[: r.prompt_len] and len(r.output) == 2 for r in listed(given)):
            raise OverflowError("too large")
        return original(*given)

    for _ in range(3):
        _, good = prompts(rng)
        given = [params(rng, logprobs=rng.choice((None, 1)), repetition_penalty=rng.choice((1, 1.3))) for _ in good]
        with LLM(folder, page_size=4, batch_invariant=True) as llm:
            expected = llm.generate(good, given)
            with monkeypatch.context() as patch:
                patch.setattr(of, name, failing)
                at = rng.randrange(len(good))
                bad = ([BAD, 1, 2], params(rng, max_tokens=9, logprobs=0))  # not plain
                done = llm.generate([*good[:at], bad[0], *good[at:]], [*given[:at], bad[1], *given[at:]])
            failed = done.pop(at)
            assert (failed.finish_reason, len(failed.token_ids)) == ("error", 2)
            assert failed.error == "OverflowError: too large"
            assert [c.token_ids for c in done] == [c.token_ids for c in expected]
            assert pages_add_up(llm)


@pytest.mark.parametrize("what", ["computing", "sampling"])
def test_step_that_raises_for_no_request_alone_goes_on_and_warns(folder, monkeypatch, what):
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    asked = [[1, 2, 3], [4, 5], [6]]
    with LLM(folder, page_size=4) as llm:
        expected = llm.generate(asked, greedy)
        of, name = (llm._engine.runner, "run") if what == "computing" else (sampler.Sampler, "_launch")
        original = getattr(of, name)

        def alone(*given):
            if len(listed(given)) > 1:
                raise MemoryError("too many")
            return original(*given)

        monkeypatch.setattr(of, name, alone)
        with pytest.warns(RuntimeWarning, match="none of them did alone, and they go on: MemoryError: too many"):
            done = llm.generate(asked, greedy)
        assert [c.token_ids for c in done] == [c.token_ids for c in expected]


def test_tokenizer_that_raises_ends_its_request_alone(monkeypatch):
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with LLM() as llm:
        expected = llm.generate(["import os\n", "x = 1\n"], greedy)
        at, decode = expected[0].token_ids[3], llm.model.tokenizer.decode

        def failing(tokens, **options):
            if tokens[-1] == at and tokens[-2] == expected[0].token_ids[2]:
                raise LookupError("no such token")
            return decode(tokens, **options)

        monkeypatch.setattr(llm.model.tokenizer, "decode", failing)
        parts = []
        done = llm.generate(["import os\n", "x = 1\n"], greedy, on_update=lambda i, part: parts.append((i, part.text)))
        assert done[0].finish_reason == "error"
        assert done[0].error == "LookupError: no such token"
        assert "".join(text for i, text in parts if i == 0) == done[0].text
        assert done[1].text == expected[1].text
        assert pages_add_up(llm)


def test_scheduler_that_raises_ends_all_requests_and_the_engine_goes_on(folder, monkeypatch):
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, page_size=4) as llm:
        expected = llm.generate([[1, 2, 3], [4]], greedy)
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine.scheduler, "schedule", lambda: 1 / 0)
            done = llm.generate([[1, 2, 3], [4]], greedy)
        assert [c.error for c in done] == ["ZeroDivisionError: division by zero"] * 2
        assert pages_add_up(llm)
        assert [c.token_ids for c in llm.generate([[1, 2, 3], [4]], greedy)] == [c.token_ids for c in expected]
