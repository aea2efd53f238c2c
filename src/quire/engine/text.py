"""From tokens to text, as they come: whole characters only, and no further than the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens of the prompt that are decoded along, since a token's text can depend on those before it
_BROKEN = "\ufffd"  # what half a character decodes to


class TextStream:
    """The text of one request's output.

    Args:
        tokenizer: a Transformers tokenizer.
        prompt: the prompt's tokens.
        stops: strings that end the text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._tokens)  # decoded along, and already in the text
        self._text = ""
        self._taken = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return self._text

    def push(self, token: int) -> bool:
        """Add a token; True if a stop string is complete, and the text ends before it."""
        self._tokens.append(token)
        known, full = self._decode(self._start, self._read), self._decode(self._start, len(self._tokens))
        if len(full) > len(known) and not full.endswith(_BROKEN):
            self._start, self._read = self._read, len(self._tokens)
            self._extend(full[len(known) :])
        return self.stopped

    def finish(self) -> None:
        """No more tokens come: what is left of a broken character joins the text."""
        if not self.stopped:
            known, full = self._decode(self._start, self._read), self._decode(self._start, len(self._tokens))
            self._read = len(self._tokens)
            self._extend(full[len(known) :])

    def take(self, last: bool = False) -> str:
        """Text that is certain and has not been taken: what could be the begin of a stop string is held back."""
        end = len(self._text)
        if not last and not self.stopped:
            end -= max((_overlap(self._text, stop) for stop in self._stops), default=0)
        new = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)

    def _extend(self, piece: str) -> None:
        old = len(self._text)
        self._text += piece
        found = [self._text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        found = [at for at in found if at >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a begin of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
