"""/v1/responses through the official client."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import openai
from pydantic import BaseModel

from helpers.chats import chatting, saying
from helpers.server import served
from quire.engine import LLM
from quire.engine.request import Request
from quire.server import EngineClient
from quire.server.response_api import endpoint

JSON = {"Content-Type": "application/json"}
MODEL = "hermes"
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = f"<think>\nHm.\n</think>\n\nI look.\n{CALLED}"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    "strict": True,
}


class City(BaseModel):
    """What the client parses."""

    city: str


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = chatting(tmp_path_factory.mktemp("checkpoints") / MODEL, MODEL)
    with LLM(folder, num_pages=800, max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def shown(url, **fields):
    """What the template makes of a chat."""
    tokens = httpx.post(f"{url}/tokenize", json=fields).raise_for_status().json()["tokens"]
    return httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json()["prompt"]


def prompt_of(llm, client, **fields):
    """The prompt that a request for a response becomes."""
    prompts = []
    with pytest.MonkeyPatch.context() as patch:
        start = EngineClient.start

        def keeping(engine, given, *rest):
            prompts.extend(given)
            return start(engine, given, *rest)

        patch.setattr(EngineClient, "start", keeping)
        client.responses.create(model=MODEL, max_output_tokens=1, **fields)
    return llm.model.tokenizer.decode(prompts[0])


def test_responses_text_is_answered_whole(llm, client):
    with saying(llm, "It is sunny."):
        done = client.responses.create(model=MODEL, input="Weather?", metadata={"a": "b"}, temperature=0.5)
    assert (done.output_text, done.status, done.error, done.incomplete_details) == (
        "It is sunny.",
        "completed",
        None,
        None,
    )
    assert (done.model, done.store, done.metadata, done.temperature) == (MODEL, False, {"a": "b"}, 0.5)
    (item,) = done.output
    assert (item.type, item.role, item.status, item.content[0].type) == (
        "message",
        "assistant",
        "completed",
        "output_text",
    )
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert done.usage.output_tokens == len(llm.encode("It is sunny.")) + 1
    assert done.usage.output_tokens_details.reasoning_tokens == 0


def test_responses_reasoning_and_calls_are_items(llm, client):
    with saying(llm, THOUGHT):
        done = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
    reasoning, message, call = done.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Hm.", [])
    assert message.content[0].text == "I look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Rome"})
    assert call.call_id
    assert 0 < done.usage.output_tokens_details.reasoning_tokens < done.usage.output_tokens


def test_responses_stream_has_the_events_of_the_whole(llm, client):
    with saying(llm, THOUGHT):
        whole = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
        events = list(client.responses.create(model=MODEL, input="Weather?", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    item = ["response.output_item.added", "response.content_part.added"]
    end = ["response.content_part.done", "response.output_item.done"]
    assert once == [
        "response.created", "response.in_progress",
        *item, "response.reasoning_text.delta", "response.reasoning_text.done", *end,
        *item, "response.output_text.delta", "response.output_text.done", *end,
        "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    last = events[-1].response

    def contents(response):
        return [json.loads(one.model_dump_json(exclude={"id", "call_id"})) for one in response.output]

    assert contents(last) == contents(whole)
    assert last.usage == whole.usage.model_copy(update={"input_tokens_details": last.usage.input_tokens_details})
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output
    for kind, text in (("response.output_text.delta", "I look."), ("response.reasoning_text.delta", "Hm.")):
        assert "".join(event.delta for event in events if event.type == kind) == text


def test_responses_read_after_the_last_step_count_the_reasoning_tokens_of_each_step(llm, client, monkeypatch):
    start = endpoint.start_chat

    async def late(service, *rest):
        chat = await start(service, *rest)
        while service.running:
            await asyncio.sleep(0.01)
        return chat

    monkeypatch.setattr(endpoint, "start_chat", late)
    tokens = llm.model.tokenizer(THOUGHT, add_special_tokens=False)["input_ids"]
    texts = (llm.model.tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens)))
    # The parser holds the white space before the answer until the first letter of the answer.
    before = next(n for n, text in enumerate(texts) if text.endswith("\n\nI"))
    with saying(llm, THOUGHT):
        whole = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
        *_, last = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL], stream=True)
    for done in (whole, last.response):
        assert done.usage.output_tokens_details.reasoning_tokens == before


def test_responses_helpers_of_the_client_read_streams(llm, client):
    with saying(llm, THOUGHT), client.responses.stream(model=MODEL, input="x", tools=[TOOL]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "I look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    with saying(llm, '<think>\nHm.\n</think>\n\n{"city": "Rome"}'):
        parsed = client.responses.parse(model=MODEL, input="x", text_format=City)
        assert parsed.output_parsed == City(city="Rome")
        with client.responses.stream(model=MODEL, input="x", text_format=City) as stream:
            assert stream.get_final_response().output_parsed == City(city="Rome")


def test_responses_async_client_gets_texts_and_calls(llm, url):
    async def every():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            whole, stream = await asyncio.gather(
                client.responses.create(model=MODEL, input="x", tools=[TOOL]),
                client.responses.create(model=MODEL, input="x", tools=[TOOL], stream=True),
            )
            return whole, [event async for event in stream]

    with saying(llm, CALLED):
        whole, events = asyncio.run(every())
    for response in (whole, events[-1].response):
        (call,) = response.output
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Rome"}')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_responses_demanded_calls_are_made(llm, client, choice):
    with saying(llm, CALLED):
        done = client.responses.create(model=MODEL, input="x", tools=[TOOL], tool_choice=choice)
    assert [item.type for item in done.output] == ["function_call"]
    with saying(llm, "text"), pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="x", tools=[TOOL], tool_choice=choice)


def test_responses_cut_output_is_incomplete(llm, client):
    with saying(llm, "It is sunny."):
        done = client.responses.create(model=MODEL, input="x", max_output_tokens=2)
        *_, last = client.responses.create(model=MODEL, input="x", max_output_tokens=2, stream=True)
    for response in (done, last.response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"
    assert last.type == "response.incomplete"


def test_chat_message_of_a_developer_is_the_systems_where_the_template_does_not_show_it(llm, monkeypatch):
    shows = "{% if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", f"{{% for m in messages %}}{shows}{{% endfor %}}")
    messages = [{"role": "developer", "content": "Short."}, {"role": "user", "content": "a"}]
    with served(llm) as url:
        assert shown(url, messages=messages) == "<system>Short.<user>a"


def test_responses_items_become_the_messages_of_a_chat(llm, client, url):
    call = {"type": "function_call", "call_id": "abcdefghi", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"role": "developer", "content": "Short."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        call,
        {**call, "call_id": "bcdefghij"},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "sunny"},
        {"type": "function_call_output", "call_id": "bcdefghij", "output": [{"type": "input_text", "text": "dry"}]},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    calls = [
        {"id": number, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        for number in ("abcdefghi", "bcdefghij")
    ]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
        {"role": "tool", "tool_call_id": "bcdefghij", "content": "dry"},
        {"role": "user", "content": "And now?"},
    ]
    expected = shown(url, messages=messages)
    assert prompt_of(llm, client, input=items, instructions="Be kind.") == expected


def test_responses_own_output_is_input_of_the_next_turn(llm, client):
    with saying(llm, THOUGHT):
        first = client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
    items = [{"role": "user", "content": "Weather?"}, *first.output]
    items += [{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}]
    text = prompt_of(llm, client, input=items, tools=[TOOL])
    assert f"<|assistant|>I look.{CALLED}<|eot|><|tool|>sunny" in text


def test_responses_failed_stream_ends_with_the_error(llm, client):
    def broken(request, *given):
        raise RuntimeError("broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "push", broken)
        try:
            events = list(client.responses.create(model=MODEL, input="x", stream=True))
            assert events[-1].type == "response.failed"
            assert "broken" in events[-1].response.error.message
        finally:
            patch.undo()


def test_responses_half_characters_of_a_request_are_escaped(llm, url):
    body = {"input": "x", "metadata": {"a": "\ud800"}}
    with saying(llm, "Yes."):
        done = httpx.post(f"{url}/v1/responses", content=json.dumps(body), headers=JSON)
        streamed = httpx.post(f"{url}/v1/responses", content=json.dumps({**body, "stream": True}), headers=JSON)
    assert done.json()["metadata"] == {"a": "\ud800"}
    assert (
        json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))["response"]["status"] == "completed"
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "responses are not stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send their output items as input"),
        ({"conversation": "conv_1"}, "conversation", "not stored"),
        ({"background": True}, "background", "none can be fetched"),
        ({"truncation": "auto"}, "truncation", "must be 'disabled'"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "no field of responses"),
        ({"n": 2}, "n", "no field of responses"),
        ({"text": {"verbosity": "low"}}, "verbosity", "verbosity is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text", "it must be 'text', 'json_object' or 'json_schema'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema is missing"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input.0 has the type 'item_reference'"),
        ({"input": [{"type": ["message"]}]}, "input", "input.0 has the type ['message']"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "a part of type 'input_image'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "must have call_id, name and arguments"),
        ({"input": "x " * 5000}, "input", "maximum context length is 1024"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens is 5000"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0 has the type 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools", "name: Field required"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "names the function 'g'"),
        ({"temperature": -1}, "temperature", "temperature = -1"),
        ({"model": "other"}, "model", "there is no model 'other'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_responses_fields_that_are_wrong_are_named(url, fields, param, message):
    done = httpx.post(f"{url}/v1/responses", json={"input": "x", **fields})
    assert done.status_code in (400, 404), done.text
    error = done.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_responses_fields_without_effect_are_taken(llm, client):
    with saying(llm, "Yes."):
        done = client.responses.create(
            model=MODEL, input="x", store=False, truncation="disabled", include=["reasoning.encrypted_content"],
            reasoning={"effort": "low", "summary": "auto"}, text={"format": {"type": "text"}, "verbosity": "medium"},
            user="u", service_tier="auto", prompt_cache_key="k", max_tool_calls=3, tool_choice="auto", tools=[],
            parallel_tool_calls=True, top_logprobs=0, extra_body={"top_k": 5, "seed": 1},
        )  # fmt: skip
    # The effort reaches the template, which begins the reasoning then.
    assert done.output[0].type == "reasoning"
    assert done.reasoning.effort == "low"
