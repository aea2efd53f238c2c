"""Pooling: the hidden states of a step's tokens become the embeddings of its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.engine.batch import Chunk, StepBatch
from quire.engine.embedding_request import EmbeddingRequest
from quire.engine.host_copy import HostCopies


class PooledStates:
    """What a step adds to the embeddings of its requests, on its way to the host.

    Args:
        step: the number of the step.
        parts: the request of each row, and whether the row is the last one of its embedding.
        rows: float64 [len(parts), hidden_size], on the device.
    """

    def __init__(self, step: int, parts: Sequence[tuple[EmbeddingRequest, bool]], rows: Tensor) -> None:
        self.step, self._parts = step, parts
        self._copies = HostCopies([rows])

    def read(self) -> Iterator[EmbeddingRequest]:
        """Wait for the device and add the rows to the embeddings of requests; yield those that are complete."""
        (rows,) = self._copies.wait()
        for (request, is_last), row in zip(self._parts, rows.numpy(), strict=True):
            if request.finish_reason is None:
                request.add_state(row, is_last)
                if is_last:
                    yield request


@torch.inference_mode()
def launch_pooling(step: int, batch: StepBatch, hidden: Tensor | None) -> PooledStates | None:
    """Start to pool the hidden states of a step; None if none of its requests wants an embedding.

    Args:
        step: the number of the step.
        batch: the step, which has been launched.
        hidden: the hidden states of its tokens in the order of its chunks, [tokens, hidden_size], which may be followed
            by those of padding; the next step may overwrite them.
    """
    if not any(isinstance(request, EmbeddingRequest) for request in batch.requests):
        return None
    if hidden is None or len(hidden) < batch.num_tokens:
        raise RuntimeError("the step has no hidden states of its tokens, which embeddings are made of")
    parts: list[tuple[EmbeddingRequest, bool]] = []
    rows: list[Tensor] = []
    first = 0
    for chunk in batch:
        states = hidden[first : first + chunk.count]
        first += chunk.count
        if not isinstance(chunk.request, EmbeddingRequest):
            continue
        is_last = chunk.start + chunk.count == chunk.request.prompt_len
        if chunk.request.is_mean or is_last:
            parts.append((chunk.request, is_last))
            rows.append(_pooled(chunk, chunk.request, states))
    return PooledStates(step, parts, torch.stack(rows)) if rows else None


def _pooled(chunk: Chunk, request: EmbeddingRequest, states: Tensor) -> Tensor:
    """What a chunk with these hidden states adds to the embedding of its request, float64 [hidden_size]. In float64,
    how a prompt is cut into chunks changes the sum by far less than its rounding to float32.
    """
    if not request.is_mean:
        return states[-1].double()
    # After a preemption, tokens are computed again that have been pooled before.
    new = states[max(0, request.num_pooled_tokens - chunk.start) :]
    request.num_pooled_tokens = max(request.num_pooled_tokens, chunk.start + chunk.count)
    return new.sum(0, dtype=torch.float64)
