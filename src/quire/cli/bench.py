"""quire bench: time attention, other layers and the engine beside others, with ceilings of the same run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.distribution import pip_install

_OF_ENGINES = ("throughput", "latency")


def _module(device: str | None) -> Any:
    """The module of `quire.bench` that times a device; None: a GPU if there is one, or else the CPU."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        from quire.bench import cpu

        return cpu
    if not torch.cuda.is_available():
        raise ValueError(f"--device {device}: there is no GPU")
    from quire.bench import gpu

    return gpu


def _plotter(file: Path, operation: str) -> Any:
    """The function that plots results. It is imported before hours are spent on timing, to see whether it can be."""
    if file.suffix != ".png" or not file.absolute().parent.is_dir():
        raise ValueError(f"--plot {file}: it must end in .png, in a folder that exists")
    try:
        from quire.bench import layers_table, plot, plot_engines, plot_server_load
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib: {pip_install('bench')} ({error})") from error
    modules = {"layers": layers_table, "serve": plot_server_load, **dict.fromkeys(_OF_ENGINES, plot_engines)}
    return modules.get(operation, plot).plot


def _attention(args: argparse.Namespace) -> tuple[Sequence[str], Callable[[], Iterator[dict[str, Any]]], Any]:
    """The names of the cells, a function that times them, and one that makes the table."""
    bench = _module(args.device)
    listed = bench.DECODE if args.operation == "decode" else bench.PREFILL
    from quire.bench.cells import Cell

    options: dict[str, Any] = {}
    if args.peers is not None:
        if bench.__name__ != "quire.bench.gpu":
            raise ValueError(f"--peers {args.peers}: on a CPU only torch is timed beside Quire")
        from quire.bench import peers

        options["chosen_peers"] = peers.names(args.peers)
    names = [f"{args.operation} {cell}" for cell in args.cell] if args.cell else listed
    for name in names:
        # Unknown cells are refused before any cell is timed.
        Cell.parse(name)
    return names, lambda: bench.bench(names, args.backend, args.rounds, **options), bench.table


def _layers(args: argparse.Namespace) -> tuple[Sequence[str], Callable[[], Iterator[dict[str, Any]]], Any]:
    """As `_attention`, of the operations beside attention."""
    if _module(args.device).__name__ != "quire.bench.gpu":
        raise ValueError("quire bench layers times kernels on a GPU: there is none, or --device says cpu")
    from quire.bench import layers
    from quire.bench.layers_table import table

    chosen_peers = None if args.peers is None else tuple(filter(None, args.peers.split(",")))
    for peer in chosen_peers or ():
        if peer not in layers.PEERS:
            raise ValueError(f"--peers {args.peers}: {peer!r} is unknown; there are {', '.join(layers.PEERS)}")
    names = args.cell or layers.LAYERS
    for name in names:
        layers.LayerCell.parse(name)
    return names, lambda: layers.bench(names, args.rounds, chosen_peers), table


def _check_json(file: Path | None) -> None:
    """Raise a ValueError if results can't be written to the file, so that this is known before anything is timed."""
    if file is not None and file != Path("-") and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"--json {file}: it must be a file in a folder that exists")


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: it must be at least 1")
    _check_json(args.json)
    plot = None if args.plot is None else _plotter(args.plot, args.operation)
    if args.operation in _OF_ENGINES:
        from quire.cli import bench_engine

        return bench_engine.run(args, _module(args.device), plot)
    if args.operation == "serve":
        from quire.cli import bench_serve

        return bench_serve.run(args, _module(args.device), plot)
    names, bench, table = _layers(args) if args.operation == "layers" else _attention(args)
    file = None if args.json == Path("-") else args.json
    result: dict[str, Any] = {}
    for result in bench():
        done = result["cells"]
        print(f"{len(done)} of {len(names)}: {done[-1]['cell']}", file=sys.stderr, flush=True)
        # The file is written after each cell, so that a crash loses no results.
        if file is not None:
            file.write_text(json.dumps(result, indent=2) + "\n")
    if plot is not None:
        plot(result, args.plot)
    if args.json == Path("-"):
        json.dump(result, sys.stdout, indent=2)
        print()
        return 0
    print(table(result))
    return 0
