"""Incremental detokenization: whole characters only, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_CONTEXT = 6  # last tokens of the prompt, decoded with the output since a token's text can depend on those before it
_WINDOW = 16  # tokens that are decoded at once; then the window starts anew at the token that was added last
_BROKEN = "\ufffd"  # the text of an incomplete character


def decoder(tokenizer: Any) -> Callable[..., str]:
    """The function that decodes tokens of a Transformers tokenizer: its own method or, where that does no more than to
    call the tokenizers library, the library's, which takes a quarter of the time.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    plain = isinstance(tokenizer, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)
    if plain and "decode" not in vars(tokenizer) and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode
    return tokenizer.decode


class TextStream:
    """The text of a request's output.

    Args:
        tokenizer: a Transformers tokenizer.
        prompt: the prompt's tokens.
        stops: strings that end the text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decoder, self._stops = decoder(tokenizer), stops
        self._tokens = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._tokens)  # first token to decode, and first token not in the text yet
        self._known: str | None = None  # the text of tokens _start to _read, if it has been decoded
        self._text = ""
        self._taken = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return self._text

    def push(self, token: int) -> bool:
        """Add a token; return whether the text contains a stop string, before which it then ends."""
        self._tokens.append(token)
        known, full = self._known_text(), self._decode(self._start, len(self._tokens))
        if len(full) > len(known) and not full.endswith(_BROKEN):
            read, self._read, self._known = self._read, len(self._tokens), full
            if self._read - self._start > _WINDOW:
                self._start, self._known = read, None
            self._extend(full[len(known) :])
        return self.stopped

    def finish(self) -> None:
        """End the output: an incomplete character at its end is added to the text as it is."""
        if not self.stopped:
            known, full = self._known_text(), self._decode(self._start, len(self._tokens))
            self._read, self._known = len(self._tokens), full
            self._extend(full[len(known) :])

    def take(self, last: bool = False) -> str:
        """The text since the last call, without an end that may be the start of a stop string unless this is the last
        call.
        """
        end = len(self._text)
        if not last and not self.stopped:
            end -= max((_overlap(self._text, stop) for stop in self._stops), default=0)
        new = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _known_text(self) -> str:
        if self._known is None:
            self._known = self._decode(self._start, self._read)
        return self._known

    def _decode(self, start: int, end: int) -> str:
        return self._decoder(self._tokens[start:end], skip_special_tokens=True)

    def _extend(self, text: str) -> None:
        old = len(self._text)
        self._text += text
        indices = [self._text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        indices = [i for i in indices if i >= 0]
        if indices:
            self._text, self.stopped = self._text[: min(indices)], True


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
