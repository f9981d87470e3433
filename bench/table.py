"""Tables for people: what the columns are called, how figures are written, and the median of a
column."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

RULE_MAX = 120
ABSENT = "-"
"""Stands for a figure that there is none of."""


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are there; None when there are none."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number with so many digits after the point and thousands parted; ABSENT for None."""
    return ABSENT if value is None else f"{value:,.{digits}f}{unit}"


def render(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A table as text. Columns are aligned at the right, but for the first, and the last when its
    head is empty or `note`."""
    cells = [list(heads), *[list(row) for row in rows]]
    if any(len(row) != len(heads) for row in cells):
        raise ValueError(f"a row of the table {title!r} has not {len(heads)} cells")
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    left = {0} | ({len(heads) - 1} if heads[-1] in ("", "note") else set())
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    rule = "-" * min(RULE_MAX, max(len(line) for line in lines))
    return "\n".join(["", f"== {title}", lines[0], rule, *lines[1:], *notes])
