"""What the last steps were and how long they took, for those who watch the engine."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from quire.engine.batch import StepBatch


class StepRecord(NamedTuple):
    """A step that the engine has computed.

    Attributes:
        number: 1 for the first step of the engine.
        start: when it was launched, in seconds since the engine started.
        duration: seconds from its launch until its results had been read, before they are reported. On a GPU the next
            step is launched before that, so steps overlap.
        requests: those that had tokens in the step.
        prompt_tokens: tokens of prompts. A single one, the rest of a prompt that was in the cache, is among
            decode_tokens, since it is computed as these are.
        decode_tokens: tokens that follow a prompt.
    """

    number: int
    start: float
    duration: float
    requests: int
    prompt_tokens: int
    decode_tokens: int


class StepLog:
    """The last steps; the engine's thread adds them, and any thread may read them.

    Args:
        size: the number of steps that are kept.
    """

    def __init__(self, size: int = 256) -> None:
        self._begin = time.perf_counter()
        # Step n is at n % size. An element is replaced as a whole, so that other threads may read it.
        self._ring: list[tuple[Any, ...] | None] = [None] * size
        # Steps that have been launched and not read.
        self._open: deque[tuple[int, float, int, int, int]] = deque()
        self._count = 0

    @property
    def now(self) -> float:
        """Seconds since the engine started."""
        return time.perf_counter() - self._begin

    def launch(self, batch: StepBatch) -> None:
        """A step is about to be launched."""
        tokens, prompts = batch.num_tokens, 0
        if not batch.decode_only:
            prompts = sum(c.count for c in batch if c.count > 1 and c.start < c.request.prompt_len)
        self._count += 1
        self._open.append((self._count, time.perf_counter(), len(batch), prompts, tokens - prompts))

    def read(self, left: int) -> None:
        """The results of all launched steps but the last `left` ones have been read."""
        while len(self._open) > left:
            step = self._open.popleft()
            self._ring[step[0] % len(self._ring)] = (time.perf_counter(), *step)

    def steps(self, after: int = 0) -> list[StepRecord]:
        """The kept steps with larger numbers than `after`, in order."""
        kept = [step for step in self._ring[:] if step is not None and step[1] > after]
        steps = [StepRecord(number, start - self._begin, end - start, *work) for end, number, start, *work in kept]
        return sorted(steps)
