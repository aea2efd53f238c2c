"""A bar chart of a `quire bench` result: one row per cell, with Quire, its peers and the ceiling of that run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from quire.bench import peers
from quire.bench.cells import Cell

# The unit of a row's rate, the ceiling that it is compared with, and what that ceiling is.
_RATES = {
    "gb_s": ("GB/s", "read_gb_s", "memory read rate"),
    "tflop_s": ("TFLOP/s", "matmul_tflop_s", "matrix product rate"),
    "gflop_s": ("GFLOP/s", "matmul_gflop_s", "matrix product rate"),
}
_DEFAULT = Cell("", 1, 1)
_DEFAULT_LAYER = "requests × tokens (32 heads over 8 of 128, pages of 16, bf16)"
_QUIRE, _TEXT = "#2a6f97", "#333333"
_COLORS = {"fa3": "#c8553d", "flashinfer": "#e9a23b", "cudnn": "#76a24a", "flex": "#8d7b9f"}
# The height of all bars of a cell; rows of cells are 1 apart.
_HEIGHT = 0.76


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw a result of `quire bench` as a PNG, 1,000 pixels wide.

    Cells of the default layer come first, by their number of tokens, then those of other layers. Below Quire's bar are
    those of the peers that computed the cell, each with the fastest of its kernels. On the right stands how many times
    Quire is as fast as FlashAttention-3 or, where that computed no cell, FlashInfer. Cells that Quire did not compute
    are left out.
    """
    rows = [row for row in result["cells"] if row.keys() & _RATES.keys()]
    if not rows:
        raise ValueError("there is nothing to plot: Quire computed none of the cells")
    key = next(name for name in _RATES if name in rows[0])
    cells = sorted(((Cell.parse(row["cell"]), row) for row in rows), key=lambda pair: _order(pair[0]))
    unit, ceiling, meaning = _RATES[key]
    top = result["ceilings"][ceiling]
    others = [bool(_differences(cell)) for cell, _ in cells]
    # A row is left free for the heading of the other layers.
    places = [i + other for i, other in enumerate(others)]
    beside = [peer for peer in peers.TITLES if any(peers.best(row, peer) for row in rows)]
    # The height of a cell.
    inches = 0.28 if len(beside) < 2 else 0.12 * (len(beside) + 1)
    figure = Figure(figsize=(8, 1.6 + inches * (len(cells) + 2)), layout="constrained")
    axes = figure.subplots()
    _bars(axes, result, beside, places, [(row[key], row) for _, row in cells])
    _ratios(axes, peers.main_peer(rows), places, [row for _, row in cells], 1.03 * top)
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
    axes: Axes,
    result: dict[str, Any],
    beside: Sequence[str],
    places: Sequence[int],
    cells: Sequence[tuple[float, dict[str, Any]]],
) -> None:
    """Draw Quire's rate of each cell, given with the cell's row, and right below it those of peers that computed it."""
    height = _HEIGHT / (len(beside) + 1) if beside else 0.6
    computed = [[peer for peer in beside if peers.ratio(row, peer)] for _, row in cells]
    tops = [place - height * len(those) / 2 for place, those in zip(places, computed, strict=True)]
    axes.barh(tops, [rate for rate, _ in cells], height, color=_QUIRE, label="Quire")
    for peer in beside:
        at, rates = [], []
        for top, those, (rate, row) in zip(tops, computed, cells, strict=True):
            if ratio := peers.ratio(row, peer):
                at.append(top + height * (1 + those.index(peer)))
                rates.append(rate / ratio)
        label = f"{peers.TITLES[peer]} {result.get(peer, '')}".strip()
        axes.barh(at, rates, height, color=_COLORS[peer], label=label)


def _ratios(axes: Axes, peer: str, places: Sequence[int], rows: Sequence[dict[str, Any]], right: float) -> None:
    """Write at x = `right` how many times Quire is as fast as a peer in each of the rows."""
    ratios = [(place, ratio) for place, row in zip(places, rows, strict=True) if (ratio := peers.ratio(row, peer))]
    for place, ratio in ratios:
        weight = "bold" if round(ratio, 2) > 1 else "normal"
        axes.text(right, place, f"{ratio:.2f}×", va="center", fontsize=9, fontweight=weight, color=_TEXT)
    if ratios:
        axes.text(
            right, places[0] - 0.62, f"vs {peers.TITLES[peer]}", va="bottom", fontsize=9, style="italic", color=_TEXT
        )


def _order(cell: Cell) -> tuple[bool, int, int]:
    """Sort key: the default layer first, by tokens; other layers keep the order of the result."""
    other = bool(_differences(cell))
    return (other, 0, 0) if other else (other, cell.tokens, len(cell.kv_lens))


def _label(cell: Cell) -> str:
    """Requests x tokens of each, and how the layer differs from the default one."""
    size = f"{cell.batch} × {_tokens(cell.kv_len)}"
    if cell.mixed:
        size = f"{cell.batch} mixed, {_tokens(cell.kv_len)} in all"
    elif cell.operation == "prefill":
        size = " + ".join(
            f"{batch} × {_tokens(q_len)}" + (f" of {_tokens(kv_len)}" if q_len != kv_len else "")
            for batch, q_len, kv_len in cell.groups
        )
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
    if cell.dtype != _DEFAULT.dtype:
        words.append(cell.dtype)
    return [*words, "tables on device"] if cell.device_tables else words


def _tokens(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)
