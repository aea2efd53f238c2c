"""Incremental detokenization: whole characters only, up to the first stop string.

Most tokenizers decode a token to the same bytes after any others. A token of whole characters then has a text of its
own, which is decoded once for all requests. Other tokens are decoded together with those before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

_CONTEXT = 6  # last tokens of the prompt, decoded with the output since a token's text can depend on those before it
_WINDOW = 4  # tokens that are decoded at once; then the window starts anew at the token that was added last
_BROKEN = "\ufffd"  # the text of an incomplete character


class _OwnTexts(dict[int, str | None]):
    """The text of each token; None if it has none, or if it may be a part of a character."""

    def __init__(self, decode: Callable[..., str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token: int) -> str | None:
        text = self._decode([token], skip_special_tokens=True)
        own = self[token] = text if text and _BROKEN not in text else None
        return own


_own_texts: WeakKeyDictionary[Any, _OwnTexts] = WeakKeyDictionary()  # of each tokenizer whose tokens have them


def decoder(tokenizer: Any) -> tuple[Callable[..., str], _OwnTexts | None]:
    """The function that decodes tokens of a Transformers tokenizer, and the tokens' own texts, if they have them. The
    function is the tokenizer's own method or, where that does no more than to call the tokenizers library, the
    library's, which takes a quarter of the time.
    """
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    plain = isinstance(tokenizer, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)
    if not plain or "decode" in vars(tokenizer) or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.decode, None
    library = tokenizer.backend_tokenizer
    if tokenizer not in _own_texts and isinstance(library.decoder, ByteLevel):
        _own_texts[tokenizer] = _OwnTexts(library.decode)
    return library.decode, _own_texts.get(tokenizer)


class TextStream:
    """The text of a request's output.

    Args:
        tokenizer: a Transformers tokenizer.
        prompt: the prompt's tokens.
        stops: strings that end the text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._stops = stops
        self._decoder, self._own_texts = decoder(tokenizer)
        self._window = list(prompt[-_CONTEXT:])  # the last tokens, which are decoded together
        self._known = self._decode()  # their text, without what is not in the stream's text yet
        self._read = len(self._window)  # how many of them have all their text in the stream's
        self._taken: list[str] = []  # the text that has been taken, in parts
        self._held = ""  # the text after that, in which stop strings begin
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return "".join([*self._taken, self._held])

    def push(self, token: int) -> bool:
        """Add a token; return whether the text contains a stop string, before which it then ends."""
        window = self._window
        if self._own_texts is not None and self._read == len(window):
            own = self._own_texts[token]
            if own is not None:
                if window:  # later tokens do not depend on these
                    self._window, self._known, self._read = [], "", 0
                self._extend(own)
                return self.stopped
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
        new, self._held = self._held, ""
        if self._stops and not last and not self.stopped:
            end = len(new) - max(_overlap(new, stop) for stop in self._stops)
            new, self._held = new[:end], new[end:]
        self._taken.append(new)
        return new

    def _decode(self) -> str:
        return self._decoder(self._window, skip_special_tokens=True) if self._window else ""

    def _extend(self, text: str) -> None:
        old = len(self._held)
        self._held += text
        if not self._stops:
            return
        indices = [self._held.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        indices = [i for i in indices if i >= 0]
        if indices:
            self._held, self.stopped = self._held[: min(indices)], True


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
