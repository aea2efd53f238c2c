"""Calls of tools that are written as JSON, and where a JSON value ends whose text comes in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.server.chat_output.parser import FunctionCall

_OUTSIDE_STRINGS = re.compile(r'["\[\]{}]')
_INSIDE_STRINGS = re.compile(r'["\\]')
_SPACE = re.compile(r"\s*")


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
    texts = [part for _, part in _parts(text)] if isinstance(value, list) else [text]
    calls = [_call_of(one) for one in texts]
    known = [call for call in calls if call is not None]
    return known if known and len(known) == len(calls) else None


def named(name: str, arguments: str) -> FunctionCall | None:
    """A call of a function with arguments that are the text of a JSON object, as it was written; None if they are
    anything else, or if the name is empty or has spaces.
    """
    usable = name.isprintable() and name.split() == [name]
    return FunctionCall(name, arguments.strip()) if usable and isinstance(_parsed(arguments), dict) else None


def _call_of(text: str) -> FunctionCall | None:
    value = _parsed(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = "arguments" if "arguments" in value else "parameters"
    if isinstance(value.get(key), str):
        # Arguments may be the text of an object.
        return named(value["name"], value[key])
    return named(value["name"], dict(_parts(text)).get(key, "{}"))


def _parsed(text: str) -> Any:
    """The value of JSON, with other numbers, of which any are taken; None if it is not JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """The texts of the values of a JSON object, with their keys, or of a JSON list."""
    place = _skipped(text, 0)
    is_object = text[place] == "{"
    place = _skipped(text, place + 1)
    while text[place] not in "]}":
        key = ""
        if is_object:
            key, place = _DECODER.raw_decode(text, place)
            place = _skipped(text, _skipped(text, place) + 1)
        _, end = _DECODER.raw_decode(text, place)
        yield key, text[place:end]
        place = _skipped(text, end)
        if text[place] == ",":
            place = _skipped(text, place + 1)


def _skipped(text: str, place: int) -> int:
    """The index of what is after white space."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# Numbers stay as they were written, since Python may not have them: 1e999, or one of ten thousand digits.
_DECODER = json.JSONDecoder(parse_int=lambda text: 0, parse_float=lambda text: 0.0, parse_constant=_refuse)
