"""Load from several processes, for servers that write faster than one process reads."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any

from quire.bench.client import Refused, connected
from quire.bench.server_load import LoadRequest, RequestRecord, load, send_untimed

# In a process of the pool: the barrier at which all processes wait for each other.
_barrier: Any = None


def _begin(barrier: Any) -> None:
    """Prepare a process of the pool."""
    global _barrier
    _barrier = barrier


def load_by_processes(
    count: int,
    server: tuple[str, str | None],
    model: str,
    requests: Sequence[LoadRequest],
    at: Sequence[float],
    timeout: float,
) -> tuple[list[RequestRecord], list[float]]:
    """What `load` returns, by processes that begin at the same time and send every `count`-th request each.

    Args:
        count: of processes.
        server: its URL and its API key, if it has one.
        model, requests, at, timeout: as of `load`.
    """
    context = multiprocessing.get_context("spawn")
    records: list[Any] = [None] * len(requests)
    late: list[float] = []
    with ProcessPoolExecutor(count, context, _begin, (context.Barrier(count),)) as pool:
        parts = [pool.submit(_part, server, model, requests[i::count], at[i::count], timeout) for i in range(count)]
        for i, part in enumerate(parts):
            records[i::count], waited = part.result()
            late += waited
    return records, late


def _part(
    server: tuple[str, str | None], model: str, requests: Sequence[LoadRequest], *work: Any
) -> tuple[list[RequestRecord], list[float]]:
    """The part of one process, which sends when all others are ready, too."""

    async def send() -> tuple[list[RequestRecord], list[float]]:
        async with connected(*server) as client:
            # The first request of a process takes httpx 150 ms. If the server refuses it, the timed ones say so.
            with suppress(Refused):
                await send_untimed(client, model, requests)
            _barrier.wait()
            return await load(client, model, requests, *work)

    return asyncio.run(send())
