"""Clients that leave, what is reported meanwhile, and the server's end."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from helpers.engines import pages_add_up, until_idle
from helpers.server import served, serving_process
from quire.engine import LLM, SamplingParams
from quire.engine.request import Request

LONG = {"prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=400, page_size=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm, metrics_prefix="vllm") as url:
        yield url


def metric(url, name):
    text = httpx.get(f"{url}/metrics").text
    return float(re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])


def until(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_releases_pages(llm, url, stream):
    with httpx.Client() as client:
        if stream:
            with client.stream("POST", f"{url}/v1/completions", json={**LONG, "n": 2, "stream": True}) as response:
                lines = response.iter_lines()  # which closes the response when it is collected
                assert next(lines).startswith("data: ")
                assert llm.stats.running == 2
                assert metric(url, "num_requests_running") == 2
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=LONG, timeout=0.5)
    until_idle(llm)
    assert pages_add_up(llm)
    assert metric(url, "kv_cache_usage_perc") == 0


def test_client_that_does_not_read_leaves_others_served(llm, url):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as client:
        body = b'{"prompt": "x", "max_tokens": 1000, "ignore_eos": true, "stream": true, "logprobs": 20}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        until(lambda: llm.stats.running == 1)
        done = httpx.post(f"{url}/v1/completions", json={"prompt": "import os\n", "max_tokens": 8})
        assert done.json()["choices"][0]["text"] == llm.generate("import os\n", SamplingParams(max_tokens=8))[0].text
    until_idle(llm)
    assert pages_add_up(llm)


def test_metrics_after_completions_count_tokens_and_hits(llm, url):
    names = ("generation_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
    before = [metric(url, name) for name in names]
    hits, queries = metric(url, "prefix_cache_hits_total"), metric(url, "prefix_cache_queries_total")
    prompt = list(range(100, 150))
    for _ in range(2):
        done = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 7, "ignore_eos": True})
    assert [metric(url, name) - b for name, b in zip(names, before, strict=True)] == [14, 2, 12]
    assert metric(url, "prefix_cache_queries_total") - queries == 100
    assert metric(url, "prefix_cache_hits_total") - hits == 48
    assert done.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


def test_tokenize_and_detokenize_equal_the_tokenizer(llm, url):
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "def f(x):"}).json()
    assert tokens == {"tokens": llm.encode("def f(x):"), "count": len(tokens["tokens"]), "max_model_len": llm.max_len}
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "def f(x):"}
    assert httpx.post(f"{url}/detokenize", json={"tokens": [4096]}).json()["error"]["param"] == "tokens"
    assert httpx.post(f"{url}/tokenize", json={}).json()["error"]["param"] == "prompt"


def test_server_info_has_model_stats_and_paths(llm, url):
    info = httpx.get(f"{url}/server_info").json()
    assert (info["model"], info["max_model_len"], info["chat"]) == ("tiny-python", llm.max_len, False)
    assert info["stats"]["pages"] == 400
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/metrics"} <= set(paths)


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_docs_pages_with_external_scripts_are_not_found(url, path):
    assert httpx.get(f"{url}{path}").status_code == 404


def test_failed_completion_is_answered_500_and_the_next_succeeds(llm, url, monkeypatch):
    push = Request.push

    def broken(request, *given):
        if len(request.output) == 2:
            raise RuntimeError("broken")
        return push(request, *given)

    monkeypatch.setattr(Request, "push", broken)
    done = httpx.post(f"{url}/v1/completions", json=LONG)
    assert (done.status_code, done.json()["error"]["code"]) == (500, "engine_error")
    streamed = httpx.post(f"{url}/v1/completions", json={**LONG, "stream": True})
    *_, error, end, _ = streamed.text.split("\n\n")
    assert "RuntimeError: broken" in error
    assert end == "data: [DONE]"
    monkeypatch.undo()
    assert httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 5}).status_code == 200
    until_idle(llm)
    assert pages_add_up(llm)


def test_closed_engine_is_answered_503():
    with LLM(num_pages=50) as llm, served(llm) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.head(f"{url}/health").status_code == 200
        llm.close()
        assert httpx.head(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 503
        done = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (done.status_code, done.json()["error"]["code"]) == (503, "unavailable")
        assert "Retry-After" in done.headers


def test_sigterm_answers_every_request():
    """Short completions finish in the grace time, and long ones end with an error, streamed or not."""

    async def load(process, url):
        async with httpx.AsyncClient(timeout=60) as client:
            long = [{**LONG, "max_tokens": 2000, "stream": i % 2 == 0} for i in range(20)]
            short = [{**LONG, "max_tokens": 30} for _ in range(10)]
            sent = [asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body)) for body in short + long]
            while 'num_requests_running{model_name="tiny"} 30' not in (await client.get(f"{url}/metrics")).text:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*sent)

    arguments = ("--grace", "4", "--served-model-name", "tiny", "--num-pages", "8000")
    with serving_process(*arguments, QUIRE_API_KEY="") as (process, url):
        answers = asyncio.run(load(process, url))
        assert process.wait(20) == 0
    assert [a.status_code for a in answers[:10]] == [200] * 10
    for answer in answers[10::2]:
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"code": "unavailable"' in answer.text.replace('":"', '": "')
    assert [a.status_code for a in answers[11::2]] == [503] * 10


@pytest.mark.slow
def test_serve_with_a_key_in_the_environment_demands_it():
    with serving_process("--num-pages", "20", QUIRE_API_KEY="secret") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
