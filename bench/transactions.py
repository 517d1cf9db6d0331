"""Transactions through the stock client: rate, commit latency, visibility, cost of the end.

Rules: as for every measure (`bench.measures`); one scalable topic with four segments, no batching;
the client is the same process for all of it, and has its classes warm before the first figure.
"""

import statistics
from typing import Final

from bench.measures import CASE_TIMEOUT_S, Effort, Results
from bench.processes import processor_s
from tests.stock.broker_under_test import BrokerUnderTest
from tests.stock.stock_driver import Facts, StockDriver

OPERATIONS: Final = (1, 100, 10_000)
MANY: Final = 10_000


def transactions(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """Every figure about transactions of one broker."""

    def case(name: str, **args: object) -> Facts:
        started = driver.start(
            name, broker.url, broker.admin_url, timeoutS=CASE_TIMEOUT_S, runs=effort.runs, **args
        )
        return started.result(CASE_TIMEOUT_S)

    used = processor_s(broker.pid)
    facts = case("bench_transactions", sends=10, concurrent=32, seconds=effort.transactions_s)
    used = processor_s(broker.pid) - used
    results: Results = {
        "transactions_per_s": statistics.median(facts["transactions_per_s"]),
        "transactions_broker_cores": used / ((effort.runs + 1) * effort.transactions_s),
        "commit_p50_ms": statistics.median(facts["commit_p50_ms"]),
        "commit_p99_ms": statistics.median(facts["commit_p99_ms"]),
    }
    facts = case("bench_visibility", sends=10, rounds=effort.commits)
    results["visible_p50_ms"] = facts["visible_p50_ms"]
    results["visible_p99_ms"] = facts["visible_p99_ms"]
    for operations in OPERATIONS:
        warmups = 1 if operations == MANY else 5
        facts = case("bench_end", operations=operations, warmups=warmups)
        results[f"end_{operations}_ms"] = statistics.median(facts["end_ms"])
    return results
