"""Shared: every entry goes to a consumer that can receive, in turns."""

from broker.topics.consumer import Consumer
from broker.topics.dispatch.entry_facts import facts_of
from broker.topics.dispatch.pending import PendingDispatcher
from broker.topics.dispatch.redelivery import RedeliveryCounts, ReplayQueue
from broker.topics.dispatch.selection import Rotation
from broker.topics.dispatch.source import DispatchedSubscription
from config.bounds import READ_BATCH_ENTRIES, ROUND_ROBIN_RUN_ENTRIES
from magnetar.protocol.ids import Position
from storage.managed_ledger.types import Entry

_NO_HASH = 0


class SharedDispatcher(PendingDispatcher):
    """Sends each entry to a consumer that can receive it, in turns.

    A consumer gets ROUND_ROBIN_RUN_ENTRIES in a row at most.  One whose socket is full is passed
    over, and does not stop the others.
    """

    def __init__(self, subscription: DispatchedSubscription, counts: RedeliveryCounts) -> None:
        super().__init__(subscription, counts)
        self._rotation: Rotation[Consumer] = Rotation()
        self._replay = ReplayQueue()

    @property
    def waiting(self) -> int:
        """See the base class."""
        return len(self._replay)

    def add(self, consumer: Consumer) -> None:
        """See the base class.  Its turn comes after those of the present consumers."""
        self.consumers.append(consumer)
        self._rotation.add(consumer)

    def remove(self, consumer: Consumer) -> None:
        """See the base class.  Its entries go to the others."""
        self.consumers.remove(consumer)
        self._rotation.remove(consumer)
        self._return_in_slices(self._let_all_wait(self._take_all_pending(consumer)))

    def _return(self, consumer: Consumer, position: Position, key_hash: int) -> None:
        self._replay.add(position)

    def _forget_waiting(self, position: Position) -> None:
        self._replay.discard(position)

    def _let_wait(self, position: Position, key_hash: int) -> None:
        self._replay.add(position)

    def _due_capacity(self) -> int:
        return READ_BATCH_ENTRIES - len(self._replay)

    def _redeliver_skipped(self, position: Position) -> None:
        self._replay.add(position)

    def _keep_hash(self, position: Position, key_hash: int) -> None:
        """Do nothing: keys do not matter here."""

    def _relieved(self, consumer: Consumer, key_hash: int) -> None:
        """Do nothing: keys do not matter here."""

    def _send(self) -> bool:
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
                if not (special and self._skip_or_delay(entry, _NO_HASH)):
                    self._deliver(consumer, entry, count, _NO_HASH)
            budget -= used
        for consumer in served:
            consumer.flush()
        return more and not budget

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
        if self._delayed.full:
            return None
        reader = self.reader
        if reader.buffer or reader.fill(limit, READ_BATCH_ENTRIES):
            return reader.buffer.popleft()
        return None
