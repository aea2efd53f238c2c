"""Calls of tools behind marks: what the formats of Hermes, Llama 3, Mistral and DeepSeek have in common."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from quire.server.chat_output.json_calls import JsonEnd, calls_of, named
from quire.server.chat_output.parser import FunctionCall, OutputParser, begins, split

# A header that is longer than this, with the name of a function, is content.
_LONGEST_HEADER = 400


class MarkedCallParser(OutputParser):
    """Reads content, and calls that are a mark, a header and a JSON value, which ends a call wherever marks are in its
    strings.

    Args:
        names: of the functions that may be called.

    Attributes:
        openers: marks before calls that are left out.
        closers: marks after calls that are left out.
        header: what is between `begin` and a JSON object; a group has the function's name, without which the JSON
            value has it.
        takes_lists: whether the JSON value may be a list of calls.
        bare: whether a JSON value at the start of the output, or after a call, is a call without `begin` if it calls
            functions that the request offers.
    """

    openers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()
    header: ClassVar[re.Pattern[str]] = re.compile(r"\s*")
    takes_lists: ClassVar[bool] = True
    bare: ClassVar[bool] = False

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._next = self._step_edge if self.bare else self._step_content
        # Whether a call precedes.
        self._follows = False
        # What the call began with, where its JSON value begins in the buffer, and ends; None: neither is known.
        self._mark, self._start = "", 0
        self._end: JsonEnd | None = None

    def _step(self, last: bool) -> bool:
        return self._next(last)

    def _step_content(self, last: bool) -> bool:
        before, mark, self._buffer = split(self._buffer, (self.begin, *self.openers), last)
        self._add_content(before)
        if mark == self.begin:
            self._begin_call(mark)
        return mark is not None

    def _step_edge(self, last: bool) -> bool:
        """Leave out marks after a call, and find out whether the next call begins without one."""
        text = self._buffer.lstrip()
        closers = self.closers if self._follows else ()
        closed = next((mark for mark in closers if text.startswith(mark)), None)
        if closed is not None:
            self._buffer = text.removeprefix(closed)
            return True
        if (not text or begins(text, closers)) and not last:
            return False
        if self.bare and text.startswith(("{", "[")):
            # White space before the call stays in the buffer, as a part of its header.
            self._begin_call("")
        else:
            self._next = self._step_content
        return True

    def _begin_call(self, mark: str) -> None:
        self._mark, self._end = mark, None
        self._next = self._step_call

    def _step_call(self, last: bool) -> bool:
        if self._end is None:
            start = self._json_start()
            if start is None and not last and self._may_be_header():
                return False
            if start is None:
                # What follows the mark is content, and may have other marks.
                self._add_content(self._mark)
                self._next = self._step_content
                return True
            self._start, self._end = start, JsonEnd(start)
        end = self._end.find(self._buffer)
        if end is None and not last:
            return False
        self._end_call(len(self._buffer) if end is None else end)
        return True

    def _end_call(self, end: int) -> None:
        calls = self._calls(self._buffer[: self._start], self._buffer[self._start : end])
        if calls is None or not (self._mark or self._names.issuperset(call.name for call in calls)):
            self._add_content(self._mark + self._buffer[:end])
            self._next = self._step_content
        else:
            self._add_calls(calls)
            self._follows, self._next = True, self._step_edge
        self._buffer = self._buffer[end:]

    def _json_start(self) -> int | None:
        head = self._buffer[:_LONGEST_HEADER]
        start = len(head) - len(head.lstrip())
        if self.takes_lists and head.startswith("[", start):
            return start
        brace = head.find("{")
        return brace if brace >= 0 and self.header.fullmatch(head, 0, brace) else None

    def _may_be_header(self) -> bool:
        """Whether the buffer and more text may be a header."""
        if len(self._buffer) >= _LONGEST_HEADER or "{" in self._buffer or self.begin in self._buffer:
            return False
        return self.header.groups > 0 or not self._buffer.strip()

    def _calls(self, header: str, value: str) -> list[FunctionCall] | None:
        found = self.header.fullmatch(header)
        name = next(filter(None, found.groups()), None) if found else None
        if name is None:
            return calls_of(value)
        call = named(name, value)
        return None if call is None else [call]
