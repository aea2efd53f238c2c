"""The format of GPT-OSS (harmony): messages of channels, such as

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.server.chat_output.json_calls import JsonEnd, named
from quire.server.chat_output.parser import OutputParser, split

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


class GptOssParser(OutputParser):
    """Reads the analysis as reasoning, messages to functions as calls, and other messages as content."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._next = self._step_header
        # What is before the text of the message, and the part of the answer to which it belongs.
        self._header, self._kind = "", ""
        # The parts of the answer that have text of an earlier message.
        self._begun: set[str] = set()
        self._end = JsonEnd(0)

    def _step(self, last: bool) -> bool:
        return self._next(last)

    def _step_header(self, last: bool) -> bool:
        header, mark, rest = self._buffer.partition(MESSAGE)
        if not mark:
            if last and not any(mark in header for mark in ENDS):
                self._add("content", header)
            self._buffer = "" if last else self._buffer
            return False
        self._header, self._buffer = header + mark, rest
        channel = _CHANNEL_NAME.search(header)
        if _FUNCTION.search(header):
            self._end, self._next = JsonEnd(0), self._step_call
        else:
            is_analysis = channel is not None and channel[1] == "analysis"
            self._kind, self._next = "reasoning" if is_analysis else "content", self._step_text
            if self._kind in self._begun:
                self._add(self._kind, "\n")
        return True

    def _step_text(self, last: bool) -> bool:
        before, mark, self._buffer = split(self._buffer, ENDS, last)
        self._add(self._kind, before)
        return self._ended(mark)

    def _step_call(self, last: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith("{"):
            end = self._end.find(self._buffer)
            if end is None and not last:
                return False
            body, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
            self._add_call(body)
            self._next = self._step_rest
            return True
        body, mark, rest = split(self._buffer, ENDS, last)
        if mark is None and not last:
            return False
        self._buffer = rest
        self._add_call("{}" if mark and not body.strip() else body)
        return self._ended(mark)

    def _step_rest(self, last: bool) -> bool:
        """Leave out what is after the arguments of a call."""
        _, mark, self._buffer = split(self._buffer, ENDS, last)
        return self._ended(mark)

    def _ended(self, mark: str | None) -> bool:
        """Go on to the next message if there is a mark; return whether there is."""
        if mark is not None:
            # The channel's mark is a part of the next header.
            self._buffer = mark * (mark == CHANNEL) + self._buffer
            self._next = self._step_header
        return mark is not None

    def _add_call(self, body: str) -> None:
        found = _FUNCTION.search(self._header)
        call = None if found is None else named(found[1], body)
        if call is None:
            self._add("content", self._header + body)
        else:
            self._add_calls([call])

    def _add(self, kind: str, text: str) -> None:
        if text:
            self._begun.add(kind)
        if kind == "reasoning":
            self._delta.reasoning += text
        else:
            self._add_content(text)
