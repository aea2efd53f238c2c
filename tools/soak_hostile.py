"""Hostile requests beside streams for tools/soak.py: whether others wait longer while they are answered."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from statistics import quantiles
from typing import Any

import httpx
from soak_clients import JSON, PATIENCE, Wrong
from soak_server import Server, connected

STREAMS = 300
# The 99th percentile with hostile requests may be so many times that without them.
MOST = 2.0
# Clients that send one hostile request after the other, and how many different bodies of a kind they have.
_CLIENTS = 2
_BODIES = 8
_TEXT = "def f(x):\n    return x + 1\n"


def _schema(rng: random.Random, count: int) -> dict[str, Any]:
    """A JSON schema that no server has seen, of many properties."""
    name = rng.randrange(1 << 32)
    properties = {f"p{name}_{i}": {"type": "string", "enum": ["a", "b", f"c{i}"]} for i in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _rules(rng: random.Random, count: int) -> str:
    """A grammar that no server has seen, of many rules."""
    name = rng.randrange(1 << 32)
    rules = [f'rule-{i} ::= "a{name}{i}" | "b{i}"' for i in range(count)]
    return "\n".join(["root ::= " + " | ".join(f"rule-{i}" for i in range(count)), *rules])


def _body(**fields: Any) -> str:
    return json.dumps({"prompt": _TEXT, "max_tokens": 1, **fields})


# By name, the statuses that the answer may have, and what makes a body.
REQUESTS: dict[str, tuple[set[int], Callable[[random.Random], str]]] = {
    "a text far beyond the context": ({400}, lambda rng: _body(prompt=_TEXT * 100_000)),
    "many tokens": ({400}, lambda rng: _body(prompt=[7] * 500_000)),
    "a body that ends early": ({400}, lambda rng: _body(prompt=[7] * 500_000)[:-1]),
    "many lists": ({400}, lambda rng: _body(x=[[]] * 500_000)),
    "many unknown fields": ({400}, lambda rng: _body(**{f"x{i}": 1 for i in range(100_000)})),
    "a large schema": ({200, 400}, lambda rng: _body(structured_outputs={"json": _schema(rng, 1000)})),
    "a grammar of many rules": ({200, 400}, lambda rng: _body(structured_outputs={"grammar": _rules(rng, 1000)})),
    "a grammar that is too large": ({400}, lambda rng: _body(structured_outputs={"grammar": _rules(rng, 40_000)})),
    "many allowed tokens": ({200}, lambda rng: _body(n=16, allowed_token_ids=[7] * 60_000)),
    "many prompts": ({200, 429}, lambda rng: _body(prompt=[f"{rng.random()}"] * 500)),
}


async def _read(client: httpx.AsyncClient, number: int, gaps: list[tuple[float, float]]) -> None:
    """Read a stream, and note when each part came, and how long after the part before."""
    body = {"prompt": f"# {number}\n", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    last = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if '"error"' in line:
                    raise Wrong(line)
                now = time.monotonic()
                if last:
                    gaps.append((now, now - last))
                last = now


async def _send(client: httpx.AsyncClient, bodies: list[tuple[str, str]], counts: dict[str, Counter[str]]) -> None:
    """Send hostile requests, one after the other and again and again."""
    while True:
        name, body = bodies[0]
        bodies.append(bodies.pop(0))
        answer = await client.post("/v1/completions", content=body, headers=JSON, timeout=PATIENCE)
        is_right = answer.status_code in REQUESTS[name][0]
        result = "right" if is_right else f"HTTP {answer.status_code}: {answer.text[:300]}"
        counts.setdefault(name, Counter())[result] += 1


def attack(url: str, seed: int, connection: Connection) -> None:
    """The process of hostile clients, which makes their bodies first: readers of streams shall not wait for that. It
    reports that it is ready, waits for a number of seconds, sends for so long, and reports the results.
    """
    rng = random.Random(seed)
    bodies = [(name, make(rng)) for _ in range(_BODIES) for name, (_, make) in REQUESTS.items()]
    rng.shuffle(bodies)
    counts: dict[str, Counter[str]] = {}

    async def send(seconds: float) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            work = asyncio.gather(*(_send(client, bodies, counts) for _ in range(_CLIENTS)))
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(work, seconds)

    connection.send("ready")
    asyncio.run(send(connection.recv()))
    connection.send(counts)


async def run_hostile(server: Server, rng: random.Random, seconds: float) -> dict[str, Any]:
    """Gaps of streams, for some seconds without and then with hostile requests."""
    gaps: list[tuple[float, float]] = []
    own, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=attack, args=(server.url, rng.randrange(1 << 32), other), daemon=True)
    process.start()
    async with connected(server) as client, connected(server) as observer:
        await asyncio.to_thread(own.recv)
        streams = [asyncio.ensure_future(_read(client, i, gaps)) for i in range(STREAMS)]
        while (await server.state(observer))["running"] < STREAMS:
            await asyncio.sleep(0.2)
        quiet = time.monotonic()
        await asyncio.sleep(seconds)
        own.send(seconds)
        hostile = time.monotonic()
        counts = await asyncio.to_thread(own.recv)
        end = time.monotonic()
        if ended := next((task for task in streams if task.done()), None):
            raise Wrong(f"a stream has ended: {ended.exception()}")
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        after = await server.idle(observer)
    process.join()
    if set(counts) != set(REQUESTS):
        raise Wrong(f"hostile requests of some kinds were not answered: {counts}")
    result: dict[str, Any] = {"streams": STREAMS, "seconds": seconds, "counts": counts, "after": after}
    for name, begin, until in (("quiet_ms", quiet, hostile), ("hostile_ms", hostile, end)):
        cuts = quantiles((gap * 1e3 for at, gap in gaps if begin <= at < until), n=100)
        result[name] = {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1)}
    return result
