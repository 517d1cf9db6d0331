"""`Receipts`: the outcomes of messages that `Producer.send_many` has sent."""

import asyncio
from typing import Final, cast

from magnetar.message_id import EntryId, MessageId
from magnetar.produce.outgoing import Outcome

__all__ = ["Receipts", "RowOutcome", "future_of"]

_NOWHERE: Final = -1
_new_tuple: Final = tuple.__new__
"""Makes a NamedTuple without the call of its Python constructor."""
EntryFields = tuple[int, int, int, int, int, tuple[int, int] | None]
"""The fields of an `EntryId`."""


class Receipts:
    """The receipts of messages that were sent together, in the order of `send_many`.

    One future stands for all: it is done when the last message is stored, or the first has failed.
    Ids are kept as numbers until `ids` is called.
    """

    __slots__ = ("_places", "_stored", "_waiting", "segment_ids")

    def __init__(self, messages: int, stored: "asyncio.Future[None]") -> None:
        self.segment_ids: Final = [_NOWHERE] * messages
        """The segment of each message; -1 for one without receipt."""
        self._places: list[EntryFields | None] = [None] * messages
        self._stored = stored
        self._waiting = messages
        if not messages:
            stored.set_result(None)

    async def stored(self) -> None:
        """Wait until all are stored.  Raises the first failure; cancelling it changes nothing."""
        await asyncio.wait((self._stored,))
        error = self._stored.exception()
        if error is not None:
            raise error

    def ids(self) -> list[MessageId]:
        """The id of each message; call it after `stored`.  Raises the errors of `stored`."""
        self._stored.result()
        return [
            MessageId(_new_tuple(EntryId, where), segment_id)
            for segment_id, where in zip(self.segment_ids, self._places, strict=True)
            if where is not None
        ]

    # For the producer

    @property
    def outcome(self) -> "asyncio.Future[None]":
        """The future that stands for all messages."""
        return self._stored

    def add_receipt(self, row: int, segment_id: int, where: EntryFields) -> None:
        """Note that a message is stored."""
        self.segment_ids[row] = segment_id
        self._places[row] = where
        self._waiting -= 1
        if not self._waiting and not self._stored.done():
            self._stored.set_result(None)

    def failed(self, error: BaseException) -> None:
        """Fail all with the first error: a message is not stored, or that is not known."""
        if not self._stored.done():
            self._stored.set_exception(error)


class RowOutcome:
    """The `Outcome` of one message of `send_many`."""

    __slots__ = ("_done", "_receipts", "_row")

    def __init__(self, receipts: Receipts, row: int) -> None:
        self._receipts = receipts
        self._row = row
        self._done = False

    def done(self) -> bool:
        """See `Outcome.done`."""
        return self._done

    def set_result(self, result: MessageId) -> None:
        """See `Outcome.set_result`."""
        self.set_stored(result.segment_id, result.entry)

    def set_stored(self, segment_id: int, where: EntryFields) -> None:
        """Set the result without making an id."""
        self._done = True
        self._receipts.add_receipt(self._row, segment_id, where)

    def set_exception(self, error: BaseException) -> None:
        """See `Outcome.set_exception`."""
        self._done = True
        self._receipts.failed(error)

    @property
    def of_all(self) -> "asyncio.Future[None]":
        """The future that stands for all messages sent with this one."""
        return self._receipts.outcome


def future_of(outcome: Outcome) -> "asyncio.Future[MessageId] | asyncio.Future[None]":
    """The future of an outcome: its own, or that of all messages sent with it."""
    if isinstance(outcome, RowOutcome):
        return outcome.of_all
    return cast("asyncio.Future[MessageId]", outcome)
