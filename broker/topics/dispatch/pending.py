"""The base class of Shared and Key_Shared dispatchers: each consumer's pending messages."""

import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import structlog

from broker.topics.consumer import Consumer
from broker.topics.dispatch.delay_timer import DelayTimer
from broker.topics.dispatch.delayed_messages import DelayedMessages
from broker.topics.dispatch.dispatcher import Dispatcher
from broker.topics.dispatch.entry_facts import deliver_at_ms
from broker.topics.dispatch.entry_reader import GONE, Absent
from broker.topics.dispatch.redelivery import RedeliveryCounts
from broker.topics.dispatch.source import DispatchedSubscription
from config.bounds import READ_BATCH_ENTRIES, RETURNED_AT_ONCE
from magnetar.protocol.ack_set import from_words, to_words
from magnetar.protocol.ids import Position
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)


class PendingDispatcher(Dispatcher):
    """Keeps the messages that each Shared or Key_Shared consumer has not acknowledged.

    `Consumer.pending` maps an entry to (its unacknowledged messages, its key hash); the messages
    are bits, as in `magnetar.protocol.ack_set`.  Every message that was sent and not acknowledged
    is pending at exactly one consumer, or its entry waits to be sent again.  Any consumer may
    acknowledge any entry.

    A message that an open transaction holds is pending at no consumer, and does not wait: dispatch
    skips it, and its release redelivers it.  A delayed entry is pending at no consumer either, and
    takes no permits; when it is due it waits to be sent, and that is no redelivery.

    The subclasses choose the consumer of an entry.  A consumer with as many unacknowledged messages
    as its policy allows gets nothing until acknowledgements come.  If all consumers together have
    as many as the policy of the subscription allows, none of them gets any.
    """

    def __init__(self, subscription: DispatchedSubscription, counts: RedeliveryCounts) -> None:
        super().__init__(subscription, counts)
        self.unacked = 0
        self.limit_unacked(subscription.topic.policies.max_unacked_per_subscription)
        self._room = self._max_unacked
        """The most unacknowledged messages in this run; 0 once a rate allows no more."""
        policies = subscription.topic.policies
        self._delays = policies.delays_delivery
        self._delayed = DelayedMessages()
        self._timer = DelayTimer(subscription.now_ms, policies.delayed_tick_ms, self.wake)
        self._full_logged = False
        self._returning: deque[Iterator[None]] = deque()
        """Entries that are still to come back: each step of an iterator returns one of them."""
        self._returning_all_of: set[Consumer] = set()
        """Consumers of which `_returning` has all that they have pending."""
        self._last_kept = (1, 0)
        """The value in `Consumer.pending` that was added last; equal ones share it."""
        self._parted: set[Position] = set()
        """Entries whose messages may be pending at several consumers.

        Some messages of such an entry came back while consumers had the others.  It stays here
        until all its messages are acknowledged.
        """

    @property
    def delayed(self) -> int:
        """See the base class."""
        return len(self._delayed)

    @property
    def blocked_on_unacked(self) -> bool:
        """See the base class."""
        return self.unacked >= self._max_unacked

    def limit_unacked(self, messages: int) -> None:
        """See the base class."""
        self._max_unacked = messages or sys.maxsize

    def delay_messages(self, *, active: bool, tick_ms: int) -> None:
        """See the base class."""
        self._delays = active
        self._timer.set_tick(tick_ms)

    # Decisions of the subclasses

    @abstractmethod
    def _send(self) -> bool:
        """Send waiting entries, then new ones; True when there is more to send at once."""

    @abstractmethod
    def _due_capacity(self) -> int:
        """Number of due entries that may still be added to the waiting ones."""

    @abstractmethod
    def _let_wait(self, position: Position, key_hash: int) -> None:
        """Let an entry wait until a consumer can receive it."""

    @abstractmethod
    def _return(self, consumer: Consumer, position: Position, key_hash: int) -> None:
        """Let an entry that `consumer` had wait to be sent again."""

    @abstractmethod
    def _forget_waiting(self, position: Position) -> None:
        """Remove an acknowledged entry from the waiting ones, if it is there."""

    @abstractmethod
    def _relieved(self, consumer: Consumer, key_hash: int) -> None:
        """Note that `consumer` has nothing pending any more of an entry of this hash."""

    @abstractmethod
    def _keep_hash(self, position: Position, key_hash: int) -> None:
        """Keep the hash of an unacknowledged entry that a consumer has no longer, or not wholly."""

    # Events

    def close(self) -> None:
        """See the base class."""
        super().close()
        self._timer.close()
        self._returning.clear()

    def _dispatch(self) -> bool:
        if self._returning:
            return False  # entries that come back are sent first, in the order of their positions
        # A cumulative acknowledgement is of an earlier consumer, of another type.  It may hold any
        # number of entries, so nothing is sent until its transaction has ended.
        held = self._held_messages()
        if held is not None and held.cumulative_transactions:
            return False
        self._room = self._max_unacked
        more_due = bool(self._delayed) and self._release_due()
        more = self._send()
        if self._delayed:
            self._aim_timer()
        return more or more_due

    def redeliver(self, consumer: Consumer, messages: Mapping[Position, int] | None) -> None:
        """Let messages that `consumer` has pending wait again, in the order of their positions.

        Many of them come back in slices, as they may be a million.
        """
        if messages is not None:
            self._return_in_slices(self._redeliver_named(consumer, messages))
        elif consumer not in self._returning_all_of:
            self._returning_all_of.add(consumer)
            self._return_in_slices(self._redeliver_all(consumer))

    def _redeliver_named(
        self, consumer: Consumer, messages: Mapping[Position, int]
    ) -> Iterator[None]:
        for position, bits in messages.items():
            self._redeliver_one(consumer, position, bits)
            yield

    def _redeliver_all(self, consumer: Consumer) -> Iterator[None]:
        for position in list(consumer.pending):
            self._redeliver_one(consumer, position, -1)
            yield
        self._returning_all_of.discard(consumer)

    def _redeliver_one(self, consumer: Consumer, position: Position, bits: int) -> None:
        had, key_hash = consumer.pending.get(position, (0, 0))
        given = had & bits
        if not given:
            return
        unacked = given.bit_count()
        self._debit(consumer, unacked)
        consumer.redelivered_total += unacked
        self.counts.raise_for(position)
        if given == had:
            del consumer.pending[position]
            self._return(consumer, position, key_hash)
        else:
            consumer.pending[position] = (had ^ given, key_hash)
            self._parted.add(position)
            self._let_wait(position, key_hash)

    def _return_in_slices(self, steps: Iterator[None]) -> None:
        """Let entries come back, RETURNED_AT_ONCE in a turn of the loop; then dispatch goes on."""
        self._returning.append(steps)
        if len(self._returning) == 1:
            self._return_slice()

    def _return_slice(self) -> None:
        if not self._returning:
            return  # closed
        if sum(1 for _ in islice(self._returning[0], RETURNED_AT_ONCE)) < RETURNED_AT_ONCE:
            self._returning.popleft()
        if self._returning:
            self._loop.call_soon(self._return_slice)
        else:
            self.wake()

    def _let_all_wait(self, taken: Iterable[tuple[Position, int]]) -> Iterator[None]:
        """Let the entries of a consumer that left wait.

        Meanwhile some may have been acknowledged, and a transaction may hold others.
        """
        for position, key_hash in taken:
            if not self.cursor.is_acknowledged(position):
                if self._held_messages() is not None:
                    self._meets_hold(position, key_hash)
                if self._all_held(position):
                    self._keep_hash(position, key_hash)
                else:
                    self._let_wait(position, key_hash)
            yield

    def _meets_hold(self, position: Position, key_hash: int) -> None:
        """Note an entry of which transactions may hold messages."""

    @abstractmethod
    def _redeliver_skipped(self, position: Position) -> None:
        """Let an entry wait that dispatch has skipped; no consumer has it."""

    def settled(self, consumer: Consumer | None, position: Position, left: int) -> None:
        """See the base class."""
        was_full = self.blocked_on_unacked
        parted = bool(self._parted) and position in self._parted
        owner = self._owner(consumer, position)
        if owner is not None:
            was_full = was_full or owner.blocked_on_unacked
            _, key_hash = owner.pending[position]
            self._relieve(owner, position, left)
            if left:
                self._keep_hash(position, key_hash)
        if parted:
            for each in self._owners(position):
                was_full = was_full or each.blocked_on_unacked
                self._relieve(each, position, left)
        if not left and (parted or owner is None):
            was_full = was_full or self._reads_no_more
            self._delayed.discard(position)
            self._forget_waiting(position)
            self._parted.discard(position)
        if not left and len(self.counts):
            self.counts.forget(position)
        if was_full:
            self.wake()

    def _relieve(self, owner: Consumer, position: Position, left: int) -> None:
        """Keep pending at `owner` only those messages of an entry that are in `left`."""
        messages, key_hash = owner.pending[position]
        kept = messages & left
        self._debit(owner, (messages ^ kept).bit_count())
        if kept:
            owner.pending[position] = (kept, key_hash)
        else:
            del owner.pending[position]
            self._relieved(owner, key_hash)

    def held(self, position: Position, messages: int) -> None:
        """See the base class.  The entry's redelivery count is kept."""
        was_full = self.blocked_on_unacked or self._reads_no_more
        for owner in self._owners(position):
            was_full = was_full or owner.blocked_on_unacked
            self._relieve(owner, position, ~messages)
        if self._all_held(position):
            self._delayed.discard(position)
            self._forget_waiting(position)
        if was_full:
            self.wake()

    def _all_held(self, position: Position) -> bool:
        """Whether transactions hold all unacknowledged messages of an entry."""
        held = self._held_messages()
        return held is not None and held.is_pending(position)

    def released(self, positions: Sequence[Position], *, again: bool) -> None:
        """See the base class."""
        # Entries at or behind this are not read yet: they are delivered by reading on.
        read_up_to = self.reader.next_position
        for position in positions:
            if self.cursor.is_acknowledged(position) or self._all_held(position):
                continue
            if position >= read_up_to or position in self._delayed:
                continue
            owners = self._owners(position)
            if not owners:
                self._redeliver_skipped(position)
            else:
                self._parted.add(position)
                self._let_wait(position, owners[0].pending[position][1])
            if again:
                self.counts.raise_for(position)
        self.wake()

    # Delayed entries

    def _skip_or_delay(self, entry: Entry, key_hash: int) -> bool:
        """Skip a special entry that no consumer may see, or delay it; False if it is sent now."""
        if self._skip_hidden(entry):
            return True
        if not self._delays:
            return False
        due_ms = deliver_at_ms(entry.data)
        if due_ms <= self.subscription.now_ms():
            return False
        self._delayed.add(entry.position, due_ms, key_hash)
        if self._delayed.full and not self._full_logged:
            self._full_logged = True
            log.warning(
                "delayed_messages_bound_reached",
                topic=str(self.topic.name),
                subscription=self.subscription.name,
                delayed=len(self._delayed),
            )
        return True

    def _release_due(self) -> bool:
        """Let a slice of the due entries wait; True when another one may follow at once."""
        at_most = min(self._due_capacity(), READ_BATCH_ENTRIES)
        if at_most <= 0:
            return False
        due_ms = self.subscription.now_ms() if self._delays else sys.maxsize
        due = self._delayed.pop_due(due_ms, at_most)
        for position, key_hash in due:
            if not self.cursor.is_acknowledged(position):
                self._let_wait(position, key_hash)
        return len(due) == at_most and self._due_capacity() > 0

    def _aim_timer(self) -> None:
        """Set the timer on the next due time, unless due entries wait for capacity already."""
        due_ms = self._delayed.next_due_ms
        if not self._delays and due_ms is not None:
            due_ms = 0  # all of them are due
        waits = due_ms is not None and due_ms <= self.subscription.now_ms()
        self._timer.aim(None if waits and self._due_capacity() <= 0 else due_ms)

    # Shared code

    @property
    def _reads_no_more(self) -> bool:
        """Whether as many entries are delayed, or wait, as may be in memory."""
        return self._delayed.full or self._due_capacity() <= 0

    def _can_receive(self, consumer: Consumer) -> bool:
        """Whether `consumer` may get an entry now; if only its socket is full, wake up later."""
        if consumer.can_receive():
            return True
        if consumer.permits > 0 and not consumer.connection.writable:
            consumer.when_writable(self.wake)
        return False

    def _may_send(self) -> bool:
        """Whether the limits of the subscription, and its rates, allow one more entry now."""
        return self.unacked < self._room

    def _read_again(self, position: Position, is_dense: Callable[[], bool]) -> Entry | None:
        """A waiting entry; None while it is read, and when it is gone (then it is settled)."""
        entry = self.reader.at(position, is_dense)
        if not isinstance(entry, Absent):
            return entry
        if entry is GONE:
            self.subscription.skip(position)
            self.settled(None, position, 0)
            self.wake()
        return None

    def _deliver(self, consumer: Consumer, entry: Entry, count: int, key_hash: int) -> bool:
        """Send an entry and note that it is pending; False if it has no message to send.

        Only messages that no consumer has are sent.
        """
        position, data = entry
        messages = every = (1 << count) - 1
        if count > 1:
            ack_set = self.cursor.ack_set(position)
            if (held := self._held_messages()) is not None:
                ack_set = held.remaining(position, ack_set, count)
            if ack_set is not None:
                messages = from_words(ack_set, count)
        unacked, had = count, 0
        if self._parted and position in self._parted:
            for each in self._owners(position):
                messages &= ~each.pending[position][0]
            had, _ = consumer.pending.get(position, (0, key_hash))
        if messages != every:
            if not messages:
                return False
            unacked = messages.bit_count()
        kept = (messages | had, key_hash)
        if kept == self._last_kept:
            kept = self._last_kept
        else:
            self._last_kept = kept
        consumer.pending[position] = kept
        consumer.unacked += unacked
        self.unacked += unacked
        words = None if messages == every else to_words(messages)
        consumer.deliver(position, data, count, self.counts[position], words)
        if self.throttle is not None and self.throttle.take(unacked, len(data)):
            self._room = 0
        return True

    def _debit(self, consumer: Consumer, messages: int) -> None:
        consumer.unacked -= messages
        self.unacked -= messages

    def _take_all_pending(self, consumer: Consumer) -> Iterator[tuple[Position, int]]:
        """Take everything that a leaving consumer has pending, with hashes."""
        taken, consumer.pending = consumer.pending, {}
        self._debit(consumer, consumer.unacked)
        return ((position, key_hash) for position, (_, key_hash) in taken.items())

    def _owners(self, position: Position) -> list[Consumer]:
        return [each for each in self.consumers if position in each.pending]

    def _owner(self, consumer: Consumer | None, position: Position) -> Consumer | None:
        if consumer is not None and position in consumer.pending:
            return consumer
        for each in self.consumers:
            if position in each.pending:
                return each
        return None
