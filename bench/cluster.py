"""`python -m bench.cluster`: brokers on three real bookies and a real ZooKeeper server.

Two tables.  The first: one Magnetar broker beside one of Apache Pulsar, one after the other on the
same bookies, with the same official client.  The second: what a message and a transaction cost with
1, 8 and 64 segments over 1, 2 and 3 Magnetar brokers; transactions with so many open at once in
all, and with so many for each broker, for what waits together is written together.

Rules: as for `python -m bench`, but a transaction case that fails on the peer is told and left
out, and the next one runs on a new broker: with metadata on ZooKeeper the peer's sends in
transactions may not get through, and after that it answers no transaction at all.  Bookies have the
memory of `BOOKIE_PROCESS`; every broker, or set of brokers, has metadata of its own.  Several
brokers share this machine's processors, so processor time tells what they cost, and rates do not:
they are shown since a transaction costs more where fewer are under way, as what waits together is
written together.  With `--oxia` the second table is taken on that server.  Operations and processor
time are counted until what transactions left is cleaned up; what the brokers use at rest is told by
itself, and taken off.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
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
from tests.java import stock_driver
from tests.java.peer_process import resolve_jars
from tests.java.stock_driver import CaseFailed, StockDriver
from tests.servers.bookie_part import BookieProcess
from tests.servers.ground import Ground, new_ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess
from tests.support.empty_oxia import empty_oxia

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
READS: Final = "magnetar_metadata_reads_total"
"""Keys and scans asked for, and what watches told, for which the store is read too."""
OPEN_AT_ONCE: Final = 32
"""Transactions."""
RESTING: Final = 10
"""Operations in SETTLING_S that are no transaction's."""
SETTLING_S: Final = 2.0
SETTLED_TIMEOUT_S: Final = 120
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
    oxia: str | None = None
    """`host:port` of the server for metadata of brokers, instead of ZooKeeper."""

    @property
    def store_name(self) -> str:
        """Where brokers have their metadata."""
        return "ZooKeeper" if self.oxia is None else "Oxia"

    def metadata_store(self) -> str:
        """URL of an empty place for the metadata of brokers."""
        if self.oxia is None:
            return self.ground.metadata_store()
        asyncio.run(empty_oxia(self.oxia))
        return f"oxia://{self.oxia}/default"

    def zookeeper_packets(self) -> tuple[float, float]:
        """Requests that ZooKeeper got so far, and events of watches that it sent."""
        answer = asyncio.run(self.ground.zookeeper.ask("srvr"))
        counters = dict(line.split(": ", 1) for line in answer.splitlines() if ": " in line)
        requests, sent = float(counters["Received"]), float(counters["Sent"])
        return requests, sent - requests  # each request has one answer

    def magnetar(self, count: int) -> BrokerCluster:
        """Brokers that share an empty metadata store, and the bookies."""
        settings = {
            "metadata_store_url": self.metadata_store(),
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
def new_site(oxia: str | None = None) -> Iterator[Site]:
    """ZooKeeper and three bookies, beside each other on one disk; gone at the end."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="cluster-", dir=OUTPUT.parent))
    try:
        with new_ground(directory, BOOKIE_SETTINGS, BOOKIE_PROCESS) as ground:
            yield Site(ground, directory, oxia)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def serving(brokers: Served) -> Iterator[StockDriver]:
    """The brokers run, and a official client of their own is at hand."""
    driver: StockDriver | None = None
    try:
        brokers.start()
        driver = StockDriver(heap="1g", optimized=True)
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
        _settle(cluster.brokers)
        in_all = _transaction_costs(site, cluster, driver, effort, segments, OPEN_AT_ONCE)
        for_each = in_all
        if brokers > 1:
            concurrent = OPEN_AT_ONCE * brokers
            for_each = _transaction_costs(site, cluster, driver, effort, segments, concurrent)
        return in_all | {
            "processor_s_per_million": used * 1_000_000,
            "processor_ms_per_transaction_of_more": for_each["processor_ms_per_transaction"],
            "moved": _moved(cluster.brokers) - moved,
        }


def _transaction_costs(
    site: Site,
    cluster: BrokerCluster,
    driver: StockDriver,
    effort: Effort,
    segments: int,
    concurrent: int,
) -> Results:
    """What a transaction costs with so many open at once; nothing else is under way."""
    brokers = cluster.brokers
    writes, reads, used = _metric(brokers, WRITES), _metric(brokers, READS), _processor_s(brokers)
    (requests, events), began_s = site.zookeeper_packets(), time.monotonic()
    facts = run_case(
        cluster,
        driver,
        effort,
        "bench_transactions",
        sends=10,
        concurrent=concurrent,
        seconds=effort.transactions_s,
        segments=segments,
        batching=True,
    )
    cores_at_rest = _settle(brokers)
    used = _processor_s(brokers) - used - cores_at_rest * (time.monotonic() - began_s)
    requests_now, events_now = site.zookeeper_packets()
    return {
        "processor_ms_per_transaction": used * 1000 / facts["committed"],
        "writes_per_transaction": (_metric(brokers, WRITES) - writes) / facts["committed"],
        "reads_per_transaction": (_metric(brokers, READS) - reads) / facts["committed"],
        "requests_per_transaction": (requests_now - requests) / facts["committed"],
        "events_per_transaction": (events_now - events) / facts["committed"],
        "transactions_per_s": statistics.median(facts["transactions_per_s"]),
        "cores_at_rest": cores_at_rest,
    }


def _processor_s(brokers: list[BrokerProcess]) -> float:
    return sum(processor_s(each.pid) for each in brokers)


def _moved(brokers: list[BrokerProcess]) -> float:
    return _metric(brokers, *MOVES)


def _settle(brokers: list[BrokerProcess]) -> float:
    """Return when what transactions left is cleaned up; processors that brokers use at rest."""
    deadline_s = time.monotonic() + SETTLED_TIMEOUT_S
    done = _metric(brokers, WRITES, READS)
    while time.monotonic() < deadline_s:
        began_s, used, before = time.monotonic(), _processor_s(brokers), done
        time.sleep(SETTLING_S)
        done = _metric(brokers, WRITES, READS)
        if done - before < RESTING:
            return (_processor_s(brokers) - used) / (time.monotonic() - began_s)
    raise TimeoutError(f"Metadata operations went on for {SETTLED_TIMEOUT_S} s: look why.")


def _metric(brokers: list[BrokerProcess], *names: str) -> float:
    """The sum of these metrics over the brokers."""
    told = tuple(f"{name}{end}" for name in names for end in "{ ")
    total = 0.0
    for each in brokers:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{each.http_port}/metrics", timeout=30
        ) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(told):
                    total += float(line.split()[-1])
    return total


def print_costs(results: list[tuple[int, int, Results]], store_name: str) -> None:
    """One row for each number of segments and brokers."""
    table = Table(title=f"What it costs over several brokers (3 bookies, {store_name})")
    for name in (
        "segments",
        "brokers",
        "processor s per million messages",
        "processor ms per txn",
        f"with {OPEN_AT_ONCE} for each",
        "cores at rest",
        "metadata writes per txn",
        "metadata reads per txn",
        "ZooKeeper requests per txn",
        "watch events per txn",
        "txn per s",
        "moved leaders",
    ):
        table.add_column(name, justify="right")
    for segments, brokers, figures in results:
        table.add_row(
            str(segments),
            str(brokers),
            f"{figures['processor_s_per_million']:.1f}",
            f"{figures['processor_ms_per_transaction']:.2f}",
            f"{figures['processor_ms_per_transaction_of_more']:.2f}",
            f"{figures['cores_at_rest']:.3f}",
            f"{figures['writes_per_transaction']:.2f}",
            f"{figures['reads_per_transaction']:.2f}",
            f"{figures['requests_per_transaction']:.2f}",
            f"{figures['events_per_transaction']:.2f}",
            f"{figures['transactions_per_s']:.0f}",
            f"{figures['moved']:.0f}",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs: shows that it works")
    parser.add_argument("--only", choices=("beside", "costs"), help="one of the two tables")
    parser.add_argument(
        "--segments", type=int, nargs="+", default=SEGMENTS, help="rows of the costs"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("cluster.json"))
    parser.add_argument(
        "--oxia",
        metavar="HOST:PORT",
        help="for the costs, metadata on this Oxia server (0.14.4 or newer), whose namespace "
        "`default` is EMPTIED",
    )
    options = parser.parse_args()
    if options.oxia is not None and options.only != "costs":
        parser.error("--oxia is for the costs: give --only costs too")
    effort = Effort.quick() if options.quick else Effort()
    missing = stock_driver.missing_tools()
    if missing:
        print(f"bench: {missing}: install JDK 17 and Maven", file=sys.stderr)
        return 2
    stock_driver.build()
    resolve_jars()
    document: dict[str, object] = {"machine": machine()}
    try:
        with new_site(options.oxia) as site:
            measure(site, effort, options, document)
    finally:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"as JSON: {options.output}")
    return 0


def measure(
    site: Site, effort: Effort, options: argparse.Namespace, document: dict[str, object]
) -> None:
    """The tables asked for, printed; the document has what was measured when something fails."""
    if options.only != "costs":
        beside, failures = side_by_side(site, effort)
        document |= {"beside": beside, "failures": failures}
        print_table(beside, None)
        for remark in (*failures, *early(beside)):
            print(remark)
    if options.only != "beside":
        rows: list[tuple[int, int, Results]] = []
        document["costs"] = rows
        rows.extend(
            (segments, brokers, costs(site, effort, brokers, segments))
            for segments, brokers in product(options.segments, BROKERS)
        )
        print_costs(rows, site.store_name)


if __name__ == "__main__":
    sys.exit(main())
