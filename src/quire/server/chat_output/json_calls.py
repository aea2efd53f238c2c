"""Calls of tools that are written as JSON, and where a JSON value ends whose text comes in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.server.chat_output.parser import FunctionCall

_OUTSIDE_STRINGS = re.compile(r'["\[\]{}]')
_INSIDE_STRINGS = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of a JSON object or array, which brackets and quotes decide.

    Args:
        start: its index in the text.
    """

    def __init__(self, start: int) -> None:
        self._place, self._depth = start, 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The index after the value in a text that each call has more of; None if the value has not ended."""
        while True:
            found = (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, self._place)
            if found is None:
                # What is escaped may be still to come.
                self._place = max(self._place, len(text))
                return None
            self._place = found.end()
            if found[0] == "\\":
                # Whatever is escaped does not end the string.
                self._place += 1
            elif found[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if found[0] in "[{" else -1
                if self._depth <= 0:
                    return self._place


def calls_of(text: str) -> list[FunctionCall] | None:
    """The calls that are written as {"name": ..., "arguments": {...}}, or with "parameters", or as a list of these;
    None if the text is anything else.
    """
    value = _parsed(text)
    calls = [_call_of(one) for one in (value if isinstance(value, list) else [value])]
    known = [call for call in calls if call is not None]
    return known if known and len(known) == len(calls) else None


def named(name: str, arguments: Any) -> FunctionCall | None:
    """A call of a function with an object as its arguments, which may be given as JSON text; None if they are anything
    else, or if the name is empty or has spaces.
    """
    text = _object_text(arguments)
    usable = name.isprintable() and name.split() == [name]
    return FunctionCall(name, text) if usable and text is not None else None


def _call_of(value: Any) -> FunctionCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    return named(value["name"], value.get("arguments", value.get("parameters", {})))


def _object_text(value: Any) -> str | None:
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        is_text = not any("\ud800" <= character <= "\udfff" for character in text)
        return text if is_text else json.dumps(value)
    except (ValueError, RecursionError):
        return None


def _parsed(text: str) -> Any:
    """The value of JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
