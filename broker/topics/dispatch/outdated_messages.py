"""Pure: messages that a consumer was sent before another one became the active one (L8)."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from broker.topics.consumer import Consumer
from magnetar.protocol.ids import EARLIEST, Position
from storage.managed_ledger.cursor import Cursor
from txn.errors import TransactionConflict


class FirstUnused(NamedTuple):
    """The first message that a consumer was sent and did not acknowledge."""

    position: Position
    ack_set: Sequence[int] | None
    """What is left of the batch at this position, if some of it was acknowledged."""


class OutdatedMessages:
    """The messages that may still be in the queues of consumers which ceased to be active.

    Such a consumer may become active again, and take these messages before those that it is sent
    then.  Its next cumulative acknowledgement in a transaction covers them all.  If the consumer
    that was active in between acknowledged them, two transactions would have used them.  So that
    acknowledgement is refused.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._outdated: dict[Consumer, tuple[FirstUnused, Position]] = {}
        """By consumer: its first outdated message, and the position after the last one."""

    def note(self, consumer: Consumer, first: FirstUnused, end: Position) -> None:
        """Note that a consumer is active no more: it may have `first` and all before `end`.

        What it has of an earlier time stays noted.
        """
        if consumer in self._outdated:
            first, earlier = self._outdated[consumer]
            end = max(earlier, end)
        if first.position < end:
            self._outdated[consumer] = first, end

    def forget(self, consumer: Consumer) -> None:
        """Note that a consumer has none of them any more: it is gone, or asked for redelivery."""
        self._outdated.pop(consumer, None)

    def acknowledged(self, consumer: Consumer, up_to: Position, then: FirstUnused) -> None:
        """Note that a consumer acknowledged up to there in a transaction; `then` comes next."""
        if consumer in self._outdated:
            _, end = self._outdated[consumer]
            if up_to >= end:
                del self._outdated[consumer]
            else:
                self._outdated[consumer] = then, end

    def end_of(self, consumer: Consumer) -> Position:
        """The position after the last outdated message that a consumer may have."""
        _, end = self._outdated.get(consumer, (None, EARLIEST))
        return end

    def require_unused(self, consumer: Consumer, position: Position) -> None:
        """Raise `TransactionConflict` if a consumer would acknowledge what another one has used.

        One refusal behind all that is outdated is enough: by then it has taken all of it.
        """
        if consumer not in self._outdated:
            return
        first, end = self._outdated[consumer]
        if self._is_used(first):
            if position >= end:
                del self._outdated[consumer]
            raise TransactionConflict(
                f"Another consumer acknowledged message {first.position.text}, and maybe more of "
                f"what was sent to {consumer.name} before: abort the transaction, and ask for "
                "redelivery."
            )

    def _is_used(self, first: FirstUnused) -> bool:
        cursor, (position, ack_set) = self._cursor, first
        left = cursor.ack_set(position)
        if cursor.is_acknowledged(position):
            return True
        if ack_set is None:
            return left is not None
        # What the consumer acknowledged of it may not be committed yet, and be left there.
        return left is not None and any(
            unused & ~word for unused, word in zip_longest(ack_set, left, fillvalue=0)
        )
