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


def _text(value: Any) -> bool:
    """Whether a value is a non-empty string without surrogates, which stand for bytes that are not UTF-8."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= c <= "\udfff" for c in value)


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


@lru_cache(64)  # parameters with a large schema are copied often
def _is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request, with the names and meanings of OpenAI's and vLLM's interfaces.

    Parameters that are left out have the checkpoint's values (`LLM.default_params`, from generation_config.json) or, if
    the checkpoint does not set them either, the default in parentheses.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy). None: the checkpoint's (0; checkpoints
            that do not set do_sample are greedy).
        top_k: sample from the k likeliest tokens only; 0 or -1: from all. None: the checkpoint's (0).
        top_p: sample from the likeliest tokens that together have this probability; 1: from all. None: the
            checkpoint's (1).
        min_p: sample from tokens at least this fraction as likely as the likeliest. None: the checkpoint's (0).
        seed: makes the samples of the request reproducible, in any batch; None: they differ each time. From -2**63 to
            2**64 - 1, as for torch.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output. None:
            the checkpoint's (1).
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from the logits of tokens in the output, once per occurrence.
        max_tokens: tokens to generate at most; None: up to the model's context. "auto": the checkpoint's (128).
        stop: one or several strings that end the text, which excludes them. None: the checkpoint's (none).
        stop_token_ids: tokens that end the output (as its last token), besides the model's own.
        ignore_eos: do not stop at the model's own end tokens.
        logprobs: report log-probabilities of the chosen token and of this number of likeliest tokens, before
            temperature and penalties; None: report none.
        prompt_logprobs: report log-probabilities of each token of the prompt but the first, given those before it, and
            of this number of likeliest tokens; None: report none. Such a prompt is computed anew, without the tokens
            that are in the cache.
        json_schema: the output is JSON that this schema allows, and ends when it is complete: a dict, or its JSON text,
            which the attribute then has. {"type": "object"} allows all objects. None: the output is free.
        regex: the output matches this regular expression, from its first to its last character.
        grammar: the output is a text of this grammar, in llguidance's dialect of Lark's language.

    At most one of the last three may be set. They need llguidance (quire[structured]), which refuses what it does not
    know of a schema, an expression or a grammar when the request is made.

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
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.stop is not None:
            listed = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop)
            object.__setattr__(self, "stop", listed)
        ids = () if self.stop_token_ids is None else _several("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        t, p, m, r = self.temperature, self.top_p, self.min_p, self.repetition_penalty
        _check(t is None or (_number(t) and t >= 0), "temperature", t, "it must be a number, 0 or larger")
        k, whole = self.top_k, f"it must be a whole number, at most {_INT64}"
        _check(k is None or _whole(k, -1), "top_k", k, f"{whole}; 0 or -1 for all")
        _check(p is None or (_number(p) and 0 < p <= 1), "top_p", p, "it must be above 0, and 1 at most")
        _check(m is None or (_number(m) and 0 <= m <= 1), "min_p", m, "it must be between 0 and 1")
        allowed = "it must be a whole number from -2**63 to 2**64 - 1, or None"
        _check(self.seed is None or _whole(self.seed, -(2**63), 2**64 - 1), "seed", self.seed, allowed)
        _check(r is None or (_number(r) and r > 0), "repetition_penalty", r, "it must be a positive number")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(_number(getattr(self, name)), name, getattr(self, name), "it must be a number")
        most = self.max_tokens
        allowed = f'{whole}, and 1 or larger; None for no limit; or "auto"'
        _check(most is None or most == "auto" or _whole(most, 1), "max_tokens", most, allowed)
        stops = () if self.stop is None else self.stop
        _check(all(_text(s) for s in stops), "stop", stops, "they must be non-empty strings")
        allowed = f"they must be whole numbers from 0 to {_INT64}"
        _check(all(_whole(i, 0) for i in ids), "stop_token_ids", ids, allowed)
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "it must be True or False")
        for name in ("logprobs", "prompt_logprobs"):
            n = getattr(self, name)
            _check(n is None or _whole(n, 0), name, n, f"{whole}, and 0 or larger; or None")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema(self.json_schema))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _check(value is None or _text(value), name, value, "it must be a non-empty string, or None")
        chosen = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]} and {chosen[1]} can't be combined: give one of {', '.join(_CONSTRAINTS)}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:  # a Python integer may exceed the range of torch's
                object.__setattr__(self, name, float(getattr(self, name)))

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with those of `defaults` for the ones that are left out."""
        unset = {f.name: None for f in fields(self)} | {"max_tokens": "auto"}
        return replace(self, **{k: getattr(defaults, k) for k, none in unset.items() if getattr(self, k) == none})

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
