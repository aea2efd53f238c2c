"""How the next token is chosen, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def _check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} = {value!r}: {allowed}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling, with the meanings that OpenAI's and vLLM's interfaces gave these names.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: sample from the k likeliest tokens only; 0 or -1: from all.
        top_p: sample from the likeliest tokens that together have this probability; 1: from all.
        min_p: sample from tokens at least this fraction as likely as the likeliest.
        seed: makes the request's samples repeat, whatever else is in the batch; None: they differ each time.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from the logits of tokens in the output, once for each time they are there.
        max_tokens: tokens to generate at most; None: up to the model's context.
        stop: strings that end the text before themselves.
        stop_token_ids: tokens that end the output (as its last token), besides the model's own.
        ignore_eos: do not stop at the model's own end tokens.
        logprobs: report the logarithms of the probabilities of the chosen token and of that many likeliest tokens,
            before temperature and penalties; None: don't.

    Raises:
        ValueError: naming the attribute, its value and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 128
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        t = self.temperature
        _check(_number(t) and t >= 0, "temperature", t, "it must be a number, 0 or larger")
        _check(
            _whole(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "it must be a whole number; 0 or -1 for all"
        )
        _check(_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "it must be above 0, and 1 at most")
        _check(_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "it must be between 0 and 1")
        _check(self.seed is None or _whole(self.seed), "seed", self.seed, "it must be a whole number or None")
        r = self.repetition_penalty
        _check(_number(r) and r > 0, "repetition_penalty", r, "it must be a positive number")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(_number(getattr(self, name)), name, getattr(self, name), "it must be a number")
        m = self.max_tokens
        _check(m is None or (_whole(m) and m >= 1), "max_tokens", m, "it must be a whole number, 1 or larger, or None")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "they must be non-empty strings")
        _check(all(_whole(i) for i in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "whole numbers")
        n = self.logprobs
        _check(n is None or (_whole(n) and n >= 0), "logprobs", n, "it must be a whole number, 0 or larger, or None")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
