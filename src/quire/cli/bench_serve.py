"""quire bench serve: load a server with OpenAI's interface."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.distribution import pip_install


def run(args: argparse.Namespace, module: Any, plot: Any) -> int:
    """Load the server, and write the result; 1 if a request failed.

    Args:
        module: of `quire.bench`, for the machine of the client.
        plot: draws a result into a file, or None.
    """
    try:
        from quire.bench import server_load
    except ImportError as error:
        raise ValueError(f"quire bench serve needs httpx: {pip_install('bench')} ({error})") from error
    for name in ("ttft_limit", "itl_limit", "timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be above 0")
    if args.clients < 1:
        raise ValueError(f"--clients {args.clients}: it must be at least 1")
    if args.vocab_size < 4:
        raise ValueError(f"--vocab-size {args.vocab_size}: it must be at least 4")
    rates = [_rate(text, args.rate) for text in args.rate.split(",")]
    works = [(rate, _requests(args, i)) for i, rate in enumerate(rates)]
    result = asyncio.run(_load(args, works, module.machine()))
    if plot is not None:
        plot(result, args.plot)
    print(json.dumps(result, indent=2) if args.json == Path("-") else server_load.table(result))
    return 1 if any(row["failed"] for row in result["runs"]) else 0


async def _load(args: argparse.Namespace, works: Any, machine: dict[str, Any]) -> dict[str, Any]:
    """The result, written to a file after each rate, so that a crash loses none."""
    from quire.bench import client, server_load

    result: dict[str, Any] = {
        **machine,
        "operation": "serve",
        "url": args.url,
        "clients": args.clients,
        "seed": args.seed,
        "input": args.input if args.file is None else args.file.name,
        "output": args.output if args.file is None else args.file.name,
        "limits": {"ttft_ms": args.ttft_limit, "itl_ms": args.itl_limit},
        "runs": [],
    }
    limits = server_load.LatencyLimits(
        *(math.inf if limit is None else limit / 1e3 for limit in (args.ttft_limit, args.itl_limit))
    )
    async with client.connected(args.url, args.api_key) as server:
        model = result["model"] = str(args.model) if args.model is not None else await client.first_model(server)
        if args.adapters is not None:
            result["adapters"] = await _adapters(args.adapters, server)
            works = [(rate, _drawn(work, result["adapters"], args.seed + i)) for i, (rate, work) in enumerate(works)]
        by_processes = None
        if args.clients > 1:
            from quire.bench.client_processes import load_by_processes

            by_processes = partial(load_by_processes, args.clients, (args.url, args.api_key))
        async for row in server_load.sweep(server, model, works, limits, args.seed, args.timeout, by_processes):
            result["runs"].append(row)
            print(f"rate {row['rate']}: {row['completed']} of {row['requests']} completed", file=sys.stderr, flush=True)
            if args.json is not None and args.json != Path("-"):
                args.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


async def _adapters(given: str, server: Any) -> list[str]:
    """The adapters that requests have, the most frequent one first: the named ones, or the first of the server."""
    from quire.bench import client

    listed = await client.adapters(server)
    names = given.split(",")
    if given.isdecimal():
        if not 1 <= int(given) <= len(listed):
            raise ValueError(f"--adapters {given}: the server lists {len(listed)} adapters, and at least 1 is needed")
        return listed[: int(given)]
    unknown = next((name for name in names if name not in listed), None)
    if unknown is not None:
        raise ValueError(f"--adapters {given}: the server lists no adapter {unknown!r}")
    return names


def _drawn(work: list[Any], adapters: list[str], seed: int) -> list[Any]:
    """Requests, each with an adapter."""
    from quire.bench.workloads import zipf

    return [replace(request, adapter=name) for request, name in zip(work, zipf(adapters, len(work), seed), strict=True)]


def _rate(text: str, given: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"--rate {given}: {text!r} must be a number above 0, or inf")
    return rate


def _requests(args: argparse.Namespace, index: int) -> list[Any]:
    """The requests of one rate: those of the file, or random ones that no other rate has."""
    from quire.bench.server_load import LoadRequest
    from quire.bench.workloads import as_range, random_work, read_prompts

    if args.file is not None:
        return [LoadRequest(prompt, max_tokens) for _, prompt, max_tokens in read_prompts(args.file)]
    if args.requests < 1:
        raise ValueError(f"--requests {args.requests}: it must be at least 1")
    inputs, outputs = as_range(args.input, "--input"), as_range(args.output, "--output")
    work = random_work(args.requests, inputs, outputs, args.vocab_size, args.seed + index)
    return [LoadRequest(each.prompt, each.max_tokens) for each in work]
