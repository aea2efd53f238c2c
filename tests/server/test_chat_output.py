"""Parsers of what models write in chats: content, reasoning and calls of tools, whole and in parts."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("fastapi")

from helpers.chat_formats import MARKS, WRITERS, random_calls, random_parts
from quire.server.chat_output.deepseek import DeepSeekParser
from quire.server.chat_output.gpt_oss import GptOssParser
from quire.server.chat_output.hermes import HermesParser
from quire.server.chat_output.llama3 import Llama3Parser
from quire.server.chat_output.mistral import MistralParser
from quire.server.chat_output.parser import ContentParser
from quire.server.chat_output.reasoning import ReasoningParser

NAMES = ["get_weather", "f", "größe-2"]
PARSERS = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "gpt_oss": GptOssParser,
}
THINK = ("<think>", "</think>")
EACH_WRITER = pytest.mark.parametrize(("name", "write"), WRITERS, ids=lambda value: getattr(value, "__name__", value))


def read(parser, *parts):
    """What the deltas of a parser add up to: content, reasoning, and calls with their arguments as values."""
    deltas = [parser.feed(part) for part in parts] + [parser.feed("", last=True)]
    calls = [(call.name, json.loads(call.arguments)) for delta in deltas for call in delta.calls]
    return "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas), calls


def whole(parser, text):
    delta = parser.feed(text, last=True)
    return delta.content, delta.reasoning, [(call.name, json.loads(call.arguments)) for call in delta.calls]


def final(text):
    return f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}"


@EACH_WRITER
def test_parser_random_calls_in_random_parts_are_read(name, write, rng):
    for _ in range(60):
        calls = random_calls(rng, NAMES)
        text = write(calls, rng)
        assert read(PARSERS[name](NAMES), *random_parts(rng, text)) == ("", "", calls), text
        assert whole(PARSERS[name](NAMES), text) == ("", "", calls)


@EACH_WRITER
def test_parser_text_cut_at_every_place_is_read(name, write, rng):
    calls = random_calls(rng, NAMES)
    text = write(calls, rng)
    for place in range(len(text)):
        assert read(PARSERS[name](NAMES), text[:place], text[place:]) == ("", "", calls)
    assert read(PARSERS[name](NAMES), *text) == ("", "", calls)


@pytest.mark.parametrize(("name", "write"), [pair for pair in WRITERS if pair[0] in ("hermes", "mistral", "deepseek")])
def test_parser_content_around_calls_is_kept_without_the_space_beside_them(name, write, rng):
    calls = random_calls(rng, NAMES)
    text = f" I look < that [up. \n\n{write(calls, rng)}\n\n Done.\n"
    for _ in range(20):
        found = read(PARSERS[name](NAMES), *random_parts(rng, text))
        assert found == (" I look < that [up.Done.\n", "", calls)


@pytest.mark.parametrize("name", PARSERS)
def test_parser_random_text_in_parts_is_read_as_when_it_comes_at_once(name, rng):
    """Marks in any order, broken calls, and text that is none of these."""
    pieces = [
        *MARKS,
        '{"name": "f", "arguments": {}}',
        '{"name": "f"',
        "}",
        "[",
        "f",
        " ",
        "\n",
        "Hello",
        '"',
        "\\",
        ";",
    ]
    for _ in range(400):
        text = "".join(rng.choices([*pieces, " to=functions.f", "assistant"], k=rng.randint(1, 12)))
        parts = random_parts(rng, text)
        for wrap in (lambda parser: parser, lambda parser: ReasoningParser(THINK, False, parser)):
            assert read(wrap(PARSERS[name](NAMES)), *parts) == whole(wrap(PARSERS[name](NAMES)), text), (text, parts)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Use <tool_call> and </tool_call>, then."),
        ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call> and more'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("hermes", "<tool_call>" + "[" * 50_000 + "]" * 50_000),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", '{"city": "Rome", "list": [{"a": "}"}]} is JSON'),
        ("llama3", '  {"unfinished": '),
        ("llama3", '<|python_tag|>search.call(query="x")'),
        ("llama3", "A {brace} in a text"),
        ("mistral", "[TOOL_CALLS] are no [list"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]'),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>"),
    ],
)
def test_parser_text_without_a_valid_call_is_unchanged_content(name, text, rng):
    assert read(PARSERS[name](NAMES), *random_parts(rng, text)) == (text, "", [])


def test_parser_valid_call_after_an_invalid_one_is_read():
    text = '<tool_call>{"name": 5}</tool_call>\n<tool_call>{"name": "f"}</tool_call>'
    assert read(HermesParser(), *text) == ('<tool_call>{"name": 5}</tool_call>', "", [("f", {})])


def test_parser_arguments_in_a_json_string_are_read_as_an_object():
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": [1]}"}'
    assert whole(HermesParser(), text) == ("", "", [("f", {"a": [1]})])


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{ "a":%s }' % ("7" * 5000), '{"a": "\\ud800", "a": 1.0}', "{}"])
def test_parser_unusual_json_arguments_are_passed_on_unchanged(arguments):
    for text in (f"[TOOL_CALLS]f[ARGS]{arguments}", f'[TOOL_CALLS] [ {{"name" : "f","arguments": {arguments} }} ]'):
        (call,) = MistralParser().feed(text, last=True).calls
        assert call == ("f", arguments)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm. \n\nOr so.\n</think>\n\n Yes.\n", False, ("Yes.\n", "Hm. \n\nOr so.")),
        ("Hm.\n</think>\n\nYes.", True, ("Yes.", "Hm.")),
        ("<think>Hm.</think>Yes.", True, ("Yes.", "Hm.")),
        ("<think>\n\n</think>\n\nYes.", False, ("Yes.", "")),
        (" Yes. <think>No.</think>", False, (" Yes. <think>No.</think>", "")),
        ("<think>Hm. </thi", False, ("", "Hm. </thi")),
        ("Hm. ", True, ("", "Hm.")),
        ("<thin", False, ("<thin", "")),
        ("  ", False, ("  ", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_parser_think_marks_separate_reasoning_from_content(text, opened, expected, rng):
    for parts in ([text], list(text), random_parts(rng, text)):
        assert read(ReasoningParser(THINK, opened, ContentParser()), *parts)[:2] == expected


def test_reasoning_parser_calls_after_reasoning_are_read(rng):
    text = 'Hm.\n</think>\n\nWell.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for _ in range(20):
        parser = ReasoningParser(THINK, True, HermesParser())
        assert read(parser, *random_parts(rng, text)) == ("Well.", "Hm.", [("f", {})])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (final("Yes.\n\nOr < no"), ("Yes.\n\nOr < no", "Hm.", [])),
        (final("Yes.<|return|>"), ("Yes.", "Hm.", [])),
        ("<|channel|>final<|message|>Yes.", ("Yes.", "", [])),
        ("<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B", ("", "A\nB", [])),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|end|>"}<|call|>',
            ("I look.", "", [("f", {"a": "<|end|>"})]),
        ),
        ("<|channel|>analysis to=functions.f code<|message|>{}", ("", "", [("f", {})])),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", ("", "", [("f", {})])),
        (
            "<|channel|>commentary to=functions.f<|message|>{broken",
            ("<|channel|>commentary to=functions.f<|message|>{broken", "", []),
        ),
        ("plain text", ("plain text", "", [])),
        ("<|channel|>ana", ("", "", [])),
        ("<|channel|>analysis<|message|>A<|channel|>final<|message|>B", ("B", "A", [])),
    ],
)
def test_gpt_oss_parser_channels_become_content_reasoning_and_calls(text, expected, rng):
    for parts in ([text], list(text), *(random_parts(rng, text) for _ in range(10))):
        assert read(GptOssParser(), *parts) == expected


def test_parser_long_arguments_in_small_parts_are_read_in_linear_time():
    text = "<tool_call>" + json.dumps({"name": "f", "arguments": {"text": "<a href=\\>" * 30_000}}) + "</tool_call>"
    parser, start = HermesParser(), time.perf_counter()
    calls = [call for place in range(0, len(text), 4) for call in parser.feed(text[place : place + 4]).calls]
    assert [json.loads(call.arguments) for call in calls] == [{"text": "<a href=\\>" * 30_000}]
    assert time.perf_counter() - start < 10
