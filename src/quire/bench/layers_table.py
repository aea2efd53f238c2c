"""The table and the bar chart of a result of `quire bench layers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TITLES = {"torch.compile": "torch.compile", "flashinfer": "FlashInfer"}
_COLORS = {"torch.compile": "#8d7b9f", "flashinfer": "#e9a23b"}
_QUIRE, _TEXT = "#2a6f97", "#333333"


def _peers(result: dict[str, Any]) -> list[str]:
    return [name for name in _TITLES if any(name in row for row in result["cells"])]


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table, with the reasons of peers that failed below it.

    A peer that was not timed in a cell has "-" there, and one that was, and could not compute it, "failed".
    """
    beside, rate = _peers(result), result["ceilings"]["copy_gb_s"]
    head = ["cell", "Quire µs", "GB/s", "of a copy", *(f"{_TITLES[name]} µs" for name in beside)]
    lines = []
    for row in result["cells"]:
        us = [row.get(name, {"failed": ""}).get("us") for name in beside]
        times = [f"{t:.2f}" if t else "failed" if name in row else "-" for name, t in zip(beside, us, strict=True)]
        share = row["copy_us"] / row["us"]
        lines.append([row["cell"], f"{row['us']:.2f}", f"{row['gb_s']:,.0f}", f"{share:.0%}", *times])
    text = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    text.insert(1, "|---|" + "--:|" * (len(head) - 1))
    notes = [f"A copy of as many bytes, timed in each cell, takes 100%; a large one moves {rate:,.0f} GB/s."]
    for name in beside:
        failed = [f"{row['cell']} ({' '.join(row[name]['failed'].split())[:120]})" for row in result["cells"]
                  if "failed" in row.get(name, {})]  # fmt: skip
        notes += [f"{_TITLES[name]} failed: {'; '.join(failed)}."] if failed else []
    return "\n\n".join(["\n".join(text), *notes])


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw a result as a PNG, 1,000 pixels wide: each cell's speed as a share of that of a copy of as many bytes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows, names = result["cells"], ["us", *_peers(result)]
    if not rows:
        raise ValueError("there is nothing to plot: no cell was timed")
    height = 0.8 / len(names)
    figure = Figure(figsize=(8, 1.4 + 0.14 * (len(names) + 1) * len(rows)), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        times = [row["us"] if name == "us" else row.get(name, {}).get("us") for row in rows]
        shares = [row["copy_us"] / us if us else 0.0 for row, us in zip(rows, times, strict=True)]
        label = "Quire" if name == "us" else f"{_TITLES[name]} {result.get(name, '')}".strip()
        places = [place + (i + 0.5) * height - 0.4 for place in range(len(rows))]
        axes.barh(places, shares, height, color=_COLORS.get(name, _QUIRE), label=label)
    axes.axvline(1.0, color=_TEXT, linestyle="--", linewidth=1, label="a copy of as many bytes")
    axes.set_yticks(range(len(rows)), [row["cell"] for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(f"Layers on {result['device']}, Quire {result['quire']}, {result['date']}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(file, dpi=125)
