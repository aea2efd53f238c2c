"""A request for an embedding, which is pooled from the states of the prompt's tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from quire.engine.adapters.adapter import Adapter
from quire.engine.embedding import NO_OUTPUT, Embedding, EmbeddingParams
from quire.engine.request import Request, Update


class EmbeddingRequest(Request):
    """A request for the embedding of a prompt, whose tokens are all computed, and after which none is sampled.

    Args:
        prompt: token ids.
        params: resolved ones (`EmbeddingParams.resolved`).
        sink: called with one Update, in the engine's thread.
        adapter: as for `Request`.

    Attributes:
        num_pooled_tokens: the number of tokens whose states launched steps have pooled, for the mean of all.
        values: the embedding, float32 [dimensions]; [0] before it is complete.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: EmbeddingParams,
        sink: Callable[[Update], None],
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__(prompt, NO_OUTPUT, None, frozenset(), sink, adapter=adapter)
        self.embedding_params = params
        # The request is never at its end by the number of its tokens.
        self.max_total_tokens = sys.maxsize
        self.num_unneeded_tokens = 0
        self.num_pooled_tokens = 0
        self.values = np.empty(0, dtype=np.float32)
        # The state of the last token, or the sum of states, float64 [hidden_size].
        self._state: np.ndarray | float = 0.0

    @property
    def is_mean(self) -> bool:
        return self.embedding_params.pooling == "mean"

    def num_reusable_tokens(self, length: int) -> int:
        return min(self.num_pooled_tokens, length - 1) if self.is_mean else length - 1

    def add_state(self, state: np.ndarray, is_last: bool) -> None:
        """Add what a step has pooled, float64 [hidden_size]; the last one completes the embedding."""
        self._state = self._state + state
        if not is_last:
            return
        kept = self._state[: self.embedding_params.dimensions] / (self.prompt_len if self.is_mean else 1)
        if self.embedding_params.normalize:
            kept = kept / max(float(np.linalg.norm(kept)), 1e-12)
        self.values = kept.astype(np.float32)

    def result(self) -> Embedding:
        """The embedding of a request that has ended."""
        assert self.finish_reason is not None
        error = self.error if self.finish_reason == "error" else None
        return Embedding(self.prompt, self.values, self.finish_reason, self.num_cached_tokens, error)
