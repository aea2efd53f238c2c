"""What requests ask of their logits before penalties and temperature: biases, and tokens that must not be sampled.

A request's parameters become `TokenRules` when it is made. `LogitsProcessors` has the rules of a batch on the device,
where they are applied without waiting for it: what depends on the last tokens of an output reads them from the lists
that the device has (`TokenLists`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.params import SamplingParams
from quire.steps import upload

_ALWAYS = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, slots=True)
class TokenRules:
    """The rules of one request.

    Attributes:
        tokens, values, until: int64, float64 and int64 [n]: to the logit of a token its value is added as long as the
            output has fewer than `until` tokens.
        allowed: int64 [m], the only tokens that may be sampled, in ascending order; None: all.
        words: sequences of two or more tokens, the last of which is forbidden where the output ends with the others.
    """

    tokens: np.ndarray
    values: np.ndarray
    until: np.ndarray
    allowed: np.ndarray | None
    words: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls, params: SamplingParams, stop_token_ids: frozenset[int], bad_words: Sequence[Sequence[int]] = ()
    ) -> TokenRules | None:
        """The rules of a request's parameters; None if there are none.

        Args:
            stop_token_ids: the end and stop tokens, which min_tokens forbids for a while.
            bad_words: the token sequences of `params.bad_words`.
        """
        min_tokens, bias = params.min_tokens, params.logit_bias or {}
        entries = [(token, value, _ALWAYS) for token, value in bias.items()]
        entries += [(word[0], -np.inf, _ALWAYS) for word in bad_words if len(word) == 1]
        entries += [(token, -np.inf, min_tokens) for token in sorted(stop_token_ids)] if min_tokens else []
        words = [word for word in bad_words if len(word) > 1]
        allowed = None if params.allowed_token_ids is None else np.unique(params.allowed_token_ids)
        if not entries and not words and allowed is None:
            return None
        tokens, values, until = zip(*entries, strict=True) if entries else ((), (), ())
        return cls(np.array(tokens, np.int64), np.array(values, float), np.array(until, np.int64), allowed, words)

    def permitted(self, tokens: np.ndarray, output: Sequence[int]) -> np.ndarray:
        """The tokens that may follow an output, of those given.

        Args:
            tokens: int64 [n], token ids.
            output: the tokens of the output.

        Returns:
            int64 [m], in ascending order.
        """
        if self.allowed is not None:
            tokens = np.intersect1d(tokens, self.allowed)
        forbidden = self.tokens[(self.values == -np.inf) & (len(output) < self.until)].tolist()
        forbidden += [word[-1] for word in self.words if list(output[1 - len(word) :]) == list(word[:-1])]
        return np.setdiff1d(tokens, forbidden)


class LogitsProcessors:
    """The rules of a batch's requests, on the device.

    Args:
        rules: of each row of logits; None: none.
        slots: of each row, which list of `TokenLists` has its tokens, where the rules have words.
        vocab_size: the number of columns of the logits; rules for other tokens are left out.
        device: where the logits are.
    """

    def __init__(
        self, rules: Sequence[TokenRules | None], slots: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        of_rows = [(row, r) for row, r in enumerate(rules) if r is not None]
        self._added = self._words = self._allowed = None
        if any(len(r.tokens) for _, r in of_rows):
            row = np.repeat([row for row, _ in of_rows], [len(r.tokens) for _, r in of_rows])
            tokens, values, until = (np.concatenate([getattr(r, x) for _, r in of_rows]) for x in _COLUMNS)
            table = np.stack([row * vocab_size + tokens, row, until, values.view(np.int64)])
            self._added = upload(table[:, tokens < vocab_size], device)
        limited = [(row, r.allowed[r.allowed < vocab_size]) for row, r in of_rows if r.allowed is not None]
        if limited:
            allowed = np.concatenate([row * vocab_size + tokens for row, tokens in limited])
            self._allowed = upload(np.array([row for row, _ in limited]), device), upload(allowed, device)
        words = [(row, word) for row, r in of_rows for word in r.words if word[-1] < vocab_size]
        if words:
            longest = max(len(word) for _, word in words) - 1
            # The tokens before the last one of each word, at the end of a row.
            before = np.full((len(words), longest), -1)
            for line, (_, word) in zip(before, words, strict=True):
                line[longest - len(word) + 1 :] = word[:-1]
            columns = [(row * vocab_size + word[-1], row, slots[row], len(word) - 1) for row, word in words]
            self._words = upload(before, device), upload(np.array(columns).T, device)

    def apply(self, logits: Tensor, index: Tensor, lens: Tensor, tokens: Tensor) -> Tensor:
        """A float32 copy of logits [rows, vocab_size] to which the rules have been applied.

        Args:
            index: int64 [rows], how many tokens the output of each row's request has.
            lens: int64 [rows], how many tokens prompt and output have.
            tokens: `TokenLists.tokens`.
        """
        out = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        flat = out.view(-1)
        if self._allowed is not None:
            rows, allowed = self._allowed
            kept = flat[allowed]
            out.index_fill_(0, rows, -torch.inf)
            flat.index_copy_(0, allowed, kept)
        # Sums with -inf, unlike replacements by it, keep NaN and turn +inf into it.
        if self._added is not None:
            at, row, until, values = self._added
            value = values.view(torch.float64).float()
            flat.index_add_(0, at, torch.where(index[row] < until, value, 0.0))
        if self._words is not None:
            before, (at, row, slot, count) = self._words
            place = torch.arange(-before.shape[1], 0, device=out.device) + lens[row, None]
            last = tokens[slot[:, None], place.clamp(min=0)]
            is_match = ((last == before) | (before < 0)).all(1) & (index[row] >= count)
            flat.index_add_(0, at, torch.where(is_match, -torch.inf, 0.0))
        return out


_COLUMNS = ("tokens", "values", "until")
