"""What every dispatcher does: wake up, read, leave out what no consumer may see, look at the end.

Rules:

- A dispatcher runs on events only: appended entries, permits, acknowledgements, a socket that
  takes bytes again, a read that ended.  Events of one loop turn make one run.
- One run sends READ_BATCH_ENTRIES at most, then lets the loop go on before the next.
- Nothing past `Topic.max_read_position` is read.  Markers and entries of aborted transactions are
  acknowledged in passing.
- Messages that open transactions acknowledged are skipped in passing, and not acknowledged.
"""

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
    """Sends the entries of one subscription to its consumers, as they have permits."""

    reads_again: ClassVar[bool] = False
    """Whether whatever comes back has it read again from the first entry not acknowledged."""

    def __init__(self, subscription: DispatchedSubscription, counts: RedeliveryCounts) -> None:
        self.subscription = subscription
        self.topic = subscription.topic
        self.ledger = subscription.topic.ledger
        self.cursor = subscription.cursor
        self.counts = counts
        self.consumers: list[Consumer] = []
        self.coming_back: set[Position] = set()
        """Entries of which an abort released messages, and whose other ends are under way.

        It is for `TransactionalAcks`; who reads all again may clear it.
        """
        self.reader = EntryReader(
            self.ledger,
            self._unacknowledged_start(),
            skip=self.cursor.first_unacknowledged,
            ready=self.wake,
        )
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._stop_listening = self.ledger.on_append(self.run)

    @property
    def delayed(self) -> int:
        """Entries that were read and are kept back until their time."""
        return 0

    # Events

    def wake(self) -> None:
        """Something changed: run once, soon."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_run)

    def _scheduled_run(self) -> None:
        self._scheduled = False
        self.run()

    def run(self) -> None:
        """Send what can be sent now."""
        if self._closed or not self.consumers:
            return
        if self._dispatch():
            self.wake()
        if self.topic.sealed:
            self.subscription.look_at_end()

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True
        self._stop_listening()
        self.reader.close()

    # What a kind of dispatcher decides

    @abstractmethod
    def _dispatch(self) -> bool:
        """One bounded run; True when there is more to do at once."""

    @abstractmethod
    def add(self, consumer: Consumer) -> None:
        """Take a consumer in.  Raises `ConsumerAssignError`, and then changes nothing."""

    @abstractmethod
    def remove(self, consumer: Consumer) -> None:
        """Let a consumer go; what it has not acknowledged goes to others."""

    def announce(self, consumer: Consumer) -> None:  # noqa: B027 - most have nothing to tell
        """The consumer knows that it is open: tell it what it could not be told before."""

    @abstractmethod
    def redeliver(self, consumer: Consumer, messages: Mapping[Position, int] | None) -> None:
        """Send again what the consumer has not acknowledged: entries and bits, or all (None)."""

    @abstractmethod
    def settled(self, consumer: Consumer | None, position: Position, left: int) -> None:
        """`consumer` (None: any) acknowledged messages of an entry.

        `left` are the bits of those that are not acknowledged.
        """

    # Transactions

    def held(self, position: Position, messages: int) -> None:  # noqa: B027 - some keep nothing
        """A transaction holds these messages of an entry (bits), durably: nobody has them now."""

    @abstractmethod
    def released(self, positions: Sequence[Position], *, again: bool) -> None:
        """Of these entries a transaction holds messages no longer: they are delivered.

        With `again` their consumers had been relieved of them (`held`), and it counts as a
        redelivery; else only what nobody has is delivered.
        """

    # What they share

    def _held(self) -> HeldMessages | None:
        """What open transactions hold, if they hold anything now."""
        held = self.subscription.messages_held
        return held if held is not None and held.any else None

    def _unacknowledged_start(self) -> Position:
        return self.cursor.first_unacknowledged(self.ledger.next_position(self.cursor.mark_delete))

    def _withheld(self, entry: Entry) -> bool:
        """Whether no consumer may see an entry that has something special; then it is done with."""
        if is_marker(entry.data) or self.topic.is_aborted(entry):
            self.subscription.skip(entry.position)
            return True
        return False
