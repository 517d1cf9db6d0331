"""`python -m bench.cluster`: brokers on three real bookies and a real ZooKeeper server.

Two tables.  The first: one Magnetar broker beside one of Apache Pulsar, one after the other on the
same bookies, with the same stock client.  The second: what a message and a transaction cost with
1, 8 and 64 segments over 1, 2 and 3 Magnetar brokers.

Rules: as for `python -m bench`, but a transaction case that fails on the peer is told and left
out, and the next one runs on a new broker: with metadata on ZooKeeper the peer's sends in
transactions may not get through, and after that it answers no transaction at all.  Bookies have the
memory of `BOOKIE_PROCESS`; every broker, or set of brokers, has metadata of its own.  Rates of
several brokers are not shown: they share this machine's processors, so processor time is.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.table import Table

from bench.__main__ import OUTPUT, machine, say
from bench.measures import Effort, Results, run_case, stock_client
from bench.peer_broker import PeerBroker
from bench.processes import processor_s
from bench.report import print_table
from bench.transactions import CASES, transactions
from tests.parts.bookie_part import BookieProcess
from tests.parts.ground import Ground, new_ground
from tests.stock import stock_driver
from tests.stock.peer_process import resolve_jars
from tests.stock.stock_driver import CaseFailed, StockDriver
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess

SEGMENTS: Final = (1, 8, 64)
BROKERS: Final = (1, 2, 3)
SESSION_TIMEOUT_MS: Final = 10_000
BOOKIE_PROCESS: Final = BookieProcess(heap_mb=512, direct_mb=512)
BOOKIE_SETTINGS: Final = {
    "dbStorage_writeCacheMaxSizeMb": 128,
    "dbStorage_readAheadCacheMaxSizeMb": 128,
    "dbStorage_rocksDB_blockCacheSize": 64 * 1024 * 1024,
    "journalPreAllocSizeMB": 16,
    "logSizeLimit": 1024 * 1024 * 1024,
}
"""What bookies would have of a machine's memory, not what tests leave them: a quarter of the direct
memory for each cache, as is BookKeeper's default, and its journal and entry log files."""
WRITES: Final = "magnetar_metadata_writes_total"
MOVES: Final = (
    "pulsar_lb_unload_bundle_total",
    "pulsar_lb_taken_over_total",
    "magnetar_txn_coordinators_lost_total",
)
"""Topics, segments and controllers moved for balance, or taken over from brokers that ended;
and coordinators given up to others: while the load runs."""


@dataclass(frozen=True)
class Site:
    """What all brokers of a run stand on, and where they keep their logs."""

    ground: Ground
    directory: Path

    def magnetar(self, count: int) -> BrokerCluster:
        """Brokers that share an empty metadata store, and the bookies."""
        settings = {
            "metadata_store_url": self.ground.metadata_store(),
            "bookkeeper_metadata_service_uri": self.ground.bookies.uri,
            "metadata_store_session_timeout_ms": SESSION_TIMEOUT_MS,
            "ledger_ensemble_size": 3,
        }
        return BrokerCluster(Path(tempfile.mkdtemp(dir=self.directory)), settings, count)

    def peer(self) -> PeerBroker:
        """One broker of Apache Pulsar on the same bookies."""
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        return PeerBroker(directory, self.ground.metadata_store(), self.ground.bookies.uri)


class Served(Protocol):
    """What is started and stopped."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...


@contextmanager
def new_site() -> Iterator[Site]:
    """ZooKeeper and three bookies, beside each other on one disk; gone at the end."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="cluster-", dir=OUTPUT.parent))
    try:
        with new_ground(directory, BOOKIE_SETTINGS, BOOKIE_PROCESS) as ground:
            yield Site(ground, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def serving(brokers: Served) -> Iterator[StockDriver]:
    """The brokers run, and a stock client of their own is at hand."""
    driver: StockDriver | None = None
    try:
        brokers.start()
        driver = StockDriver(heap="1g")
        yield driver
        brokers.stop()
    finally:
        if driver is not None:
            driver.close()
        brokers.kill()


def side_by_side(site: Site, effort: Effort) -> tuple[dict[str, Results], list[str]]:
    """One broker each, in turn, on the same bookies; and what the peer could not do."""
    magnetar, peer = site.magnetar(1), site.peer()
    with serving(magnetar) as driver:
        say("magnetar")
        ours = stock_client(magnetar, driver, effort) | transactions(magnetar, driver, effort)
    left = list(CASES)
    with serving(peer) as driver:
        say("peer")
        theirs = stock_client(peer, driver, effort)
        failures = peer_transactions(peer, driver, effort, left, theirs)
    while left:
        peer = site.peer()
        with serving(peer) as driver:
            say("another peer")
            failures += peer_transactions(peer, driver, effort, left, theirs)
    return {"magnetar": ours, "peer": theirs}, failures


def peer_transactions(
    peer: PeerBroker, driver: StockDriver, effort: Effort, left: list[str], results: Results
) -> list[str]:
    """Measure what is `left` until something fails, which is told."""
    while left:
        name = left.pop(0)
        try:
            results |= CASES[name](peer, driver, effort)
        except CaseFailed as error:
            failure = f"peer, {name}: {str(error).splitlines()[0]}"
            say(failure)
            return [failure]
    return []


def early(beside: dict[str, Results]) -> list[str]:
    """Of whom a consumer had messages before their transaction can have ended."""
    return [
        f"{name}: messages came before their commit was answered; that is no time to visible"
        for name, figures in beside.items()
        if 0 < figures.get("visible_p50_ms", 0) < figures.get("end_1_ms", 0) / 2
    ]


def costs(site: Site, effort: Effort, brokers: int, segments: int) -> Results:
    """What messages and transactions cost over all brokers."""
    cluster = site.magnetar(brokers)
    with serving(cluster) as driver:
        say(f"{brokers} brokers, {segments} segments")
        used, moved = _processor_s(cluster.brokers), _moved(cluster.brokers)
        facts = run_case(
            cluster,
            driver,
            effort,
            "bench_throughput",
            batching=True,
            messages=effort.messages_batched,
            segments=segments,
        )
        used = (_processor_s(cluster.brokers) - used) / facts["messages"]
        writes = _metric(cluster.brokers, WRITES)
        facts = run_case(
            cluster,
            driver,
            effort,
            "bench_transactions",
            sends=10,
            concurrent=32,
            seconds=effort.transactions_s,
            segments=segments,
            batching=True,
        )
        writes = _metric(cluster.brokers, WRITES) - writes
        return {
            "processor_s_per_million": used * 1_000_000,
            "writes_per_transaction": writes / facts["committed"],
            "moved": _moved(cluster.brokers) - moved,
            "transactions_per_s": statistics.median(facts["transactions_per_s"]),
        }


def _processor_s(brokers: list[BrokerProcess]) -> float:
    return sum(processor_s(each.pid) for each in brokers)


def _moved(brokers: list[BrokerProcess]) -> float:
    return sum(_metric(brokers, name) for name in MOVES)


def _metric(brokers: list[BrokerProcess], name: str) -> float:
    total = 0.0
    for each in brokers:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{each.http_port}/metrics", timeout=30
        ) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith((f"{name}{{", f"{name} ")):
                    total += float(line.split()[-1])
    return total


def print_costs(results: list[tuple[int, int, Results]]) -> None:
    """One row for each number of segments and brokers."""
    table = Table(title="What it costs over several brokers (3 bookies, ZooKeeper)")
    for name in (
        "segments",
        "brokers",
        "processor s per million messages",
        "metadata writes per transaction",
        "moved leaders",
    ):
        table.add_column(name, justify="right")
    for segments, brokers, figures in results:
        table.add_row(
            str(segments),
            str(brokers),
            f"{figures['processor_s_per_million']:.1f}",
            f"{figures['writes_per_transaction']:.2f}",
            f"{figures['moved']:.0f}",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs: shows that it works")
    parser.add_argument("--only", choices=("beside", "costs"), help="one of the two tables")
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("cluster.json"))
    options = parser.parse_args()
    effort = Effort.quick() if options.quick else Effort()
    missing = stock_driver.missing_tools()
    if missing:
        print(f"bench: {missing}: install JDK 17 and Maven", file=sys.stderr)
        return 2
    stock_driver.build()
    resolve_jars()
    document: dict[str, object] = {"machine": machine()}
    try:
        with new_site() as site:
            measure(site, effort, options.only, document)
    finally:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"as JSON: {options.output}")
    return 0


def measure(site: Site, effort: Effort, only: str | None, document: dict[str, object]) -> None:
    """The tables asked for, printed; the document has what was measured when something fails."""
    if only != "costs":
        beside, failures = side_by_side(site, effort)
        document |= {"beside": beside, "failures": failures}
        print_table(beside, None)
        for remark in (*failures, *early(beside)):
            print(remark)
    if only != "beside":
        rows: list[tuple[int, int, Results]] = []
        document["costs"] = rows
        rows.extend(
            (segments, brokers, costs(site, effort, brokers, segments))
            for segments, brokers in product(SEGMENTS, BROKERS)
        )
        print_costs(rows)


if __name__ == "__main__":
    sys.exit(main())
