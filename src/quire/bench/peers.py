"""Timing of FlashInfer, if it is installed, with each of its kernels and on the tensors that Quire is timed with."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import quire
from quire.bench.batches import Batch
from quire.bench.calls import Plan, Run, prepared
from quire.bench.cells import Cell

_WORKSPACE = 512 << 20  # bytes; FlashInfer recommends 128 MB or more
_MAX_ERROR = 1e-2  # relative, of outputs in 16 bits; a larger one means that something else was computed


def flashinfer() -> ModuleType | None:
    """The installed FlashInfer; None if there is none.

    Raises:
        ValueError: FlashInfer is installed, but its name refers to Quire in this process (`quire.compat`).
    """
    try:
        version("flashinfer-python")  # `import flashinfer` alone might find the modules of quire.compat
    except PackageNotFoundError:
        return None
    module = import_module("flashinfer")
    if module.BatchDecodeWithPagedKVCacheWrapper is quire.BatchDecodeWithPagedKVCacheWrapper:
        raise ValueError("flashinfer means Quire in this process: leave quire.compat out to time the real one")
    return module


def kernels(cell: Cell, capability: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """FlashInfer's kernels for a cell on a GPU of this compute capability: wrapper options by the kernel's name.

    Decode has "cuda", which uses CUDA cores, and "fa2", its prefill kernel, which uses tensor cores.
    """
    if cell.operation == "decode" and not cell.latent:
        return {
            "cuda": {"backend": "fa2", "use_tensor_cores": False},
            "fa2": {"backend": "fa2", "use_tensor_cores": True},
        }
    names = ("fa2", "fa3") if capability == (9, 0) else ("fa2",)
    return {name: {"backend": name} for name in names}


def measure(
    module: ModuleType,
    cell: Cell,
    batch: Batch,
    capability: tuple[int, int],
    time: Callable[[Plan, Run], dict[str, float]],
) -> dict[str, dict[str, Any]]:
    """Times and error of each of FlashInfer's kernels, or {"failed": reason} if it cannot compute the cell.

    Args:
        module: FlashInfer, or a module with its wrappers.
        time: called with functions that plan and run; returns times and an "error".
    """
    found: dict[str, dict[str, Any]] = {}
    for name, options in kernels(cell, capability).items():
        try:
            row: dict[str, Any] = time(*prepared(cell, batch, module, _WORKSPACE, **options))
        except Exception as error:  # FlashInfer, and the compilers that it calls, raise unrelated types
            row = {"failed": f"{type(error).__name__}: {error}"}
        if "failed" not in row and not row["error"] <= _MAX_ERROR:  # NaN fails this, too
            row = {"failed": f"error {row['error']:.1e} against the oracle"}
        found[name] = row
    return found


def best(row: dict[str, Any]) -> tuple[str, float] | None:
    """The name and microseconds of FlashInfer's fastest kernel in a cell's row; None if none computed it."""
    times = {name: found["us"] for name, found in row.get("flashinfer", {}).items() if "us" in found}
    return min(times.items(), key=lambda item: item[1]) if times else None


def ratio(row: dict[str, Any]) -> float | None:
    """FlashInfer's time over Quire's: above 1 if Quire is faster. None if FlashInfer did not compute the cell."""
    fastest = best(row)
    return fastest[1] / row["us"] if fastest else None


def summary(rows: list[dict[str, Any]]) -> str:
    """A sentence with the mean ratio over all cells that FlashInfer computed; empty if there are none."""
    ratios = [found for found in map(ratio, rows) if found is not None]
    if not ratios:
        return ""
    mean = geometric_mean(ratios)
    return f"FlashInfer's time over Quire's, geometric mean of {len(ratios)} of {len(rows)} cells: {mean:.2f}."
