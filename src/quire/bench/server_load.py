"""Load for any server with OpenAI's interface: requests that arrive at random, whether or not it keeps up.

Arrivals are drawn before the first request is sent and do not wait for answers (an open loop). All latencies count
from the intended arrival: a server that is slow to accept, and a client that is slow to send, are not flattered. How
late the client was is a part of the result.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import httpx

from quire.bench.client import Refused, events
from quire.bench.figures import markdown, percentiles

Row = dict[str, Any]
# A client that is later than this for one request in a hundred does not produce the requested load.
BEHIND_MS = 10.0
# Seconds between looks at the clock, by which the client measures how late it reads.
_TICK = 0.01


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or token ids, the number of tokens to generate, and the adapter that does it, if one does."""

    prompt: str | list[int]
    max_tokens: int
    adapter: str | None = None


@dataclass(slots=True)
class RequestRecord:
    """The result of a request; times are seconds after its intended arrival.

    Attributes:
        lag: when the client began to send it.
        times: when parts of the answer that have text came.
        end: when the answer was complete, or the request had failed.
        tokens: of the answer, as the server counts them; 0: it does not, and the parts are counted.
        error: the kind of failure, or None; `message` has its details.
    """

    request: LoadRequest
    lag: float = 0.0
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    error: str | None = None
    message: str = ""

    @property
    def output(self) -> int:
        return self.tokens or len(self.times)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None if there is only one."""
        return (self.times[-1] - self.times[0]) / (self.output - 1) if self.output > 1 else None


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Seconds that the first token, and each one after it in the mean of its request, may take in a good request."""

    ttft: float = math.inf
    itl: float = math.inf

    def admit(self, record: RequestRecord) -> bool:
        return record.error is None and record.times[0] <= self.ttft and (record.tpot or 0) <= self.itl


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive: a Poisson process of `rate` requests per second, whose gaps are
    exponentially distributed; all at 0 if the rate is infinite.
    """
    random = Random(seed)
    return [0.0] * count if rate == math.inf else list(accumulate(random.expovariate(rate) for _ in range(count)))


async def load(
    client: httpx.AsyncClient, model: str, requests: Sequence[LoadRequest], at: Sequence[float], timeout: float
) -> tuple[list[RequestRecord], list[float]]:
    """Send each request at its time, and return a record of each, and how late the client read the clock, in seconds.

    Args:
        at: seconds after the start, ascending.
        timeout: seconds after the intended arrival at which a request has failed.
    """
    records = [RequestRecord(request) for request in requests]
    late: list[float] = []
    watch = asyncio.create_task(_watch(late))
    start = time.perf_counter() + 0.05
    tasks = []
    try:
        for record, offset in zip(records, at, strict=True):
            if (wait := start + offset - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(_send(client, model, record, start + offset, timeout)))
        await asyncio.gather(*tasks)
    finally:
        for task in (watch, *tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    return records, late


async def _watch(late: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK)
        late.append(max(0.0, time.perf_counter() - before - _TICK))


async def _send(client: httpx.AsyncClient, model: str, record: RequestRecord, arrival: float, timeout: float) -> None:
    """Send one request and fill its record."""
    record.lag = time.perf_counter() - arrival
    try:
        await asyncio.wait_for(_read(client, model, record, arrival), max(0.0, timeout - record.lag))
    except Refused as error:
        record.error, record.message = error.kind, str(error)
    except asyncio.TimeoutError:
        # asyncio has a class of its own in Python 3.10.
        record.error = record.message = "timeout"
    record.end = time.perf_counter() - arrival


async def _read(client: httpx.AsyncClient, model: str, record: RequestRecord, arrival: float) -> None:
    request = record.request
    body = {
        "model": request.adapter or model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with aclosing(events(client, "/v1/completions", body)) as stream:
        async for event in stream:
            now = time.perf_counter() - arrival
            for choice in event.get("choices") or ():
                # A last part without text counts if none came before: tokens need not have any.
                if choice.get("text") or (choice.get("finish_reason") and not record.times):
                    record.times.append(now)
            record.tokens = (event.get("usage") or {}).get("completion_tokens") or record.tokens
    if not record.times:
        raise Refused("empty answer")


async def send_untimed(client: httpx.AsyncClient, model: str, requests: Sequence[LoadRequest]) -> None:
    """Complete the beginning of the first prompt, if there is one, by one token, so that later requests find all ready.

    Raises:
        Refused: the server does not answer it.
    """
    for first in requests[:1]:
        await _read(client, model, RequestRecord(LoadRequest(first.prompt[:1], 1)), time.perf_counter())


async def sweep(
    client: httpx.AsyncClient,
    model: str,
    works: Sequence[tuple[float, Sequence[LoadRequest]]],
    limits: LatencyLimits,
    seed: int,
    timeout: float,
    by_processes: Callable[..., tuple[list[RequestRecord], list[float]]] | None = None,
) -> AsyncIterator[Row]:
    """Yield a row for each rate and its requests, after a request of one token that is not timed.

    Args:
        client: of the server.
        model: its name.
        works: rates, and their requests.
        limits: of good requests.
        seed: of arrivals.
        timeout: as of `load`.
        by_processes: `load_by_processes` with its first arguments, which loads the server; None: this process does.

    Raises:
        Refused: the server does not answer that request.
    """
    await send_untimed(client, model, works[0][1])
    for i, (rate, requests) in enumerate(works):
        at = arrivals(len(requests), rate, seed + i)
        if by_processes is None:
            records, late = await load(client, model, requests, at, timeout)
        else:
            records, late = await asyncio.to_thread(by_processes, model, requests, at, timeout)
        yield summary(rate, records, late, limits, at)


def summary(
    rate: float, records: Sequence[RequestRecord], late: Sequence[float], limits: LatencyLimits, at: Sequence[float]
) -> Row:
    """The row of a rate. Latencies are those of complete answers; rates count from the start to the last answer, and
    failed requests in none of them.
    """
    done = [record for record in records if record.error is None]
    seconds = max(offset + record.end for offset, record in zip(at, records, strict=True))
    good = sum(map(limits.admit, records))
    lag = percentiles([record.lag for record in records])
    row: Row = {
        "rate": "inf" if rate == math.inf else int(rate) if rate.is_integer() else rate,
        "requests": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "messages": {record.error: record.message for record in records if record.error is not None},
        "ended_early": sum(record.output < record.request.max_tokens for record in done if record.tokens),
        "seconds": seconds,
        "requests_s": len(done) / seconds,
        "good": good,
        "good_requests_s": good / seconds,
        "output_tokens_s": sum(record.output for record in done) / seconds,
        "ttft_ms": percentiles([record.times[0] for record in done]),
        "tpot_ms": percentiles([record.tpot for record in done if record.tpot is not None]),
        "itl_ms": percentiles([b - a for record in done for a, b in pairwise(record.times)]),
        "e2e_ms": percentiles([record.end for record in done]),
        "send_lag_ms": lag,
        "read_lag_ms": percentiles(late),
    }
    if adapters := Counter(record.request.adapter for record in records if record.request.adapter is not None):
        row["adapters"] = dict(adapters.most_common())
    row["behind"] = max(lag["p99"], row["read_lag_ms"].get("p99", 0.0)) > BEHIND_MS
    return row


def table(result: Row) -> str:
    """The result as a Markdown table, with errors and what the client could not keep up with below it."""
    shown: dict[str, tuple[str, str | None]] = {
        name: (key, None)
        for name, key in {
            "requests": "requests",
            "failed": "failed",
            "requests/s": "requests_s",
            "good/s": "good_requests_s",
            "output tokens/s": "output_tokens_s",
        }.items()
    }
    if not any(result["limits"].values()):
        del shown["good/s"]
    times = {"first token": "ttft_ms", "per token": "tpot_ms", "gap": "itl_ms", "whole": "e2e_ms"}
    for name, key in times.items():
        shown |= {f"{name} ms {p}" if p == "p50" else f"{name} {p}": (key, p) for p in ("p50", "p95", "p99")}
    notes = []
    for row in result["runs"]:
        notes += [
            f"rate {row['rate']}: {count} failed: {kind}, such as: {' '.join(row['messages'][kind].split())[:200]}"
            for kind, count in row["errors"].items()
        ]
        if row["ended_early"]:
            notes.append(f"rate {row['rate']}: {row['ended_early']} answers have fewer tokens than requested")
        if row["behind"]:
            read = row["read_lag_ms"].get("p99", 0.0)
            notes.append(
                f"rate {row['rate']}: the client fell behind: at the 99th percentile it sent "
                f"{row['send_lag_ms']['p99']:.0f} ms late and read {read:.0f} ms late, which is a part of the latencies"
            )
    return "\n\n".join([markdown(result["runs"], ("rate",), shown), *notes])
