"""Timing engines: throughput of many requests, latency of batches and of prompts that come into a busy engine.

Each engine is loaded, timed on requests with equal tokens, and closed before the next one is loaded. Steps of requests
that run together have a floor: the time that reading the weights and the keys and values takes at the memory read rate
measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

from quire.bench.engines import ENGINES, Times
from quire.bench.figures import markdown, percentiles
from quire.bench.workloads import LatencyCell, Work, random_work
from quire.engine.checkpoint import read_config
from quire.engine.moe import expert_modules

Row = dict[str, Any]
# The number of prompts that arrive at a busy engine.
_ARRIVALS = 32
# The most tokens that the requests of a busy engine generate.
_BACKGROUND = 4096
# The most tokens of prompts of a round that is not timed. Longer ones have the same kernels, and may take minutes.
_MAX_UNTIMED_INPUT = 1 << 17


@dataclass(frozen=True)
class Setup:
    """What is timed, and how.

    Attributes:
        folder: the model: a checkpoint, or a config.json for random weights.
        name: of the model, in results.
        engines: of `quire.bench.engines.ENGINES`.
        max_num_seqs: the largest number of requests that run at once, for all engines.
        options: further arguments of Quire's LLM. The peers also read `trust_remote_code`, and vLLM
            `tensor_parallel_size` and the options of adapters.
        weights: the format of the weights, which follows the names of engines; None: it is not of interest.
        adapters: the folders of adapters that requests have in turn, by their names; empty: they have none. Then
            `options` has `max_adapters` and, as their rank, `max_adapter_rank`.
        adapter_counts: latencies are measured with each of these numbers of adapters, of which requests have the first
            ones in turn; None: all of them.
    """

    folder: Path
    name: str
    device: str
    engines: Sequence[str] = ("quire",)
    seed: int = 0
    max_num_seqs: int = 256
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    adapter_counts: Sequence[int | None] = (None,)

    def with_adapters(self, work: Sequence[Work], count: int | None = None) -> list[Work]:
        """Requests, of which each has the next one of the first `count` adapters (None: of all)."""
        names: Sequence[str | None] = list(self.adapters)[:count] or [None]
        return [replace(w, adapter=name) for w, name in zip(work, cycle(names), strict=False)]

    @property
    def config(self) -> Any:
        """Transformers' configuration of the model."""
        return read_config(self.folder, self.options.get("trust_remote_code", False)).get_text_config()


def throughput(setup: Setup, work: Sequence[Work], name: str, context: Row) -> Iterator[Row]:
    """Yield the result after each engine: `context` (the machine, its ceilings) and a row per engine.

    Args:
        work: the requests, all submitted at once; `name` describes them.
    """
    result = _result(setup, context, "throughput")
    longest = max(len(w.prompt) + w.max_tokens for w in work)
    for engine, row in _loaded(setup, longest):
        found = _measured(row, partial(_throughput, engine, setup.with_adapters(work), setup))
        result["cells"].append({"cell": name, **row, **found, **_named(setup, row)})
        yield result


def _throughput(engine: Any, work: Sequence[Work], setup: Setup) -> Row:
    few = sorted(work, key=lambda w: len(w.prompt))[:: max(1, len(work) // 8)]
    vocab = 1 + max(token for w in work for token in w.prompt)
    warm = [
        random_work(1, (len(w.prompt),) * 2, (min(8, w.max_tokens),) * 2, vocab, setup.seed + i)
        for i, w in enumerate(few, 1)
    ]
    # These prompts have the lengths that will be timed, and other tokens.
    engine.run(setup.with_adapters([w for (w,) in warm]))
    times = engine.run(work)
    seconds = max(each[-1] for each in times)
    tokens = sum(map(len, times))
    return {
        "requests": len(work),
        "seconds": seconds,
        "output_tokens_s": tokens / seconds,
        "total_tokens_s": (tokens + sum(len(w.prompt) for w in work)) / seconds,
        "ttft_ms": percentiles([each[0] for each in times]),
        "tpot_ms": percentiles([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]),
        "itl_ms": percentiles([b - a for t in times for a, b in pairwise(t)]),
    }


def latency(setup: Setup, names: Sequence[str], rounds: int, context: Row) -> Iterator[Row]:
    """Yield the result after each engine: `context` and a row per engine and cell (see `LatencyCell`)."""
    cells, config = {name: LatencyCell.parse(name) for name in names}, setup.config
    result, vocab = _result(setup, context, "latency"), int(config.vocab_size)
    longest = max(max(cell.input + cell.output, cell.arriving + 1) for cell in cells.values())
    # The background decodes until all requests have arrived.
    if any(cell.arriving for cell in cells.values()):
        max_len = getattr(config, "max_position_embeddings", None) or longest
        longest = max(longest, min(longest + _BACKGROUND, max_len))
    for engine, row in _loaded(setup, longest):
        # No prompt is repeated, since a prefix cache would have it the second time.
        for i, ((name, cell), count) in enumerate(product(cells.items(), setup.adapter_counts)):
            seed = setup.seed + 1000 * i
            found = _measured(row, partial(_latency, engine, cell, rounds, vocab, setup, count, seed))
            if not cell.arriving and row["engine"] == "Quire":
                # With context parallelism, the tokens of a request that this rank has.
                length = (cell.input + cell.output // 2) // setup.options.get("context_parallel_size", 1)
                size = floor_bytes(engine.llm.model, cell.batch, length)
                found["floor_ms"] = size / context["ceilings"]["read_gb_s"] / 1e6
            result["cells"].append({"cell": name, **row, **found, **_named(setup, row, count)})
        yield result


def _latency(
    engine: Any, cell: LatencyCell, rounds: int, vocab: int, setup: Setup, adapter_count: int | None, seed: int
) -> Row:
    """The times of a cell, after a round that is not timed."""

    def batch(round: int, count: int, length: int, output: int) -> list[Work]:
        work = random_work(count, (length, length), (output, output), vocab, seed + round)
        return setup.with_adapters(work, adapter_count)

    if cell.arriving:
        if not hasattr(engine, "arrivals"):
            return {"failed": "it takes no requests while others run"}
        background = batch(0, cell.batch, cell.input, 1)
        arriving = batch(1, _ARRIVALS + 4, cell.arriving, 1)
        return {"ttft_ms": percentiles(engine.arrivals(background, arriving)[4:])}
    steps, firsts = [], []
    for i in range(rounds + 1):
        length = cell.input if i else min(cell.input, _MAX_UNTIMED_INPUT)
        times = engine.run(batch(i, cell.batch, length, cell.output))
        if i:
            steps += steady_steps(times)
            firsts += [each[0] for each in times]
    found: Row = {"ttft_ms": percentiles(firsts)}
    if steps:
        found |= {"step_ms": percentiles(steps), "output_tokens_s": cell.batch / percentiles(steps)["p50"] * 1e3}
    return found


def steady_steps(times: Sequence[Times]) -> list[float]:
    """Seconds of the steps in which all requests decode: between the last first token and the first last one."""
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    return [b - a for a, b in pairwise(times[0]) if start <= a and b <= end]


def floor_bytes(model: Any, batch: int, length: int) -> int:
    """Bytes that a decode step of `batch` requests of `length` tokens must read: all weights but the table of
    embeddings, unless the head shares it, and the keys and values within windows. Of the experts of a mixture, those
    count that are read in the mean if each request chooses some at random; all, if the configuration does not say how
    many it chooses.
    """
    network = model.network
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in network.parameters()}
    table, head = network.get_input_embeddings(), network.get_output_embeddings()
    if table is not None and (head is None or head.weight is not table.weight):
        weights.pop(table.weight.data_ptr(), None)
    for module in expert_modules(network):
        chosen = getattr(model.config, "num_experts_per_tok", module.num_experts)
        unread = (1 - chosen / module.num_experts) ** batch
        for weight in module.parameters():
            weights[weight.data_ptr()] = round(weights[weight.data_ptr()] * (1 - unread))
    cache = 0
    for layer in model.layers:
        seen = min(length, layer.window_left + 1) if layer.window_left >= 0 else length
        cache += seen * layer.heads.num_kv_heads * (layer.heads.head_dim_qk + layer.heads.head_dim_vo)
    return sum(weights.values()) + batch * cache * model.dtype.itemsize


def _result(setup: Setup, context: Row, operation: str) -> Row:
    names = {"operation": operation, "model": setup.name, "seed": setup.seed, "max_num_seqs": setup.max_num_seqs}
    if setup.adapters:
        names |= {"adapters": len(setup.adapters), "adapter_rank": setup.options["max_adapter_rank"]}
    return {**context, **names, "options": {k: str(v) for k, v in setup.options.items()}, "cells": []}


def _loaded(setup: Setup, longest: int) -> Iterator[tuple[Any, Row]]:
    """Each engine and the beginning of its row; for a peer that cannot be loaded, None and the reason."""
    loras = {"adapters": setup.adapters} if setup.adapters else {}
    for name in setup.engines:
        kind = ENGINES[name]
        start = time.perf_counter()
        try:
            if setup.adapters and not kind.takes_adapters:
                raise ValueError("it is not timed with adapters")
            engine = kind(setup.folder, setup.device, longest, setup.max_num_seqs, **setup.options, **loras)
        except Exception as error:
            if name == "quire":
                raise
            yield None, {"engine": kind.title, "failed": f"{type(error).__name__}: {error}"}
            continue
        try:
            seconds = time.perf_counter() - start
            yield engine, {"engine": kind.title, "version": import_module(kind.package).__version__, "load_s": seconds}
        finally:
            engine.close()


def _named(setup: Setup, row: Row, adapter_count: int | None = None) -> Row:
    """The engine of a row with the format of its weights and the number of adapters, if several are timed."""
    engine: str = row["engine"]
    names: Row = {}
    if setup.weights is not None:
        engine, names = f"{engine}, {setup.weights}", {"weights": setup.weights}
    if adapter_count is not None:
        engine, names = f"{engine}, {adapter_count} adapters", {**names, "adapter_count": adapter_count}
    return {"engine": engine, **names}


def _measured(row: Row, measure: Callable[[], Row]) -> Row:
    """What `measure` returns; of a peer that fails or was not loaded, the reason."""
    if "failed" in row:
        return {}
    try:
        return measure()
    except Exception as error:
        if row["engine"] == "Quire":
            raise
        return {"failed": f"{type(error).__name__}: {error}"}


def table(result: Row) -> str:
    """The result as a Markdown table, with the reasons of failures below it."""
    rows = result["cells"]
    shown = {
        "load s": ("load_s", None),
        "output tokens/s": ("output_tokens_s", None),
        "tokens/s": ("total_tokens_s", None),
        "ms per step p50": ("step_ms", "p50"),
        "p99": ("step_ms", "p99"),
        "floor ms": ("floor_ms", None),
        "first token ms p50": ("ttft_ms", "p50"),
        "p95": ("ttft_ms", "p95"),
        "p99 ": ("ttft_ms", "p99"),
        "per token ms p50": ("tpot_ms", "p50"),
        "p95 ": ("tpot_ms", "p95"),
        "p99  ": ("tpot_ms", "p99"),
    }
    failed = {row["engine"]: row["failed"] for row in rows if "failed" in row}
    notes = [f"{engine} failed: {' '.join(reason.split())[:200]}" for engine, reason in failed.items()]
    return "\n\n".join([markdown(rows, ("cell", "engine"), shown), *notes])
