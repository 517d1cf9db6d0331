"""Pure: what a segment consumer has acknowledged, and what of it the broker is to be told."""

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
    """The bit of a message in its batch; all of them for -1, which is all of an entry."""
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
    """The bits of the messages behind `index`."""
    return pending_all(size) >> (index + 1) << (index + 1)


class _Batch:
    """A batch of which something was handed out."""

    __slots__ = ("held", "mine", "of_before", "pending", "size")

    def __init__(self, size: int, mine: int, pending: int) -> None:
        self.size: Final = size
        self.mine = mine
        """Bits of the messages that the broker gave to this consumer."""
        self.pending = pending
        """Bits of those that are not acknowledged."""
        self.held = 0
        """Bits of those that are acknowledged in a transaction."""
        self.of_before = False
        """Whether it came on an earlier attachment."""

    def left(self) -> int:
        """The set to send; 0 for the whole entry."""
        return pending_all(self.size) & ~(self.mine & ~self.pending)

    def in_hand(self) -> int:
        """Bits of the messages that wait for the application, or that it has not acknowledged."""
        return self.pending & ~self.held


_AckSet = tuple[int, int]
"""The set to send, 0 for the whole entry, and the size of the batch."""
_WHOLE: Final[_AckSet] = (0, 0)


class AckTracker:
    """What one segment consumer has acknowledged, and what of it the broker is still to be told.

    - Acknowledgements wait in a group and leave together. A cumulative one replaces those that it
      covers; only the highest is kept.
    - A message of a batch is acknowledged by a set: a bit that is not set is acknowledged, and the
      broker combines sets by AND. So a set clears what this consumer acknowledged and nothing else,
      also where others hold the rest. When nothing of a batch is left the entry itself is
      acknowledged, which brokers without such sets need.
    - Messages that compaction removed from a batch count as acknowledged.
    - What waits in the group, or was acknowledged on this attachment, is not handed out when the
      broker sends it again. With a new attachment only the group counts: somebody may have gone
      back on purpose. Messages that were handed out before stay acknowledgeable.
    - What was acknowledged in a transaction is not known to be acknowledged: it comes again if the
      transaction aborts.
    - Of what is shared a message is not handed out while the application has it, nor before its
      acknowledgement in a transaction is answered: of two copies the second would be refused. That
      goes for new attachments too, but for what was asked for again; with more than
      MAX_KNOWN_IN_HAND for the next one only, or who says nothing of what he has would have it
      known for ever. What came before the answer was seen is to be asked for again then
      (`settle`), whatever the answer: the transaction may have aborted at once, and its message
      lie behind the answer in one read. What is ordered comes as the broker sends it, for there
      everything behind it comes too.
    - An id of a batch that does not say how large the batch is gets that from the batch. If that is
      not known it is refused: the rest of the batch would count as acknowledged.
    - A batch is known until everything of it is acknowledged, in a transaction or not, or anything
      of it is asked for again; without being known, its messages are acknowledged one by one.
    """

    __slots__ = (
        "_batches",
        "_chunks",
        "_chunks_before",
        "_group",
        "_missed",
        "_sent_up_to",
        "_shared",
        "_single",
        "_single_before",
        "_unanswered",
        "_up_to",
    )

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._single: set[EntryKey] = set()
        """Shared subscriptions: single messages that came and are not acknowledged."""
        self._single_before: set[EntryKey] = set()
        """The same, of earlier attachments."""
        self._unanswered: dict[EntryKey, int] = {}
        """Shared: bits that are being acknowledged in transactions; 1 for a single message."""
        self._missed: dict[EntryKey, int] = {}
        """Bits of those that came again meanwhile."""
        self._batches: dict[EntryKey, _Batch] = {}
        self._chunks: dict[EntryKey, tuple[EntryKey, ...]] = {}
        self._chunks_before: dict[EntryKey, tuple[EntryKey, ...]] = {}
        """The same, of earlier attachments."""
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

    # What comes

    def deliver(self, key: EntryKey) -> bool:
        """Whether to hand out an entry that is no batch."""
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
        """Whether to hand out a message of these entries."""
        last = chunks[-1]
        new = self.deliver(last)
        if new or last in self._single:
            self._chunks[last] = chunks
            self._chunks_before.pop(last, None)
        return new

    def deliver_batch(self, key: EntryKey, size: int, mine: int, visible: int) -> int:
        """The bits of what to hand out of a batch of which the broker gives `mine`.

        `visible` are those that compaction has left.
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
        """Return the bits to hand out of a batch that came, a part of which may be known."""
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
        """Forget that the application has these messages: hand them out when they come again.

        They are given as entries and bits, as `bit_of`.
        """
        for key, bits in messages:
            self._forget_single(key)
            known = self._batches.get(key)
            if known is not None:
                known.mine &= ~bits
                known.pending &= ~bits
                self._forget_if_done(key, known)

    def start_attachment(self) -> None:
        """Begin a new attachment; messages that waited in the inbox are given back before."""
        keeps = self._shared and self.known <= MAX_KNOWN_IN_HAND
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

    # What is acknowledged

    def acknowledge(self, key: EntryKey, index: int, size: int) -> None:
        """One message: its entry, index and size of its batch as in ids."""
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
        """Acknowledge all of an entry, of which nothing is handed out."""
        self._batches.pop(key, None)
        self._group[key] = _WHOLE

    def acknowledge_up_to(self, message_id: EntryId) -> None:
        """A message and everything before it."""
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
        """A transaction that acknowledged a message and everything before it has committed."""
        self.acknowledge_up_to(message_id)
        if self._up_to is message_id:
            self._up_to, self._sent_up_to = None, message_id

    def sized(self, message_id: EntryId) -> EntryId:
        """The id with the size of its batch.  Raises `InvalidArgument` if nobody knows it."""
        if message_id.batch_index < 0 or message_id.batch_size > message_id.batch_index:
            return message_id
        batch = self._batches.get(message_id.key)
        if batch is None or message_id.batch_index >= batch.size:
            raise InvalidArgument(
                f"The id {message_id} is of a batch of {message_id.batch_size} messages and that "
                "batch is not known here; acknowledge the message that was received, or its id."
            )
        return message_id._replace(batch_size=batch.size)

    def hold(self, message_id: EntryId) -> Sequence[Acknowledgement]:
        """Mark a message as acknowledged in a transaction; return the acknowledgements to send."""
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
        """End what `hold` began, as the broker has answered; whether the message came meanwhile."""
        key, bit = message_id.key, 1 << max(message_id.batch_index, 0)
        came = bool(self._missed.get(key, 0) & bit)
        for bits in (self._unanswered, self._missed):
            left = bits.pop(key, 0) & ~bit
            if left:
                bits[key] = left
        return came

    def release(self, message_id: EntryId, held: Sequence[Acknowledgement]) -> None:
        """Undo `hold`, as the broker refused it: the application still has the message."""
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

        Messages in pieces lie across it from the entry `first` on (None: there are none), and
        `found` are those of which nothing was said: in front of that entry they are acknowledged
        by the last of them, behind it one by one.
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
        """The entries to ask for, so that a message comes again."""
        key = message_id.key
        return self._chunks.get(key) or self._chunks_before.get(key, (key,))

    def forget(self, keys: Sequence[EntryKey]) -> None:
        """Forget these entries, as they are asked for again."""
        for key in keys:
            self._batches.pop(key, None)
            self._forget_single(key)
            self._take_chunks(key)

    def _forget_single(self, key: EntryKey) -> None:
        self._single.discard(key)
        self._single_before.discard(key)

    def forget_all(self) -> None:
        """Forget all batches and chunks, as everything is asked for again (in order)."""
        self._batches.clear()
        self._chunks.clear()
        self._chunks_before.clear()

    # What is sent

    def take_group(self) -> tuple[Acknowledgement | None, list[Acknowledgement]]:
        """The group: a cumulative acknowledgement and individual ones; it is empty afterwards."""
        up_to, group = self._up_to, self._group
        self._up_to, self._group = None, {}
        if up_to is not None:
            self._sent_up_to = up_to
        return (
            None if up_to is None else acknowledgement_up_to(up_to),
            [_of_group(key, waiting) for key, waiting in group.items()],
        )

    def _take_chunks(self, key: EntryKey) -> tuple[EntryKey, ...]:
        """The entries of a message, which is not known any more."""
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
    """Forget the entries before `key`, which came in order; what came late stays for a while."""
    while known:
        first = next(iter(known))
        if first >= key:
            return
        del known[first]
