"""Counters of transactions, for metrics: plain numbers.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.histogram import Histogram

INDEX_QUERY_BUCKETS_S: Sequence[float] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
END_BUCKETS_S: Sequence[float] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
EXECUTION_BUCKETS_MS: Sequence[int] = (
    *(10, 20, 50, 100, 500, 1_000, 5_000, 15_000, 30_000, 60_000),
    *(300_000, 1_500_000, 3_000_000),
)
"""Pulsar's buckets, for how long transactions are open."""


@dataclass(slots=True)
class TransactionCounters:
    """The counters of one process; single coordinators have counters of their own."""

    op_writes: int = 0
    """Claims and acknowledgement records put."""
    op_deletes: int = 0
    op_records: int = 0
    """Claims and acknowledgement records that are stored now."""
    header_cas_ok: int = 0
    header_cas_conflict: int = 0
    header_cas_reject: int = 0
    """Ends refused because the transaction had ended otherwise, or was not found."""
    coordinators_lost: int = 0
    """Coordinators that were led here, and then given up or lost before the process stopped."""
    index_query: Histogram = field(default_factory=lambda: Histogram(INDEX_QUERY_BUCKETS_S))
    end: Histogram = field(default_factory=lambda: Histogram(END_BUCKETS_S))
    """From END_TXN to its answer."""
