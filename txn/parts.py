"""The objects that all parts of transactions in one process share."""

import asyncio
from dataclasses import dataclass, field

from config.bounds import TXN_CLEANING_AT_ONCE
from storage.clock import Clock
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.store import TransactionStore


@dataclass(frozen=True, slots=True)
class TransactionParts:
    """The objects and settings that all parts of transactions share.

    `eager_epochs`: other processes may own the same segments, so a load takes the epoch at once
    (W7).  Otherwise this process is the only owner there can be, and the first transaction on a
    segment takes the epoch.
    """

    store: TransactionStore
    decisions: Decisions
    counters: TransactionCounters
    clock: Clock
    broker_id: str
    eager_epochs: bool
    clock_slack_ms: int = 0
    """How long after its deadline a transaction is aborted, if another process set the deadline.

    It covers the difference between the clocks of two processes.
    """

    cleanup_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(TXN_CLEANING_AT_ONCE)
    )
    """Bounds the requests of the store that clean up after ended transactions, all together."""
