"""Pure: what the owner of a segment can have sent of it to another cluster.

Rule R12 of `../../docs/decisions/replicated-segments.md`.
"""

from broker.topics.replicated_ranges import EVERYTHING, ReplicatedRanges
from magnetar.protocol.ids import Position


class SentPositions:
    """How far one owner of a segment, and the owners before it, can have sent it to a cluster.

    That ends at the greatest of three positions: the end of the log when this owner took it over,
    the last entry that it has sent or passed over, and the mark-delete position.  The end of the
    log of now would not do: after a restore the log may have grown past what was lost.
    """

    def __init__(self, end: Position, *, terminated: bool) -> None:
        """`end` and `terminated` are of the log when this owner took it over."""
        self._last = end
        self._drained = terminated
        self.last_sent = end
        """Nothing after it was sent."""

    def sent(self, position: Position) -> None:
        """An entry is sent."""
        self.last_sent = max(self.last_sent, position)
        self.passed(position)

    def passed(self, position: Position) -> None:
        """An entry is sent, or passed over."""
        self._last = max(self._last, position)

    def drained(self) -> None:
        """The other cluster has all of the sealed segment."""
        self._drained = True

    def went_back(self, stored: ReplicatedRanges, mark_delete: Position) -> bool:
        """Whether the other cluster has more than was sent: positions here went back."""
        if stored.is_past(max(self._last, mark_delete)):
            return True
        # That it counts as an ancestor, of which nothing more comes.
        return not self._drained and any(run.mark == EVERYTHING for run in stored.runs)
