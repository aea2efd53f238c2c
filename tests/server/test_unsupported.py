"""Options that the server does not have: refused by name if they would change an answer, and otherwise ignored."""

from __future__ import annotations

import json

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from helpers.checkpoints import with_chat_template
from helpers.server import served
from quire.engine import LLM

MESSAGES = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
    folder = with_chat_template(tmp_path_factory.mktemp("checkpoints") / "model", template)
    with LLM(folder, num_pages=300) as llm, served(llm) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=16, extra_body=fields)


def test_chat_tool_choice_none_is_answered_without_tools_and_others_are_refused(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    expected = chat(client, temperature=0).choices[0].message.content
    for fields in (
        {"tools": tools, "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
    ):
        assert chat(client, temperature=0, **fields).choices[0].message.content == expected
    assert chat(client, temperature=0, top_logprobs=0).choices[0].logprobs is None
    for fields, param in (
        ({"tools": tools}, "tools"),
        ({"tools": tools, "tool_choice": "auto"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, **fields)
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")


# Fields of other interfaces: a value that changes an answer, and one that does not.
REFUSED = {
    "regex": ("a+", ""), "json_schema": ("{}", None), "ebnf": ("root ::= 'a'", None), "grammar": ("root ::= 'a'", ""),
    "use_beam_search": (True, False), "length_penalty": (0.5, 1.0), "early_stopping": (True, False),
    "best_of": (3, 1), "suffix": ("x", ""), "guided_json": ({}, None), "guided_choice": (["a"], []),
    "skip_special_tokens": (False, True), "add_special_tokens": (False, True), "truncation_side": ("right", "left"),
    "typical_p": (0.5, 1), "repeat_penalty": (1.1, 1.0), "mirostat": (2, 0), "dry_multiplier": (0.8, 0.0),
    "xtc_probability": (0.5, 0), "dynatemp_range": (0.5, 0), "top_n_sigma": (1.0, -1), "n_predict": (5, None),
    "n_probs": (3, 0), "samplers": (["top_k"], []), "lora": ([{"id": 0, "scale": 1}], []), "stop_regex": ("a", None),
    "no_stop_trim": (True, False), "return_hidden_states": (True, False), "custom_logit_processor": ("x", None),
    "logprob_token_ids": ([1], None), "thinking_token_budget": (0, -1), "cache_salt": ("x", None),
    "prompt_embeds": ("x", None), "repetition_detection": ({"max_pattern_size": 3}, None), "watermark": (True, False),
    "do_sample": (True, None), "max_new_tokens": (5, None), "truncate": (5, None), "top_n_tokens": (2, 0),
    "decoder_input_details": (True, False), "num_beams": (4, 1), "no_repeat_ngram_size": (2, 0),
    "max_completion_tokens": (5, None), "top_logprobs": (2, 0), "return_tokens": (True, False),
    "vllm_xargs": ({"a": 1}, {}), "kv_transfer_params": ({"a": 1}, None), "lora_path": ("x", None),
}  # fmt: skip
REFUSED_CHAT = {
    "add_special_tokens": (True, False), "enable_thinking": (False, None),
    "chat_template": ("{{ x }}", None), "documents": ([{"text": "x"}], []), "modalities": (["audio"], ["text"]),
    "audio": ({"voice": "x"}, None), "verbosity": ("low", "medium"), "web_search_options": ({}, None),
    "include_reasoning": (False, True), "input_ids": ([1], None), "echo": (True, False), "regex": ("a", None),
    "thinking": ({"type": "enabled"}, None), "reasoning": ({"effort": "high"}, {}), "guideline": ("x", None),
    "reasoning_format": ("deepseek", "none"), "json_schema": ({}, None), "n_cmpl": (2, 1),
}  # fmt: skip
IGNORED = {
    "user": "x", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "priority": 3, "request_id": "x",
    "cache_prompt": False, "id_slot": 1, "prediction": {"type": "content"}, "prompt_cache_key": "x",
    "mirostat_tau": 5.0, "dry_base": 1.75, "parallel_tool_calls": False, "unknown_field": {"is": "ignored"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name", "value", "neutral"),
    [
        *(("completions", name, *values) for name, values in REFUSED.items()),
        *(("chat/completions", name, *values) for name, values in REFUSED_CHAT.items()),
    ],
)
def test_unsupported_field_that_would_change_an_answer_is_answered_400_with_its_name(url, path, name, value, neutral):
    body = {"max_tokens": 1, **({"prompt": "x"} if path == "completions" else {"messages": MESSAGES})}
    done = httpx.post(f"{url}/v1/{path}", json={**body, name: value})
    error = done.json()["error"]
    assert (done.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not supported by this server")
    assert httpx.post(f"{url}/v1/{path}", json={**body, name: neutral}).status_code == 200


def test_unknown_field_without_an_effect_on_answers_is_ignored(url):
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
        assert httpx.post(f"{url}/v1/{path}", json={"max_tokens": 1, **body, **IGNORED}).status_code == 200


def test_tokenize_unsupported_field_is_answered_400_with_its_name(url):
    def post(**body):
        return httpx.post(f"{url}/tokenize", json=body)

    assert post(prompt="x", add_special_tokens=True).status_code == 200
    assert post(messages=MESSAGES, add_special_tokens=False).status_code == 200
    for body in (
        {"prompt": "x", "add_special_tokens": False},
        {"messages": MESSAGES, "add_special_tokens": True},
        {"prompt": "x", "return_token_strs": True},
        {"messages": MESSAGES, "tools": [{}]},
        {"messages": MESSAGES, "chat_template": "x"},
    ):
        error = post(**body).json()["error"]
        assert error["param"] == list(body)[1]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"type": "json_object", "schema": {"type": "array"}}, "response_format.schema"),
        ({"type": "json_schema", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "value": 1}}, "response_format.json_schema.value"),
        ({"type": "json_object", "value": {}}, "response_format.value"),
        ({"type": "text", "schema": {}}, "response_format.schema"),
    ],
)
def test_response_format_unknown_field_is_answered_400_with_its_name(url, form, name):
    error = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "response_format": form}).json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
    assert f"{name} is not supported" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias", "valid integer"),
        ({"logit_bias": {"5": 200}}, "logit_bias", "a number from -100 to 100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "tokens are 0 to 4095"),
        ({"logit_bias": [[5, 1.0]]}, "logit_bias", "valid dictionary"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
        ({"allowed_token_ids": [4096]}, "allowed_token_ids", "tokens are 0 to 4095"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "valid integer"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids", "only tokens that bad_words or min_tokens"),
        (
            {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
            "allowed_token_ids",
            "only tokens that bad_words or min_tokens",
        ),
        ({"bad_words": [""]}, "bad_words", "more than spaces"),
        ({"bad_words": "word"}, "bad_words", "valid list"),
        ({"bad_words": ["x"] * 257}, "bad_words", "257 elements: this server allows 256"),
        ({"bad_words": ["x" * 257]}, "bad_words", "257 characters: this server allows 256"),
        ({"min_tokens": 17}, "min_tokens", "at most max_tokens, which is 16"),
        ({"min_tokens": -1}, "min_tokens", "0 or larger"),
        ({"max_tokens": -1}, "max_tokens", "0 or larger"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or larger"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "this server reports 20 at most"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "can't be combined with stream"),
    ],
)
def test_completion_invalid_value_is_answered_400_with_its_field(url, fields, param, message):
    body = json.dumps({"prompt": "x", **fields})
    done = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = done.json()["error"]
    assert (done.status_code, error["param"]) == (400, param)
    assert message in error["message"]


# A stop token is allowed at the end of a grammar's text alone, so it may be the only one that could follow.
@pytest.mark.parametrize(("text", "field"), [("b", "allowed_token_ids"), ("a", "stop_token_ids")])
def test_fields_that_leave_no_token_are_answered_400_with_a_code(text, field, url):
    pytest.importorskip("llguidance")
    (token,) = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    body = {"prompt": "x", "structured_outputs": {"regex": "a"}, field: [token]}
    done = httpx.post(f"{url}/v1/completions", json=body)
    error = done.json()["error"]
    assert (done.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "no_possible_token")
    streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True})
    *_, event, end, _ = streamed.text.split("\n\n")
    assert (streamed.status_code, end) == (200, "data: [DONE]")
    assert json.loads(event.removeprefix("data: "))["error"] == error
