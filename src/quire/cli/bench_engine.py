"""quire bench throughput and latency: time the engine beside others."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

_LATENCY = ("1x1k+128", "64x1k+128", "1k into 64x1k")
# Arguments that are options of Quire's engine.
_OPTIONS = ("max_batched_tokens", "page_size", "num_pages", "tensor_parallel_size", "context_parallel_size")


def run(args: argparse.Namespace, module: Any, plot: Any) -> int:
    """Time engines and write the result.

    Args:
        module: of `quire.bench`, for the machine and its ceilings.
        plot: draws a result into a file, or None.
    """
    from quire.bench import engine_timing
    from quire.bench.engines import ENGINES
    from quire.bench.workloads import LatencyCell

    peers = [name for name in (args.peers or "").split(",") if name]
    unknown = next((name for name in peers if name not in ENGINES or name == "quire"), None)
    if unknown is not None:
        raise ValueError(f"--peers {unknown}: it must be of {', '.join(name for name in ENGINES if name != 'quire')}")
    if args.context_parallel_size is not None and peers:
        raise ValueError(f"--context-parallel-size {args.context_parallel_size}: --peers don't divide a cache")
    names = args.cell or _LATENCY
    # Unknown cells are refused before any cell is timed.
    cells_of_names = [LatencyCell.parse(name) for name in names]
    longest = max(cell.input + cell.output for cell in cells_of_names)
    with _folders(args, longest) as (folders, model), tempfile.TemporaryDirectory(prefix="quire-adapters-") as made:
        setups = [_setup(args, module, folder, model, ("quire", *peers), weights) for weights, folder in folders]
        setups = [_with_adapters(args, setup, made) for setup in setups]
        context = {**module.machine(), "ceilings": module.ceilings()}
        cells: list[dict[str, Any]] = []
        result: dict[str, Any] = {}
        for setup in setups:
            if args.operation == "throughput":
                results = engine_timing.throughput(setup, *_work(args, setup), context)
            else:
                results = engine_timing.latency(setup, names, args.rounds, context)
            for part in results:
                result = {**part, "cells": cells + part["cells"]}
                print(f"{result['cells'][-1]['engine']}: done", file=sys.stderr, flush=True)
                # The file is written after each engine, so that a crash loses no results.
                if args.json is not None and args.json != Path("-"):
                    args.json.write_text(json.dumps(result, indent=2) + "\n")
            cells = result["cells"]
    if plot is not None:
        plot(result, args.plot)
    print(json.dumps(result, indent=2) if args.json == Path("-") else engine_timing.table(result))
    return 0


def _setup(
    args: argparse.Namespace, module: Any, folder: Path, model: str, engines: Sequence[str], weights: str | None
) -> Any:
    """What is timed of a model, whose weights have a format, if one is named."""
    from quire.bench.engine_timing import Setup
    from quire.bench.workloads import LatencyCell

    options = {key: getattr(args, key) for key in _OPTIONS}
    options = {"backend": args.backend, **{key: value for key, value in options.items() if value is not None}}
    options |= {"trust_remote_code": True} if args.trust_remote_code else {}
    options |= {"dequantize": False} if weights is not None else {}
    max_num_seqs = args.max_num_seqs
    # The requests of a batch run together, and one more arrives.
    if args.operation == "latency":
        max_num_seqs = max(max_num_seqs, *(LatencyCell.parse(name).batch + 1 for name in args.cell or _LATENCY))
    device = "cpu" if module.__name__ == "quire.bench.cpu" else "cuda"
    return Setup(folder, model, device, engines, args.seed, max_num_seqs, options, weights)


def _with_adapters(args: argparse.Namespace, setup: Any, folder: str) -> Any:
    """What is timed, with the adapters that the arguments give, which are written to a folder."""
    from quire.bench.random_adapters import write_adapters

    if args.adapters is None:
        return setup
    given = args.adapters.split(",")
    if not all(count.isdecimal() for count in given):
        raise ValueError(f"--adapters {args.adapters}: it must be a number, or several: 0,1,8")
    if len(given) > 1 and args.operation != "latency":
        raise ValueError(f"--adapters {args.adapters}: only latency is measured with several numbers of adapters")
    counts, rank = [int(count) for count in given], args.adapter_rank
    count = max(counts)
    adapters = write_adapters(setup.config, Path(folder), count, rank, args.seed)
    slots = min(count, args.max_adapters or count)
    sizes = {"max_adapters": slots, "adapter_rank_pages": slots * -(-rank // 16), "max_adapter_rank": rank}
    timed = counts if len(counts) > 1 else (None,)
    return replace(setup, options=setup.options | sizes, adapters=adapters, adapter_counts=timed)


@contextmanager
def _folders(args: argparse.Namespace, context: int) -> Iterator[tuple[list[tuple[str | None, Path]], str]]:
    """The folders of the model, with the formats of their weights, and its name; a shape has at least this context."""
    from quire.bench.workloads import write_shape
    from quire.engine import shipped_model
    from quire.engine.hub import checkpoint_folder, download_weights, model_name

    if args.shape is None:
        if args.weights is not None:
            raise ValueError(f"--weights {args.weights}: only a --shape has weights of any format")
        model = args.model or shipped_model()
        folder = checkpoint_folder(model, code=args.trust_remote_code)
        download_weights(model, folder)
        yield [(None, folder)], model_name(model)
        return
    if args.model is not None:
        raise ValueError(f"--shape {args.shape}: --model names a model already")
    with tempfile.TemporaryDirectory(prefix="quire-shape-") as made:
        folders: list[tuple[str | None, Path]] = []
        for weights in [None] if args.weights is None else args.weights.split(","):
            folder = Path(made) / str(weights)
            folder.mkdir(exist_ok=True)
            written = write_shape(args.shape, folder, "bf16" if weights is None else weights, context)
            folders.append((weights, written))
        yield folders, args.shape


def _work(args: argparse.Namespace, setup: Any) -> tuple[Any, str]:
    """The requests, and their description."""
    from quire.bench.workloads import as_range, random_work, read_work
    from quire.engine.reading import load_tokenizer

    if args.file is not None:
        work = read_work(args.file, load_tokenizer(setup.folder, args.trust_remote_code))
        return work, f"{len(work)} requests of {args.file.name}"
    if args.requests < 1:
        raise ValueError(f"--requests {args.requests}: it must be at least 1")
    inputs, outputs = as_range(args.input, "--input"), as_range(args.output, "--output")
    name = f"{args.requests} requests, {args.input} in, {args.output} out"
    return random_work(args.requests, inputs, outputs, setup.config.vocab_size, args.seed), name
