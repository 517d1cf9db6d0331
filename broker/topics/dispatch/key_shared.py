"""Key_Shared: entries of one key go to one consumer, in order, however consumers come and go."""

from collections.abc import Mapping, Sequence
from functools import partial

from broker.topics.consumer import Consumer, KeySharedMode, KeySharedPolicy
from broker.topics.deduplication import Chunk
from broker.topics.dispatch.chunk_owners import ChunkOwners
from broker.topics.dispatch.entry_facts import chunk_in, facts_of, keyed_facts_of
from broker.topics.dispatch.key_order import KeyOrder
from broker.topics.dispatch.pending import PendingDispatcher
from broker.topics.dispatch.redelivery import RedeliveryCounts
from broker.topics.dispatch.selection import AutoSplit, KeyAssignment, StickyRanges
from broker.topics.dispatch.source import DispatchedSubscription
from config.bounds import (
    KEY_SHARED_LOOK_AHEAD_ENTRIES,
    READ_BATCH_ENTRIES,
    RETURNED_AT_ONCE,
)
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import HashRange
from storage.managed_ledger.types import Entry


class KeySharedDispatcher(PendingDispatcher):
    """Sends all entries of a key to one consumer, in order, over joins and leaves.

    `KeyOrder` decides which consumer gets an entry, and has the entries that must wait.  A consumer
    gets waiting entries before new ones.  An entry that a transaction holds is put aside with its
    hash, and does not stop its key.
    """

    def __init__(
        self,
        subscription: DispatchedSubscription,
        counts: RedeliveryCounts,
        policy: KeySharedPolicy,
        assignment: KeyAssignment[Consumer] | None = None,
    ) -> None:
        """The assignment is that of the policy if none is given."""
        super().__init__(subscription, counts)
        if assignment is None:
            assignment = StickyRanges() if policy.mode is KeySharedMode.STICKY else AutoSplit()
        self._order = KeyOrder(assignment, allow_out_of_order=policy.allow_out_of_order)
        self._chunks: ChunkOwners[Consumer] = ChunkOwners()
        self._aside: dict[Position, int] = {}
        """Hashes of entries that were skipped because a transaction holds them."""

    @property
    def hash_ranges(self) -> Mapping[Consumer, Sequence[HashRange]]:
        """The hashes of the keys of each consumer, in ascending order."""
        return self._order.assignment.ranges_by_owner()

    @property
    def waiting(self) -> int:
        """See the base class."""
        return self._order.waiting

    def add(self, consumer: Consumer) -> None:
        """See the base class.  Keys that move to it wait for acknowledgements of the old owner."""
        self._order.assignment.add(consumer, consumer.key_shared.ranges)
        self.consumers.append(consumer)
        self._order.assignment_changed()
        self.wake()

    def remove(self, consumer: Consumer) -> None:
        """See the base class.  Its entries go to the new owners of its keys."""
        self.consumers.remove(consumer)
        self._order.assignment.remove(consumer)
        self._order.consumer_left(consumer)
        self._chunks.left(consumer)
        self._return_in_slices(self._let_all_wait(self._take_all_pending(consumer)))

    def _return(self, consumer: Consumer, position: Position, key_hash: int) -> None:
        self._order.park(position, key_hash)
        self._order.settled(key_hash, consumer)

    def _forget_waiting(self, position: Position) -> None:
        self._order.unpark(position)
        if self._aside:
            self._aside.pop(position, None)

    def held(self, position: Position, messages: int) -> None:
        """See the base class."""
        if self._reads_no_more:
            self.wake()
        owner = self._owner(None, position)
        if owner is not None:
            key_hash: int | None = owner.pending[position][1]
        else:
            key_hash = self._aside.pop(position, None) or self._order.unpark(position)
            if key_hash is None and self._all_held(position):
                key_hash = self._delayed.discard(position)
        super().held(position, messages)
        if key_hash is not None:
            self._keep_hash(position, key_hash)

    def _keep_hash(self, position: Position, key_hash: int) -> None:
        """See the base class.  The entry is put aside, or waits, unless a consumer has it."""
        if self._owner(None, position) is not None:
            return
        if self._all_held(position):
            self._aside[position] = key_hash
        else:
            self._order.park(position, key_hash)

    def _let_wait(self, position: Position, key_hash: int) -> None:
        self._order.park(position, key_hash)

    def _due_capacity(self) -> int:
        return KEY_SHARED_LOOK_AHEAD_ENTRIES - self._order.waiting

    def _redeliver_skipped(self, position: Position) -> None:
        key_hash = self._aside.pop(position, None)
        if key_hash is not None:
            self._order.park(position, key_hash)

    def _relieved(self, consumer: Consumer, key_hash: int) -> None:
        if self._order.settled(key_hash, consumer):
            self.wake()

    def _send(self) -> bool:
        if not self._order.queue_waiting(RETURNED_AT_ONCE):
            return True
        budget = READ_BATCH_ENTRIES
        for consumer in self.consumers:
            budget -= self._send_waiting(consumer, budget)
        budget -= self._send_new(budget)
        for consumer in self.consumers:
            consumer.flush()
        return not budget

    def _send_waiting(self, consumer: Consumer, budget: int) -> int:
        """Send `consumer` its waiting entries; returns how many were processed."""
        order, held, used = self._order, self._held_messages(), 0
        is_dense = partial(order.is_dense, consumer)
        while used < budget and order.has_waiting(consumer):
            if not self._may_send() or not self._can_receive(consumer):
                break
            position = order.first_waiting(consumer)
            if position is None or self._must_wait(position):
                break
            entry = self._read_again(position, is_dense)
            if entry is None:
                break
            used += 1
            key_hash = order.unpark(position)
            if key_hash is None or self.cursor.is_acknowledged(position):
                continue
            if held is not None and held.is_pending(position):
                self._aside[position] = key_hash
                self._meets_hold(position, key_hash)
                continue
            count, special = facts_of(entry.data)
            if special and self._skip_or_delay(entry, key_hash):
                continue
            if special and (chunk := chunk_in(entry.data)) is not None:
                self._chunks.sent(chunk, consumer)
            had = position in consumer.pending
            if not self._deliver(consumer, entry, count, key_hash):
                self._aside[position] = key_hash
            elif not had:
                order.sent(key_hash, consumer)
        return used

    def _send_new(self, budget: int) -> int:
        """Read on and send, or park entries that cannot be sent; returns how many were read."""
        limit = self.topic.max_read_position()
        order, reader, held, used = self._order, self.reader, self._held_messages(), 0
        # Entries of a consumer that cannot receive are parked, so that it does not stop the keys of
        # others.
        while used < budget and order.waiting < KEY_SHARED_LOOK_AHEAD_ENTRIES:
            if self._delayed.full or not self._may_send():
                break
            if not reader.buffer and not (self._any_can_receive() and reader.fill(limit, budget)):
                break
            entry = reader.buffer[0]
            if self.cursor.is_acknowledged(entry.position):
                reader.buffer.popleft()
                used += 1
                continue
            count, special, key_hash = self._facts(entry)
            if self._must_wait(entry.position):
                break
            reader.buffer.popleft()
            used += 1
            if held is not None:
                self._meets_hold(entry.position, key_hash)
                if held.is_pending(entry.position):
                    self._aside[entry.position] = key_hash
                    continue
            if special and self._skip_or_delay(entry, key_hash):
                continue
            consumer = order.receiver(key_hash)
            if special and (chunk := chunk_in(entry.data)) is not None:
                consumer = self._receiver_of_chunk(entry, chunk, key_hash, consumer)
            if consumer is None or not self._can_receive(consumer):
                order.park(entry.position, key_hash)
            elif self._deliver(consumer, entry, count, key_hash):
                order.sent(key_hash, consumer)
            else:
                self._aside[entry.position] = key_hash
        return used

    def _receiver_of_chunk(
        self, entry: Entry, chunk: Chunk, key_hash: int, consumer: Consumer | None
    ) -> Consumer | None:
        """The consumer of a new chunk: that of the chunks before it, though its key has moved.

        None if the chunk has to wait.
        """
        begun, order = self._chunks.owner(chunk), self._order
        if begun is not None and order.may_have_rest(key_hash, begun):
            if order.has_bound(begun) or not self._can_receive(begun):
                order.bind(entry.position, key_hash, begun)
                return None
            consumer = begun
        if consumer is not None and self._can_receive(consumer):
            self._chunks.sent(chunk, consumer)
        return consumer

    def _facts(self, entry: Entry) -> tuple[int, bool, int]:
        """The number of messages of an entry, whether it is special, and its hash."""
        return keyed_facts_of(entry.data)

    def _must_wait(self, position: Position) -> bool:
        """Whether no consumer may get an entry now, whatever its key."""
        return False

    def _any_can_receive(self) -> bool:
        return any(self._can_receive(consumer) for consumer in self.consumers)
