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
from broker.topics.throttle import Throttle
from magnetar.protocol.ids import EARLIEST, Position
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
        self.throttle: Throttle | None = None
        """The rates at which messages are sent; None: without limit."""
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._stop_listening = self.ledger.on_append(self.run)

    @property
    def delayed(self) -> int:
        """Number of entries that were read and are delayed until their time."""
        return 0

    @property
    def waiting(self) -> int:
        """Number of entries that were read, or came back, and wait to be sent."""
        return 0

    @property
    def blocked_on_unacked(self) -> bool:
        """Whether no consumer gets messages until some are acknowledged: see `limit_unacked`."""
        return False

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

    def throttle_by(self, throttle: Throttle | None) -> None:
        """Send at these rates from now on; those of before are waited for no longer."""
        if self.throttle is not None:
            self.throttle.close()
        self.throttle = throttle

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
        throttle = self.throttle
        if throttle is not None and not throttle.allows():
            return
        if self._dispatch() or (throttle is not None and throttle.exhausted):
            self.wake()  # in the next turn, so that the loop goes on
        if self.topic.sealed:
            self.subscription.report_end_if_reached()

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True
        self.throttle_by(None)
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

    def require_unused(self, consumer: Consumer, position: Position) -> None:
        """Raise `TransactionConflict` if an acknowledgement up to there is refused (L8).

        It would cover messages that the consumer was sent when it was active at an earlier time,
        and that another one acknowledged since, or has to process now.
        """
        return

    def was_sent(self, consumer: Consumer, position: Position) -> bool:
        """Whether a consumer may have been sent an entry since it attached, and not asked again."""
        return True

    def may_have_messages(self, consumer: Consumer) -> bool:
        """Whether a consumer may have messages that it has not acknowledged."""
        return True

    def acknowledged(self, consumer: Consumer, position: Position, ack_set: Sequence[int]) -> None:
        """Note that a consumer acknowledged up to there in a transaction; `ack_set`: what is left.

        Dispatchers that many consumers get messages of take no such acknowledgements.
        """
        return

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
        return self.cursor.first_unacknowledged(EARLIEST)

    def _first_to_read(self, at_or_after: Position) -> Position:
        """The first position at or after that one which is to be read."""
        return self.cursor.first_unacknowledged(at_or_after)

    def _skip_hidden(self, entry: Entry) -> bool:
        """Acknowledge a special entry that no consumer may see; False for any other entry."""
        if is_marker(entry.data):
            self.subscription.skip_marker(entry)
            return True
        if self.topic.is_aborted(entry):
            self.subscription.skip(entry.position)
            return True
        return False
