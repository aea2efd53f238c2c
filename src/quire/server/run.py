"""Runs the application by uvicorn, from the first connection to an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn
from fastapi import FastAPI

from quire.server.connection import bounded, watch
from quire.server.limits import Limits
from quire.server.service import Service

_AFTER = 5.0  # seconds for answers to leave after the grace time
_FILES = 256  # of the process beside its connections
_RECEIVED = 1 << 18  # bytes that are received at once, by which a head may be too large before that is seen


def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "warning",
    started: Callable[[Server], None] | None = None,
) -> None:
    """Serve an application of `create_app` until SIGINT or SIGTERM, or until `started`'s server is told to exit.

    The end is orderly: no connections are accepted, new requests on open ones are answered 503, and those in progress
    have `Limits.grace` seconds to finish. Then the engine is closed, and they are answered with an error. A second
    SIGINT ends at once.

    Args:
        app: the application.
        host, port: where to listen; port 0 takes a free one.
        log_level: of uvicorn: "info" logs each request.
        started: called with the server when it listens; it has `address` and `should_exit`.

    Raises:
        OSError: the address is in use or is not there.
        ValueError: the port is not one.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port = {port}: it must be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    service: Service = app.state.service
    limits = _within_files(service.limits)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=log_level in ("info", "debug", "trace"),
        server_header=False,
        http=bounded(limits),
        ws="none",
        h11_max_incomplete_event_size=limits.max_head + _RECEIVED,
        timeout_keep_alive=limits.keep_alive,
        timeout_graceful_shutdown=int(limits.grace + _AFTER),
    )
    with listener:
        server = Server(config, service, listener.getsockname(), started)
        server.run(sockets=[listener])


def _within_files(limits: Limits) -> Limits:
    """The limits, with as many connections as the process may open files, whose number is raised if need be."""
    if sys.platform == "win32":
        return limits
    import resource

    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.max_connections + _FILES
    if resource.RLIM_INFINITY != allowed < needed:
        allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
        return replace(limits, max_connections=max(1, allowed - _FILES))
    return limits


class Server(uvicorn.Server):
    """A server that answers all requests before it ends.

    Attributes:
        address: host and port.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, name: tuple, started: Callable[[Server], None] | None
    ) -> None:
        super().__init__(config)
        self._service, self._started = service, started
        self.address: tuple[str, int] = name[:2]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.ensure_future(watch(self.server_state.connections))
        if self._started is not None:
            self._started(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        failing = asyncio.ensure_future(self._fail_later())
        try:
            await super().shutdown(sockets)
        finally:
            failing.cancel()
            self._watching.cancel()

    async def _fail_later(self) -> None:
        await asyncio.sleep(self._service.limits.grace)
        print(f"quire: {self._service.running} completions are ended after the grace time", file=sys.stderr, flush=True)
        await asyncio.to_thread(self._service.fail_all)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals begin the orderly end. They are not raised again after it, unlike in uvicorn, so that the caller
        goes on and can close the engine.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
