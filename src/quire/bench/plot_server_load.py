"""A plot of a result of `quire bench serve`: latencies and rates over the rate at which requests arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLORS = {"p50": "#2a6f97", "p95": "#e9a23b", "p99": "#c8553d"}
_TEXT = "#333333"


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw the time to the first token, the time per further token, and requests completed and good, each at every
    rate, as a PNG 1,250 pixels wide.
    """
    rows, limits = result["runs"], result["limits"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    first, further, rates = figure.subplots(1, 3)
    _times(first, rows, "ttft_ms", limits["ttft_ms"])
    _times(further, rows, "tpot_ms", limits["itl_ms"])
    first.set_title("ms to the first token", fontsize=9)
    further.set_title("ms per further token", fontsize=9)
    rates.set_title("requests per second", fontsize=9)
    rates.plot([row["requests_s"] for row in rows], "o-", color=_COLORS["p50"], label="completed")
    if any(limits.values()):
        rates.plot([row["good_requests_s"] for row in rows], "o--", color=_COLORS["p99"], label="good")
    requested = [(at, row["rate"]) for at, row in enumerate(rows) if row["rate"] != "inf"]
    rates.plot(*zip(*requested, strict=True), "_", markersize=14, color=_TEXT, label="requested") if requested else None
    for axes in (first, further, rates):
        axes.set_xticks(range(len(rows)), [f"{row['rate']}" for row in rows], fontsize=9)
        axes.set_xlabel("requests arriving per second", fontsize=9)
        axes.margins(0.1)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    title = f"{result['model']} at {result['url']}, {result['input']} in, {result['output']} out, {result['date']}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=125)


def _times(axes: Axes, rows: list[dict[str, Any]], key: str, limit: float | None) -> None:
    """Lines of percentiles, with gaps at rates that have none, and of the limit."""
    for name, color in _COLORS.items():
        axes.plot([row[key].get(name, float("nan")) for row in rows], "o-", color=color, label=name)
    if limit is not None:
        axes.axhline(limit, color=_TEXT, linestyle="--", linewidth=1, label="limit")
