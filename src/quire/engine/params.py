"""Sampling parameters: how the next token is chosen, and when an output ends."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from reprlib import repr as shortened
from typing import Any, Literal

_INT64 = 2**63 - 1
_WHOLE = f"it must be a whole number, at most {_INT64}"
_CONSTRAINTS = ("json_schema", "regex", "grammar")


def _check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} = {value!r}: {allowed}")


def _number(value: Any) -> bool:
    """Whether a value is a number that a float can represent."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _whole(value: Any, low: int, high: int = _INT64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def half_character(text: str) -> int | None:
    """Where a text has a surrogate, half a character or a byte that is not UTF-8; None: it has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _text(value: Any) -> bool:
    """Whether a value is a non-empty string without surrogates."""
    return isinstance(value, str) and value != "" and half_character(value) is None


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The tokens of an attribute that must be a list of token ids."""
    ids = _several(name, value)
    # Most are lists of int, and may be long.
    are_ints = set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) <= _INT64))
    if not are_ints:
        _check(all(_whole(i, 0) for i in ids), name, ids, f"they must be whole numbers from 0 to {_INT64}")
    return ids


def _biases(value: Any) -> dict[int, float]:
    """A dict of logit_bias, as a copy."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias = {shortened(value)}: it must be a dict of numbers by token id")
    _token_ids("logit_bias", value.keys())
    for token, bias in value.items():
        if not _number(bias) or not -100 <= bias <= 100:
            raise ValueError(f"logit_bias has {bias!r} for token {token}: it must be a number from -100 to 100")
    return {token: float(bias) for token, bias in value.items()}


def _several(name: str, value: Any) -> tuple[Any, ...]:
    """The elements of an attribute that must be a list."""
    if isinstance(value, (bytes, bytearray, Mapping)):
        raise ValueError(f"{name} = {value!r}: it must be a list")
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name} = {value!r}: it must be a list") from None


def _schema(value: Any) -> str:
    """The text of a JSON schema that is given as a dict or as text."""
    allowed = "it must be a JSON schema, as a dict or as the text of a JSON object"
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        is_schema = _is_object(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema = {shortened(value)}: {allowed} ({error})") from None
    if not is_schema:
        raise ValueError(f"json_schema = {shortened(value)}: {allowed}")
    return text


# Parameters with a large schema are copied often.
@lru_cache(64)
def _is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request, with the names and meanings of OpenAI's and vLLM's interfaces.

    Parameters that are left out have the checkpoint's values (`LLM.default_params`, from generation_config.json) or, if
    the checkpoint does not set them either, the default in parentheses.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (greedy). None: the checkpoint's (0; checkpoints
            that do not set do_sample are greedy).
        top_k: sample from the k most likely tokens only; 0 or -1: from all. None: the checkpoint's (0).
        top_p: sample from the most likely tokens that together have this probability; 1: from all. None: the
            checkpoint's (1).
        min_p: sample from tokens at least this fraction as likely as the most likely. None: the checkpoint's (0).
        seed: makes the samples of the request reproducible, in any batch; None: they differ each time. From -2**63 to
            2**64 - 1, as for torch.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output. None:
            the checkpoint's (1).
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from the logits of tokens in the output, once per occurrence.
        max_tokens: tokens to generate at most; 0 computes the prompt only. None: up to the model's context. "auto": the
            checkpoint's (128).
        min_tokens: tokens to generate at least: among the first min_tokens, no end token and no stop token is sampled,
            and stop strings do not end the text. JSON, a regular expression or a grammar that is complete ends it.
        stop: one or several strings that end the text, which excludes them. None: the checkpoint's (none).
        stop_token_ids: tokens that end the output (as its last token), besides the model's own.
        include_stop_str_in_output: the text includes the stop string or stop token that ended it.
        skip_special_tokens: the text leaves out special tokens; stop strings are looked for in the text.
        ignore_eos: do not stop at the model's own end tokens.
        logit_bias: numbers from -100 to 100 by token id, which are added to the logits. None: none.
        allowed_token_ids: the only tokens that are sampled. None: all.
        bad_words: texts that are not generated: where the output ends with all tokens of a text but the last, the last
            one is not sampled. Each text is tokenized without spaces before it, and with one.
        logprobs: report log-probabilities of the chosen token and of this number of most likely tokens, before
            temperature and penalties; None: report none.
        prompt_logprobs: report log-probabilities of each token of the prompt but the first, given those before it, and
            of this number of most likely tokens; None: report none. Such a prompt is computed anew, without the tokens
            that are in the cache.
        truncate_prompt_tokens: use only so many tokens of a longer prompt, the last ones; -1: as many as leave room for
            max_tokens. None: all.
        json_schema: the output is JSON that this schema allows, and ends when it is complete: a dict, or its JSON text,
            which the attribute then has. {"type": "object"} allows all objects. None: the output is free.
        regex: the output matches this regular expression, from its first to its last character.
        grammar: the output is a text of this grammar, in llguidance's dialect of Lark's language, or in llama.cpp's
            GBNF, whose first rule is `root ::= ...`.

    Biases and forbidden tokens come before penalties and temperature. At most one of the last three may be set. They
    need llguidance (quire-attention[structured]), which refuses what it does not know of a schema, an expression or a
    grammar when the request is made.

    Raises:
        ValueError: a value is invalid; the message names the attribute, its value and the allowed values.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | Literal["auto"] | None = "auto"
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_tokens()
        self._check_end()
        for name in ("logprobs", "prompt_logprobs"):
            n = getattr(self, name)
            _check(n is None or _whole(n, 0), name, n, f"{_WHOLE}, and 0 or larger; or None")
        cut = self.truncate_prompt_tokens
        allowed = f"{_WHOLE}, and 1 or larger; -1 for as many as there is room for; or None"
        _check(cut is None or cut == -1 or _whole(cut, 1), "truncate_prompt_tokens", cut, allowed)
        self._check_constraint()

    def _check_distribution(self) -> None:
        t, k = self.temperature, self.top_k
        p, m = self.top_p, self.min_p
        _check(t is None or (_number(t) and t >= 0), "temperature", t, "it must be a number, 0 or larger")
        _check(k is None or _whole(k, -1), "top_k", k, f"{_WHOLE}; 0 or -1 for all")
        _check(p is None or (_number(p) and 0 < p <= 1), "top_p", p, "it must be above 0, and 1 at most")
        _check(m is None or (_number(m) and 0 <= m <= 1), "min_p", m, "it must be between 0 and 1")
        allowed = "it must be a whole number from -2**63 to 2**64 - 1, or None"
        _check(self.seed is None or _whole(self.seed, -(2**63), 2**64 - 1), "seed", self.seed, allowed)
        r = self.repetition_penalty
        _check(r is None or (_number(r) and r > 0), "repetition_penalty", r, "it must be a positive number")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(_number(getattr(self, name)), name, getattr(self, name), "it must be a number")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            # A Python integer may exceed the range of torch's.
            if getattr(self, name) is not None:
                self._set(name, float(getattr(self, name)))

    def _check_tokens(self) -> None:
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            _check(bool(ids), "allowed_token_ids", ids, "there must be at least one token, or None for all")
            self._set("allowed_token_ids", ids)
        words = self.bad_words
        _check(not isinstance(words, str), "bad_words", words, "they must be a list of strings")
        words = () if words is None else _several("bad_words", words)
        allowed = "they must be strings of more than spaces"
        _check(all(_text(word) and word.strip(" ") for word in words), "bad_words", words, allowed)
        self._set("bad_words", words)

    def _check_end(self) -> None:
        if self.stop is not None:
            self._set("stop", (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop))
        stops = () if self.stop is None else self.stop
        _check(all(_text(s) for s in stops), "stop", stops, "they must be non-empty strings")
        ids = () if self.stop_token_ids is None else _token_ids("stop_token_ids", self.stop_token_ids)
        self._set("stop_token_ids", ids)
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "it must be True or False")
        max_tokens, min_tokens = self.max_tokens, self.min_tokens
        allowed = f'{_WHOLE}, and 0 or larger; None for no limit; or "auto"'
        ok = max_tokens is None or max_tokens == "auto" or _whole(max_tokens, 0)
        _check(ok, "max_tokens", max_tokens, allowed)
        _check(_whole(min_tokens, 0), "min_tokens", min_tokens, f"{_WHOLE}, and 0 or larger")
        if isinstance(max_tokens, int):
            allowed = f"it must be at most max_tokens, which is {max_tokens}"
            _check(min_tokens <= max_tokens, "min_tokens", min_tokens, allowed)

    def _check_constraint(self) -> None:
        if self.json_schema is not None:
            self._set("json_schema", _schema(self.json_schema))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _check(value is None or _text(value), name, value, "it must be a non-empty string, or None")
        chosen = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]} and {chosen[1]} can't be combined: give one of {', '.join(_CONSTRAINTS)}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with those of `defaults` for the ones that are left out."""
        unset = {f.name: None for f in fields(self)} | {"max_tokens": "auto"}
        return replace(self, **{k: getattr(defaults, k) for k, none in unset.items() if getattr(self, k) == none})

    def truncated(self, prompt: list[int], max_len: int) -> list[int]:
        """The tokens of a prompt that are used, if prompt and output have at most `max_len` tokens."""
        max_prompt = self.truncate_prompt_tokens
        if max_prompt is None:
            return prompt
        if max_prompt == -1:
            max_prompt = max(1, max_len - (self.max_tokens if isinstance(self.max_tokens, int) else 1))
        return prompt[-max_prompt:]

    @property
    def constraint(self) -> tuple[str, str] | None:
        """What constrains the output: the name and value of json_schema, regex or grammar."""
        return next(((name, getattr(self, name)) for name in _CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


# The values of parameters that neither a request nor its checkpoint sets.
LIBRARY_DEFAULTS = SamplingParams(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=128, stop=()
)
