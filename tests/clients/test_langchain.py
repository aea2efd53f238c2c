"""LangChain's classes for OpenAI: chats, streams, structured output, tools and embeddings."""

from __future__ import annotations

import asyncio
from typing import Literal

import numpy as np
import pytest

pytest.importorskip("langchain_openai", reason="needs quire-attention[clients]")

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

from helpers.chats import saying
from quire.engine import SamplingParams
from quire.engine.chat import render_chat

SYSTEM, QUESTION = SystemMessage("Be brief."), HumanMessage("Weather in Rome?")
MESSAGES = [{"role": "system", "content": SYSTEM.content}, {"role": "user", "content": QUESTION.content}]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
CALLED = [("get_weather", {"city": "Oslo", "days": 2})]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@tool
def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city for some days."""
    return f"{city}: sun for {days} days"


def chat_model(server, **options):
    return ChatOpenAI(model=server.name, base_url=server.base_url, api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def chat(server):
    return chat_model(server, temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def expected(server):
    """What the model answers to the messages."""
    prompt = render_chat(server.llm.model.tokenizer, MESSAGES, add_generation_prompt=True)
    (done,) = server.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    return done


def test_invoke_has_the_answer_and_its_tokens(chat, expected):
    answer = chat.invoke([SYSTEM, QUESTION])
    assert answer.content == expected.text
    assert answer.response_metadata["finish_reason"] == expected.finish_reason
    assert answer.usage_metadata["input_tokens"] == len(expected.prompt_token_ids)
    assert answer.usage_metadata["output_tokens"] == len(expected.token_ids)


def test_stream_has_the_answer_in_parts(chat, expected):
    parts = list(chat.stream([SYSTEM, QUESTION], stream_usage=True))
    assert "".join(part.content for part in parts) == expected.text
    assert len(parts) > 4
    assert sum(parts[1:], parts[0]).usage_metadata["output_tokens"] == len(expected.token_ids)


def test_abatch_has_the_answers_of_all(chat, expected):
    answers = asyncio.run(chat.abatch([[SYSTEM, QUESTION]] * 5))
    assert [answer.content for answer in answers] == [expected.text] * 5


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_by_a_schema_is_parsed(server, method):
    chat = chat_model(server, temperature=1, seed=3, max_tokens=300)
    found = chat.with_structured_output(Weather, method=method).invoke([QUESTION])
    assert isinstance(found, Weather)


def test_structured_output_by_json_mode_is_an_object(server):
    chat = chat_model(server, temperature=0, max_tokens=300, stop=["\n"])
    text = '{"city": "Rome", "days": 2}'
    with saying(server.llm, text):
        found = chat.with_structured_output(Weather, method="json_mode").invoke([QUESTION])
    assert found == Weather(city="Rome", days=2)


def test_bind_tools_with_a_required_call_is_what_the_tool_takes(server):
    chat = chat_model(server, temperature=1, seed=4, max_tokens=300)
    answer = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).invoke([QUESTION])
    for call in answer.tool_calls:
        assert call["name"] == "get_weather"
        assert get_weather.invoke(call["args"]).startswith(f"{call['args']['city']}: sun")
    assert answer.tool_calls


def test_bind_tools_reads_calls_and_sends_their_results(server):
    bound = chat_model(server).bind_tools([get_weather])
    with saying(server.llm, CALL):
        answer = bound.invoke([QUESTION])
        parts = list(bound.stream([QUESTION]))
    assert [(each["name"], each["args"]) for each in answer.tool_calls] == CALLED
    assert [(c["name"], c["args"]) for c in sum(parts[1:], parts[0]).tool_calls] == CALLED
    result = ToolMessage(get_weather.invoke(answer.tool_calls[0]["args"]), tool_call_id=answer.tool_calls[0]["id"])
    with saying(server.llm, "It is sunny."):
        assert bound.invoke([QUESTION, answer, result]).content == "It is sunny."
    assert isinstance(answer, AIMessage)


def test_embeddings_are_those_of_the_engine(server):
    # The default counts tokens by tiktoken, which downloads its vocabulary.
    client = OpenAIEmbeddings(
        model=server.name, base_url=server.base_url, api_key="none", check_embedding_ctx_length=False
    )
    texts = ["import os", "def f(x):", "import os"]
    expected = [done.values for done in server.llm.embed(texts)]
    np.testing.assert_allclose(client.embed_documents(texts), expected, atol=1e-6)
    np.testing.assert_allclose(client.embed_query(texts[1]), expected[1], atol=1e-6)
    np.testing.assert_allclose(asyncio.run(client.aembed_documents(texts)), expected, atol=1e-6)


def test_chat_by_responses_answers_streams_and_calls_tools(server):
    chat = chat_model(server, use_responses_api=True)
    with saying(server.llm, "It is sunny."):
        assert chat.invoke([SYSTEM, QUESTION]).text == "It is sunny."
        parts = list(chat.stream([QUESTION]))
    assert "".join(part.text for part in parts) == "It is sunny."
    with saying(server.llm, CALL):
        answer = chat.bind_tools([get_weather]).invoke([QUESTION])
    assert [(each["name"], each["args"]) for each in answer.tool_calls] == CALLED
    result = ToolMessage(get_weather.invoke(answer.tool_calls[0]["args"]), tool_call_id=answer.tool_calls[0]["id"])
    with saying(server.llm, "It is sunny."):
        assert chat.bind_tools([get_weather]).invoke([QUESTION, answer, result]).text == "It is sunny."
