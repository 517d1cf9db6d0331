"""Pure: what of each segment an ordered consumer has acknowledged, and may acknowledge."""

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
    """A transaction that tells its end.  Of others it is never known."""

    @property
    def state(self) -> TransactionState:
        """Its state."""

    def when_over(self, told: Callable[[bool], None]) -> None:
        """`told(committed)` once, when it is over at the broker too."""


@dataclass(slots=True)
class _OpenTransaction:
    """A transaction with acknowledgements, until it is over."""

    transaction: ObservedTransaction
    entries: dict[int, EntryId] = field(default_factory=dict)


class OrderedAcks:
    """The acknowledgements of an ordered consumer, by segment: what is done, and what may be.

    - Vectors repeat what earlier ones said of quiet segments. A broker refuses an entry of a
      transaction that does not go beyond the last one there, so what was said is not said again.
    - What was acknowledged in a transaction is done when that one has committed, not before; a
      segment takes the acknowledgements of one transaction at a time, as a later one covers the
      earlier.
    - A transaction that does not commit makes everything come again that was handed out
      (`expect_redelivery`). Until a message is handed out once more no vector that covers it is
      taken: it would acknowledge what nobody processes now.
    - On one attachment what is done does not come again, or came before it was done: it is over.
      What was done on an earlier attachment and comes again is not done any more: the subscription
      was set back, or the acknowledgement was lost.
    - What a transaction acknowledged is not handed out while it is open: if it does not commit,
      everything comes again.
    - What was handed out, and is not acknowledged when the attachment is lost, comes again: here,
      or to somebody else, who may have the segment and be done with it before this consumer has it
      again and has heard of it. Whether nobody was is known from the first message that comes on
      the new attachment. Until then, or if it was somebody, no transaction acknowledges there
      (`may_be_duplicated`).
    - Who reads on after a new attachment, or after somebody else had the segment, without having
      acknowledged what was handed out before, may do that a second time: no transaction
      acknowledges there until everything comes again, or until that is acknowledged.
    - Of segments that were left only what is done is known, of the last LEFT_SEGMENTS.
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
        self._before: dict[int, EntryId] = {}
        """The positions up to which earlier attachments were acknowledged."""
        self._handed_out: dict[int, EntryId] = {}
        """The last message since everything came again."""
        self._first: dict[int, EntryId | None] = {}
        """The first message since the last acknowledgement; None: it is not known."""
        self._earlier: dict[int, EntryId] = {}
        """The last message of an earlier attachment, until one of this attachment follows."""
        self._still_there: set[int] = set()
        """Segments where messages of the earlier attachment came first: nobody else did them."""
        self._twice: dict[int, EntryId] = {}
        """Where something may be done twice, and up to where."""
        self._went_back: dict[int, None] = {}
        self._open: dict[_TransactionId, _OpenTransaction] = {}

    # What is handed out

    @property
    def in_doubt(self) -> bool:
        """Whether a transaction does not commit, and is not over."""
        return bool(self._open) and any(
            each.transaction.state in _NOT_TO_COMMIT for each in self._open.values()
        )

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        """Whether an entry that came on this attachment needs not be handed out."""
        return _covers(self._done.get(segment_id), entry) or self._is_held(segment_id, entry)

    def record_delivery(self, segment_id: int, entry: EntryId) -> None:
        """Record that a message is handed out."""
        earlier = self._earlier.pop(segment_id, None)
        if earlier is not None:
            if self._is_undone(segment_id, earlier):
                # It reads on without what came before: that may be processed by somebody else too.
                self._twice[segment_id] = earlier
            elif sort_key(entry) <= sort_key(earlier):
                del self._handed_out[segment_id]  # it was set back
        if _covers(self._before.get(segment_id), entry):
            # The acknowledgement was lost, or the subscription was set back.
            del self._before[segment_id]
        if not _covers(self._handed_out.get(segment_id), entry):
            self._handed_out[segment_id] = entry
        self._first.setdefault(segment_id, entry)

    def start_attachment(self, segment_id: int) -> None:
        """Begin a new attachment of a segment: what is not acknowledged comes again."""
        if (entry := self._done.pop(segment_id, None)) is not None:
            _raise(self._before, segment_id, entry)
        if (entry := self._handed_out.get(segment_id)) is not None:
            self._earlier[segment_id] = entry
        self._still_there.discard(segment_id)

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        """Record the first message that came on a new attachment."""
        first = self._first.get(segment_id)
        if first is not None and _covers(first, entry):
            # The broker still has the first that was handed out: nobody else is done with it.
            self._still_there.add(segment_id)

    def expect_redelivery(self) -> None:
        """Expect everything that is not acknowledged once more."""
        self._went_back.update(dict.fromkeys(self._handed_out))
        for known in (self._handed_out, self._first, self._earlier, self._twice):
            known.clear()

    def acknowledged_up_to(self, segment_id: int) -> EntryId | None:
        """Up to where everything is acknowledged, as far as it is known."""
        known = (self._done.get(segment_id), self._before.get(segment_id))
        return max((each for each in known if each is not None), key=sort_key, default=None)

    # What is acknowledged

    def is_acknowledged(
        self, segment_id: int, entry: EntryId, transaction: _TransactionId | None
    ) -> bool:
        """Whether an entry is acknowledged already (or by this transaction)."""
        if _covers(self.acknowledged_up_to(segment_id), entry):
            return True
        known = None if transaction is None else self._open.get(transaction)
        return known is not None and _covers(known.entries.get(segment_id), entry)

    def awaits_redelivery(self, segment_id: int, entry: EntryId) -> bool:
        """Whether something up to this entry is still to be handed out once more."""
        handed_out = self._handed_out.get(segment_id)
        return segment_id in self._went_back and not _covers(handed_out, entry)

    def may_be_duplicated(self, segment_id: int) -> bool:
        """Whether no transaction can acknowledge: something may be done twice."""
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
        """Take in a transaction that is used here; whether it is new."""
        if transaction.id in self._open:
            return False
        self._open[transaction.id] = _OpenTransaction(transaction)
        return True

    def end_transaction(
        self, transaction: _TransactionId, *, committed: bool
    ) -> Mapping[int, EntryId]:
        """Forget a transaction that is over; return what it acknowledged of each segment."""
        known = self._open.pop(transaction, None)
        if known is None:
            return {}
        if committed:
            for segment_id, entry in known.entries.items():
                _raise(self._done, segment_id, entry)
        return known.entries

    def transactions_on(self, segment_id: int) -> list[ObservedTransaction]:
        """Transactions that are not over."""
        return [each.transaction for each in self._open.values() if segment_id in each.entries]

    def _is_held(self, segment_id: int, entry: EntryId) -> bool:
        """Whether a transaction that is open acknowledged it."""
        return bool(self._open) and any(
            _covers(each.entries.get(segment_id), entry) for each in self._open.values()
        )

    def _is_undone(self, segment_id: int, entry: EntryId) -> bool:
        """Whether nobody has acknowledged it."""
        done = _covers(self.acknowledged_up_to(segment_id), entry)
        return not done and not self._is_held(segment_id, entry)

    # Segments

    def lose_segment(self, segment_id: int) -> bool:
        """Give up a segment that somebody else may have; whether something is not acknowledged."""
        last = self._handed_out.get(segment_id)
        if last is not None and self._is_undone(segment_id, last):
            self._twice[segment_id] = last
        return not self.is_all_acknowledged(segment_id)

    def forget_left_segments(self, held: Container[int]) -> None:
        """Forget the oldest segments that are not held any more."""
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
