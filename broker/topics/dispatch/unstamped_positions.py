"""The batches without entry hashes that a subscription has read and not acknowledged.  Pure."""

from collections.abc import Callable

from config.bounds import UNSTAMPED_BATCHES_KEPT
from magnetar.protocol.ids import Position


class UnstampedPositions:
    """Positions of such batches, in the order in which they were read.

    A consumer may leave one unacknowledged for ever while it acknowledges others, so memory has a
    bound: UNSTAMPED_BATCHES_KEPT positions are kept one by one.  Of those behind them only the
    first and the last are kept: each unacknowledged entry from the one to the other counts as such
    a batch, until all of them are acknowledged.
    """

    __slots__ = ("_known", "_rest")

    def __init__(self) -> None:
        self._known: dict[Position, None] = {}
        self._rest: tuple[Position, Position] | None = None

    def __bool__(self) -> bool:
        return bool(self._known) or self._rest is not None

    def __len__(self) -> int:
        """The number of positions in memory."""
        return len(self._known) + (0 if self._rest is None else len(self._rest))

    def add(self, position: Position) -> None:
        """Add a batch that was read, maybe not for the first time."""
        if position in self._known:
            return
        if self._rest is not None:
            first, last = self._rest
            self._rest = min(first, position), max(last, position)
        elif len(self._known) < UNSTAMPED_BATCHES_KEPT:
            self._known[position] = None
        else:
            self._rest = position, position

    def acknowledged(self, position: Position) -> None:
        """Remove a batch: all of its messages are acknowledged."""
        self._known.pop(position, None)

    def first(
        self,
        is_acknowledged: Callable[[Position], bool],
        unacknowledged_start: Callable[[], Position],
    ) -> Position | None:
        """The first position that is not acknowledged; None if there is none.

        `unacknowledged_start` returns the first unacknowledged position of the subscription.
        """
        while self._known:
            first = next(iter(self._known))
            if not is_acknowledged(first):
                return first
            del self._known[first]
        if self._rest is None:
            return None
        first, last = self._rest
        start = unacknowledged_start()
        if start > last:
            self._rest = None
            return None
        return max(first, start)
