"""Chats over HTTP, with a small template, through the official client."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from helpers.checkpoints import with_chat_template
from helpers.server import served
from quire.engine import LLM, SamplingParams

JSON = {"Content-Type": "application/json"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if shout %}# LOUD\n{% endif %}"
    "{% if add_generation_prompt %}# answer:{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
TEXT = "# system: Be short.\n# user: Why?\n# answer:"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = with_chat_template(tmp_path_factory.mktemp("checkpoints") / "chatty", TEMPLATE)
    with LLM(folder, num_pages=500, max_model_len=128, batch_invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_messages_are_answered_by_the_completion_of_their_rendered_text(llm, client):
    done = client.chat.completions.create(model="chatty", messages=MESSAGES, max_completion_tokens=12)
    expected = llm.generate(TEXT, SamplingParams(max_tokens=12))[0]
    assert done.choices[0].message.content == expected.text
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "length"
    assert done.usage.prompt_tokens == len(llm.encode(TEXT))


def test_chat_without_max_tokens_may_fill_the_context(llm, client):
    done = client.chat.completions.create(model="chatty", messages=MESSAGES, stop="\n\n")
    assert done.choices[0].message.content == llm.generate(TEXT, SamplingParams(max_tokens=None, stop="\n\n"))[0].text


def test_chat_stream_begins_with_the_role_and_ends_with_usage(llm, url):
    expected = llm.generate([TEXT] * 2, [SamplingParams(max_tokens=10, temperature=1, seed=3 + i) for i in range(2)])

    async def stream():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="chatty", messages=MESSAGES, max_tokens=10, temperature=1, seed=3, n=2, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            return [part async for part in stream]

    *parts, last = asyncio.run(stream())
    for i in range(2):
        own = [part.choices[0] for part in parts if part.choices[0].index == i]
        assert [c.delta.role for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(c.delta.content or "" for c in own) == expected[i].text
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
    assert last.usage.completion_tokens == 20


def test_chat_top_logprobs_reports_as_many_tokens(llm, client):
    done = client.chat.completions.create(
        model="chatty", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
    )
    expected = llm.generate(TEXT, SamplingParams(max_tokens=4, logprobs=2))[0]
    content = done.choices[0].logprobs.content
    assert "".join(c.token for c in content) == expected.text
    for one, token, report in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(report[token], abs=1e-4)
        assert bytes(one.bytes).decode() == one.token
        assert [t.logprob for t in one.top_logprobs] == pytest.approx(list(report.values())[:2], abs=1e-4)


def test_tokenize_messages_in_parts_with_template_arguments_gives_the_rendered_tokens(llm, url):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    body = {"messages": messages, "chat_template_kwargs": {"shout": True}, "add_generation_prompt": False}
    tokens = httpx.post(f"{url}/tokenize", json=body).json()
    assert tokens["tokens"] == llm.encode("# user: a\nb\n# LOUD\n")
    assert tokens["count"] == len(tokens["tokens"])


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"content": "x"}]}, "messages", "messages.0.role: Field required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "the chat template refuses"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "messages", "context length is 128"),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages", "half a character"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", ""),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "must not have 'tokenize'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not have 'messages'"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "this server reports 20 at most"),
        ({"response_format": {"type": "xml"}}, "response_format", "it must be 'text', 'json_object' or 'json_schema'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function is missing"),
    ],
)
def test_chat_wrong_field_is_answered_400_with_its_name(url, change, param, message):
    done = httpx.post(f"{url}/v1/chat/completions", content=json.dumps({"messages": MESSAGES, **change}), headers=JSON)
    error = done.json()["error"]
    assert done.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
