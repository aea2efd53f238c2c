"""Exchanges of two GPUs, beside those of torch's symmetric memory and of NCCL.

    PYTHONPATH=src python tools/exchange_times.py --json out.json

Times are microseconds per exchange, of CUDA graphs of many, in bfloat16. Of norms, "fused" is the kernel that also adds
the residual and computes the RMS norm of the sum, rows of 4,096 features; "apart" is the sum and then the kernel that
Inductor compiles for the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore, _symmetric_memory, init_process_group  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_group

from quire.bench import gpu
from quire.engine.inductor_passes import compiling
from quire.engine.parallel.ranks import Ranks
from quire.steps import Exchange

BYTES = tuple(1 << n for n in (13, 16, 17, 19, 20, 22, 24))
ROWS = (1, 8, 64, 256)
FEATURES = 4096
CALLS = 50
EPS = 1e-5


class Peer:
    """Sums of torch's symmetric memory, which are those of memory that torch allocates."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        store = PrefixStore("peer", ranks._store)
        init_process_group("nccl", store=store, rank=ranks.rank, world_size=ranks.size, device_id=device)
        group: Any = _get_default_group().group_name
        self._memory = _symmetric_memory.empty(max(BYTES) // 2, dtype=torch.bfloat16, device=device)
        _symmetric_memory.rendezvous(self._memory, group)
        self._group = group

    def one_shot(self, x: Tensor) -> Tensor:
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(self._memory[: x.numel()], "sum", self._group)
        return total

    def two_shot(self, x: Tensor) -> Tensor:
        total: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(self._memory[: x.numel()], "sum", self._group)
        return total


def by_nccl(exchange: Exchange, x: Tensor) -> Tensor:
    """The sum by NCCL, in place."""
    exchange._nccl.allreduce([x]).wait()
    return x


def check(ranks: Ranks, exchange: Exchange, device: torch.device) -> float:
    """The largest relative error of sums of random tensors, whose shapes change from one to the next."""
    generator, worst = torch.Generator(device).manual_seed(0), 0.0

    def draw(*shape: int) -> Tensor:
        # All ranks draw the same numbers.
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    for rows in np.random.default_rng(0).integers(1, 400, 300).tolist():
        x = draw(ranks.size, rows, FEATURES)
        residual, weight = draw(rows, FEATURES), draw(FEATURES)
        exact = x.double().sum(0)
        worst = max(worst, error(exchange.sum(x[ranks.rank]), exact))
        total, normed = exchange.sum_norm(x[ranks.rank], residual, weight, EPS)
        expected = residual_norm(exact.bfloat16(), residual, weight)
        worst = max(worst, error(total, expected[0]), error(normed, expected[1]))
    return worst


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two tensors, and its RMS norm, as Transformers has it."""
    total = residual + x
    wide = total.float()
    return total, weight * (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(total.dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def timed(ranks: Ranks, run: Callable[[], Any], rounds: int) -> float:
    """Microseconds of a call that all ranks make, of a graph of many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            run()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        ranks.least(0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / 4 / CALLS)
    return median(found)


def peer_copy_gb_s(x: Tensor) -> float:
    """The rate of copies of a tensor on the first GPU to the second one, in GB/s."""
    remote = torch.empty_like(x, device="cuda:1")
    seconds = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        remote.copy_(x)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return x.numel() * x.element_size() / median(seconds) / 1e9


def measure(ranks: Ranks, rounds: int, device: torch.device) -> dict[str, Any]:
    """Times of all sums, and the largest error of those of `Exchange`."""
    exchange = ranks.exchange
    assert exchange is not None
    peer = Peer(ranks, device)
    result: dict[str, Any] = {"error": check(ranks, exchange, device), "cells": [], "norms": []}
    for size in BYTES:
        x = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
        runs = {"quire": exchange.sum, "one_shot": peer.one_shot, "two_shot": peer.two_shot}
        runs["nccl"] = partial(by_nccl, exchange)
        result["cells"].append({"bytes": size} | {n: timed(ranks, partial(run, x), rounds) for n, run in runs.items()})
    rest = torch.compile(residual_norm, dynamic=False)
    weight = torch.ones(FEATURES, device=device, dtype=torch.bfloat16)
    for rows in ROWS:
        x, residual = torch.randn(2, rows, FEATURES, device=device, dtype=torch.bfloat16)

        def apart(x: Tensor = x, residual: Tensor = residual) -> Any:
            return rest(exchange.sum(x), residual, weight)

        with compiling(rows == 1), torch.inference_mode():
            fused = timed(ranks, partial(exchange.sum_norm, x, residual, weight, EPS), rounds)
            result["norms"].append({"rows": rows, "fused": fused, "apart": timed(ranks, apart, rounds)})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, help="of the other rank, which starts this one")
    args = parser.parse_args()
    rank = 0 if args.port is None else 1
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = Ranks(rank, 2, device, args.port)
    other = None
    if rank == 0:
        other = subprocess.Popen([sys.executable, *sys.argv, "--port", str(ranks.port)])
    ranks.connect()
    result = measure(ranks, args.rounds, device)
    if other is not None:
        ceilings = {"peer_copy_gb_s": peer_copy_gb_s(torch.empty(1 << 28, dtype=torch.uint8, device=device))}
        result = {**gpu.machine(), "operation": "exchanges", "gpus": 2, "seed": 0, "ceilings": ceilings, **result}
        print(json.dumps(result, indent=1))
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
        assert other.wait() == 0


if __name__ == "__main__":
    main()
