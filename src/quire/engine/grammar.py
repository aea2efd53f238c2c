"""Structured output: the tokens that a request's grammar allows next, by llguidance.

A grammar is compiled when a request is made, in the caller's thread, unless it is kept from an earlier request, and
after a process of its own has shown that this is within bounds (`grammar_process.py`). Each request has a matcher of
its own, which follows the tokens of the output. Tokens of the prompt are no part of it. Before a step samples, the
matchers of its requests fill bit masks on the host, and the tokens that a mask forbids get the logit -inf. End tokens
are not left to llguidance: they are allowed where the grammar accepts the output so far, whatever ends the output of
the request.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.distribution import pip_install
from quire.engine.grammar_compiler import compiled, reason
from quire.engine.grammar_process import GrammarProcess
from quire.engine.model import Model
from quire.engine.params import SamplingParams
from quire.steps import upload

_T = TypeVar("_T")
_END = "<|end of quire's grammar|>"
# How many compiled grammars are kept for further requests, and how many errors of refused ones.
_MAX_COMPILED, _MAX_REFUSED = 64, 256


class Grammar:
    """A compiled grammar.

    Args:
        grammars: those of the model.
        constraint: the attribute of SamplingParams that has the grammar, and its value.
        state: llguidance's matcher at the start of an output. Its copies share the states that the lexer has found, and
            the limit of their number.
    """

    def __init__(self, grammars: Grammars, constraint: tuple[str, str], state: Any) -> None:
        self.grammars, self.constraint = grammars, constraint
        self._state = state

    def matcher(self, stop_token_ids: frozenset[int]) -> Matcher:
        """The matcher of a new request, whose output ends with one of the stop tokens."""
        return Matcher(self, self._state.deep_copy(), stop_token_ids)


class Matcher:
    """Follows the output of one request through its grammar; for use in the engine's thread.

    Args:
        grammar: that of the request.
        state: llguidance's matcher, of this request alone.
        stop_token_ids: tokens that end the output, allowed where the grammar accepts the text before them.

    Attributes:
        count: tokens of the output.
    """

    def __init__(self, grammar: Grammar, state: Any, stop_token_ids: frozenset[int]) -> None:
        self.grammar, self.state = grammar, state
        self.stop_token_ids, self.count = stop_token_ids, 0

    def push(self, token: int) -> bool:
        """Add a token to the output; return whether the output is complete, so that no token may follow.

        Raises:
            ValueError: the grammar does not allow the token.
        """
        if not self.state.consume_token(token):
            self.grammar.grammars.forget(self.grammar)
            raise ValueError(f"the grammar does not allow token {token} after {self.count}: {reason(self.state)}")
        self.count += 1
        return self.state.is_stopped()


class Grammars:
    """The grammars of one model's requests; for use in any thread.

    Args:
        model: has the tokenizer, which is prepared for masks when the first grammar is compiled.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokenizer: Any = None
        # Why the tokenizer does not work with grammars.
        self._unusable = ""
        self._process: GrammarProcess | None = None
        # The lock of all attributes above, which is held while a grammar is compiled.
        self._lock = threading.Lock()
        self._compiled: _Recent[Grammar] = _Recent(_MAX_COMPILED)
        self._refused: _Recent[str] = _Recent(_MAX_REFUSED)

    def prepare(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a request, which is compiled unless it is kept; None if there is none.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: the grammar is not one, exceeds a limit, or the model's tokenizer does not work with grammars;
                the message has the attribute of SamplingParams.
        """
        if params.constraint is None:
            return None
        grammar = self.prepared(params)
        if grammar is None:
            with self._lock:
                # Another thread may have compiled it meanwhile.
                grammar = self.prepared(params) or self._compile(*params.constraint)
        return grammar

    def prepared(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a request; None if it is not kept, or if there is none.

        Raises:
            ValueError: `prepare` has refused the grammar before.
        """
        if params.constraint is None:
            return None
        error = self._refused.get(params.constraint)
        if error is not None:
            raise ValueError(error)
        return self._compiled.get(params.constraint)

    def forget(self, grammar: Grammar) -> None:
        """Have the next request compile a grammar anew, since a matcher of it has failed. If that is because the lexer
        has found as many states as it may, all further matchers would fail, too.
        """
        self._compiled.drop(grammar.constraint, grammar)

    def masks(self, matchers: Sequence[Matcher]) -> np.ndarray:
        """The tokens that each matcher allows next, as bits: int32 [len(matchers), words], the lowest bit first. A row
        has no bit if the tokenizer, or stop tokens, leave none of the tokens that the grammar allows.

        Raises:
            ValueError: a matcher cannot go on.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        bits = np.zeros((len(matchers), self._words), dtype=np.int32)
        fill_next_token_bitmask_par(self._executor, [(matcher.state, i) for i, matcher in enumerate(matchers)], bits)
        for row, matcher in zip(bits.view(np.uint8), matchers, strict=True):
            if matcher.state.is_error():
                self.forget(matcher.grammar)
                raise ValueError(f"the grammar can't go on after {matcher.count} tokens: {reason(matcher.state)}")
            _set(row, self._end, False)
            for token in matcher.stop_token_ids:
                _set(row, token, matcher.state.is_accepting())
        return bits

    def _compile(self, name: str, text: str) -> Grammar:
        self._prepare(name)
        assert self._process is not None
        try:
            error = self._process.refusal(name, text)
        except RuntimeError:
            self._process = None
            raise
        if error:
            self._refused.put((name, text), error)
            raise ValueError(error)
        grammar = Grammar(self, (name, text), compiled(self._tokenizer, self._end, name, text))
        self._compiled.put(grammar.constraint, grammar)
        return grammar

    def _prepare(self, name: str) -> None:
        """Prepare the model's tokenizer for llguidance, and a process that has it, too."""
        if self._unusable:
            raise ValueError(f"{name} {self._unusable}")
        if self._process is not None:
            return
        try:
            from llguidance import LLExecutor, LLTokenizer
        except ImportError as error:
            raise ImportError(f"{name} needs llguidance: {pip_install('structured')} ({error})") from error
        folder, tokenizer = self._model.folder, self._model.tokenizer
        if tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer, but {folder} has none")
        try:
            source, self._end = _with_end(tokenizer)
            size = max(self._model.vocab_size, self._end + 1)
            self._tokenizer = LLTokenizer(source, n_vocab=size, eos_token=self._end)
        except Exception as error:
            # The tokenizer is of another library, or of an unknown kind.
            kind = f"the tokenizer of {folder}, of type {type(tokenizer).__name__}"
            self._unusable = f"can't be used: llguidance does not read {kind}: {error}"
            raise ValueError(f"{name} {self._unusable}") from error
        self._words, self._executor = -(-size // 32), LLExecutor()
        self._process = GrammarProcess(source, size, self._end)


class _Recent(Generic[_T]):
    """The values of the keys that were used last; for use in any thread."""

    def __init__(self, max_size: int) -> None:
        self._max_size, self._lock = max_size, threading.Lock()
        self._values: dict[tuple[str, str], _T] = {}

    def get(self, key: tuple[str, str]) -> _T | None:
        with self._lock:
            if key not in self._values:
                return None
            # The order of the keys is that of their last use.
            value = self._values[key] = self._values.pop(key)
            return value

    def put(self, key: tuple[str, str], value: _T) -> None:
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._max_size:
                del self._values[next(iter(self._values))]

    def drop(self, key: tuple[str, str], value: _T) -> None:
        """Forget a value, unless there is another one meanwhile."""
        with self._lock:
            if self._values.get(key) is value:
                del self._values[key]


def _with_end(tokenizer: Any) -> tuple[str, Any]:
    """The text of a tokenizer with one more special token, and its id. llguidance takes that for its end token, and
    all tokens of the model for text.
    """
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.add_special_tokens([_END])
    return copy.to_str(), copy.token_to_id(_END)


def masked(logits: Tensor, matchers: Sequence[Matcher | None]) -> Tensor:
    """Logits [len(matchers), vocab_size] with -inf for the tokens that matchers forbid; the logits themselves if there
    are no matchers. Where the model's logits are NaN or +inf, the result is not finite either.

    Raises:
        ValueError: a matcher cannot go on.
    """
    rows = {i: matcher for i, matcher in enumerate(matchers) if matcher is not None}
    if not rows:
        return logits
    found = list(rows.values())
    bits = upload(found[0].grammar.grammars.masks(found), logits.device).view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    # A sum with -inf, unlike a replacement by it, keeps NaN and turns +inf into it.
    added = torch.zeros(forbidden.shape, dtype=logits.dtype, device=logits.device).masked_fill_(forbidden, -torch.inf)
    return logits.index_add(0, upload(np.array(list(rows)), logits.device), added)


def _set(mask: np.ndarray, token: int, on: bool) -> None:
    """Set the bit of a token in a mask of bytes that has it."""
    if token < 8 * len(mask):
        bit = np.uint8(1 << token % 8)
        mask[token // 8] = mask[token // 8] | bit if on else mask[token // 8] & ~bit
