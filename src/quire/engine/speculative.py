"""Verifying drafts: which of the tokens that a step has sampled follow the tokens that are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.engine.batch import StepBatch
from quire.engine.stats import Stats


def accepted_rows(batch: StepBatch, tokens: Sequence[int], stats: Stats) -> Iterator[slice]:
    """The rows of each chunk whose tokens its request gets: the first rows, as long as each has sampled the draft that
    follows it, and one more row. The accepted drafts are counted, also as computed tokens of the request.

    Args:
        batch: a step whose chunks all sample: one row after its last token, and one after each draft.
        tokens: the token that each row has sampled.
        stats: counts accepted drafts.

    Yields:
        the slice of each chunk's rows; without rows for a request that has ended since the step was launched.
    """
    start = 0
    for chunk in batch:
        count, accepted = len(chunk.drafts), 0
        if chunk.request.finish_reason is not None:
            yield slice(start, start)
        else:
            while accepted < count and tokens[start + accepted] == chunk.drafts[accepted]:
                accepted += 1
            chunk.request.num_computed_tokens += accepted
            chunk.request.num_total_tokens += accepted
            stats.accepted_tokens += accepted
            yield slice(start, start + accepted + 1)
        start += 1 + count
