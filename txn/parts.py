"""What every part of transactions in one process is given."""

from dataclasses import dataclass

from storage.clock import Clock
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.store import TransactionStore


@dataclass(frozen=True, slots=True)
class TransactionParts:
    """`eager_epochs`: other processes may own the same segments, so a load takes the epoch at once.

    Otherwise the process is the only owner there can be, and the first transaction on a segment
    takes it.
    """

    store: TransactionStore
    decisions: Decisions
    counters: TransactionCounters
    clock: Clock
    broker_id: str
    eager_epochs: bool
