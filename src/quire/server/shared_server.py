"""A server of several processes, which accept connections at the same socket. The first one leads the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from quire.server.acceptor import Acceptor
from quire.server.http_processes import HttpProcessEnded, HttpProcesses
from quire.server.run import AFTER, RunOptions, Server, listen, uvicorn_config
from quire.server.service import Service


def serve_together(
    app: FastAPI,
    bound: socket.socket,
    others: HttpProcesses,
    options: RunOptions,
    started: Callable[[Server], None] | None = None,
) -> None:
    """Serve an application in this process and in further ones, as `serve` does in one.

    Args:
        app: of this process.
        bound: the socket, which all processes have; it is closed in the end.
        others: the further processes, with their job.
        options: as theirs.
        started: called with this process's server when all processes accept connections.

    Raises:
        EngineEnded, OSError, ValueError: as for `serve`.
        HttpProcessEnded: a further process has ended, and so all requests have ended with an error, and the server.
    """
    service: Service = app.state.service
    config = uvicorn_config(app, options)
    with bound:
        listen(bound, config)
        LeadingServer(config, service, bound.getsockname(), started, others).run_to_end(bound)


class SharedServer(Server):
    """One of the processes."""

    _acceptor: Acceptor | None = None

    async def _accept(self, sockets: list[socket.socket] | None) -> None:
        # uvicorn would accept all connections that wait.
        await super()._accept([])
        assert sockets is not None
        connections = self.server_state.connections
        self._acceptor = Acceptor(sockets[0], self._protocol, self.config.ssl, connections, self._service.connections)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def _answer_all(self, sockets: list[socket.socket] | None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super()._answer_all(sockets)


class LeadingServer(SharedServer):
    """The first process, which ends the others, and ends after them.

    Args:
        config, service, name, started: as of `Server`.
        others: the further processes.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        name: tuple[str, int],
        started: Callable[[Server], None] | None,
        others: HttpProcesses,
    ) -> None:
        super().__init__(config, service, name, started)
        self._others = others

    def run_to_end(self, listener: socket.socket) -> None:
        """Serve as `Server` does.

        Raises:
            EngineEnded: the engine's process has ended.
            HttpProcessEnded: a further process has ended.
        """
        super().run_to_end(listener)
        if self._others.how_lost is not None:
            raise HttpProcessEnded(self._others.how_lost())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._others.begin(self._follow_others, lambda: self.should_exit)
        await super().startup(sockets)

    async def _answer_all(self, sockets: list[socket.socket] | None) -> None:
        self._others.drain()
        await super()._answer_all(sockets)
        await self._others.until_ended(self._service.limits.grace + AFTER, lambda: self.force_exit)

    def _fail_all(self) -> None:
        super()._fail_all()
        self._others.fail(self._hurried)

    def _follow_others(self) -> None:
        """End, since another process has ended."""
        self._service.fail_all()
        self.should_exit = True
