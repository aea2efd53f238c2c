"""Reasoning between marks before the content: <think>...</think>, or [THINK]...[/THINK] of Mistral."""

from __future__ import annotations

from quire.server.chat_output.parser import MessageDelta, OutputParser, split


class ReasoningParser(OutputParser):
    """Reads reasoning at the beginning of an output. White space around it is left out.

    Args:
        marks: what reasoning begins and ends with.
        opened: whether the prompt ends with the first of the marks, so that the output begins with reasoning.
        rest: reads what follows.
    """

    def __init__(self, marks: tuple[str, str], opened: bool, rest: OutputParser) -> None:
        super().__init__()
        self._begin, self._end = marks
        self._opened, self._rest = opened, rest
        # Whether there is reasoning already, so that white space before more of it belongs to it.
        self._reasoned = False
        self._next = self._step_start

    def _step(self, last: bool) -> bool:
        return self._next(last)

    def _step_start(self, last: bool) -> bool:
        start = self._buffer.lstrip()
        if self._begin.startswith(start) and start != self._begin and not last:
            return False
        if start.startswith(self._begin):
            self._buffer = start.removeprefix(self._begin)
            self._opened = True
        self._next = self._step_reasoning if self._opened else self._step_rest
        return True

    def _step_reasoning(self, last: bool) -> bool:
        before, mark, rest = split(self._buffer, (self._end,), last)
        text = before if self._reasoned else before.lstrip()
        # White space at the end waits in the buffer for what follows it.
        shown = text.rstrip()
        self._reasoned |= bool(shown)
        self._delta.reasoning += shown
        if mark is None:
            self._buffer = "" if last else text[len(shown) :] + rest
            return False
        self._buffer, self._next = rest, self._step_gap
        return True

    def _step_gap(self, last: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer or last:
            self._next = self._step_rest
        return self._next == self._step_rest

    def _step_rest(self, last: bool) -> bool:
        found = self._rest.feed(self._buffer, last)
        self._delta = MessageDelta(found.content, self._delta.reasoning + found.reasoning, found.calls)
        self._buffer = ""
        return False
