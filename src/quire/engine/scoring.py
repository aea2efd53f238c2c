"""Log-probabilities of the tokens of prompts, given the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from quire import sampling
from quire.engine.chunks import Chunk
from quire.engine.sampler import likeliest
from quire.steps import upload


@torch.inference_mode()
def score(chunks: Sequence[Chunk], logits: Tensor) -> Tensor:
    """Add the log-probabilities of what chunks score to their requests; waits for the device if there are any.

    Args:
        chunks: of a step that has been launched.
        logits: of their last tokens (`Chunk.rows`), [rows, vocab_size].

    Returns:
        the logits of the tokens after which the step samples.
    """
    scoring = [c for c in chunks if c.scores]
    if not scoring:
        return logits
    counts = np.array([c.rows for c in chunks])
    scores = np.array([c.scores for c in chunks])
    index = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of each row within its chunk
    scored = index < np.repeat(scores, counts)
    following = [token for c in scoring for token in _following(c)]
    most = max(c.request.params.prompt_logprobs or 0 for c in scoring)
    at, tokens = (upload(np.asarray(x), logits.device) for x in (np.flatnonzero(scored), following))
    rows = logits[at]
    report = sampling.token_logprobs(rows, tokens, min(most, rows.shape[1]))
    ranks = iter(((rows > rows.gather(1, tokens[:, None])).sum(1) + 1).tolist())
    lines = zip(following, *(x.tolist() for x in report), strict=True)
    for chunk in scoring:
        request, count = chunk.request, chunk.request.params.prompt_logprobs
        assert count is not None
        assert request.prompt_logprobs is not None
        request.prompt_logprobs += [likeliest(count, *next(lines)) for _ in range(chunk.scores)]
        request.prompt_ranks += islice(ranks, chunk.scores)
    return logits[upload(np.flatnonzero(~scored), logits.device)]


def _following(chunk: Chunk) -> list[int]:
    """The tokens that follow those that a chunk scores."""
    first = chunk.start + chunk.count - chunk.rows + 1
    return chunk.request.tokens[first : first + chunk.scores]
