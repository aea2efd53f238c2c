"""Decode of requests that begin with the same pages, on a GPU: pages read for each request, and read once.

    PYTHONPATH=src python tools/shared_prefix.py --json out.json

Times replays of CUDA graphs, in alternation. A graph has a run for each of several caches, together larger than the L2
cache. "decode" reads the prefix for each request; "shared" is planned with `shared_prefix=True`, which reads tables of
the device and waits for them. The host's time of both plans is printed, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import date
from statistics import median
from typing import Any

import torch
from torch import Tensor

import quire
from quire import BatchDecodeWithPagedKVCacheWrapper as Wrapper

HEADS = {"16:8": (16, 8), "32:8": (32, 8)}  # query and KV heads of Qwen3-0.6B, and of Llama-3.1-8B
HEAD_DIM, PAGE = 128, 16


def tables(requests: int, prefix: int, own: int) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """The number of pages, and the tables (indptr, indices, last_page_len) of requests that share `prefix` tokens."""
    shared, mine = prefix // PAGE, own // PAGE
    pages = torch.randperm(shared + requests * mine).int()
    tails = pages[shared:].view(requests, mine)
    indices = torch.cat([pages[:shared].expand(requests, -1), tails], dim=1).flatten()
    indptr = torch.arange(requests + 1, dtype=torch.int32) * (shared + mine)
    last_page_len = torch.full((requests,), PAGE, dtype=torch.int32)
    return len(pages), (indptr.cuda(), indices.cuda(), last_page_len.cuda())


def planned(heads: tuple[int, int], given: tuple[Tensor, Tensor, Tensor], shared_prefix: bool) -> tuple[Wrapper, float]:
    """A planned wrapper, and the host's microseconds of a plan."""
    wrapper = Wrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        wrapper.plan(*given, *heads, HEAD_DIM, PAGE, q_data_type=torch.bfloat16, shared_prefix=shared_prefix)
        times.append((time.perf_counter() - start) * 1e6)
    return wrapper, median(times[1:])


def timer(wrapper: Wrapper, q: Tensor, caches: list[Tensor]) -> Callable[[], float]:
    """A function that returns microseconds of a run."""

    def runs() -> None:
        for cache in caches:
            wrapper.run(q, cache)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        runs()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs()

    def measure() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / 3 / len(caches)

    measure()
    return measure


def row(name: str, requests: int, prefix: int, own: int, rounds: int) -> dict[str, Any]:
    """Time one batch."""
    heads = HEADS[name]
    pages, given = tables(requests, prefix, own)
    made = {kind: planned(heads, given, kind == "shared") for kind in ("decode", "shared")}
    shape = (pages, 2, PAGE, heads[1], HEAD_DIM)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    q = torch.randn(requests, heads[0], HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    each, once = (torch.as_tensor(made[kind][0].run(q, caches[0])).float() for kind in made)
    timers = {kind: timer(wrapper, q, caches) for kind, (wrapper, _) in made.items()}
    times = [{kind: measure() for kind, measure in timers.items()} for _ in range(rounds)]
    return {
        "heads": name, "requests": requests, "prefix": prefix, "own": own,
        "us": {kind: median(t[kind] for t in times) for kind in made},
        "plan_us": {kind: us for kind, (_, us) in made.items()},
        "error": float((once - each).norm() / each.norm()),
    }  # fmt: skip


def main() -> None:
    """Time batches, and print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--prefix", type=int, nargs="+", default=[0, 512, 1024, 4096, 16384])
    parser.add_argument("--own", type=int, default=256, help="tokens of each request's own")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for name in HEADS:
        for requests in args.requests:
            for prefix in args.prefix:
                rows.append(row(name, requests, prefix, args.own, args.rounds))
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        versions = {"quire": quire.__version__, "torch": torch.__version__}
        machine = {"device": torch.cuda.get_device_name(), "date": str(date.today()), **versions}
        with open(args.json, "w") as file:
            json.dump({**machine, "runs": rows}, file, indent=1)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
