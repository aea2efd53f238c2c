"""The further processes of a server that speak HTTP: the first one starts them, commands them and notices their end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from quire.engine.child_process import end_of, start_program
from quire.server.counts import Counts

# Commands to a further process: to answer the requests that it has, and end.
DRAIN = b"d"
# To end its requests with errors; to do that and also close connections whose clients do not read.
FAIL, HURRY = b"f", b"h"
# Its reports: it serves; its connection to the engine has ended, so that it ends, too.
READY, ENGINE_ENDED = b"r", b"e"
# The job comes before all commands, after its size in so many bytes.
SIZE_BYTES = 8

_PROGRAM = "quire.server.http_process"
# Seconds for a process to end by itself, after its last command or without the first process.
_GRACE = 8.0
# Seconds in which the first process notices that the engine has ended, after another one has.
_SOON = 1.0


class HttpProcessEnded(RuntimeError):
    """A further process that speaks HTTP has ended, although nobody wanted it to."""


class HttpProcesses:
    """Further processes that speak HTTP, for one engine and at one address; a context, at whose end they end.

    They import what they need meanwhile, and wait for a job.

    Args:
        listener: the socket at which all processes accept connections.
        engines: connected to the engine, for each further process. They are closed here.

    Attributes:
        counts: of the whole server.
        job: a pickled `HttpJob`, which `begin` sends.
        how_lost: returns how a process has ended that should not have; None: all run as they should.
    """

    def __init__(self, listener: socket.socket, engines: Sequence[socket.socket] = ()) -> None:
        self.counts = Counts(1 + len(engines))
        self.job = b""
        self.how_lost: Callable[[], str] | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._ending = False
        self._processes = [_HttpProcess(i, listener, engine, self.counts) for i, engine in enumerate(engines, start=1)]
        self.counts.close()

    def __len__(self) -> int:
        return len(self._processes)

    async def begin(self, on_lost: Callable[[], None], given_up: Callable[[], bool]) -> None:
        """Send the job, and wait until all processes serve, or until `given_up()`.

        Args:
            on_lost: called when a process has ended that should not have.
            given_up: whether to wait no more.
        """
        self._on_lost = on_lost
        for each in self._processes:
            each.send(len(self.job).to_bytes(SIZE_BYTES, "little") + self.job)
            each.control.setblocking(False)
            asyncio.get_running_loop().add_reader(each.control, self._read, each)
        while not given_up() and not all(each.is_ready for each in self._processes):
            await asyncio.sleep(0.01)

    def drain(self) -> None:
        """Have them answer the requests that they have, and end."""
        self._ending = True
        self._send(DRAIN)

    def fail(self, hurried: bool) -> None:
        """Have them end their requests with errors; if `hurried`, also the connections of clients that do not read."""
        self._send(HURRY if hurried else FAIL)

    async def until_ended(self, seconds: float, given_up: Callable[[], bool]) -> None:
        """Wait until all of them have ended, for some seconds at most, or until `given_up()`."""
        end = time.monotonic() + seconds
        while not all(each.has_left for each in self._processes) and time.monotonic() < end and not given_up():
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """End the processes."""
        for each in self._processes:
            each.leave()
        for each in self._processes:
            each.end()

    def __enter__(self) -> HttpProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, command: bytes) -> None:
        for each in self._processes:
            each.send(command)

    def _read(self, process: _HttpProcess) -> None:
        """Take what a process reports, or note that it has ended."""
        loop = asyncio.get_running_loop()
        try:
            received = process.control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        process.is_ready = process.is_ready or READY in received
        process.engine_ended = process.engine_ended or ENGINE_ENDED in received
        if received:
            return
        loop.remove_reader(process.control)
        process.has_left = True
        if process.engine_ended:
            # This process ends by itself, since its connection to the engine has ended, too.
            loop.call_later(_SOON, self._lose, process)
        else:
            self._lose(process)

    def _lose(self, process: _HttpProcess) -> None:
        if self._ending or self.how_lost is not None:
            return
        self.how_lost = lambda: process.end(1 + len(self._processes))
        self._on_lost()


class _HttpProcess:
    """One of them.

    Args:
        index: 1 for the first one of them.
        listener, engine, counts: those of `HttpProcesses`.

    Attributes:
        control: connected to it.
        is_ready: whether it serves.
        engine_ended: whether its connection to the engine has ended.
        has_left: whether it has ended.
    """

    def __init__(self, index: int, listener: socket.socket, engine: socket.socket, counts: Counts) -> None:
        self._index, self._has_job = index, False
        self.is_ready = self.engine_ended = self.has_left = False
        self.control, other = socket.socketpair()
        assert counts.descriptor is not None
        with other, engine:
            files = [listener.fileno(), engine.fileno(), counts.descriptor, other.fileno()]
            self._process = start_program(_PROGRAM, [counts.processes, index, *files], files)

    def send(self, data: bytes) -> None:
        self._has_job = True
        # The reader of the connection notices that a process has ended.
        with suppress(OSError):
            self.control.sendall(data)

    def leave(self) -> None:
        """Close the connection, with which the process ends. It has nothing to lose until it has a job."""
        self.control.close()
        if not self._has_job:
            self._process.kill()

    def end(self, count: int = 0) -> str:
        """Wait for the process, which has begun to end, and return a description of how it ended."""
        return end_of(self._process, f"HTTP process {self._index + 1} of {count}", _GRACE)
