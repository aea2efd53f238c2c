"""A bar chart of a `quire bench` result: one row per cell, with Quire, FlashInfer and the ceiling of that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from quire.bench import peers
from quire.bench.cells import Cell

_RATES = {  # a row's rate: its unit, the ceiling that it is compared with, and what that ceiling is
    "gb_s": ("GB/s", "read_gb_s", "memory read rate"),
    "tflop_s": ("TFLOP/s", "matmul_tflop_s", "matrix product rate"),
    "gflop_s": ("GFLOP/s", "matmul_gflop_s", "matrix product rate"),
}
_DEFAULT = Cell("", 1, 1)
_DEFAULT_LAYER = "requests × tokens (32 heads over 8 of 128, pages of 16, bf16)"
_QUIRE, _FLASHINFER, _TEXT = "#2a6f97", "#e9a23b", "#333333"


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw a result of `quire bench` as a PNG, 1,000 pixels wide.

    Cells of the default layer come first, by their number of tokens, then those of other layers. Where FlashInfer
    computed a cell, the bar below Quire's is the fastest of its kernels, and its time over Quire's stands on the right.
    """
    cells = sorted(((Cell.parse(row["cell"]), row) for row in result["cells"]), key=lambda pair: _order(pair[0]))
    key = next(name for name in _RATES if name in cells[0][1])
    unit, ceiling, meaning = _RATES[key]
    top = result["ceilings"][ceiling]
    others = [bool(_differences(cell)) for cell, _ in cells]
    places = [i + other for i, other in enumerate(others)]  # a row is left free for the heading of the other layers
    figure = Figure(figsize=(8, 1.6 + 0.28 * (len(cells) + 2)), layout="constrained")
    axes = figure.subplots()
    _bars(axes, result, places, [(row[key], peers.ratio(row)) for _, row in cells], 1.03 * top)
    axes.axvline(top, color=_TEXT, linestyle="--", linewidth=1, label=f"{meaning}: {top:,.0f} {unit}")
    for other, heading in ((False, _DEFAULT_LAYER), (True, "other layers")):
        if other in others:
            place = places[others.index(other)] - 0.62
            axes.text(0, place, heading, va="bottom", fontsize=9, style="italic", color=_TEXT)
    axes.set_yticks(places, [_label(cell) for cell, _ in cells], fontsize=9)
    axes.set_ylim(places[-1] + 0.6, places[0] - 1.2)
    axes.set_xlim(0, max(1.005 * top, *(row[key] for _, row in cells)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{cells[0][0].operation.capitalize()} on {result['device']}, Quire {result['quire']}, {result['date']}"
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(file, dpi=125)


def _bars(
    axes: Axes, result: dict[str, Any], places: list[int], cells: list[tuple[float, float | None]], right: float
) -> None:
    """Draw the rates of Quire and FlashInfer from (rate, ratio) of each cell, and write the ratios at x = `right`."""
    rates = [rate for rate, _ in cells]
    compared = [(place, rate, ratio) for place, (rate, ratio) in zip(places, cells, strict=True) if ratio]
    if not compared:
        axes.barh(places, rates, 0.6, color=_QUIRE, label="Quire")
        return
    axes.barh([place - 0.19 for place in places], rates, 0.38, color=_QUIRE, label="Quire")
    label = f"FlashInfer {result.get('flashinfer', '')}".strip()
    theirs = [rate / ratio for _, rate, ratio in compared]
    axes.barh([place + 0.19 for place, *_ in compared], theirs, 0.38, color=_FLASHINFER, label=label)
    for place, _, ratio in compared:
        weight = "bold" if round(ratio, 2) > 1 else "normal"
        axes.text(right, place, f"{ratio:.2f}×", va="center", fontsize=9, fontweight=weight, color=_TEXT)
    axes.text(right, places[0] - 0.62, "speed-up", va="bottom", fontsize=9, style="italic", color=_TEXT)


def _order(cell: Cell) -> tuple[bool, int, int]:
    """Sort key: the default layer first, by tokens; other layers keep the order of the result."""
    other = bool(_differences(cell))
    return (other, 0, 0) if other else (other, cell.tokens, cell.batch)


def _label(cell: Cell) -> str:
    """Requests x tokens of each, and how the layer differs from the default one."""
    size = f"{cell.batch} × {_tokens(cell.kv_len)}"
    if cell.mixed:
        size = f"{cell.batch} mixed, {_tokens(cell.kv_len)} in all"
    elif cell.q_len not in (1, cell.kv_len):
        size = f"{cell.batch} × {_tokens(cell.q_len)} of {_tokens(cell.kv_len)}"
    return ", ".join([*_differences(cell), size])


def _differences(cell: Cell) -> list[str]:
    """What distinguishes a cell's layer from the default one, in words."""
    words = [f"MLA {cell.num_qo_heads} heads"] if cell.latent else []
    if not cell.latent and (cell.num_qo_heads, cell.num_kv_heads) != (_DEFAULT.num_qo_heads, _DEFAULT.num_kv_heads):
        words.append(f"{cell.num_qo_heads} heads over {cell.num_kv_heads}")
    if not cell.latent and cell.head_dim != _DEFAULT.head_dim:
        words.append(f"head_dim {cell.head_dim}")
    if cell.ragged:
        words.append("ragged")
    elif cell.page_size != _DEFAULT.page_size:
        words.append(f"pages of {cell.page_size}")
    return words if cell.dtype == _DEFAULT.dtype else [*words, cell.dtype]


def _tokens(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)
