"""A picture of what was timed: each cell's rate against how much is cached, under the ceiling of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from quire.bench.cells import Cell

_RATES = {
    "gb_s": ("GB/s", "read_gb_s"),
    "tflop_s": ("TFLOP/s", "matmul_tflop_s"),
    "gflop_s": ("GFLOP/s", "matmul_gflop_s"),
}


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw a result of `quire bench` as PNG: rates over all requests' tokens, a colour per heads, pages and dtype."""
    key = next(name for name in _RATES if name in result["cells"][0])
    unit, ceiling = _RATES[key]
    top = result["ceilings"][ceiling]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    tops: dict[tuple[int, str], float] = {}  # where to write batch and length: once, above all kinds
    for kind, rows in _kinds(result["cells"]).items():
        axes.plot(
            [cell.tokens for cell, _row in rows], [row[key] for _cell, row in rows], "o", label=kind, markersize=5
        )
        for cell, row in rows:
            at = cell.tokens, cell.shape
            tops[at] = max(row[key], tops.get(at, 0.0))
    for (tokens, shape), rate in tops.items():
        axes.annotate(shape, (tokens, rate), (0, 6), textcoords="offset points", fontsize=7, ha="center")
    axes.axhline(top, color="black", linestyle="--", linewidth=1, label=f"ceiling: {top:,.0f} {unit}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _at: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    axes.set(ylim=(0, 1.08 * top), xlabel="tokens in the cache, all requests together", ylabel=unit)
    axes.set_title(f"{result['device']}, Quire {result['quire']}, {result['date']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(file, dpi=150)


def _kinds(cells: list[dict[str, Any]]) -> dict[str, list[tuple[Cell, dict[str, Any]]]]:
    """Cells by what their names say besides batch and length."""
    kinds: dict[str, list[tuple[Cell, dict[str, Any]]]] = {}
    for row in cells:
        cell = Cell.parse(row["cell"])
        kind = " ".join(row["cell"].replace(cell.shape, "").split())
        kinds.setdefault(kind, []).append((cell, row))
    return kinds
