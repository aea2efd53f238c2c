"""OpenAI's client: what the newer of its examples call, sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import numpy as np
import pytest

pytest.importorskip("openai")

import openai
from pydantic import BaseModel

from helpers.chats import saying
from quire.engine import SamplingParams
from quire.engine.chat import render_chat

MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather in Rome?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(server):
    prompt = render_chat(server.llm.model.tokenizer, MESSAGES, add_generation_prompt=True)
    return server.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))[0].text


def test_async_client_streams_chats_and_embeds_at_once(server, expected):
    async def chat(client):
        parts = await client.chat.completions.create(
            model=server.name, messages=MESSAGES, temperature=0, max_tokens=16, stream=True
        )
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def work():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            embedded = client.embeddings.create(model=server.name, input=["import os", "x"])
            return await asyncio.gather(embedded, *(chat(client) for _ in range(4)))

    embedded, *texts = asyncio.run(work())
    assert texts == [expected] * 4
    found = [done.values for done in server.llm.embed(["import os", "x"])]
    np.testing.assert_allclose([each.embedding for each in embedded.data], found, atol=1e-6)


def test_parse_makes_the_class_of_an_answer(server, client):
    done = client.chat.completions.parse(
        model=server.name, messages=MESSAGES, response_format=Weather, temperature=1, seed=6, max_tokens=200
    )
    assert isinstance(done.choices[0].message.parsed, Weather)


def test_pydantic_tools_are_parsed(server, client):
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    call = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
    with saying(server.llm, f"<tool_call>\n{json.dumps(call)}\n</tool_call>"):
        done = client.chat.completions.parse(model=server.name, messages=MESSAGES, tools=tools)
    (found,) = done.choices[0].message.tool_calls
    assert found.function.parsed_arguments == Weather(city="Oslo", days=2)


def test_raw_response_and_models_are_those_of_the_interface(server, client):
    raw = client.chat.completions.with_raw_response.create(model=server.name, messages=MESSAGES, max_tokens=2)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().usage.completion_tokens == 2
    assert [model.id for model in client.models.list()] == [server.name]
    assert client.models.retrieve(server.name).id == server.name


def test_wrong_values_are_the_errors_of_the_interface(server, client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=server.name, messages=MESSAGES, max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)


def test_responses_are_answered_whole_streamed_and_with_tools(server, client):
    tool = {"type": "function", "name": "get_weather", "parameters": Weather.model_json_schema(), "strict": False}
    with saying(server.llm, "It is sunny."):
        done = client.responses.create(model=server.name, instructions="Be brief.", input="Weather in Rome?")
        events = list(client.responses.create(model=server.name, input="Weather in Rome?", stream=True))
    assert done.output_text == "It is sunny."
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "It is sunny."
    assert events[-1].type == "response.completed"
    call = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
    with saying(server.llm, f"<tool_call>\n{json.dumps(call)}\n</tool_call>"):
        done = client.responses.create(model=server.name, input="Weather in Oslo?", tools=[tool])
    (found,) = done.output
    assert (found.type, found.name, json.loads(found.arguments)) == ("function_call", call["name"], call["arguments"])


def test_responses_parse_makes_the_class_of_an_answer(server, client):
    done = client.responses.parse(
        model=server.name, input="Weather?", text_format=Weather, temperature=1, max_output_tokens=200
    )
    assert isinstance(done.output_parsed, Weather)
