"""What Spark's workers do of a scan, and what is made of its results where they are.

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

from pipeline.audit.scan import AuditedRange, scan
from pipeline.audit.seen import NO_ROWS, SeenRange, SeenTransaction, Tally
from pipeline.options import Connection

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
    """Everything that is in a range."""
    _keep_imports(os.getpid())
    return part, scan(connection, part)


def counted(connection: Connection, part: AuditedRange) -> Counted:
    """What consumers get of a range."""
    return readable_of((part, scan(connection, part, raw=False)))


def without_transactions(found: Scanned) -> Scanned:
    """What goes with ranges, for the driver."""
    part, seen = found
    return part, replace(seen, transactions={})


def transactions_of(found: Scanned) -> Iterator[tuple[tuple[int, str], SeenTransaction]]:
    """By segment and transaction, to be put together."""
    for txn, seen in found[1].transactions.items():
        yield (seen.segment_id, txn), seen


def readable_of(found: Scanned) -> Counted:
    """What consumers should get of a range: nothing of what lay beyond the horizon of the cut."""
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
