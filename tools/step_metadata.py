"""Time the host's work for a decode step's metadata: the page tables of all requests, their copy to the device, a plan.

    python tools/step_metadata.py --device cuda --requests 256 --length 4096

Two ways of `quire.steps` (the scheduler's lists of pages, and a matrix of slots on the device) are compared with
loops over Python lists. On a GPU, waiting for the device is an error.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from array import array
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import torch

from quire import __version__
from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.definition.pages import PageTable
from quire.steps import Heads, StepTables, plan

HEADS = Heads(32, 8, 128, 128)


class Step:
    """A decode step of requests of one length on random pages."""

    def __init__(self, requests: int, length: int, page_size: int, device: torch.device) -> None:
        self.count, self.length = requests, length
        self.page_size, self.device = page_size, device
        self.each = -(-length // page_size)
        ids = random.sample(range(requests * self.each), requests * self.each)
        self.lists = [ids[i * self.each : (i + 1) * self.each] for i in range(requests)]
        self.arrays = [array("i", own) for own in self.lists]
        own = torch.tensor(self.lists, dtype=torch.int32)[:, :, None] * page_size + torch.arange(page_size).int()
        self.req_to_token = own.view(requests, -1).to(device)
        self.rows = torch.arange(requests, dtype=torch.int32, device=device)
        self.lengths = torch.full((requests,), length, dtype=torch.int32, device=device)
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 25, dtype=torch.uint8, device=device))

    def plan(self, pages: PageTable) -> None:
        plan(self.wrapper, pages, HEADS, torch.bfloat16, torch.bfloat16)

    def from_arrays(self) -> None:
        pool, lengths = self.count * self.each, [self.length] * self.count
        new = [1] * self.count
        tables = StepTables.from_host(self.arrays, lengths, new, self.page_size, pool, self.device)
        self.plan(tables.pages)

    def from_matrix(self) -> None:
        entries = self.count * self.each
        pages = PageTable.from_req_to_token(self.req_to_token, self.rows, self.lengths, self.page_size, entries=entries)
        self.plan(pages)

    def from_loops(self) -> None:
        indices: list[int] = []
        indptr, last_page_len = [0], []
        slots = []
        for own in self.lists:
            bound = -(-self.length // self.page_size)
            indices.extend(own[:bound])
            indptr.append(indptr[-1] + bound)
            last_page_len.append((self.length - 1) % self.page_size + 1)
            position = self.length - 1
            slots.append(own[position // self.page_size] * self.page_size + position % self.page_size)
        tables = [torch.tensor(x, dtype=torch.int32) for x in (indptr, indices, last_page_len)]
        torch.tensor(slots, device=self.device)
        on_kv, on_indices, on_last = (x.to(self.device, non_blocking=True) for x in tables)
        self.plan(PageTable(on_kv, on_indices, on_last, self.page_size))


def microseconds(call: Callable[[], None], device: torch.device, rounds: int, strict: bool) -> float:
    """The median time of a call on the host."""
    times = []
    for i in range(rounds + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if strict and i >= 3 else "default")
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return median(times[3:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--page-size", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    for size in args.page_size:
        step = Step(args.requests, args.length, size, device)
        ways = {"pages": step.from_arrays, "slot matrix": step.from_matrix, "loops": step.from_loops}
        times = {way: microseconds(call, device, args.rounds, way != "loops") for way, call in ways.items()}
        rows.append({"requests": args.requests, "length": args.length, "page_size": size, "microseconds": times})
        print(f"{args.requests} x {args.length}, pages of {size}:", *(f"{w} {t:.0f} us" for w, t in times.items()))
    if args.json is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        about = {"device": name, "date": str(date.today()), "quire": __version__, "torch": torch.__version__}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
