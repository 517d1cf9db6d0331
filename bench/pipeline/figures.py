"""The measurements of the pipeline as tables for people."""

import statistics

from rich.console import Console
from rich.table import Table

from bench.pipeline import audit_scan, shapes, streams


def print_shapes(title: str, figures: shapes.Figures) -> None:
    """Medians with their range, and the ratios that have goals."""
    table = _table(title, "", "rows/s", "least", "most", "load")
    medians = {shape: statistics.median(each["rows_per_s"]) for shape, each in figures.items()}
    for shape, each in figures.items():
        rates = each["rows_per_s"]
        load = statistics.median(each["load_before"])
        cells = (medians[shape], min(rates), max(rates))
        table.add_row(shape, *(f"{cell:,.0f}" for cell in cells), f"{load:.1f}")
    console = Console()
    console.print(table)
    for first, second, goal in shapes.RATIOS:
        if first in medians and second in medians:
            ratio = medians[first] / medians[second]
            console.print(f"{first} by {second}: {ratio:.2f} {f'({goal})' if goal else ''}")


def print_catch_up(title: str, figures: streams.CatchUp) -> None:
    """Of each way to catch up."""
    table = _table(title, "", "rows/s", "least", "most", "batches")
    for name, each in figures.items():
        rates = each["rows_per_s"]
        cells = (statistics.median(rates), min(rates), max(rates), each["batches"][-1])
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
    Console().print(table)


def print_visible(title: str, figures: dict[str, float]) -> None:
    """Milliseconds."""
    table = _table(title, "", "ms")
    for name, value in figures.items():
        table.add_row(name.removesuffix("_ms"), f"{value:,.1f}")
    Console().print(table)


def print_audits(figures: audit_scan.Figures) -> None:
    """Of each size, also as a part of the rate of the smallest; MiB: of a worker, at most."""
    table = _table("audit", "rows", "rows/s", "without start", "least", "most", "", "s", "MiB")
    rates = {
        rows: statistics.median(each["without_start_rows_per_s"]) for rows, each in figures.items()
    }
    base = rates[min(rates)]
    for rows, each in figures.items():
        table.add_row(
            f"{rows:,}",
            f"{statistics.median(each['rows_per_s']):,.0f}",
            f"{rates[rows]:,.0f}",
            f"{min(each['without_start_rows_per_s']):,.0f}",
            f"{max(each['without_start_rows_per_s']):,.0f}",
            f"{rates[rows] / base:.2f}",
            f"{statistics.median(each['audit_s']):,.1f}",
            f"{each['worker_mib'][0]:,.0f}",
        )
    Console().print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
