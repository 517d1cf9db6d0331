"""Pure: messages that a consumer may have been sent before it attached (L9)."""

import hashlib
from collections.abc import Sequence
from typing import Final

from broker.topics.consumer import Consumer
from config.bounds import EARLIER_CONSUMERS
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.incarnation import INCARNATION
from storage.managed_ledger.cursor import Cursor
from txn.errors import TransactionConflict

NAME_BYTES: Final = 8
_NOBODY: Final = 0
_CLOSED: Final = 1


class EarlierMessages:
    """The consumers that may come back with messages which other consumers have used since.

    A client that connects anew drops its queue, but its application may still have messages in
    hand.  When it acknowledges them cumulatively in a transaction, another consumer may have used
    them.  Its SUBSCRIBE does not tell whether it is new or comes back.  So the first such
    acknowledgement after it attached is refused if a consumer of its name acknowledged in a
    transaction, or left with messages, before another one's last transaction.

    The names are noted with the position of the cursor, so that the next owner knows them too.
    What consumers were sent while they stay attached: see `OutdatedMessages`.
    """

    __slots__ = ("_cursor", "_last", "_left", "_loaded", "_others", "_refused")

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._loaded = cursor.mark_delete
        """Up to there the notes of earlier owners tell who used messages."""
        self._last = _NOBODY
        """The consumer whose transaction moved the position last."""
        self._others: tuple[int, ...] = ()
        """Consumers that may come back with messages that were used since."""
        self._left: tuple[int, ...] = ()
        """Consumers that may come back with messages; no transaction moved the position since."""
        if cursor.notes:
            self._last, *names = cursor.notes
            end = names.index(_NOBODY) if _NOBODY in names else len(names)
            self._others, self._left = tuple(names[:end]), tuple(names[end + 1 :])
        self._refused: tuple[int, ...] = ()
        """Consumers that were refused, and have used nothing since."""

    def moved(self) -> None:
        """Note that the cursor was moved: messages may be used again."""
        self._loaded = EARLIEST

    def used(self, identity: str, up_to: Position) -> None:
        """Note that a transaction committed in which this consumer acknowledged cumulatively."""
        if up_to <= self._loaded:
            return  # applied by an earlier owner, which did not delete the record (A2)
        name = number_of(identity)
        self._refused = _without(self._refused, name)
        self._others = _newest(_without((*self._others, *self._left, self._last), name))
        self._last, self._left = name, ()
        self._store()

    def left(self, consumer: Consumer) -> None:
        """Note that a consumer lost its connection, and may have messages."""
        name = number_of(name_of(consumer))
        if name != self._last:
            self._left = _newest((*_without(self._left, name), name))
            self._store()

    def closed(self, consumer: Consumer) -> None:
        """Note that an application closed its consumer: it acknowledges nothing any more."""
        name = number_of(name_of(consumer))
        if self._last == name:
            self._last = _CLOSED
        self._others, self._left = _without(self._others, name), _without(self._left, name)
        self._store()

    def _store(self) -> None:
        if self._last != _NOBODY:
            left = (_NOBODY, *self._left) if self._left else ()
            self._cursor.set_notes((self._last, *self._others, *left))

    def require_unused(self, consumer: Consumer, *, sent: bool) -> None:
        """Raise `TransactionConflict`, once, if a consumer may acknowledge what others have used.

        `sent`: whether it was sent the last message of its acknowledgement since it attached.
        """
        name = number_of(name_of(consumer))
        if not consumer.has_earlier_messages or self._last in (_NOBODY, name):
            return
        if sent and (name not in self._others or name in self._refused):
            return
        # L9: once, since a consumer that connects anew after each refusal must get on, too.
        consumer.has_earlier_messages = False
        self._refused = _newest((*_without(self._refused, name), name))
        raise TransactionConflict(
            f"{consumer.name} may acknowledge messages that it was sent before it connected anew, "
            "and that another consumer has used: abort the transaction, and ask for redelivery."
        )

    def has_none(self, consumer: Consumer) -> None:
        """Note that a consumer has no such messages: it acknowledged, or asked for redelivery."""
        consumer.has_earlier_messages = False


def _without(names: Sequence[int], name: int) -> tuple[int, ...]:
    return tuple(each for each in names if each != name)


def _newest(names: Sequence[int]) -> tuple[int, ...]:
    """The last ones, each once, and none that is no consumer's."""
    kept = dict.fromkeys(each for each in reversed(names) if each > _CLOSED)
    return tuple(kept)[:EARLIER_CONSUMERS][::-1]


def name_of(consumer: Consumer) -> str:
    """A digest by which a consumer is known when it comes back, as hexadecimal digits.

    Consumers without an incarnation are known by their names: two of one name count as one.
    """
    incarnation = consumer.metadata.get(INCARNATION)
    name = consumer.name if incarnation is None else f"{consumer.name}\0{incarnation}"
    return hashlib.blake2b(name.encode(), digest_size=NAME_BYTES).hexdigest()


def number_of(identity: str) -> int:
    """The number by which a consumer is noted, from its identity, which begins with its name."""
    try:
        number = int(identity[: 2 * NAME_BYTES], 16) >> 1
    except ValueError:
        return _CLOSED
    return max(number, _CLOSED)
