"""One consumer: permits, unacknowledged messages, counters, and the messages on their way out."""

import asyncio
import enum
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from broker.topics.client_connection import ClientConnection
from broker.topics.rates import RateSampler
from magnetar.protocol.frames import encode_message_head
from magnetar.protocol.ids import LATEST, UNSOLICITED_REQUEST_ID, Position
from magnetar.protocol.key_hash import HashRange
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandActiveConsumerChange,
    CommandCloseConsumer,
    CommandReachedEndOfTopic,
)
from magnetar.protocol.txn_id import TxnId

OUTBOX_BYTES: Final = 256 * 1024
"""Messages collected for one write; after it the connection's back pressure is checked."""
_KNOWS_NO_END_OF_TOPIC: Final = re.compile(r"Pulsar-CPP-v[0-4]\.|Pulsar[- ]Go")
"""Versions in CONNECT of clients that treat REACHED_END_OF_TOPIC as an invalid command.

Pulsar's clients in C++, which those in Python and Node are built on, and in Go.
"""

Ack = tuple[Position, Sequence[int], int]
"""An entry, the bits of it that are not acknowledged (none: all is), and its batch size or 0."""


class SubscriptionType(enum.IntEnum):
    """How the consumers of a subscription share its messages (numbers are Pulsar's)."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3

    @property
    def individual(self) -> bool:
        """Whether messages go to several consumers, each acknowledging its own."""
        return self in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED)

    @property
    def label(self) -> str:
        """Pulsar's name of the type, as in statistics."""
        return self.name.title()


class KeySharedMode(enum.IntEnum):
    """How Key_Shared consumers get their hash ranges (numbers are Pulsar's)."""

    AUTO_SPLIT = 0
    STICKY = 1


@dataclass(frozen=True, slots=True)
class KeySharedPolicy:
    """Key_Shared options.  All consumers of a subscription agree on all but `ranges`.

    `ranges` matter for STICKY only; both ends included, within 0 to 65535.  With `entry_buckets`
    they are those of all entry buckets of a segment, which the consumers share (PIP-486).
    """

    mode: KeySharedMode = KeySharedMode.AUTO_SPLIT
    allow_out_of_order: bool = False
    ranges: tuple[HashRange, ...] = ()
    entry_buckets: bool = False

    def agrees_with(self, other: "KeySharedPolicy") -> bool:
        """Whether consumers with these options can be in one subscription, as far as is known."""
        return (self.mode, self.allow_out_of_order, self.entry_buckets) == (
            other.mode,
            other.allow_out_of_order,
            other.entry_buckets,
        )


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """A decoded SUBSCRIBE.

    `start` is EARLIEST, LATEST or the position after which a *new* subscription begins; `create`
    is False when a missing subscription may not be made.
    """

    connection: ClientConnection
    consumer_id: int
    subscription: str
    type: SubscriptionType
    consumer_name: str
    durable: bool = True
    start: Position = LATEST
    create: bool = True
    priority_level: int = 0
    consumer_epoch: int = 0
    key_shared: KeySharedPolicy = KeySharedPolicy()
    read_compacted: bool = False
    properties: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    replicated: bool = False
    """Whether the subscription is to be replicated; False leaves one that is as it is."""


class NewestMessage(NamedTuple):
    """The newest message that a consumer gets, and how far its subscription is."""

    position: Position
    """The entry of the message; -1:-1 if there is none."""
    batch_index: int
    """Index of the message in its batch; -1 if it is in none."""
    mark_delete: Position
    """The position up to which the subscription has acknowledged everything."""


class DeliveredBatches(Protocol):
    """Takes note of batches that were delivered, until they are acknowledged."""

    def delivered(self, position: Position, messages: int, ack_set: Sequence[int]) -> None:
        """Note a delivered batch; with `ack_set`, only messages whose bits are in it are left."""
        ...


class ConsumedSubscription(Protocol):
    """The subscription of a consumer, as the consumer and the handlers of its client use it."""

    @property
    def batch_sizes(self) -> DeliveredBatches:
        """The batches that were delivered and not acknowledged."""
        ...

    @property
    def name(self) -> str:
        """Name of the subscription."""
        ...

    @property
    def topic_name(self) -> TopicName:
        """Name of the topic."""
        ...

    @property
    def consumers(self) -> "Sequence[Consumer]":
        """The connected consumers."""
        ...

    @property
    def durable(self) -> bool:
        """Whether the subscription outlives its consumers."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it was closed or deleted: it takes no acknowledgements any more."""
        ...

    @property
    def seeks(self) -> int:
        """Number of times that the position was moved."""
        ...

    @property
    def backlog(self) -> int:
        """Entries not (wholly) acknowledged."""
        ...

    @property
    def partition_index(self) -> int:
        """Index of the topic's partition; -1 if it is no partition."""
        ...

    def now_ms(self) -> int:
        """The broker's clock."""
        ...

    def expired_per_s(self, now_s: float) -> float:
        """Entries that expired per second."""
        ...

    def wake(self) -> None:
        """Run the dispatcher: something may be sent."""
        ...

    def consumer_opened(self, consumer: "Consumer") -> None:
        """Send a consumer what it could not take in before the answer to its SUBSCRIBE."""
        ...

    def remove_consumer(self, consumer: "Consumer", *, by_command: bool) -> None:
        """Remove a consumer; its unacknowledged messages go to others."""
        ...

    def acknowledge(self, consumer: "Consumer | None", acks: Iterable[Ack]) -> None:
        """Take individual acknowledgements of whole entries or of messages of batches.

        Without `consumer` they are of a closed one: see `Subscription`.
        """
        ...

    def acknowledge_up_to(
        self, consumer: "Consumer", position: Position, ack_set: Sequence[int]
    ) -> None:
        """Acknowledge cumulatively.  Raises `ConsumerNotAllowed` for Shared and Key_Shared."""
        ...

    def acknowledge_late_up_to(
        self, consumer_type: SubscriptionType, position: Position, ack_set: Sequence[int]
    ) -> None:
        """Take a cumulative acknowledgement of a closed consumer: see `Subscription`."""
        ...

    def acknowledge_in(
        self, consumer: "Consumer", txn: TxnId, acks: Sequence[Ack], *, cumulative: bool
    ) -> asyncio.Task[None]:
        """Acknowledge when the transaction commits: see `Subscription`."""
        ...

    async def acknowledge_many_in(
        self, consumer: "Consumer", txn: TxnId, acks: Sequence[Ack]
    ) -> asyncio.Task[None]:
        """As `acknowledge_in`, in slices: see `Subscription`."""
        ...

    def redeliver(
        self, consumer: "Consumer", messages: Mapping[Position, int] | None, epoch: int | None
    ) -> None:
        """Send unacknowledged messages again: of these entries, or all that the consumer has."""
        ...

    async def persist(self) -> None:
        """Return when the acknowledgements that it has taken are durable."""
        ...

    async def seek_message(self, position: Position, ack_set: Sequence[int]) -> None:
        """Continue at an entry, or with those messages of a batch that `ack_set` has."""
        ...

    async def seek_time(self, since_ms: int, *, compacted: bool) -> None:
        """Continue at the first entry published at or after a time.

        With `compacted` that may be one that only the compacted ledger has.
        """
        ...

    async def newest_message_of(self, consumer: "Consumer") -> NewestMessage:
        """The newest message that the consumer gets.  Raises the errors of reading."""
        ...

    async def delete(self, *, force: bool) -> None:
        """Delete the subscription and its cursor."""
        ...


class Consumer:
    """One attached consumer: its permits, its unacknowledged messages and its counters.

    Made by `Subscription.add_consumer`.  `permits` and `unacked` count messages.  Only Shared and
    Key_Shared consumers have `pending` acknowledgements.
    """

    __slots__ = (
        "_awaits_writable",
        "_max_unacked",
        "_outbox",
        "_outbox_bytes",
        "acknowledged_total",
        "bytes_out_total",
        "closed",
        "connected_ms",
        "connection",
        "consumer_id",
        "end_of_topic_sent",
        "entries_out_total",
        "epoch",
        "forget_connection",
        "has_earlier_messages",
        "identity",
        "is_open",
        "key_shared",
        "last_acked_ms",
        "last_flow_ms",
        "last_sent_ms",
        "messages_out_total",
        "metadata",
        "name",
        "partition",
        "pending",
        "permits",
        "priority_level",
        "rate_sampler",
        "read_compacted",
        "redelivered_total",
        "subscription",
        "type",
        "unacked",
        "wire_epoch",
    )

    def __init__(self, request: SubscribeRequest, subscription: ConsumedSubscription) -> None:
        self.subscription = subscription
        self.connection = request.connection
        self.consumer_id = request.consumer_id
        self.name = request.consumer_name
        self.type = request.type
        self.priority_level = request.priority_level
        self.key_shared = request.key_shared
        self.read_compacted = request.read_compacted
        """Whether it gets of each key the newest message only, as far as the topic is compacted."""
        self.metadata = request.metadata
        self.has_earlier_messages = True
        """Whether it may have messages that it was sent before it attached (L9)."""
        self.identity = ""
        """Identity in acknowledgement records (A9); made when it is first needed."""
        self.partition = subscription.partition_index
        self.connected_ms = subscription.now_ms()
        self.epoch = request.consumer_epoch
        # Ordered clients drop messages of an epoch before that of their last redelivery request; a
        # MESSAGE to any other consumer carries no epoch.
        self.wire_epoch = request.consumer_epoch if self.ordered else None
        self.permits = 0
        self.unacked = 0
        self.pending: dict[Position, tuple[int, int]] = {}
        self.is_open = False
        self.closed = False
        self.end_of_topic_sent = False
        self.forget_connection: Callable[[], None] = _nothing
        self.messages_out_total = 0
        self.entries_out_total = 0
        self.bytes_out_total = 0
        self.redelivered_total = 0
        self.acknowledged_total = 0
        self.last_flow_ms = 0
        """When its client sent a FLOW last; 0: never."""
        self.last_sent_ms = 0
        """When messages were sent to it last; 0: never."""
        self.last_acked_ms = 0
        """When it acknowledged last; 0: never."""
        self.rate_sampler = RateSampler(asyncio.get_running_loop().time(), len(self.traffic))
        """Samples `traffic`: see `broker.topics.rate_timer`."""
        self._max_unacked = sys.maxsize
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._awaits_writable = False

    @property
    def ordered(self) -> bool:
        """Whether it reads in order: all of a subscription, or entry buckets of a segment."""
        return not self.type.individual or self.key_shared.entry_buckets

    @property
    def traffic(self) -> tuple[int, int, int, int]:
        """The counters of which rates are taken, in the order of `Delivered`."""
        return (
            self.messages_out_total,
            self.bytes_out_total,
            self.redelivered_total,
            self.acknowledged_total,
        )

    # Dispatch

    def can_receive(self) -> bool:
        """Whether the next entry may go to this consumer now."""
        return self.permits > 0 and self.unacked < self._max_unacked and self.connection.writable

    @property
    def blocked_on_unacked(self) -> bool:
        """Whether the consumer gets no messages until it acknowledges some."""
        return self.unacked >= self._max_unacked

    def limit_unacked(self, messages: int) -> None:
        """Send nothing while so many messages are unacknowledged; 0: without limit."""
        self._max_unacked = messages or sys.maxsize

    def deliver(
        self,
        position: Position,
        data: bytes,
        message_count: int,
        redelivery_count: int = 0,
        ack_set: Sequence[int] | None = None,
    ) -> None:
        """Send an entry; it leaves at the latest with the next `flush`."""
        ledger_id, entry_id = position
        size = len(data)
        outbox = self._outbox
        outbox.append(
            encode_message_head(
                self.consumer_id,
                ledger_id,
                entry_id,
                size,
                partition=self.partition,
                redelivery_count=redelivery_count,
                ack_set=ack_set or (),
                consumer_epoch=self.wire_epoch,
            )
        )
        outbox.append(data)
        # One permit is enough for a batch, so this may fall below zero.  A partly acknowledged
        # batch costs its full size: the client gives back permits for what it skips.
        self.permits -= message_count
        if message_count > 1:
            self.subscription.batch_sizes.delivered(position, message_count, ack_set or ())
        self.messages_out_total += message_count
        self.entries_out_total += 1
        self.bytes_out_total += size
        self._outbox_bytes += size
        if self._outbox_bytes > OUTBOX_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pass everything delivered so far to the connection."""
        if self._outbox:
            self.last_sent_ms = self.subscription.now_ms()
            self.connection.send_encoded(*self._outbox)
            self._outbox.clear()
            self._outbox_bytes = 0

    def when_writable(self, wake: Callable[[], None]) -> None:
        """Call `wake` once when the connection takes messages again, however often it is asked."""
        if self._awaits_writable or self.closed:
            return
        self._awaits_writable = True

        def writable() -> None:
            self._awaits_writable = False
            wake()

        self.connection.on_writable(writable)

    def set_epoch(self, epoch: int) -> None:
        """Put `epoch` into each MESSAGE from now on, unless it is an older one."""
        if epoch > self.epoch:
            self.epoch = epoch
            if self.ordered:
                self.wire_epoch = epoch

    # Requests of the client; nothing happens once it is closed

    def flow(self, permits: int) -> None:
        """Add the permits of a FLOW."""
        if not self.closed:
            self.permits += permits
            self.last_flow_ms = self.subscription.now_ms()
            self.subscription.wake()

    def opened(self) -> None:
        """Send what the client could not take in before the answer to its SUBSCRIBE."""
        if not self.closed:
            self.is_open = True
            self.subscription.consumer_opened(self)

    def close(self) -> None:
        """Serve the client's CLOSE_CONSUMER: what is pending goes to others."""
        self.subscription.remove_consumer(self, by_command=True)

    # Commands that the broker sends by itself

    def disconnect(self) -> None:
        """Send CLOSE_CONSUMER: the client subscribes again by itself."""
        self.connection.send(
            BaseCommand(
                type=BaseCommand.CLOSE_CONSUMER,
                close_consumer=CommandCloseConsumer(
                    consumer_id=self.consumer_id, request_id=UNSOLICITED_REQUEST_ID
                ),
            )
        )

    def send_active_change(self, is_active: bool) -> None:
        """Send ACTIVE_CONSUMER_CHANGE, for Failover."""
        self.connection.send(
            BaseCommand(
                type=BaseCommand.ACTIVE_CONSUMER_CHANGE,
                active_consumer_change=CommandActiveConsumerChange(
                    consumer_id=self.consumer_id, is_active=is_active
                ),
            )
        )

    def send_end_of_topic(self) -> None:
        """Send REACHED_END_OF_TOPIC once, and not before the client knows that it is open.

        Clients that do not know the command close their connection when it comes, and come back to
        get it again: they are not sent it.
        """
        if self.end_of_topic_sent or not self.is_open:
            return
        self.end_of_topic_sent = True
        if _KNOWS_NO_END_OF_TOPIC.match(self.connection.client_version):
            return
        self.connection.send(
            BaseCommand(
                type=BaseCommand.REACHED_END_OF_TOPIC,
                reached_end_of_topic=CommandReachedEndOfTopic(consumer_id=self.consumer_id),
            )
        )


def _nothing() -> None:
    """Do nothing: a consumer has no connection to forget before it is attached."""
