"""The input of a response as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.errors import ApiError, bad

_TEXTS = ("input_text", "output_text", "text")


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat. Reasoning, text and calls of one turn of the model become one message.

    Args:
        given: a text of the user, or items.
        instructions: the system's message; None: there is none.

    Raises:
        ApiError: an item is not supported, or is not complete.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise bad("input", "input is empty: there must be a text, or at least one item")
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _READERS:
            raise _wrong(i, f"has the type {kind!r}: {', '.join(_READERS)} are supported")
        _READERS[kind](i, item, messages)
    return messages


def _add_message(i: int, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    role, text = item.get("role"), _text(i, "content", item.get("content"))
    if not isinstance(role, str):
        raise _wrong(i, "has no role")
    if role == "assistant":
        turn = _turn(messages)
        turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"
    else:
        # Few templates have the role of developers, which is that of the system elsewhere.
        messages.append({"role": "system" if role == "developer" else role, "content": text})


def _add_call(i: int, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    fields = [item.get(name) for name in ("call_id", "name", "arguments")]
    if not all(isinstance(value, str) for value in fields):
        raise _wrong(i, "must have call_id, name and arguments, which are texts")
    call_id, name, arguments = fields
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _turn(messages).setdefault("tool_calls", []).append(call)


def _add_result(i: int, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    if not isinstance(item.get("call_id"), str):
        raise _wrong(i, "must have call_id, which is a text")
    result = {"role": "tool", "tool_call_id": item["call_id"], "content": _text(i, "output", item.get("output"))}
    messages.append(result)


def _add_reasoning(i: int, item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    text = "\n".join(text for text in texts if isinstance(text, str))
    turn = _turn(messages, begins=True)
    if text:
        turn["reasoning_content"] = text


_READERS = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_result,
    "reasoning": _add_reasoning,
}


def _turn(messages: list[dict[str, Any]], begins: bool = False) -> dict[str, Any]:
    """The model's message that is the last one, or a new one, which reasoning always begins after text or calls."""
    last = messages[-1] if messages else {}
    has_more = last.get("content") is not None or "tool_calls" in last
    if last.get("role") != "assistant" or (begins and has_more):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(i: int, name: str, value: Any) -> str:
    """The text of a field that is text, or a list of parts with text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
        raise _wrong(i, f"must have {name}, which is a text or a list of parts")
    other = next((part.get("type") for part in value if part.get("type") not in _TEXTS), None)
    if other is not None or not all(isinstance(part.get("text"), str) for part in value):
        raise _wrong(i, f"has {name} with a part of type {other!r}: only parts with text are supported")
    return "\n".join(part["text"] for part in value)


def _wrong(i: int, what: str) -> ApiError:
    return bad("input", f"input.{i} {what}")
