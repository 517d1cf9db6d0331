"""Counters of transactions, for metrics: plain numbers that the owner of the process reads.  Pure.

Rule: counting never fails and never waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.histogram import Histogram

INDEX_QUERY_BUCKETS_S: Sequence[float] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
END_BUCKETS_S: Sequence[float] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
EXECUTION_BUCKETS_MS: Sequence[int] = (
    *(10, 20, 50, 100, 500, 1_000, 5_000, 15_000, 30_000, 60_000),
    *(300_000, 1_500_000, 3_000_000),
)
"""Pulsar's, for how long transactions are open."""


@dataclass(slots=True)
class TransactionCounters:
    """One for each process; what single coordinators count is theirs."""

    op_writes: int = 0
    """Claims and acknowledgement records put."""
    op_deletes: int = 0
    op_records: int = 0
    """Claims and acknowledgement records that there are: put and not yet deleted."""
    header_cas_ok: int = 0
    header_cas_conflict: int = 0
    header_cas_reject: int = 0
    """Ends refused because the transaction had ended otherwise, or was not there."""
    coordinators_lost: int = 0
    """Led here, and then given up or lost while the process went on."""
    index_query: Histogram = field(default_factory=lambda: Histogram(INDEX_QUERY_BUCKETS_S))
    end: Histogram = field(default_factory=lambda: Histogram(END_BUCKETS_S))
    """From END_TXN to its answer."""
