"""The functions of a scan that Spark's workers run."""

# Workers import the module of the function that they run.  So this module and `suspect_job` import
# what a scan needs, and nothing for records, tables and reports.
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from magnetar.spark.audit.scan import AuditedRange, scan
from magnetar.spark.options import Connection
from magnetar.spark.range_facts import NO_ROWS, SeenRange, SeenTransaction, Tally

__all__ = [
    "SegmentTally",
    "ScannedRange",
    "count_readable",
    "readable_of",
    "scan_raw",
    "transactions_of",
    "without_transactions",
]

ScannedRange = tuple[AuditedRange, SeenRange]
SegmentTally = tuple[int, Tally]
"""A segment, and rows of it."""


def scan_raw(connection: Connection, part: AuditedRange) -> ScannedRange:
    """Scan a range raw."""
    _keep_imports(os.getpid())
    return part, scan(connection, part)


def count_readable(connection: Connection, part: AuditedRange) -> SegmentTally:
    """Scan a range as consumers read it; the count of its rows."""
    return readable_of((part, scan(connection, part, raw=False)))


def without_transactions(found: ScannedRange) -> ScannedRange:
    """A scanned range without its transactions, which the driver does not collect."""
    part, seen = found
    return part, replace(seen, transactions={})


def transactions_of(found: ScannedRange) -> Iterator[tuple[tuple[int, str], SeenTransaction]]:
    """The transactions of a range, keyed by segment and transaction for `reduceByKey`."""
    for txn, seen in found[1].transactions.items():
        yield (seen.segment_id, txn), seen


def readable_of(found: ScannedRange) -> SegmentTally:
    """The rows of a range that consumers should get: those up to the cut's max read position."""
    part, seen = found
    total = NO_ROWS
    if part.readable:
        for each in seen.transactions.values():
            total = total.plus(each.readable)
    return part.segment_id, total


@lru_cache(maxsize=1)
def _keep_imports(pid: int) -> None:
    """Exclude the objects of a process so far from its garbage collection, once."""
    # A worker collects garbage after each task, and would search all of its imports each time.
    gc.collect()
    gc.freeze()
