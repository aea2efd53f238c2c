"""Tools in chats over HTTP, through the official client."""

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

from helpers.chat_formats import WRITERS, random_calls
from helpers.chats import chatting, saying
from helpers.schemas import is_valid
from helpers.server import served
from quire.engine import LLM

MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "São Paulo", 'the "old" town']}},
}
PLAIN_CITY = {**CITY, "properties": {**CITY["properties"], "city": CITY["$defs"]["city"]}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {}, "additionalProperties": False}}},
]
NAMES = ["get_weather", "f"]
FORMATS = ["hermes", "llama3", "mistral", "mistral_by_name", "deepseek", "gpt_oss"]
WRITER = {"hermes": 0, "llama3": 1, "mistral": 2, "mistral_by_name": 3, "deepseek": 4, "gpt_oss": 6}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name == "mistral_by_name" else name for name in FORMATS],
)
def served_format(request, tmp_path_factory):
    folder = chatting(tmp_path_factory.mktemp("checkpoints") / request.param, request.param)
    # Random models would never end their reasoning.
    with LLM(folder, num_pages=1000, max_model_len=2048) as llm, served(llm, reasoning_format="none") as url:
        yield request.param, llm, url


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    folder = chatting(tmp_path_factory.mktemp("checkpoints") / "unknown", "unknown")
    with LLM(folder, num_pages=1000, max_model_len=2048) as llm, served(llm) as url, connected(url) as client:
        yield client


def connected(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def name(served_format):
    return served_format[0]


@pytest.fixture
def llm(served_format):
    return served_format[1]


@pytest.fixture
def client(served_format):
    with connected(served_format[2]) as client:
        yield client


def chat(client, messages=MESSAGES, tools=TOOLS, **options):
    return client.chat.completions.create(model=model_of(client), messages=messages, tools=tools, **options)


def model_of(client):
    return client.models.list().data[0].id


def random_text(name, rng):
    """Random calls, and how a model writes them."""
    calls = random_calls(rng, NAMES)[: 1 if name == "gpt_oss" else None]
    return calls, WRITERS[WRITER[name]][1](calls, rng)


def values(calls):
    """Names and arguments of calls."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


def text_of(client, tools=None, **fields):
    """What a template makes of a chat."""
    root = str(client.base_url).removesuffix("/v1/")
    tokens = httpx.post(f"{root}/tokenize", json={"tools": tools, **fields}).raise_for_status().json()["tokens"]
    return httpx.post(f"{root}/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_chat_auto_calls_are_read_whole_and_streamed(name, llm, client, rng):
    calls, text = random_text(name, rng)
    with saying(llm, text):
        choice = chat(client).choices[0]
        assert values(choice.message.tool_calls) == calls
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert len({call.id for call in choice.message.tool_calls}) == len(calls)
        parts = [part.choices[0] for part in chat(client, stream=True)]
        streamed = [call for part in parts for call in part.delta.tool_calls or []]
        assert values(streamed) == calls
        assert [call.index for call in streamed] == list(range(len(calls)))
        assert not any(part.delta.content for part in parts)
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
        only = chat(client, parallel_tool_calls=False).choices[0]
        assert values(only.message.tool_calls) == calls[:1]


def test_chat_auto_calls_after_content_are_read(name, llm, client, rng):
    if name == "gpt_oss":
        pytest.skip("content of this format is in a channel of its own")
    mark = "<|python_tag|>"
    calls, text = random_text(name, rng)
    # Calls without a mark are calls at the start of the output alone.
    text = mark + text.removeprefix(mark) if name == "llama3" else text
    with saying(llm, f"Let me look.\n{text}"):
        message = chat(client).choices[0].message
    assert (message.content.strip(), values(message.tool_calls)) == ("Let me look.", calls)


def test_chat_auto_text_is_content(name, llm, client):
    text = " It is sunny <in> [Rome].\n"
    with saying(llm, text):
        choice = chat(client).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        parts = [part.choices[0].delta for part in chat(client, stream=True)]
        assert "".join(part.content or "" for part in parts) == text


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_chat_required_calls_are_what_the_schemas_allow(client, stream):
    # A random model may write a string that does not end within max_tokens.
    seeds = iter(range(5, 15))
    whole = []
    while not whole:
        options = {"tool_choice": "required", "temperature": 1, "seed": next(seeds), "n": 3, "max_tokens": 1500}
        if stream:
            with client.chat.completions.stream(
                model=model_of(client), messages=MESSAGES, tools=TOOLS, **options
            ) as events:
                events.until_done()
                # The client refuses to return a completion in which any choice was cut.
                choices = events.current_completion_snapshot.choices
        else:
            choices = chat(client, **options).choices
        whole = [choice for choice in choices if choice.finish_reason != "length"]
    for choice in whole:
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        calls = values(choice.message.tool_calls)
        assert calls
        assert all(is_valid(PLAIN_CITY, arguments) for name, arguments in calls if name == "get_weather")


def test_chat_named_function_is_called_once(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for number in range(3):
        done = chat(client, tool_choice=choice, temperature=1, seed=number, max_tokens=600).choices[0]
        ((name, arguments),) = values(done.message.tool_calls)
        assert name == "get_weather"
        assert is_valid(PLAIN_CITY, arguments)
        assert done.finish_reason == "tool_calls"


def test_chat_required_without_parallel_calls_is_one_call(client):
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "max_tokens": 600}
    done = chat(client, tools=TOOLS[:1], n=4, seed=1, **options)
    assert [len(choice.message.tool_calls or ()) for choice in done.choices if choice.finish_reason != "length"]
    for choice in done.choices:
        assert len(choice.message.tool_calls or ()) == (choice.finish_reason != "length")


def test_chat_auto_with_a_response_format_is_calls_or_json(name, client):
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": PLAIN_CITY}}
    done = chat(client, response_format=form, temperature=1, seed=3, n=6, max_tokens=600)
    whole = [choice for choice in done.choices if choice.finish_reason != "length"]
    assert whole
    for choice in whole:
        if choice.message.tool_calls:
            assert choice.message.content is None
        else:
            assert is_valid(PLAIN_CITY, json.loads(choice.message.content)), choice.message.content


def test_chat_history_with_calls_and_results_is_rendered(name, llm, client):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "ö\\""}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "function_call": None}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "sunny"}]}
    text = text_of(client, TOOLS, messages=[*MESSAGES, answer, result])
    assert '{"a": "ö\\""}' in text
    assert "sunny" in text
    assert ('"get_weather"' in text) == (name != "gpt_oss")
    with saying(llm, "Sunny."):
        done = chat(client, [*MESSAGES, answer, result], tool_choice="none")
    assert done.choices[0].message.content == "Sunny."


def test_chat_own_calls_as_history_are_rendered(client):
    done = chat(client, tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=600)
    message = done.choices[0].message
    text = text_of(client, messages=[*MESSAGES, message.model_dump()])
    arguments = message.tool_calls[0].function.arguments
    assert arguments in text or json.dumps(json.loads(arguments), ensure_ascii=False) in text


def test_chat_tool_choice_none_shows_no_tools(name, llm, client):
    with saying(llm, "Hello"):
        shown = chat(client).usage.prompt_tokens
        hidden = chat(client, tool_choice="none").usage.prompt_tokens
    assert hidden == chat(client, tools=openai.omit, max_tokens=1).usage.prompt_tokens
    assert (shown > hidden) == (name != "gpt_oss")


def test_chat_unknown_format_with_auto_is_refused(unknown):
    for options in ({}, {"tool_choice": "auto"}):
        with pytest.raises(openai.BadRequestError, match="--tool-format") as refused:
            chat(unknown, **options)
        assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")


def test_chat_unknown_format_with_a_demanded_call_is_served(unknown):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        done = chat(unknown, tool_choice=choice, temperature=1, seed=2, n=3, max_tokens=1500)
        for whole in [choice for choice in done.choices if choice.finish_reason != "length"]:
            assert whole.message.tool_calls
            assert all(name in NAMES for name, _ in values(whole.message.tool_calls))
            assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")


def test_chat_unknown_format_that_is_named_is_read(tmp_path):
    folder = chatting(tmp_path / "model", "unknown")
    text = '<tool_call>{"name": "f"}</tool_call>'
    with LLM(folder) as llm, saying(llm, text), served(llm, tool_format="hermes") as url, connected(url) as client:
        assert values(chat(client).choices[0].message.tool_calls) == [("f", {})]


def deep(levels):
    """A function whose parameters are nested."""
    schema = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "tools.0 has the type 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function is missing"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "another function has this name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "'a b': it must be 1 to 128 letters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools", "valid dictionary"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "it must be 'none', 'auto', 'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "has the type 'allowed_tools'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "names the function 'g', which tools do not have",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "structured_outputs and tools can't be combined",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
        ({"tools": [deep(400)], "tool_choice": "required"}, "messages", "the chat template refuses the messages"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 150_000]}}}],
                "tool_choice": "required",
            },
            "tools",
            "this server allows 131072 at most",
        ),
    ],
)
def test_chat_tools_that_are_wrong_are_named(unknown, fields, param, message):
    url = str(unknown.base_url)
    done = httpx.post(f"{url}chat/completions", json={"messages": MESSAGES, **fields}, timeout=60)
    assert done.status_code == 400, done.text
    assert done.json()["error"]["param"] == param
    assert message in done.json()["error"]["message"]


def test_chat_many_clients_get_their_own_calls(served_format):
    name, _, url = served_format

    async def every():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            calls = [
                {
                    "type": "function",
                    "function": {"name": f"f{i}", "parameters": {"type": "object", "maxProperties": 0}},
                }
                for i in range(8)
            ]
            asked = [
                client.chat.completions.create(
                    model=name, messages=MESSAGES, tools=calls, max_tokens=400,
                    tool_choice={"type": "function", "function": {"name": f"f{i}"}},
                )
                for i in range(8)
            ]  # fmt: skip
            return await asyncio.gather(*asked)

    for i, done in enumerate(asyncio.run(every())):
        assert [call for call, _ in values(done.choices[0].message.tool_calls)] in ([f"f{i}"], [])
        assert done.choices[0].finish_reason in ("tool_calls", "length")
