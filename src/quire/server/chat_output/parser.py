"""The interface of parsers: text goes in as it is generated, and what is known of the message by then comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple


class FunctionCall(NamedTuple):
    """A call of a function: its name, and the JSON text of an object with its arguments."""

    name: str
    arguments: str


@dataclass(slots=True)
class MessageDelta:
    """What is added to a message. Calls are whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class OutputParser(ABC):
    """Reads the output of one completion.

    Text that may belong to a call is held until that is decided. A call that is not well-formed is content, as it was
    written. White space between calls, and between content and a call, is left out.

    Attributes:
        begin: the mark that calls begin with; "": they have none.
    """

    begin: ClassVar[str] = ""

    def __init__(self) -> None:
        self._buffer = ""
        self._delta = MessageDelta()
        # White space that is content unless a call follows.
        self._space = ""
        # Whether white space is left out until other content follows.
        self._trims = False

    def feed(self, text: str, last: bool = False) -> MessageDelta:
        """Add text of the output.

        Args:
            text: what has been generated since the last call.
            last: whether this is the end of the output.
        """
        self._buffer += text
        self._delta = MessageDelta()
        while self._step(last):
            pass
        if last and not self._trims:
            self._delta.content += self._space
        return self._delta

    @abstractmethod
    def _step(self, last: bool) -> bool:
        """Take the next piece from the buffer; return whether there may be another one. At the last call, nothing is
        left in the buffer after the last piece.
        """

    def _add_content(self, text: str) -> None:
        text = self._space + text
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._delta.content += shown

    def _add_calls(self, calls: Sequence[FunctionCall]) -> None:
        self._delta.calls += calls
        self._space, self._trims = "", True


class ContentParser(OutputParser):
    """All text is content."""

    def feed(self, text: str, last: bool = False) -> MessageDelta:
        return MessageDelta(text)

    def _step(self, last: bool) -> bool:
        return False


def split(text: str, marks: Sequence[str], last: bool) -> tuple[str, str | None, str]:
    """The text before the first of the marks, that mark, and the rest.

    Without a mark, the rest is an end of the text that may be the start of one, unless no more text follows.
    """
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if places:
        place, mark = min(places)
        return text[:place], mark, text[place + len(mark) :]
    longest = 0 if last else max(map(len, marks)) - 1
    # Few characters begin a mark, and most texts have none of them.
    firsts = {mark[0] for mark in marks}
    tail = range(max(0, len(text) - longest), len(text))
    end = next((i for i in tail if text[i] in firsts and begins(text[i:], marks)), len(text))
    return text[:end], None, text[end:]


def begins(text: str, marks: Sequence[str]) -> bool:
    """Whether more text can make one of the marks of a text."""
    return any(mark.startswith(text) for mark in marks)
