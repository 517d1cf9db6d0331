"""`python -m bench.client`: client against client on one Magnetar broker.

Rules: each client is a process of its own, one after the other, on a topic of its own; figures are
medians of the runs after a warm-up.  The client from PyPI knows no scalable topics and no
transactions, so what it can do is done by it and by ours on a `persistent://` topic too.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.__main__ import OUTPUT, machine, magnetar, running, say
from bench.client.work import CONCURRENT, SENDS_IN_TRANSACTION, Work, run_client
from bench.measures import Effort, Results, create_topic, run_case
from bench.processes import peak_resident_mib
from bench.report import Row
from tests.java import stock_driver
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.stock_driver import StockDriver

SCALABLE: Final = "topic://public/default/"
PLAIN: Final = "persistent://public/default/"


ROWS: Final = (
    Row("batched_publish_messages_per_s", "publish 1 KB, batched", "messages/s"),
    Row("batched_messages_per_s", "publish + consume 1 KB, batched", "messages/s"),
    Row("single_messages_per_s", "publish + consume 1 KB, not batched", "messages/s"),
    Row("send_p50_us", "awaited send, p50", "us"),
    Row("send_p99_us", "awaited send, p99", "us"),
    Row(
        "transactions_per_s",
        f"{SENDS_IN_TRANSACTION} sends, {CONCURRENT} at once",
        "transactions/s",
    ),
    Row("commit_p50_ms", "  commit under it, p50", "ms", 1),
    Row("commit_p99_ms", "  commit under it, p99", "ms", 1),
    Row("peak_rss_mib", "peak memory of the client's process", "MiB"),
)

Do = Callable[[Work], Mapping[str, list[float]]]


def measured(broker_url: str, domain: str, do: Do, effort: Effort, *, txn: bool) -> Results:
    """Every figure of one client."""
    results: Results = {"peak_rss_mib": 0.0}

    def one(kind: str, count: int, batching: bool, names: Mapping[str, str]) -> None:
        local = f"bench-{uuid.uuid4().hex[:8]}"
        work = Work(kind, broker_url, domain + local, count, effort.runs, batching)  # type: ignore[arg-type]
        figures = do(work)
        for given, ours in names.items():
            results[ours] = statistics.median(figures[given])
        memory = figures["peak_rss_mib"][0]
        results["peak_rss_mib"] = max(memory, results["peak_rss_mib"])

    rate = "messages_per_s"
    one("publish", effort.messages_batched, True, {rate: "batched_publish_messages_per_s"})
    one("throughput", effort.messages_batched, True, {rate: "batched_messages_per_s"})
    one("throughput", effort.messages_single, False, {rate: "single_messages_per_s"})
    one("latency", effort.sends, False, {"p50_us": "send_p50_us", "p99_us": "send_p99_us"})
    if txn:
        names = ("transactions_per_s", "commit_p50_ms", "commit_p99_ms")
        one("transactions", effort.transactions_s, True, {name: name for name in names})
    return results


def by_process(broker: BrokerUnderTest, module: str) -> Do:
    """A client that is a module of this Python."""

    def do(work: Work) -> Mapping[str, list[float]]:
        if work.topic.startswith(SCALABLE):
            create_topic(broker, work.topic.removeprefix(SCALABLE))
        return run_client(module, work)

    return do


def by_stock_driver(broker: BrokerUnderTest, effort: Effort) -> Do:
    """The official Java client: a process for each work, as the others, on topics that it makes."""

    def do(work: Work) -> Mapping[str, list[float]]:
        cases: dict[str, tuple[str, dict[str, object]]] = {
            "publish": ("bench_throughput", {"messages": work.count, "publishOnly": True}),
            "throughput": ("bench_throughput", {"messages": work.count}),
            "latency": ("bench_latency", {"sends": work.count}),
            "transactions": ("bench_transactions", {"seconds": work.count, "segments": 1}),
        }
        name, given = cases[work.kind]
        driver = StockDriver(heap="1g", optimized=True)
        try:
            facts = run_case(broker, driver, effort, name, batching=work.batching, **given)
            return facts | {"peak_rss_mib": [peak_resident_mib(driver.pid)]}
        finally:
            driver.close()

    return do


def print_clients(results: Mapping[str, Results]) -> None:
    """Every figure of every client, and ours by the others'."""
    table = Table(title="Clients on one Magnetar broker; in brackets: ours by theirs")
    table.add_column("")
    table.add_column("unit")
    for name in results:
        table.add_column(name, justify="right")
    for row in ROWS:
        cells = []
        for name, figures in results.items():
            figure = figures.get(row.key)
            ours = results["ours" if name == "java" else "ours, persistent"].get(row.key)
            if figure is None:
                cells.append("-")
            elif name.startswith("ours") or ours is None:
                cells.append(f"{figure:,.{row.decimals}f}")
            else:
                cells.append(f"{figure:,.{row.decimals}f} ({ours / figure:.3g})")
        table.add_row(row.label, row.unit, *cells)
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.client", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs: shows that it works")
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("client.json"))
    options = parser.parse_args()
    effort = Effort.quick() if options.quick else Effort()
    missing = stock_driver.missing_tools()
    if missing:
        print(f"bench: {missing}: install JDK 17 and Maven", file=sys.stderr)
        return 2
    stock_driver.build()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="magnetar-", dir=OUTPUT.parent))
    results: dict[str, Results] = {}
    try:
        with running(magnetar(directory)) as broker:
            ours = by_process(broker, "bench.client.ours")
            say("java")
            java = by_stock_driver(broker, effort)
            results["java"] = measured(broker.url, SCALABLE, java, effort, txn=True)
            say("ours")
            results["ours"] = measured(broker.url, SCALABLE, ours, effort, txn=True)
            say("ours, persistent")
            results["ours, persistent"] = measured(broker.url, PLAIN, ours, effort, txn=False)
            say("pulsar-client")
            theirs = by_process(broker, "bench.client.pypi")
            results["pulsar-client"] = measured(broker.url, PLAIN, theirs, effort, txn=False)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    document = {"machine": machine(), "results": results}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print_clients(results)
    print(f"as JSON: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
