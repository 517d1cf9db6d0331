"""Figures of several sizes as tables in Markdown, with exponents against the size.  Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Figures = Mapping[str, float]
"""Values of one run by the keys of rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its key, its description with the unit, and how many decimals are printed."""

    key: str
    label: str
    decimals: int = 1


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """The exponent e of y = c * x ** e, by least squares on the logarithms of both.

    None without two points of different x, or with a y that is not above 0.
    """
    pairs = list(points)
    if any(y <= 0 for _, y in pairs) or len({x for x, _ in pairs}) < 2:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in pairs]
    mean_x = sum(x for x, _ in logs) / len(logs)
    mean_y = sum(y for _, y in logs) / len(logs)
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def exponents(
    rows: Sequence[Row], by_size: Mapping[int, Figures]
) -> dict[str, tuple[float, float]]:
    """The exponents of each row: over all sizes, and over the two largest."""
    sizes = sorted(by_size)
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        points = [(n, by_size[n][row.key]) for n in sizes if row.key in by_size[n]]
        overall, last = exponent(points), exponent(points[-2:])
        if overall is not None and last is not None:
            found[row.key] = (overall, last)
    return found


def growth_table(rows: Sequence[Row], by_size: Mapping[int, Figures]) -> list[list[str]]:
    """A header, then a line for each row: one column for each size, and the exponents."""
    sizes, powers = sorted(by_size), exponents(rows, by_size)
    lines = [["", *(f"{size:,}" for size in sizes), "exponent", "of the last two"]]
    for row in rows:
        cells = [_cell(by_size[size].get(row.key), row) for size in sizes]
        power = [f"{each:.2f}" for each in powers.get(row.key, ())] or ["", ""]
        lines.append([row.label, *cells, *power])
    return lines


def value_table(rows: Sequence[Row], figures: Figures) -> list[list[str]]:
    """A header, then a line for each row."""
    return [["", "value"], *([row.label, _cell(figures.get(row.key), row)] for row in rows)]


def report(
    title: str, where: Mapping[str, object], tables: Sequence[Sequence[Sequence[str]]]
) -> str:
    """A page in Markdown: where the figures come from, and the tables."""
    facts = ", ".join(f"{name} {value}" for name, value in where.items())
    return f"# {title}\n\n{facts}\n\n" + "\n\n".join(map(markdown, tables)) + "\n"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line is its header, numbers are on the right."""
    head, *rows = lines
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _cell(value: float | None, row: Row) -> str:
    return "" if value is None else f"{value:,.{row.decimals}f}"
