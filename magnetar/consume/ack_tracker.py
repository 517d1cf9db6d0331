"""What a segment consumer has acknowledged, and what of it the broker is still to be told.

Pure.  Rules:

- Acknowledgements wait in a group and leave together.  A cumulative one replaces those that it
  covers; only the highest is kept.
- A message of a batch is acknowledged by a set: a bit that is not set is acknowledged, and the
  broker combines sets by AND.  So a set clears what this consumer acknowledged and nothing else,
  also where others hold the rest.  When nothing of a batch is left the entry itself is
  acknowledged, which brokers without such sets need.
- Messages that compaction removed from a batch count as acknowledged.
- What waits in the group, or was acknowledged on this attachment, is not handed out when the broker
  sends it again.  With a new attachment only the group counts: somebody may have gone back on
  purpose.  Messages that were handed out before stay acknowledgeable.
- What was acknowledged in a transaction is not known to be acknowledged: it comes again if the
  transaction aborts.
- An id of a batch that does not say how large the batch is gets that from the batch.  If that is
  not known it is refused: the rest of the batch would count as acknowledged.
- A batch is known until everything of it is acknowledged, in a transaction or not, or anything of
  it is asked for again; without being known, its messages are acknowledged one by one.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from magnetar.consume.received import EntryKey
from magnetar.errors import InvalidArgument
from magnetar.message_id import EntryId, place_of
from protocol.ack_set import pending_all, to_words

__all__ = ["AckTracker", "Acknowledgement", "acknowledgement_of", "acknowledgement_up_to"]

V = TypeVar("V")


class Acknowledgement(NamedTuple):
    """Of an entry; `ack_set` has words unless it is acknowledged whole."""

    key: EntryKey
    ack_set: Sequence[int] = ()
    batch_size: int = 0


def acknowledgement_of(message_id: EntryId) -> Acknowledgement:
    """Of one message, and of nothing else in its batch."""
    key, index, size = message_id.key, message_id.batch_index, message_id.batch_size
    if index < 0 or size <= 1:
        return Acknowledgement(key)
    return Acknowledgement(key, to_words(pending_all(size) & ~(1 << index)), size)


def acknowledgement_up_to(message_id: EntryId) -> Acknowledgement:
    """Of a message and all before it; to be sent as a cumulative one."""
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
        self.mine: Final = mine
        """What the broker gave to this consumer."""
        self.pending = pending
        """What of that is not acknowledged."""
        self.held = 0
        """What of that is acknowledged in a transaction."""
        self.of_before = False
        """Whether it came on an earlier attachment."""

    def left(self) -> int:
        """The set to send; 0 for the whole entry."""
        return pending_all(self.size) & ~(self.mine & ~self.pending)


_Left = tuple[int, int]
"""The set to send, 0 for the whole entry, and the size of the batch."""
_WHOLE: Final[_Left] = (0, 0)


class AckTracker:
    """See the module's rules."""

    __slots__ = ("_batches", "_chunks", "_chunks_before", "_group", "_sent_up_to", "_up_to")

    def __init__(self) -> None:
        self._batches: dict[EntryKey, _Batch] = {}
        self._chunks: dict[EntryKey, tuple[EntryKey, ...]] = {}
        self._chunks_before: dict[EntryKey, tuple[EntryKey, ...]] = {}
        """Those of the attachment before."""
        self._group: dict[EntryKey, _Batch | _Left] = {}
        self._up_to: EntryId | None = None
        self._sent_up_to: EntryId | None = None

    @property
    def waiting(self) -> int:
        """Acknowledgements in the group."""
        return len(self._group) + (self._up_to is not None)

    @property
    def known(self) -> int:
        """Batches and chunked messages that are known."""
        return len(self._batches) + len(self._chunks) + len(self._chunks_before)

    # What comes

    def delivered(self, key: EntryKey) -> bool:
        """Whether to hand out an entry that is no batch."""
        return self._group.get(key) is None and not self._covers(key)

    def delivered_chunks(self, chunks: tuple[EntryKey, ...]) -> bool:
        """Whether to hand out a message of these entries."""
        last = chunks[-1]
        if not self.delivered(last):
            return False
        self._chunks[last] = chunks
        self._chunks_before.pop(last, None)
        return True

    def delivered_batch(self, key: EntryKey, size: int, mine: int, visible: int) -> int:
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
            pending &= known.pending
        if self._covers(key):
            pending = 0
        elif self._up_to_or_sent(key) is not None:
            pending &= self._left_by_up_to(key, size)
        if pending:
            self._batches[key] = _Batch(size, mine, pending)
        else:
            self._batches.pop(key, None)
        return pending

    def attached(self) -> None:
        """A new attachment begins."""
        for key, batch in list(self._batches.items()):
            if batch.of_before:
                del self._batches[key]
            batch.of_before = True
        self._chunks_before, self._chunks = self._chunks, {}
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
            for chunk in self._take_chunks(key):
                self._group[chunk] = _WHOLE

    def acknowledge_entry(self, key: EntryKey) -> None:
        """All of an entry, of which nothing is handed out."""
        self._batches.pop(key, None)
        self._group[key] = _WHOLE

    def acknowledge_up_to(self, message_id: EntryId) -> None:
        """A message and everything before it."""
        last = max(filter(None, (self._up_to, self._sent_up_to)), key=place_of, default=None)
        if last is not None and place_of(message_id) <= place_of(last):
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

    def committed_up_to(self, message_id: EntryId) -> None:
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
        """What to send to acknowledge one message in a transaction."""
        key, index = message_id.key, message_id.batch_index
        if index < 0:
            return [Acknowledgement(chunk) for chunk in self._take_chunks(key)]
        batch = self._batches.get(key)
        if batch is not None:
            batch.held |= 1 << index
            self._forget_if_done(key, batch)
        return [acknowledgement_of(message_id)]

    def let_go(self, held: Sequence[Acknowledgement]) -> None:
        """What `hold` gave was not acknowledged: pieces of a message are asked for together."""
        if len(held) > 1:
            self._chunks[held[-1].key] = tuple(each.key for each in held)

    def hold_up_to(
        self, message_id: EntryId, found: Iterable[EntryId], first: EntryKey | None
    ) -> tuple[Acknowledgement | None, list[Acknowledgement]]:
        """What to send to acknowledge up to a message in a transaction.

        Messages in pieces lie across it from the entry `first` on (None: there are none), and
        `found` are those of which nothing was said: in front of that entry they are acknowledged
        by the last of them, behind it one by one.
        """
        if first is None:
            return acknowledgement_up_to(message_id), []
        before = max((each for each in found if each.key < first), key=place_of, default=None)
        behind = sorted({each for each in (*found, message_id) if each.key > first}, key=place_of)
        held = (each for message in behind for each in self.hold(message))
        if before is None:
            return None, list(held)
        last = before.key
        return acknowledgement_up_to(before), [each for each in held if each.key > last]

    def entries_of(self, message_id: EntryId) -> tuple[EntryKey, ...]:
        """The entries to ask for, so that a message comes again."""
        key = message_id.key
        return self._chunks.get(key) or self._chunks_before.get(key, (key,))

    def ask_again(self, keys: Sequence[EntryKey]) -> None:
        """These entries are asked for again: they are not known any more."""
        for key in keys:
            self._batches.pop(key, None)
            self._take_chunks(key)

    def ask_all_again(self) -> None:
        """Everything is asked for again: of what is not shared only cumulative ones are known."""
        self._batches.clear()
        self._chunks.clear()
        self._chunks_before.clear()

    # What is sent

    def take(self) -> tuple[Acknowledgement | None, list[Acknowledgement]]:
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


def _left_of(waiting: _Batch | _Left) -> _Left:
    return waiting if isinstance(waiting, tuple) else (waiting.left(), waiting.size)


def _of_group(key: EntryKey, waiting: _Batch | _Left) -> Acknowledgement:
    left, size = _left_of(waiting)
    return Acknowledgement(key, to_words(left), size)


def _drop_before(known: dict[EntryKey, V], key: EntryKey) -> None:
    """Forget the entries before `key`, which came in order; what came late stays for a while."""
    while known:
        first = next(iter(known))
        if first >= key:
            return
        del known[first]
