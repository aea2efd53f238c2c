"""From a prompt to token ids that the model and the cache have room for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from functools import cached_property
from operator import index
from typing import Any

from quire.engine.model import Model
from quire.engine.multimodal import check_text
from quire.engine.params import SamplingParams
from quire.engine.prompt_size import check_size, longest_token


class PromptReader:
    """Tokenizes prompts, and refuses those that cannot be computed.

    Args:
        model: has the tokenizer, the vocabulary and the context.
        max_len: the largest number of tokens of a request, prompt and output, that the context and the cache allow.
    """

    def __init__(self, model: Model, max_len: int) -> None:
        self._model, self._max_len = model, max_len

    def read(self, prompt: str | Sequence[int], params: SamplingParams, name: str) -> list[int]:
        """The token ids of a request's prompt, of which `params` may use the last ones only.

        Raises:
            ValueError: the prompt is not one, is empty, leaves no room for a token, has unknown tokens or tokens of
                images; the message has `name`. Or token ids in `params` are unknown; the message has the attribute.
        """
        if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
            check_size(prompt, name, self._longest_token, self._max_len)
        tokens = params.truncated(self.encode(prompt, name), self._max_len)
        self._check_length(name, len(tokens), params)
        self._check_token_ids(name, tokens)
        check_text(name, tokens, self._model.media_tokens)
        self._check_token_ids("logit_bias", params.logit_bias or ())
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
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
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise ValueError(f"{name} is a string, but {self._model.folder} has no tokenizer: pass token ids")
        surrogate = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        if surrogate is not None:
            what = f"{surrogate!r} at {text.index(surrogate)} is half a character or a byte that is not UTF-8"
            raise ValueError(f"{name} is not text: {what}")
        # `verbose` is for warnings of texts beyond the tokenizer's own length, which is no bound here.
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"] if text else []
        return ids

    def _check_length(self, name: str, count: int, params: SamplingParams) -> None:
        """Refuse a prompt without tokens, or without room for a token of the output, if there is to be one."""
        if not count:
            raise ValueError(f"{name} is empty: there must be at least one token")
        end, context = count + (params.max_tokens != 0), self._model.context
        if end > context:
            raise ValueError(f"{name} has {count} tokens: the model's context of {context} leaves no room")
        if end > self._max_len:
            raise ValueError(f"{name} has {count} tokens: the cache of {self._max_len} tokens leaves no room")

    def _check_token_ids(self, name: str, ids: Collection[int]) -> None:
        """Refuse tokens that the model does not have."""
        size = self._model.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            unknown = next(t for t in ids if not 0 <= t < size)
            raise ValueError(f"{name} has token {unknown}: tokens are 0 to {size - 1}")

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self._model.tokenizer)


def _token_id(value: Any) -> int:
    """A token id as int; TypeError for bool and for values that are not integers."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)
