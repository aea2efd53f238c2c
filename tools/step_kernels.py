"""The kernels of a decode step of the engine, by the time that they take on the device.

    PYTHONPATH=src python tools/step_kernels.py --shape gpt-oss-20b --weights mxfp4 --requests 1
    PYTHONPATH=src python tools/step_kernels.py --shape qwen3-0.6b --requests 64 --adapters 8
    PYTHONPATH=src python tools/step_kernels.py --device cpu --requests 2 --length 64

Requests of random tokens decode together. torch's profiler records all of a short run and all of one that is longer by
`--steps` steps, and the kernels of these steps are the difference, since the prompts of both are in the prefix cache.
The time of a step is the median of a run without the profiler; what the kernels do not take of it, the device idles. On
the CPU the operations of torch are listed, without Numba's kernels.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from quire.bench.engine_timing import steady_steps
from quire.bench.engines import Quire
from quire.bench.random_adapters import write_adapters
from quire.bench.workloads import SHAPES, WEIGHTS, Work, random_work, write_shape
from quire.engine import shipped_model
from quire.engine.checkpoint import read_config

# Steps of the short run.
_FEW = 8
# Calls and microseconds of each kernel, by its name.
Kernels = dict[str, tuple[float, float]]


def recorded(engine: Quire, work: Sequence[Work], on_gpu: bool) -> Kernels:
    """The kernels of a whole run."""
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    # Operations of the CPU are recorded in the thread that begins to, unless all threads are asked for.
    with profile(activities=[activity], experimental_config=_ExperimentalConfig(profile_all_threads=True)) as recorder:
        engine.run(work)
    averages: Any = recorder.key_averages()
    rows = {x.key: (x.count, x.self_device_time_total if on_gpu else x.self_cpu_time_total) for x in averages}
    # On a GPU, calls of the driver are recorded, too, which take no time there.
    return {name: row for name, row in rows.items() if row[1] > 0}


def of_step(engine: Quire, work: Sequence[Work], steps: int, on_gpu: bool) -> Kernels:
    """The kernels of one step, in the mean."""
    few, many = (
        recorded(engine, [replace(w, max_tokens=tokens) for w in work], on_gpu) for tokens in (_FEW, _FEW + steps)
    )
    none = (0.0, 0.0)
    return {
        name: ((count - few.get(name, none)[0]) / steps, (us - few.get(name, none)[1]) / steps)
        for name, (count, us) in many.items()
    }


def table(kernels: Kernels, step_ms: float, rows: int) -> str:
    """The kernels that take longest, and the sum of all."""
    calls, total = (sum(row[i] for row in kernels.values()) for i in (0, 1))
    lines = [f"a step takes {step_ms:.3f} ms, in which {calls:,.0f} kernels take {total / 1e3:.3f} ms", ""]
    lines += ["| kernel | calls | us | us of a call |", "|---|--:|--:|--:|"]
    for name, (count, us) in sorted(kernels.items(), key=lambda item: -item[1][1])[:rows]:
        each = f"{us / count:,.2f}" if count else ""
        lines.append(f"| {name[:100]} | {count:,.1f} | {us:,.1f} | {each} |")
    return "\n".join(lines)


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
    output = _FEW + args.steps
    with tempfile.TemporaryDirectory() as name:
        folder = shipped_model() if args.shape is None else write_shape(args.shape, Path(name), args.weights)
        options: dict[str, Any] = {}
        if args.adapters:
            adapters = write_adapters(read_config(folder, False), Path(name) / "adapters", args.adapters, 16)
            options = {"adapters": adapters, "max_adapters": args.adapters, "max_adapter_rank": 16}
        engine = Quire(folder, args.device, args.length + output, args.requests, **options)
        work = random_work(args.requests, (args.length,) * 2, (output,) * 2, engine.llm.model.vocab_size, 0)
        names = list(options.get("adapters", {})) or [None]
        work = [replace(w, adapter=names[i % len(names)]) for i, w in enumerate(work)]
        # Kernels that are compiled at their first call are compiled here, and the prompts are in the cache afterwards.
        engine.run(work)
        step_ms = median(steady_steps(engine.run(work))) * 1e3
        print(table(of_step(engine, work, args.steps, args.device != "cpu"), step_ms, args.rows))
        engine.close()


if __name__ == "__main__":
    main()
