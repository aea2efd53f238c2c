"""Reasoning apart from the content of chats over HTTP, and Transformers' own parsing of outputs."""

from __future__ import annotations

import json
from contextlib import contextmanager

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import openai

from helpers.chats import chatting, saying
from helpers.server import served
from quire.engine import LLM

MESSAGES = [{"role": "user", "content": "Why?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1, 2]}}}}}
ANALYSIS = "<|channel|>analysis<|message|>Hm. < so.<|end|><|start|>assistant"
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "form", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
# Of each format: reasoning, content after it, and a call after it, as a model writes them.
WRITTEN = {
    "hermes": (
        "<think>\nHm. < so.\n</think>\n\n",
        "{}",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    ),
    "gpt_oss": (
        ANALYSIS,
        "<|channel|>final<|message|>{}",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
    ),
}
RESPONSE_TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@pytest.fixture(scope="module", params=WRITTEN)
def llm(request, tmp_path_factory):
    folder = chatting(tmp_path_factory.mktemp("checkpoints") / request.param, request.param)
    with LLM(folder, num_pages=600, max_model_len=1024) as llm:
        yield llm


@contextmanager
def connected(llm, **options):
    with served(llm, **options) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(llm):
    with connected(llm) as client:
        yield client


def chat(client, messages=MESSAGES, **options):
    return client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, **options)


def answer(client, **options):
    """The reasoning, the content, the calls and the end of an answer, which are the same if it is streamed."""
    choice = chat(client, **options).choices[0]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, "reasoning_content", None)
    parts = [part.choices[0] for part in chat(client, stream=True, **options)]
    assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
    assert "".join(getattr(part.delta, "reasoning_content", None) or "" for part in parts) == (reasoning or "")
    assert sum(len(part.delta.tool_calls or ()) for part in parts) == len(calls)
    assert parts[-1].finish_reason == choice.finish_reason
    return reasoning, choice.message.content, calls, choice.finish_reason


def test_chat_reasoning_is_apart_from_content(llm, client):
    reasoning, content, _ = WRITTEN[llm.name]
    with saying(llm, reasoning + content.replace("{}", "Yes.\n\n Or no.")):
        assert answer(client) == ("Hm. < so.", "Yes.\n\n Or no.", [], "stop")
    with saying(llm, content.replace("{}", "Yes.")):
        assert answer(client) == (None, "Yes.", [], "stop")
    with saying(llm, reasoning):
        assert answer(client)[:2] == ("Hm. < so.", "")


def test_chat_demanded_call_may_follow_reasoning(llm, client):
    """The grammar allows what the format's models write."""
    reasoning, _, call = WRITTEN[llm.name]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        for before, expected in ((reasoning, "Hm. < so."), ("", None)):
            with saying(llm, before + call):
                done = answer(client, tools=[TOOL], tool_choice=choice)
            assert done == (expected, None, [("f", {"a": 1})], "tool_calls")


def test_chat_response_format_may_follow_reasoning(llm, client):
    reasoning, content, call = WRITTEN[llm.name]
    for tools in ({}, {"tools": [TOOL]}):
        for before, expected in ((reasoning, "Hm. < so."), ("", None)):
            with saying(llm, before + content.replace("{}", '{"a": 7}')):
                assert answer(client, response_format=FORM, **tools) == (expected, '{"a": 7}', [], "stop")
    with saying(llm, reasoning + call):
        done = answer(client, response_format=FORM, tools=[TOOL])
    assert done == ("Hm. < so.", None, [("f", {"a": 1})], "tool_calls")
    with saying(llm, reasoning + content.replace("{}", "text")), pytest.raises(openai.InternalServerError):
        chat(client, response_format=FORM)


def test_chat_forms_that_are_not_json_have_no_reasoning(client):
    done = chat(client, extra_body={"structured_outputs": {"regex": "<think>[ab]</think>"}}).choices[0].message
    assert done.content in ("<think>a</think>", "<think>b</think>")
    assert not hasattr(done, "reasoning_content")


def test_chat_reasoning_format_none_leaves_it_in_the_content(llm):
    text = "<think>\nHm.\n</think>\n\nYes." if llm.name == "hermes" else "Yes."
    with connected(llm, reasoning_format="none") as client, saying(llm, text):
        assert answer(client)[:2] == (None, text)


def test_chat_reasoning_that_the_prompt_begins_is_read(llm, client):
    """`reasoning_effort` reaches the template, which opens the reasoning then."""
    if llm.name != "hermes":
        pytest.skip("the template of harmony begins no reasoning")
    with saying(llm, "Hm.\n</think>\n\nYes."):
        assert answer(client, reasoning_effort="low")[:2] == ("Hm.", "Yes.")
        assert answer(client)[:2] == (None, "Hm.\n</think>\n\nYes.")
        closed = {"chat_template_kwargs": {"thinks": False}}
        assert answer(client, extra_body=closed)[:2] == (None, "Hm.\n</think>\n\nYes.")
    with saying(llm, 'Hm.\n</think>\n\n{"a": 7}'):
        assert answer(client, reasoning_effort="low", response_format=FORM)[:2] == ("Hm.", '{"a": 7}')


def test_chat_reasoning_that_the_continued_message_begins_is_read(llm, client):
    if llm.name != "hermes":
        pytest.skip("the template of harmony has reasoning in a field of its own")
    options = {"add_generation_prompt": False, "continue_final_message": True}

    def continued(content, **given):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        return answer(client, messages=messages, extra_body=options, **given)[:2]

    with saying(llm, " think.\n</think>\n\nHello"):
        assert continued("<think>\nI should") == ("think.", "Hello")
        assert continued("<think>\nI should</think>") == (None, " think.\n</think>\n\nHello")
    with saying(llm, ' think.\n</think>\n\n{"a": 7}'):
        assert continued("<think>\nI should", response_format=FORM) == ("think.", '{"a": 7}')


def test_chat_stream_has_one_line_for_each_event_whatever_the_text(llm, client):
    """Some clients split streams at the line ends of Unicode."""
    root, text = str(client.base_url), "a\u2028b\x85c\u2029d"
    body = {"model": client.models.list().data[0].id, "messages": MESSAGES, "stream": True}
    with saying(llm, WRITTEN[llm.name][1].replace("{}", text)):
        lines = httpx.post(f"{root}chat/completions", json=body, timeout=60).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == text
        body = {"model": body["model"], "input": "Why?", "stream": True}
        lines = httpx.post(f"{root}responses", json=body, timeout=60).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert len(events) == len([line for line in lines if line.startswith("event: ")])
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text


def test_chat_reasoning_of_history_is_rendered_by_gpt_oss(llm, client):
    if llm.name != "gpt_oss":
        pytest.skip("the other template shows none")
    root = str(client.base_url).removesuffix("/v1/")
    history = [*MESSAGES, {"role": "assistant", "content": "Yes.", "reasoning_content": "Because."}]
    tokens = httpx.post(f"{root}/tokenize", json={"messages": history}).json()["tokens"]
    shown = httpx.post(f"{root}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "<|channel|>analysis<|message|>Because.<|end|>" in shown


def test_chat_response_template_of_the_tokenizer_is_read_by_transformers(tmp_path):
    folder = chatting(tmp_path / "model", "unknown")
    with LLM(folder, num_pages=600) as llm:
        llm.model.tokenizer.response_template = RESPONSE_TEMPLATE
        with connected(llm) as client:
            with saying(llm, '<think>\nHm.\n</think>\n I call.\n<call f>{"a": 1}</call>\n<call f>{"a": 2}</call>'):
                calls = [("f", {"a": 1}), ("f", {"a": 2})]
                assert answer(client, tools=[TOOL]) == ("Hm.", "I call.", calls, "tool_calls")
            with saying(llm, "Yes, <call> me"):
                assert answer(client, tools=[TOOL]) == (None, "Yes, <call> me", [], "stop")
            with saying(llm, "<call f>{broken</call> and"):
                assert answer(client, tools=[TOOL])[1] == "<call f>{broken</call> and"
            done = chat(client, tools=[TOOL], tool_choice="required", max_tokens=500).choices[0]
            assert done.finish_reason == "length" or done.message.tool_calls
