"""Pure: the last entry of a segment that may be read, from what its open transactions pin."""

import heapq

from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.txn_id import TxnId
from txn.errors import TransactionAssertion


class MaxReadPosition:
    """The max read position: the lowest pin of a segment's open transactions (W13), or its end.

    A pin is the last position that its transaction leaves readable.  The lowest one is found in
    amortized O(log n).
    """

    __slots__ = ("_current", "_heap", "_pins")

    def __init__(self) -> None:
        self._pins: dict[TxnId, Position] = {}
        self._heap: list[tuple[Position, TxnId]] = []
        """Every pin; those that were replaced or removed are dropped when they come to the top."""
        self._current = EARLIEST

    def pin(self, txn: TxnId, position: Position) -> None:
        """Hold back readers at `position`, in place of the transaction's earlier pin."""
        if self._pins.get(txn) != position:
            self._pins[txn] = position
            heapq.heappush(self._heap, (position, txn))

    def unpin(self, txn: TxnId) -> None:
        """Remove the pin of the transaction, if it has one."""
        self._pins.pop(txn, None)
        if not self._pins:
            self._heap.clear()

    def pin_of(self, txn: TxnId) -> Position | None:
        """Return the position that the transaction pins, if any."""
        return self._pins.get(txn)

    @property
    def lowest(self) -> Position | None:
        """The lowest pin."""
        heap, pins = self._heap, self._pins
        while heap and pins.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    @property
    def current(self) -> Position:
        """The position that the last `advance` returned."""
        return self._current

    def advance(self, end: Position) -> Position:
        """The position now, where `end` is the newest durable entry.

        Raises `TransactionAssertion` if it moved back.
        """
        # W13: the lowest pin, and the end where nothing is pinned.
        position = end
        if self._pins:
            lowest = self.lowest
            if lowest is not None and lowest < end:
                position = lowest
        # Moving back would hide entries that readers have seen.
        if position < self._current:
            raise TransactionAssertion(
                f"The max read position moved back from {self._current} to {position}: "
                "report this as a defect."
            )
        self._current = position
        return position
