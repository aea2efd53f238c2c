"""From a prompt and its parameters to what the engine computes: tokens that there is room for, and no missing values.

Nothing here needs the model itself, so that a server checks requests in another process than the engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from operator import index
from pathlib import Path
from typing import Any

from quire.engine.embedding import EmbeddingParams
from quire.engine.model_info import ModelInfo, unknown_adapter
from quire.engine.multimodal import check_text
from quire.engine.params import SamplingParams, half_character
from quire.engine.prompt_size import check_size, longest_token

# How many lists of bad words are kept as tokens.
_MAX_WORD_LISTS = 64


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request whose prompt and parameters have been checked.

    Attributes:
        prompt: token ids.
        params: sampling parameters without missing values.
        bad_words: the token sequences of `params.bad_words`.
        adapter: the name of the request's adapter; None: it has none.
    """

    prompt: list[int]
    params: SamplingParams
    bad_words: list[tuple[int, ...]]
    adapter: str | None = None


class PromptReader:
    """Makes requests of tokens, and refuses those that cannot be computed.

    Args:
        info: the model and the engine. Another one takes its place when adapters have come or gone.
        tokenizer: of the model; None if it has none.
    """

    def __init__(self, info: ModelInfo, tokenizer: Any) -> None:
        self.info, self.tokenizer = info, tokenizer
        self._word_tokens = lru_cache(_MAX_WORD_LISTS)(partial(word_tokens, tokenizer))
        # The parameters that were resolved last, and what they became: those of all completions of a prompt are equal.
        self._resolved: tuple[SamplingParams, SamplingParams] | None = None

    def request(
        self, prompt: str | Sequence[int], params: SamplingParams, name: str = "prompt", adapter: str | None = None
    ) -> TokenRequest:
        """The request of a prompt with an adapter; the model's defaults replace parameters that are left out.

        Raises:
            ValueError: as for `read` and `check_adapter`. Or token ids in `params` are unknown, or other parameters do
                not fit the model or the runner; the message has the attribute of `params`.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} has params = {params!r}: they must be SamplingParams")
        params, info = self._over_defaults(params), self.info
        if info.is_headless:
            raise ValueError(f"{info.folder} has no language-model head: only embeddings can be computed")
        tokens = self.read(prompt, params, name)
        if params.prompt_logprobs is not None and not info.supports_all_logits:
            what = f"{info.runner} does not compute the logits of prompts"
            raise ValueError(f"prompt_logprobs = {params.prompt_logprobs}: {what}")
        if self.tokenizer is None and (params.stop or params.bad_words):
            what = "stop strings" if params.stop else "bad_words"
            raise ValueError(f"{name} has {what}, but {info.folder} has no tokenizer")
        self.check_adapter(adapter)
        words = self.word_tokens(params)
        self._check_allowed(params, words)
        return TokenRequest(tokens, params, words, adapter)

    def check_adapter(self, name: str | None) -> None:
        """Raise a ValueError, which has the known ones, if no adapter has this name; None means no adapter."""
        if name is None:
            return
        if not isinstance(name, str):
            raise ValueError(f"adapter = {name!r}: it must be the name of an adapter, or None")
        known = [adapter.name for adapter in self.info.adapters]
        if name not in known:
            raise ValueError(unknown_adapter(name, known))

    def word_tokens(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The token sequences of `bad_words`, which are kept for further requests with the same.

        Raises:
            ValueError: a word has no tokens.
        """
        return self._word_tokens(params.bad_words) if params.bad_words else []

    def _check_allowed(self, params: SamplingParams, words: Sequence[Sequence[int]]) -> None:
        """Raise a ValueError if no token may be sampled at first."""
        if params.allowed_token_ids is None:
            return
        forbidden = {word[0] for word in words if len(word) == 1}
        if params.min_tokens:
            forbidden.update(params.stop_token_ids, self.info.end_ids)
        if forbidden.issuperset(params.allowed_token_ids):
            raise ValueError("allowed_token_ids has only tokens that bad_words or min_tokens forbid")

    def _over_defaults(self, params: SamplingParams) -> SamplingParams:
        """Parameters with the model's defaults for those that are left out."""
        known = self._resolved
        if known is not None and known[0] is params:
            return known[1]
        resolved = params.over(self.info.default_params)
        self._check_token_ids("logit_bias", resolved.logit_bias or ())
        self._check_token_ids("allowed_token_ids", resolved.allowed_token_ids or ())
        self._resolved = params, resolved
        return resolved

    def embedding_params(self, params: EmbeddingParams) -> EmbeddingParams:
        """The parameters of embeddings, with the model's values for those that are left out.

        Raises:
            ValueError: the embeddings of the model cannot be computed, or not with these parameters.
        """
        if not isinstance(params, EmbeddingParams):
            raise ValueError(f"params = {params!r}: they must be EmbeddingParams")
        info, size = self.info, self.info.embedding_size
        if size is None or not info.supports_all_logits:
            what = f"{info.folder} does not return" if size is None else f"{info.runner} drops"
            raise ValueError(f"embeddings can't be computed: {what} the hidden states of its tokens")
        return params.resolved(info.pooling, Path(info.folder), size)

    def read(self, prompt: str | Sequence[int], params: SamplingParams, name: str) -> list[int]:
        """The token ids of a request's prompt, of which `params` may use the last ones only.

        Raises:
            ValueError: the prompt is not one, is empty, leaves no room for a token, has unknown tokens or tokens of
                images; the message has `name`.
        """
        if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
            check_size(prompt, name, self._longest_token, self.info.max_len)
        tokens = params.truncated(self.encode(prompt, name), self.info.max_len)
        self._check_length(name, len(tokens), params)
        self._check_token_ids(name, tokens)
        check_text(name, tokens, self.info.media_tokens)
        return tokens

    def encode(self, prompt: str | Sequence[int], name: str) -> list[int]:
        """The token ids of a prompt of any length.

        Raises:
            ValueError: the prompt is neither text nor token ids, or is text and the model has no tokenizer; the message
                has `name`.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt, name)
        try:
            if isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set)):
                raise TypeError
            # Most prompts of token ids are lists of int, and may be long.
            if isinstance(prompt, list) and set(map(type, prompt)) <= {int}:
                return list(prompt)
            return [_token_id(t) for t in prompt]
        except TypeError:
            raise ValueError(f"{name} must be a string or a sequence of token ids") from None

    def _encode_text(self, text: str, name: str) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"{name} is a string, but {self.info.folder} has no tokenizer: pass token ids")
        surrogate = half_character(text)
        if surrogate is not None:
            what = f"{text[surrogate]!r} at {surrogate} is half a character or a byte that is not UTF-8"
            raise ValueError(f"{name} is not text: {what}")
        # `verbose` is for warnings of texts beyond the tokenizer's own length, which is no bound here.
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"] if text else []
        return ids

    def _check_length(self, name: str, count: int, params: SamplingParams) -> None:
        """Refuse a prompt without tokens, or without room for a token of the output, if there is to be one."""
        if not count:
            raise ValueError(f"{name} is empty: there must be at least one token")
        end, context = count + (params.max_tokens != 0), self.info.context
        if end > context:
            raise ValueError(f"{name} has {count} tokens: the model's context of {context} leaves no room")
        if end > self.info.max_len:
            raise ValueError(f"{name} has {count} tokens: the cache of {self.info.max_len} tokens leaves no room")

    def _check_token_ids(self, name: str, ids: Collection[int]) -> None:
        """Refuse tokens that the model does not have."""
        size = self.info.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            unknown = next(t for t in ids if not 0 <= t < size)
            raise ValueError(f"{name} has token {unknown}: tokens are 0 to {size - 1}")

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self.tokenizer)


def word_tokens(tokenizer: Any, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The token sequences of bad_words: of each word as it is, and with a space before it.

    Raises:
        ValueError: a word has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        stripped = word.lstrip(" ")
        texts = [stripped, f" {stripped}"]
        alone, spaced = (tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
        if not alone:
            raise ValueError(f"bad_words has {word!r}, which has no tokens")
        sequences[alone] = None
        # Otherwise the first sequence forbids the second, too.
        if spaced[-len(alone) :] != alone:
            sequences[spaced] = None
    return list(sequences)


def _token_id(value: Any) -> int:
    """A token id as int; TypeError for bool and for values that are not integers."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)
