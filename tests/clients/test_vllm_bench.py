"""The requests of `vllm bench serve` in each of its forms that fit, as it sends and reads them."""

from __future__ import annotations

import json

import httpx
import pytest

PROMPT = "import os\n" * 20
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def events(url, body):
    """The events of a stream before the last one."""
    with httpx.stream("POST", url, json=body, headers={"x-request-id": "bench-1"}, timeout=60) as answer:
        assert answer.status_code == 200
        found = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]


def check(found, length, text_of):
    """The text of events that are what the tool counts by: one for each token or several, and the usage in the end."""
    *parts, last = found
    assert all(part["choices"] for part in parts)
    assert not last["choices"]
    assert last["usage"]["completion_tokens"] == length
    assert last["usage"]["prompt_tokens"] > 0
    assert 2 <= len(parts) <= length + 1
    return "".join(text_of(part["choices"][0]) or "" for part in parts)


@pytest.mark.parametrize("extra", [{}, {"temperature": 0, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.1}])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_openai_form_streams_all_tokens(server, logprobs, extra):
    body = {
        "model": server.name,
        "prompt": PROMPT,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": logprobs,
        "ignore_eos": True,
        **STREAMED,
        **extra,
    }
    check(events(f"{server.base_url}/completions", body), 12, lambda choice: choice["text"])
    body["prompt"] = server.llm.encode(PROMPT)
    check(events(f"{server.base_url}/completions", body), 12, lambda choice: choice["text"])


def test_openai_chat_form_streams_all_tokens(server):
    content = [{"type": "text", "text": PROMPT}]
    body = {
        "model": server.name,
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": 12,
        "ignore_eos": True,
        **STREAMED,
    }
    check(events(f"{server.base_url}/chat/completions", body), 12, lambda choice: choice["delta"].get("content"))


@pytest.mark.parametrize("inputs", [PROMPT, [PROMPT] * 3])
def test_openai_embeddings_form_has_the_tokens(server, inputs):
    body = {"model": server.name, "input": inputs, "truncate_prompt_tokens": -1}
    answer = httpx.post(f"{server.base_url}/embeddings", json=body, timeout=60).raise_for_status().json()
    count = len(inputs) if isinstance(inputs, list) else 1
    assert answer["usage"]["prompt_tokens"] == count * len(server.llm.encode(PROMPT))
    assert len(answer["data"]) == count


def test_ready_check_lists_the_model(server):
    listed = httpx.get(f"{server.base_url}/models").json()["data"]
    assert (listed[0]["id"], listed[0]["root"]) == (server.name, server.name)
