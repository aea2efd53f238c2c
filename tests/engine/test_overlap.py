"""Steps that are launched before the host knows the tokens of the step before: the results are those of steps that are
read at once, whatever arrives, ends, is cancelled, is preempted or raises in between.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
from dataclasses import replace
from statistics import median

import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import VOCAB, save
from helpers.engines import captured_on_the_host, pages_add_up, same, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.engine.sampler import SampledTokens, Sampler

SIZES = {"page_size": 4, "num_pages": 16, "max_num_seqs": 12, "max_batched_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(13)
    return save("llama", tmp_path_factory.mktemp("llama"))


def random_params(rng, **more):
    """Parameters of all kinds, with a seed, so that a request's tokens do not depend on when it runs."""
    options = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": rng.randrange(1000)},
        {"temperature": 0.7, "seed": rng.randrange(1000), "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": rng.randrange(1000), "presence_penalty": 1.0, "logprobs": rng.randrange(4)},
        {"temperature": 0, "logit_bias": {rng.randrange(VOCAB): 5.0 for _ in range(5)}, "min_tokens": 1},
        {"temperature": 1.0, "seed": rng.randrange(1000), "allowed_token_ids": rng.sample(range(VOCAB), 40)},
    ]
    ends = {"max_tokens": rng.randint(1, 20), "stop_token_ids": rng.sample(range(VOCAB), rng.choice((0, 0, 10)))}
    return SamplingParams(**{**rng.choice(options), **ends, **more})


def random_requests(rng, count):
    """Prompts of which many begin alike, and parameters. The first two begin alike for three pages, and decode side by
    side until they would have more pages than the cache, so that one of them is preempted.
    """
    starts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    prompts = [
        rng.choice(starts)[: rng.randint(1, 30)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
        for _ in range(count)
    ]
    prompts[:2] = [[rng.randrange(VOCAB) for _ in range(13)]] * 2
    params = [random_params(rng) for _ in prompts]
    params[:2] = [random_params(rng, max_tokens=40, ignore_eos=True, stop_token_ids=()) for _ in range(2)]
    return prompts, params


def set_up(llm, how):
    """Read results one step late, and perhaps compute steps from the inputs of graphs."""
    llm._engine.depth = 1
    if how == "inputs of graphs":
        captured_on_the_host(llm, max_tokens=48)


@pytest.fixture(params=["eager", "inputs of graphs"])
def how(request):
    return request.param


def read_late(folder, how, prompts, params):
    """Requests of which some are preempted, with results that are read one step late, give what they give otherwise.
    Returns the engine's counts, and its graphs.
    """
    with LLM(folder, **SIZES) as llm:
        expected = llm.generate(prompts, params)
    with LLM(folder, **SIZES) as llm:
        set_up(llm, how)
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert llm.stats.preemptions > 0
        assert llm.stats.generated_tokens == sum(len(c.token_ids) for c in done)
        same(done, expected, llm, prompts, params)
        assert pages_add_up(llm)
        return llm.stats, llm._engine.runner.step_graphs


def test_overlapping_steps_have_the_tokens_of_steps_read_at_once(folder, rng, how):
    replays = 0
    for _ in range(2):
        stats, graphs = read_late(folder, how, *random_requests(rng, 40))
        assert stats.cached_tokens > 0
        replays += graphs.replays if how != "eager" else 1
    assert replays


def test_overlapping_steps_of_plain_and_other_requests_have_equal_tokens(folder, rng, how):
    """A step of decodes has sampled as if all its requests were plain. The next one takes these tokens if they are, and
    those that replaced them if not, whatever ends, is preempted or arrives in between.
    """
    prompts, params = random_requests(rng, 40)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    for i in range(2, 40):
        if rng.random() < 0.85:
            stop = rng.sample(range(VOCAB), rng.choice((0, 10)))
            params[i] = replace(greedy, max_tokens=rng.randint(1, 20), stop_token_ids=stop)
    read_late(folder, how, prompts, params)


def test_plain_decode_beside_prompt_logprobs_has_equal_tokens(folder, how):
    """The prompt has the first row of logits, that of the first request, which has ended. No token is sampled there."""
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    params = [replace(greedy, max_tokens=2), greedy, replace(greedy, prompt_logprobs=0)]
    given = [[1], [2], [*range(3, 13)]], params
    with LLM(folder, page_size=4, max_num_seqs=3, max_batched_tokens=2) as llm:
        expected = llm.generate(*given)
        llm._engine.scheduler.tree.clear()
        set_up(llm, how)
        done = llm.generate(*given)
        until_idle(llm)
        same(done, expected, llm, *given)


def test_steps_of_plain_decodes_launch_no_sampling(folder, how):
    """Sampling is launched after the step of the prompts only. A request that is not plain has no part in that."""
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    other = replace(greedy, temperature=1.0, seed=1)
    with LLM(folder, page_size=4) as llm:
        set_up(llm, how)
        sampler, launched = llm._engine.sampler, []
        original = sampler.sample_greedy
        sampler.sample_greedy = lambda logits: (launched.append(len(logits)), original(logits))
        llm.generate([[1, 2, 3], [4, 5]], greedy)
        until_idle(llm)
        assert launched == [2] * (1 if how == "inputs of graphs" else 9)
        launched.clear()
        llm.generate([[1, 2, 3], [4, 5]], [greedy, other])
        until_idle(llm)
        assert launched == []


def test_overlapping_steps_have_the_text_and_stops_of_steps_read_at_once(rng, how):
    texts = [
        "import os\n",
        "def add(a, b):\n    return",
        "class Stack:\n    def push(self, item):\n",
        "for i in range(",
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(4, 30), stop=rng.choice(("\n", "e", ["s", "in"], ())))
        for _ in texts
    ]
    with LLM(page_size=4, num_pages=60) as llm:
        expected = llm.generate(texts, params)
        set_up(llm, how)
        parts = dict.fromkeys(range(len(texts)), "")

        def add(i, part):
            parts[i] += part.text

        done = llm.generate(texts, params, on_update=add)
        until_idle(llm)
        assert [parts[i] for i in range(len(texts))] == [c.text for c in done]
        same(done, expected, llm, texts, params)
        assert pages_add_up(llm)


@pytest.mark.slow
def test_overlapping_steps_of_1000_requests_lose_no_page(folder, rng, how):
    with LLM(folder, **{**SIZES, "num_pages": 24 if how != "eager" else 16}) as llm:  # fewer requests, fewer pages
        set_up(llm, how)
        ended = {"cancelled": 0, "length": 0, "stop": 0}
        count = 300 if how == "eager" else 1000
        prompts, params = random_requests(rng, count)

        async def one(gate, prompt, given):
            patience = rng.choice((math.inf, math.inf, 0, 1, 5))
            async with gate:
                stream, tokens = llm.stream(prompt, given), 0
                async for part in stream:
                    tokens += len(part.token_ids)
                    if part.finish_reason is None and tokens > patience:
                        break
                ended[part.finish_reason or "cancelled"] += 1
                assert part.finish_reason is None or 1 <= tokens <= given.max_tokens
                await stream.aclose()

        async def every():
            gate = asyncio.Semaphore(30)
            await asyncio.gather(*(one(gate, *pair) for pair in zip(prompts, params, strict=True)))

        asyncio.run(every())
        until_idle(llm)
        assert sum(ended.values()) == count
        assert min(ended.values()) > 0
        assert llm.stats.preemptions > 0
        assert pages_add_up(llm)


def test_request_that_ends_by_a_token_is_in_one_more_step(folder, how):
    """The ends that follow from a number are known when a step is scheduled; those from a token one step later."""
    with LLM(folder, page_size=4) as llm:
        free = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))[0]
        set_up(llm, how)
        before = llm.stats.steps
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        until_idle(llm)
        assert llm.stats.steps - before == 9
        stop = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=free.token_ids[-1:])
        length = free.token_ids.index(free.token_ids[-1]) + 1
        before = llm.stats.steps
        assert len(llm.generate([[1, 2, 3]], stop)[0].token_ids) == length
        until_idle(llm)
        assert llm.stats.steps - before == length + (length < 9)


@pytest.mark.parametrize("seconds", [0.1, 0.0])
def test_request_that_arrives_while_the_host_waits_is_in_the_next_step(folder, monkeypatch, seconds):
    """It comes 10 ms after the results of a step have been read. If the device takes 100 ms for a step, the next one is
    launched after that; otherwise the engine waits for nothing. Nor does it wait for the next request.
    """
    # A sleep of no time would give the processor to other processes, which may keep it for longer than 4 ms.
    monkeypatch.setattr(SampledTokens, "wait", lambda sampled: time.sleep(seconds) if seconds else None)
    ended = threading.Semaphore(0)
    with LLM(folder, page_size=4) as llm:
        set_up(llm, "eager")
        counts, steps, pauses = [], [], []

        def arrived(_i, part):
            steps.append(llm.stats.steps)
            ended.release()

        def decoded(_i, part):
            counts.append(len(part.token_ids))
            pauses.append(llm._engine._pause)
            if sum(counts) == 5:
                steps.append(llm.stats.steps)
                arrive = lambda: llm.start([[4, 5, 6]], SamplingParams(max_tokens=1), arrived)  # noqa: E731
                threading.Timer(0.01, arrive).start()
            if part.finish_reason:
                ended.release()

        llm.start([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), decoded)
        assert all(ended.acquire(timeout=20) for _ in range(2))
        until_idle(llm)
        busy = median(pauses)  # a stalled step of a loaded machine looks like one that takes long on the device
        llm.start([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), decoded)
        assert ended.acquire(timeout=20)
        assert pauses[-2] == 0.0  # before its first token
    if seconds == 0.0:
        assert busy == 0.0
    else:
        assert seconds / 2 <= busy < 5 * seconds
        # When the arrival's token was read, its step and the one after it had been launched.
        assert steps[1] - steps[0] == 2


@pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5, 8])
def test_prompt_that_continues_an_output_finds_its_pages(folder, how, prompt_len):
    with LLM(folder, page_size=4) as llm:
        set_up(llm, how)
        prompt = list(range(1, 1 + prompt_len))
        done = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=11, ignore_eos=True))[0]
        until_idle(llm)
        longer = [*prompt, *done.token_ids, 7]
        again = llm.generate([longer], SamplingParams(temperature=0, max_tokens=1))[0]
        # The last token of the first request was not computed.
        assert again.num_cached_tokens == (len(longer) - 2) // 4 * 4


def test_overlapping_step_that_raises_ends_the_request_that_caused_it(folder, rng):
    bad = VOCAB - 1
    for _ in range(3):
        prompts, params = random_requests(rng, 12)
        prompts = [[t for t in p if t != bad] or [1] for p in prompts]
        with LLM(folder, **{**SIZES, "num_pages": 200}) as llm:
            expected = llm.generate(prompts, params)
            llm._engine.scheduler.tree.clear()
            set_up(llm, "eager")
            run, raised = llm._engine.runner.run, []

            def failing(chunks, *given, run=run, raised=raised):
                if any(c.request.tokens[0] == bad and c.start <= 3 < c.start + c.count for c in chunks):
                    raised.append(len(chunks))
                    raise ArithmeticError("spoilt")
                return run(chunks, *given)

            llm._engine.runner.run = failing
            assert bad not in {p[0] for p in prompts}
            at = rng.randrange(len(prompts))
            given = random_params(rng, max_tokens=9, ignore_eos=True, stop_token_ids=())
            done = llm.generate([*prompts[:at], [bad, 1], *prompts[at:]], [*params[:at], given, *params[at:]])
            until_idle(llm)
            failed = done.pop(at)
            assert (failed.finish_reason, failed.error) == ("error", "ArithmeticError: spoilt")
            assert raised
            same(done, expected, llm, prompts, params)
            assert pages_add_up(llm)


def test_overlapping_logits_that_are_not_finite_end_their_request_late(folder, how):
    prompts = [[1, 2, 3], [9, 8, 7, 6], [4, 5]]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(folder, page_size=4) as llm:
        good = llm.generate(prompts, greedy)
        set_up(llm, how)
        with torch.inference_mode():
            llm.model.network.get_input_embeddings().weight[9] = torch.nan
        llm._engine.scheduler.tree.clear()
        done = llm.generate(prompts, greedy)
        assert done[1].finish_reason == "error"
        assert "not finite" in done[1].error
        for i in (0, 2):
            if 9 not in good[i].token_ids:
                assert done[i].token_ids == good[i].token_ids
        until_idle(llm)
        assert pages_add_up(llm)


def test_sampling_that_raises_for_all_goes_on_row_by_row(folder, rng, monkeypatch):
    from quire import sampling

    prompts, params = random_requests(rng, 10)
    with LLM(folder, **SIZES) as llm:
        expected = llm.generate(prompts, params)
        set_up(llm, "eager")
        sample = sampling.sample

        def failing(logits, *given, **more):
            if len(logits) > 1 and rng.random() < 0.5:
                raise MemoryError("too many")
            return sample(logits, *given, **more)

        monkeypatch.setattr(sampling, "sample", failing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = llm.generate(prompts, params)
            until_idle(llm)
            same(done, expected, llm, prompts, params)


def test_repeated_steps_after_sampling_raised_have_equal_tokens(folder, rng, how, monkeypatch):
    """The tokens of the step after it are those that the host has sampled, not those that the device had before."""
    prompts = [[rng.randrange(1, VOCAB) for _ in range(3)] for _ in range(5)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(folder, page_size=4) as llm:
        expected = llm.generate(prompts, greedy)
        set_up(llm, how)
        launch, raised = Sampler._launch, []

        def failing(self, logits, requests, *rest):
            if len(requests) > 1 and rng.random() < 0.3:
                raised.append(len(requests))
                raise MemoryError("too many")
            return launch(self, logits, requests, *rest)

        monkeypatch.setattr(Sampler, "_launch", failing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = llm.generate(prompts, greedy)
            until_idle(llm)
        assert raised
        same(done, expected, llm, prompts, [greedy] * len(prompts))


def test_steps_overlap_on_a_gpu_with_runners_that_support_it(folder):
    with LLM(folder) as llm:
        assert llm._engine.depth == 0
        assert Engine(llm._engine.runner, 4, 16, depth=1).depth == 1
        assert llm._engine.runner.step_graphs is None
