"""The processes of a server, and which of them has a connection; on Linux, by /proc."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_and_http(pid: int) -> tuple[int, list[int]]:
    """The engine's process of a server, and those that speak HTTP, of which the first one is that of the server."""
    children = children_of(pid)
    programs = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
    (engine,) = [child for child, program in programs.items() if "quire.engine.process" in program]
    further = [child for child, program in programs.items() if "quire.server.http_process" in program]
    assert len(further) + 1 == len(children)
    return engine, [pid, *further]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be in the table of processes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_ended(*pids: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end, "a process goes on"
        time.sleep(0.05)


def clients_by_process(pids: list[int], port: int) -> dict[int, set[int]]:
    """The ports of the clients whose connections each process has."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # 01 is an established connection.
    clients = {
        f"socket:[{row[9]}]": int(row[2].rpartition(":")[2], 16)
        for row in rows
        if row[1].endswith(f":{port:04X}") and row[3] == "01"
    }
    found: dict[int, set[int]] = {pid: set() for pid in pids}
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found[pid] |= {clients[link] for link in [os.readlink(file)] if link in clients}
    return found


class Connection:
    """A connection to a server, which keeps it.

    Args:
        port: of the server.
        key: that requests have.
        context: of TLS.
    """

    def __init__(self, port: int, key: str = "", context: ssl.SSLContext | None = None) -> None:
        if context is None:
            self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        else:
            self._http = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        self._http.connect()
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    @property
    def port(self) -> int:
        """The client's port."""
        return self._http.sock.getsockname()[1]

    def get(self, path: str) -> Any:
        """The status and the content of an answer, as text or what its JSON says."""
        return self._answer("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        return self._answer("POST", path, json.dumps(body))

    def begin(self, path: str, body: Any) -> None:
        """Send a request whose answer is not read."""
        self._http.request("POST", path, json.dumps(body), self._headers)

    def begin_without_body(self, path: str) -> None:
        """Send the head of a request whose body does not follow."""
        self._http.sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())

    def close(self) -> None:
        self._http.close()

    def _answer(self, method: str, path: str, content: str | None) -> Any:
        self._http.request(method, path, content, self._headers)
        answer = self._http.getresponse()
        text = answer.read().decode()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text


def connections_to_each(pids: list[int], port: int, count: int, **options: Any) -> dict[int, list[Connection]]:
    """At least so many connections to each process, with the options of `Connection`."""
    made: dict[int, Connection] = {}
    end = time.monotonic() + 20
    while True:
        found = clients_by_process(pids, port)
        of_each = {pid: [made[client] for client in clients if client in made] for pid, clients in found.items()}
        if min(map(len, of_each.values())) >= count:
            return of_each
        assert time.monotonic() < end
        connection = Connection(port, **options)
        made[connection.port] = connection
        time.sleep(0.01)
