"""A picture of what was timed: rates against batch and against length, under the ceiling of the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from quire.bench import peers
from quire.bench.cells import Cell

_RATES = {
    "gb_s": ("GB/s", "read_gb_s"),
    "tflop_s": ("TFLOP/s", "matmul_tflop_s"),
    "gflop_s": ("GFLOP/s", "matmul_gflop_s"),
}
_SIDES: dict[str, Callable[[Cell], float]] = {
    "requests": lambda cell: cell.batch,
    "tokens of a request (mean)": lambda cell: cell.tokens / cell.batch,
}
Kinds = dict[str, list[tuple[Cell, dict[str, Any]]]]


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw a result of `quire bench` as PNG: a colour per heads, pages and dtype; FlashInfer's best, if any, hollow."""
    key = next(name for name in _RATES if name in result["cells"][0])
    unit, ceiling = _RATES[key]
    top, kinds = result["ceilings"][ceiling], _kinds(result["cells"])
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    for axes, (label, side) in zip(figure.subplots(1, 2, sharey=True), _SIDES.items(), strict=True):
        axes.axhline(top, color="black", linestyle="--", linewidth=1)
        _words(axes, _points(axes, kinds, key, side), 0.035 * top)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _at: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    handles = _legend(result, kinds, f"ceiling: {top:,.0f} {unit}")
    figure.legend(handles=handles, fontsize=7, loc="outside right center")
    figure.supylabel(unit, fontsize=10)
    figure.suptitle(f"{result['device']}, Quire {result['quire']}, {result['date']}", fontsize=10)
    figure.savefig(file, dpi=150)


def _points(axes: Axes, kinds: Kinds, key: str, side: Callable[[Cell], float]) -> dict[tuple[float, str], float]:
    """Draw each cell's rate, and FlashInfer's, over one side of its shape.

    Returns:
        the highest rate of those that have a side and a shape in common.
    """
    tops: dict[tuple[float, str], float] = {}
    for i, rows in enumerate(kinds.values()):
        beside = 2 ** (0.07 * ((i + 1) // 2) * (-1) ** i)  # or kinds of one shape would hide each other
        for cell, row in rows:
            x, rate, ratio = side(cell), row[key], peers.ratio(row)
            axes.plot(x * beside, rate, "o", color=f"C{i}", markersize=5)
            if ratio is not None:
                axes.plot(x * beside, rate / ratio, "s", color=f"C{i}", markersize=7, fillstyle="none")
            tops[x, cell.shape] = max(rate, rate / (ratio or 1.0), tops.get((x, cell.shape), 0.0))
    return tops


def _words(axes: Axes, tops: dict[tuple[float, str], float], step: float) -> None:
    """Write shapes above their points, one `step` above the other at least."""
    written: dict[float, float] = {}
    for (x, shape), rate in sorted(tops.items(), key=lambda item: item[1]):
        written[x] = max(rate, written.get(x, -step) + step)
        axes.annotate(shape, (x, written[x]), (0, 6), textcoords="offset points", fontsize=7, ha="center")


def _legend(result: dict[str, Any], kinds: Kinds, ceiling: str) -> list[Line2D]:
    """What colours, marks and the line mean."""
    names = [Line2D([], [], color=f"C{i}", marker="o", ls="", label=kind) for i, kind in enumerate(kinds)]
    if "flashinfer" in result:
        label = f"FlashInfer {result['flashinfer']}"
        names.append(Line2D([], [], color="gray", marker="s", fillstyle="none", ls="", label=label))
    return [*names, Line2D([], [], color="black", ls="--", lw=1, label=ceiling)]


def _kinds(cells: list[dict[str, Any]]) -> Kinds:
    """Cells by what their names say besides batch and length."""
    kinds: Kinds = {}
    for row in cells:
        cell = Cell.parse(row["cell"])
        kind = " ".join(row["cell"].replace(cell.shape, "").split())
        kinds.setdefault(kind, []).append((cell, row))
    return kinds
