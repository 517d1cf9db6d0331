"""Key_Shared by entry buckets: the consumers that share a segment (PIP-486)."""

from collections.abc import Sequence

from broker.topics.consumer import Consumer, KeySharedPolicy
from broker.topics.dispatch.entry_buckets import EntryBuckets
from broker.topics.dispatch.entry_facts import bucketed_facts_of
from broker.topics.dispatch.key_shared import KeySharedDispatcher
from broker.topics.dispatch.redelivery import RedeliveryCounts
from broker.topics.dispatch.source import DispatchedSubscription
from broker.topics.dispatch.unstamped_positions import UnstampedPositions
from magnetar.protocol.ids import Position
from storage.managed_ledger.types import Entry


class EntryBucketDispatcher(KeySharedDispatcher):
    """Sends whole entries to the owners of their entry buckets.

    To `KeyOrder` a bucket is one key: a bucket that moves to another consumer waits until all that
    its former owner has of it is acknowledged.

    Its consumers are ordered, like an Exclusive one.  So they get delayed messages at once.  While
    a transaction holds messages of a bucket, only the consumer of that transaction gets more of it
    (A9): an abort redelivers the messages, and no other consumer may have later ones then.

    A batch without entry hashes may have messages of several buckets (see `unstamped_batches`).
    While there are several consumers, it is sent when everything before it is acknowledged, and
    nothing behind it is sent until it is acknowledged itself.
    """

    def __init__(
        self,
        subscription: DispatchedSubscription,
        counts: RedeliveryCounts,
        policy: KeySharedPolicy,
    ) -> None:
        self._buckets = EntryBuckets[Consumer]()
        super().__init__(subscription, counts, policy, self._buckets)
        self._delays = False
        self._blocked: dict[Position, int] = {}
        """Entries of which transactions hold messages, with their buckets."""
        self.unstamped = UnstampedPositions()
        """Batches without entry hashes that were read and are not acknowledged."""

    def add(self, consumer: Consumer) -> None:
        """See the base class.  It may be the consumer of transactions that hold messages."""
        super().add(consumer)
        for position, bucket in list(self._blocked.items()):
            self._update_block(position, bucket)

    def remove(self, consumer: Consumer) -> None:
        """See the base class.  Buckets with messages that its transactions hold stay blocked."""
        if self._held_messages() is not None:
            for position, (_, bucket) in consumer.pending.items():
                self._update_block(position, bucket)
        super().remove(consumer)

    def settled(self, consumer: Consumer | None, position: Position, left: int) -> None:
        """See the base class."""
        super().settled(consumer, position, left)
        if self.unstamped and not left:
            self.unstamped.acknowledged(position)
            self.wake()
        if self._blocked and (bucket := self._blocked.get(position)) is not None:
            self._update_block(position, bucket)

    def held(self, position: Position, messages: int) -> None:
        """See the base class."""
        owner = self._owner(None, position)
        if owner is not None:
            bucket: int | None = owner.pending[position][1]
        else:
            bucket = self._aside.get(position) or self._order.hash_of_waiting(position)
        if bucket is None:
            bucket = self._blocked.get(position)
        if bucket is not None:
            # First: no other consumer may get more of the bucket in between.
            self._update_block(position, bucket)
        super().held(position, messages)

    def released(self, positions: Sequence[Position], *, again: bool) -> None:
        """See the base class."""
        super().released(positions, again=again)
        for position in positions:
            if (bucket := self._blocked.get(position)) is not None:
                self._update_block(position, bucket)

    def _facts(self, entry: Entry) -> tuple[int, bool, int]:
        count, special, entry_hash, stamped = bucketed_facts_of(entry.data)
        if count > 1 and not stamped:
            self.unstamped.add(entry.position)
            self.topic.note_unstamped_batch()
        return count, special, self._buckets.bucket(entry_hash)

    def _must_wait(self, position: Position) -> bool:
        if not self.unstamped:
            return False
        first = self.unstamped.first(self.cursor.is_acknowledged, self._unacknowledged_start)
        if first is None or len(self.consumers) < 2:
            return False
        return position > first or (position == first and self._unacknowledged_start() != first)

    def _meets_hold(self, position: Position, key_hash: int) -> None:
        self._update_block(position, key_hash)

    def _update_block(self, position: Position, bucket: int) -> None:
        """Block the bucket for others as long as a transaction holds messages of the entry."""
        held, transactional = self._held_messages(), self.subscription.transactional
        txns = () if held is None else held.transactions_at(position)
        if transactional is None or not txns:
            if self._blocked.pop(position, None) is not None:
                self._order.unblock(position, bucket)
                self.wake()
            return
        own = (each for each in self.consumers if not transactional.must_wait_for(each, txns))
        self._blocked[position] = bucket
        self._order.block(position, bucket, next(own, None))
        if not self._order.queued:
            self.wake()
