"""How a process takes its share of the connections at a socket that several processes have."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

import pytest

pytest.importorskip("uvicorn")

from quire.server.acceptor import Acceptor
from quire.server.counts import Counts

LOOPS = ["asyncio", "uvloop"]


class Echo(asyncio.Protocol):
    def __init__(self, connections):
        self._connections = connections

    def connection_made(self, transport):
        self.transport = transport
        self._connections.add(self)

    def connection_lost(self, error):
        self._connections.discard(self)

    def data_received(self, data):
        self.transport.write(data)


class Failing:
    """A listening socket at which the system has no room for some connections."""

    def __init__(self, listener, failures):
        self._listener, self.failures = listener, failures

    def __getattr__(self, name):
        return getattr(self._listener, name)

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


def run(loop, work):
    """Run a coroutine in an event loop of a kind."""
    made = pytest.importorskip("uvloop").new_event_loop() if loop == "uvloop" else asyncio.new_event_loop()
    try:
        return made.run_until_complete(work)
    finally:
        made.close()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield listener


@pytest.fixture
def counts():
    """Those of this process and of another one."""
    first = Counts(2)
    other = Counts(2, 1, first.descriptor)
    first.close()
    return first.allocate(), other.allocate()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses of acceptors, in seconds."""
    seconds, pause = [], Acceptor._pause

    def noted(taking, duration):
        seconds.append(duration)
        pause(taking, duration)

    monkeypatch.setattr(Acceptor, "_pause", noted)
    return seconds


def connect(listener, count):
    return [socket.create_connection(listener.getsockname()[:2]) for _ in range(count)]


async def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("loop", LOOPS)
def test_acceptor_with_fewer_connections_than_others_takes_all_at_once(loop, listener, counts, pauses):
    own, other = counts
    other.add(100)

    async def work():
        connections, clients = set(), connect(listener, 40)
        taking = Acceptor(listener, lambda: Echo(connections), None, connections, own)
        await until(lambda: len(connections) == 40)
        await until(lambda: own.local[0] == 40)
        for client in clients:
            client.sendall(b"hello")
        for client in clients:
            assert await asyncio.to_thread(client.recv, 16) == b"hello"
            client.close()
        await until(lambda: not connections)
        taking.close()

    run(loop, work())
    assert not pauses


@pytest.mark.parametrize("loop", LOOPS)
def test_acceptor_beside_a_busy_process_takes_connections_after_a_pause_each(loop, listener, counts, pauses):
    """The other process has no connection and takes none."""
    own, _ = counts

    async def work():
        connections, clients = set(), connect(listener, 40)
        taking = Acceptor(listener, lambda: Echo(connections), None, connections, own)
        await until(lambda: len(connections) == 40)
        taking.close()
        for client in clients:
            client.close()
        await until(lambda: not connections)

    run(loop, work())
    assert len(pauses) >= 36
    assert set(pauses) == {0.001}


@pytest.mark.parametrize("loop", LOOPS)
def test_acceptor_that_is_closed_leaves_connections_to_others(loop, listener, counts):
    own, _ = counts

    async def work():
        connections = set()
        # Closed while it pauses.
        first = connect(listener, 20)
        taking = Acceptor(listener, lambda: Echo(connections), None, connections, own)
        await until(lambda: len(connections) >= 4)
        taking.close()
        await asyncio.sleep(0.05)
        taken = len(connections)
        second = connect(listener, 1)
        await asyncio.sleep(0.05)
        assert len(connections) == taken < 20
        for client in (*first, *second):
            client.close()
        await until(lambda: not connections)

    run(loop, work())


@pytest.mark.parametrize("loop", LOOPS)
def test_acceptor_without_files_left_tries_again_later(loop, listener, counts, pauses, caplog):
    own, other = counts
    other.add(100)

    async def work():
        connections, clients = set(), connect(listener, 2)
        failing = Failing(listener, 2)
        taking = Acceptor(failing, lambda: Echo(connections), None, connections, own)
        await until(lambda: len(connections) == 2)
        taking.close()
        for client in clients:
            client.close()
        await until(lambda: not connections)

    run(loop, work())
    assert [record.getMessage() for record in caplog.records] == ["a connection has to wait: Too many open files"] * 2
    assert pauses == [1.0, 1.0]
