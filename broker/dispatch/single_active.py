"""Exclusive and Failover: one consumer at a time gets everything, in order.

Rules:

- There is no bookkeeping per entry: redelivery means reading again from the first entry that is
  not acknowledged.  So a request to redeliver single entries redelivers all of them, which keeps
  the order, and redelivery counts stay 0.
- When another consumer becomes the active one, it begins with the first entry not acknowledged.
- Only the active consumer can ask for redelivery.
- What a transaction released is read again too, from the first entry that is not acknowledged.
- Behind what a transaction of another consumer acknowledged cumulatively nothing is sent until that
  has ended.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.consumer import SubscriptionType
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.entry_facts import facts_of
from broker.dispatch.redelivery import RedeliveryCounts
from broker.dispatch.selection import choose_active
from config.bounds import READ_BATCH_ENTRIES

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.subscription import Subscription
    from protocol.ids import Position


class SingleActiveDispatcher(Dispatcher):
    """See the module's rules."""

    reads_again = True

    def __init__(
        self, subscription: "Subscription", counts: RedeliveryCounts, kind: SubscriptionType
    ) -> None:
        super().__init__(subscription, counts)
        self.active: Consumer | None = None
        self._passed_over = False
        """Whether something held was skipped since it was last read from the start."""
        self._failover = kind is SubscriptionType.FAILOVER

    def add(self, consumer: "Consumer") -> None:
        """It may become the active one at once."""
        self.consumers.append(consumer)
        self._choose()

    def remove(self, consumer: "Consumer") -> None:
        """If it was the active one, the next begins with what it left."""
        self.consumers.remove(consumer)
        if consumer is self.active:
            self.active = None
            self._choose()

    def announce(self, consumer: "Consumer") -> None:
        """ACTIVE_CONSUMER_CHANGE to a Failover consumer, whichever it is."""
        if self._failover:
            consumer.send_active_change(consumer is self.active)

    def redeliver(self, consumer: "Consumer", positions: "Sequence[Position] | None") -> None:
        """Read again from the first unacknowledged entry, whatever `positions` say."""
        if consumer is self.active:
            consumer.redelivered_total += len(positions or ())
            self._rewind()

    def settled(self, consumer: "Consumer | None", position: "Position", remaining: int) -> None:
        """Nothing is kept for each entry."""

    def released(self, positions: "Sequence[Position]", *, again: bool) -> None:
        """Read again what was sent or skipped."""
        read_up_to = self.reader.next_position
        if self._passed_over or (again and any(each < read_up_to for each in positions)):
            self._rewind()

    def _choose(self) -> None:
        if not self.consumers:
            return
        chosen = choose_active(self.consumers, self.subscription.partition_index)
        if chosen is self.active:
            return
        self.active = chosen
        self._rewind()
        if self._failover:
            for consumer in self.consumers:
                if consumer.is_open:
                    consumer.send_active_change(consumer is chosen)

    def _rewind(self) -> None:
        self._passed_over = False
        self.reader.seek(self._unacknowledged_start())
        self.wake()

    def _dispatch(self) -> bool:
        consumer = self.active
        if consumer is None or consumer.permits <= 0:
            return False
        if not consumer.connection.writable:
            consumer.when_writable(self.wake)
            return False
        transactional = self.subscription.transactional
        if transactional is not None and transactional.keeps_from(consumer):
            self._passed_over = True
            return False
        limit = self.topic.max_read_position()
        reader, cursor, buffer = self.reader, self.cursor, self.reader.buffer
        held = self._held()
        budget = READ_BATCH_ENTRIES
        while budget and consumer.permits > 0 and consumer.connection.writable:
            if not buffer and not reader.fill(limit, consumer.permits):
                break
            entry = buffer.popleft()
            budget -= 1
            position, data = entry
            if cursor.is_acknowledged(position):
                continue
            if held is not None and held.is_pending(position):
                self._passed_over = True
                continue
            count, special = facts_of(data)
            if special and self._withheld(entry):
                continue
            ack_set = cursor.ack_set(position) if count > 1 else None
            if held is not None and count > 1:
                left = held.remaining(position, ack_set, count)
                self._passed_over |= left is not ack_set
                ack_set = left or None
            consumer.deliver(position, data, count, 0, ack_set)
        consumer.flush()
        if not consumer.connection.writable:
            consumer.when_writable(self.wake)
        return not budget
