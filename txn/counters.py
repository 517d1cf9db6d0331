"""What transactions count, for metrics: plain numbers that the owner of the process reads.

Rule: counting never fails and never waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

INDEX_QUERY_BUCKETS_S: Sequence[float] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
END_BUCKETS_S: Sequence[float] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
EXECUTION_BUCKETS_MS: Sequence[int] = (
    *(10, 20, 50, 100, 500, 1_000, 5_000, 15_000, 30_000, 60_000),
    *(300_000, 1_500_000, 3_000_000),
)
"""Pulsar's, for how long transactions are open."""


class Histogram:
    """Counts of durations, for each upper bound (of the same unit) and above all."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, duration: float) -> None:
        """Count one duration."""
        self.total += duration
        for place, bound in enumerate(self._bounds):
            if duration <= bound:
                self.counts[place] += 1
                return
        self.counts[-1] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds as Prometheus writes them, each with the count up to it."""
        found, so_far = [], 0
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self.counts, strict=True):
            so_far += count
            found.append((name, float(so_far)))
        return found


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
