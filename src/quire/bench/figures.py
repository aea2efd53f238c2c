"""Percentiles of times, and Markdown tables of rows of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_PERCENTILES = (50, 95, 99)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The 50th, 95th and 99th percentile in milliseconds: the least value that this part of the values does not exceed.
    {} if there are no values.
    """
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"p{p}": ordered[-(-len(ordered) * p // 100) - 1] * 1e3 for p in _PERCENTILES}


def markdown(rows: Sequence[Row], names: Sequence[str], shown: Mapping[str, tuple[str, str | None]]) -> str:
    """A Markdown table: columns of the keys `names`, and columns of numbers that any row has.

    Args:
        shown: per heading, the key of a number, and None or the key of the part of it that is shown.
    """
    columns = {head: keys for head, keys in shown.items() if any(_value(row, *keys) is not None for row in rows)}
    lines = [[*names, *columns]]
    for row in rows:
        lines.append([*(str(row[name]) for name in names), *(_shown(_value(row, *keys)) for keys in columns.values())])
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(names) + "--:|" * len(columns), *body])


def _value(row: Row, key: str, part: str | None) -> float | None:
    value = row.get(key)
    return value.get(part) if part is not None and value is not None else value


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
