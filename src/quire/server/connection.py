"""What a connection may cost: the time and size of a request's head, and data that its client does not read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from quire.server.limits import ServerLimits


class Connection(H11Protocol):
    """A connection of uvicorn, whose `cycle` is the request in progress, with bounds.

    It parses HTTP by h11. httptools would be quicker, but loses the body of a request that offers to go on in HTTP/2,
    as Java's client does, and keeps all that a client sends after a request in progress.

    uvicorn closes a connection that idles between requests. Beyond that, a head must be complete `header_timeout`
    seconds after the connection, or the head, began, with `max_head` bytes at most. A client must read something in
    `send_timeout` seconds while there is something to read. Beyond `max_connections` the connection that has been
    without a request for the longest time is closed.
    """

    limits: ServerLimits
    connections: set[Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        super().data_received(data)
        if not self.idle:
            self._head = 0
            return
        if self.cycle is not None and not self._head:
            self._since = time.monotonic()
        self._head += len(data)
        if self._head > self.limits.max_head:
            self._end(b"431 Request Header Fields Too Large")

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            # The task that answers the new request reads the attribute only when it begins, which is later.
            self.cycle.send = _ChunkSender(self.cycle)  # type: ignore[method-assign]

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


class _ChunkSender:
    """Sends the answer to a request as uvicorn does, but for the parts of a body in chunks, as those of event streams,
    which it writes by itself: h11 takes as long for a part as the system for sending it.

    Args:
        cycle: the request.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._chunked = False

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if not (self._chunked and message.get("more_body")):
            await self._send(message)
            if message["type"] == "http.response.start":
                self._chunked = self._will_be_chunked(message)
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        body = message["body"]
        # A chunk without bytes would be the end of the body.
        if body and not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def _will_be_chunked(self, start: Any) -> bool:
        """Whether the body of this response is sent in chunks: its length is not known, and HTTP 1.1 is spoken."""
        scope = self._cycle.scope
        known = any(name.lower() == b"content-length" for name, _ in start["headers"])
        return not known and scope["http_version"] == "1.1" and scope["method"] != "HEAD" and start["status"] == 200


def bounded(limits: ServerLimits) -> type[Connection]:
    """The class of connections that keep the limits; a watch must call `check` of each."""
    return type("Connection", (Connection,), {"limits": limits})


async def watch(connections: set[Any]) -> None:
    """Check connections of a server for ever."""
    while True:
        await asyncio.sleep(0.25)
        now = time.monotonic()
        for connection in list(connections):
            connection.check(now)
