"""Ends of a server under load for tools/soak.py: by SIGTERM, and by SIGKILL of any of its processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
from soak_clients import PATIENCE, Case, Differs, Wrong, stream, whole
from soak_server import Server, connected

# Counts outcomes, and says of each text that differs whether rounding explains that.
Count = Callable[[Iterable[str | Differs]], Counter[str]]
_LONG = Case({"prompt": "import os\n", "max_tokens": 2000, "ignore_eos": True}, ["?"])
# Seconds in which all processes must follow the one that has ended.
_SOON = 20.0


async def _outcome(work: Awaitable[None]) -> str | Differs:
    try:
        await asyncio.wait_for(work, PATIENCE)
        return "right"
    except Differs as error:
        return error
    except Wrong as error:
        text = str(error)
        known = {"unavailable": "server unavailable", "its process has ended": "engine ended"}
        return next((name for part, name in known.items() if part in text), text)
    except httpx.TransportError:
        return "connection closed"


async def _ended_under_load(
    server: Server, cases: list[Case], pid: int, number: int, delay: float = 0.0
) -> list[str | Differs]:
    """What becomes of short and long requests, streamed or not, of which 40 run when a process gets a signal."""
    async with connected(server) as client, connected(server) as observer:
        chosen = [case for case in cases if len(case.texts) == 1][:20] + [_LONG] * 40
        sent = [(stream if i % 2 else whole)(client, case) for i, case in enumerate(chosen)]
        tasks = [asyncio.ensure_future(_outcome(work)) for work in sent]
        while (await server.state(observer))["running"] < 40:
            await asyncio.sleep(0.02)
        await asyncio.sleep(delay)
        os.kill(pid, number)
        return await asyncio.gather(*tasks)


async def run_ends(log: Path, cases: list[Case], count: Count, options: tuple[str, ...]) -> dict[str, Any]:
    """SIGTERM and SIGKILL, each while streams and whole answers, short and long ones, are on their way."""
    result: dict[str, Any] = {}
    server = Server(log, options=options)
    try:
        for name, number in (("SIGTERM", signal.SIGTERM), ("SIGKILL", signal.SIGKILL)):
            begun = time.monotonic()
            results = count(await _ended_under_load(server, cases, server.process.pid, number))
            code = await asyncio.to_thread(server.process.wait, 60)
            result[name] = {"results": results, "exit_code": code, "seconds": round(time.monotonic() - begun, 1)}
            server = Server(log, server.port, options)
            async with connected(server) as client:
                again = count([await _outcome(whole(client, case)) for case in cases[:20]])
            result[name]["after_restart"] = {"results": again, "seconds_to_start": round(server.seconds, 1)}
    finally:
        server.end()
    return result


async def run_kills(
    log: Path, cases: list[Case], rng: random.Random, minutes: float, count: Count, options: tuple[str, ...]
) -> dict[str, Any]:
    """SIGKILL of any of the server's processes, again and again, each time under load after a random time. The others
    must end soon, by themselves, and a new server serves on the same port.
    """
    begun, server = time.monotonic(), Server(log, options=options)
    names = [name for name, pids in server.processes.items() if pids]
    outcomes, codes = {name: Counter[str]() for name in names}, {name: Counter[int]() for name in names}
    again, orphans = Counter[str](), 0
    try:
        while time.monotonic() - begun < minutes * 60:
            name, pids = rng.choice(names), server.pids
            victim, some = rng.choice(server.processes[name]), rng.sample(cases, len(cases))
            outcomes[name] += count(await _ended_under_load(server, some, victim, signal.SIGKILL, 2 * rng.random()))
            codes[name][await asyncio.to_thread(server.process.wait, _SOON)] += 1
            orphans += sum([not await _ends(pid) for pid in pids])
            server = Server(log, server.port, options)
            async with connected(server) as client:
                again += count([await _outcome(whole(client, case)) for case in some[:5]])
    finally:
        server.end()
    return {
        "results": outcomes,
        "exit_codes": codes,
        "orphans": orphans,
        "after_restart": again,
        "seconds": round(time.monotonic() - begun),
    }


async def _ends(pid: int) -> bool:
    """Whether a process has ended, or ends soon."""
    end = time.monotonic() + _SOON
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True
