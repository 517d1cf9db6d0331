"""`SnapshotCache`: the snapshots that a subscription has read and not passed yet.  Pure."""

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import Final

from broker.topics.subscription_markers import Snapshot
from magnetar.protocol.ids import EARLIEST, Position

_POSITION: Final = attrgetter("position")


class SnapshotCache:
    """Snapshots of one subscription, in the order of their positions.

    A subscription that has consumed everything up to a snapshot's position has passed it.  The
    cache is bounded.  Of too many it drops one between two others that are near to each other, so
    that those that stay are spread over what the subscription has read.
    """

    __slots__ = ("_most", "_numbers", "_passed", "_read", "_snapshots")

    def __init__(self, most: int) -> None:
        """`most` snapshots are kept, one at least."""
        self._most = max(most, 1)
        self._snapshots: list[Snapshot] = []
        self._numbers: list[int] = []
        """When each was read: the number of those that were read before it."""
        self._read = 0
        self._passed = EARLIEST

    def __len__(self) -> int:
        return len(self._snapshots)

    def add(self, snapshot: Snapshot) -> None:
        """Remember a snapshot, unless the subscription passed a later one, or it is known."""
        position = snapshot.position
        at = bisect_left(self._snapshots, position, key=_POSITION)
        known = at < len(self._snapshots) and self._snapshots[at].position == position
        if known or position <= self._passed:
            return
        self._snapshots.insert(at, snapshot)
        self._numbers.insert(at, self._read)
        self._read += 1
        if len(self._snapshots) > self._most:
            self._drop_one()

    def take_up_to(self, mark_delete: Position) -> Snapshot | None:
        """The newest snapshot that a subscription at `mark_delete` has passed; None without a new
        one.

        It is forgotten, with all before it.
        """
        count = bisect_right(self._snapshots, mark_delete, key=_POSITION)
        if not count:
            return None
        newest = self._snapshots[count - 1]
        del self._snapshots[:count]
        del self._numbers[:count]
        self._passed = newest.position
        return newest

    def _drop_one(self) -> None:
        """Drop the one whose neighbours were read one soonest after the other.

        The newest stays, and the oldest, which is passed next.
        """
        numbers, last = self._numbers, len(self._snapshots) - 1
        between = range(1, last) or range(last)
        at = min(between, key=lambda index: abs(numbers[index + 1] - numbers[max(index - 1, 0)]))
        del self._snapshots[at]
        del numbers[at]
