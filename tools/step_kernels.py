"""The kernels of a decode step of the engine, by the time that they take on the device.

    PYTHONPATH=src python tools/step_kernels.py --shape gpt-oss-20b --weights mxfp4 --requests 1
    PYTHONPATH=src python tools/step_kernels.py --shape qwen3-0.6b --requests 64 --adapters 8
    PYTHONPATH=src python tools/step_kernels.py --device cpu --requests 2 --length 64

Requests of random tokens decode together, and torch's profiler records `--steps` of their steps. The sum of all kernels
beside the time of a step says how much of it the device idles. On the CPU the operations of torch are listed, without
Numba's kernels.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from quire.bench.engines import Quire
from quire.bench.random_adapters import write_adapters
from quire.bench.workloads import SHAPES, WEIGHTS, Work, random_work, write_shape
from quire.engine import Completion, SamplingParams, shipped_model
from quire.engine.checkpoint import read_config

# Steps in which all requests decode before those that are recorded.
_WARM_UP = 8


def record(engine: Quire, work: Sequence[Work], steps: int, device: str) -> tuple[Any, float]:
    """The profile of steps in which all requests decode, and the milliseconds of one."""
    activity = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    # Operations of the CPU are recorded in the thread that begins to, unless all threads are asked for.
    recorder = profile(activities=[activity], experimental_config=_ExperimentalConfig(profile_all_threads=True))
    tokens, times = [0] * len(work), list[float]()

    def note(i: int, part: Completion) -> None:
        tokens[i] += len(part.token_ids)
        if i or min(tokens) == 0:
            return
        times.append(time.perf_counter())
        if len(times) == _WARM_UP:
            recorder.start()
        elif len(times) == _WARM_UP + steps:
            recorder.stop()

    params = [SamplingParams(temperature=0, max_tokens=w.max_tokens, ignore_eos=True) for w in work]
    adapters = [w.adapter for w in work]
    engine.llm.generate([w.prompt for w in work], params, adapter=adapters, on_update=note)
    return recorder, (times[_WARM_UP + steps - 1] - times[_WARM_UP - 1]) / steps * 1e3


def table(recorder: Any, step_ms: float, steps: int, rows: int) -> str:
    """The kernels that take longest, and the sum of all."""
    kernels = sorted(recorder.key_averages(), key=lambda x: -_microseconds(x))
    total = sum(map(_microseconds, kernels)) / steps
    calls = sum(x.count for x in kernels) / steps
    lines = [f"a step takes {step_ms:.3f} ms, in which {calls:,.0f} kernels take {total / 1e3:.3f} ms", ""]
    lines += ["| kernel | calls | us | us of a call |", "|---|--:|--:|--:|"]
    for x in kernels[:rows]:
        us = _microseconds(x) / steps
        lines.append(f"| {x.key[:100]} | {x.count / steps:,.1f} | {us:,.1f} | {us * steps / x.count:,.2f} |")
    return "\n".join(lines)


def _microseconds(row: Any) -> float:
    return float(row.self_device_time_total or row.self_cpu_time_total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="random weights; default: the bundled model")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=32, help="that are recorded")
    parser.add_argument("--adapters", type=int, default=0, help="of rank 16, which requests have in turn")
    parser.add_argument("--rows", type=int, default=40, help="kernels that are listed")
    args = parser.parse_args()
    output = _WARM_UP + args.steps + 64
    with tempfile.TemporaryDirectory() as name:
        folder = shipped_model() if args.shape is None else write_shape(args.shape, Path(name), args.weights)
        options: dict[str, Any] = {}
        if args.adapters:
            adapters = write_adapters(read_config(folder, False), Path(name) / "adapters", args.adapters, 16)
            options = {"adapters": adapters, "max_adapters": args.adapters, "max_adapter_rank": 16}
        engine = Quire(folder, args.device, args.length + output, args.requests, **options)
        names = list(options.get("adapters", {})) or [None]
        vocab = engine.llm.model.vocab_size
        # Kernels that are compiled at their first call are compiled here.
        engine.run(random_work(args.requests, (args.length,) * 2, (8, 8), vocab, 1))
        work = random_work(args.requests, (args.length,) * 2, (output,) * 2, vocab, 2)
        work = [Work(w.prompt, w.max_tokens, names[i % len(names)]) for i, w in enumerate(work)]
        recorder, step_ms = record(engine, work, args.steps, args.device)
        print(table(recorder, step_ms, args.steps, args.rows))
        engine.close()


if __name__ == "__main__":
    main()
