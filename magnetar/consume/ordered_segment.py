"""One segment of a stream consumer, and the inbox of all of them.

Rules:

- What was acknowledged up to, plainly or in a transaction that committed, is not handed out any
  more, although it came before that was known (after a reconnect).
- A broker that sends earlier messages again by itself has let go of what a transaction held: what
  was handed out comes again (`Reader.went_back`).
- It is left in order only when no transaction that acknowledged on it is open: what such a one
  leaves undone must come before what follows it.
- While it is not known what becomes of a transaction nothing is handed out.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from magnetar.consume.consumer_settings import SubscribeSettings
from magnetar.consume.inbox import Inbox
from magnetar.consume.received import Received
from magnetar.consume.segment_consumer import SegmentConsumer, Subscribed
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError
from magnetar.message_id import EntryId

__all__ = ["OrderedInbox", "OrderedSegment", "Reader"]


class Reader(Protocol):
    """Whose segments they are."""

    times_back: int
    """How often everything has come again."""

    @property
    def in_doubt(self) -> bool:
        """Whether it is to be seen what comes again."""

    def is_over(self, segment_id: int, entry: EntryId) -> bool:
        """Whether an entry was acknowledged after it was sent."""

    def begins_anew(self, segment_id: int) -> None:
        """A new attachment: what is not acknowledged comes again."""

    def went_back(self, segment_id: int) -> None:
        """The broker has begun again at an earlier message."""


class OrderedSegment(SegmentConsumer):
    """See the module's rules."""

    def __init__(
        self,
        context: ClientContext,
        segment: Subscribed,
        how: SubscribeSettings,
        inbox: Inbox[SegmentConsumer],
        reader: Reader,
    ) -> None:
        super().__init__(context, segment, how, inbox)
        self._reader = reader
        self._furthest: tuple[tuple[int, int], int] | None = None
        """Entry and index of the last message that has come."""
        self._transactions: set[tuple[int, int]] = set()
        self._no_transactions = asyncio.Event()
        self._no_transactions.set()

    # What comes

    def goes_back(self, messages: Sequence[Received[SegmentConsumer]]) -> bool:
        """Whether these come again, unasked; else they are the last that have come."""
        first, last = messages[0], messages[-1]
        before = self._furthest
        if before is not None and (first.entry.key, first.batch_index) <= before:
            self._permits.taken(len(messages))
            self._reader.went_back(self.segment.segment_id)
            return True
        self._furthest = last.entry.key, last.batch_index
        return False

    def skipped(self, received: Received[object]) -> None:
        """What was just taken is not handed out."""
        if self._handed_out is not None:
            self._handed_out.take_back(received)

    def redeliver_all(self) -> None:
        """Everything that is not acknowledged comes again; if it is left, to somebody else."""
        if self._handed_out is not None:
            self._handed_out.give_up()
        if not self._leaving:
            self._furthest = None
            self._tracker.ask_all_again()
            self._redeliver_all()

    def detached(self, error: MagnetarError) -> None:
        """What is not acknowledged comes again."""
        super().detached(error)
        self._furthest = None
        self._reader.begins_anew(self.segment.segment_id)

    # Transactions

    @property
    def unanswered(self) -> "Collection[asyncio.Task[None]]":
        """Acknowledgements in transactions that the broker has not answered."""
        return self._answering

    def joined(self, transaction: tuple[int, int]) -> None:
        """A transaction acknowledges here."""
        self._transactions.add(transaction)
        self._no_transactions.clear()

    def over(self, transaction: tuple[int, int], committed: EntryId | None) -> None:
        """It is over, and has committed up to that."""
        if committed is not None:
            self._chunks.passed(committed.key)
            # What waits behind the first piece of an incomplete message is still to be sent.
            self._tracker.committed_up_to(self.before_open(committed))
        self._transactions.discard(transaction)
        if not self._transactions:
            self._no_transactions.set()

    # The end

    async def leave_in_order(self) -> None:
        """See the module's rules."""
        self._leaving = True
        self._inbox.drop(self)
        while self._handed_out or self._transactions:
            if self._handed_out:
                await self._handed_out.all_acknowledged()
            await self._no_transactions.wait()
        await self.close()

    async def close(self) -> None:
        """Nobody waits for a transaction any more."""
        self._transactions.clear()
        self._no_transactions.set()
        await super().close()

    def failed(self, error: MagnetarError) -> None:
        """As `close`."""
        self._transactions.clear()
        self._no_transactions.set()
        super().failed(error)


class OrderedInbox(Inbox[SegmentConsumer]):
    """See the module's rules."""

    def __init__(self, max_messages: int, max_bytes: int, reader: Reader) -> None:
        super().__init__(max_messages, max_bytes)
        self._reader = reader
        self._taken_at = 0

    @property
    def is_stale(self) -> bool:
        """Whether everything comes again since the last message was taken."""
        return self._taken_at != self._reader.times_back

    def put_back(self, received: Received[SegmentConsumer]) -> None:
        """What was taken and could not be handed out is the next, unless it comes again."""
        if not self.is_stale:
            super().put_back(received)

    def put(self, segment: SegmentConsumer, messages: Sequence[Received[SegmentConsumer]]) -> None:
        """What has come from a segment, all of one entry."""
        if not (isinstance(segment, OrderedSegment) and segment.goes_back(messages)):
            super().put(segment, messages)

    def take_nowait(self) -> Received[SegmentConsumer] | None:
        """The next message, if one is there and is to be handed out."""
        if self._reader.in_doubt:
            return None
        self._taken_at = self._reader.times_back
        while (received := super().take_nowait()) is not None:
            segment = received.segment
            if not self._reader.is_over(segment.segment.segment_id, received.entry_id):
                return received
            if isinstance(segment, OrderedSegment):
                segment.skipped(received)
        return None
