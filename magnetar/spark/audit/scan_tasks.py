"""The functions of a scan that Spark's workers run.

Rules:

- Workers import the module of what they run: this one and `suspect_job` import what a scan needs,
  and nothing of records, tables and reports.
- A worker looks for garbage after each task, in all that it has ever imported.  That is none, so
  what is there before its first scan is left out of the search.
"""

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from magnetar.spark.audit.scan import AuditedRange, scan
from magnetar.spark.options import Connection
from magnetar.spark.range_facts import NO_ROWS, SeenRange, SeenTransaction, Tally

__all__ = [
    "Counted",
    "Scanned",
    "counted",
    "readable_of",
    "scanned",
    "transactions_of",
    "without_transactions",
]

Scanned = tuple[AuditedRange, SeenRange]
Counted = tuple[int, Tally]
"""A segment, and rows of it."""


def scanned(connection: Connection, part: AuditedRange) -> Scanned:
    """Scan a range raw."""
    _keep_imports(os.getpid())
    return part, scan(connection, part)


def counted(connection: Connection, part: AuditedRange) -> Counted:
    """Scan a range as consumers read it; its rows."""
    return readable_of((part, scan(connection, part, raw=False)))


def without_transactions(found: Scanned) -> Scanned:
    """A scanned range without its transactions, which the driver does not collect."""
    part, seen = found
    return part, replace(seen, transactions={})


def transactions_of(found: Scanned) -> Iterator[tuple[tuple[int, str], SeenTransaction]]:
    """The transactions of a range, keyed by segment and transaction for `reduceByKey`."""
    for txn, seen in found[1].transactions.items():
        yield (seen.segment_id, txn), seen


def readable_of(found: Scanned) -> Counted:
    """The rows of a range that consumers should get: those up to the cut's max read position."""
    part, seen = found
    total = NO_ROWS
    if part.readable:
        for each in seen.transactions.values():
            total = total.plus(each.readable)
    return part.segment_id, total


@lru_cache(maxsize=1)
def _keep_imports(pid: int) -> None:
    """Once in each process: what is there now is not looked through any more."""
    gc.collect()
    gc.freeze()
