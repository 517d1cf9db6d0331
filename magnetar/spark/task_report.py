"""The report of a writing task: the only data that gets from the tasks to the commit.

Pure.  A report is pickled by Spark on an executor and read on the driver, where the writer is
another object than the one that was planned; so everything that a commit needs is in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from magnetar.protocol.txn_id import TxnId

__all__ = ["RowCount", "TaskReport"]

_HASHES: Final = 1 << 64


class RowCount(NamedTuple):
    """Rows that were stored in one segment: their number, and the sum of their hashes mod 2^64."""

    messages: int = 0
    hash_sum: int = 0

    def plus(self, messages: int, hash_sum: int) -> "RowCount":
        """Add rows."""
        return RowCount(self.messages + messages, (self.hash_sum + hash_sum) % _HASHES)


@dataclass(frozen=True)
class TaskReport:
    """The result of one try of one task.

    `query` and `batch` are None where Spark does not name them.  A task without rows need not have
    an attempt.  `done`: the batch was committed before, so the task wrote nothing.  `counts` are
    the stored rows by segment topic.
    """

    nonce: str
    partition: int
    query: str | None = None
    batch: int | None = None
    group: TxnId | None = None
    attempt: TxnId | None = None
    done: bool = False
    rows: int = 0
    counts: Mapping[str, RowCount] = field(default_factory=dict)
