"""LiteLLM, which translates other interfaces to OpenAI's: chats, completions, streams, tools and embeddings."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

pytest.importorskip("litellm", reason="needs quire-attention[clients]")

import litellm

from helpers.chats import saying
from quire.engine import SamplingParams
from quire.engine.chat import render_chat

MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def options(server):
    return {"model": f"openai/{server.name}", "api_base": server.base_url, "api_key": "none", "num_retries": 0}


@pytest.fixture(scope="module")
def expected(server):
    prompt = render_chat(server.llm.model.tokenizer, MESSAGES, add_generation_prompt=True)
    return server.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))[0].text


def test_completion_of_a_chat_has_the_answer(options, expected):
    done = litellm.completion(messages=MESSAGES, temperature=0, max_tokens=16, **options)
    assert done.choices[0].message.content == expected
    assert done.usage.completion_tokens == 16


def test_completion_of_a_stream_has_the_answer_in_parts(options, expected):
    stream = litellm.completion(
        messages=MESSAGES,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert [part.usage.completion_tokens for part in parts if getattr(part, "usage", None)] == [16]


def test_acompletion_of_many_chats_has_the_answers(options, expected):
    async def work():
        calls = (litellm.acompletion(messages=MESSAGES, temperature=0, max_tokens=16, **options) for _ in range(5))
        return await asyncio.gather(*calls)

    assert [done.choices[0].message.content for done in asyncio.run(work())] == [expected] * 5


def test_text_completion_has_the_text(server, options):
    (expected,) = server.llm.generate(["import os"], SamplingParams(temperature=0, max_tokens=16))
    options = {**options, "model": f"text-completion-openai/{server.name}"}
    done = litellm.text_completion(prompt="import os", temperature=0, max_tokens=16, **options)
    assert done.choices[0].text == expected.text


def test_completion_with_a_required_tool_calls_it(options):
    done = litellm.completion(
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        seed=2,
        max_tokens=300,
        **options,
    )
    calls = done.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {"get_weather"}
    assert all(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo") for call in calls)


def test_completion_reads_calls_that_the_model_writes(server, options):
    with saying(server.llm, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'):
        done = litellm.completion(messages=MESSAGES, tools=TOOLS, **options).choices[0]
    assert done.finish_reason == "tool_calls"
    assert [call.function.name for call in done.message.tool_calls] == ["get_weather"]
    assert json.loads(done.message.tool_calls[0].function.arguments) == {"city": "Oslo"}


def test_completion_with_a_response_format_is_what_the_schema_allows(options):
    schema = TOOLS[0]["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    done = litellm.completion(messages=MESSAGES, response_format=form, temperature=1, max_tokens=300, **options)
    assert json.loads(done.choices[0].message.content)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embedding_is_that_of_the_engine(server, options, form):
    texts = ["import os", "def f(x):"]
    done = litellm.embedding(input=texts, encoding_format=form, **options)
    expected = [each.values for each in server.llm.embed(texts)]
    if form == "float":
        np.testing.assert_allclose([each["embedding"] for each in done.data], expected, atol=1e-6)
    assert done.usage.prompt_tokens == sum(len(server.llm.encode(text)) for text in texts)


def test_completion_with_a_wrong_value_is_its_error(options):
    with pytest.raises(litellm.BadRequestError, match="temperature = -1"):
        litellm.completion(messages=MESSAGES, temperature=-1, **options)
    with pytest.raises(litellm.ContextWindowExceededError, match="has 200028 characters"):
        litellm.completion(messages=[{"role": "user", "content": "a b " * 50_000}], **options)


def test_responses_have_the_answer(server, options):
    with saying(server.llm, "It is sunny."):
        done = litellm.responses(input="Weather in Rome?", max_output_tokens=50, **options)
    assert done.output[0].content[0].text == "It is sunny."
