"""quire bench: time attention beside torch and, on a GPU, installed peers, under ceilings of the same run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


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


def _plotter(file: Path) -> Any:
    """The function that plots results. It is imported before hours are spent on timing, to see whether it can be."""
    if file.suffix != ".png" or not file.absolute().parent.is_dir():
        raise ValueError(f"--plot {file}: it must end in .png, in a folder that exists")
    try:
        from quire.bench.plot import plot
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib: pip install 'quire[bench]' ({error})") from error
    return plot


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: it must be at least 1")
    bench = _module(args.device)
    listed = bench.DECODE if args.operation == "decode" else bench.PREFILL
    from quire.bench.cells import Cell

    asked: dict[str, Any] = {}
    if args.peers is not None:
        if bench.__name__ != "quire.bench.gpu":
            raise ValueError(f"--peers {args.peers}: on a CPU only torch is timed beside Quire")
        from quire.bench import peers

        asked["asked"] = peers.names(args.peers)
    names = [f"{args.operation} {cell}" for cell in args.cell] if args.cell else listed
    for name in names:
        Cell.parse(name)  # refuse unknown cells before timing any
    plot = None if args.plot is None else _plotter(args.plot)
    file = None if args.json == Path("-") else args.json
    result: dict[str, Any] = {}
    for result in bench.bench(names, args.backend, args.rounds, **asked):
        done = result["cells"]
        print(f"{len(done)} of {len(names)}: {done[-1]['cell']}", file=sys.stderr, flush=True)
        if file is not None:  # after each cell, so that a crash loses no results
            file.write_text(json.dumps(result, indent=2) + "\n")
    if plot is not None:
        plot(result, args.plot)
    if args.json == Path("-"):
        json.dump(result, sys.stdout, indent=2)
        print()
        return 0
    print(bench.table(result))
    return 0
