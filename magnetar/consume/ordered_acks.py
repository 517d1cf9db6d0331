"""`OrderedAcks`: the acknowledged positions of an ordered consumer.  Pure."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from magnetar.bounds import LEFT_SEGMENTS
from magnetar.consume.acknowledgements import AckTransaction
from magnetar.message_id import EntryId, sort_key
from magnetar.transactions.states import TransactionState

__all__ = ["ObservedTransaction", "OrderedAcks"]


_NOT_TO_COMMIT: Final = frozenset(
    {
        TransactionState.ABORTING,
        TransactionState.ABORTED,
        TransactionState.TIMED_OUT,
        TransactionState.FAILED,
    }
)
_TransactionId = tuple[int, int]


@runtime_checkable
class ObservedTransaction(AckTransaction, Protocol):
    """A transaction that reports its end.  The end of others is never known."""

    @property
    def state(self) -> TransactionState:
        """The state of the transaction."""

    def when_over(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(committed)` once, when the transaction is over at the broker too."""


@dataclass(slots=True)
class _OpenTransaction:
    """A transaction with acknowledgements, until it is over."""

    transaction: ObservedTransaction
    entries: dict[int, EntryId] = field(default_factory=dict)


class OrderedAcks:
    """The acknowledged positions of an ordered consumer, by segment.

    A position acknowledged in a transaction counts when the transaction has committed.  A segment
    takes the acknowledgements of one transaction at a time, as a later position covers an earlier.
    Messages that an open transaction acknowledged are not handed out again.

    If a transaction does not commit, everything that was handed out comes again
    (`expect_redelivery`).  Until a message is handed out again, no vector that covers it is
    accepted.

    If an attachment is lost before all messages handed out were acknowledged, another consumer may
    get the segment and process them.  Then no transaction can acknowledge there
    (`may_be_duplicated`) until the first message on the new attachment shows that none did, or
    those messages are acknowledged, or everything comes again.
    """

    __slots__ = (
        "_before",
        "_done",
        "_earlier",
        "_first",
        "_handed_out",
        "_open",
        "_still_there",
        "_twice",
        "_went_back",
    )

    def __init__(self) -> None:
        self._done: dict[int, EntryId] = {}
        """The positions up to which the present attachments are acknowledged."""
        self._before: dict[int, EntryId] = {}
        """The positions up to which earlier attachments were acknowledged."""
        self._handed_out: dict[int, EntryId] = {}
        """The last message handed out since everything came again."""
        self._first: dict[int, EntryId | None] = {}
        """The first message handed out since the last acknowledgement; None if it is not known."""
        self._earlier: dict[int, EntryId] = {}
        """The last message of an earlier attachment, until one of this attachment follows."""
        self._still_there: set[int] = set()
        """Segments whose messages of the earlier attachment came first: no one else has them."""
        self._twice: dict[int, EntryId] = {}
        """Segments of which messages may be processed twice, and the last such message."""
        self._went_back: dict[int, None] = {}
        """Segments of which everything is to come again."""
        self._open: dict[_TransactionId, _OpenTransaction] = {}

    # Deliveries

    @property
    def in_doubt(self) -> bool:
        """Whether a transaction will not commit, and is not over yet."""
        return bool(self._open) and any(
            each.transaction.state in _NOT_TO_COMMIT for each in self._open.values()
        )

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        """Whether an entry that came on this attachment must not be handed out."""
        return _covers(self._done.get(segment_id), entry) or self._is_held(segment_id, entry)

    def record_delivery(self, segment_id: int, entry: EntryId) -> None:
        """Record that a message is handed out."""
        earlier = self._earlier.pop(segment_id, None)
        if earlier is not None:
            if self._is_undone(segment_id, earlier):
                # Earlier messages were not acknowledged: another consumer may process them too.
                self._twice[segment_id] = earlier
            elif sort_key(entry) <= sort_key(earlier):
                del self._handed_out[segment_id]  # The subscription was reset to an earlier one.
        if _covers(self._before.get(segment_id), entry):
            # The acknowledgement was lost, or the subscription was reset.
            del self._before[segment_id]
        if not _covers(self._handed_out.get(segment_id), entry):
            self._handed_out[segment_id] = entry
        self._first.setdefault(segment_id, entry)

    def start_attachment(self, segment_id: int) -> None:
        """Begin a new attachment of a segment, on which unacknowledged messages come again."""
        if (entry := self._done.pop(segment_id, None)) is not None:
            _raise(self._before, segment_id, entry)
        if (entry := self._handed_out.get(segment_id)) is not None:
            self._earlier[segment_id] = entry
        self._still_there.discard(segment_id)

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        """Record the first message that came on a new attachment."""
        first = self._first.get(segment_id)
        if first is not None and _covers(first, entry):
            # The first message handed out is still there, so no other consumer acknowledged it.
            self._still_there.add(segment_id)

    def expect_redelivery(self) -> None:
        """Expect everything that is not acknowledged again."""
        self._went_back.update(dict.fromkeys(self._handed_out))
        for known in (self._handed_out, self._first, self._earlier, self._twice):
            known.clear()

    def acknowledged_up_to(self, segment_id: int) -> EntryId | None:
        """The position up to which everything is acknowledged, if one is known."""
        known = (self._done.get(segment_id), self._before.get(segment_id))
        return max((each for each in known if each is not None), key=sort_key, default=None)

    # Acknowledgements

    def is_acknowledged(
        self, segment_id: int, entry: EntryId, transaction: _TransactionId | None
    ) -> bool:
        """Whether an entry is acknowledged already, also if by this transaction.

        Vectors repeat the positions of quiet segments, and a broker refuses a position that a
        transaction has acknowledged already.
        """
        if _covers(self.acknowledged_up_to(segment_id), entry):
            return True
        known = None if transaction is None else self._open.get(transaction)
        return known is not None and _covers(known.entries.get(segment_id), entry)

    def awaits_redelivery(self, segment_id: int, entry: EntryId) -> bool:
        """Whether messages up to this entry have yet to be handed out again."""
        handed_out = self._handed_out.get(segment_id)
        return segment_id in self._went_back and not _covers(handed_out, entry)

    def may_be_duplicated(self, segment_id: int) -> bool:
        """Whether no transaction can acknowledge, as messages may be processed twice."""
        last = self._twice.get(segment_id)
        if last is not None and not _covers(self.acknowledged_up_to(segment_id), last):
            return True
        earlier = self._earlier.get(segment_id)
        if earlier is None or segment_id in self._still_there:
            return False
        return self._is_undone(segment_id, earlier)

    def is_all_acknowledged(self, segment_id: int) -> bool:
        """Whether everything that was handed out is acknowledged."""
        last = self._handed_out.get(segment_id)
        return last is None or _covers(self.acknowledged_up_to(segment_id), last)

    def holder(self, segment_id: int, transaction: _TransactionId) -> _TransactionId | None:
        """The other transaction that acknowledges on a segment now."""
        for key, known in self._open.items():
            if key != transaction and segment_id in known.entries:
                return key
        return None

    def record_ack(
        self, segment_id: int, entry: EntryId, transaction: _TransactionId | None
    ) -> None:
        """Record an acknowledgement of everything up to this entry."""
        if _covers(entry, self._handed_out.get(segment_id, entry)):
            self._first.pop(segment_id, None)
        elif segment_id in self._first:
            self._first[segment_id] = None
        if transaction is None:
            _raise(self._done, segment_id, entry)
        elif transaction in self._open:
            self._open[transaction].entries[segment_id] = entry

    # Transactions

    def join_transaction(self, transaction: ObservedTransaction) -> bool:
        """Note a transaction that is used here; returns whether it is new."""
        if transaction.id in self._open:
            return False
        self._open[transaction.id] = _OpenTransaction(transaction)
        return True

    def end_transaction(
        self, transaction: _TransactionId, *, committed: bool
    ) -> Mapping[int, EntryId]:
        """Forget a transaction that is over; returns its position in each segment."""
        known = self._open.pop(transaction, None)
        if known is None:
            return {}
        if committed:
            for segment_id, entry in known.entries.items():
                _raise(self._done, segment_id, entry)
        return known.entries

    def transactions_on(self, segment_id: int) -> list[ObservedTransaction]:
        """The transactions with acknowledgements on a segment that are not over."""
        return [each.transaction for each in self._open.values() if segment_id in each.entries]

    def _is_held(self, segment_id: int, entry: EntryId) -> bool:
        """Whether an open transaction acknowledged it."""
        return bool(self._open) and any(
            _covers(each.entries.get(segment_id), entry) for each in self._open.values()
        )

    def _is_undone(self, segment_id: int, entry: EntryId) -> bool:
        """Whether it is neither acknowledged nor held by a transaction."""
        done = _covers(self.acknowledged_up_to(segment_id), entry)
        return not done and not self._is_held(segment_id, entry)

    # Segments

    def lose_segment(self, segment_id: int) -> bool:
        """Give up a segment that goes to another consumer; returns whether messages are left."""
        last = self._handed_out.get(segment_id)
        if last is not None and self._is_undone(segment_id, last):
            self._twice[segment_id] = last
        return not self.is_all_acknowledged(segment_id)

    def forget_left_segments(self, held: Container[int]) -> None:
        """Forget all but the last LEFT_SEGMENTS segments that are not held any more."""
        entries = (self._done, self._before, self._handed_out, self._earlier, self._twice)
        for known in (*entries, self._first, self._went_back):
            for each in [each for each in known if each not in held][:-LEFT_SEGMENTS]:
                known.pop(each)
        self._still_there.intersection_update(self._earlier)


def _raise(known: dict[int, EntryId], segment_id: int, entry: EntryId) -> None:
    if not _covers(known.get(segment_id), entry):
        known[segment_id] = entry


def _covers(done: EntryId | None, entry: EntryId) -> bool:
    return done is not None and sort_key(entry) <= sort_key(done)
