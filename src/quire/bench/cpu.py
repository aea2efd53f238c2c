"""Timing on the CPU: ours beside torch, turn by turn in one run, under ceilings measured in the same run."""

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
from quire.bench.calls import planned, sampled_error
from quire.bench.cells import Cell

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
_DENSE = 8 << 30  # bytes of dense copies at most
Run = Callable[[], Any]


def medians(runs: Sequence[Run], rounds: int) -> list[float]:
    """Median seconds of each function; the functions take turns, so that a machine's moods hit all of them."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, mine in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            mine.append(time.perf_counter() - began)
    return [sorted(mine)[len(mine) // 2] for mine in times]


def ceilings() -> dict[str, float]:
    """What the machine can do: reading memory in GB/s, float32 matrix products in GFLOP/s."""
    plain = torch.ones(1 << 27)
    a = torch.randn(2048, 2048)
    read, product = medians([lambda: plain.sum(), lambda: a @ a], 7)
    return {"read_gb_s": plain.numel() * 4 / read / 1e9, "matmul_gflop_s": 2 * 2048**3 / product / 1e9}


def machine() -> dict[str, Any]:
    """What was measured on, and with what."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return {
        "device": names[0] if names else platform.processor() or platform.machine(),
        "threads": numba.get_num_threads(),
        "date": date.today().isoformat(),
        "quire": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def _torch(cell: Cell, batch: Batch) -> Run | None:
    """Torch's way: for decode, gather the pages and call `scaled_dot_product_attention`; for prefill, the call alone,
    over keys and values that lie ready. None where torch has none (fp8, prefill of lengths that differ).
    """
    if cell.operation == "decode":
        gather = dense.decode(batch, _DENSE, cell.latent)
        return partial(gather, batch.k, batch.v) if gather else None
    if batch.spec.kv_dtype.itemsize == 1 or cell.mixed:
        return None
    k, v, _ = batch.rows()
    q, k, v = (x.view(cell.batch, -1, *x.shape[1:]).transpose(1, 2).contiguous() for x in (batch.q, k, v))
    if cell.q_len == cell.kv_len:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = torch.ones(cell.q_len, cell.kv_len, dtype=torch.bool).tril(cell.kv_len - cell.q_len)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def measure(name: str, backend: str = "auto", rounds: int = 11) -> dict[str, Any]:
    """One cell: milliseconds of ours and of torch's way, rate, and the error against the oracle (on a few requests)."""
    cell = Cell.parse(name)
    batch = cell.make()
    run, theirs = planned(cell, batch, backend), _torch(cell, batch)
    k, v, _ = batch.rows() if cell.ragged else (batch.k, batch.v, None)

    def ours() -> torch.Tensor:
        return run(k, v)

    times = medians([ours] if theirs is None else [ours, theirs], rounds)
    row: dict[str, Any] = {"cell": name, "ms": times[0] * 1e3, "torch_ms": times[1] * 1e3 if theirs else None}
    if cell.operation == "decode":
        row["gb_s"] = cell.kv_bytes(batch) / times[0] / 1e9
    else:
        row["gflop_s"] = cell.flops(batch) / times[0] / 1e9
    row["error"] = sampled_error(batch, ours())
    return row


def bench(names: Sequence[str], backend: str = "auto", rounds: int = 11) -> Iterator[dict[str, Any]]:
    """The cells so far, after each, with the machine and its ceilings."""
    seed = torch.seed() % (1 << 31)
    torch.manual_seed(seed)
    result: dict[str, Any] = {**machine(), "seed": seed, "ceilings": ceilings(), "cells": []}
    for name in names:
        result["cells"].append(measure(name, backend, rounds))
        yield result


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    decode = any("gb_s" in row for row in result["cells"])
    tops = result["ceilings"]
    top, unit = (tops["read_gb_s"], "GB/s") if decode else (tops["matmul_gflop_s"], "GFLOP/s")
    peer = "gather + SDPA ms" if decode else "SDPA ms"
    lines = [
        f"| cell | Quire ms | {peer} | times as fast | {unit} | of {top:,.1f} {unit} | error |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["cells"]:
        rate = row.get("gb_s", row.get("gflop_s"))
        theirs, ratio = (
            ("-", "-") if row["torch_ms"] is None else (f"{row['torch_ms']:.1f}", f"{row['torch_ms'] / row['ms']:.1f}")
        )
        error = f"{row['error']:.1e}"
        lines.append(
            f"| {row['cell']} | {row['ms']:.2f} | {theirs} | {ratio} | {rate:.1f} | {rate / top:.0%} | {error} |"
        )
    return "\n".join(lines)
