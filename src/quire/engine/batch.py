"""What a step computes: chunks of requests, and the logits of their last tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from quire.engine.request import Request


@dataclass(slots=True)
class Chunk:
    """Tokens start to start + count of a request, which one step computes.

    Attributes:
        samples: whether the chunk ends with the request's last token, known or in flight, so that the step samples the
            next.
        drafts: guesses of the tokens after that one. They end the chunk, and the step samples a token after each.
        num_prompt_logprobs: the number of tokens after which the step computes the log-probability of the prompt's next
            token. They come just before the tokens after which it samples.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: Sequence[int] = ()
    num_prompt_logprobs: int = 0

    @property
    def rows(self) -> int:
        """The number of tokens, the last ones of the chunk, whose logits are needed."""
        return self.num_prompt_logprobs + (1 + len(self.drafts) if self.samples else 0)


class StepBatch(Sequence[Chunk]):
    """The chunks of a step.

    Most steps compute one token of each running request, often of the same requests as the step before. To keep the
    host's time for such steps low, their batch is stored as vectors, and its chunks are made only if they are asked
    for.

    Args:
        requests: the request of each chunk.
        starts: the first token of each chunk, int64 [len(requests)].
        chunks: None: each chunk is one token that samples, without drafts.

    Attributes:
        decode_only: whether each chunk is one token that samples, without drafts.
        sampled: whether the step has been launched, and the tokens that it samples are on the device in the order of
            the chunks.
    """

    def __init__(self, requests: list[Request], starts: np.ndarray, chunks: Sequence[Chunk] | None = None) -> None:
        self.requests, self.starts = requests, starts
        self._chunks, self.decode_only = chunks, chunks is None
        self.sampled = False

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> StepBatch:
        """The batch of these chunks."""
        if isinstance(chunks, StepBatch):
            return chunks
        starts = np.array([c.start for c in chunks], dtype=np.int64)
        decode_only = all(c.count == 1 and c.samples for c in chunks)
        return cls([c.request for c in chunks], starts, None if decode_only else chunks)

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: Any) -> Any:
        return self._made()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._made())

    def _made(self) -> Sequence[Chunk]:
        if self._chunks is None:
            pairs = zip(self.requests, self.starts.tolist(), strict=True)
            self._chunks = [Chunk(request, start, 1, True) for request, start in pairs]
        return self._chunks

    @property
    def num_tokens(self) -> int:
        return len(self.requests) if self.decode_only else sum(c.count for c in self)

    @property
    def num_rows(self) -> int:
        """The number of rows of logits that the step computes (`Chunk.rows`)."""
        return len(self.requests) if self.decode_only else sum(c.rows for c in self)

    @property
    def counts(self) -> np.ndarray:
        """The number of tokens of each chunk, int64 [len(requests)]."""
        if self.decode_only:
            return np.ones(len(self.requests), dtype=np.int64)
        return np.array([c.count for c in self], dtype=np.int64)

    @property
    def ends(self) -> np.ndarray:
        """The token after the last one of each chunk, int64 [len(requests)]."""
        return self.starts + (1 if self.decode_only else self.counts)

    def sampling(self) -> StepBatch:
        """The chunks that sample."""
        return self if self.decode_only else StepBatch.of([c for c in self if c.samples])

    def sampled_rows(self) -> tuple[list[Request], list[int] | None]:
        """For a batch whose chunks all sample, the request of each row of logits, and how many drafts come before the
        token that the row samples; None if there are no drafts.
        """
        if self.decode_only or not any(c.drafts for c in self):
            return self.requests, None
        counts = [1 + len(c.drafts) for c in self]
        requests = [r for r, n in zip(self.requests, counts, strict=True) for _ in range(n)]
        return requests, [i for n in counts for i in range(n)]

    def in_order(self, order: np.ndarray, requests: list[Request]) -> StepBatch:
        """The chunks in another order, int64 [len(requests)]; `requests` are in that order already."""
        if self.decode_only:
            return StepBatch(requests, self.starts[order])
        return StepBatch(requests, self.starts[order], [self[i] for i in order.tolist()])

    def count_computed(self) -> None:
        """Count the tokens of the chunks as computed tokens of their requests, but for drafts, which have not been
        verified.
        """
        if self.decode_only:
            for request in self.requests:
                request.num_computed_tokens += 1
            return
        for chunk in self:
            chunk.request.num_computed_tokens = chunk.start + chunk.count - len(chunk.drafts)


class ForwardOutput(NamedTuple):
    """What the forward pass of a step, which may not have ended, has computed.

    Attributes:
        batch: the chunks in the order of their rows.
        logits: [batch.num_rows, vocab_size], of the last tokens of the chunks; the next step may overwrite them.
        greedy_done: whether the forward pass ends with `Sampler.sample_greedy`, of these logits and perhaps more rows.
        hidden: the hidden states of all tokens after the last norm, in the order of the chunks, [tokens, hidden_size],
            which may be followed by those of padding; the next step may overwrite them. None if the model or the runner
            does not return them.
    """

    batch: StepBatch
    logits: Tensor
    greedy_done: bool = False
    hidden: Tensor | None = None
