"""How tokens are reported: their names, their log-probabilities, and where they are in a text.

A token's name is its text. The name of a token that is a part of a character is OpenAI's `bytes:\\xe2\\x80`, and with
`return_tokens_as_token_ids` all names are vLLM's `token_id:123`.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine import Completion
from quire.engine.text import TextStream

Name = Callable[[int], str]


def text_name(own: bytes) -> str:
    """The name of a token that has these bytes."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def id_name(token: int) -> str:
    """The name of a token by its id."""
    return f"token_id:{token}"


def limited(report: Mapping[int, float], count: int, token: int) -> dict[int, float]:
    """The first `count` log-probabilities of a report, the most likely first, and that of its token."""
    return {other: value for i, (other, value) in enumerate(report.items()) if i < count or other == token}


def by_name(report: Mapping[int, float], token: int, name: Name) -> dict[str, float]:
    """A report with names instead of token ids. The token has its own name, and others that share the name of the token
    or of a likelier one are named by their ids.
    """
    own = name(token)
    named: dict[str, float] = {}
    for other, value in report.items():
        key = own if other == token else name(other)
        if other != token and (key == own or key in named):
            key = id_name(other)
        named[key] = value
    return named


def prompt_report(part: Completion, count: int, name: Name) -> Iterator[dict[str, dict[str, Any]] | None]:
    """The `prompt_logprobs` of vLLM: for each token of the prompt but the first, which has None, log-probabilities,
    ranks and texts by token id.
    """
    for token, report, rank in zip(
        part.prompt_token_ids, part.prompt_logprobs or (), part.prompt_ranks or (), strict=True
    ):
        if report is None:
            yield None
            continue
        ranked = enumerate(limited(report, count, token).items())
        yield {
            str(other): {
                "logprob": finite(value),
                "rank": i + 1 if i < count else rank,
                "decoded_token": name(other),
            }
            for i, (other, value) in ranked
        }


def finite(logprob: float) -> float:
    """A log-probability that JSON can have."""
    return logprob if logprob > _LEAST else _LEAST


# This stands for NaN and -inf, which JSON does not have.
_LEAST = -9999.0


class Offsets:
    """Where the tokens of a text begin in it. The tokens of one character all begin where it does.

    Args:
        tokenizer: a Transformers tokenizer.
        own: the bytes of each of its tokens.
        prompt: the tokens before the text.
        start: where the text begins.
        skip_special: whether special tokens have no text.
    """

    def __init__(
        self, tokenizer: Any, own: Callable[[int], bytes], prompt: Sequence[int], start: int, skip_special: bool = True
    ) -> None:
        self.stream, self._own = TextStream(tokenizer, prompt, (), skip_special=skip_special), own
        added = tokenizer.added_tokens_decoder.items()
        self._silent = frozenset(token for token, kind in added if skip_special and kind.special)
        self._decoder = getincrementaldecoder("utf-8")("replace")
        # The end of the text of the bytes so far, and that of the stream's text.
        self._end = self._known = start

    def __call__(self, token: int) -> int:
        """Where the next token begins."""
        own = b"" if token in self._silent else self._own(token)
        self._end += len(self._decoder.decode(own[:1]))
        # Unless the character goes on, this byte has ended it.
        begin = self._end - (own != b"" and not self._unfinished)
        self._end += len(self._decoder.decode(own[1:]))
        self.stream.push(token)
        known, self._known = self._known, self._known + len(self.stream.take())
        if not self._unfinished and not self.stream.unfinished:
            # The stream's text counts, which may lack a space at its beginning that its first token has.
            begin, self._end = max(known, begin + self._known - self._end), self._known
        return begin

    @property
    def _unfinished(self) -> bool:
        return bool(self._decoder.getstate()[0])


@dataclass
class Echo:
    """The text of a prompt, and where each of its tokens begins."""

    text: str
    offsets: list[int]


def echo(tokenizer: Any, own: Callable[[int], bytes], text: str | None, tokens: Sequence[int], offsets: bool) -> Echo:
    """The echo of a prompt.

    Args:
        tokenizer, own: as for `Offsets`.
        text: that has become the tokens; None: there is none.
        tokens: of the prompt.
        offsets: whether they are wanted.
    """
    if text is not None and not offsets:
        return Echo(text, [])
    if text is not None and tokenizer.is_fast:
        return Echo(text, _starts(text, tokenizer(text, return_offsets_mapping=True)["offset_mapping"]))
    begin = Offsets(tokenizer, own, (), 0, skip_special=False)
    begins = [begin(token) for token in tokens]
    begin.stream.finish()
    begin.stream.take(last=True)
    return Echo(begin.stream.text, begins)


def _starts(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Where tokens begin whose characters are at these spans of a text. A span may lack the space before a word, and
    what a normalizer has joined to its last character. The tokens of one character have equal spans, and special tokens
    that are not in the text empty ones.
    """
    starts, last = [], 0
    for start, end in spans:
        space = last + len(text[last:start].rstrip())
        starts.append(last if start == end else min(start, space))
        last = max(last, end)
    return starts
