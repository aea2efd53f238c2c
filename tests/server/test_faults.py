"""Faults inside the server and the engine, seen by clients: what fails ends alone, and nothing of it stays."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections import Counter

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from helpers.engines import pages_add_up, until_idle
from helpers.paths import ROOT
from helpers.server import served, serving_process
from quire.engine import LLM, SamplingParams
from quire.engine.request import Request
from quire.server.service import Generation

BAD = 4000  # a token that only bad prompts have


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=40, page_size=8, batch_invariant=True) as llm:  # texts do not depend on what fails beside
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm) as url:
        yield url


def streamed(answer):
    """The text of a stream, and the error at its end, if there is one."""
    *events, done, end = answer.text.split("\n\n")
    assert (answer.status_code, done, end) == (200, "data: [DONE]", "")
    bodies = [json.loads(event.removeprefix("data: ")) for event in events]
    error = bodies.pop()["error"] if "error" in bodies[-1] else None
    return "".join(body["choices"][0]["text"] for body in bodies), error


async def posted(url, bodies):
    """The answers to requests that are made at once; exceptions are answers, too."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        posts = [client.post(f"{url}/v1/completions", json=body) for body in bodies]
        return await asyncio.gather(*posts, return_exceptions=True)


def random_requests(rng, count, longest):
    bodies = []
    for i in range(count):
        prompt = [rng.randrange(100, BAD) for _ in range(rng.randint(1, 12))]
        drawn = {"temperature": rng.choice([0.0, 1.0]), "seed": i, "max_tokens": rng.randint(2, longest)}
        bodies.append({"prompt": prompt, "ignore_eos": True, "stream": rng.random() < 0.5, **drawn})
    return bodies


def expected_texts(llm, bodies):
    names = ("temperature", "seed", "max_tokens", "ignore_eos")
    params = [SamplingParams(**{name: body[name] for name in names}) for body in bodies]
    done = llm.generate([body["prompt"] for body in bodies], params)
    return [completion.text for completion in done]


def text_of(answer, body):
    return streamed(answer) if body["stream"] else (answer.json()["choices"][0]["text"], None)


def test_request_that_raises_in_a_step_ends_alone(llm, url, rng, monkeypatch):
    good = random_requests(rng, 20, 20)
    expected = expected_texts(llm, good)
    bad = [{"prompt": [5, BAD, i], "max_tokens": 9, "stream": i % 2 == 0} for i in range(4)]
    run, steps = llm._engine.runner.run, []

    def failing(chunks, *given):
        failed = any(BAD in chunk.request.tokens[:2] and len(chunk.request.tokens) > 3 for chunk in chunks)
        steps.append((failed, len(chunks)))
        if failed:  # after the first token
            raise ArithmeticError("spoilt")
        return run(chunks, *given)

    monkeypatch.setattr(llm._engine.runner, "run", failing)
    answers = asyncio.run(posted(url, [*good[:10], *bad, *good[10:]]))
    assert any(failed and size > 4 for failed, size in steps)  # others were in the step
    spoilt = answers[10:14]
    del answers[10:14]
    for answer, body in zip(spoilt, bad, strict=True):
        error = streamed(answer)[1] if body["stream"] else answer.json()["error"]
        assert body["stream"] or answer.status_code == 500
        assert (error["code"], error["type"]) == ("engine_error", "server_error")
        assert "ArithmeticError: spoilt" in error["message"]
    assert [text_of(a, b) for a, b in zip(answers, good, strict=True)] == [(text, None) for text in expected]
    until_idle(llm)
    assert pages_add_up(llm)


@pytest.mark.slow
def test_requests_beyond_the_pool_wait_and_none_is_refused(llm, url, rng):
    """18 requests for up to 14 of the 40 pages each."""
    bodies = random_requests(rng, 18, 100)
    expected, before = expected_texts(llm, bodies), llm.stats.preemptions
    answers = asyncio.run(posted(url, bodies))
    assert llm.stats.preemptions > before
    assert [text_of(a, b) for a, b in zip(answers, bodies, strict=True)] == [(text, None) for text in expected]
    until_idle(llm)
    assert pages_add_up(llm)
    too_long = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 400})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_requests_that_end_or_are_left_leave_no_objects(llm, url, rng):
    async def left(bodies):
        async with httpx.AsyncClient(timeout=60) as client:
            for body in bodies:
                async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
                    await anext(answer.aiter_lines())
            with pytest.raises(httpx.ReadTimeout):
                await client.post(f"{url}/v1/completions", json=bodies[0], timeout=0.05)

    for _ in range(4):
        asyncio.run(posted(url, random_requests(rng, 20, 6)))
        asyncio.run(left([{"prompt": "x", "max_tokens": 300, "ignore_eos": True}] * 5))
        asyncio.run(posted(url, [{"prompt": "x", "n": 0}, {"prompt": [1, -1]}, {"prompt": "x", "max_tokens": 400}]))
        until_idle(llm)
    assert pages_add_up(llm)
    gc.collect()
    alive = Counter(type(x) for x in gc.get_objects())
    assert max(alive[Request], alive[Generation]) <= 20  # of more than 100: those of the last steps
    assert alive[asyncio.Task] < 10


@pytest.mark.slow
def test_sigkill_closes_connections_and_a_new_server_serves(rng):
    bodies = [
        {"prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True, "stream": i % 2 == 0} for i in range(20)
    ]

    async def load(process, url):
        sent = asyncio.ensure_future(posted(url, bodies))
        async with httpx.AsyncClient() as client:
            while (await client.get(f"{url}/server_info")).json()["stats"]["running"] < 20:
                assert not sent.done(), await sent
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        return await sent

    with serving_process("--num-pages", "3000", QUIRE_API_KEY="") as (process, url):
        answers = asyncio.run(load(process, url))
        assert process.wait(20) == -signal.SIGKILL
    assert all(isinstance(answer, httpx.TransportError) for answer in answers)
    port = url.rpartition(":")[2]
    with serving_process("--num-pages", "100", "--port", port, QUIRE_API_KEY="") as (process, again):
        assert again == url
        done = httpx.post(f"{url}/v1/completions", json={"prompt": "import os\n", "max_tokens": 4})
        assert done.json()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_soak_with_random_clients_finds_no_failure(tmp_path, rng):
    """The tool whose figures the documents have, for a shorter time and with fewer clients."""
    pytest.importorskip("schemathesis")
    out = tmp_path / "result.json"
    options = ["--streams", "40", "--clients", "8", "--minutes", "0.5", "--examples", "5", "--out", str(out)]
    options += ["--seed", str(rng.randrange(1 << 32))]
    command = [
        sys.executable,
        str(ROOT / "tools" / "soak.py"),
        "streams",
        "ends",
        "kills",
        "random",
        "openapi",
        *options,
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "QUIRE_API_KEY": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["runs"]["random"]["actions"] > 50
