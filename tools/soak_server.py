"""The server that the other files of tools/soak.py load."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from soak_clients import Wrong


class Server:
    """`quire serve` in a process, with its log in a file.

    Args:
        log: the file.
        port: 0 for a free one.
        options: of the command.
    """

    def __init__(self, log: Path, port: int = 0, options: tuple[str, ...] = ()) -> None:
        begun = time.monotonic()
        given = ("--port", str(port), "--grace", "5", "--device", "cpu")
        command = [sys.executable, "-m", "quire", "serve", *given, *options]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file)
        while not (found := re.search(r"at (http://\S+)", log.read_text())):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server has ended: {log.read_text()}")
            time.sleep(0.05)
        self.url, self.seconds = found[1], time.monotonic() - begun
        self.port = int(self.url.rpartition(":")[2])

    @property
    def processes(self) -> dict[str, list[int]]:
        """The processes by what they are: "server", the first that speaks HTTP, "engine", and "http", further ones."""
        found: dict[str, list[int]] = {"server": [self.process.pid], "engine": [], "http": []}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            program = Path(f"/proc/{child}/cmdline").read_text()
            found["engine" if "quire.engine.process" in program else "http"].append(int(child))
        return found

    @property
    def pids(self) -> list[int]:
        """All processes."""
        return [pid for pids in self.processes.values() for pid in pids]

    def memory(self) -> float:
        """Memory of all processes in MiB, of which pages that they share are counted once."""
        texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.pids)
        sizes = [int(text.partition("Pss:")[2].split()[0]) for text in texts]
        return sum(sizes) / 1024

    def files(self) -> int:
        """Open file descriptors of the processes that speak HTTP."""
        processes = self.processes
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in processes["server"] + processes["http"])

    async def state(self, client: httpx.AsyncClient) -> dict[str, Any]:
        """Memory, files and what the engine holds."""
        stats = (await client.get("/server_info")).json()["stats"]
        names = ("running", "waiting", "free_pages", "cached_pages", "held_pages", "generated_tokens", "preemptions")
        return {"memory_mib": round(self.memory(), 1), "files": self.files()} | {name: stats[name] for name in names}

    async def idle(self, client: httpx.AsyncClient) -> dict[str, Any]:
        """The state when no request is left, which must be soon, with all pages back."""
        end = time.monotonic() + 60
        while True:
            stats = (await client.get("/server_info")).json()["stats"]
            if not stats["running"] + stats["waiting"] + stats["held_pages"]:
                break
            if time.monotonic() > end:
                raise Wrong(f"after a minute without clients the engine is not idle: {stats}")
            await asyncio.sleep(0.2)
        if stats["free_pages"] + stats["cached_pages"] != stats["pages"]:
            raise Wrong(f"pages are lost: {stats}")
        return await self.state(client)

    def end(self) -> None:
        """End the process if it runs."""
        self.process.kill()
        self.process.wait()


def connected(server: Server) -> httpx.AsyncClient:
    """A client without a bound of connections and of time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=httpx.Timeout(None, connect=30))
