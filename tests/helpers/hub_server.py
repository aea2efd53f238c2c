"""A server in a thread that speaks what huggingface_hub asks of the Hugging Face hub to download models."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files of a model, the same in all its revisions.

    Attributes:
        folder: of the files.
        revisions: the commit of each branch and tag.
        gated: whether files are refused to users without a token.
        cut: files of which only the first half is sent.
        failing: files that are answered with an error.
    """

    folder: Path
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: bool = False
    cut: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)


class HubServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        repositories: by their names.
        downloads: the files whose contents were asked for, in their order, without a commit.
        requests: the number of all requests.
        url: of the server.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.downloads: list[str] = []
        self.requests = 0
        self.url = "http://{}:{}".format(*self.server_address[:2])


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.server.requests += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, kind, revision, *file = [*(parts[2:] if is_api else parts), *[""] * 4]
        repository = self.server.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self._error(401 if is_api else 404, "RepoNotFound")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.revisions.values():
            return self._error(404, "RevisionNotFound")
        if is_api:
            return self._send(json.dumps(self._described(repository, kind, commit)).encode(), "json")
        return self._file(repository, commit, "/".join(filter(None, file)))

    def _described(self, repository: Repository, kind: str, commit: str) -> object:
        if kind == "revision":
            return {"id": "x/y", "sha": commit, "siblings": []}
        files = sorted(path for path in repository.folder.rglob("*") if path.is_file())
        named = [(str(path.relative_to(repository.folder)), path.read_bytes()) for path in files]
        return [{"type": "file", "path": name, "size": len(x), "oid": _oid(x)} for name, x in named]

    def _file(self, repository: Repository, commit: str, name: str) -> None:
        if repository.gated and "Authorization" not in self.headers:
            return self._error(403, "GatedRepo")
        if name in repository.failing:
            # huggingface_hub tries again after other errors.
            return self._error(400, "Unwilling")
        content = (repository.folder / name).read_bytes()
        if self.command == "GET":
            self.server.downloads.append(name)
        return self._send(content, _oid(content), commit, cut=name in repository.cut)

    def _send(self, content: bytes, etag: str, commit: str = "", cut: bool = False) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start : len(content) // 2 if cut else None])
            self.close_connection = cut

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A server without repositories."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
