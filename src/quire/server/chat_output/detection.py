"""Which formats a checkpoint has: a known call is rendered with its chat template, and the parsers try to read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.engine.chat import render_chat
from quire.server.chat_output.formats import BY_TRANSFORMERS, REASONING_FORMATS, TOOL_FORMATS

_NAME, _ID = "quire_probe", "quire0123"
# JSON and Python write these arguments differently.
_ARGUMENTS = {"value": "quire", "flag": True}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}, "flag": {"type": "boolean"}}},
    },
}
# Characters that the marks of calls and of reasoning may share at their beginning, and one more.
_SHARED = 4
_QUESTION = {"role": "user", "content": "quire"}


class HistoryStyle(NamedTuple):
    """What a template takes in messages that have calls.

    Attributes:
        json_arguments: whether arguments are the text of JSON, and not an object.
        empty_content: whether missing content is an empty text, and not None.
    """

    json_arguments: bool
    empty_content: bool


def template_text(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template, or of all of them; "" if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""


def shows_role(tokenizer: Any, role: str) -> bool:
    """Whether a template shows the content of a message of this role, which begins a chat."""
    try:
        text = render_chat(tokenizer, [{"role": role, "content": _NAME}, _QUESTION], add_generation_prompt=True)
    except Exception:
        # The template is a program of the checkpoint, and raises what it likes.
        return False
    return _NAME in text


def find_tool_format(tokenizer: Any) -> tuple[str | None, HistoryStyle]:
    """The name of the format of a checkpoint's calls, None if it is not known, and what its template takes."""
    rendered = None
    for style in (HistoryStyle(text, empty) for empty in (False, True) for text in (False, True)):
        try:
            outputs = _rendered_call(tokenizer, style)
        except Exception:
            # The template is a program of the checkpoint, and raises what it likes.
            continue
        name = next((name for name in TOOL_FORMATS if any(_reads(name, output) for output in outputs)), None)
        if name is not None:
            return name, style
        rendered = rendered or style
    template = getattr(tokenizer, "response_template", None)
    has_parser = isinstance(template, Mapping) and "tool_calls" in (template.get("fields") or ())
    return BY_TRANSFORMERS if has_parser else None, rendered or HistoryStyle(False, False)


def find_reasoning_format(tokenizer: Any) -> str | None:
    """The name of the format of a checkpoint's reasoning, whose marks its template has; None if there is none."""
    text = template_text(tokenizer)
    marks = {"gpt_oss": "<|channel|>analysis", **{n: f.end for n, f in REASONING_FORMATS.items() if n != "gpt_oss"}}
    return next((name for name, mark in marks.items() if mark in text), None)


def with_arguments(call: Any, as_text: bool) -> Any:
    """A call of a message, with its arguments as the text of JSON or as an object, if they can be either."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        # The template shows text that is not an object as it can.
        arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _rendered_call(tokenizer: Any, style: HistoryStyle) -> list[str]:
    """What a template makes of an output that is one call, up to its last bracket. It begins where it differs from the
    prompt of the output, or a few characters before: a prompt that ends with <think> has the first character of
    <tool_call>.
    """
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    calls = [with_arguments(call, style.json_arguments)]
    answer = {"role": "assistant", "content": "" if style.empty_content else None, "tool_calls": calls}
    prompt = render_chat(tokenizer, [_QUESTION], tools=[_TOOL], add_generation_prompt=True)
    whole = render_chat(tokenizer, [_QUESTION, answer], tools=[_TOOL])
    common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    end = max(map(whole.rfind, "]}")) + 1
    return [whole[start:end] for start in range(common, max(common - _SHARED, 0), -1)]


def _reads(name: str, output: str) -> bool:
    calls = TOOL_FORMATS[name].parser([_NAME]).feed(output, last=True).calls
    return [(call.name, json.loads(call.arguments)) for call in calls] == [(_NAME, _ARGUMENTS)]
