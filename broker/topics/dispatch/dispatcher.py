"""The base class of all dispatchers."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from broker.topics.consumer import Consumer
from broker.topics.dispatch.entry_facts import is_marker
from broker.topics.dispatch.entry_reader import EntryReader
from broker.topics.dispatch.redelivery import RedeliveryCounts
from broker.topics.dispatch.source import DispatchedSubscription
from magnetar.protocol.ids import Position
from storage.managed_ledger.types import Entry
from txn.held_messages import HeldMessages


class Dispatcher(ABC):
    """Sends the entries of one subscription to its consumers, as they have permits.

    It runs on events only: appended entries, permits, acknowledgements, a socket that takes bytes
    again, a read that ended.  Nothing past the max read position is read.  Markers and entries of
    aborted transactions are acknowledged in passing; messages that open transactions acknowledged
    are skipped, and not acknowledged.
    """

    reads_again: ClassVar[bool] = False
    """Whether released entries are delivered by reading again from the first unacknowledged one."""

    def __init__(self, subscription: DispatchedSubscription, counts: RedeliveryCounts) -> None:
        self.subscription = subscription
        self.topic = subscription.topic
        self.ledger = subscription.topic.ledger
        self.cursor = subscription.cursor
        self.counts = counts
        self.consumers: list[Consumer] = []
        self.coming_back: set[Position] = set()
        """Entries of which an abort released messages, while other transactions still end.

        `TransactionalAcks` fills it; a dispatcher that reads everything again clears it.
        """
        self.reader = EntryReader(
            self.ledger,
            self._unacknowledged_start(),
            skip=self._first_to_read,
            ready=self.wake,
        )
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._stop_listening = self.ledger.on_append(self.run)

    @property
    def delayed(self) -> int:
        """Number of entries that were read and are delayed until their time."""
        return 0

    def limit_unacked(self, messages: int) -> None:
        """Send nothing while shared consumers together have so many; 0: without limit.

        Dispatchers with one active consumer have no such limit.
        """
        return

    def delay_messages(self, *, active: bool, tick_ms: int) -> None:
        """Delay messages until their time, and wake for due ones at most once in `tick_ms`.

        Unless `active`, all are sent at once, those that wait too.  Dispatchers with one active
        consumer never delay any.
        """
        return

    # Events

    def wake(self) -> None:
        """Run once, soon."""
        # All events of one turn of the loop make one run.
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_run)

    def _scheduled_run(self) -> None:
        self._scheduled = False
        self.run()

    def run(self) -> None:
        """Send what can be sent now, READ_BATCH_ENTRIES at most."""
        if self._closed or not self.consumers:
            return
        if self._dispatch():
            self.wake()  # in the next turn, so that the loop goes on
        if self.topic.sealed:
            self.subscription.report_end_if_reached()

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True
        self._stop_listening()
        self.reader.close()

    # Decisions of each kind of dispatcher

    @abstractmethod
    def _dispatch(self) -> bool:
        """Make one bounded run; True when there is more to send at once."""

    @abstractmethod
    def add(self, consumer: Consumer) -> None:
        """Add a consumer.  Raises `ConsumerAssignError`, and then changes nothing."""

    @abstractmethod
    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer; its unacknowledged messages go to others."""

    def announce(self, consumer: Consumer) -> None:  # noqa: B027 - most have nothing to send
        """Send a consumer what it could not take in before the answer to its SUBSCRIBE."""

    @abstractmethod
    def redeliver(self, consumer: Consumer, messages: Mapping[Position, int] | None) -> None:
        """Send the consumer's unacknowledged messages again: entries and bits, or all (None)."""

    @abstractmethod
    def settled(self, consumer: Consumer | None, position: Position, left: int) -> None:
        """Note that `consumer` (None: any) acknowledged messages of an entry.

        `left` has the bits of those that are still not acknowledged.
        """

    # Transactions

    def held(self, position: Position, messages: int) -> None:  # noqa: B027 - some keep nothing
        """Note that a transaction holds these messages (bits) of an entry, durably.

        They are pending at no consumer any more.
        """

    @abstractmethod
    def released(self, positions: Sequence[Position], *, again: bool) -> None:
        """Deliver messages of these entries that a transaction holds no longer.

        With `again` they were `held` before, so no consumer has them, and this counts as a
        redelivery.  Otherwise only messages that are pending at no consumer are delivered.
        """

    # Shared code

    def _held_messages(self) -> HeldMessages | None:
        """The messages that open transactions hold, if they hold any now."""
        held = self.subscription.messages_held
        return held if held is not None and held.any else None

    def _unacknowledged_start(self) -> Position:
        return self.cursor.first_unacknowledged(self.ledger.next_position(self.cursor.mark_delete))

    def _first_to_read(self, at_or_after: Position) -> Position:
        """The first position at or after that one which is to be read."""
        return self.cursor.first_unacknowledged(at_or_after)

    def _skip_hidden(self, entry: Entry) -> bool:
        """Acknowledge a special entry that no consumer may see; False for any other entry."""
        if is_marker(entry.data) or self.topic.is_aborted(entry):
            self.subscription.skip(entry.position)
            return True
        return False
