"""The thread that an engine runs in, and how other threads reach it."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.engine.adapters.adapter import Adapter
from quire.engine.engine import Engine
from quire.engine.parallel.errors import RankError
from quire.engine.request import Request, Update

# A method of the engine, and the requests, or adapters, to call it with.
_Command = tuple[Callable[[Any], None], Sequence[Any]]

# Time without an update after which a waiting thread looks whether the engine's thread has ended, and without a command
# after which an idle engine of several ranks looks whether these have ended.
_POLL_SECONDS = 1.0
_REMEDY = "Start processes by spawn or forkserver, or fork before the first LLM is made, and make one in each process"
# The process that made the last worker: this one, or one that it was forked from.
_made_in: int | None = None


def check_process() -> None:
    """Refuse to make an engine in a process where torch would wait for ever, or fail.

    Raises:
        RuntimeError: the process was forked from one that has made an engine, and does not have the threads of GNU
            OpenMP in which torch computes since then.
    """
    if _made_in not in (None, os.getpid()) and sys.platform == "linux":
        what = "an LLM was made before this process was forked, which has none of the threads that torch computes in"
        raise RuntimeError(f"{what}. {_REMEDY}")


class Worker:
    """Runs an engine in a thread, which ends when the worker is closed or is not referred to any more.

    Attributes:
        thread: the engine's thread.
    """

    def __init__(self, engine: Engine) -> None:
        global _made_in
        self._ended_by: list[RankError] = []
        self._engine, self._process = engine, os.getpid()
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_work, args=(engine, self._inbox, self._ended_by), name="quire-engine", daemon=True
        )
        self.thread.start()
        self._closer = weakref.finalize(self, self._inbox.put, None)
        _made_in = self._process

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self._closer.alive and self.thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests to the engine; RuntimeError if it takes none."""
        if not self.alive:
            raise self._error()
        group = object()
        for request in requests:
            request.group = group
        self._inbox.put((self._engine.add, requests))

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel those of the requests that have not ended."""
        if any(request.finish_reason is None for request in requests):
            self._inbox.put((self._engine.cancel, requests))

    def drop(self, adapter: Adapter) -> None:
        """Let an adapter go that has no name any more."""
        self._inbox.put((self._engine.drop_adapter, [adapter]))

    def until_done(self, updates: queue.SimpleQueue[Update], count: int) -> Iterator[Update]:
        """The updates that arrive until `count` requests have ended; RuntimeError if the engine's thread has ended
        before, or is not in this process.
        """
        while count:
            ended = not self.thread.is_alive()
            try:
                update = updates.get(timeout=0 if ended else _POLL_SECONDS)
            except queue.Empty:
                if ended:
                    raise self._error() from None
                continue
            yield update
            count -= update.finish_reason is not None

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        self._closer()
        self.thread.join()

    def _error(self) -> RuntimeError:
        """Why requests are not accepted."""
        if not self._closer.alive:
            return RuntimeError("this LLM has been closed")
        if self._process != os.getpid():
            what = "this LLM was made before this process was forked, which does not have the LLM's thread"
            return RuntimeError(f"{what}. {_REMEDY}")
        what = "the thread of this LLM has ended by an error"
        return RuntimeError(": ".join([what, *map(str, self._ended_by)]))


def _work(engine: Engine, inbox: queue.SimpleQueue[_Command | None], ended_by: list[RankError]) -> None:
    """The engine's thread. What has ended it is added to `ended_by`, if that was another process."""
    try:
        while _take_turn(engine, inbox):
            pass
    except RankError as error:
        ended_by.append(error)
        print(f"quire: {error}", file=sys.stderr, flush=True)
    finally:
        for listener in engine.reporter.listeners:
            listener.engine_ended()
        engine.close()


def _take_turn(engine: Engine, inbox: queue.SimpleQueue[_Command | None]) -> bool:
    """Execute a command, or a step if there is no command and requests exist; while it waits, nothing refers to a
    request. The command None cancels all requests, and False is returned.
    """
    try:
        idle = None if engine.runner.leader is None else _POLL_SECONDS
        wait = max(0.0, engine.launch_at - time.perf_counter()) if engine.busy else idle
        command = inbox.get(timeout=wait)
    except queue.Empty:
        if engine.busy:
            engine.step()
        else:
            engine.check_ranks()
        return True
    method, arguments = command or (engine.cancel, [*engine.scheduler.running, *engine.scheduler.waiting])
    for argument in arguments:
        method(argument)
    return command is not None
