"""The entry buckets of a segment, shared among Key_Shared consumers (PIP-486).  Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

from broker.topics.dispatch.errors import ConsumerAssignError
from broker.topics.dispatch.selection import Candidate, KeyAssignment
from config.bounds import MAX_ENTRY_BUCKETS
from magnetar.protocol.key_hash import KEY_SPACE, HashRange


class Sharer(Candidate, Protocol):
    """A consumer that shares a segment with others."""

    @property
    def consumer_id(self) -> int:
        """Its number at its connection."""
        ...


C = TypeVar("C", bound=Sharer)


class EntryBuckets(KeyAssignment[C], Generic[C]):
    """Assignment of whole entry buckets to the consumers that share a segment.

    All consumers name the same table: the ranges of all buckets.  Of k consumers, sorted by name
    and id, consumer j owns the buckets j*N/k up to (j+1)*N/k of N.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._table: tuple[HashRange, ...] = ()
        self._consumers: list[C] = []
        self._owners: list[C] = []
        """The owner of each bucket; empty without consumers."""

    def add(self, consumer: C, ranges: Sequence[HashRange]) -> None:
        """See the base class.

        Raises `ConsumerAssignError` unless `ranges` are those of the first consumer, and divide 0
        to 65535 in ascending order, with 0 and 1 in one bucket.
        """
        table = tuple(ranges)
        if not self._consumers:
            _require_table(consumer.name, table)
            self._table = table
            # 0 stands for "no hash" in Key_Shared, so the first bucket has the hash 1.
            self._starts = [1, *(start for start, _ in table[1:])]
        elif table != self._table:
            raise ConsumerAssignError(
                f"Consumer {consumer.name!r} names other entry buckets than the consumers that "
                f"share the segment ({len(table)}, not {len(self._table)}, or other ranges): read "
                "the assignment again, and name its bucket ranges."
            )
        self._consumers.append(consumer)
        self._spread()

    def remove(self, consumer: C) -> None:
        """See the base class."""
        self._consumers.remove(consumer)
        self._spread()

    def owner(self, key_hash: int) -> C | None:
        """See the base class; None only without consumers."""
        return self._owners[self._number(key_hash)] if self._owners else None

    def bucket(self, entry_hash: int) -> int:
        """The first hash of the bucket of an entry, which stands for the whole bucket."""
        return self._starts[self._number(entry_hash)]

    def ranges(self) -> Iterable[tuple[HashRange, C]]:
        """See the base class."""
        return zip(self._table, self._owners, strict=True) if self._owners else ()

    def _number(self, entry_hash: int) -> int:
        return max(bisect_right(self._starts, entry_hash) - 1, 0)

    def _spread(self) -> None:
        ranked = sorted(self._consumers, key=lambda each: (each.name, each.consumer_id))
        buckets, sharers = len(self._table), len(ranked)
        self._owners = [
            consumer
            for rank, consumer in enumerate(ranked)
            for _ in range(rank * buckets // sharers, (rank + 1) * buckets // sharers)
        ]


def _require_table(name: str, table: Sequence[HashRange]) -> None:
    """Raise `ConsumerAssignError` unless the ranges divide all hashes into buckets."""
    problem = None
    if not 1 <= len(table) <= MAX_ENTRY_BUCKETS:
        problem = f"it names {len(table)}"
    elif table[0][0] != 0 or table[-1][1] != KEY_SPACE - 1:
        problem = f"they run from {table[0][0]} to {table[-1][1]}"
    elif table[0][1] < 1:
        problem = "the first one does not have the hash 1"
    elif any(start > end for start, end in table):
        problem = "one ends before it starts"
    elif any(low[1] + 1 != high[0] for low, high in pairwise(table)):
        problem = "they leave a gap, or overlap"
    if problem is not None:
        raise ConsumerAssignError(
            f"The entry buckets of consumer {name!r} are not valid, as {problem}: name 1 to "
            f"{MAX_ENTRY_BUCKETS} ranges that divide 0 to 65535 in ascending order, with 0 and 1 "
            "in the first."
        )
