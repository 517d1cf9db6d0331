"""Entries that go out again: what waits, in which order, and how often each one was sent back.

Rules: what waits is ordered by position, whoever gave it back.  A count rises when a client says
that it did not process a message (negative acknowledgement, acknowledgement timeout), not when a
connection ends: what was only prefetched does not come nearer to a dead-letter topic.
"""

from heapq import heappop, heappush

from config.bounds import REPLAY_NEAR_ENTRIES
from magnetar.protocol.ids import Position


class ReplayQueue:
    """Positions that wait, lowest first."""

    __slots__ = ("_heap", "_waiting")

    def __init__(self) -> None:
        self._waiting: set[Position] = set()
        self._heap: list[Position] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, position: Position) -> bool:
        return position in self._waiting

    def add(self, position: Position) -> None:
        """Let `position` wait; once, however often it is added."""
        if position not in self._waiting:
            self._waiting.add(position)
            heappush(self._heap, position)

    def discard(self, position: Position) -> None:
        """It waits no longer (it was acknowledged)."""
        self._waiting.discard(position)
        if not self._waiting:
            self._heap.clear()

    def first(self) -> Position | None:
        """The lowest waiting position, left in place."""
        heap = self._heap
        while heap:
            if heap[0] in self._waiting:
                return heap[0]
            heappop(heap)
        return None

    def is_dense(self) -> bool:
        """Whether the two lowest are near each other, so that it pays to read on from the first.

        Called after `first`.  One that left may still count: then too much is read, or too little.
        """
        heap = self._heap
        if len(heap) < 2:
            return False
        first, second = heap[0], min(heap[1:3])
        near = second.entry_id - first.entry_id <= REPLAY_NEAR_ENTRIES
        return near and second.ledger_id == first.ledger_id

    def pop(self) -> Position | None:
        """The lowest waiting position, taken out."""
        position = self.first()
        if position is not None:
            heappop(self._heap)
            self._waiting.discard(position)
        return position


class RedeliveryCounts:
    """How often each unacknowledged entry was sent back; 0 for most, which takes no memory."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Position, int] = {}

    def __getitem__(self, position: Position) -> int:
        return self._counts.get(position, 0)

    def __len__(self) -> int:
        return len(self._counts)

    def raise_for(self, position: Position) -> None:
        """One more redelivery of `position`."""
        self._counts[position] = self._counts.get(position, 0) + 1

    def forget(self, position: Position) -> None:
        """It was acknowledged."""
        self._counts.pop(position, None)

    def forget_all(self) -> None:
        """The cursor was reset: history begins anew."""
        self._counts.clear()
