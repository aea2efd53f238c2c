"""Timing on a GPU: CUDA graph replays over several caches, with the GPU's ceilings measured in the same run."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from quire import __version__
from quire.bench import dense, peers
from quire.bench.batches import Batch
from quire.bench.calls import Plan, Run, Sample, wrapped
from quire.bench.cells import Cell
from quire.bench.table import table

__all__ = ["DECODE", "PREFILL", "bench", "table"]
DECODE = (
    "decode gqa4 p16 1x1k",
    "decode gqa4 p16 1x8k",
    "decode gqa4 p16 1x64k",
    "decode gqa4 p16 8x4k",
    "decode gqa4 p16 32x2k",
    "decode gqa4 p16 64x4k",
    "decode gqa4 p16 256x512",
    "decode gqa4 p16 64 mixed 256k",
    "decode gqa4 p1 64x2k",
    "decode gqa4 p64 64x2k",
    "decode gqa8 p16 64x2k",
    "decode 28:4 p16 64x2k",
    "decode mha p16 16x4k",
    "decode gqa4 p16 d64 64x4k",
    "decode gqa4 p16 fp8 64x4k",
    "decode mla128 p64 64x4k",
    "decode mla16 p64 64x4k",
)
PREFILL = (
    "prefill ragged 1x4k",
    "prefill ragged 1x16k",
    "prefill ragged 8x2k",
    "prefill ragged 32x512",
    "prefill p16 1x16k",
    "prefill p16 8x2k",
    "prefill p1 8x2k",
    "prefill p16 4x512@16k",
    "prefill p16 60x1@4k+4x500@4k",
    "prefill p16 64x4@4k device",
    # Kernels are not tuned for the cells that follow, which show what the choices for those above cost elsewhere.
    "prefill ragged mha 8x2k",
    "prefill p16 28:4 8x2k",
    "prefill p16 gqa8 8x2k",
    "prefill p16 d64 8x2k",
    "prefill ragged d64 1x16k",
    "prefill ragged d256 8x2k",
    "prefill ragged d256 1x16k",
    "prefill p16 fp8 8x2k",
    "prefill p64 8x2k",
    "prefill p128 8x2k",
    "prefill ragged 1x1k",
    "prefill ragged 16x1k",
    "prefill p16 1x512@128k",
    "prefill mla128 p64 4x512@4k",
    "prefill mla16 p64 8x2k",
)
# A graph reads caches of this many times the size of the L2 cache, so that none is found there.
_L2_TIMES = 4
# Those caches have at least so many bytes together.
_MIN_BYTES = 200 << 20
# A graph has this many runs, so that the cost of launching the graph does not count.
_LAYERS = 16
# A graph takes at most so many seconds, since more runs would only heat the GPU.
_GRAPH_SECONDS = 8e-3
# The clocks recover for so many seconds before each series of replays.
_PAUSE = 0.4


@triton.jit  # type: ignore[untyped-decorator]
def _read(x, sums, n, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Sum x in strides over the grid, to measure how fast memory is read."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.int32)
    for i in range(0, n, tl.num_programs(0) * block):
        total += tl.load(x + i + offsets, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total))


class GraphReplay(NamedTuple):
    """A graph of calls, how many they are, and what was captured: a graph does not keep the memory that it uses."""

    graph: torch.cuda.CUDAGraph
    calls: int
    runs: Sequence[Callable[[], Any]]


def captured(runs: Sequence[Callable[[], Any]]) -> GraphReplay:
    """A graph of all runs, repeated to 16 calls or 8 ms."""
    stream = torch.cuda.Stream()
    # Tensors that the runs read may not have been written yet.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs[:2]:
            run()
        stream.synchronize()
        calls = min(_LAYERS, int(_GRAPH_SECONDS / _seconds(runs[0])) + 1)
    graph, repeats = torch.cuda.CUDAGraph(), -(-calls // len(runs))
    with torch.cuda.graph(graph):
        for run in [*runs] * repeats:
            run()
    graph.replay()
    return GraphReplay(graph, len(runs) * repeats, runs)


def seconds_in_turns(replays: Sequence[GraphReplay], rounds: int) -> list[float]:
    """Seconds per call of each graph. Graphs are replayed in turns, since the clocks of a GPU follow the power that it
    has drawn. The results are the least of three medians over `rounds` replays each: after heavy work a GPU is slower
    for about a second, by a tenth or more.
    """
    medians = []
    for _ in range(3):
        time.sleep(_PAUSE)
        times = [[_seconds(replay.graph.replay) / replay.calls for replay in replays] for _ in range(rounds)]
        medians.append([median(column) for column in zip(*times, strict=True)])
    return [min(column) for column in zip(*medians, strict=True)]


def graph_seconds(runs: Sequence[Callable[[], Any]], rounds: int) -> float:
    """Seconds per call of runs that are captured in one graph and timed alone."""
    return seconds_in_turns([captured(runs)], rounds)[0]


def _seconds(call: Callable[[], Any]) -> float:
    """Seconds of what a call launches on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def host_seconds(call: Callable[[], Any], calls: int = 40) -> float:
    """Median seconds until a call returns on the host; the device is not waited for."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        # A full launch queue would make the host wait.
        if len(times) % 10 == 0:
            torch.cuda.synchronize()
    return sorted(times)[calls // 2]


def ceilings() -> dict[str, float]:
    """The GPU's memory read rate in GB/s, and rate of bf16 matrix products in TFLOP/s."""
    x = torch.zeros(1 << 29, dtype=torch.int32, device="cuda")
    sums = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    n = len(x) // (programs * 4096) * programs * 4096
    read = graph_seconds([lambda: _read[(programs,)](x, sums, n, 4096, num_warps=8)] * 2, 11)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = graph_seconds([lambda: a @ a] * 4, 11)
    return {"read_gb_s": 4 * n / read / 1e9, "matmul_tflop_s": 2 * 8192**3 / product / 1e12}


def machine() -> dict[str, Any]:
    """The GPU, date and versions."""
    return {
        "device": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "quire": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _torch(
    cell: Cell, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]], max_bytes: int
) -> list[Callable[[], Any]] | None:
    """Torch's attention over each cache: for decode, gather the pages and call `scaled_dot_product_attention`; for
    prefill of whole prompts, only the call, over ragged rows or, for pages, over rows made beforehand. None if torch
    has none, or its copies exceed `max_bytes`.
    """
    if cell.operation == "decode":
        gather = dense.decode(batch, max_bytes, cell.latent)
        return [partial(gather, *kv) for kv in caches] if gather else None
    if not dense.is_dense(cell):
        return None
    run = dense.prefill(cell, batch, dense.sdpa)
    return [partial(run, *kv) for kv in (caches if cell.ragged else [batch.rows()[:2]] * 2)]


class InterleavedTimer:
    """What is timed in turns: Quire and its peers over the same caches.

    Args:
        caches: keys and values, together larger than the L2 cache.
        sample: of the exact output.
    """

    def __init__(self, caches: Sequence[tuple[Tensor, Tensor]], sample: Sample) -> None:
        self._caches, self._sample = caches, sample
        # Rows, the names of their fields that get times, and what is timed.
        self._waiting: list[tuple[dict[str, Any], str, GraphReplay]] = []

    def add(self, plan: Plan, run: Run) -> dict[str, Any]:
        """A row: the error on the sample, and microseconds of plan and run on the host; "us", those of a run on the
        device, comes with `finish`.
        """
        plan()
        row: dict[str, Any] = {
            "error": self._sample.error(run(*self._caches[0])),
            "plan_host_us": host_seconds(plan) * 1e6,
            "run_host_us": host_seconds(partial(run, *self._caches[0])) * 1e6,
        }
        self.add_to(row, "us", [partial(run, *kv) for kv in self._caches])
        return row

    def add_to(self, row: dict[str, Any], name: str, runs: Sequence[Callable[[], Any]]) -> None:
        """`finish` sets this name of a row to the microseconds of a run."""
        self._waiting.append((row, name, captured(runs)))

    def finish(self, rounds: int) -> None:
        """Time all that was added."""
        times = seconds_in_turns([replay for _row, _name, replay in self._waiting], rounds)
        for (row, name, _replay), seconds in zip(self._waiting, times, strict=True):
            row[name] = seconds * 1e6


def _quire(cell: Cell, batch: Batch, backend: str, turns: InterleavedTimer) -> dict[str, Any]:
    """Host times and error of Quire, and the kernel family that computed; {"failed": reason} if `backend` declines.

    "auto" declines nothing that can be computed: its errors are raised.
    """
    wrapper, plan, run = wrapped(cell, batch, backend=backend)
    try:
        row = turns.add(plan, run)
    except ValueError as error:
        if backend == "auto":
            raise
        return {"failed": str(error)}
    row["family"] = wrapper.backend
    return row


def measure(
    name: str, backend: str, rounds: int, beside: Mapping[str, peers.Peer], baseline: bool = True
) -> dict[str, Any]:
    """One cell's row: times, rate and error of Quire, and times of peers by their names and of torch's baseline."""
    cell, device = Cell.parse(name), torch.cuda.get_device_properties(0)
    batch = cell.make("cuda")
    k, v = batch.rows()[:2] if cell.ragged else (batch.k, batch.v)
    copies = max(2, -(-max(_MIN_BYTES, _L2_TIMES * device.L2_cache_size) // cell.kv_bytes(batch)))
    caches = [(k, v), *((k.clone(), v if cell.latent else v.clone()) for _ in range(copies - 1))]
    turns = InterleavedTimer(caches, Sample.of(batch))
    row = _quire(cell, batch, backend, turns)
    for peer, (_, kernels) in beside.items():
        if found := peers.measure(kernels(cell, batch), turns.add):
            row[peer] = found
    row["sdpa_us"] = None
    if baseline and (runs := _torch(cell, batch, caches, device.total_memory // 5)):
        turns.add_to(row, "sdpa_us", runs)
    turns.finish(rounds)
    if "us" in row and cell.operation == "decode":
        row["gb_s"] = cell.kv_bytes(batch) / row["us"] / 1e3
    elif "us" in row:
        row["tflop_s"] = cell.flops(batch) / row["us"] / 1e6
    return {"cell": name, **row}


def bench(
    names: Sequence[str], backend: str = "auto", rounds: int = 11, chosen_peers: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the result after each cell: the machine, its ceilings, and the rows so far.

    Args:
        chosen_peers: the names of the peers to time, see `peers.installed`.
    """
    seed, device = torch.seed() % (1 << 31), torch.cuda.get_device_properties(0)
    beside = peers.installed(chosen_peers, (device.major, device.minor))
    baseline = chosen_peers is None or peers.BASELINE in chosen_peers
    torch.manual_seed(seed)
    found = machine() | {name: peer.version for name, peer in beside.items()}
    result: dict[str, Any] = {**found, "backend": backend, "seed": seed, "ceilings": ceilings(), "cells": []}
    for name in names:
        result["cells"].append(measure(name, backend, rounds, beside, baseline))
        yield result
