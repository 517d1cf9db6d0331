"""What becomes of messages that were sent together: `Producer.send_many`.

Rules:

- Each message has an outcome of its own, as any message, but no future; one future tells of all:
  when the last one is stored, or as soon as one has failed.
- Where messages are is kept as numbers, and becomes ids when they are asked for.
"""

import asyncio
from typing import Final, cast

from magnetar.message_id import EntryId, MessageId
from magnetar.produce.outgoing import Outcome

__all__ = ["Receipts", "RowOutcome", "future_of"]

_NOWHERE: Final = -1
_new_tuple: Final = tuple.__new__
"""A NamedTuple without the call of its Python constructor."""
Place = tuple[int, int, int, int, int, tuple[int, int] | None]
"""The fields of an `EntryId`."""


class Receipts:
    """What became of messages that were sent together.

    Messages are numbered as they were given, from 0 on.
    """

    __slots__ = ("_places", "_stored", "_waiting", "segment_ids")

    def __init__(self, messages: int, stored: "asyncio.Future[None]") -> None:
        self.segment_ids: Final = [_NOWHERE] * messages
        """Of each message the segment that has it; -1: it has no receipt."""
        self._places: list[Place | None] = [None] * messages
        self._stored = stored
        self._waiting = messages
        if not messages:
            stored.set_result(None)

    async def stored(self) -> None:
        """Return when all are stored.  Raises the first failure; cancelling it changes nothing."""
        await asyncio.wait((self._stored,))
        error = self._stored.exception()
        if error is not None:
            raise error

    def ids(self) -> list[MessageId]:
        """Where each message is.  Raises as `stored` would; all are, when that has returned."""
        self._stored.result()
        return [
            MessageId(_new_tuple(EntryId, where), segment_id)
            for segment_id, where in zip(self.segment_ids, self._places, strict=True)
            if where is not None
        ]

    # For the producer

    @property
    def outcome(self) -> "asyncio.Future[None]":
        """Of all of them."""
        return self._stored

    def took(self, row: int, segment_id: int, where: Place) -> None:
        """That message is stored."""
        self.segment_ids[row] = segment_id
        self._places[row] = where
        self._waiting -= 1
        if not self._waiting and not self._stored.done():
            self._stored.set_result(None)

    def failed(self, error: BaseException) -> None:
        """One of them is not stored, or nobody knows; the first one is told."""
        if not self._stored.done():
            self._stored.set_exception(error)


class RowOutcome:
    """Of one message."""

    __slots__ = ("_done", "_receipts", "_row")

    def __init__(self, receipts: Receipts, row: int) -> None:
        self._receipts = receipts
        self._row = row
        self._done = False

    def done(self) -> bool:
        """Whether it is decided."""
        return self._done

    def set_result(self, result: MessageId) -> None:
        """It is stored, there."""
        self.stored(result.segment_id, result.entry)

    def stored(self, segment_id: int, where: Place) -> None:
        """As `set_result`, without an id."""
        self._done = True
        self._receipts.took(self._row, segment_id, where)

    def set_exception(self, error: BaseException) -> None:
        """It is not stored, or nobody knows."""
        self._done = True
        self._receipts.failed(error)

    @property
    def of_all(self) -> "asyncio.Future[None]":
        """The future that tells of it."""
        return self._receipts.outcome


def future_of(outcome: Outcome) -> "asyncio.Future[MessageId] | asyncio.Future[None]":
    """The future that tells of an outcome: its own, or that of all messages sent with it."""
    if isinstance(outcome, RowOutcome):
        return outcome.of_all
    return cast("asyncio.Future[MessageId]", outcome)
