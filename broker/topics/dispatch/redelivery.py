"""Entries that are sent again: their order, and the redelivery count of each."""

from heapq import heappop, heappush

from config.bounds import REPLAY_NEAR_ENTRIES
from magnetar.protocol.ids import Position


class ReplayQueue:
    """Waiting positions, lowest first."""

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
        """Remove `position`, say because it was acknowledged."""
        self._waiting.discard(position)
        if not self._waiting:
            self._heap.clear()

    def first(self) -> Position | None:
        """The lowest waiting position; it stays."""
        heap = self._heap
        while heap:
            if heap[0] in self._waiting:
                return heap[0]
            heappop(heap)
        return None

    def is_dense(self) -> bool:
        """Whether the two lowest are near each other, so that it pays to read on from the first.

        Call `first` before.  A removed position may still count: then too much or too little is
        read.
        """
        heap = self._heap
        if len(heap) < 2:
            return False
        first, second = heap[0], min(heap[1:3])
        near = second.entry_id - first.entry_id <= REPLAY_NEAR_ENTRIES
        return near and second.ledger_id == first.ledger_id

    def pop(self) -> Position | None:
        """Take out the lowest waiting position."""
        position = self.first()
        if position is not None:
            heappop(self._heap)
            self._waiting.discard(position)
        return position


class RedeliveryCounts:
    """Redelivery count of each unacknowledged entry; 0 for most, which takes no memory.

    A count rises when a client reports that it did not process a message (negative acknowledgement,
    acknowledgement timeout), and when an abort releases it.  It does not rise when a connection
    ends: a prefetched message does not come nearer to a dead-letter topic.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Position, int] = {}

    def __getitem__(self, position: Position) -> int:
        return self._counts.get(position, 0)

    def __len__(self) -> int:
        return len(self._counts)

    def raise_for(self, position: Position) -> None:
        """Count one more redelivery of `position`."""
        self._counts[position] = self._counts.get(position, 0) + 1

    def forget(self, position: Position) -> None:
        """Drop the count of an acknowledged entry."""
        self._counts.pop(position, None)

    def forget_all(self) -> None:
        """Drop all counts: the cursor was reset."""
        self._counts.clear()
