"""The Markdown table of a result of `quire bench` on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any, NamedTuple

from quire.bench import peers

Row = dict[str, Any]
Show = Callable[[Row], str]
# Characters of a failure that the table shows.
_REASON = 120


class _Rate(NamedTuple):
    """A row's rate: its key in rows, the ceiling that it is compared with, and its unit."""

    key: str
    ceiling: str
    unit: str


_DECODE = _Rate("gb_s", "read_gb_s", "GB/s")
_PREFILL = _Rate("tflop_s", "matmul_tflop_s", "TFLOP/s")


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table, with sentences on peers and failures below it.

    A peer that was not timed in a cell has "-" there, and one that was, and could not compute it, "failed".
    """
    rows = result["cells"]
    decode = rows[0]["cell"].startswith("decode")
    rate = _DECODE if decode else _PREFILL
    ceiling = result["ceilings"][rate.ceiling]
    columns = _times(rows, decode)
    if decode:
        columns[rate.unit] = _computed(lambda row: f"{row[rate.key]:,.0f}")
    columns |= {
        f"of {ceiling:,.0f} {rate.unit}": _computed(lambda row: f"{row[rate.key] / ceiling:.0%}"),
        "error": _computed(lambda row: f"{row['error']:.1e}"),
        "host: plan µs": _computed(lambda row: f"{row['plan_host_us']:.0f}"),
        "run µs": _computed(lambda row: f"{row['run_host_us']:.0f}"),
    }
    if any("family" in row for row in rows):
        columns["family"] = lambda row: row.get("family", "-")
    lines = [["cell", *columns], *([row["cell"], *(show(row) for show in columns.values())] for row in rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    text = "\n".join([head, "|---|" + "--:|" * len(columns), *body])
    return "\n\n".join([text, *_summary(result)])


def _times(rows: Sequence[Row], decode: bool) -> dict[str, Show]:
    """The columns of times; those of prefill also have rates."""
    show = (lambda row, us: f"{us:.1f}") if decode else _with_rate
    heading = "{} µs" if decode else "{} µs (TFLOP/s)"
    beside, peer = peers.present(rows), peers.main_peer(rows)
    columns: dict[str, Show] = {
        heading.format("Quire"): lambda row: show(row, row["us"]) if "us" in row else "failed",
        **{heading.format(peers.TITLES[peer]): partial(_of_peer, peer=peer, show=show) for peer in beside},
    }
    if beside:
        columns["ratio" if decode else f"ratio to {peers.TITLES[peer]}"] = partial(_ratio, peer=peer)
    if any(row["sdpa_us"] for row in rows):
        if decode:
            columns["gather + SDPA µs"] = lambda row: f"{row['sdpa_us']:.0f}" if row["sdpa_us"] else "-"
        else:
            columns[heading.format("dense SDPA")] = lambda row: show(row, row["sdpa_us"]) if row["sdpa_us"] else "-"
    return columns


def _with_rate(row: Row, us: float) -> str:
    """A time of a prefill cell and its rate, which follows from Quire's rate and the ratio of the times."""
    return f"{us:.1f} ({row['tflop_s'] * row['us'] / us:,.0f})" if "us" in row else f"{us:.1f}"


def _of_peer(row: Row, peer: str, show: Callable[[Row, float], str]) -> str:
    """The time of a peer's fastest kernel, which is named if it has several."""
    found = peers.best(row, peer)
    if found is None:
        return "failed" if peer in row else "-"
    kernel, us = found
    return f"{show(row, us)} {kernel}" if len(row[peer]) > 1 else show(row, us)


def _ratio(row: Row, peer: str) -> str:
    ratio = peers.ratio(row, peer)
    return f"{ratio:.2f}" if ratio else "-"


def _computed(show: Show) -> Show:
    """`show` for rows that Quire computed, and "-" for others."""
    return lambda row: show(row) if "us" in row else "-"


def _summary(result: dict[str, Any]) -> list[str]:
    """For each peer, the mean of its ratios, and the cells that it or Quire failed to compute, with reasons."""
    rows, sentences = result["cells"], []
    for peer in peers.present(rows):
        ratios = [found for row in rows if (found := peers.ratio(row, peer)) is not None]
        if ratios:
            cells, mean = f"{len(ratios)} of {len(rows)} cells", geometric_mean(ratios)
            sentences.append(f"{peers.TITLES[peer]}'s time over Quire's, geometric mean of {cells}: {mean:.2f}.")
    failures = {f"Quire ({result.get('backend')})": {row["cell"]: row["failed"] for row in rows if "failed" in row}}
    for peer in peers.present(rows):
        failed = [row for row in rows if peer in row and not peers.best(row, peer)]
        failures[peers.TITLES[peer]] = {row["cell"]: [*row[peer].values()][-1]["failed"] for row in failed}
    for title, reasons in failures.items():
        if reasons:
            cells = "; ".join(f"{cell} ({_short(reason)})" for cell, reason in reasons.items())
            sentences.append(f"{title} failed: {cells}.")
    return sentences


def _short(reason: str) -> str:
    """A reason on one line, without its end if it is long."""
    line = " ".join(reason.split())
    return line if len(line) <= _REASON else f"{line[:_REASON]}..."
