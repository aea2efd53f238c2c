"""Incremental detokenization: whole characters only, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_CONTEXT = 6  # last tokens of the prompt, decoded with the output since a token's text can depend on those before it
_WINDOW = 4  # tokens that are decoded at once; then the window starts anew at the token that was added last
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
        self._window = list(prompt[-_CONTEXT:])  # the last tokens, which are decoded together
        self._known = self._decode()  # their text, without what is not in `text` yet
        self._read = len(self._window)  # how many of them have all their text in `text`
        self._text = ""
        self._taken = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return self._text

    def push(self, token: int) -> bool:
        """Add a token; return whether the text contains a stop string, before which it then ends."""
        window = self._window
        window.append(token)
        full, length = self._decoder(window, skip_special_tokens=True), len(self._known)
        if len(full) > length and not full.endswith(_BROKEN):
            self._known = full
            if len(window) > _WINDOW:
                del window[: self._read]
                self._known = self._decoder(window, skip_special_tokens=True)
            self._read = len(window)
            self._extend(full[length:])
        return self.stopped

    def finish(self) -> None:
        """End the output: an incomplete character at its end is added to the text as it is."""
        if not self.stopped:
            full, length = self._decode(), len(self._known)
            self._read, self._known = len(self._window), full
            self._extend(full[length:])

    def take(self, last: bool = False) -> str:
        """The text since the last call, without an end that may be the start of a stop string unless this is the last
        call.
        """
        end = len(self._text)
        if self._stops and not last and not self.stopped:
            end -= max(_overlap(self._text, stop) for stop in self._stops)
        new = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _decode(self) -> str:
        return self._decoder(self._window, skip_special_tokens=True) if self._window else ""

    def _extend(self, text: str) -> None:
        old = len(self._text)
        self._text += text
        if not self._stops:
            return
        indices = [self._text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        indices = [i for i in indices if i >= 0]
        if indices:
            self._text, self.stopped = self._text[: min(indices)], True


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
