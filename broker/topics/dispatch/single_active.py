"""Exclusive and Failover: one consumer at a time gets everything, in order."""

from collections.abc import Collection, Mapping, Sequence

from broker.topics.compaction.reading import CompactedView
from broker.topics.consumer import Consumer, SubscriptionType
from broker.topics.dispatch.dispatcher import Dispatcher
from broker.topics.dispatch.entry_facts import facts_of, has_key_within
from broker.topics.dispatch.holds import Holds
from broker.topics.dispatch.outdated_messages import FirstUnused, OutdatedMessages
from broker.topics.dispatch.redelivery import RedeliveryCounts
from broker.topics.dispatch.selection import StickyRanges, choose_active
from broker.topics.dispatch.source import DispatchedSubscription
from config.bounds import READ_BATCH_ENTRIES
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.txn_id import TxnId
from txn.errors import TransactionConflict
from txn.held_messages import HeldMessages


class SingleActiveDispatcher(Dispatcher):
    """Sends everything, in order, to the active consumer of the subscription.

    There is no bookkeeping per entry.  Redelivery, the release of held messages and a change of the
    active consumer all read again from the first unacknowledged entry, so order is kept and
    redelivery counts stay 0.  Messages that transactions hold are skipped if `Holds` allows it;
    otherwise delivery stops in front of them.

    A consumer with hash ranges (a reader's `keyHashRange`) gets messages of keys within them; all
    others are acknowledged for its subscription.
    """

    reads_again = True

    def __init__(
        self,
        subscription: DispatchedSubscription,
        counts: RedeliveryCounts,
        kind: SubscriptionType,
    ) -> None:
        super().__init__(subscription, counts)
        self.active: Consumer | None = None
        self.compacted: CompactedView | None = None
        """The entries for an active consumer that reads compacted; None: those of the topic."""
        self._skipped_held = False
        """Whether held messages were skipped since the last rewind."""
        self._failover = kind is SubscriptionType.FAILOVER
        transactional = subscription.transactional
        self._holds = None if transactional is None else Holds(transactional, self.wake)
        self._outdated = OutdatedMessages(self.cursor)
        self._sent_to = EARLIEST
        """After the last message that the active consumer was sent before the last rewind."""

    def close(self) -> None:
        """Send nothing more."""
        super().close()
        self._leave_compacted()
        if self._holds is not None:
            self._holds.close()

    def add(self, consumer: Consumer) -> None:
        """See the base class.  The consumer may become the active one at once."""
        if consumer.key_shared.ranges:
            # For its checks only: the ranges of several readers may overlap.
            StickyRanges["Consumer"]().add(consumer, consumer.key_shared.ranges)
        self.consumers.append(consumer)
        self._choose()

    def remove(self, consumer: Consumer) -> None:
        """See the base class.  The next active one reads from the first unacknowledged entry."""
        self.consumers.remove(consumer)
        self._outdated.forget(consumer)
        if consumer is self.active:
            self.active = None
            self._choose()

    def announce(self, consumer: Consumer) -> None:
        """Send ACTIVE_CONSUMER_CHANGE to a Failover consumer, active or not."""
        if self._failover:
            consumer.send_active_change(consumer is self.active)

    def redeliver(self, consumer: Consumer, messages: Mapping[Position, int] | None) -> None:
        """Read again from the first unacknowledged entry, whatever `messages` has.

        Requests of consumers that are not active are ignored.
        """
        if messages is None:
            # Its client drops what it has.
            self._outdated.forget(consumer)
        if consumer is self.active:
            consumer.redelivered_total += len(messages or ())
            self._rewind()
            if messages is None:
                self._sent_to = EARLIEST

    def require_unused(self, consumer: Consumer, position: Position) -> None:
        """See the base class."""
        self._require_not_passed_on(consumer)
        self._outdated.require_unused(consumer, position)

    def was_sent(self, consumer: Consumer, position: Position) -> bool:
        """See the base class."""
        end = self._outdated.end_of(consumer)
        return position < (max(end, self._next_to_send()) if consumer is self.active else end)

    def may_have_messages(self, consumer: Consumer) -> bool:
        """See the base class."""
        if self._outdated.end_of(consumer) > EARLIEST:
            return True
        return consumer is self.active and self._first_unused().position < self._next_to_send()

    def _require_not_passed_on(self, consumer: Consumer) -> None:
        """Raise `TransactionConflict` if the active one was sent what another consumer has (L8)."""
        if consumer is not self.active and self._first_unused().position < self._next_to_send():
            raise TransactionConflict(
                f"Another consumer is active now and was sent what {consumer.name} acknowledges: "
                "abort the transaction."
            )

    def acknowledged(self, consumer: Consumer, position: Position, ack_set: Sequence[int]) -> None:
        """See the base class."""
        then = self._unused_after(position, ack_set)
        self._outdated.acknowledged(consumer, position, then)

    def settled(self, consumer: Consumer | None, position: Position, left: int) -> None:
        """Do nothing: nothing is kept for each entry."""

    def released(self, positions: Sequence[Position], *, again: bool) -> None:
        """Read again from the first unacknowledged entry, if any of these was sent or skipped."""
        read_up_to = self.reader.next_position
        if self._skipped_held or (again and any(each < read_up_to for each in positions)):
            self._rewind()
        else:
            self.wake()  # delivery may have stopped in front of them

    def _choose(self) -> None:
        if not self.consumers:
            return
        chosen = choose_active(self.consumers, self.subscription.topic.name)
        if chosen is self.active:
            return
        if self.active is not None:
            self._outdated.note(self.active, self._first_unused(), self._next_to_send())
        self.active = chosen
        self._rewind()
        self._sent_to = EARLIEST
        if self._failover:
            for consumer in self.consumers:
                if consumer.is_open:
                    consumer.send_active_change(consumer is chosen)

    def _first_unused(self) -> FirstUnused:
        """The first message that the active consumer did not acknowledge, in a transaction or not.

        No other consumer's transaction holds messages before those that it was sent (A9).
        """
        held, mark_delete = self._held_messages(), self.cursor.mark_delete
        last = None if held is None else held.cumulative
        if last is None or last.position <= mark_delete:
            return self._unused_after(mark_delete, ())
        return self._unused_after(last.position, last.ack_set)

    def _unused_after(self, position: Position, ack_set: Sequence[int]) -> FirstUnused:
        if any(ack_set):
            return FirstUnused(position, ack_set)
        first = self.cursor.first_unacknowledged(self.ledger.next_position(position))
        return FirstUnused(first, self.cursor.ack_set(first))

    def _next_to_send(self) -> Position:
        """The position after the last entry that the active consumer may have."""
        buffer = self.reader.buffer
        return max(self._sent_to, buffer[0].position if buffer else self.reader.next_position)

    def _rewind(self) -> None:
        self._sent_to = self._next_to_send()
        self._skipped_held = False
        self.coming_back.clear()
        if self._holds is not None:
            self._holds.rewound()
        self._leave_compacted()
        start, source = self._unacknowledged_start(), self.ledger
        if self.active is not None and self.active.read_compacted:
            start, unmarked_up_to = self._compacted_start(start)
            self.compacted = CompactedView.open(source, start, unmarked_up_to)
        self.reader.seek(start, self.compacted or source)
        self.wake()

    def _compacted_start(self, start: Position) -> tuple[Position, Position]:
        """The start of reads, and the position up to which the mark-delete says nothing."""
        began = self.subscription.read_start
        position = None if began is None else began.of(self.cursor)
        if position is None or position >= start:
            return start, EARLIEST
        return position, self.cursor.mark_delete

    def _limits(self) -> tuple[Position, Position]:
        """The last position to read, and that up to which the mark-delete says nothing."""
        limit, compacted = self.topic.max_read_position(), self.compacted
        if compacted is None:
            return limit, EARLIEST
        return max(limit, compacted.horizon), compacted.unmarked_up_to

    def _leave_compacted(self) -> None:
        if self.compacted is not None:
            self.compacted.close()
            self.compacted = None

    def _first_to_read(self, at_or_after: Position) -> Position:
        compacted = self.compacted
        if compacted is not None and at_or_after <= compacted.horizon:
            return at_or_after
        return super()._first_to_read(at_or_after)

    def _dispatch(self) -> bool:
        consumer = self.active
        if consumer is None or consumer.permits <= 0:
            return False
        if not consumer.connection.writable:
            consumer.when_writable(self.wake)
            return False
        held, ranges = self._held_messages(), consumer.key_shared.ranges
        if held is not None and self._must_wait_for(consumer, held.cumulative_transactions):
            return False
        limit, unmarked_up_to = self._limits()
        reader, cursor, buffer = self.reader, self.cursor, self.reader.buffer
        budget, throttle = READ_BATCH_ENTRIES, self.throttle
        while budget and consumer.permits > 0 and consumer.connection.writable:
            if not buffer and not reader.fill(limit, consumer.permits):
                break
            entry = buffer[0]
            budget -= 1
            position, data = entry
            if cursor.is_acknowledged(position) and position > unmarked_up_to:
                buffer.popleft()
                continue
            if held is not None and not self._may_pass(consumer, held.transactions_at(position)):
                break
            buffer.popleft()
            if held is not None and held.is_pending(position):
                self._skipped_held = True
                continue
            count, special = facts_of(data)
            if special and self._skip_hidden(entry):
                continue
            if ranges and not has_key_within(data, ranges):
                self.subscription.skip(position)
                continue
            ack_set = self._left_of(position, count, held) if count > 1 else None
            consumer.deliver(position, data, count, 0, ack_set)
            if throttle is not None and throttle.take(count, len(data)):
                break
        consumer.flush()
        if not consumer.connection.writable:
            consumer.when_writable(self.wake)
        return not budget

    def _left_of(
        self, position: Position, count: int, held: HeldMessages | None
    ) -> Sequence[int] | None:
        """The messages of a batch that are to be sent, as in MESSAGE; None: all."""
        ack_set = self.cursor.ack_set(position)
        if held is None:
            return ack_set
        left = held.remaining(position, ack_set, count)
        self._skipped_held |= left is not ack_set
        return left or None

    def _must_wait_for(self, consumer: Consumer, txns: Collection[TxnId]) -> bool:
        transactional = self.subscription.transactional
        if not txns or transactional is None:
            return False
        return transactional.must_wait_for(consumer, txns)

    def _may_pass(self, consumer: Consumer, txns: Collection[TxnId]) -> bool:
        """Whether a consumer may get messages behind those that these transactions hold."""
        return not txns or self._holds is None or self._holds.may_pass(txns, consumer)
