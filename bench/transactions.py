"""Transactions through the stock client: rate, commit latency, visibility, cost of the end.

Rules: as for every measure (`bench.measures`). The rate is taken in two forms, for they differ by
much: batched on one segment, where ten sends are mostly one entry, and each message alone over four
segments. Visibility and the end are measured one transaction at a time, in the second form.
"""

import statistics
from functools import partial
from typing import Final

from bench.measures import Effort, Results, run_case
from bench.processes import processor_s
from tests.stock.broker_under_test import BrokerUnderTest
from tests.stock.stock_driver import StockDriver

OPERATIONS: Final = (1, 100, 10_000)
MANY: Final = 10_000
FORMS: Final = (("batched", 1, True), ("single", 4, False))
"""Name, segments, batching."""


def transactions(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """Every figure about transactions of one broker."""
    case = partial(run_case, broker, driver, effort)
    results: Results = {}
    for form, segments, batching in FORMS:
        used = processor_s(broker.pid)
        facts = case(
            "bench_transactions",
            sends=10,
            concurrent=32,
            seconds=effort.transactions_s,
            segments=segments,
            batching=batching,
        )
        used = processor_s(broker.pid) - used
        results |= {
            f"{form}_transactions_per_s": statistics.median(facts["transactions_per_s"]),
            f"{form}_transactions_broker_cores": used / sum(facts["seconds"]),
            f"{form}_commit_p50_ms": statistics.median(facts["commit_p50_ms"]),
            f"{form}_commit_p99_ms": statistics.median(facts["commit_p99_ms"]),
        }
    facts = case("bench_visibility", sends=10, rounds=effort.commits)
    results["visible_p50_ms"] = facts["visible_p50_ms"]
    results["visible_p99_ms"] = facts["visible_p99_ms"]
    for operations in OPERATIONS:
        warmups = 1 if operations == MANY else 5
        facts = case("bench_end", operations=operations, warmups=warmups)
        results[f"end_{operations}_ms"] = statistics.median(facts["end_ms"])
    return results
