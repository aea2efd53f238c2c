"""Bounds of connections: heads that drip, idle connections, too many of them, and clients that stop reading."""

from __future__ import annotations

import json
import resource
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from helpers.engines import pages_add_up, until_idle
from helpers.server import served
from quire.engine import LLM
from quire.server import ServerLimits, bind

LIMITS = ServerLimits(max_connections=40, max_head=8192, header_timeout=1, keep_alive=2, send_timeout=1)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=400) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.server.run.bind", with_small_buffers(bind))
        with served(llm, limits=LIMITS) as url:
            yield url


def with_small_buffers(bind):
    """`bind` of a socket whose connections buffer little in the system."""

    def small(*args):
        bound = bind(*args)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    return small


def post(body, head="", version="1.1"):
    content = json.dumps(body).encode()
    about = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n{head}"
    return f"POST /v1/completions HTTP/{version}\r\n{about}\r\n".encode() + content


@contextmanager
def connected(url):
    address = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(10)
        client.connect((address.hostname, address.port))
        yield client


def closed(client):
    """Whether the server has closed the connection, after what it has sent."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def all_of(client):
    """What the server sends until it closes the connection."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def left_by_server(client):
    """Whether the server has closed the connection, which the client sees only when it has read what came before."""
    server, own = (f":{name[1]:04X}" for name in (client.getpeername(), client.getsockname()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return [row[3] for row in rows if row[1].endswith(server) and row[2].endswith(own)] != ["01"]  # 01: established


def test_slow_heads_are_ended_while_others_are_served(url):
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(url)) for _ in range(30)]
        for client in slow:
            client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        begun, left = time.monotonic(), list(slow)
        while left and time.monotonic() - begun < 5:
            assert httpx.get(f"{url}/health", timeout=2).status_code == 200
            for client in [c for c in left if closed(c)]:
                left.remove(client)
            for client in left:
                client.setblocking(True)
                client.send(b"x")
            time.sleep(0.1)
        assert not left
        assert 0.9 < time.monotonic() - begun < 3


def test_slow_head_is_answered_408_and_idle_connection_is_closed(url):
    with connected(url) as silent, connected(url) as slow:
        slow.sendall(HEALTH[:-4])
        assert all_of(slow).startswith(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n")
        assert all_of(silent) == b""


@pytest.mark.slow
def test_second_head_of_a_connection_has_the_same_time_limit(url):
    """The second head of a connection begins when its first byte comes, and nothing else ends it before that."""
    with connected(url) as client, connected(url) as idle:
        for each in (client, idle):
            each.sendall(HEALTH)
            assert b"200 OK" in each.recv(4096)
        begun = time.monotonic()
        time.sleep(1.5)
        client.sendall(HEALTH)
        assert b"200 OK" in client.recv(4096)
        assert all_of(idle) == b""
        assert 1.9 < time.monotonic() - begun < 4
        client.sendall(HEALTH[:20])
        assert all_of(client).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - begun > 2.4


def test_head_beyond_its_bound_is_refused(url):
    for end in (b"", b"\r\n\r\n"):
        with connected(url) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            for _ in range(9):  # parts of which none is too large alone
                client.sendall(b"X-Large: " + b"x" * 1000 + b"\r\n")
                time.sleep(0.01)
            try:
                client.sendall(end)
                answer = all_of(client)
            except ConnectionError:
                answer = b""
            assert answer.split(b"\r\n")[0][:12] in (b"", b"HTTP/1.1 431")
    assert httpx.get(f"{url}/health").status_code == 200


def test_data_behind_a_request_in_progress_is_not_read(url, llm):
    """Else it would fill the server's memory."""
    with connected(url) as client:
        client.settimeout(2)
        client.sendall(post({**LONG, "stream": True}))
        part, sent = b"X: " + b"x" * 65_000 + b"\r\n", len(HEALTH[:-2])
        client.sendall(HEALTH[:-2])
        with suppress(TimeoutError):
            while sent < 64 << 20:
                sent += client.send(part)
        assert sent < 32 << 20
    until_idle(llm)


def test_upgrade_header_is_ignored(url):
    """As Java's client makes it with each first request."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    request = post({"prompt": "import os\n", "max_tokens": 1}, head=offer)
    for size in (len(request), 150):
        with connected(url) as client:
            for start in range(0, len(request), size):
                client.sendall(request[start : start + size])
                time.sleep(0.01)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")


def test_stream_in_http_1_0_ends_with_its_connection(url):
    with connected(url) as client:
        client.sendall(post({"prompt": "import os\n", "max_tokens": 2, "stream": True}, version="1.0"))
        head, _, body = all_of(client).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_new_connection_beyond_the_limit_closes_the_longest_idle_one(url, llm):
    with ExitStack() as stack:
        worker = stack.enter_context(connected(url))
        worker.sendall(post(LONG))
        while llm.stats.running == 0:
            time.sleep(0.01)
        idle = [stack.enter_context(connected(url)) for _ in range(60)]
        for client in idle[-39:]:
            client.sendall(HEALTH)
            assert b"200 OK" in client.recv(4096)
        assert [closed(client) for client in idle] == [True] * 21 + [False] * 39
        assert not closed(worker)
        assert llm.stats.running == 1
    until_idle(llm)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux lists the state of connections there")
def test_client_that_stops_reading_is_disconnected(url, llm):
    """Streams and whole answers beyond what is buffered: the connection ends in the middle of the answer."""
    body = {"prompt": "import os\n", "max_tokens": 150, "ignore_eos": True, "logprobs": 20}
    for stream in (True, False):
        with connected(url) as client:
            client.sendall(post({**body, "stream": stream}))
            assert client.recv(12) == b"HTTP/1.1 200"
            assert not left_by_server(client)
            end = time.monotonic() + 60
            while not left_by_server(client):
                assert time.monotonic() < end
                time.sleep(0.1)
            assert 1000 < len(all_of(client)) < 60_000
    assert len(httpx.post(f"{url}/v1/completions", json=body, timeout=60).content) > 80_000
    assert pages_add_up(llm)


def test_serve_raises_the_limit_of_open_files_for_connections(llm):
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most))
    try:
        with served(llm):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (4096 + 256, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def test_serve_with_few_open_files_has_fewer_connections(llm, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 266))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    with served(llm) as url, ExitStack() as stack:
        idle = [stack.enter_context(connected(url)) for _ in range(15)]
        idle[-1].sendall(HEALTH)
        assert b"200 OK" in idle[-1].recv(4096)
        assert [closed(client) for client in idle] == [True] * 5 + [False] * 10


def test_streams_of_one_connection_are_chunks_that_end_with_an_empty_one(url):
    """Two requests that are sent at once, of which the second one begins when the first has been answered."""
    request = post({"prompt": "import os\n", "max_tokens": 5, "stream": True})
    with connected(url) as client, client.makefile("rb") as answers:
        client.sendall(request + request)
        for _ in range(2):
            head = list(iter(answers.readline, b"\r\n"))
            assert head[0] == b"HTTP/1.1 200 OK\r\n"
            assert b"transfer-encoding: chunked\r\n" in [line.lower() for line in head]
            body = b""
            while size := int(answers.readline(), 16):
                body += answers.read(size)
                assert answers.readline() == b"\r\n"
            assert answers.readline() == b"\r\n"
            assert body.count(b"data: {") >= 5
            assert body.endswith(b"data: [DONE]\n\n")
