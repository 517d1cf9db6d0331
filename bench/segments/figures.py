"""The figures as tables in Markdown, with exponents against the number of segments.  Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Figures = Mapping[str, float]
"""Values of one run by the keys of rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its key, its description with the unit, and how many decimals are printed."""

    key: str
    label: str
    decimals: int = 1


BY_SEGMENTS: Final = (
    Row("create_ms", "creation over REST, ms"),
    Row("lookup_ms", "lookup: the first layout of a session, ms"),
    Row("push_bytes", "push of a layout, bytes", 0),
    Row("split_ms", "split, until it is answered, ms"),
    Row("split_pushed_ms", "split, until a connected client has the layout, ms"),
    Row("merge_ms", "merge of two, until it is answered, ms"),
    Row("merge_pushed_ms", "merge of two, until a connected client has the layout, ms"),
    Row("push_100_ms", "split, until 100 sessions of one client have it, ms"),
    Row("loaded_ms", "first lookup after a restart, ms"),
    Row("registered_ms", "ordered consumer: its assignment, ms"),
    Row("attached_ms", "ordered consumer: attached to every segment, ms"),
    Row("attached_again_ms", "ordered consumer: attached again after a lost connection, ms"),
    Row("lost_ms", "longest PING of another client while that connection is closed, ms"),
    Row("memory_kib", "one topic in memory, watched and with an ordered consumer, KiB"),
    Row("evaluation_ms", "one evaluation of the scaling policy, ms", 2),
    Row("idle_cpu_ms", "processor time per minute at rest, attached, ms", 0),
)
AT_REST: Final = (
    Row("topics", "scalable topics of one segment, each watched by a session", 0),
    Row("topic_kib", "resident memory of one topic, KiB", 2),
    Row("resident_mib", "resident memory of the broker, MiB", 0),
    Row("idle_cpu_ms", "processor time per minute at rest, ms", 0),
    Row("empty_cpu_ms", "the same of a broker without topics, ms", 0),
    Row("start_ms", "start with these topics stored, ms", 0),
    Row("empty_start_ms", "start without topics, ms", 0),
    Row("first_lookup_ms", "first lookup after that start, ms"),
    Row("restart_resident_mib", "resident memory after that start, MiB", 0),
)


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


def exponents(by_segments: Mapping[int, Figures]) -> dict[str, tuple[float, float]]:
    """The exponents of each row: over all sizes, and over the two largest."""
    sizes = sorted(by_segments)
    found: dict[str, tuple[float, float]] = {}
    for row in BY_SEGMENTS:
        points = [(n, by_segments[n][row.key]) for n in sizes if row.key in by_segments[n]]
        overall, last = exponent(points), exponent(points[-2:])
        if overall is not None and last is not None:
            found[row.key] = (overall, last)
    return found


def segments_table(by_segments: Mapping[int, Figures]) -> list[list[str]]:
    """A header, then a line for each row: one column for each size, and the exponents."""
    sizes, powers = sorted(by_segments), exponents(by_segments)
    lines = [["", *(f"{size:,}" for size in sizes), "exponent", "of the last two"]]
    for row in BY_SEGMENTS:
        cells = [_cell(by_segments[size].get(row.key), row) for size in sizes]
        power = [f"{each:.2f}" for each in powers.get(row.key, ())] or ["", ""]
        lines.append([row.label, *cells, *power])
    return lines


def rest_table(at_rest: Figures) -> list[list[str]]:
    """A header, then a line for each row."""
    return [
        ["", "value"],
        *([row.label, _cell(at_rest.get(row.key), row)] for row in AT_REST),
    ]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line is its header, numbers are on the right."""
    head, *rows = lines
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _cell(value: float | None, row: Row) -> str:
    return "" if value is None else f"{value:,.{row.decimals}f}"
