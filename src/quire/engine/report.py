"""Reporting: sampled tokens are added to their requests, and the updates of these are sent to their sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Protocol

from quire.engine.batch import StepBatch
from quire.engine.request import Request, Update
from quire.engine.sampler import SampledTokens
from quire.engine.scheduler import Scheduler
from quire.engine.speculative import accepted_rows
from quire.engine.stats import Stats

# A request, the tokens that a step has sampled for it, and their log-probabilities, if any request has logprobs.
Output = tuple[Request, Sequence[int], Sequence[dict[int, float] | None] | None]


class StepListener(Protocol):
    """Methods that are called in the engine's thread, unless they say otherwise, and must not raise."""

    def updates_sent(self) -> None:
        """All updates of a step have been sent to the sinks of their requests."""

    def engine_ended(self) -> None:
        """The engine's thread ends; all requests have ended, unless an error ends it."""

    def adapters_changed(self) -> None:
        """An adapter has come or gone. Called in the thread that has loaded or unloaded it, one call at a time."""


class Reporter:
    """Adds tokens to requests, ends requests, and sends the updates of both to their sinks.

    Args:
        scheduler: has the requests.
        stats: counts the tokens that are reported.

    Attributes:
        listeners: called when updates have been sent, and when the engine ends. The list is replaced and never changed,
            since the engine's thread iterates over it.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats) -> None:
        self._scheduler, self._stats = scheduler, stats
        # The updates that have not been sent, in order.
        self._updates: deque[Update] = deque()
        self.listeners: list[StepListener] = []

    def report(self, batch: StepBatch, sampled: SampledTokens) -> None:
        """Add the tokens that a step has sampled to its requests.

        Args:
            batch: the chunks of the step, which all sample.
            sampled: a token for each, and one after each draft.
        """
        tokens, logprobs = sampled.tokens(), sampled.logprobs()
        if len(tokens) == len(batch):
            outputs = zip(batch.requests, zip(tokens, strict=True), _of_each(logprobs), strict=False)
            self.add(outputs, len(tokens))
            return
        rows = list(accepted_rows(batch, tokens, self._stats))
        added = [tokens[row] for row in rows]
        reported = repeat(None) if logprobs is None else [logprobs[row] for row in rows]
        self.add(zip(batch.requests, added, reported, strict=False), sum(map(len, added)))

    def add(self, outputs: Iterable[Output], count: int) -> None:
        """Add sampled tokens to requests, `count` in all, which are in flight."""
        updates = self._updates
        for request, tokens, logprobs in outputs:
            if request.finish_reason is not None:
                # It has ended since the step was launched.
                count -= len(tokens)
                continue
            update = request.push(tokens, logprobs)
            if update is None:
                continue
            updates.append(update)
            if update.finish_reason is not None:
                self._scheduler.remove(request)
                count -= len(tokens) - len(update.token_ids)
        self._stats.generated_tokens += count

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Remove a waiting or running request, which ends for this reason."""
        self._scheduler.remove(request)
        self._updates.append(request.fail(reason, error))

    def end_all(self, error: str) -> None:
        """End all requests, because the contents of the cache are undefined."""
        self._updates.extend(request.fail("error", error) for request in self._scheduler.reset())

    def send(self) -> None:
        """Send the updates to the sinks of their requests."""
        if not self._updates:
            return
        while self._updates:
            update = self._updates.popleft()
            update.request.sink(update)
        for listener in self.listeners:
            listener.updates_sent()


def _of_each(logprobs: Sequence[dict[int, float] | None] | None) -> Iterable[Sequence[dict[int, float] | None] | None]:
    """The log-probabilities of requests with one token each."""
    return repeat(None) if logprobs is None else zip(logprobs, strict=True)
