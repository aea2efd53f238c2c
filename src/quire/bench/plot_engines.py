"""A bar chart of a result of `quire bench throughput` or `latency`: a group of bars per cell, one per engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_COLORS = {"Quire": "#2a6f97", "Quire, batch-invariant": "#7fb7be", "vLLM": "#c8553d", "Transformers": "#e9a23b"}
_TEXT = "#333333"


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw output tokens per second, or milliseconds per decode step over their floor and milliseconds to the first
    token of prompts that come into a busy engine, as a PNG 1,000 pixels wide.
    """
    cells = list(dict.fromkeys(row["cell"] for row in result["cells"]))
    rate = result["operation"] == "throughput"
    engines = list(dict.fromkeys(row["engine"] for row in result["cells"] if _value(row, rate) is not None))
    rows = {(row["cell"], row["engine"]): row for row in result["cells"]}
    height = 0.8 / len(engines)
    figure = Figure(figsize=(8, 1.6 + 0.3 * len(cells) * (len(engines) + 0.6)), layout="constrained")
    axes = figure.subplots()
    for i, engine in enumerate(engines):
        values = [_value(rows.get((cell, engine), {}), rate) for cell in cells]
        places = [at + (i - (len(engines) - 1) / 2) * height for at in range(len(cells))]
        bars = axes.barh(places, [value or 0 for value in values], height, color=_COLORS[engine], label=engine)
        words = ["" if value is None else f" {value:,.0f}" if value >= 100 else f" {value:.2f}" for value in values]
        axes.bar_label(bars, words, fontsize=9, color=_TEXT)
    floors = [(at, rows[cell, "Quire"].get("floor_ms")) for at, cell in enumerate(cells) if (cell, "Quire") in rows]
    marks = [(at, floor) for at, floor in floors if floor is not None]
    if marks:
        ends = [at - 0.4 for at, _ in marks], [at + 0.4 for at, _ in marks]
        label = "floor: weights and cache over read rate"
        axes.vlines([floor for _, floor in marks], *ends, colors=_TEXT, linestyles="--", linewidth=1, label=label)
    axes.set_yticks(range(len(cells)), cells, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    what = "output tokens/s" if rate else "ms per decode step; prompts into a busy engine: ms to the first token"
    axes.set_xlabel(what, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(f"{result['model']} on {result['device']}, Quire {result['quire']}, {result['date']}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(file, dpi=125)


def _value(row: dict[str, Any], rate: bool) -> float | None:
    """The number that a bar shows."""
    if rate:
        return row.get("output_tokens_s")
    times = row.get("step_ms") or row.get("ttft_ms")
    return times["p50"] if times else None
