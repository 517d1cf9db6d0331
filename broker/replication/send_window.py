"""`SendWindow`: entries that were sent to another cluster and are not answered.  Pure."""

from collections import deque
from typing import NamedTuple

from broker.topics.subscription_markers import MARKER_RECEIPT
from magnetar.protocol.ids import Position


class _Sent(NamedTuple):
    """An entry in flight; `sequence_id` is that of its SEND, `sent_s` the loop's time."""

    sequence_id: int
    position: Position
    sent_s: float
    is_marker: bool


class SendWindow:
    """The entries in flight, in the order in which they were sent and are answered.

    A receipt names the entry by the sequence id of its SEND, or by its position in this cluster
    where both sides have flag 6, `supports_repl_dedup_by_lid_and_eid`.  That of a marker then has
    the sequence id and MARKER_RECEIPT.
    """

    __slots__ = ("_by_position", "_next", "_sent")

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        self._next = 0
        self._by_position = False

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest entry in flight was sent; None without any."""
        return self._sent[0].sent_s if self._sent else None

    @property
    def by_position(self) -> bool:
        """Whether receipts name entries by position, by which duplicates are found there."""
        return self._by_position

    def begin(self, *, by_position: bool) -> None:
        """Begin on another connection; `by_position` says how its receipts name entries."""
        self.clear()
        self._by_position = by_position

    def add(self, position: Position, now_s: float, *, marker: bool = False) -> int:
        """Note an entry that is sent at `now_s`; returns the sequence id of its SEND."""
        sequence_id, self._next = self._next, self._next + 1
        self._sent.append(_Sent(sequence_id, position, now_s, marker))
        return sequence_id

    def answered(self, sequence_id: int, highest_sequence_id: int) -> Position | None:
        """Take a receipt for the oldest entry; None if it is for another one."""
        if not self._sent:
            return None
        oldest = self._sent[0]
        if not self._by_position:
            answers = sequence_id == oldest.sequence_id
        elif oldest.is_marker:
            answers = (sequence_id, highest_sequence_id) == (oldest.sequence_id, MARKER_RECEIPT)
        else:
            answers = (sequence_id, highest_sequence_id) == oldest.position
        if not answers:
            return None
        self._sent.popleft()
        return oldest.position

    def refused(self, sequence_id: int) -> Position | None:
        """Take the refusal of the entry with the sequence id of its SEND; None for another one.

        Entries before it may still be answered.
        """
        for index, sent in enumerate(self._sent):
            if sent.sequence_id == sequence_id:
                del self._sent[index]
                return sent.position
        return None

    def clear(self) -> None:
        """Forget what is in flight: it will not be answered."""
        self._sent.clear()
