"""Takes connections at a socket that several processes share, so that each has about as many."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from quire.server.counts import Cells

# A process takes connections at once until it has so many more than the one with the fewest.
_LEAD = 4
# The most connections that it takes before it does something else.
_AT_ONCE = 16
# Seconds in which others may take a connection. If they are busy, this process takes it all the same.
_PATIENCE = 0.001
# Seconds until the next attempt when the system has no room for another connection.
_PAUSE = 1.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Takes connections at a listening socket in the running event loop, until `close`.

    The system wakes all processes for a new connection, and gives it to the first that asks. An event loop's own server
    asks until there is none left: the first process to wake up would have all clients that come at the same time, and
    keep them. So a process that has more connections than another one leaves new ones to it, for a millisecond.

    Args:
        listener: the socket.
        make_protocol: makes the protocol of a connection.
        tls: with which the server speaks TLS; None: it does not.
        connections: of this process.
        counts: the number of connections of each process, which the acceptors keep.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        connections: Collection[Any],
        counts: Cells,
    ) -> None:
        self._listener, self._make_protocol = listener, make_protocol
        self._tls, self._connections = tls, connections
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        # The connections that are being set up, and the timer that ends a pause.
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._take)

    def close(self) -> None:
        """Take no more connections."""
        self._loop.remove_reader(self._listener)
        if self._paused is not None:
            self._paused.cancel()

    def _take(self) -> None:
        """Take connections that wait, or leave them to others for a moment."""
        for _ in range(_AT_ONCE):
            if self._lead() >= _LEAD:
                self._pause(_PATIENCE)
                return
            if not self._take_one():
                return

    def _lead(self) -> float:
        """How many connections more than another process this one has."""
        self._count()
        return self._counts.local[0] - min(self._counts.others())

    def _count(self) -> None:
        # While a connection is being made it may be counted twice, which delays others by a millisecond at most.
        self._counts.local[0] = len(self._connections) + len(self._tasks)

    def _take_one(self) -> bool:
        """Take a connection; return whether there was one."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            logging.getLogger("uvicorn.error").error("a connection has to wait: %s", error.strerror)
            self._pause(_PAUSE)
            return False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._make(connection))
        self._tasks.add(task)
        task.add_done_callback(self._made)
        return True

    async def _make(self, connection: socket.socket) -> None:
        # A client may leave meanwhile, or not speak TLS.
        with suppress(OSError):
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._tls)

    def _made(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._count()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._paused = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._paused = None
        self._take_one()
        if self._paused is None:
            self._loop.add_reader(self._listener, self._take)
