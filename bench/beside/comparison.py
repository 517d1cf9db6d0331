"""What figures of alternating rounds say: medians, spreads, and ratios pair by pair.

Rules: pure.  A pair is two figures of one round; a ratio is the first by the second.  Rates are
better when they are higher, all else when it is lower.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.report import Row

Figures = Mapping[str, Mapping[str, float]]
"""The figures of one round by side."""


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest."""

    median: float
    low: float
    high: float

    def text(self, decimals: int) -> str:
        """`median (low..high)`."""
        low, high = f"{self.low:,.{decimals}f}", f"{self.high:,.{decimals}f}"
        return f"{self.median:,.{decimals}f} ({low}..{high})"


@dataclass(frozen=True)
class Ratio:
    """The ratio of two sides: its spread over pairs, and in how many the first was better."""

    spread: Spread
    better: int
    pairs: int

    def cells(self) -> tuple[str, str]:
        """`median (low..high)`, and `n of m`."""
        return self.spread.text(3), f"{self.better} of {self.pairs}"


@dataclass(frozen=True)
class Line:
    """One line of the table: a figure of each side, and its ratios."""

    row: Row
    sides: Mapping[str, Spread]
    ratios: Mapping[str, Ratio]


def order(sides: Sequence[str], number: int) -> list[str]:
    """Return the sides in the order of a round: A B, B A, A B, ..., so that drift cancels."""
    return list(sides) if number % 2 == 0 else list(reversed(sides))


def spread(figures: Sequence[float]) -> Spread | None:
    """Return the spread of the figures; None if there are none."""
    if not figures:
        return None
    return Spread(statistics.median(figures), min(figures), max(figures))


def is_rate(row: Row) -> bool:
    """Tell whether a higher figure is better."""
    return row.unit.endswith("/s")


def ratio(row: Row, rounds: Sequence[Figures], first: str, second: str) -> Ratio | None:
    """Return the ratio over the rounds that have both figures; None if there is no such round."""
    ratios = []
    for figures in rounds:
        mine, other = (figures.get(side, {}).get(row.key) for side in (first, second))
        if mine and other:
            ratios.append(mine / other)
    found = spread(ratios)
    if found is None:
        return None
    better = sum(each > 1 if is_rate(row) else each < 1 for each in ratios)
    return Ratio(found, better, len(ratios))


def lines(
    rows: Sequence[Row], rounds: Sequence[Figures], sides: Sequence[str], first: str
) -> list[Line]:
    """Make a line for each figure that was measured, with ratios of `first` by each other side."""
    found = []
    for row in rows:
        spreads = {}
        for side in sides:
            taken = [of[side][row.key] for of in rounds if row.key in of.get(side, {})]
            if (of_side := spread(taken)) is not None:
                spreads[side] = of_side
        ratios = {
            side: of_pairs
            for side in sides
            if side != first and (of_pairs := ratio(row, rounds, first, side)) is not None
        }
        if spreads:
            found.append(Line(row, spreads, ratios))
    return found


def table_of(found: Sequence[Line], sides: Sequence[str], first: str, title: str) -> Table:
    """Make the table that people are shown."""
    others = [side for side in sides if side != first]
    table = Table(title=title)
    table.add_column("median (least..greatest)")
    table.add_column("unit")
    for side in sides:
        table.add_column(side, justify="right")
    for side in others:
        table.add_column(f"{first} by {side}", justify="right")
        table.add_column("better in", justify="right")
    for line in found:
        figures = [
            line.sides[side].text(line.row.decimals) if side in line.sides else "-"
            for side in sides
        ]
        ratios: list[str] = []
        for side in others:
            ratios += line.ratios[side].cells() if side in line.ratios else ("-", "-")
        table.add_row(line.row.label, line.row.unit, *figures, *ratios)
    return table
