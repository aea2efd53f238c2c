"""How long an adapter takes to load into an engine that is busy, and what its other streams notice.

    PYTHONPATH=src python tools/adapter_loads.py --shape llama-3.1-8b --json out.json
    PYTHONPATH=src python tools/adapter_loads.py --loads 5

Streams of the model itself decode all the time. One after the other, adapters of random values, of all linear layers,
are loaded, get a request each, whose prompt has 64 tokens, and are unloaded. Their files are in the page cache. A gap
is the time between two tokens of a stream; "gap_ms" are the gaps that overlap a load or the adapter's request, and
"gap_otherwise_ms" those in an equally long time before. Without --shape, the model is the bundled one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from quire.bench.figures import percentiles
from quire.bench.random_adapters import write_adapters
from quire.bench.workloads import SHAPES, write_shape
from quire.engine import LLM, Completion, SamplingParams
from quire.engine.checkpoint import read_config
from quire.engine.llm import shipped_model


class _Ended(Exception):
    """Ends the streams."""


class Streams:
    """Requests that decode in a thread until they are ended.

    Attributes:
        times: of each stream's tokens, in seconds of `time.perf_counter`.
    """

    def __init__(self, llm: LLM, prompts: list[list[int]]) -> None:
        self._llm, self._prompts = llm, prompts
        self._ended = threading.Event()
        self.times: list[list[float]] = [[] for _ in prompts]
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Streams:
        self._thread.start()
        while not all(self.times):
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between two tokens of a stream, of those that overlap this time."""
        return [b - a for each in self.times for a, b in pairwise(each) if b > start and a < end]

    def _run(self) -> None:
        def note(i: int, part: Completion) -> None:
            self.times[i].append(time.perf_counter())
            if self._ended.is_set():
                raise _Ended

        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        try:
            self._llm.generate(self._prompts, params, on_update=note)
            raise RuntimeError("the streams ended before all adapters were loaded")
        except _Ended:
            pass


def measure(llm: LLM, folders: dict[str, Path], num_streams: int, seed: int) -> dict[str, Any]:
    """Load, use and unload each adapter while the streams decode."""
    rng = Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1, llm.info.vocab_size) for _ in range(length)]

    one = SamplingParams(temperature=0, max_tokens=1)
    names = ("load_ms", "first_token_ms", "base_first_token_ms", "gap_ms", "gap_otherwise_ms")
    found: dict[str, list[float]] = {name: [] for name in names}
    with Streams(llm, [prompt(128) for _ in range(num_streams)]) as streams:
        # The first adapter's request compiles kernels and captures graphs.
        for i, (name, folder) in enumerate(folders.items()):
            time.sleep(0.2)
            before = time.perf_counter()
            llm.generate(prompt(64), one)
            start = time.perf_counter()
            llm.load_adapter(name, folder)
            loaded = time.perf_counter()
            llm.generate(prompt(64), one, adapter=name)
            end = time.perf_counter()
            llm.unload_adapter(name)
            if i:
                times = (loaded - start, end - loaded, start - before)
                gaps = (streams.gaps(start, end), streams.gaps(2 * start - end, start))
                for name, seconds in zip(names, (*([x] for x in times), *gaps), strict=True):
                    found[name] += seconds
    return {name: percentiles(seconds) | {"max": 1e3 * max(seconds)} for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from quire.bench import cpu, gpu

    machine = cpu.machine() if args.device == "cpu" else gpu.machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_shape(args.shape, Path(temporary)) if args.shape else shipped_model()
        config = read_config(folder, False).get_text_config()
        adapters = write_adapters(config, Path(temporary) / "adapters", args.loads + 1, args.rank, args.seed)
        options: dict[str, Any] = {"num_pages": 4000} if args.device == "cpu" else {}
        load_format = "dummy" if args.shape else "auto"
        with LLM(folder, device=args.device, load_format=load_format, max_adapters=2, **options) as llm:
            row = measure(llm, adapters, args.streams, args.seed)
    row = {"streams": args.streams, "loads": args.loads, "rank": args.rank, **row}
    for name, value in row.items():
        print(name, {key: round(x, 1) for key, x in value.items()} if isinstance(value, dict) else value)
    if args.json:
        settings = {"operation": "adapter-loads", "model": args.shape or "tiny-python", "seed": args.seed}
        args.json.write_text(json.dumps({**machine, "ceilings": {}, **settings, "cells": [row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
