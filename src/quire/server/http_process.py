"""The program of a further process that speaks HTTP: `quire.server.http_processes` starts it."""

from __future__ import annotations

import asyncio
import gc
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from quire.engine.model_info import ModelInfo
from quire.engine.reading import import_tokenizers, load_tokenizer
from quire.server.app import AppOptions, app_of
from quire.server.counts import Counts
from quire.server.engine_client import EngineClient, EngineEnded
from quire.server.http_processes import DRAIN, ENGINE_ENDED, FAIL, HURRY, READY, SIZE_BYTES
from quire.server.run import RunOptions, uvicorn_config
from quire.server.service import Service
from quire.server.shared_server import SharedServer

# Seconds for this process to end when the first process has ended.
_LAST = 4.0


@dataclass(frozen=True, kw_only=True)
class HttpJob:
    """What a process is to serve: what the first one does.

    Attributes:
        name, info: of the engine.
        trust_remote_code: whether the tokenizer may be code of the checkpoint.
        app, run: how it is served.
    """

    name: str
    info: ModelInfo
    trust_remote_code: bool
    app: AppOptions
    run: RunOptions


def main(processes: int, index: int, listener: int, engine: int, counts: int, control: int) -> None:
    """Serve HTTP until the first process says otherwise, or until it or the engine has ended. The exit code is 0 if the
    first process has said so.

    Args:
        processes: that speak HTTP.
        index: of this one.
        listener: the descriptor of the socket that listens.
        engine: that of the connection to the engine.
        counts: that of the memory of `Counts`.
        control: that of the connection to the first process, whose first message is an `HttpJob`, pickled.
    """
    import_tokenizers()
    leader = socket.socket(fileno=control)
    size = int.from_bytes(_received(leader, SIZE_BYTES), "little")
    content = _received(leader, size)
    if not size or len(content) < size:
        # The first process has ended.
        sys.exit(1)
    job: HttpJob = pickle.loads(content)
    shared = Counts(processes, index, counts)
    shared.close()
    tokenizer = load_tokenizer(Path(job.info.folder), job.trust_remote_code)
    client = EngineClient(socket.socket(fileno=engine), job.name, job.info, tokenizer, lambda: "the engine has ended")
    app = app_of(client, job.app, shared)
    # Objects that were loaded stay, so collections of others need not look at them.
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=listener) as accepting:
        server = FurtherServer(uvicorn_config(app, job.run), app.state.service, accepting.getsockname(), leader)
        with suppress(EngineEnded):
            server.run_to_end(accepting)
    sys.exit(0 if server.is_draining else 1)


def _received(sock: socket.socket, size: int) -> bytes:
    """So many bytes, and none of those that follow; fewer if the other side has ended."""
    data = bytearray()
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return bytes(data)


class FurtherServer(SharedServer):
    """A server that the first process commands, and ends with it.

    Args:
        config, service, name: as of `Server`.
        leader: connected to the first process.

    Attributes:
        is_draining: whether the first process has said that this one is to end.
    """

    def __init__(self, config: uvicorn.Config, service: Service, name: tuple[str, int], leader: socket.socket) -> None:
        super().__init__(config, service, name, None)
        self._leader, self._failing = leader, asyncio.Event()
        self.is_draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._leader.setblocking(False)
        asyncio.get_running_loop().add_reader(self._leader, self._obey)
        self._report(READY)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the first process."""
        yield

    async def _until_failing(self) -> None:
        await self._failing.wait()

    def _follow_engine(self) -> None:
        super()._follow_engine()
        self._report(ENGINE_ENDED)

    def _obey(self) -> None:
        """Do what the first process says, or end if it has ended."""
        try:
            received = self._leader.recv(64)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._leader)
            # Nobody ends this process any more, whatever it still waits for.
            loop.call_later(_LAST, lambda: setattr(self, "force_exit", True))
        self.is_draining = self.is_draining or DRAIN in received
        self.should_exit = True
        if not received or HURRY in received:
            self._hurried = True
        if self._hurried or FAIL in received:
            self._failing.set()

    def _report(self, what: bytes) -> None:
        with suppress(OSError):
            self._leader.send(what)
