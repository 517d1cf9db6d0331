"""`python -m bench`: Magnetar beside Apache Pulsar, in one run, with the same official client.

Rules: brokers run one after the other on this machine; figures are medians after a warm-up; the
result is a table, and JSON in `build/bench/latest.json`. There is no pass mark.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.measures import (
    Effort,
    Results,
    generator_limit,
    idle_memory,
    raw_sends,
    start_ms,
    stock_client,
)
from bench.report import print_table
from bench.transactions import transactions
from tests.java import stock_driver
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.peer_process import PeerProcess, resolve_jars
from tests.java.stock_driver import StockDriver
from tests.support.broker_process import ROOT
from tests.support.child_process import free_port

OUTPUT: Final = ROOT / "build" / "bench" / "latest.json"
BROKERS: Final = ("magnetar", "peer")
MEASURES: Final = ("start", "idle", "stock", "raw", "transactions")


def magnetar(directory: Path) -> BrokerUnderTest:
    """A Magnetar on an empty directory."""
    return MagnetarProcess(Path(tempfile.mkdtemp(dir=directory)))


def peer(directory: Path) -> BrokerUnderTest:
    """A peer without data."""
    process = PeerProcess(free_port(), free_port())
    process.wipe()
    return process


MAKERS: Final[dict[str, Callable[[Path], BrokerUnderTest]]] = {"magnetar": magnetar, "peer": peer}


@contextmanager
def running(broker: BrokerUnderTest) -> Iterator[BrokerUnderTest]:
    """The broker, started, and stopped at the end; killed if something fails."""
    try:
        broker.start()
        yield broker
        broker.stop()
    finally:
        broker.kill()


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(name: str, measures: set[str], effort: Effort, directory: Path) -> Results:
    """All chosen figures of one broker."""
    results: Results = {}
    if "start" in measures:
        say(f"{name}: start")
        results |= start_ms(lambda: MAKERS[name](directory), effort.starts)
    if not measures - {"start"}:
        return results
    with running(MAKERS[name](directory)) as broker:
        if "idle" in measures:
            say(f"{name}: idle memory")
            results |= idle_memory(broker)
        for measure_name, what, take in (
            ("stock", "official client", stock_client),
            ("transactions", "transactions", transactions),
        ):
            if measure_name not in measures:
                continue
            say(f"{name}: {what}")
            driver = StockDriver(heap="1g", optimized=True)
            try:
                results |= take(broker, driver, effort)
            finally:
                driver.close()
        if "raw" in measures:
            say(f"{name}: raw generator")
            results |= raw_sends(broker, effort)
    return results


def machine() -> dict[str, object]:
    """Where the figures come from."""
    return {
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", choices=BROKERS, help="measure one broker")
    parser.add_argument("--measure", choices=MEASURES, action="append", help="measure only this")
    parser.add_argument("--quick", action="store_true", help="short runs: shows that it works")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"JSON, {OUTPUT} by default")
    options = parser.parse_args()
    effort = Effort.quick() if options.quick else Effort()
    measures = set(options.measure or MEASURES)
    names = (options.only,) if options.only else BROKERS
    missing = stock_driver.missing_tools()
    stock = bool(measures & {"stock", "transactions"})
    if missing and (stock or "peer" in names):
        print(
            f"bench: {missing}: install JDK 17 and Maven, or use --only magnetar", file=sys.stderr
        )
        return 2
    if stock:
        stock_driver.build()
    if "peer" in names:
        resolve_jars()
    where = machine()
    limit = generator_limit(effort) if "raw" in measures else None
    # Beside the peer's data, so that both write to the same disk.
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="magnetar-", dir=OUTPUT.parent))
    try:
        results = {name: measure(name, measures, effort, directory) for name in names}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": where, "generator_limit_per_s": limit, "results": results}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print_table(results, limit)
    print(f"as JSON: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
