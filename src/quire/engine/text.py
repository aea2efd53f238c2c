"""Incremental detokenization: whole characters only, up to the first stop string.

Most tokenizers decode a token to the same bytes after any others. A token of whole characters then has a text of its
own, which is decoded once for all requests. Other tokens are decoded together with those before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from quire.engine.params import SamplingParams
from quire.engine.transformers_internals import calls_library_to_decode

# How many tokens of the end of a prompt are decoded with the output, since a token's text can depend on those before
# it.
_CONTEXT = 6
# How many tokens are decoded at once; then the window starts anew at the token that was added last.
_WINDOW = 4
# The text of an incomplete character.
_BROKEN = "\ufffd"


class _OwnTexts(dict[int, str | None]):
    """The text of each token; None if it has none, or if it may be a part of a character."""

    def __init__(self, decode: Callable[..., str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token: int) -> str | None:
        text = self._decode([token], skip_special_tokens=True)
        known = self[token] = text if text and _BROKEN not in text else None
        return known


# The texts of each tokenizer whose tokens have texts of their own.
_own_texts: WeakKeyDictionary[Any, _OwnTexts] = WeakKeyDictionary()


def decoder(tokenizer: Any) -> tuple[Callable[..., str], _OwnTexts | None]:
    """The function that decodes tokens of a Transformers tokenizer, and the tokens' own texts, if they have them. The
    function is the tokenizer's own method or, where that does no more than to call the tokenizers library, the
    library's, which takes a quarter of the time.
    """
    from tokenizers.decoders import ByteLevel

    if not calls_library_to_decode(tokenizer):
        return tokenizer.decode, None
    library = tokenizer.backend_tokenizer
    if tokenizer not in _own_texts and isinstance(library.decoder, ByteLevel):
        _own_texts[tokenizer] = _OwnTexts(library.decode)
    return library.decode, _own_texts.get(tokenizer)


class TokenBytes:
    """The bytes of single tokens of a Transformers tokenizer. Of tokens that are a part of a character, they are known
    if the tokenizer is a byte-level one or has tokens for single bytes, and otherwise those of U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        library = tokenizer.backend_tokenizer.decoder if getattr(tokenizer, "is_fast", False) else None
        form = {} if library is None else json.loads(library.__getstate__())
        self._kinds = {kind["type"] for kind in (form, *form.get("decoders", ())) if kind}
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if "ByteLevel" in self._kinds:
            piece = self._tokenizer.convert_ids_to_tokens(token) or ""
            known = all(character in self._bytes for character in piece)
            return bytes(self._bytes[character] for character in piece) if known else piece.encode()
        if "ByteFallback" in self._kinds:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", self._tokenizer.convert_ids_to_tokens(token) or "")
            if byte:
                return bytes.fromhex(byte[1])
        # A token that begins a text may lose its space, so the text is that of the token after itself.
        once, twice = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(once) :].encode()


class TextStream:
    """The text of a request's output.

    Args:
        tokenizer: a Transformers tokenizer.
        prompt: the prompt's tokens.
        stops: strings that end the text.
        include_stop: whether the text includes the stop string that ends it.
        skip_special: whether special tokens have no text.
    """

    # Whether stop strings end the text.
    searches = True

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stops: Sequence[str],
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._stops, self._include_stop = stops, include_stop
        self._skip_special = skip_special
        self._decoder, self._own_texts = decoder(tokenizer)
        # The last tokens, which are decoded together, and the part of their text that is in the prompt or the stream's
        # text.
        self._window = list(prompt[-_CONTEXT:])
        self._known = self._decode()
        if self._known.startswith(_BROKEN):
            # The window begins within a character. A decoder of single bytes needs all bytes of its first character.
            suffixes = (self._window[i:] for i in range(1, len(self._window)))
            whole = (w for w in suffixes if not self._decoder(w, skip_special_tokens=True).startswith(_BROKEN))
            self._window = next(whole, self._window)
            self._known = self._decode()
        # How many tokens of the window have all their text in the prompt or the stream's text.
        self._read = len(self._window)
        # The text that has been taken, in parts, and the text after that, in which stop strings begin.
        self._taken: list[str] = []
        self._held = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return "".join([*self._taken, self._held])

    @property
    def unfinished(self) -> bool:
        """Whether the text of the last tokens is not known, because they may be a part of a character."""
        return self._read < len(self._window) and self._decode().endswith(_BROKEN)

    def push(self, token: int) -> bool:
        """Add a token; return whether the text contains a stop string, before which it then ends."""
        window = self._window
        if self._own_texts is not None and self._read == len(window):
            text = self._own_texts[token]
            if text is not None:
                # Later tokens do not depend on those of the window.
                if window:
                    self._window, self._known = [], ""
                    self._read = 0
                self._extend(text)
                return self.stopped
        window.append(token)
        full = self._decoder(window, skip_special_tokens=self._skip_special)
        length = self._num_known(full)
        if len(full) > length and not full.endswith(_BROKEN):
            self._known = full
            if len(window) > _WINDOW:
                del window[: self._read]
                self._known = self._decoder(window, skip_special_tokens=self._skip_special)
            self._read = len(window)
            self._extend(full[length:])
        return self.stopped

    def finish(self) -> None:
        """End the output: an incomplete character at its end is added to the text as it is."""
        if not self.stopped:
            full = self._decode()
            length = self._num_known(full)
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

    def _num_known(self, full: str) -> int:
        """How many characters of the window's text are in the stream's, or in the prompt's. A character that begins in
        the prompt may end in the output.
        """
        return len(self._known if full.startswith(self._known) else self._known.rstrip(_BROKEN))

    def _decode(self) -> str:
        return self._decoder(self._window, skip_special_tokens=self._skip_special) if self._window else ""

    def _extend(self, text: str) -> None:
        old = len(self._held)
        self._held += text
        if not self._stops or not self.searches:
            return
        found = [(self._held.find(stop, max(0, old - len(stop) + 1)), len(stop)) for stop in self._stops]
        found = [place for place in found if place[0] >= 0]
        if found:
            start, length = min(found)
            self._held, self.stopped = self._held[: start + (length if self._include_stop else 0)], True


class _LateStops(TextStream):
    """A text that no stop string ends before the first `min_tokens` tokens have been added."""

    def __init__(self, min_tokens: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._left = min_tokens

    def push(self, token: int) -> bool:
        self.searches, self._left = self._left <= 0, self._left - 1
        return super().push(token)


def text_stream(tokenizer: Any, prompt: Sequence[int], params: SamplingParams) -> TextStream:
    """The text of the output of a request with these parameters."""
    ends = (params.stop or (), params.include_stop_str_in_output)
    arguments = (tokenizer, prompt, *ends, params.skip_special_tokens)
    if params.min_tokens and params.stop:
        return _LateStops(params.min_tokens, *arguments)
    return TextStream(*arguments)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
