"""What requests that an engine computes elsewhere have produced so far, and where it goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.engine import Completion, Embedding
from quire.engine.messages import NumberedUpdate, PromptLogprobs
from quire.engine.output_text import OutputText
from quire.engine.prompts import TokenRequest

Sink = Callable[[int, Completion], None]


class RequestOutput:
    """A request, and what it has produced so far."""

    def __init__(self, index: int, request: TokenRequest, text: OutputText, sink: Sink) -> None:
        self._index, self._prompt = index, request.prompt
        self._text, self._sink = text, sink
        # What is known of the prompt since the first update.
        self._num_cached_tokens = 0
        self._logprobs: list[dict[int, float] | None] | None = None
        self._ranks: list[int | None] | None = None

    def add_prompt(self, part: PromptLogprobs) -> None:
        """Add the log-probabilities of the prompt's next tokens."""
        if self._logprobs is None or self._ranks is None:
            self._logprobs, self._ranks = [], []
        self._logprobs.extend(part.logprobs)
        self._ranks.extend(part.ranks)

    def add(self, update: NumberedUpdate) -> bool:
        """Pass an update on to the sink; return whether it is the last one."""
        details, tokens = update.details, update.token_ids
        if details is None:
            reason = error = logprobs = None
        else:
            reason, error = details.finish_reason, details.error
            logprobs = details.logprobs
            self._num_cached_tokens = max(self._num_cached_tokens, details.num_cached_tokens)
        try:
            text, count, reason = self._text.add(tokens, reason)
        except Exception as raised:
            # The tokenizer has raised.
            text, count = "", len(tokens)
            reason, error = "error", f"{type(raised).__name__}: {raised}"
        if count < len(tokens):
            tokens, logprobs = tokens[:count], logprobs and logprobs[:count]
        self._pass(text, tokens, reason, logprobs, error)
        return reason is not None

    def end(self, reason: str, error: str | None) -> None:
        """End without another token."""
        self._pass("", [], reason, None, error)

    def _pass(
        self,
        text: str,
        tokens: list[int],
        reason: str | None,
        logprobs: list[dict[int, float]] | None,
        error: str | None,
    ) -> None:
        prompt = (self._num_cached_tokens, error, self._logprobs, self._ranks)
        self._sink(self._index, Completion(self._prompt, text, tokens, reason, logprobs, *prompt))


class EmbeddingOutput:
    """A request for an embedding."""

    def __init__(self, index: int, prompt: list[int], sink: Callable[[int, Embedding], None]) -> None:
        self._index, self._prompt = index, prompt
        self._sink = sink

    def add(self, update: NumberedUpdate) -> bool:
        """Pass the embedding on to the sink; return True, since there is one update."""
        details = update.details
        assert details is not None
        assert details.finish_reason is not None
        values = np.frombuffer(details.values, dtype="<f4")
        known = (details.num_cached_tokens, details.error)
        self._sink(self._index, Embedding(self._prompt, values, details.finish_reason, *known))
        return True

    def end(self, reason: str, error: str | None) -> None:
        """End without an embedding."""
        self._sink(self._index, Embedding(self._prompt, np.empty(0, dtype=np.float32), reason, error=error))
