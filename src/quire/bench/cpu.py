"""Timing on the CPU: Quire and torch in alternation, with the machine's ceilings measured in the same run."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numba
import torch
import torch.nn.functional as F

from quire import __version__
from quire.bench import dense
from quire.bench.batches import Batch
from quire.bench.calls import Sample, planned
from quire.bench.cells import Cell
from quire.kernels.cpu.jit import num_threads

DECODE = (
    "decode gqa4 p16 8x2k",
    "decode gqa4 p1 8x2k",
    "decode gqa4 p16 1x16k",
    "decode gqa4 p16 64x512",
    "decode gqa4 p16 32 mixed 32k",
    "decode mha p16 8x2k",
    "decode 28:4 p16 8x2k",
    "decode gqa4 p16 fp16 8x2k",
    "decode gqa4 p16 fp32 8x2k",
    "decode gqa4 p16 fp8 8x2k",
)
PREFILL = (
    "prefill ragged 8x512",
    "prefill p16 8x512",
    "prefill p16 fp32 8x512",
    "prefill p16 fp16 8x512",
    "prefill p16 mha 8x512",
    "prefill p16 d64 8x512",
    "prefill p16 1x4k",
    "prefill p16 32x128",
    "prefill p16 4x256@2k",
)
# Dense copies take at most so many bytes.
_MAX_DENSE = 8 << 30
Run = Callable[[], Any]


def medians(runs: Sequence[Run], rounds: int) -> list[float]:
    """Median seconds of each function; calls alternate, so that a slow phase of the machine affects all of them."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, samples in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
    return [sorted(samples)[len(samples) // 2] for samples in times]


def ceilings() -> dict[str, float]:
    """The machine's memory read rate in GB/s, and rate of float32 matrix products in GFLOP/s."""
    numbers = torch.ones(1 << 27)
    a = torch.randn(2048, 2048)
    read, product = medians([lambda: numbers.sum(), lambda: a @ a], 7)
    return {"read_gb_s": numbers.numel() * 4 / read / 1e9, "matmul_gflop_s": 2 * 2048**3 / product / 1e9}


def machine() -> dict[str, Any]:
    """The processor, number of threads, date and versions."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return {
        "device": names[0] if names else platform.processor() or platform.machine(),
        "threads": num_threads(),
        "date": date.today().isoformat(),
        "quire": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def _torch(cell: Cell, batch: Batch) -> Run | None:
    """Torch's attention: for decode, gather the pages and call `scaled_dot_product_attention`; for prefill, only the
    call, over dense keys and values made beforehand. None if torch has none (fp8, prefill of unequal lengths).
    """
    if cell.operation == "decode":
        gather = dense.decode(batch, _MAX_DENSE, cell.latent)
        return partial(gather, batch.k, batch.v) if gather else None
    if batch.spec.kv_dtype.itemsize == 1 or cell.more:
        return None
    k, v, _ = batch.rows()
    q, k, v = (x.view(cell.batch, -1, *x.shape[1:]).transpose(1, 2).contiguous() for x in (batch.q, k, v))
    if cell.q_len == cell.kv_len:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = torch.ones(cell.q_len, cell.kv_len, dtype=torch.bool).tril(cell.kv_len - cell.q_len)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def measure(name: str, backend: str = "auto", rounds: int = 11) -> dict[str, Any]:
    """One cell's row: milliseconds of Quire and torch, Quire's rate, and its error on a sample."""
    cell = Cell.parse(name)
    batch = cell.make()
    run, baseline = planned(cell, batch, backend), _torch(cell, batch)
    k, v, _ = batch.rows() if cell.ragged else (batch.k, batch.v, None)

    def ours() -> torch.Tensor:
        return run(k, v)

    times = medians([ours] if baseline is None else [ours, baseline], rounds)
    row: dict[str, Any] = {"cell": name, "ms": times[0] * 1e3, "torch_ms": times[1] * 1e3 if baseline else None}
    if cell.operation == "decode":
        row["gb_s"] = cell.kv_bytes(batch) / times[0] / 1e9
    else:
        row["gflop_s"] = cell.flops(batch) / times[0] / 1e9
    row["error"] = Sample.of(batch).error(ours())
    return row


def bench(names: Sequence[str], backend: str = "auto", rounds: int = 11) -> Iterator[dict[str, Any]]:
    """Yield the result after each cell: the machine, its ceilings, and the rows so far."""
    seed = torch.seed() % (1 << 31)
    torch.manual_seed(seed)
    result: dict[str, Any] = {**machine(), "seed": seed, "ceilings": ceilings(), "cells": []}
    for name in names:
        result["cells"].append(measure(name, backend, rounds))
        yield result


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    decode = any("gb_s" in row for row in result["cells"])
    top, unit = ("read_gb_s", "GB/s") if decode else ("matmul_gflop_s", "GFLOP/s")
    ceiling = result["ceilings"][top]
    baseline = "gather + SDPA ms" if decode else "SDPA ms"
    lines = [
        f"| cell | Quire ms | {baseline} | times as fast | {unit} | of {ceiling:,.1f} {unit} | error |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["cells"]:
        rate, torch_ms = row.get("gb_s", row.get("gflop_s")), row["torch_ms"]
        beside = "- | -" if torch_ms is None else f"{torch_ms:.1f} | {torch_ms / row['ms']:.1f}"
        rates = f"{rate:.1f} | {rate / ceiling:.0%}"
        lines.append(f"| {row['cell']} | {row['ms']:.2f} | {beside} | {rates} | {row['error']:.1e} |")
    return "\n".join(lines)
