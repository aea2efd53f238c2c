"""The clients of tools/soak.py: right and wrong requests of all kinds, and what their answers must be."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

PATIENCE = 300.0  # seconds in which every request must have its answer
JSON = {"Content-Type": "application/json"}


class Wrong(Exception):
    """An answer that is not the expected one."""


class Differs(Wrong):
    """Texts that are not those of the case."""

    def __init__(self, case: Case, texts: list[str]) -> None:
        super().__init__(f"{case.body} has {texts} instead of {case.texts}")
        self.case, self.texts = case, texts


@dataclass
class Case:
    """A request, and the texts of its completions."""

    body: dict[str, Any]
    texts: list[str]


def compare(case: Case, texts: list[str]) -> None:
    """Raise Wrong unless the texts are those of the case."""
    if texts != case.texts:
        raise Differs(case, texts)


async def whole(client: httpx.AsyncClient, case: Case) -> None:
    """A request whose answer comes in one piece."""
    answer = await client.post("/v1/completions", json=case.body)
    if answer.status_code != 200:
        raise Wrong(f"HTTP {answer.status_code}: {answer.text}")
    compare(case, [choice["text"] for choice in answer.json()["choices"]])


async def stream(client: httpx.AsyncClient, case: Case, leave: int = 0, pause: float = 0) -> None:
    """A stream, which is left after some events, or read with pauses."""
    texts, reasons = [""] * len(case.texts), Counter[int]()
    events, done = 0, False
    async with client.stream("POST", "/v1/completions", json={**case.body, "stream": True}) as answer:
        if answer.status_code != 200:
            raise Wrong(f"HTTP {answer.status_code}")
        async for line in answer.aiter_lines():
            if done and line:
                raise Wrong(f"after the end of a stream: {line}")
            events += line.startswith("data: ")
            if leave and events >= leave:
                return
            if events % 8 == 1 and pause:
                await asyncio.sleep(pause)
            done = done or line == "data: [DONE]"
            if not line or done:
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Wrong(f"an error in a stream: {event}")
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] += choice["finish_reason"] is not None
    if not done or any(reasons[i] != 1 for i in range(len(texts))):
        raise Wrong(f"{case.body} has no end")
    compare(case, texts)


def head(length: int, more: str = "") -> bytes:
    """The head of a request for completions."""
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    return ("\r\n".join(lines) + f"\r\n{more}\r\n").encode()


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of TCP, which is reset at its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


class Clients:
    """Clients that do something random again and again, until a time.

    Attributes:
        counts: of each action, how often it went as it should, by its name, or else why not.
    """

    def __init__(self, port: int, client: httpx.AsyncClient, cases: list[Case], rng: random.Random) -> None:
        self.port, self.client = port, client
        self.cases, self.rng = cases, rng
        self.counts: dict[str, Counter[str]] = {}
        self.differing: list[tuple[str, Differs]] = []
        weights = {
            self.stream: 30, self.whole: 20, self.read_slowly: 4, self.leave_stream: 10, self.leave_whole: 6,
            self.stop_reading: 3, self.bad_json: 6, self.bad_field: 4, self.half_body: 4, self.drip: 2,
            self.large_body: 2, self.nonsense: 2, self.look: 6,
        }  # fmt: skip
        self.actions: list[Callable[[], Awaitable[None]]] = list(weights)
        self.weights = list(weights.values())

    async def one(self, until: float) -> None:
        """One client, which goes on with something else after each action."""
        while time.monotonic() < until:
            (action,) = self.rng.choices(self.actions, self.weights)
            name = action.__name__
            try:
                await asyncio.wait_for(action(), PATIENCE)
                result = "right"
            except Differs as error:
                self.differing.append((name, error))
                continue
            except Exception as error:
                result = f"{type(error).__name__}: {error}"[:500]
                print(f"{name}: {result}", file=sys.stderr, flush=True)
            self.counts.setdefault(name, Counter())[result] += 1

    async def stream(self) -> None:
        await stream(self.client, self.rng.choice(self.cases))

    async def whole(self) -> None:
        await whole(self.client, self.rng.choice(self.cases))

    async def read_slowly(self) -> None:
        await stream(self.client, self.rng.choice(self.cases), pause=self.rng.random())

    def long(self, **more: Any) -> dict[str, Any]:
        """A request that nobody has made, for many tokens."""
        return {"prompt": f"x = {self.rng.random()}\n", "max_tokens": 1500, "ignore_eos": True, "n": 2, **more}

    async def leave_stream(self) -> None:
        await stream(self.client, Case(self.long(), [""] * 2), leave=self.rng.randint(1, 20))

    async def leave_whole(self) -> None:
        with suppress(httpx.ReadTimeout):
            await self.client.post("/v1/completions", json=self.long(), timeout=self.rng.uniform(0.05, 2))
            raise Wrong("an answer before its time")

    async def stop_reading(self) -> None:
        content = json.dumps(self.long(stream=True, logprobs=20, max_tokens=400)).encode()
        async with raw(self.port) as (_, writer):
            writer.write(head(len(content)) + content)
            await asyncio.sleep(self.rng.uniform(1, 10))

    async def _refused(self, content: bytes, *statuses: int) -> None:
        answer = await self.client.post("/v1/completions", content=content, headers=JSON)
        if answer.status_code not in statuses or set(answer.json()) != {"error"}:
            raise Wrong(f"HTTP {answer.status_code}: {answer.text}")

    async def bad_json(self) -> None:
        content = json.dumps(self.rng.choice(self.cases).body).encode()
        await self._refused(content[: self.rng.randrange(len(content))], 400)

    async def bad_field(self) -> None:
        fields = ({"n": 0}, {"prompt": None}, {"max_tokens": -1}, {"temperature": "hot"}, {"prompt": [1] * 3000})
        await self._refused(json.dumps({"prompt": "x", **self.rng.choice(fields)}).encode(), 400)

    async def large_body(self) -> None:
        await self._refused(b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413)

    async def half_body(self) -> None:
        async with raw(self.port) as (_, writer):
            writer.write(head(1000) + b'{"prompt": ')
            await asyncio.sleep(self.rng.uniform(0, 5))

    async def drip(self) -> None:
        """A head of which a byte comes each half second, until the connection is closed."""
        async with raw(self.port) as (reader, writer):
            begun, answer = time.monotonic(), asyncio.ensure_future(reader.read())
            while not answer.done():
                writer.write(b"G" if time.monotonic() - begun < 0.1 else b"E")
                await asyncio.wait([answer], timeout=0.5)
            seconds, reset = time.monotonic() - begun, isinstance(answer.exception(), ConnectionResetError)
            # A byte that arrives when the server has closed the connection resets it.
            if seconds > 20 or not (reset or answer.result().startswith(b"HTTP/1.1 408")):
                raise Wrong(f"after {seconds} s: {answer}")

    async def nonsense(self) -> None:
        async with raw(self.port) as (reader, writer):
            writer.write(self.rng.randbytes(self.rng.randint(1, 3000)) + b"\r\n\r\n")
            if not (answer := await reader.read()).startswith(b"HTTP/1.1 4"):
                raise Wrong(f"{answer!r}")

    async def look(self) -> None:
        for path in ("/", "/engine_state", "/health", "/metrics", "/v1/models", "/openapi.json"):
            if (answer := await self.client.get(path)).status_code != 200:
                raise Wrong(f"{path}: HTTP {answer.status_code}")
        prompt = self.rng.choice(self.cases).body["prompt"]
        tokens = (await self.client.post("/tokenize", json={"prompt": prompt})).json()["tokens"]
        if (await self.client.post("/detokenize", json={"tokens": tokens})).json() != {"prompt": prompt}:
            raise Wrong("tokens are not those of the prompt")
