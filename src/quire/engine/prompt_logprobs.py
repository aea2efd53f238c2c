"""Log-probabilities of the tokens of prompts, given the tokens before them."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from torch import Tensor

from quire import sampling
from quire.engine.batch import Chunk, StepBatch
from quire.engine.sampler import top_logprobs
from quire.steps import upload


@torch.inference_mode()
def add_prompt_logprobs(batch: StepBatch, logits: Tensor) -> Tensor:
    """Add the log-probabilities of prompts' tokens to the requests that want them; waits for the device if there are
    any.

    Args:
        batch: of a step that has been launched.
        logits: of their last tokens (`Chunk.rows`), [rows, vocab_size].

    Returns:
        the logits of the tokens after which the step samples.
    """
    chunks = [c for c in batch if c.num_prompt_logprobs]
    if not chunks:
        return logits
    counts = np.array([c.rows for c in batch])
    num_prompt_logprobs = np.array([c.num_prompt_logprobs for c in batch])
    row_in_chunk = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    is_of_prompt = row_in_chunk < np.repeat(num_prompt_logprobs, counts)
    following = [token for c in chunks for token in _following(c)]
    max_top = max(c.request.params.prompt_logprobs or 0 for c in chunks)
    at, tokens = (upload(np.asarray(x), logits.device) for x in (np.flatnonzero(is_of_prompt), following))
    rows = logits[at]
    report = sampling.token_logprobs(rows, tokens, min(max_top, rows.shape[1]))
    ranks = iter(((rows > rows.gather(1, tokens[:, None])).sum(1) + 1).tolist())
    lines = zip(following, *(x.tolist() for x in report), strict=True)
    for chunk in chunks:
        request, count = chunk.request, chunk.request.params.prompt_logprobs
        assert count is not None
        assert request.prompt_logprobs is not None
        request.prompt_logprobs += [top_logprobs(count, *next(lines)) for _ in range(chunk.num_prompt_logprobs)]
        request.prompt_ranks += islice(ranks, chunk.num_prompt_logprobs)
    return logits[upload(np.flatnonzero(~is_of_prompt), logits.device)]


def _following(chunk: Chunk) -> list[int]:
    """The tokens of the prompt whose log-probabilities a chunk computes."""
    first = chunk.start + chunk.count - chunk.rows + 1
    return chunk.request.tokens[first : first + chunk.num_prompt_logprobs]
