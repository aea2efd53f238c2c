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
        samples: whether the chunk has the request's last token, known or pending, so the step samples the next.
        drafts: tokens that may follow that one, and are the chunk's last ones. The step samples a token after each.
        scores: the number of tokens, just before those after which the step samples, whose next token is one of the
            prompt, and the step computes its log-probability.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: Sequence[int] = ()
    scores: int = 0

    @property
    def rows(self) -> int:
        """The number of tokens, the last ones of the chunk, whose logits are needed."""
        return self.scores + (1 + len(self.drafts) if self.samples else 0)


class Decodes(Sequence[Chunk]):
    """Chunks of one token each that all sample, without drafts. Most steps have such chunks alone, often of the same
    requests as the step before, so the host's time for them is kept low: chunks are made if they are asked for.

    Attributes:
        requests: the requests of the chunks.
        starts: int64 [len(requests)].
        sampled: whether the step has been launched, and the tokens that it samples are on the device in this order.
    """

    sampled = False

    def __init__(self, requests: list[Request], starts: np.ndarray) -> None:
        self.requests, self.starts = requests, starts
        self._chunks: list[Chunk] | None = None

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Decodes | None:
        """The chunks as decodes, if all are."""
        if not all(c.count == 1 and c.samples for c in chunks):
            return None
        return cls([c.request for c in chunks], np.array([c.start for c in chunks], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: Any) -> Any:
        return self._made()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._made())

    def _made(self) -> list[Chunk]:
        if self._chunks is None:
            pairs = zip(self.requests, self.starts.tolist(), strict=True)
            self._chunks = [Chunk(request, start, 1, True) for request, start in pairs]
        return self._chunks


class Computed(NamedTuple):
    """What the forward pass of a step, which may not have ended, has computed.

    Attributes:
        chunks: in the order of their rows.
        logits: [rows, vocab_size], of the last tokens of the chunks (`Chunk.rows`); the next step may overwrite them.
        greedy_done: whether the forward pass ends with `Sampler.sample_greedy`, of these logits and perhaps more rows.
    """

    chunks: Sequence[Chunk]
    logits: Tensor
    greedy_done: bool = False
