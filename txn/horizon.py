"""Pure: the last entry of a segment that may be read, from what its open transactions pin.

Rules:

- The horizon is the lowest pin, or the end where nothing is pinned (W13); never above the end.
- It never moves back: that would hide what was shown.  Asserted at every look.
- A pin is the last position that its transaction leaves readable: entries after it are not.
"""

import heapq

from protocol.ids import EARLIEST, Position
from txn.errors import TransactionAssertion
from txn.txn_id import TxnId


class Horizon:
    """See the module's rules.  The lowest of n pins is found in amortized log n."""

    __slots__ = ("_heap", "_pins", "_shown")

    def __init__(self) -> None:
        self._pins: dict[TxnId, Position] = {}
        self._heap: list[tuple[Position, TxnId]] = []
        """Holds every pin; pins that were replaced or taken out go when they come up."""
        self._shown = EARLIEST

    def pin(self, txn: TxnId, position: Position) -> None:
        """Nothing after `position` may be read, as far as this transaction is concerned."""
        if self._pins.get(txn) != position:
            self._pins[txn] = position
            heapq.heappush(self._heap, (position, txn))

    def unpin(self, txn: TxnId) -> None:
        """The transaction holds nothing back (any more)."""
        self._pins.pop(txn, None)
        if not self._pins:
            self._heap.clear()

    def pin_of(self, txn: TxnId) -> Position | None:
        """What a transaction pins."""
        return self._pins.get(txn)

    @property
    def lowest(self) -> Position | None:
        """The lowest pin."""
        heap, pins = self._heap, self._pins
        while heap and pins.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    @property
    def shown(self) -> Position:
        """The horizon at the last look."""
        return self._shown

    def look(self, end: Position) -> Position:
        """The horizon now, where `end` is the newest durable entry.

        Raises `TransactionAssertion` if it moved back.
        """
        horizon = end
        if self._pins:
            lowest = self.lowest
            if lowest is not None and lowest < end:
                horizon = lowest
        if horizon < self._shown:
            raise TransactionAssertion(
                f"The horizon moved back from {self._shown} to {horizon}: report this as a defect."
            )
        self._shown = horizon
        return horizon
