"""Transactions through the official client: rate, commit latency, visibility, cost of the end.

Rules: as for every measure (`bench.measures`). The rate is taken in two forms, for they differ by
much: batched on one segment, where ten sends are mostly one entry, and each message alone over four
segments. Visibility and the end are measured one transaction at a time, in the second form.
"""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from bench.measures import Effort, Results, run_case
from bench.processes import processor_s
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.stock_driver import StockDriver

MANY: Final = 10_000


def transactions(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """Every figure about transactions of one broker."""
    results: Results = {}
    for case in CASES.values():
        results |= case(broker, driver, effort)
    return results


def _rate(
    form: str,
    segments: int,
    batching: bool,
    broker: BrokerUnderTest,
    driver: StockDriver,
    effort: Effort,
) -> Results:
    used = processor_s(broker.pid)
    facts = run_case(
        broker,
        driver,
        effort,
        "bench_transactions",
        sends=10,
        concurrent=32,
        seconds=effort.transactions_s,
        segments=segments,
        batching=batching,
    )
    used = processor_s(broker.pid) - used
    return {
        f"{form}_transactions_per_s": statistics.median(facts["transactions_per_s"]),
        f"{form}_transactions_broker_cores": used / sum(facts["seconds"]),
        f"{form}_transactions_processor_ms": used * 1000 / facts["committed"],
        f"{form}_commit_p50_ms": statistics.median(facts["commit_p50_ms"]),
        f"{form}_commit_p99_ms": statistics.median(facts["commit_p99_ms"]),
    }


def _visibility(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    facts = run_case(broker, driver, effort, "bench_visibility", sends=10, rounds=effort.commits)
    return {
        "visible_p50_ms": facts["visible_p50_ms"],
        "visible_p99_ms": facts["visible_p99_ms"],
    }


def _end(operations: int, broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    warmups = 1 if operations == MANY else 5
    facts = run_case(broker, driver, effort, "bench_end", operations=operations, warmups=warmups)
    return {f"end_{operations}_ms": statistics.median(facts["end_ms"])}


Case = Callable[[BrokerUnderTest, StockDriver, Effort], Results]

CASES: Final[Mapping[str, Case]] = {
    "transactions, batched": partial(_rate, "batched", 1, True),
    "commit to visible": _visibility,
    "commit of 1 send": partial(_end, 1),
    "commit of 100 sends": partial(_end, 100),
    "commit of 10,000 sends": partial(_end, MANY),
    "transactions, single": partial(_rate, "single", 4, False),
}
"""Each measures something by itself; they are run in this order."""
