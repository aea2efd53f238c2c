"""The format of a tokenizer that has a response_template, which Transformers' own parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.server.chat_output.json_calls import named
from quire.server.chat_output.parser import FunctionCall, OutputParser

_REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = re.compile(r"(?=[<\[])")


class ResponseTemplateParser(OutputParser):
    """Reads content, reasoning and calls by Transformers' parser. When that raises, what follows is content.

    Args:
        tokenizer: of Transformers, with a response_template.
        prompt: the text before the output.
        tools: as templates have them.
    """

    def __init__(self, tokenizer: Any, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=list(tools))
        # The text that no event has shown, such as that of a call so far.
        self._hidden = ""
        self._reasoning_space = ""
        self._reasoned, self._failed = False, False

    def _step(self, last: bool) -> bool:
        text, self._buffer = self._buffer, ""
        # Marks are at the start of a piece, so that a piece before an error has been read.
        for piece in _MARK.split(text):
            self._hidden += piece
            self._read(partial(self._parser.feed, piece))
        if last:
            self._read(lambda: self._parser.finalize()[1])
        return False

    def _read(self, events: Callable[[], list[dict[str, Any]]]) -> None:
        if not self._failed:
            try:
                for event in events():
                    self._take(event["type"], event["field"], event)
            except Exception:
                # The text of a field is not what the template says, as of a call that is not JSON.
                self._failed = True
        if self._failed:
            self._add_content(self._hidden)
            self._hidden = ""

    def _take(self, kind: str, field: str, event: Mapping[str, Any]) -> None:
        if kind == "region_chunk" and not event["dirty"] and field in ("content", *_REASONING):
            self._hidden = ""
            if field == "content":
                self._add_content(event["text"])
            else:
                self._add_reasoning(event["text"])
        elif kind == "region_close" and field in _REASONING:
            self._hidden = self._space = ""
            self._trims = True
        elif kind == "region_close" and field == "tool_calls":
            calls = _calls(event["value"])
            if calls is None:
                self._add_content(self._hidden)
            else:
                self._add_calls(calls)
            self._hidden = ""

    def _add_reasoning(self, text: str) -> None:
        text = self._reasoning_space + text if self._reasoned else text.lstrip()
        shown = text.rstrip()
        self._reasoning_space = text[len(shown) :]
        self._reasoned |= bool(shown)
        self._delta.reasoning += shown


def _calls(value: Any) -> list[FunctionCall] | None:
    """The calls of a message, or one call; None if they are not calls."""
    calls = []
    for one in value if isinstance(value, list) else [value]:
        function = one.get("function", one) if isinstance(one, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        call = _call(name, function.get("arguments", {})) if function and isinstance(name, str) else None
        if call is None:
            return None
        calls.append(call)
    return calls


def _call(name: str, arguments: Any) -> FunctionCall | None:
    try:
        return named(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (TypeError, ValueError, RecursionError):
        # These are no values of JSON.
        return None
