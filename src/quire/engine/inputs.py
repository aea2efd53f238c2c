"""The vectors of a step's inputs that follow from its batch, on the host: token ids, positions, which tokens need
logits, and the slots of their adapters. Steps without graphs copy them to the device as they are, and graphs read them
at fixed addresses.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.engine.batch import StepBatch

IN_FLIGHT = -1
"""The id in place of a token in flight, which the host does not know."""


def token_ids(batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a step, IN_FLIGHT where one is sampled by the step before; and the rows of `Sampler.last` that have
    the tokens in flight, any row for other tokens. Both are int64 [tokens].
    """
    if batch.decode_only:
        known = [IN_FLIGHT if r.num_inflight_tokens else r.tokens[-1] for r in batch.requests]
        return np.array(known, dtype=np.int64), np.array([r.row for r in batch.requests], dtype=np.int64)
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    for chunk in batch:
        tokens, start = chunk.request.tokens, chunk.start
        end = start + chunk.count - len(chunk.drafts)
        ids += tokens[start:end]
        if end > len(tokens):
            places.append((len(ids), chunk.request.row))
            ids.append(IN_FLIGHT)
        ids += chunk.drafts
    source = np.zeros(len(ids), dtype=np.int64)
    if places:
        at, rows = np.array(places).T
        source[at] = rows
    return np.array(ids, dtype=np.int64), source


def with_last_tokens(ids: Tensor, source: Tensor, last_tokens: Tensor) -> Tensor:
    """Token ids on the device, with the tokens in flight taken from `Sampler.last`."""
    return torch.where(ids < 0, last_tokens[source], ids)


def token_positions(batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
    """The chunk of each token, and the token's position in its request; both are int64 [tokens]."""
    row = np.arange(len(batch))
    if batch.decode_only:
        return row, batch.starts
    counts = batch.counts
    row_of = np.repeat(row, counts)
    first = counts.cumsum() - counts
    return row_of, np.arange(len(row_of)) + (batch.starts - first)[row_of]


def logit_indices(batch: StepBatch) -> np.ndarray:
    """The indices of the tokens whose logits are needed (`Chunk.rows`), int64 [batch.num_rows]."""
    if batch.decode_only:
        return np.arange(len(batch))
    ends, rows = batch.counts.cumsum(), np.array([c.rows for c in batch])
    return np.repeat(ends - rows.cumsum(), rows) + np.arange(rows.sum())


def adapter_slots(batch: StepBatch) -> np.ndarray:
    """The slot of each token's adapter, -1 without one; int32 [tokens]."""
    slots = np.array([request.slot for request in batch.requests], dtype=np.int32)
    return slots if batch.decode_only else slots.repeat(batch.counts)
