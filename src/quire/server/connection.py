"""What a connection may cost: the time and size of a request's head, and data that its client does not read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvicorn

from quire.server.limits import Limits


class _Bounded:
    """Bounds of a connection, mixed into uvicorn's protocol class, whose `cycle` is the request in progress.

    uvicorn closes a connection that idles between requests. Beyond that, a head must be complete `header_timeout`
    seconds after the connection, or the head, began, with `max_head` bytes at most. A client must read something in
    `send_timeout` seconds while there is something to read. Beyond `max_connections` the connection that has been
    without a request for the longest time is closed.
    """

    limits: Limits
    cycle: Any
    connections: set[Any]
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._since, self._head = time.monotonic(), 0
        self._unread, self._read_at = 0, self._since
        if len(self.connections) > self.limits.max_connections:
            idle = (c for c in self.connections if c.idle and not c.transport.is_closing())
            min(idle, key=lambda c: c._since).transport.abort()

    @property
    def idle(self) -> bool:
        """Whether no request is in progress: the head of the next one has not arrived, or not all of it."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        if not self.idle:
            self._head = 0
            return
        if self.cycle is not None and not self._head:
            self._since = time.monotonic()
        self._head += len(data)
        if self._head > self.limits.max_head:
            self._end(b"431 Request Header Fields Too Large")

    def check(self, now: float) -> None:
        """End the connection if its client is overdue; called now and then, with `time.monotonic()`."""
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread or not unread:
            self._unread, self._read_at = unread, now
        elif now - self._read_at > self.limits.send_timeout:
            self.transport.abort()
        begun = self.cycle is None or self._head
        if self.idle and begun and now - self._since > self.limits.header_timeout:
            self._end(b"408 Request Timeout")

    def _end(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.transport.close()


def bound(config: uvicorn.Config, limits: Limits) -> None:
    """Have a configuration's connections keep the limits; a watch must call `check` of each."""
    config.load()
    config.http_protocol_class = type("Connection", (_Bounded, config.http_protocol_class), {"limits": limits})


async def watch(connections: set[Any]) -> None:
    """Check connections of a server for ever."""
    while True:
        await asyncio.sleep(0.25)
        now = time.monotonic()
        for connection in list(connections):
            connection.check(now)
