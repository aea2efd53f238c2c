"""What the server refuses, in OpenAI's form, and who may use it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from helpers.server import served
from quire.engine import LLM
from quire.server import ServerLimits, create_app

LIMITS = ServerLimits(
    max_token_ids=7,
    max_body=50_000,
    max_queue=3,
    max_n=3,
    max_tokens=500,
    max_stop=2,
    max_stop_length=10,
    body_timeout=1,
)


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=200, max_num_seqs=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm, limits=LIMITS) as url:
        yield url


@pytest.fixture(scope="module")
def guarded(llm):
    with served(llm, api_key="secret", allowed_origins=["http://page"], metrics_prefix="vllm") as url:
        yield url


BAD = [
    ({"prompt": None}, "prompt", "prompt must be a string, a list of token ids"),
    ({"prompt": {"a": 1}}, "prompt", "prompt must be a string, a list of token ids"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is empty"),
    ({"prompt": ["x", ""]}, "prompt", "prompt 1 is empty"),
    ({"prompt": [1, 4096]}, "prompt", "token 4096: tokens are 0 to 4095"),
    ({"prompt": [1, -1], "echo": True}, "prompt", "token -1: tokens are 0 to 4095"),
    ({"prompt": [10**9], "echo": True}, "prompt", "token 1000000000"),
    ({"prompt": "\ud800"}, "prompt", "is half a character"),
    ({"prompt": [1] * 2048, "max_tokens": None}, "prompt", "maximum context length is 2048"),
    ({"prompt": [1] * 1800, "max_tokens": 300}, "max_tokens", "1800 tokens and max_tokens is 300"),
    ({"prompt": ["x"] * 6}, "prompt", "prompt has 6 elements: this server holds 5 completions"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens = -1"),
    ({"max_tokens": 501}, "max_tokens", "this server allows 500"),
    ({"max_tokens": "many"}, "max_tokens", "valid integer"),
    ({"n": 0}, "n", "from 1 to 3"),
    ({"n": 4}, "n", "from 1 to 3"),
    ({"temperature": -0.5}, "temperature", "temperature = -0.5: it must be a number, 0 or larger"),
    ({"temperature": float("nan")}, "temperature", "temperature = nan"),
    ({"top_p": 0}, "top_p", "top_p = 0"),
    ({"top_k": -2}, "top_k", "top_k = -2"),
    ({"seed": 2**64}, "seed", "from -2**63 to 2**64 - 1"),
    ({"stop": ["a", "b", "c"]}, "stop", "stop has 3 elements: this server allows 2"),
    ({"stop": "x" * 11}, "stop", "11 characters: this server allows 10"),
    ({"stop": ""}, "stop", "non-empty strings"),
    ({"stop": 5}, "stop", "stop must be a string"),
    ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "stop_token_ids has 3 elements"),
    ({"allowed_token_ids": [1] * 8}, "allowed_token_ids", "allowed_token_ids has 8 elements: this server allows 7"),
    ({"logit_bias": dict.fromkeys(range(8), 1)}, "logit_bias", "logit_bias has 8 elements: this server allows 7"),
    ({"logprobs": 21}, "logprobs", "logprobs = 21: this server reports 20"),
    ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
    ({"logprobs": False}, "logprobs", "a valid integer"),
    ({"best_of": 2}, "best_of", "best_of is not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema.schema is missing"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=lambda x: str(x)[:40])
def test_completion_with_a_wrong_field_names_it(url, fields, param, message):
    body = json.dumps({"prompt": "x", "max_tokens": 5, **fields})
    done = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = done.json()["error"]
    assert done.status_code == 400, done.text
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"prompt": "x"', b"[" * 20_000, b'{"prompt": "x", "seed": %s}']
)
def test_body_that_is_no_json_object_is_refused(url, body):
    body = body % (b"1" * 5000) if b"%s" in body else body
    done = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert done.status_code == 400
    assert set(done.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/other", 404)],
)
def test_errors_of_paths_and_methods_have_the_form_of_others(url, method, path, status):
    done = httpx.request(method, url + path)
    assert done.status_code == status
    assert set(done.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_model_is_not_found(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            client.chat.completions.create(model="tiny-python", messages=[{"role": "user", "content": "x"}])


def test_body_beyond_max_body_is_refused_with_and_without_length(url):
    done = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 60_000})
    assert (done.status_code, done.json()["error"]["code"]) == (413, "body_too_large")
    done = httpx.post(f"{url}/v1/completions", content=iter([b"x" * 30_000] * 2))
    assert done.status_code == 413


def test_content_length_with_leading_zeros_is_accepted(llm):
    """By the application alone, as not all servers that can run it refuse such a length."""

    async def post():
        transport = httpx.ASGITransport(create_app(llm))
        headers = {"Content-Type": "application/json", "Content-Length": "0" * 5000 + "15"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)

    assert asyncio.run(post()).json()["count"] == 1


def test_incomplete_body_is_answered_408(url):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as client:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        )
        client.sendall(head.encode() + b'{"prompt"')
        client.settimeout(10)
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_full_queue_is_answered_429(url):
    """Five completions fill two places of the engine and three of the queue."""
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.Client() as client:
        streams = [client.stream("POST", f"{url}/v1/completions", json=body) for _ in range(5)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        refused = client.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "quire:num_rejected_total" in client.get(f"{url}/metrics").text
        for stream in streams:
            stream.__exit__(None, None, None)
        end = time.monotonic() + 10
        while (done := client.post(f"{url}/v1/completions", json={"prompt": "x", "n": 3})).status_code == 429:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert done.status_code == 200


def test_api_key_is_demanded_but_for_health_and_documents(guarded):
    for path in ("/v1/models", "/metrics", "/server_info", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            done = httpx.get(guarded + path, headers=headers)
            assert (done.status_code, done.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.post(f"{guarded}/v1/completions", json={"prompt": "x"}).status_code == 401
    for scheme in ("Bearer", "bearer", "BEARER", "Bearer "):
        assert httpx.get(f"{guarded}/v1/models", headers={"Authorization": f"{scheme} secret"}).status_code == 200
    for wrong in ("Basic secret", "secret", "bearer", "bearer secret x", "bearersecret", "bearer SECRET"):
        assert httpx.get(f"{guarded}/v1/models", headers={"Authorization": wrong}).status_code == 401
    for path in ("/health", "/ping", "/openapi.json"):
        assert httpx.get(guarded + path).status_code == 200
    with openai.OpenAI(base_url=f"{guarded}/v1", api_key="secret", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny-python"]
        assert client.models.retrieve("tiny-python").id == "tiny-python"
        assert client.completions.create(model="tiny-python", prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_other_origins_are_refused_unless_allowed(url, guarded):
    ask = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(f"{url}/v1/completions", headers=ask).headers
    allowed = httpx.options(f"{guarded}/v1/completions", headers=ask)
    assert allowed.headers["access-control-allow-origin"] == "http://page"
    other = httpx.options(f"{guarded}/v1/completions", headers={**ask, "Origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers


def test_server_without_fastapi_names_the_extra():
    code = "import sys; sys.modules['fastapi'] = None\nfrom quire.server import create_app"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'quire-attention[server]'" in done.stderr.splitlines()[-1]


def test_create_app_with_a_wrong_option_names_it(llm):
    with pytest.raises(ValueError, match="the API key"):
        create_app(llm, api_key="")
    with pytest.raises(ValueError, match="metrics_prefix = 'a b'"):
        create_app(llm, metrics_prefix="a b")
    with pytest.raises(ValueError, match="max_n = 0: it must be above 0"):
        ServerLimits(max_n=0)
    with pytest.raises(ValueError, match="max_queue = -1: it must be 0 or larger"):
        ServerLimits(max_queue=-1)


def test_n_beyond_what_the_server_holds_is_answered_400_with_its_field(llm):
    with served(llm, limits=ServerLimits(max_queue=3)) as url:
        done = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "n": 6})
    error = done.json()["error"]
    assert (done.status_code, error["param"]) == (400, "n")
    assert error["message"] == "the request is for 6 completions: this server holds 5 at most"
