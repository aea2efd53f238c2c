"""A server in a thread of the test process, and in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.paths import ROOT
from quire.engine import LLM
from quire.server import allow_adapters, create_app, serve


@contextmanager
def served(
    llm: LLM, port: int = 0, run: dict[str, Any] | None = None, adapter_root: Path | None = None, **options: Any
) -> Iterator[str]:
    """The URL of a server for an engine, by uvicorn in a thread; the options are those of `create_app`, and `run` those
    of `serve`. Requests may load adapters in `adapter_root`.
    """
    servers: list[Any] = []
    ready = threading.Event()

    def started(server: Any) -> None:
        servers.append(server)
        ready.set()

    app = create_app(llm, **options)
    if adapter_root is not None:
        allow_adapters(app, adapter_root)
    thread = threading.Thread(target=serve, args=(app,), kwargs={"port": port, "started": started, **(run or {})})
    thread.start()
    try:
        assert ready.wait(20)
        yield "{}://{}:{}".format("https" if run and run.get("tls") else "http", *servers[0].address)
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def serving_process(
    *arguments: str, stdout: int | None = None, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`quire serve` on a free port and the CPU: the process, and the URL that it prints."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--device", "cpu", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stderr is not None
        try:
            lines = []
            while not (found := re.search(r"https?://\S+", lines[-1] if lines else "")):
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)  # the process has ended
            yield process, found[0]
        finally:
            process.kill()
