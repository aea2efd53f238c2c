"""A small server with OpenAI's interface in a thread, whose answers are scripts of delays and failures."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Answers /v1/completions and /v1/chat/completions with max_tokens parts of text.

    Attributes:
        bodies: of all requests, in the order of their arrival.
        first, gap: seconds before the first part and between parts.
        scripts: kinds of failure by the prompt's first token: a status, "hang up", "cut", "error", "slow", "broken".
        usage: whether tokens are counted.
        template: whether it can chat.
        text: of each part.
        field: of chats' deltas, which has the text.
        models: the answer of /v1/models.
    """

    def __init__(self, first: float = 0.0, gap: float = 0.0) -> None:
        self.first, self.gap = first, gap
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.scripts: dict[int, Any] = {}
        self.usage, self.text = True, "ab\u2028"
        self.field = "content"
        self.template = True
        self.models: list[dict[str, Any]] = [{"id": "fake", "object": "model"}]
        fake = self

        class Handler(_Handler):
            server_of = fake

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a connection that finds the queue of 5 full is tried again after a second

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client has gone
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_of: FakeServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": self.server_of.models})

    def do_POST(self) -> None:
        fake = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.bodies.append(body)
        fake.keys.add(self.headers.get("Authorization"))
        script = fake.scripts.get(body["prompt"][0]) if isinstance(body.get("prompt"), list) else None
        if isinstance(script, int):
            return self._whole(script, {"error": {"message": "too many", "type": "x", "code": script}})
        if "messages" in body and not fake.template:
            return self._whole(400, {"error": {"message": "fake has no chat template"}})
        time.sleep(fake.first)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(body, script)
        except OSError:  # the client has gone
            self.close_connection = True

    def _stream(self, body: dict[str, Any], script: Any) -> None:
        fake, count = self.server_of, body["max_tokens"]
        for i in range(count):
            if i:
                time.sleep(fake.gap)
            reason = "length" if i == count - 1 else None
            part = {"delta": {fake.field: fake.text}} if "messages" in body else {"text": fake.text}
            event = {"choices": [{"index": 0, "finish_reason": reason, **part}]}
            self._chunk(b": a comment\n\ndata: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
            if script == "hang up":
                self.close_connection = True
                return
            if script == "slow":
                time.sleep(0.6)
            if script in ("error", "broken"):
                self._chunk(b'data: {"error": {"message": "lost"}}\n\n' if script == "error" else b"data: {\n\n")
                break
        if fake.usage:
            self._chunk(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % count)
        if script != "cut":
            self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
