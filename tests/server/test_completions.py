"""Completions over HTTP, through the official client: their texts are those of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import re
import shutil
import subprocess
import textwrap

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from helpers.paths import ROOT
from helpers.server import served
from quire.engine import LLM, SamplingParams
from quire.server import create_app

PROMPT = "def add(a, b):\n    return"
PROMPTS = ["import os\n", PROMPT, "class Stack:\n    def push(self, item):\n", "for i in range("]


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=2000, batch_invariant=True) as llm:  # texts do not depend on the order of requests
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams(**params))[0].text


def test_completion_has_the_text_of_the_engine(llm, client):
    done = client.completions.create(model="tiny-python", prompt=PROMPT, max_tokens=12)
    assert done.choices[0].text == text(llm, PROMPT, max_tokens=12)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.prompt_tokens == len(llm.encode(PROMPT))
    assert done.usage.completion_tokens == 12
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12
    assert (
        len(client.completions.create(model="tiny-python", prompt=PROMPT, logprobs=0).choices[0].logprobs.tokens) == 16
    )


def test_completion_with_every_parameter_has_the_text_of_the_engine(llm, client):
    own = {"temperature": 1.3, "top_p": 0.9, "seed": 7, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    extra = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": [5]}
    done = client.completions.create(
        model="tiny-python", prompt=PROMPT, max_tokens=40, stop=["zzz"], extra_body=extra, **own
    )
    assert done.choices[0].text == text(llm, PROMPT, max_tokens=40, stop=["zzz"], **own, **extra)
    without = client.completions.create(model="tiny-python", prompt=PROMPT, max_tokens=40, temperature=1.3, seed=7)
    assert without.choices[0].text != done.choices[0].text


@pytest.mark.parametrize("form", ["strings", "tokens", "token lists"])
def test_completion_of_each_form_of_prompt_has_the_text_of_the_engine(llm, client, form):
    listed = [llm.encode(p) for p in PROMPTS]
    prompt = {"strings": PROMPTS, "tokens": listed[1], "token lists": listed}[form]
    done = client.completions.create(model="tiny-python", prompt=prompt, max_tokens=8)
    expected = llm.generate(PROMPTS[1:2] if form == "tokens" else PROMPTS, SamplingParams(max_tokens=8))
    assert [c.index for c in done.choices] == list(range(len(expected)))
    assert [c.text for c in done.choices] == [c.text for c in expected]


def test_completion_with_n_and_a_seed_has_n_samples_for_each_prompt(llm, client):
    done = client.completions.create(model="tiny-python", prompt=PROMPTS[:2], n=3, seed=5, temperature=1, max_tokens=10)
    own = [SamplingParams(seed=5 + i, temperature=1, max_tokens=10) for i in range(3)]
    expected = llm.generate([p for p in PROMPTS[:2] for _ in own], own * 2)
    assert [c.text for c in done.choices] == [c.text for c in expected]
    assert len({c.text for c in done.choices[:3]}) == 3
    assert done.usage.prompt_tokens == sum(len(llm.encode(p)) for p in PROMPTS[:2])
    assert done.usage.completion_tokens == sum(len(c.token_ids) for c in expected)


def test_completion_with_a_stop_string_ends_before_it(llm, client):
    whole = text(llm, PROMPT, max_tokens=24)
    stop = whole[6:9]
    done = client.completions.create(model="tiny-python", prompt=PROMPT, max_tokens=24, stop=stop)
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_completion_with_echo_begins_with_the_prompt(llm, client):
    whole = PROMPT + text(llm, PROMPT, max_tokens=5)
    for prompt in (PROMPT, llm.encode(PROMPT)):
        done = client.completions.create(model="tiny-python", prompt=prompt, max_tokens=5, echo=True)
        assert done.choices[0].text == whole
        stream = client.completions.create(model="tiny-python", prompt=prompt, max_tokens=5, echo=True, stream=True)
        assert "".join(part.choices[0].text for part in stream) == whole


def test_completion_with_echo_and_logprobs_reports_prompt_tokens(llm, client):
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2)
    names = llm.model.tokenizer.decode
    for prompt in (PROMPT, llm.encode(PROMPT)[:1]):
        expected = llm.generate([prompt], params)[0]
        tokens = expected.prompt_token_ids + expected.token_ids
        reports = expected.prompt_logprobs + expected.logprobs
        options = {"model": "tiny-python", "prompt": prompt, "max_tokens": 3, "logprobs": 2, "echo": True}
        whole = client.completions.create(**options).choices[0].logprobs
        parts = [part.choices[0].logprobs for part in client.completions.create(**options, stream=True)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(whole, name) == [value for part in parts for value in getattr(part, name)]
        assert whole.tokens == [names([token]) for token in tokens]
        assert whole.token_logprobs[0] is None
        assert whole.top_logprobs[0] is None
        chosen = [report[token] for token, report in zip(tokens[1:], reports[1:], strict=True)]
        assert whole.token_logprobs[1:] == pytest.approx(chosen, abs=1e-4)
        assert [len(top) for top in whole.top_logprobs[1:]] == [len(report) for report in reports[1:]]
        assert whole.text_offset == [len("".join(whole.tokens[:i])) for i in range(len(tokens))]


def test_completion_with_logprobs_has_those_of_the_engine(llm, client):
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=6, logprobs=3))[0]
    names = llm.model.tokenizer.decode
    options = {"model": "tiny-python", "prompt": PROMPT, "max_tokens": 6, "logprobs": 3}
    whole = client.completions.create(**options).choices[0].logprobs
    parts = [part.choices[0].logprobs for part in client.completions.create(**options, stream=True)]
    names_of_lists = ("tokens", "token_logprobs", "text_offset")
    streamed = [[value for part in parts for value in getattr(part, name)] for name in names_of_lists]
    assert [whole.tokens, whole.token_logprobs, whole.text_offset] == streamed
    assert whole.tokens == [names([token]) for token in expected.token_ids]
    assert whole.text_offset == [len("".join(whole.tokens[:i])) for i in range(6)]
    chosen = [report[token] for token, report in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert whole.token_logprobs == pytest.approx(chosen, abs=1e-4)
    for top, report in zip(whole.top_logprobs, expected.logprobs, strict=True):
        assert top == pytest.approx({names([token]): value for token, value in report.items()}, abs=1e-4)


def test_completion_stream_with_include_usage_ends_with_usage(llm, client):
    stream = client.completions.create(
        model="tiny-python", prompt=PROMPT, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].text for part in parts) == text(llm, PROMPT, max_tokens=9)
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert len(parts) > 1
    assert {part.id for part in parts} == {last.id}
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(llm.encode(PROMPT)), 9)


def test_completion_stream_events_follow_the_standard(url):
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "unknown_field": {"is": "ignored"}}
    done = httpx.post(f"{url}/v1/completions", json=body)
    assert done.headers["content-type"].startswith("text/event-stream")
    events = done.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith('data: {"id":"cmpl-') for event in events[:-2])


def test_completion_streams_at_once_have_their_own_text(llm, url, rng: random.Random):
    """More streams than the engine runs at once, of different lengths and with seeds, each against the engine."""
    prompts = [f"{rng.choice(PROMPTS)}# {rng.randrange(10**6)}\n" for _ in range(80)]
    given = [{"max_tokens": rng.randrange(1, 24), "temperature": rng.choice([0.0, 1.0]), "seed": i} for i in range(80)]
    expected = [c.text for c in llm.generate(prompts, [SamplingParams(**params) for params in given])]

    async def one(client, prompt, params):
        stream = await client.completions.create(model="tiny-python", prompt=prompt, stream=True, **params)
        return "".join([part.choices[0].text async for part in stream])

    async def every():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=50) as client:
            return await asyncio.gather(*(one(client, p, g) for p, g in zip(prompts, given, strict=True)))

    assert asyncio.run(every()) == expected


def test_generation_read_late_has_one_part_per_completion(llm):
    """A reader that comes after the end gets each completion in one part, with all of its tokens and reports."""
    service = create_app(llm).state.service
    params = [SamplingParams(max_tokens=9, logprobs=1, temperature=1, seed=i) for i in range(2)]
    expected = llm.generate([PROMPT] * 2, params)

    async def late():
        generation = service.start([llm.encode(PROMPT)], params, "prompt")
        while service.running:
            await asyncio.sleep(0.01)
        return {i: part async for i, part in generation}, generation.usage()

    parts, usage = asyncio.run(late())
    assert [parts[i].text for i in range(2)] == [c.text for c in expected]
    assert [parts[i].token_ids for i in range(2)] == [c.token_ids for c in expected]
    assert [len(parts[i].logprobs) for i in range(2)] == [9, 9]
    assert usage["completion_tokens"] == 18
    assert service.metrics.late.total == 16


def guide(url):
    """The guide, with the address of a server."""
    text = (ROOT / "docs" / "guide.md").read_text()
    assert text.count("http://127.0.0.1:8000/v1") == 2
    return text.replace("http://127.0.0.1:8000", url)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_guide_curl_command_runs(llm, url):
    (command,) = re.findall("^    (curl .*)$", guide(url), re.MULTILINE)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=30)
    assert json.loads(done.stdout)["choices"][0]["text"] == text(llm, "import os\n", max_tokens=16)


def test_guide_client_program_runs(llm, url):
    code = re.search(r"^    from openai import OpenAI\n(?:(?:    .*)?\n)*", guide(url), re.MULTILINE)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(textwrap.dedent(code), {})
    assert printed.getvalue() == text(llm, "import os\n", max_tokens=32)
