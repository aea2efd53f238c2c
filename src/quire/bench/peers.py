"""FlashInfer beside Quire, where it is installed: the same calls on the same tensors, by each of its kernels."""

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

_WORKSPACE = 512 << 20  # bytes, of which FlashInfer recommends 128 MB at least
_MOST_ERROR = 1e-2  # of a result in halves; whoever is further off has computed something else


def flashinfer() -> ModuleType | None:
    """The real FlashInfer; None where it is not installed.

    Raises:
        ValueError: it is installed, but its name means Quire in this process (`quire.compat`).
    """
    try:
        version("flashinfer-python")  # what is installed: `import flashinfer` may find Quire's stand-in
    except PackageNotFoundError:
        return None
    module = import_module("flashinfer")
    if module.BatchDecodeWithPagedKVCacheWrapper is quire.BatchDecodeWithPagedKVCacheWrapper:
        raise ValueError("flashinfer means Quire in this process: leave quire.compat out to time the real one")
    return module


def kernels(cell: Cell, capability: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Options of FlashInfer's wrapper for each of its kernels that a GPU of such a capability has for a cell.

    Those for decode are "cuda", on CUDA cores, and "fa2", its prefill on tensor cores.
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
    """What `time` says of each of its kernels, or {"failed": why} of those that cannot compute the cell.

    Args:
        module: FlashInfer, or whatever has its wrappers.
        time: from what plans and what runs to times and an "error".
    """
    found: dict[str, dict[str, Any]] = {}
    for name, options in kernels(cell, capability).items():
        try:
            row: dict[str, Any] = time(*prepared(cell, batch, module, _WORKSPACE, **options))
        except Exception as error:  # FlashInfer has no common one, nor have the compilers that it calls
            row = {"failed": f"{type(error).__name__}: {error}"}
        if "failed" not in row and not row["error"] <= _MOST_ERROR:  # or NaN
            row = {"failed": f"error {row['error']:.1e} against the oracle"}
        found[name] = row
    return found


def best(row: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest of FlashInfer's kernels in a cell's row, and its microseconds; None if there was none."""
    times = {name: own["us"] for name, own in row.get("flashinfer", {}).items() if "us" in own}
    return min(times.items(), key=lambda item: item[1]) if times else None


def ratio(row: dict[str, Any]) -> float | None:
    """FlashInfer's time over Quire's: above 1 where Quire is faster. None if there was no FlashInfer."""
    theirs = best(row)
    return theirs[1] / row["us"] if theirs else None


def summary(rows: list[dict[str, Any]]) -> str:
    """A sentence on all cells that FlashInfer computed; empty if there were none."""
    ratios = [found for found in map(ratio, rows) if found is not None]
    if not ratios:
        return ""
    mean = geometric_mean(ratios)
    return f"FlashInfer's time over Quire's, geometric mean of {len(ratios)} of {len(rows)} cells: {mean:.2f}."
