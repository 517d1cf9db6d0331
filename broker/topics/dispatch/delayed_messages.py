"""Positions of entries that may not be sent before their time: pure, without timers or a clock."""

from heapq import heapify, heappop, heappush
from typing import Final

from config.bounds import MAX_DELAYED_PER_SUBSCRIPTION
from magnetar.protocol.ids import Position

_STALE_ALLOWED: Final = 1024


class DelayedMessages:
    """Positions by due time (ms since 1970), each with the key hash of its entry.

    Due positions come out by time, then by position, each once.  They are kept in memory only: a
    dispatcher that reads the entries again adds them again.
    """

    __slots__ = ("_bound", "_heap", "_tracked", "full")

    def __init__(self, bound: int = MAX_DELAYED_PER_SUBSCRIPTION) -> None:
        self.full = False
        """Whether the bound is reached, so that no new entry may be read.

        Entries that were read before and come back have bounds of their own: they are still added.
        """
        self._bound = bound
        self._heap: list[tuple[int, Position]] = []
        self._tracked: dict[Position, int] = {}

    def __len__(self) -> int:
        return len(self._tracked)

    def __contains__(self, position: Position) -> bool:
        return position in self._tracked

    @property
    def next_due_ms(self) -> int | None:
        """The earliest due time; None if there is none."""
        heap, tracked = self._heap, self._tracked
        while heap and heap[0][1] not in tracked:
            heappop(heap)
        return heap[0][0] if heap else None

    def add(self, position: Position, due_ms: int, key_hash: int = 0) -> None:
        """Keep `position` until `due_ms`; once, however often it is added."""
        if position not in self._tracked:
            self._tracked[position] = key_hash
            heappush(self._heap, (due_ms, position))
            self.full = len(self._tracked) >= self._bound

    def discard(self, position: Position) -> int | None:
        """Remove a position, say because it was acknowledged; its hash if it was tracked."""
        key_hash = self._tracked.pop(position, None)
        if key_hash is None:
            return None
        self.full = len(self._tracked) >= self._bound
        # Its place in the heap is stale now; the heap is built anew when most places are.
        if len(self._heap) > 2 * len(self._tracked) + _STALE_ALLOWED:
            self._heap = [each for each in self._heap if each[1] in self._tracked]
            heapify(self._heap)
        return key_hash

    def pop_due(self, now_ms: int, at_most: int) -> list[tuple[Position, int]]:
        """Take out the due positions, with their hashes."""
        heap, tracked = self._heap, self._tracked
        due: list[tuple[Position, int]] = []
        while heap and heap[0][0] <= now_ms and len(due) < at_most:
            _, position = heappop(heap)
            key_hash = tracked.pop(position, None)
            if key_hash is not None:
                due.append((position, key_hash))
        self.full = len(tracked) >= self._bound
        return due
