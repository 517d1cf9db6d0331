"""`AckTracker`: the acknowledgements of a segment consumer.  Pure."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from magnetar.bounds import MAX_KNOWN_IN_HAND
from magnetar.consume.message import EntryKey
from magnetar.errors import InvalidArgument
from magnetar.message_id import EntryId, sort_key
from magnetar.protocol.ack_set import pending_all, to_words

__all__ = ["AckTracker", "Acknowledgement", "acknowledgement_of", "acknowledgement_up_to", "bit_of"]


V = TypeVar("V")


class Acknowledgement(NamedTuple):
    """The acknowledgement of an entry; `ack_set` is empty if all of it is acknowledged."""

    key: EntryKey
    ack_set: Sequence[int] = ()
    batch_size: int = 0


def bit_of(index: int) -> int:
    """The bit of a message in its batch; all bits for -1, which stands for the whole entry."""
    return 1 << index if index >= 0 else -1


def acknowledgement_of(message_id: EntryId) -> Acknowledgement:
    """Return the acknowledgement of one message, and of nothing else in its batch."""
    key, index, size = message_id.key, message_id.batch_index, message_id.batch_size
    if index < 0 or size <= 1:
        return Acknowledgement(key)
    return Acknowledgement(key, to_words(pending_all(size) & ~(1 << index)), size)


def acknowledgement_up_to(message_id: EntryId) -> Acknowledgement:
    """Return the cumulative acknowledgement of a message and all before it."""
    key, index, size = message_id.key, message_id.batch_index, message_id.batch_size
    if index < 0 or index + 1 >= size:
        return Acknowledgement(key)
    return Acknowledgement(key, to_words(_after(index, size)), size)


def _after(index: int, size: int) -> int:
    """The bits of the messages after `index`."""
    return pending_all(size) >> (index + 1) << (index + 1)


class _Batch:
    """A batch of which messages were handed out."""

    __slots__ = ("held", "mine", "of_before", "pending", "size")

    def __init__(self, size: int, mine: int, pending: int) -> None:
        self.size: Final = size
        self.mine = mine
        """Bits of the messages that the broker gave to this consumer."""
        self.pending = pending
        """Bits of the messages that are not acknowledged."""
        self.held = 0
        """Bits of the messages that are acknowledged in a transaction."""
        self.of_before = False
        """Whether it came on an earlier attachment."""

    def left(self) -> int:
        """The ack set to send; 0 for the whole entry."""
        # It clears the bits that this consumer acknowledged and no others: brokers combine sets by
        # AND, and other consumers may have the rest of the batch.
        return pending_all(self.size) & ~(self.mine & ~self.pending)

    def in_hand(self) -> int:
        """Bits of the messages that wait for the application, or that it has not acknowledged."""
        return self.pending & ~self.held


_AckSet = tuple[int, int]
"""The ack set to send, 0 for the whole entry, and the size of the batch."""
_WHOLE: Final[_AckSet] = (0, 0)


class AckTracker:
    """The acknowledgements of one segment consumer, and those that its broker has yet to get.

    Acknowledgements are collected in a group and sent together.  A cumulative one replaces those
    that it covers.  The messages of a batch are acknowledged by an ack set; a batch without any
    left is acknowledged as an entry, which brokers without ack sets need.

    A message that the broker sends again is not handed out if its acknowledgement is in the group
    or was made on this attachment.  On a shared subscription it is not handed out either while the
    application has it, or before its acknowledgement in a transaction is answered: of two copies
    the broker would refuse the second.  On an ordered subscription it is handed out again, as all
    messages after it come again too.

    A batch is known until all of it is acknowledged, in a transaction or not, or a message of it is
    requested again.  The messages of an unknown batch are acknowledged one by one.
    """

    __slots__ = (
        "_batches",
        "_chunks",
        "_chunks_before",
        "_group",
        "_max_known",
        "_missed",
        "_sent_up_to",
        "_shared",
        "_single",
        "_single_before",
        "_unanswered",
        "_up_to",
    )

    def __init__(self, *, shared: bool = False, max_known: int = MAX_KNOWN_IN_HAND) -> None:
        self._shared = shared
        self._max_known = max_known
        self._single: set[EntryKey] = set()
        """Shared subscriptions: single messages that came and are not acknowledged."""
        self._single_before: set[EntryKey] = set()
        """Shared subscriptions: such messages of earlier attachments."""
        self._unanswered: dict[EntryKey, int] = {}
        """Shared: bits that are being acknowledged in transactions; 1 for a single message."""
        self._missed: dict[EntryKey, int] = {}
        """Shared: those of these bits whose messages came again meanwhile."""
        self._batches: dict[EntryKey, _Batch] = {}
        self._chunks: dict[EntryKey, tuple[EntryKey, ...]] = {}
        self._chunks_before: dict[EntryKey, tuple[EntryKey, ...]] = {}
        """Chunked messages of earlier attachments."""
        self._group: dict[EntryKey, _Batch | _AckSet] = {}
        self._up_to: EntryId | None = None
        self._sent_up_to: EntryId | None = None

    @property
    def waiting(self) -> int:
        """Acknowledgements in the group."""
        return len(self._group) + (self._up_to is not None)

    @property
    def known(self) -> int:
        """Batches and chunked messages that are known."""
        single = len(self._single) + len(self._single_before) + len(self._unanswered)
        return single + len(self._batches) + len(self._chunks) + len(self._chunks_before)

    # Deliveries

    def deliver(self, key: EntryKey) -> bool:
        """Note a message alone in its entry; returns whether to hand it out."""
        if self._group.get(key) is not None or self._covers(key):
            return False
        if not self._shared:
            return True
        if key in self._single:
            return False
        if self._unanswered and key in self._unanswered:
            self._missed[key] = 1
            return False
        self._single.add(key)
        if self._single_before and key in self._single_before:
            self._single_before.discard(key)
            return False
        return True

    def deliver_chunks(self, chunks: tuple[EntryKey, ...]) -> bool:
        """Note a message of these chunks; returns whether to hand it out."""
        last = chunks[-1]
        new = self.deliver(last)
        if new or last in self._single:
            self._chunks[last] = chunks
            self._chunks_before.pop(last, None)
        return new

    def deliver_batch(self, key: EntryKey, size: int, mine: int, visible: int) -> int:
        """Note a batch; returns the bits of the messages to hand out.

        `mine` are the bits that the broker gives to this consumer, `visible` those that compaction
        has left; removed messages count as acknowledged.
        """
        waiting = self._group.get(key)
        pending = mine & visible
        if waiting is not None:
            left, _ = _left_of(waiting)
            pending &= left
            mine |= pending_all(size) & ~left
        known = self._batches.get(key)
        if known is not None and not known.of_before:
            pending &= known.pending | ~known.mine
        if self._covers(key):
            pending = 0
        elif self._up_to_or_sent(key) is not None:
            pending &= self._left_by_up_to(key, size)
        if self._shared:
            return self._new_of_shared(key, _Batch(size, mine, pending), known)
        if pending:
            self._batches[key] = _Batch(size, mine, pending)
        else:
            self._batches.pop(key, None)
        return pending

    def _new_of_shared(self, key: EntryKey, came: _Batch, known: _Batch | None) -> int:
        """Return the bits to hand out of a batch that came, part of which may be known."""
        if self._unanswered and (unanswered := self._unanswered.get(key, 0) & came.pending):
            self._missed[key] = self._missed.get(key, 0) | unanswered
            came.pending &= ~unanswered
            came.mine &= ~unanswered
        new = came.pending
        if known is not None:
            in_hand = known.in_hand()
            new &= ~in_hand
            if not known.of_before:
                came.mine |= known.mine
                came.pending |= known.pending
                came.held = known.held & ~new
            else:
                came.mine |= in_hand
                came.pending |= in_hand
        self._batches[key] = came
        self._forget_if_done(key, came)
        return new

    def give_back(self, messages: Iterable[tuple[EntryKey, int]]) -> None:
        """Forget that the application has these messages, so that they are handed out again.

        Each is an entry and its bits, as of `bit_of`.
        """
        for key, bits in messages:
            self._forget_single(key)
            known = self._batches.get(key)
            if known is not None:
                known.mine &= ~bits
                known.pending &= ~bits
                self._forget_if_done(key, known)

    def start_attachment(self) -> None:
        """Begin a new attachment; the caller has given back the messages in the inbox.

        Only the group still counts as acknowledged: the cursor may have been reset on purpose.
        Messages that were handed out before can still be acknowledged.
        """
        # Above the bound a message is known for one more attachment only.  Otherwise those that an
        # application never acknowledges would be kept for ever.
        keeps = self._shared and self.known <= self._max_known
        self._missed.clear()
        for key, batch in list(self._batches.items()):
            if batch.of_before and not keeps:
                del self._batches[key]
            batch.of_before = True
        if not keeps:
            self._single_before.clear()
            self._chunks_before.clear()
        self._single_before |= self._single
        self._chunks_before |= self._chunks
        self._single, self._chunks = set(), {}
        self._sent_up_to = None

    # Acknowledgements

    def acknowledge(self, key: EntryKey, index: int, size: int) -> None:
        """Acknowledge one message; entry, index and size of its batch are as in ids."""
        batch = self._batches.get(key)
        if batch is not None:
            # The set is made when it is sent, once for all its messages.
            batch.pending &= ~(1 << index)
            self._group[key] = batch
            if not batch.pending & ~batch.held:
                del self._batches[key]
        elif index >= 0:
            left, _ = _left_of(self._group.get(key, (pending_all(size), size)))
            self._group[key] = (left & ~(1 << index), size)
        else:
            self._forget_single(key)
            for chunk in self._take_chunks(key):
                self._group[chunk] = _WHOLE

    def acknowledge_entry(self, key: EntryKey) -> None:
        """Acknowledge an entry of which no message is handed out."""
        self._batches.pop(key, None)
        self._group[key] = _WHOLE

    def acknowledge_up_to(self, message_id: EntryId) -> None:
        """Acknowledge a message and everything before it."""
        last = max(filter(None, (self._up_to, self._sent_up_to)), key=sort_key, default=None)
        if last is not None and sort_key(message_id) <= sort_key(last):
            return
        self._up_to = message_id
        key, index = message_id.key, message_id.batch_index
        whole = index < 0 or index + 1 >= message_id.batch_size
        _drop_before(self._batches, key)
        _drop_before(self._chunks, key)
        _drop_before(self._chunks_before, key)
        _drop_before(self._group, key)
        if whole:
            self._batches.pop(key, None)
            self._take_chunks(key)
            self._group.pop(key, None)
        if not whole and (batch := self._batches.get(key)) is not None:
            batch.pending &= _after(index, batch.size)
            self._forget_if_done(key, batch)

    def commit_up_to(self, message_id: EntryId) -> None:
        """Note that a transaction that acknowledged up to a message has committed."""
        self.acknowledge_up_to(message_id)
        if self._up_to is message_id:
            self._up_to, self._sent_up_to = None, message_id

    def sized(self, message_id: EntryId) -> EntryId:
        """The id with the size of its batch.  Raises `InvalidArgument` if that is not known."""
        # Without the size the rest of the batch would count as acknowledged.
        if message_id.batch_index < 0 or message_id.batch_size > message_id.batch_index:
            return message_id
        batch = self._batches.get(message_id.key)
        if batch is None or message_id.batch_index >= batch.size:
            raise InvalidArgument(
                f"The id {message_id} is in a batch of {message_id.batch_size} messages, and that "
                "batch is not known here; acknowledge the received message, or its id."
            )
        return message_id._replace(batch_size=batch.size)

    def hold(self, message_id: EntryId) -> Sequence[Acknowledgement]:
        """Mark a message as acknowledged in a transaction; returns the acknowledgements to send.

        It does not count as acknowledged: it comes again if the transaction aborts.
        """
        key, index = message_id.key, message_id.batch_index
        if self._shared:
            self._unanswered[key] = self._unanswered.get(key, 0) | 1 << max(index, 0)
        if index < 0:
            self._forget_single(key)
            return [Acknowledgement(chunk) for chunk in self._take_chunks(key)]
        batch = self._batches.get(key)
        if batch is not None:
            batch.held |= 1 << index
            self._forget_if_done(key, batch)
        return [acknowledgement_of(message_id)]

    def settle(self, message_id: EntryId) -> bool:
        """End what `hold` began, as the broker has answered; returns whether the message came.

        If so, it must be requested again, whatever the answer was: the transaction may have aborted
        at once, and its message may have been read together with the answer.
        """
        key, bit = message_id.key, 1 << max(message_id.batch_index, 0)
        came = bool(self._missed.get(key, 0) & bit)
        for bits in (self._unanswered, self._missed):
            left = bits.pop(key, 0) & ~bit
            if left:
                bits[key] = left
        return came

    def release(self, message_id: EntryId, held: Sequence[Acknowledgement]) -> None:
        """Undo `hold`, as the broker has refused it; the application still has the message."""
        key, index = message_id.key, message_id.batch_index
        if len(held) > 1:
            self._chunks[key] = tuple(each.key for each in held)
        if not self._shared:
            return
        if index < 0:
            self._single.add(key)
            return
        bit = bit_of(index)
        batch = self._batches.setdefault(key, _Batch(message_id.batch_size, 0, 0))
        batch.mine |= bit
        batch.pending |= bit
        batch.held &= ~bit

    def is_in_hand(self, message_id: EntryId) -> bool:
        """Whether a message of a shared subscription came and was not acknowledged since."""
        key, index = message_id.key, message_id.batch_index
        if index < 0:
            return key in self._single or key in self._single_before
        batch = self._batches.get(key)
        return batch is not None and bool(batch.in_hand() & bit_of(index))

    def hold_up_to(
        self, message_id: EntryId, found: Iterable[EntryId], first: EntryKey | None
    ) -> tuple[Acknowledgement | None, list[Acknowledgement]]:
        """Return the acknowledgements of everything up to a message, in a transaction.

        Chunked messages span it from the entry `first` on (None: there are none).  `found` are the
        messages that are not acknowledged yet: those before `first` are acknowledged cumulatively,
        those after it one by one.
        """
        if first is None:
            return acknowledgement_up_to(message_id), []
        before = max((each for each in found if each.key < first), key=sort_key, default=None)
        behind = sorted({each for each in (*found, message_id) if each.key > first}, key=sort_key)
        held = (each for message in behind for each in self.hold(message))
        if before is None:
            return None, list(held)
        last = before.key
        return acknowledgement_up_to(before), [each for each in held if each.key > last]

    def entries_of(self, message_id: EntryId) -> tuple[EntryKey, ...]:
        """The entries to request, so that a message comes again."""
        key = message_id.key
        return self._chunks.get(key) or self._chunks_before.get(key, (key,))

    def forget(self, keys: Sequence[EntryKey]) -> None:
        """Forget these entries, as they are requested again."""
        for key in keys:
            self._batches.pop(key, None)
            self._forget_single(key)
            self._take_chunks(key)

    def _forget_single(self, key: EntryKey) -> None:
        self._single.discard(key)
        self._single_before.discard(key)

    def forget_all(self) -> None:
        """Forget all batches and chunks, as everything is requested again (in order)."""
        self._batches.clear()
        self._chunks.clear()
        self._chunks_before.clear()

    # Sending

    def take_group(self) -> tuple[Acknowledgement | None, list[Acknowledgement]]:
        """Remove and return the group: a cumulative acknowledgement and individual ones."""
        up_to, group = self._up_to, self._group
        self._up_to, self._group = None, {}
        if up_to is not None:
            self._sent_up_to = up_to
        return (
            None if up_to is None else acknowledgement_up_to(up_to),
            [_of_group(key, waiting) for key, waiting in group.items()],
        )

    def _take_chunks(self, key: EntryKey) -> tuple[EntryKey, ...]:
        """Forget the chunks of a message; returns its entries."""
        return self._chunks.pop(key, None) or self._chunks_before.pop(key, (key,))

    def _forget_if_done(self, key: EntryKey, batch: _Batch) -> None:
        if not batch.pending & ~batch.held:
            self._batches.pop(key, None)

    def _up_to_or_sent(self, key: EntryKey) -> EntryId | None:
        """The last cumulative acknowledgement, if it is in this entry."""
        last = self._up_to or self._sent_up_to
        return last if last is not None and last[:2] == key else None

    def _covers(self, key: EntryKey) -> bool:
        """Whether all of an entry is acknowledged cumulatively."""
        last = self._up_to or self._sent_up_to
        if last is None or key > last[:2]:
            return False
        return key < last[:2] or last.batch_index < 0 or last.batch_index + 1 >= last.batch_size

    def _left_by_up_to(self, key: EntryKey, size: int) -> int:
        last = self._up_to_or_sent(key)
        return pending_all(size) if last is None else _after(last.batch_index, size)


def _left_of(waiting: _Batch | _AckSet) -> _AckSet:
    return waiting if isinstance(waiting, tuple) else (waiting.left(), waiting.size)


def _of_group(key: EntryKey, waiting: _Batch | _AckSet) -> Acknowledgement:
    left, size = _left_of(waiting)
    return Acknowledgement(key, to_words(left), size)


def _drop_before(known: dict[EntryKey, V], key: EntryKey) -> None:
    """Forget entries before `key`, up to the first later one in the order in which they came."""
    while known:
        first = next(iter(known))
        if first >= key:
            return
        del known[first]
