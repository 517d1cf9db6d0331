"""Shared and Key_Shared: what each consumer has and has not acknowledged.

Rules:

- `Consumer.pending` maps an entry to (messages of it not acknowledged, its hash).  Every entry that
  was sent and not acknowledged is pending at exactly one consumer, or waits to be sent again.
- Any consumer of the subscription may acknowledge any entry; the consumer that has it pending is
  relieved.
- What an open transaction holds is pending at nobody and does not wait: dispatch has passed it, and
  its release brings it back.
- A consumer with MAX_UNACKED_PER_CONSUMER unacknowledged messages, and all of a subscription with
  MAX_UNACKED_PER_SUBSCRIPTION, get nothing until acknowledgements come.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.dispatch.dispatcher import Dispatcher
from broker.dispatch.entry_reader import GONE, Absent
from broker.dispatch.redelivery import RedeliveryCounts
from config.bounds import MAX_UNACKED_PER_SUBSCRIPTION
from protocol.ack_set import from_words

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.subscription import Subscription
    from protocol.ids import Position
    from storage.managed_ledger_types import Entry


class PendingDispatcher(Dispatcher):
    """See the module's rules; who gets what is for the two kinds to say."""

    def __init__(self, subscription: "Subscription", counts: RedeliveryCounts) -> None:
        super().__init__(subscription, counts)
        self.unacked = 0

    # What the two kinds do

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
            if again:
                self.counts.raise_for(position)
            if owner is None:
                self._bring_back(position)
            else:
                unacked, key_hash = owner.pending.pop(position)
                self._debit(owner, unacked)
                self._return(owner, position, key_hash)
        self.wake()

    def _has_room(self, consumer: "Consumer") -> bool:
        """Whether `consumer` may get an entry now; if only its socket is full, wait for that."""
        if consumer.has_room():
            return True
        if consumer.permits > 0 and not consumer.connection.writable:
            consumer.when_writable(self.wake)
        return False

    def _full(self) -> bool:
        return self.unacked >= MAX_UNACKED_PER_SUBSCRIPTION

    def _read_again(self, position: "Position") -> "Entry | None":
        """A waiting entry; None when it cannot be sent now, or never (then it is done with)."""
        entry = self.reader.at(position)
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
