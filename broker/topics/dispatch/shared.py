"""Shared: every entry goes to a consumer that can receive, in turns."""

from broker.topics.consumer import Consumer
from broker.topics.deduplication import Chunk
from broker.topics.dispatch.chunk_owners import ChunkOwners
from broker.topics.dispatch.entry_facts import chunk_in, facts_of
from broker.topics.dispatch.pending import PendingDispatcher
from broker.topics.dispatch.redelivery import RedeliveryCounts, ReplayQueue
from broker.topics.dispatch.selection import Rotation
from broker.topics.dispatch.source import DispatchedSubscription
from config.bounds import (
    KEY_SHARED_LOOK_AHEAD_ENTRIES,
    READ_BATCH_ENTRIES,
    ROUND_ROBIN_RUN_ENTRIES,
)
from magnetar.protocol.ids import Position
from storage.managed_ledger.types import Entry

_NO_HASH = 0


class SharedDispatcher(PendingDispatcher):
    """Sends each entry to a consumer that can receive it, in turns.

    A consumer gets ROUND_ROBIN_RUN_ENTRIES in a row at most.  One whose socket is full is passed
    over, and does not stop the others.

    All chunks of a message go to the consumer that got the first one; they are set aside until it
    can receive.
    """

    def __init__(self, subscription: DispatchedSubscription, counts: RedeliveryCounts) -> None:
        super().__init__(subscription, counts)
        self._rotation: Rotation[Consumer] = Rotation()
        self._replay = ReplayQueue()
        self._chunks: ChunkOwners[Consumer] = ChunkOwners()
        self._aside: dict[Consumer, set[Position]] = {}
        """Chunks that wait until their consumers can receive."""

    @property
    def waiting(self) -> int:
        """See the base class."""
        return len(self._replay) + self._set_aside

    def add(self, consumer: Consumer) -> None:
        """See the base class.  Its turn comes after those of the present consumers."""
        self.consumers.append(consumer)
        self._rotation.add(consumer)

    def remove(self, consumer: Consumer) -> None:
        """See the base class.  Its entries go to the others."""
        self.consumers.remove(consumer)
        self._rotation.remove(consumer)
        self._chunks.left(consumer)
        self._recall(consumer)
        self._return_in_slices(self._let_all_wait(self._take_all_pending(consumer)))

    def _return(self, consumer: Consumer, position: Position, key_hash: int) -> None:
        self._wait(position)

    def _forget_waiting(self, position: Position) -> None:
        self._replay.discard(position)
        for positions in self._aside.values():
            positions.discard(position)

    def _let_wait(self, position: Position, key_hash: int) -> None:
        self._wait(position)

    def _wait(self, position: Position) -> None:
        for positions in self._aside.values():
            positions.discard(position)
        self._replay.add(position)

    @property
    def _set_aside(self) -> int:
        return sum(map(len, self._aside.values()))

    def _recall(self, consumer: Consumer) -> None:
        """Let the chunks wait that were set aside for a consumer."""
        for position in self._aside.pop(consumer, ()):
            self._replay.add(position)

    def _due_capacity(self) -> int:
        return READ_BATCH_ENTRIES - len(self._replay)

    def _redeliver_skipped(self, position: Position) -> None:
        self._wait(position)

    def _keep_hash(self, position: Position, key_hash: int) -> None:
        """Do nothing: keys do not matter here."""

    def _relieved(self, consumer: Consumer, key_hash: int) -> None:
        """Do nothing: keys do not matter here."""

    def _send(self) -> bool:
        for each in [each for each in self._aside if each.can_receive()]:
            self._recall(each)
        limit, held = self.topic.max_read_position(), self._held_messages()
        budget = READ_BATCH_ENTRIES
        served: dict[Consumer, None] = {}
        more = True
        while more and budget and self._may_send():
            consumer = self._rotation.next(self._can_receive)
            if consumer is None:
                break
            served[consumer] = None
            run, used = min(budget, ROUND_ROBIN_RUN_ENTRIES), 0
            while used < run and consumer.can_receive() and self._may_send():
                entry = self._next(limit)
                if entry is None:
                    if not used:
                        self._rotation.give_back(consumer)
                    more = False
                    break
                used += 1
                if self.cursor.is_acknowledged(entry.position):
                    continue
                if held is not None and held.is_pending(entry.position):
                    continue
                count, special = facts_of(entry.data)
                if special and self._skip_or_delay(entry, _NO_HASH):
                    continue
                chunk = chunk_in(entry.data) if special else None
                if chunk is None:
                    self._deliver(consumer, entry, count, _NO_HASH)
                else:
                    served[self._send_chunk(entry, count, chunk, consumer)] = None
            budget -= used
        for consumer in served:
            consumer.flush()
        return more and not budget

    def _send_chunk(self, entry: Entry, count: int, chunk: Chunk, consumer: Consumer) -> Consumer:
        """Send a chunk to the consumer that has those before it, else to `consumer`.

        Returns that consumer; the chunk is set aside if it cannot receive.
        """
        owner = self._chunks.owner(chunk) or consumer
        if self._can_receive(owner):
            self._deliver(owner, entry, count, _NO_HASH)
            self._chunks.sent(chunk, owner)
        else:
            self._aside.setdefault(owner, set()).add(entry.position)
        return owner

    def _next(self, limit: Position) -> Entry | None:
        """Take out the next entry to be sent, waiting ones first; None if none is ready."""
        if len(self._replay):
            position = self._replay.first()
            if position is None:
                return None
            entry = self._read_again(position, self._replay.is_dense)
            if entry is not None:
                self._replay.discard(position)
            return entry
        if self._delayed.full or self._set_aside >= KEY_SHARED_LOOK_AHEAD_ENTRIES:
            return None
        reader = self.reader
        if reader.buffer or reader.fill(limit, READ_BATCH_ENTRIES):
            return reader.buffer.popleft()
        return None
