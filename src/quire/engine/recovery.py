"""What follows a step that has raised: its requests are computed, or sampled, one by one, so that only those that raise
again end with the error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.batch import Chunk, ForwardOutput, StepBatch
from quire.engine.report import Reporter
from quire.engine.request import Request
from quire.engine.runner import Runner
from quire.engine.sampler import Sampler
from quire.engine.scheduler import Scheduler


def describe(error: Exception) -> str:
    """The error of a request that an exception has ended."""
    return f"{type(error).__name__}: {error}"


def run_each(
    chunks: Sequence[Chunk], error: Exception, runner: Runner, scheduler: Scheduler, reporter: Reporter
) -> ForwardOutput:
    """Compute the chunks of a step that has raised one by one, and end the requests of chunks that raise again. The
    results of all launched steps have been read.

    Args:
        chunks: those of the step whose requests have not ended.
        error: what the step raised.
        runner, scheduler, reporter: the engine's.

    Returns:
        the output of the chunks that were computed.
    """
    # The prefix tree has the pages of the step already, whose contents are undefined now.
    scheduler.tree.clear()
    size = runner.page_size
    outputs: list[ForwardOutput] = []
    waiting: list[Request] = []
    undefined_pages: set[int] = set()
    for chunk in chunks:
        request, first = chunk.request, chunk.start // size
        written = request.pages[first : -(-(chunk.start + chunk.count) // size)]
        # A chunk that failed should have computed a part of the prefix of this one.
        if not undefined_pages.isdisjoint(request.pages[:first]):
            waiting.append(request)
            undefined_pages.update(written)
            continue
        try:
            outputs.append(runner.forward_eagerly(StepBatch.of([chunk])))
        except Exception as raised:
            undefined_pages.update(written)
            reporter.end(request, "error", describe(raised))
    for request in reversed(waiting):
        scheduler.compute_again(request)
    if len(outputs) == len(chunks):
        _warn(len(chunks), error)
    if not outputs:
        return ForwardOutput(StepBatch.of([]), torch.empty(0))
    states = [output.hidden for output in outputs if output.hidden is not None]
    return ForwardOutput(
        StepBatch.of([chunk for output in outputs for chunk in output.batch]),
        torch.cat([output.logits for output in outputs]),
        hidden=torch.cat(states) if states else None,
    )


def sample_each(requests: Sequence[Request], logits: Tensor, error: Exception, reporter: Reporter) -> None:
    """Sample one by one the rows of a step whose sampling has raised, and end the requests of rows that raise again.
    The results of all launched steps have been read.

    Args:
        requests: those of the step.
        logits: a row for each, [len(requests), vocab_size].
        error: what the step raised.
        reporter: the engine's.
    """
    failed = 0
    for row, request in zip(logits, requests, strict=True):
        if request.finish_reason is not None:
            continue
        try:
            sampled = Sampler(logits.device, 1).launch(row[None], [request])
            tokens, logprobs = sampled.tokens(), sampled.logprobs()
        except Exception as raised:
            failed += 1
            reporter.end(request, "error", describe(raised))
            continue
        request.num_total_tokens += 1
        reporter.add([(request, tokens, logprobs)], 1)
        failed += request.finish_reason == "error"
    if not failed:
        _warn(len(requests), error)


def _warn(count: int, error: Exception) -> None:
    """Warn of a step that raised though none of its requests did alone, since no request reports that error."""
    message = f"a step of {count} requests raised, though none of them did alone, and they go on: {describe(error)}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
