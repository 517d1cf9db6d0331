"""Shared and Key_Shared: what each consumer has and has not acknowledged.

Rules:

- `Consumer.pending` maps an entry to (messages of it not acknowledged, its hash).  Every entry that
  was sent and not acknowledged is pending at exactly one consumer, or waits to be sent again.
- Any consumer of the subscription may acknowledge any entry; the consumer that has it pending is
  relieved.
- What an open transaction holds is pending at nobody and does not wait: dispatch has passed it, and
  its release brings it back.
- An entry whose time has not come is pending at nobody either: it is kept back without permits, and
  waits to be sent when it is due.  Never before, and not as a redelivery.
- A consumer with MAX_UNACKED_PER_CONSUMER unacknowledged messages, and all of a subscription with
  MAX_UNACKED_PER_SUBSCRIPTION, get nothing until acknowledgements come.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from broker.dispatch.delay_timer import DelayTimer
from broker.dispatch.delayed_messages import DelayedMessages
from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.entry_facts import deliver_at_ms
from broker.dispatch.entry_reader import GONE, Absent
from broker.dispatch.redelivery import RedeliveryCounts
from config.bounds import MAX_UNACKED_PER_SUBSCRIPTION, READ_BATCH_ENTRIES
from protocol.ack_set import from_words

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.subscription import Subscription
    from protocol.ids import Position
    from storage.managed_ledger_types import Entry

log = structlog.get_logger(__name__)


class PendingDispatcher(Dispatcher):
    """See the module's rules; who gets what is for the two kinds to say."""

    def __init__(self, subscription: "Subscription", counts: RedeliveryCounts) -> None:
        super().__init__(subscription, counts)
        self.unacked = 0
        settings = subscription.topic.broker.settings
        self._delays = settings.delayed_delivery_enabled
        self._delayed = DelayedMessages()
        self._timer = DelayTimer(
            subscription.now_ms, settings.delayed_delivery_tick_time_ms, self.wake
        )
        self._told_full = False

    @property
    def delayed(self) -> int:
        """See the base class."""
        return len(self._delayed)

    # What the two kinds do

    @abstractmethod
    def _send(self) -> bool:
        """Send what waits, then what is new; True when there is more to do at once."""

    @abstractmethod
    def _room_for_due(self) -> int:
        """How many more entries that are due may wait to be sent."""

    @abstractmethod
    def _let_wait(self, position: "Position", key_hash: int) -> None:
        """An entry that nobody has is to be sent as soon as somebody has room."""

    @abstractmethod
    def _return(self, consumer: "Consumer", position: "Position", key_hash: int) -> None:
        """An entry that `consumer` had is to be sent again."""

    @abstractmethod
    def _forget_waiting(self, position: "Position") -> None:
        """An entry was acknowledged: it need not be sent, if it was waiting for that."""

    @abstractmethod
    def _relieved(self, consumer: "Consumer", key_hash: int) -> None:
        """`consumer` acknowledged the last message of an entry of this hash."""

    # Events

    def close(self) -> None:
        """See the base class."""
        super().close()
        self._timer.aim(None)

    def _dispatch(self) -> bool:
        more_due = bool(self._delayed) and self._release_due()
        more = self._send()
        if self._delayed:
            self._aim_timer()
        return more or more_due

    def redeliver(self, consumer: "Consumer", positions: "Sequence[Position] | None") -> None:
        """Those of the entries that `consumer` has pending wait again, at their old places."""
        wanted = sorted(consumer.pending) if positions is None else positions
        for position in wanted:
            pending = consumer.pending.pop(position, None)
            if pending is None:
                continue
            unacked, key_hash = pending
            self._debit(consumer, unacked)
            consumer.redelivered_total += unacked
            self.counts.raise_for(position)
            self._return(consumer, position, key_hash)
        self.wake()

    @abstractmethod
    def _bring_back(self, position: "Position") -> None:
        """An entry that dispatch has passed is to be sent; nobody has it."""

    def settled(
        self,
        consumer: "Consumer | None",
        position: "Position",
        remaining: int,
        *,
        for_good: bool = True,
    ) -> None:
        """See the base class."""
        owner = self._owner(consumer, position)
        was_full = self._full()
        if owner is not None:
            unacked, key_hash = owner.pending[position]
            was_full = was_full or owner.blocked_on_unacked
            self._debit(owner, unacked - remaining)
            if remaining:
                owner.pending[position] = (remaining, key_hash)
            else:
                del owner.pending[position]
                self._relieved(owner, key_hash)
        elif not remaining:
            was_full = was_full or self._delayed.full
            self._delayed.discard(position)
            self._forget_waiting(position)
        if for_good and not remaining and len(self.counts):
            self.counts.forget(position)
        if was_full:
            self.wake()

    def held(self, position: "Position", remaining: int) -> None:
        """Whoever has the entry is relieved, as if it were acknowledged; its count is kept."""
        self.settled(None, position, remaining, for_good=False)

    def released(self, positions: "Sequence[Position]", *, again: bool) -> None:
        """Entries that are not read yet come by themselves."""
        read_up_to, held = self.reader.next_position, self._held()
        for position in positions:
            if self.cursor.is_acknowledged(position) or (held and held.is_pending(position)):
                continue
            owner = self._owner(None, position)
            if (owner is not None and not again) or position >= read_up_to:
                continue
            if position in self._delayed:
                continue
            if again:
                self.counts.raise_for(position)
            if owner is None:
                self._bring_back(position)
            else:
                unacked, key_hash = owner.pending.pop(position)
                self._debit(owner, unacked)
                self._return(owner, position, key_hash)
        self.wake()

    # Delayed entries

    def _keeps_back(self, entry: "Entry", key_hash: int) -> bool:
        """Whether an entry with something special is not sent: never, or not before its time."""
        if self._withheld(entry):
            return True
        if not self._delays:
            return False
        due_ms = deliver_at_ms(entry.data)
        if due_ms <= self.subscription.now_ms():
            return False
        self._delayed.add(entry.position, due_ms, key_hash)
        if self._delayed.full and not self._told_full:
            self._told_full = True
            log.warning(
                "delayed_messages_bound_reached",
                topic=str(self.topic.name),
                subscription=self.subscription.name,
                delayed=len(self._delayed),
            )
        return True

    def _release_due(self) -> bool:
        """Let a slice of what is due wait to be sent; True when another one may follow at once."""
        at_most = min(self._room_for_due(), READ_BATCH_ENTRIES)
        if at_most <= 0:
            return False
        due = self._delayed.pop_due(self.subscription.now_ms(), at_most)
        for position, key_hash in due:
            if not self.cursor.is_acknowledged(position):
                self._let_wait(position, key_hash)
        return len(due) == at_most and self._room_for_due() > 0

    def _aim_timer(self) -> None:
        """At what is due next, unless that waits for room already."""
        due_ms = self._delayed.next_due_ms
        waits = due_ms is not None and due_ms <= self.subscription.now_ms()
        self._timer.aim(None if waits and self._room_for_due() <= 0 else due_ms)

    # What they share

    def _has_room(self, consumer: "Consumer") -> bool:
        """Whether `consumer` may get an entry now; if only its socket is full, wait for that."""
        if consumer.has_room():
            return True
        if consumer.permits > 0 and not consumer.connection.writable:
            consumer.when_writable(self.wake)
        return False

    def _full(self) -> bool:
        return self.unacked >= MAX_UNACKED_PER_SUBSCRIPTION

    def _read_again(self, position: "Position", is_dense: Callable[[], bool]) -> "Entry | None":
        """A waiting entry; None when it cannot be sent now, or never (then it is done with)."""
        entry = self.reader.at(position, is_dense)
        if not isinstance(entry, Absent):
            return entry
        if entry is GONE:
            self._forget_waiting(position)
            self.counts.forget(position)
            self.subscription.skip(position)
            self.wake()
        return None

    def _hand_over(self, consumer: "Consumer", entry: "Entry", count: int, key_hash: int) -> None:
        """Send an entry and note that it is pending."""
        position, data = entry
        ack_set = self.cursor.ack_set(position) if count > 1 else None
        if count > 1 and (held := self._held()) is not None:
            ack_set = held.remaining(position, ack_set, count) or None
        unacked = from_words(ack_set, count).bit_count() if ack_set else count
        consumer.pending[position] = (unacked, key_hash)
        consumer.unacked += unacked
        self.unacked += unacked
        consumer.deliver(position, data, count, self.counts[position], ack_set)

    def _debit(self, consumer: "Consumer", messages: int) -> None:
        consumer.unacked -= messages
        self.unacked -= messages

    def _take_all_pending(self, consumer: "Consumer") -> "list[tuple[Position, int]]":
        """Everything that a leaving consumer has pending, with hashes; it has nothing then."""
        taken = [(position, key_hash) for position, (_, key_hash) in consumer.pending.items()]
        consumer.pending.clear()
        self._debit(consumer, consumer.unacked)
        return taken

    def _owner(self, consumer: "Consumer | None", position: "Position") -> "Consumer | None":
        if consumer is not None and position in consumer.pending:
            return consumer
        for each in self.consumers:
            if position in each.pending:
                return each
        return None
