"""A request: its prompt, its output so far, and the updates that its steps send."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache import Node
from quire.engine.adapters.adapter import Adapter
from quire.engine.completion import NO_TOKEN
from quire.engine.drafts import PromptLookup
from quire.engine.grammar import Grammar
from quire.engine.logits_processors import TokenRules
from quire.engine.params import SamplingParams
from quire.engine.text import text_stream

# In place of a token, where a row of logits is not finite.
UNDEFINED = -1


@dataclass(slots=True)
class Update:
    """The text and the tokens that a step added to a request, and the tokens' log-probabilities if requested."""

    request: Request
    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] | None = None


class Request:
    """A prompt, its output so far, and the pages of both.

    Args:
        prompt: token ids.
        params: sampling parameters without missing values (see `SamplingParams.over`).
        tokenizer: for text and stop strings; None: tokens only.
        end_ids: the model's own end tokens.
        sink: called with each Update, in the engine's thread.
        grammar: that of `params`, if they have one.
        bad_words: the token sequences of `params.bad_words`.
        adapter: the adapter to compute the model with; None: the model alone.

    Attributes:
        prompt: the tokens of the prompt.
        tokens: the tokens of prompt and output that the host knows.
        num_total_tokens: the number of tokens of prompt and output, those in flight included.
        row: the row of `Sampler.last` that has the token in flight.
        max_total_tokens: the largest number of tokens, prompt and output.
        samples: whether tokens are sampled; otherwise the request ends when its prompt has been computed.
        num_unneeded_tokens: the number of tokens at the end of the prompt that are not computed: 1 where no token is
            sampled, since nothing depends on the last one.
        prompt_logprobs: log-probabilities of the prompt's tokens as far as they are known, None for the first token, as
            in `Completion`; None if they are not wanted.
        prompt_ranks: the ranks of these tokens among all tokens, as in `Completion`.
        num_computed_tokens: the number of tokens whose keys and values are in the cache, or will be when the launched
            steps end.
        pages: the pages of the computed tokens and of those of the current step, in order.
        node: the prefix tree's node for the last of these pages that is in it; None if none is.
        seed: makes the random numbers of the request: `params.seed` or a random one.
        matcher: follows the output through the request's grammar; None: there is no grammar.
        rules: biases and forbidden tokens; None: there are none.
        needs_last_tokens: whether penalties or rules depend on the tokens of prompt or output.
        plain: whether the most likely token is taken as it is, without a grammar, rules, penalties or reports.
        final_only: whether the sink needs no update but the last one: others are left out, but for those with
            log-probabilities.
        lookup: guesses the next tokens, see `quire.engine.drafts`; None for a request that samples none, and for one
            whose logits depend on its last tokens by more than the model: with penalties, bad words of several tokens
            or a grammar.
        num_cached_tokens: tokens of the prompt that were in the cache when the request was first admitted.
        group: identifies the requests of one call, see `quire.engine.waiting`.
        slot: the slot of its adapter on the device while the request runs; -1 without an adapter.
        namespace: of the pages that the request may share, see `PrefixTree`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        end_ids: frozenset[int],
        sink: Callable[[Update], None],
        grammar: Grammar | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        adapter: Adapter | None = None,
    ) -> None:
        self.prompt_len = len(prompt)
        self.params, self.sink = params, sink
        self.prompt = list(prompt)
        self.tokens = list(prompt)
        self.num_total_tokens, self.row = self.prompt_len, 0
        max_tokens = params.max_tokens if isinstance(params.max_tokens, int) else sys.maxsize
        self.max_total_tokens = self.prompt_len + max_tokens
        self.samples = params.max_tokens != 0
        self.num_unneeded_tokens = int(not self.samples)
        self.num_computed_tokens = 0
        self.pages = array("i")
        self.node: Node | None = None
        self.num_cached_tokens = 0
        self.group = object()
        self.adapter, self.slot = adapter, -1
        self.namespace = None if adapter is None else adapter.digest
        self.admitted = False
        self.final_only = False
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[dict[int, float] | None] | None = None if params.prompt_logprobs is None else [None]
        self.prompt_ranks: list[int | None] = [None]
        self.seed = random.getrandbits(64) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids)
        stop_token_ids = stops if params.ignore_eos else stops | end_ids
        self._last_token_ids = stop_token_ids | {UNDEFINED}
        self.matcher = None if grammar is None else grammar.matcher(stop_token_ids)
        self.rules = TokenRules.of(params, stops | end_ids, bad_words)
        words = self.rules is not None and bool(self.rules.words)
        self.needs_last_tokens = params.penalised or words
        free = self.matcher is None and not params.penalised and self.rules is None
        self.plain = free and params.greedy and params.logprobs is None
        is_guessed = self.samples and self.matcher is None and not self.needs_last_tokens
        self.lookup = PromptLookup() if is_guessed else None
        self._stream = None if tokenizer is None else text_stream(tokenizer, prompt, params)

    @property
    def num_inflight_tokens(self) -> int:
        """The number of tokens that launched steps have sampled and the host has not read: 0 or 1 when a step is
        scheduled.
        """
        return self.num_total_tokens - len(self.tokens)

    @property
    def num_known_prompt_logprobs(self) -> int:
        """The number of the prompt's tokens whose next token's log-probability is known."""
        return 0 if self.prompt_logprobs is None else len(self.prompt_logprobs) - 1

    def num_reusable_tokens(self, length: int) -> int:
        """How many of the `length` tokens to compute may be taken from the cache: all but those whose logits or states
        are needed. The last token is computed in any case.
        """
        known = self.num_known_prompt_logprobs
        return length - 1 if self.prompt_logprobs is None or known >= self.prompt_len - 1 else known

    def num_wanted_prompt_logprobs(self, start: int, end: int) -> int:
        """How many of the tokens start to end have a next token whose log-probability is wanted and not known."""
        if self.prompt_logprobs is None:
            return 0
        return max(0, min(end, self.prompt_len - 1) - max(start, self.num_known_prompt_logprobs))

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def text(self) -> str:
        return "" if self._stream is None else self._stream.text

    def push(self, tokens: Sequence[int], logprobs: Sequence[dict[int, float] | None] | None = None) -> Update | None:
        """Add sampled tokens until the output ends, which sets finish_reason.

        Args:
            tokens: UNDEFINED in place of a token that is not known, which ends the output with an error.
            logprobs: the log-probabilities of each token; None: there are none.

        Returns:
            the update of the added tokens; None if it is left out.
        """
        known, stream = self.tokens, self._stream
        start, matcher = len(known), self.matcher
        try:
            for token in tokens:
                if token in self._last_token_ids:
                    self._end_with(token)
                    break
                known.append(token)
                if (stream is not None and stream.push(token)) or (matcher is not None and matcher.push(token)):
                    self.finish_reason = "stop"
                    break
                if len(known) >= self.max_total_tokens:
                    self.finish_reason = "length"
                    break
            else:
                if self.logprobs is None:
                    # Most updates have text and tokens alone.
                    text = "" if stream is None else stream.take()
                    return None if self.final_only else Update(self, text, tokens)
        except Exception as error:
            # The tokenizer or the grammar has raised.
            self.finish_reason, self.error = "error", f"{type(error).__name__}: {error}"
        added = known[start:]
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += [x for x in logprobs[: len(added)] if x is not None]
        return self._update(added)

    def _end_with(self, token: int) -> None:
        """End the output with a stop token, or with an error if the token is UNDEFINED."""
        if token == UNDEFINED:
            self.finish_reason = "error"
            self.error = NO_TOKEN if self._leaves_no_token() else "the model's logits are not finite"
            return
        self.finish_reason = "stop"
        self.tokens.append(token)
        if self._stream is not None and self.params.include_stop_str_in_output:
            self._stream.push(token)

    def _leaves_no_token(self) -> bool:
        """Whether the rules and the grammar forbid all tokens that could follow the output."""
        tokens = None if self.rules is None else self.rules.allowed
        if self.matcher is not None:
            mask = self.matcher.grammar.grammars.masks([self.matcher])
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if tokens is None:
            return False
        if self.rules is not None:
            tokens = self.rules.permitted(tokens, self.tokens[self.prompt_len :])
        return len(tokens) == 0

    def fail(self, reason: str, error: str | None = None) -> Update:
        """End without another token, with the reason "cancelled", or "error" and its description."""
        self.finish_reason, self.error = reason, error
        return self._update(())

    def _update(self, token_ids: Sequence[int]) -> Update:
        """The update of the tokens that were added last."""
        stream, reason = self._stream, self.finish_reason
        logprobs = None if self.logprobs is None or not token_ids else self.logprobs[-len(token_ids) :]
        if stream is None:
            return Update(self, "", token_ids, reason, logprobs)
        # After an error the decoder is not called, which may have raised it.
        if reason not in (None, "error"):
            stream.finish()
            if stream.stopped and reason == "length":
                self.finish_reason = "stop"
        return Update(self, stream.take(last=reason is not None), token_ids, self.finish_reason, logprobs)
