"""One subscription of a non-persistent topic: its consumers, and what it could not deliver."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol
from weakref import ref

import structlog

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
from broker.topics.dispatch.errors import ConsumerBusy, ConsumerNotAllowed, SubscriptionUnavailable
from broker.topics.non_persistent.delivery import Delivery, delivery_of
from broker.topics.rates import RateSampler
from broker.topics.weak_references import require_present
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from txn.errors import TransactionConflict

log = structlog.get_logger(__name__)

MESSAGE_POSITION: Final = Position(0, 0)
"""The id of every message, as in Pulsar."""


class NonPersistentlySubscribed(AdmittingTopic, Protocol):
    """The topic of a subscription."""

    async def unsubscribe(self, name: str, *, force: bool) -> None:
        """Delete a subscription."""
        ...

    def consumer_attached(self) -> None:
        """Note that a consumer was added to a subscription."""
        ...

    def consumer_left(self, subscription: str) -> None:
        """Note that a consumer of a subscription left."""
        ...


class _NoBatches:
    """`DeliveredBatches` of messages that nobody acknowledges."""

    def delivered(self, position: Position, messages: int, ack_set: Sequence[int]) -> None:
        """See `DeliveredBatches`."""


class NonPersistentSubscription:
    """One subscription: a message goes to a consumer that can receive it now, or is dropped.

    Its type is that of the connected consumers; with none connected it may change.
    """

    batch_sizes = _NoBatches()
    backlog: Final = 0
    seeks: Final = 0

    def __init__(
        self,
        topic: NonPersistentlySubscribed,
        name: str,
        *,
        durable: bool,
        properties: Mapping[str, str],
    ) -> None:
        self._topic_reference = ref(topic)
        self.topic_name = topic.name
        self.name = name
        self.durable = durable
        self.properties = dict(properties)
        self.type: SubscriptionType | None = None
        self.key_shared = KeySharedPolicy()
        partition = topic.name.partition_index
        self.partition_index = -1 if partition is None else partition
        self.closed = False
        self.dropped_total = 0
        """Messages that no consumer could receive."""
        self._delivery: Delivery | None = None
        self._past_messages_out = self._past_bytes_out = 0
        self.rate_sampler = RateSampler(asyncio.get_running_loop().time(), len(self.traffic))
        """Samples `traffic`: see `broker.topics.rate_timer`."""

    @property
    def _topic(self) -> NonPersistentlySubscribed:
        return require_present(self._topic_reference)

    @property
    def consumers(self) -> Sequence[Consumer]:
        """The connected consumers."""
        return () if self._delivery is None else tuple(self._delivery.consumers)

    @property
    def active_consumer(self) -> Consumer | None:
        """The consumer that gets the messages of an Exclusive or Failover subscription."""
        return None if self._delivery is None else self._delivery.active

    @property
    def traffic(self) -> tuple[int, int, int]:
        """Messages and bytes sent, and messages dropped."""
        messages, size_bytes = self._past_messages_out, self._past_bytes_out
        for each in self.consumers:
            messages += each.messages_out_total
            size_bytes += each.bytes_out_total
        return messages, size_bytes, self.dropped_total

    def sample_rates(self, now_s: float) -> tuple[int, int, int]:
        """Read the counters of the subscription and its consumers; returns its own."""
        for consumer in self.consumers:
            consumer.rate_sampler.sample(now_s, consumer.traffic)
        counts = self.traffic
        self.rate_sampler.sample(now_s, counts)
        return counts

    def expired_per_s(self, now_s: float) -> float:
        """Return 0: nothing is kept that could expire."""
        return 0.0

    def now_ms(self) -> int:
        """The broker's clock."""
        return self._topic.context.clock.now_ms()

    # Delivery

    def deliver(self, data: bytes, message_count: int) -> None:
        """Send an entry to a consumer that can receive it, or count its messages as dropped.

        It leaves at the latest with the next `flush`.
        """
        delivery = self._delivery
        if delivery is not None and not delivery.is_wanted(data):
            return
        consumer = None if delivery is None else delivery.receiver(data)
        if consumer is None:
            self.dropped_total += message_count
        else:
            consumer.deliver(MESSAGE_POSITION, data, message_count)

    def flush(self) -> None:
        """Pass everything delivered so far to the connections."""
        if self._delivery is not None:
            for consumer in self._delivery.consumers:
                consumer.flush()

    # Consumers

    async def add_consumer(self, request: SubscribeRequest) -> Consumer:
        """Attach a consumer.

        A second Exclusive one is refused while the connection of the first one is alive.  Raises
        `ConsumerBusy`, `ConsumerAssignError`, `ConsumerNotAllowed`, `SubscriptionUnavailable`.
        """
        if request.key_shared.entry_buckets:
            raise ConsumerNotAllowed(
                f"{self.topic_name} has no entry buckets: subscribe without entryBucketDispatch."
            )
        checked: set[Consumer] = set()
        while (holder := self._holder_of_place(request)) is not None:
            if holder in checked:
                raise ConsumerBusy(
                    f"Subscription {self.name!r} has an exclusive consumer already: close it, or "
                    "subscribe under another name or with another type."
                )
            checked.add(holder)
            await remove_if_silent(self, holder, request.connection)
        return self._attach(request)

    def _holder_of_place(self, request: SubscribeRequest) -> Consumer | None:
        """The exclusive consumer that has to leave first.  Raises if waiting would not help."""
        if self.closed or request.connection.closing:
            raise SubscriptionUnavailable(
                f"Subscription {self.name!r} or the connection is being closed: subscribe again."
            )
        consumers = self.consumers
        if not consumers:
            return None
        require_agreement(self, request)
        return consumers[0] if request.type is SubscriptionType.EXCLUSIVE else None

    def _attach(self, request: SubscribeRequest) -> Consumer:
        topic = self._topic
        require_below_maximums(self, topic, request)
        delivery = self._delivery
        if delivery is None:
            delivery = delivery_of(request.type, request.key_shared, topic.name)
        consumer = Consumer(request, self)
        delivery.add(consumer)
        if self._delivery is None:
            self.type, self.key_shared = request.type, request.key_shared
        self._delivery = delivery
        consumer.forget_connection = request.connection.on_close(
            lambda: self.remove_consumer(consumer, by_command=False)
        )
        topic.consumer_attached()
        return consumer

    def consumer_opened(self, consumer: Consumer) -> None:
        """Send a consumer what it could not take in before the answer to its SUBSCRIBE."""
        if self._delivery is not None:
            self._delivery.announce(consumer)

    def remove_consumer(self, consumer: Consumer, *, by_command: bool) -> None:
        """Remove a consumer.  Idempotent."""
        if consumer.closed or self._delivery is None:
            return
        consumer.closed = True
        consumer.forget_connection()
        consumer.connection.forget_consumer(consumer.consumer_id, consumer)
        self._delivery.remove(consumer)
        self._past_messages_out += consumer.messages_out_total
        self._past_bytes_out += consumer.bytes_out_total
        if not self._delivery.consumers:
            self._delivery = None
        topic = self._topic_reference()
        if topic is not None:
            topic.consumer_left(self.name)

    def close(self) -> None:
        """Send CLOSE_CONSUMER to all consumers; clients subscribe again by themselves."""
        self.closed = True
        for consumer in self.consumers:
            consumer.disconnect()
            self.remove_consumer(consumer, by_command=False)

    # Requests of consumers.  Nothing is kept that they could change.

    def wake(self) -> None:
        """Do nothing: messages that came without permits are gone."""

    def acknowledge(self, consumer: Consumer | None, acks: Iterable[Ack]) -> None:
        """Do nothing, as in Pulsar."""

    def acknowledge_up_to(
        self, consumer: Consumer, position: Position, ack_set: Sequence[int]
    ) -> None:
        """Do nothing, as in Pulsar."""

    def acknowledge_late_up_to(
        self, consumer_type: SubscriptionType, position: Position, ack_set: Sequence[int]
    ) -> None:
        """Do nothing, as in Pulsar."""

    def acknowledge_in(
        self, consumer: Consumer, txn: TxnId, acks: Sequence[Ack], *, cumulative: bool
    ) -> asyncio.Task[None]:
        """Raise `TransactionConflict`, as in Pulsar."""
        raise TransactionConflict(
            f"{self.topic_name} keeps no acknowledgements: acknowledge without a transaction."
        )

    async def acknowledge_many_in(
        self, consumer: Consumer, txn: TxnId, acks: Sequence[Ack]
    ) -> asyncio.Task[None]:
        """Raise `TransactionConflict`, as in Pulsar."""
        return self.acknowledge_in(consumer, txn, acks, cumulative=False)

    def redeliver(
        self, consumer: Consumer, messages: Mapping[Position, int] | None, epoch: int | None
    ) -> None:
        """Send nothing again; an epoch is in each MESSAGE from now on."""
        if epoch is not None and not consumer.closed:
            consumer.set_epoch(epoch)

    async def persist(self) -> None:
        """Return at once: no acknowledgement is kept."""

    async def seek_message(self, position: Position, ack_set: Sequence[int]) -> None:
        """Do nothing, as in Pulsar."""

    async def seek_time(self, since_ms: int, *, compacted: bool) -> None:
        """Do nothing, as in Pulsar."""

    async def newest_message_of(self, consumer: Consumer) -> NewestMessage:
        """Raise `ConsumerNotAllowed`: there is no last message."""
        raise ConsumerNotAllowed(
            f"{self.topic_name} stores nothing, so it has no last message id: use a persistent "
            "topic for that."
        )

    async def delete(self, *, force: bool) -> None:
        """Delete the subscription."""
        await self._topic.unsubscribe(self.name, force=force)
