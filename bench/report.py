"""The result as a table for people; ratios are Magnetar by the peer, with no pass mark."""

from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.measures import Results


@dataclass(frozen=True)
class Row:
    """One figure: its name, what it is, its unit, and how many decimals are worth printing."""

    key: str
    label: str
    unit: str
    decimals: int = 0


ROWS: Final = (
    Row("start_ms", "start to first served connection", "ms"),
    Row("idle_rss_mib", "idle memory (RSS)", "MiB"),
    Row("batched_messages_per_s", "publish + consume 1 KB, batched", "messages/s"),
    Row("batched_broker_cores", "  broker's processor use", "cores", 2),
    Row("single_messages_per_s", "publish + consume 1 KB, not batched", "messages/s"),
    Row("single_broker_cores", "  broker's processor use", "cores", 2),
    Row("send_p50_us", "awaited send, p50", "us"),
    Row("send_p99_us", "awaited send, p99", "us"),
    Row("batched_transactions_per_s", "10 sends batched, 32 at once", "transactions/s"),
    Row("batched_transactions_broker_cores", "  broker's processor use", "cores", 2),
    Row("batched_commit_p50_ms", "  commit under it, p50", "ms", 2),
    Row("batched_commit_p99_ms", "  commit under it, p99", "ms", 2),
    Row(
        "single_transactions_per_s",
        "10 sends single, 32 at once",
        "transactions/s",
    ),
    Row("single_transactions_broker_cores", "  broker's processor use", "cores", 2),
    Row("single_commit_p50_ms", "  commit under it, p50", "ms", 2),
    Row("single_commit_p99_ms", "  commit under it, p99", "ms", 2),
    Row("visible_p50_ms", "commit to visible, p50", "ms", 2),
    Row("visible_p99_ms", "commit to visible, p99", "ms", 2),
    Row("end_1_ms", "commit of 1 send", "ms", 2),
    Row("end_100_ms", "commit of 100 sends", "ms", 2),
    Row("end_10000_ms", "commit of 10,000 sends", "ms", 2),
    Row("raw_sends_per_s", "raw unbatched 1 KB sends, window 1,000", "sends/s"),
    Row("raw_broker_cores", "  broker's processor use", "cores", 2),
    Row("peak_rss_mib", "peak memory over all of it", "MiB"),
)


def print_table(results: dict[str, Results], generator_limit: float | None) -> None:
    """Every figure of every broker, and the ratio when there are two."""
    table = Table(title="Magnetar beside Apache Pulsar 5.0.0-M1")
    table.add_column("")
    table.add_column("unit")
    for name in results:
        table.add_column(name, justify="right")
    both = len(results) == 2
    if both:
        table.add_column("ratio", justify="right")
    for row in ROWS:
        figures = [broker.get(row.key) for broker in results.values()]
        if figures.count(None) == len(figures):
            continue  # not measured in this run
        cells = ["-" if figure is None else f"{figure:,.{row.decimals}f}" for figure in figures]
        if both:
            first, second = figures
            cells.append("-" if not first or not second else f"{first / second:.3g}")
        table.add_row(row.label, row.unit, *cells)
    console = Console()
    console.print(table)
    if generator_limit is not None:
        console.print(
            f"The raw generator itself can do {generator_limit:,.0f} sends/s (to a sink)."
        )
