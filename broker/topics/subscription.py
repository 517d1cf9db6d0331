"""One subscription of a topic: its cursor, its consumers, and the dispatcher between them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Protocol
from weakref import ref

import structlog

from broker.topics.batch_sizes import BatchSizes
from broker.topics.compaction.entries import last_kept_index
from broker.topics.compaction.reading import CompactedView, ReadStart
from broker.topics.compaction.reserved import require_of_users
from broker.topics.consumer import (
    Ack,
    Consumer,
    KeySharedPolicy,
    NewestMessage,
    SubscribeRequest,
    SubscriptionType,
)
from broker.topics.consumer_admission import (
    AdmittingTopic,
    remove_if_silent,
    require_agreement,
    require_below_maximums,
)
from broker.topics.dispatch.dispatcher import Dispatcher
from broker.topics.dispatch.entry_bucket_dispatcher import EntryBucketDispatcher
from broker.topics.dispatch.entry_facts import last_batch_index
from broker.topics.dispatch.errors import ConsumerBusy, ConsumerNotAllowed, SubscriptionUnavailable
from broker.topics.dispatch.key_shared import KeySharedDispatcher
from broker.topics.dispatch.last_message import LastMessage, batch_size_at
from broker.topics.dispatch.redelivery import RedeliveryCounts
from broker.topics.dispatch.shared import SharedDispatcher
from broker.topics.dispatch.single_active import SingleActiveDispatcher
from broker.topics.dispatch.start_position import first_published_since
from broker.topics.rates import RateSampler
from broker.topics.replication import TopicReplication
from broker.topics.snapshot_cache import SnapshotCache
from broker.topics.subscription_markers import snapshot_in
from broker.topics.throttle import (
    Level,
    RateLimit,
    Throttle,
    ThrottledCounts,
    changed_limit,
    in_force,
)
from broker.topics.transactional_acks import AckedTopic, TransactionalAcks
from broker.topics.weak_references import require_present
from config.bounds import EXCLUSIVE_HANDOVER_WAIT_S, EXPIRED_AT_ONCE, SEEK_REATTACH_S
from magnetar.protocol.ack_set import from_words
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.managed_clients import is_managed
from magnetar.protocol.names import TopicDomain
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.callbacks import ignore
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.stream_ranges import after
from storage.managed_ledger.types import Entry
from txn.held_messages import HeldMessages
from txn.pending_ack import ALL_MESSAGES

log = structlog.get_logger(__name__)


class SubscribedTopic(AckedTopic, AdmittingTopic, Protocol):
    """The topic of a subscription."""

    @property
    def dispatch_limits(self) -> tuple[RateLimit, ...]:
        """The rates of sending to consumers of all subscriptions together."""
        ...

    def published_rates(self, now_s: float) -> tuple[float, float]:
        """Messages and bytes per second that are published to the topic."""
        ...

    @property
    def last_message(self) -> LastMessage:
        """The newest message that readers get."""
        ...

    @property
    def replication(self) -> TopicReplication:
        """What is sent to other clusters."""
        ...

    async def unsubscribe(self, name: str, *, force: bool) -> None:
        """Delete a subscription and its cursor."""
        ...

    def consumer_attached(self, subscription: str, consumer: Consumer) -> None:
        """Report that a consumer was added to a subscription."""
        ...

    def consumer_closed(self, subscription: str, consumer: Consumer, *, by_command: bool) -> None:
        """Report that a consumer left: by CLOSE_CONSUMER (`by_command`) or with its connection."""
        ...

    def subscription_drained(self, subscription: str) -> None:
        """Report that the topic is sealed and the subscription's backlog has become 0."""
        ...

    def subscription_rewound(self, subscription: str) -> None:
        """Report a seek: a drained subscription need not be drained any longer."""
        ...


class Subscription:
    """One subscription of a topic: its cursor, its consumers and their dispatcher.

    Its type is that of the connected consumers; with none connected it may change.  A subscription
    that is not durable ends with its last consumer; after a seek that has SEEK_REATTACH_S to come
    back.
    """

    def __init__(
        self,
        topic: SubscribedTopic,
        name: str,
        cursor: Cursor,
        *,
        handover_wait_s: float = EXCLUSIVE_HANDOVER_WAIT_S,
        reattach_s: float = SEEK_REATTACH_S,
    ) -> None:
        self._topic_reference = ref(topic)
        self._handover_wait_s = handover_wait_s
        self._reattach_s = reattach_s
        self.name = name
        self.cursor = cursor
        self.type: SubscriptionType | None = None
        self.key_shared = KeySharedPolicy()
        self.dispatcher: Dispatcher | None = None
        self.topic_name = topic.name
        partition = topic.name.partition_index
        self.partition_index = -1 if partition is None else partition
        self.closed = False
        self.seeks = 0
        """Number of times that the position was moved."""
        self.drained = False
        self.expired_total = 0
        """Entries that were acknowledged because they were too old, since the topic was loaded."""
        self.last_expired_ms = 0
        """When entries that were too old were acknowledged last, or sought; 0: never."""
        self.last_advanced_ms = 0
        """When acknowledgements moved its mark-delete position last, since the topic was loaded;
        0: never."""
        self._noted_mark = cursor.mark_delete
        self.on_acknowledged: Callable[[], None] = ignore
        """Called after acknowledgements: see `broker.replication.segment_subscriptions`."""
        self._snapshots: SnapshotCache | None = None
        """Snapshots that it read, of one that is replicated to other clusters."""
        self.read_start = ReadStart.loaded(cursor)
        """The place where it began, for consumers that read compacted."""
        self.transactional: TransactionalAcks | None = None
        self.messages_held: HeldMessages | None = None
        """Messages that open transactions acknowledged; None for a non-durable subscription."""
        self._counts = RedeliveryCounts()
        self._change = asyncio.Lock()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._reattach: asyncio.TimerHandle | None = None
        self._retirement: asyncio.Task[None] | None = None
        self.batch_sizes = BatchSizes()
        self._past = _PastConsumers()
        self._dispatch_limit: RateLimit | None = None
        self.throttled = ThrottledCounts()
        """How often its dispatcher had to wait for a rate, since the topic was loaded."""
        self.rate_sampler = RateSampler(asyncio.get_running_loop().time(), len(self.traffic))
        """Samples `traffic`: see `broker.topics.rate_timer`."""

    # Queries

    @property
    def topic(self) -> SubscribedTopic:
        """The topic.  Raises `TopicGone` if it was closed and nobody uses it."""
        return require_present(self._topic_reference)

    @property
    def consumers(self) -> Sequence[Consumer]:
        """The connected consumers."""
        return () if self.dispatcher is None else tuple(self.dispatcher.consumers)

    @property
    def ledger(self) -> ManagedLedger:
        """The topic's entries."""
        return self.topic.ledger

    @property
    def durable(self) -> bool:
        """Whether the subscription outlives its consumers."""
        return self.cursor.durable

    @property
    def backlog(self) -> int:
        """Entries not (wholly) acknowledged."""
        return self.cursor.backlog

    @property
    def unacked(self) -> int:
        """Number of messages sent to Shared and Key_Shared consumers and not acknowledged."""
        return sum(consumer.unacked for consumer in self.consumers)

    @property
    def blocked_on_unacked(self) -> bool:
        """Whether no consumer gets messages until some are acknowledged."""
        return self.dispatcher is not None and self.dispatcher.blocked_on_unacked

    @property
    def last_sent_ms(self) -> int:
        """When messages were sent to a consumer last, since the topic was loaded; 0: never."""
        return max(self._past.last_sent_ms, *(each.last_sent_ms for each in self.consumers), 0)

    @property
    def last_acked_ms(self) -> int:
        """When a consumer acknowledged last, since the topic was loaded; 0: never."""
        return max(self._past.last_acked_ms, *(each.last_acked_ms for each in self.consumers), 0)

    @property
    def last_flow_ms(self) -> int:
        """When a consumer sent a FLOW last, since the topic was loaded; 0: never."""
        return max(self._past.last_flow_ms, *(each.last_flow_ms for each in self.consumers), 0)

    @property
    def in_replay(self) -> int:
        """Entries that were read and wait to be sent to a consumer."""
        return 0 if self.dispatcher is None else self.dispatcher.waiting

    @property
    def delayed(self) -> int:
        """Entries of the backlog that are delayed until their time; 0 without consumers."""
        return 0 if self.dispatcher is None else self.dispatcher.delayed

    @property
    def active_consumer(self) -> Consumer | None:
        """The consumer that gets the messages of an Exclusive or Failover subscription."""
        dispatcher = self.dispatcher
        return dispatcher.active if isinstance(dispatcher, SingleActiveDispatcher) else None

    @property
    def at_end(self) -> bool:
        """Whether a sealed topic has nothing more for this subscription.

        Everything may be read (W14) and is acknowledged, or was read by a reader, and no open
        transaction holds an acknowledgement.
        """
        topic, held = self.topic, self.messages_held
        if topic.max_read_position() != topic.ledger.last_confirmed or (held and held.any):
            return False
        if self.cursor.backlog == 0:
            return True
        if self.durable or self.dispatcher is None:
            return False
        read_to_end = self.dispatcher.reader.next_position > topic.ledger.last_confirmed
        return read_to_end and not self.dispatcher.delayed

    @property
    def idle(self) -> bool:
        """Whether it has no consumers and no work in progress, and its state is durable."""
        return (
            self.durable
            and not self.consumers
            and not self._waiting
            and not self._change.locked()
            and not self.cursor.dirty
            and (self.transactional is None or not self.transactional.pending.busy)
        )

    @property
    def traffic(self) -> tuple[int, int, int, int, int]:
        """The counters of which rates are taken, in the order of `SubscriptionTraffic`."""
        past = self._past
        messages, size_bytes = past.messages_out, past.bytes_out
        redelivered, acknowledged = past.redelivered, past.acknowledged_total
        if self.dispatcher is not None:
            for each in self.dispatcher.consumers:
                messages += each.messages_out_total
                size_bytes += each.bytes_out_total
                redelivered += each.redelivered_total
                acknowledged += each.acknowledged_total
        return messages, size_bytes, redelivered, acknowledged, self.expired_total

    def expired_per_s(self, now_s: float) -> float:
        """Entries that expired per second; `now_s` is the clock of the event loop."""
        return self.rate_sampler.rates(now_s, self.traffic)[-1]

    def sample_rates(self, now_s: float) -> tuple[int, int, int, int, int]:
        """Read the counters of the subscription and its consumers; returns its own."""
        if self.dispatcher is not None:
            for consumer in self.dispatcher.consumers:
                consumer.rate_sampler.sample(now_s, consumer.traffic)
        counts = self.traffic
        self.rate_sampler.sample(now_s, counts)
        return counts

    @property
    def messages_out_total(self) -> int:
        """Messages sent to all present and past consumers."""
        return self._past.messages_out + sum(each.messages_out_total for each in self.consumers)

    @property
    def bytes_out_total(self) -> int:
        """Bytes of entries sent."""
        return self._past.bytes_out + sum(each.bytes_out_total for each in self.consumers)

    @property
    def redelivered_total(self) -> int:
        """Messages that consumers asked to get again."""
        return self._past.redelivered + sum(each.redelivered_total for each in self.consumers)

    @property
    def acknowledged_total(self) -> int:
        """Messages acknowledged; in transactions, when they are acknowledged and not at the end."""
        return self._past.acknowledged_total + sum(
            each.acknowledged_total for each in self.consumers
        )

    def now_ms(self) -> int:
        """The broker's clock."""
        return self.topic.context.clock.now_ms()

    async def load_transactions(self) -> None:
        """Load the acknowledgements of transactions; called before consumers attach."""
        if self.durable:
            self.transactional = await TransactionalAcks.load(self)
            self.messages_held = self.transactional.pending.core.held

    # Consumers

    async def add_consumer(self, request: SubscribeRequest) -> Consumer:
        """Attach a consumer.

        A second Exclusive consumer is refused while the connection of the first one is alive.  On a
        segment it waits until the first one left, EXCLUSIVE_HANDOVER_WAIT_S at most.  So do
        consumers that share entry buckets behind an Exclusive one, and the reverse.

        Raises `ConsumerBusy`, `ConsumerAssignError`, `SubscriptionUnavailable`.
        """
        try:
            return await self._add_in_turn(request)
        finally:
            if not self.durable and not self.consumers and self._reattach is None:
                self._retire()

    async def _add_in_turn(self, request: SubscribeRequest) -> Consumer:
        deadline = asyncio.get_running_loop().time() + self._handover_wait_s
        checked: set[Consumer] = set()
        while True:
            async with self._change:
                before = self._consumers_before(request, checked)
                if not before:
                    return self._attach(request)
            unchecked = [each for each in before if each not in checked]
            checked.update(unchecked)
            for each in unchecked:
                await remove_if_silent(self, each, request.connection)
            if not unchecked:
                await self._wait_for_change(request, deadline)

    def consumer_opened(self, consumer: Consumer) -> None:
        """Send a consumer what it could not take in before the answer to its SUBSCRIBE."""
        if self.dispatcher is not None:
            self.dispatcher.announce(consumer)
        self.report_end_if_reached()

    def remove_consumer(self, consumer: Consumer, *, by_command: bool) -> None:
        """Remove a consumer; its unacknowledged messages go to others.  Idempotent."""
        if self._detach(consumer, by_command=by_command) and not self.consumers:
            self._on_no_consumers()

    def disconnect_consumers(self) -> None:
        """Send CLOSE_CONSUMER to all; clients subscribe again by themselves."""
        for consumer in self.consumers:
            consumer.disconnect()
            self._detach(consumer, by_command=False)

    # Requests of consumers

    def wake(self) -> None:
        """Run the dispatcher: permits came, or the max read position moved."""
        if self.dispatcher is not None:
            self.dispatcher.wake()
        elif self.topic.sealed:
            self.report_end_if_reached()

    def read_on(self) -> None:
        """Run the dispatcher, and report an end that is reached: the max read position moved."""
        self.wake()
        self.report_end_if_reached()

    def acknowledge(self, consumer: Consumer | None, acks: Iterable[Ack]) -> None:
        """Take individual acknowledgements of whole entries or of messages of batches.

        Without `consumer` they are of one that its client closed just before: its application has
        processed these messages.  Those that were redelivered since are settled where they are
        pending.
        """
        dispatcher = self.dispatcher
        if consumer is not None and (consumer.closed or dispatcher is None):
            return
        topic, cursor, taken = self.topic, self.cursor, 0
        end = topic.ledger.last_confirmed
        for position, ack_set, batch_size in acks:
            if position > end:
                continue
            left = 0
            if ack_set:
                size = _trusted_size(batch_size, ack_set)
                if cursor.acknowledge_batch(position, ack_set, size):
                    taken += self.batch_sizes.take(position)
                else:
                    left = self._unacknowledged_in(position)
                    if left > 0:
                        taken += self.batch_sizes.narrow(position, left.bit_count())
            elif cursor.acknowledge(position):
                taken += self.batch_sizes.take(position)
            if dispatcher is not None:
                dispatcher.settled(consumer, position, left)
            elif not left:
                self._counts.forget(position)
        counted = self._past if consumer is None else consumer
        counted.acknowledged_total += taken
        counted.last_acked_ms = self.now_ms()
        self.note_progress()
        if topic.sealed:
            self.report_end_if_reached()

    def note_progress(self) -> None:
        """Note the time if acknowledgements moved the mark-delete position."""
        self.on_acknowledged()
        mark = self.cursor.mark_delete
        if mark is not self._noted_mark:
            self._noted_mark = mark
            self.last_advanced_ms = self.now_ms()
            self._report_passed_snapshot()

    def _report_passed_snapshot(self) -> None:
        """Tell other clusters how far it came, if it has passed a snapshot."""
        if self._snapshots is None:
            return
        passed = self._snapshots.take_up_to(self.cursor.mark_delete)
        if passed is not None and self.cursor.replicated:
            self.topic.replication.subscription_passed(self.name, passed)

    def _unacknowledged_in(self, position: Position) -> int:
        """The messages of an entry that are not acknowledged."""
        if words := self.cursor.ack_set(position):
            return from_words(words, len(words) * 64)
        return 0 if self.cursor.is_acknowledged(position) else ALL_MESSAGES

    def acknowledge_up_to(
        self, consumer: Consumer, position: Position, ack_set: Sequence[int]
    ) -> None:
        """Acknowledge cumulatively.  Raises `ConsumerNotAllowed` for Shared and Key_Shared."""
        self._require_cumulative(consumer.type)
        if not consumer.closed:
            consumer.acknowledged_total += self._take_up_to(position, ack_set)
            consumer.last_acked_ms = self.now_ms()

    def acknowledge_late_up_to(
        self, consumer_type: SubscriptionType, position: Position, ack_set: Sequence[int]
    ) -> None:
        """Take a cumulative acknowledgement of a consumer that its client closed just before.

        An Exclusive or Failover consumer got all messages up to `position`, so it is right though
        another one has got them again since.  Raises `ConsumerNotAllowed` for Shared and
        Key_Shared, and if the subscription has consumers of these types now: those have the
        messages pending one by one.
        """
        self._require_cumulative(consumer_type)
        if self.dispatcher is not None and self.type is not None:
            self._require_cumulative(self.type)
        self._past.acknowledged_total += self._take_up_to(position, ack_set)
        self._past.last_acked_ms = self.now_ms()

    def _take_up_to(self, position: Position, ack_set: Sequence[int]) -> int:
        """Acknowledge cumulatively; returns the number of messages that are new."""
        if position > self.topic.ledger.last_confirmed:
            return 0
        before = self.cursor.backlog
        self.cursor.acknowledge_up_to(position, ack_set)
        self.note_progress()
        last, acknowledged = position, 0
        if ack_set and (left := self._unacknowledged_in(position)) > 0:
            acknowledged = self.batch_sizes.narrow(position, left.bit_count())
            last = Position(position.ledger_id, position.entry_id - 1)
        acknowledged += self.batch_sizes.take_up_to(last, before - self.cursor.backlog)
        if self.topic.sealed:
            self.report_end_if_reached()
        return acknowledged

    def acknowledge_in(
        self, consumer: Consumer, txn: TxnId, acks: Sequence[Ack], *, cumulative: bool
    ) -> asyncio.Task[None]:
        """Acknowledge when the transaction commits; the task ends when the ACK may be answered.

        Await it through `asyncio.shield`.  Raises `ConsumerNotAllowed`, `SubscriptionUnavailable`,
        `TransactionConflict`, `InvalidTxnStatus`, `TransactionNotFound`; the task too.
        """
        if cumulative:
            self._require_cumulative(consumer.type)
        transactional = self._require_transactional()
        return transactional.acknowledge(consumer, txn, acks, cumulative=cumulative)

    async def acknowledge_many_in(
        self, consumer: Consumer, txn: TxnId, acks: Sequence[Ack]
    ) -> asyncio.Task[None]:
        """As `acknowledge_in` for individual ones, in slices; returns when all or none are held."""
        return await self._require_transactional().acknowledge_many(consumer, txn, acks)

    def _require_transactional(self) -> TransactionalAcks:
        if self.transactional is None:
            raise ConsumerNotAllowed(
                f"Subscription {self.name!r} is not durable: acknowledge without a transaction."
            )
        return self.transactional

    def _require_cumulative(self, consumer_type: SubscriptionType) -> None:
        if consumer_type.individual:
            raise ConsumerNotAllowed(
                f"Subscription {self.name!r} is {consumer_type.label} and takes individual "
                "acknowledgements only: acknowledge each message."
            )

    def skip(self, position: Position) -> None:
        """Acknowledge an entry that no consumer may see."""
        self.cursor.acknowledge(position)
        self.on_acknowledged()
        self._report_passed_snapshot()
        if self.topic.sealed:
            self.report_end_if_reached()

    def skip_marker(self, entry: Entry) -> None:
        """Acknowledge a marker.  A snapshot of this cluster's is remembered until it is passed."""
        most = self.topic.replication.cached_snapshots
        if most and self.cursor.replicated:
            snapshot = snapshot_in(entry.data)
            if snapshot is not None:
                if self._snapshots is None:
                    self._snapshots = SnapshotCache(most)
                self._snapshots.add(snapshot)
        self.skip(entry.position)

    async def consumed_elsewhere(self, position: Position, began: Position) -> None:
        """Acknowledge all after `began` up to and with `position`, as another cluster's consumers.

        That cluster did not get what is up to `began`.  Returns when that is durable.  A position
        that is not there to be read is left alone: it belongs to another topic of this name.
        Raises as `persist`.
        """
        if position > self.topic.max_read_position():
            return
        individual = self.dispatcher is not None and self.type is not None and self.type.individual
        if individual or self.cursor.entries_up_to(began):
            async for _ in self._acknowledge_oldest(after(position), self.backlog, after(began)):
                pass
        else:
            self._past.acknowledged_total += self._take_up_to(position, ())
            self.wake()
        await self.persist()

    async def acknowledged_elsewhere(self, positions: Sequence[Position]) -> None:
        """Acknowledge these entries, in slices: another cluster's consumers have acknowledged them.

        Those that are left when it is closed or sought stay as they are.
        """
        resets = self.cursor.resets
        for start in range(0, len(positions), EXPIRED_AT_ONCE):
            if self.closed or self.cursor.resets != resets:
                return
            slice_ = positions[start : start + EXPIRED_AT_ONCE]
            self.acknowledge(None, [(each, (), 0) for each in slice_])
            self.wake()
            await asyncio.sleep(0)

    async def expire_before(self, end: Position) -> int:
        """Acknowledge the entries before `end`, as too old, and return how many it acknowledged.

        Entries behind the max read position stay: a transaction is open there.  Raises
        `ReservedSubscription` for the subscription of compaction.
        """
        expired = 0
        self.last_expired_ms = self.now_ms()
        async for count in self._acknowledge_oldest(end, self.backlog):
            expired += count
            self.expired_total += count
        return expired

    async def skip_oldest(self, most: int) -> int:
        """Acknowledge the oldest entries, `most` of them, and return how many it acknowledged.

        Stays and raises as `expire_before`.
        """
        return sum([count async for count in self._acknowledge_oldest(LATEST, most)])

    async def _acknowledge_oldest(
        self, end: Position, most: int, start: Position = EARLIEST
    ) -> AsyncIterator[int]:
        """Acknowledge at most so many entries from `start` to before `end`, in slices.

        Yields their lengths.
        """
        require_of_users(self.name)
        left = most
        while left and not self.closed:
            last = self.topic.max_read_position()
            slice_: list[Ack] = []
            position = self.cursor.first_unacknowledged(start)
            room = min(left, EXPIRED_AT_ONCE)
            while position < end and position <= last and len(slice_) < room:
                slice_.append((position, (), 0))
                position = self.cursor.first_unacknowledged(position.following)
            if not slice_:
                break
            # Of a replicator, what is skipped was not sent.
            self.cursor.pass_over(slice_[-1][0])
            self.acknowledge(None, slice_)
            left -= len(slice_)
            yield len(slice_)
            await asyncio.sleep(0)
        if left < most:
            self.wake()

    def redeliver(
        self, consumer: Consumer, messages: Mapping[Position, int] | None, epoch: int | None
    ) -> None:
        """Send unacknowledged messages again: of these entries, or all that the consumer has."""
        if consumer.closed or self.dispatcher is None:
            return
        if epoch is not None:
            consumer.set_epoch(epoch)
        if messages is None and self.transactional is not None:
            self.transactional.earlier.has_none(consumer)
        self.dispatcher.redeliver(consumer, messages)

    async def persist(self) -> None:
        """Return when the acknowledgements that it has taken are durable."""
        await self.cursor.persist()

    async def newest_message_of(self, consumer: Consumer) -> NewestMessage:
        """The newest message that the consumer gets.  Raises the errors of reading."""
        newest, batch_index = await self._last_entry_of(consumer)
        position = Position(-1, -1) if newest is None else newest.position
        return NewestMessage(position, batch_index, self.cursor.mark_delete)

    async def _last_entry_of(self, consumer: Consumer) -> tuple[Entry | None, int]:
        """The entry of the newest message that the consumer gets, and the message's batch index.

        (None, -1) if there is none.
        """
        newest = await self.topic.last_message.entry()
        view = self._compacted_view_of(consumer)
        if view is not None:
            with closing(view):
                if newest is None or newest.position <= view.horizon:
                    last = await view.last()
                    return last, -1 if last is None else last_kept_index(last.data)
        return newest, -1 if newest is None else last_batch_index(newest.data)

    def _compacted_view_of(self, consumer: Consumer) -> CompactedView | None:
        """The compacted topic as a consumer reads it, or would; None if it reads the topic."""
        if not consumer.read_compacted:
            return None
        dispatcher = self.dispatcher
        if isinstance(dispatcher, SingleActiveDispatcher) and dispatcher.active is consumer:
            return dispatcher.compacted and dispatcher.compacted.copy()
        return CompactedView.open(self.topic.ledger, EARLIEST, EARLIEST)

    # Changes of the whole subscription

    async def delete(self, *, force: bool) -> None:
        """Delete the subscription and its cursor: see `Topic.unsubscribe`."""
        await self.topic.unsubscribe(self.name, force=force)

    async def seek_message(self, position: Position, ack_set: Sequence[int]) -> None:
        """Continue at an entry, or with those messages of a batch that `ack_set` has."""
        size = await batch_size_at(self.ledger, position) if ack_set else 0
        await self.seek(position, ack_set, size)

    async def seek_time(self, since_ms: int, *, compacted: bool) -> None:
        """Continue at the first entry published at or after a time.

        With `compacted` that may be one that only the compacted ledger has.
        """
        await self.seek(await first_published_since(self.ledger, since_ms, compacted=compacted))

    async def seek(
        self, position: Position, ack_set: Sequence[int] = (), batch_size: int = 0
    ) -> None:
        """Continue at the first entry at or after `position`.

        With `ack_set` only those messages of a batch of `batch_size` at `position` are delivered.
        Consumers are disconnected, so that they drop prefetched messages and their permits are
        counted anew.  Acknowledgements of ended transactions are finished first (A7); those of open
        ones stay pending, as in Pulsar.
        """
        try:
            async with self._change:
                self._require_open()
                require_of_users(self.name)
                self.seeks += 1
                if not self.durable:
                    self._allow_reattach()
                # Consumers go first: with their acknowledgements the rest might never end.
                self.disconnect_consumers()
                self._drop_dispatcher()
                self.note_use()
                if self.transactional is not None:
                    # A7: after a crash they must not be applied over the new position.
                    await self.transactional.pending.finish_ended()
                try:
                    await self.cursor.reset(position)
                finally:
                    # The cursor has moved, even if that is not durable yet or the caller is gone.
                    self.read_start = ReadStart.at(position, self.cursor)
                    self._after_move(position, ack_set, batch_size)
        finally:
            self._notify_waiting()

    def _after_move(self, position: Position, ack_set: Sequence[int], batch_size: int) -> None:
        if ack_set and batch_size:
            self.cursor.acknowledge_batch(position, ack_set, batch_size)
        self._noted_mark = self.cursor.mark_delete
        if self.transactional is not None:
            self.transactional.earlier.moved()
        self._counts.forget_all()
        self.batch_sizes.clear()
        self.drained = False
        self.topic.subscription_rewound(self.name)
        self.report_end_if_reached()

    def topic_sealed(self) -> None:
        """Report the end, or that it is not reached, of a topic that is sealed or loaded sealed."""
        self.report_end_if_reached()
        # A subscription that was drained may have a backlog after a load, because its last
        # acknowledgements had not become durable.
        if self.durable and not self.drained:
            self.topic.subscription_rewound(self.name)

    def report_end_if_reached(self) -> None:
        """Report `drained` once, and the end of the topic to consumers, if that is reached."""
        if not self.topic.sealed or self.closed:
            return
        if self.durable and not self.drained and self.at_end:
            self.drained = True
            self.topic.subscription_drained(self.name)
        if self.dispatcher is not None and self.at_end:
            for consumer in self.dispatcher.consumers:
                consumer.send_end_of_topic()

    async def close(self, *, persist: bool) -> None:
        """Send CLOSE_CONSUMER to all consumers, and with `persist` make the cursor durable."""
        self.closed = True
        if self._reattach is not None:
            self._reattach.cancel()
            self._reattach = None
        self.disconnect_consumers()
        self._drop_dispatcher()
        if self._dispatch_limit is not None:
            self._dispatch_limit.close()
        self._notify_waiting()
        async with self._change:
            if self.transactional is not None:
                await self.transactional.pending.close()
            if persist and self.durable:
                self.note_use()
                await self.cursor.persist()

    # Internals

    def _require_open(self) -> None:
        if self.closed:
            raise SubscriptionUnavailable(
                f"Subscription {self.name!r} is being closed: subscribe again."
            )

    def _consumers_before(
        self, request: SubscribeRequest, checked: Collection[Consumer]
    ) -> Sequence[Consumer]:
        """The consumers that have to leave, or to be checked, before one is attached.

        Raises if waiting would not help.
        """
        self._require_open()
        consumers = self.consumers
        if not consumers or self._changes_sharing(request):
            return consumers
        require_agreement(self, request)
        if request.type is SubscriptionType.KEY_SHARED and request.key_shared.entry_buckets:
            # One that comes back need not wait for the keep-alive of its lost connection.
            name = request.consumer_name
            return [each for each in consumers if each.name == name and each not in checked]
        return consumers[:1] if request.type is SubscriptionType.EXCLUSIVE else ()

    def _changes_sharing(self, request: SubscribeRequest) -> bool:
        """Whether a segment goes from one ordered consumer to several that share it, or back."""
        shares, shared = request.key_shared.entry_buckets, self.key_shared.entry_buckets
        exclusive = request.type if shared else self.type
        return shares is not shared and exclusive is SubscriptionType.EXCLUSIVE

    async def _wait_for_change(self, request: SubscribeRequest, deadline: float) -> None:
        """Return when consumers left.  Raises `ConsumerBusy` at the deadline, or at once."""
        if not self.consumers:
            return
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        # Ordered consumers pass segments on without agreeing on who is first, and do not try again
        # after ConsumerBusy.
        legacy = self.topic.sealed and is_managed(request.metadata)
        if (self.topic.name.domain is TopicDomain.SEGMENT or legacy) and left_s > 0:
            changed: asyncio.Future[None] = loop.create_future()
            self._waiting[changed] = None
            try:
                await asyncio.wait((changed,), timeout=left_s)
            finally:
                self._waiting.pop(changed, None)
            if changed.done():
                return
        raise ConsumerBusy(
            f"Subscription {self.name!r} has an exclusive consumer already, or consumers that "
            "share entry buckets: close these, or subscribe under another name or with their type."
        )

    def _attach(self, request: SubscribeRequest) -> Consumer:
        if request.connection.closing:
            raise SubscriptionUnavailable("The connection was closed: subscribe again.")
        topic = self.topic
        require_below_maximums(self, topic, request)
        dispatcher = self.dispatcher
        if dispatcher is None:
            self.type = request.type
            self.key_shared = request.key_shared
            dispatcher = self._make_dispatcher(request)
            self._throttle(dispatcher)
        consumer = Consumer(request, self)
        consumer.limit_unacked(self.topic.policies.max_unacked_per_consumer)
        try:
            dispatcher.add(consumer)
        finally:
            if not dispatcher.consumers:
                dispatcher.close()
        self.dispatcher = dispatcher
        if self._reattach is not None:
            self._reattach.cancel()
            self._reattach = None
        consumer.forget_connection = request.connection.on_close(
            lambda: self.remove_consumer(consumer, by_command=False)
        )
        self.note_use()
        log.debug("consumer_attached", topic=str(self.topic.name), subscription=self.name)
        self.topic.consumer_attached(self.name, consumer)
        return consumer

    def apply_policies(self) -> None:
        """Use the topic's policies, which have changed."""
        policies = self.topic.policies
        self.note_use()
        if self.dispatcher is None:
            return
        self.dispatcher.delay_messages(
            active=policies.delays_delivery, tick_ms=policies.delayed_tick_ms
        )
        self.dispatcher.limit_unacked(policies.max_unacked_per_subscription)
        self._throttle(self.dispatcher)
        for consumer in self.dispatcher.consumers:
            consumer.limit_unacked(policies.max_unacked_per_consumer)
        self.wake()

    def _throttle(self, dispatcher: Dispatcher) -> None:
        """Have a dispatcher send at the rates that the policies set now."""
        topic = self.topic
        rate = topic.policies.dispatch_rate_of(self.name)
        self._dispatch_limit = changed_limit(
            self._dispatch_limit, rate, Level.SUBSCRIPTION, topic.published_rates
        )
        limits = in_force(self._dispatch_limit) + topic.dispatch_limits
        dispatcher.throttle_by(
            Throttle(limits, dispatcher.wake, self.throttled) if limits else None
        )

    def note_use(self) -> None:
        """Note that the subscription is used, or since when it is not if it is to expire.

        A broker that dies leaves it noted as used: then it is unused since it is loaded again.
        """
        topic, cursor = self.topic, self.cursor
        # A segment's subscriptions are the scalable topic's: none expires by itself.
        expires = (
            topic.policies.subscription_expiration_s and topic.name.domain is TopicDomain.PERSISTENT
        )
        if self.consumers:
            cursor.set_unused_since(None)
        elif expires and cursor.unused_since_ms is None:
            cursor.set_unused_since(self.now_ms())

    def _make_dispatcher(self, request: SubscribeRequest) -> Dispatcher:
        if request.type is SubscriptionType.SHARED:
            return SharedDispatcher(self, self._counts)
        if request.type is SubscriptionType.KEY_SHARED:
            if request.key_shared.entry_buckets:
                return EntryBucketDispatcher(self, self._counts, request.key_shared)
            return KeySharedDispatcher(self, self._counts, request.key_shared)
        self._counts.forget_all()
        return SingleActiveDispatcher(self, self._counts, request.type)

    def _detach(self, consumer: Consumer, *, by_command: bool) -> bool:
        """Detach one consumer; False if it was detached before."""
        if consumer.closed or self.dispatcher is None:
            return False
        consumer.closed = True
        consumer.forget_connection()
        consumer.connection.forget_consumer(consumer.consumer_id, consumer)
        if self.transactional is not None and not consumer.type.individual:
            if by_command:
                self.transactional.earlier.closed(consumer)
            elif self.dispatcher.may_have_messages(consumer):
                self.transactional.earlier.left(consumer)
        self.dispatcher.remove(consumer)
        self._past.add(consumer)
        self.topic.consumer_closed(self.name, consumer, by_command=by_command)
        return True

    def _on_no_consumers(self) -> None:
        self._drop_dispatcher()
        self.note_use()
        self._notify_waiting()
        if not self.durable and self._reattach is None:
            self._retire()

    def _drop_dispatcher(self) -> None:
        if self.dispatcher is not None:
            self.dispatcher.close()
            self.dispatcher = None

    def _notify_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _allow_reattach(self) -> None:
        if self.consumers and self._reattach is None:
            loop = asyncio.get_running_loop()
            self._reattach = loop.call_later(self._reattach_s, self._reattach_late)

    def _reattach_late(self) -> None:
        self._reattach = None
        if not self.consumers:
            self._retire()

    def _retire(self) -> None:
        """Have the topic forget a non-durable subscription without consumers."""
        if self.closed:
            return
        self.closed = True
        self._retirement = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        try:
            await self.topic.unsubscribe(self.name, force=True)
        except MagnetarError as error:
            log.warning("reader_subscription_not_deleted", subscription=self.name, error=str(error))


def _trusted_size(batch_size: int, ack_set: Sequence[int]) -> int:
    """The peer's batch size, but not more than one beyond the bits that it sent."""
    # Bits are made for that many messages.  One more is enough: all beyond the bits are
    # acknowledged.
    enough = len(ack_set) * 64 + 1
    return min(batch_size, enough) if batch_size > 0 else enough


class _PastConsumers:
    """Sums of the counters of consumers that left, and the newest of their times."""

    __slots__ = (
        "acknowledged_total",
        "bytes_out",
        "last_acked_ms",
        "last_flow_ms",
        "last_sent_ms",
        "messages_out",
        "redelivered",
    )

    def __init__(self) -> None:
        self.messages_out = 0
        self.bytes_out = 0
        self.redelivered = 0
        self.acknowledged_total = 0
        self.last_sent_ms = 0
        self.last_acked_ms = 0
        self.last_flow_ms = 0

    def add(self, consumer: Consumer) -> None:
        self.messages_out += consumer.messages_out_total
        self.bytes_out += consumer.bytes_out_total
        self.redelivered += consumer.redelivered_total
        self.acknowledged_total += consumer.acknowledged_total
        self.last_sent_ms = max(self.last_sent_ms, consumer.last_sent_ms)
        self.last_acked_ms = max(self.last_acked_ms, consumer.last_acked_ms)
        self.last_flow_ms = max(self.last_flow_ms, consumer.last_flow_ms)
