"""Runs the application by uvicorn, from the first connection to an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from quire.server.access_log import log_config
from quire.server.connection import bounded, watch
from quire.server.engine_client import EngineEnded
from quire.server.limits import ServerLimits
from quire.server.service import Service

# Seconds for sending answers after the grace time.
AFTER = 5.0
# Seconds for sending answers after a second SIGINT.
_HURRY = 1.0
# Files that the process opens besides its connections.
_FILES = 256
# The bytes that are received at once. A head may exceed its limit by as many before it is refused.
_RECEIVED = 1 << 18


def bind(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A socket that has the address and does not listen yet, for `serve`: a program that loads a model binds before, so
    that an address in use is an error before the model is loaded.

    Args:
        host, port: where to listen; port 0 takes a free one.

    Raises:
        OSError: the address is in use or is not there.
        ValueError: the port is not one.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port = {port}: it must be from 0 to 65535")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        with _naming(host, port):
            if bound.family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Connections of a server that has ended may still keep its port.
            if os.name == "posix":
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


@contextmanager
def _naming(host: str, port: int) -> Iterator[None]:
    """A context whose OSError names the address, and what to do if it is in use."""
    try:
        yield
    except OSError as error:
        message = f"host = {host!r}, port = {port}: can't listen there: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            remedy = "end the program that listens there, or choose another port (0 takes a free one)"
            message = f"port {port} of {host} is in use: {remedy}"
        named = OSError(message)
        named.errno = error.errno
        raise named from None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How an application is run; see `serve`."""

    log_level: str = "warning"
    access_log: str | None = None
    tls: tuple[Path, Path | None] | None = None


def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    bound: socket.socket | None = None,
    log_level: str = "warning",
    access_log: str | None = None,
    tls: tuple[Path, Path | None] | None = None,
    started: Callable[[Server], None] | None = None,
) -> None:
    """Serve an application of `create_app` until SIGINT or SIGTERM, or until `started`'s server has to exit.

    The end is orderly: no connections are accepted, new requests on open ones are answered 503, and those in progress
    have `ServerLimits.grace` seconds to finish. Then the engine is closed, and they are answered with an error. A
    second SIGINT ends the grace time, and connections whose clients have not read their answers a second later are
    closed.

    Args:
        app: the application.
        host, port: where to listen; port 0 takes a free one.
        bound: a socket of `bind`, which is closed in the end, instead of host and port.
        log_level: of uvicorn: "info" logs each request as text.
        access_log: how each request is logged, whatever the level: "text" or "json"; None: as `log_level` says.
        tls: the files of the certificate chain and of its private key, in PEM, to speak TLS; None for the key's: it is
            in the first one.
        started: called with the server when it listens; it has `address` and `should_exit`.

    Raises:
        EngineEnded: the engine's process has ended, and so all requests have ended with an error, and the server.
        OSError: the address is in use or is not there.
        ValueError: the port is not one.
    """
    options = RunOptions(log_level=log_level, access_log=access_log, tls=tls)
    run_app(app, bind(host, port) if bound is None else bound, options, started)


def run_app(
    app: FastAPI, bound: socket.socket, options: RunOptions, started: Callable[[Server], None] | None = None
) -> None:
    """Do what `serve` does, at a socket of `bind`."""
    config = uvicorn_config(app, options)
    with bound:
        listen(bound, config)
        Server(config, app.state.service, bound.getsockname(), started).run_to_end(bound)


def listen(listener: socket.socket, config: uvicorn.Config) -> None:
    """Have the system accept connections at a bound socket. Another program may have bound to the port, and listen by
    now.
    """
    with _naming(*listener.getsockname()[:2]):
        listener.listen(config.backlog)


def uvicorn_config(app: FastAPI, options: RunOptions) -> uvicorn.Config:
    """The configuration of uvicorn for one process of a server."""
    service: Service = app.state.service
    limits = _within_files(_of_process(service.limits, service.counts.processes))
    config = uvicorn.Config(
        app,
        log_level=options.log_level,
        access_log=options.access_log is not None or options.log_level in ("info", "debug", "trace"),
        log_config=log_config(options.access_log),
        ssl_certfile=options.tls and options.tls[0],
        ssl_keyfile=options.tls and options.tls[1],
        server_header=False,
        http=bounded(limits),
        ws="none",
        h11_max_incomplete_event_size=limits.max_head + _RECEIVED,
        timeout_keep_alive=limits.keep_alive,
        timeout_graceful_shutdown=int(limits.grace + AFTER),
    )
    if options.access_log is not None:
        # uvicorn has given this log the level of the others, at which lines about requests may be left out.
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return config


def _of_process(limits: ServerLimits, processes: int) -> ServerLimits:
    """The limits of one process: connections are divided among all, since one cannot close those of another."""
    return replace(limits, max_connections=-(-limits.max_connections // processes))


def _within_files(limits: ServerLimits) -> ServerLimits:
    """The limits, with as many connections as the process may open files, whose number is raised if need be."""
    if sys.platform == "win32":
        return limits
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.max_connections + _FILES
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(limits, max_connections=max(1, soft - _FILES))
    return limits


class Server(uvicorn.Server):
    """A server that answers all requests before it ends.

    Attributes:
        address: host and port.
        how_engine_ended: returns how the engine's process has ended, whose end is that of the server; None: it runs.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, name: tuple[str, int], started: Callable[[Server], None] | None
    ) -> None:
        super().__init__(config)
        self._service, self._started = service, started
        self._hurried = False
        self.how_engine_ended: Callable[[], str] | None = None
        self.address: tuple[str, int] = name[:2]

    def run_to_end(self, listener: socket.socket) -> None:
        """Serve at a socket that listens, until the end.

        Raises:
            EngineEnded: the engine's process has ended.
        """
        self.run(sockets=[listener])
        if self.how_engine_ended is not None:
            raise EngineEnded(self.how_engine_ended())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._accept(sockets)
        self._service.engine.on_end = self._follow_engine
        self._service.engine.attach()
        self._watching = asyncio.ensure_future(watch(self.server_state.connections))
        if self._started is not None and not self.should_exit:
            self._started(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        failing = asyncio.ensure_future(self._fail_later())
        try:
            await self._answer_all(sockets)
        finally:
            failing.cancel()
            self._watching.cancel()
            self._service.engine.leave()

    def _follow_engine(self) -> None:
        """End, since the engine's process has ended. An engine of this process may have been closed on purpose."""
        self.how_engine_ended = self._service.engine.how_ended
        self.should_exit = self.should_exit or self.how_engine_ended is not None

    async def _accept(self, sockets: list[socket.socket] | None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)

    async def _answer_all(self, sockets: list[socket.socket] | None) -> None:
        """Accept no more connections, and answer the requests in progress."""
        await super().shutdown(sockets)

    async def _fail_later(self) -> None:
        await self._until_failing()
        self._fail_all()
        if self._hurried:
            await asyncio.sleep(_HURRY)
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    async def _until_failing(self) -> None:
        """Wait until the requests in progress have no more time."""
        end = time.monotonic() + self._service.limits.grace
        while time.monotonic() < end and not self._hurried:
            await asyncio.sleep(min(0.05, max(0.0, end - time.monotonic())))
        when = "at the second SIGINT" if self._hurried else "after the grace time"
        print(f"quire: {self._service.running} completions are ended {when}", file=sys.stderr, flush=True)

    def _fail_all(self) -> None:
        self._service.fail_all()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the orderly end, and hurry at a second SIGINT. At a third one uvicorn cancels what is left."""
        if self.should_exit and sig == signal.SIGINT and not self._hurried:
            self._hurried = True
        else:
            super().handle_exit(sig, frame)

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
