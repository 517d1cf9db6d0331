"""The settings of consumers.  Pure.

Settings are frozen, and raise `InvalidArgument` when they are made with an invalid value.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, TypedDict

from magnetar.bounds import CHUNKED_BYTES
from magnetar.errors import InvalidArgument
from magnetar.message_id import EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import segment_suffix
from magnetar.settings import check_flag, check_positive, member_of

__all__ = [
    "CheckpointOptions",
    "CheckpointSettings",
    "DeadLetterPolicy",
    "InitialPosition",
    "InitialPositionName",
    "NackDelay",
    "QueueOptions",
    "QueueSettings",
    "ReceivingOptions",
    "ReceivingSettings",
    "StreamOptions",
    "StreamSettings",
    "SubscribeSettings",
    "SubscriptionKind",
    "SubscriptionOptions",
    "SubscriptionSettings",
]


class SubscriptionKind(enum.Enum):
    """The way in which consumers of a subscription share a segment."""

    EXCLUSIVE = pb.CommandSubscribe.Exclusive
    SHARED = pb.CommandSubscribe.Shared
    KEY_SHARED = pb.CommandSubscribe.Key_Shared


class InitialPosition(enum.Enum):
    """The position at which a new subscription begins."""

    LATEST = pb.CommandSubscribe.Latest
    EARLIEST = pb.CommandSubscribe.Earliest


InitialPositionName = Literal["latest", "earliest"]


@dataclass(frozen=True, slots=True)
class NackDelay:
    """The delay before a negatively acknowledged message comes again; it grows up to a limit."""

    min_ms: int = 1000
    max_ms: int = 60_000
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_ms <= self.max_ms or not self.multiplier >= 1:
            raise InvalidArgument(
                f"Delays from {self.min_ms} to {self.max_ms} ms with a multiplier of "
                f"{self.multiplier} are invalid; give 0 <= min_ms <= max_ms and a multiplier of 1 "
                "or more."
            )


@dataclass(frozen=True, slots=True)
class DeadLetterPolicy:
    """The treatment of messages that are delivered again and again."""

    max_redelivery_count: int
    """A message that is delivered after so many redeliveries is a dead letter."""
    topic: str | None = None
    """The topic of dead letters; by default `<topic>-DLQ` in the same namespace."""

    def __post_init__(self) -> None:
        check_positive("max_redelivery_count", self.max_redelivery_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeSettings:
    """The settings of one SUBSCRIBE, made from the settings of a consumer."""

    subscription: str
    kind: SubscriptionKind
    durable: bool = True
    """Whether the subscription is durable; else no message is acknowledged or redelivered."""
    initial_position: InitialPosition = InitialPosition.LATEST
    start_after: EntryId | None = None
    """The id after which reading begins, if the subscription is not durable."""
    consumer_name: str = ""
    """The name; if empty, the broker makes one."""
    incarnation: str = ""
    """A text of its own for each consumer of that name (`protocol/incarnation.py`); may be empty.
    """
    priority_level: int = 0
    schema: pb.Schema | None = None
    subscription_properties: Mapping[str, str] = field(default_factory=dict)
    replicate_subscription_state: bool = False
    consumer_properties: Mapping[str, str] = field(default_factory=dict)
    key_shared: pb.KeySharedMeta | None = None
    receiver_queue_size: int = 1000
    ack_grouping_ms: int = 100
    nack_delay: NackDelay = NackDelay()
    processing_timeout_ms: int = 0
    """The processing timeout; 0 for none."""
    max_pending_chunked_messages: int = 10
    max_pending_chunked_bytes: int = CHUNKED_BYTES
    expire_chunked_after_ms: int = 60_000

    @property
    def ordered(self) -> bool:
        """Whether all that is not acknowledged comes again, in order, on a new attachment."""
        buckets = self.key_shared is not None and self.key_shared.entryBucketDispatch
        return buckets or self.kind is SubscriptionKind.EXCLUSIVE

    def __post_init__(self) -> None:
        if not self.subscription.strip():
            raise InvalidArgument("The subscription has no name; give it one.")
        check_flag("durable", self.durable)
        check_flag("replicate_subscription_state", self.replicate_subscription_state)
        check_positive("receiver_queue_size", self.receiver_queue_size)
        check_positive("max_pending_chunked_messages", self.max_pending_chunked_messages)
        check_positive("max_pending_chunked_bytes", self.max_pending_chunked_bytes)
        for name in (
            "ack_grouping_ms",
            "expire_chunked_after_ms",
            "priority_level",
            "processing_timeout_ms",
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise InvalidArgument(f"{name} is {value!r}; give it a number of 0 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingSettings:
    """The settings that every consumer has."""

    consumer_name: str | None = None
    """The name in the broker's statistics, on each segment as `<name>-seg-<id>`.  A consumer of a
    stream, or of a group, that comes back under its name gets its segments again.
    """
    consumer_properties: Mapping[str, str] = field(default_factory=dict)
    """Properties of this consumer in the broker's statistics."""
    receiver_queue_size: int = 1000
    """Messages of each segment that are requested ahead."""
    receiver_queue_bytes: int = 64 * 1024 * 1024
    """Bytes of all segments above which no more messages are requested."""
    max_pending_chunked_messages: int = 10
    """Chunked messages of each segment that may be incomplete at a time."""
    max_pending_chunked_bytes: int = CHUNKED_BYTES
    """Bytes of the incomplete messages of a segment; one alone may have more."""
    expire_chunked_after_ms: int = 60_000
    """Time after which an incomplete chunked message is dropped; 0 for never."""

    def _check(self) -> None:
        """Check what `SubscribeSettings` does not.  Raises `InvalidArgument`."""
        check_positive("receiver_queue_bytes", self.receiver_queue_bytes)
        if self.consumer_name is not None and not self.consumer_name.strip():
            raise InvalidArgument("consumer_name is empty; give it a name, or leave it out.")

    def _receiving(
        self,
        subscription: str,
        kind: SubscriptionKind,
        consumer_name: str,
        schema: pb.Schema | None,
    ) -> SubscribeSettings:
        """Return the settings for one segment.  Raises `InvalidArgument`."""
        return SubscribeSettings(
            subscription=subscription,
            kind=kind,
            consumer_name=consumer_name,
            schema=schema,
            consumer_properties=self.consumer_properties,
            receiver_queue_size=self.receiver_queue_size,
            max_pending_chunked_messages=self.max_pending_chunked_messages,
            max_pending_chunked_bytes=self.max_pending_chunked_bytes,
            expire_chunked_after_ms=self.expire_chunked_after_ms,
        )


class ReceivingOptions(TypedDict, total=False):
    """The fields of `ReceivingSettings` as keyword arguments."""

    consumer_name: str | None
    consumer_properties: Mapping[str, str]
    receiver_queue_size: int
    receiver_queue_bytes: int
    max_pending_chunked_messages: int
    max_pending_chunked_bytes: int
    expire_chunked_after_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionSettings(ReceivingSettings):
    """The settings that every consumer of a subscription has."""

    initial_position: InitialPosition | InitialPositionName = InitialPosition.LATEST
    """The position at which the subscription begins if it is new: 'latest' or 'earliest'."""
    ack_grouping_ms: int = 100
    """How long an acknowledgement may wait for others; with 0 it is sent at once."""
    subscription_properties: Mapping[str, str] = field(default_factory=dict)
    """Properties that are stored with the subscription if it is new."""
    replicate_subscription_state: bool = False
    """Whether the subscription moves in all clusters of the topic's list together."""

    def _subscribing(
        self,
        subscription: str,
        kind: SubscriptionKind,
        consumer_name: str,
        schema: pb.Schema | None,
    ) -> SubscribeSettings:
        """Return the settings for one segment.  Raises `InvalidArgument`."""
        return replace(
            self._receiving(subscription, kind, consumer_name, schema),
            initial_position=member_of(InitialPosition, self.initial_position),
            ack_grouping_ms=self.ack_grouping_ms,
            subscription_properties=self.subscription_properties,
            replicate_subscription_state=self.replicate_subscription_state,
        )


class SubscriptionOptions(ReceivingOptions, total=False):
    """The fields of `SubscriptionSettings` as keyword arguments."""

    initial_position: InitialPosition | InitialPositionName
    ack_grouping_ms: int
    subscription_properties: Mapping[str, str]
    replicate_subscription_state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings(SubscriptionSettings):
    """The settings of `Client.queue_consumer`."""

    nack_delay: NackDelay = NackDelay()
    """The delay before a negatively acknowledged message comes again."""
    processing_timeout_s: float | None = None
    """Time after which a message comes again that was handed out and is neither acknowledged nor
    negatively acknowledged; None or 0 for never (the Java client's `processingTimeout`).
    """
    dead_letters: DeadLetterPolicy | None = None
    """The treatment of messages that are delivered too often; None delivers them again and again.
    """
    priority_level: int = 0
    """Consumers with a lower level get messages first."""

    def __post_init__(self) -> None:
        self._check()
        if self.processing_timeout_s:
            check_positive("processing_timeout_s", self.processing_timeout_s)
        self.of_segment("-", 0, None)

    def of_segment(
        self, subscription: str, segment_id: int, schema: pb.Schema | None
    ) -> SubscribeSettings:
        """Return the settings to subscribe to a segment with.  Raises `InvalidArgument`."""
        name = "" if self.consumer_name is None else self.consumer_name + segment_suffix(segment_id)
        return replace(
            self._subscribing(subscription, SubscriptionKind.SHARED, name, schema),
            priority_level=self.priority_level,
            nack_delay=self.nack_delay,
            processing_timeout_ms=ceil((self.processing_timeout_s or 0) * 1000),
        )


class QueueOptions(SubscriptionOptions, total=False):
    """The fields of `QueueSettings` as keyword arguments."""

    nack_delay: NackDelay
    processing_timeout_s: float | None
    dead_letters: DeadLetterPolicy | None
    priority_level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings(SubscriptionSettings):
    """The settings of `Client.stream_consumer`."""

    hand_over_timeout_s: float | None = None
    """How long a segment that goes to another consumer waits for acknowledgements of the messages
    handed out; the other consumer gets the rest again.  None for no limit."""

    def __post_init__(self) -> None:
        self._check()
        if self.hand_over_timeout_s is not None:
            check_positive("hand_over_timeout_s", self.hand_over_timeout_s)
        self.of_segment("-", "-", 0, None)

    def of_segment(
        self,
        subscription: str,
        consumer_name: str,
        segment_id: int,
        schema: pb.Schema | None,
        bucket_ranges: Sequence[tuple[int, int]] = (),
    ) -> SubscribeSettings:
        """Return the settings to subscribe to a segment with.  Raises `InvalidArgument`.

        `bucket_ranges` are the entry buckets of a segment that consumers share.
        """
        name = consumer_name + segment_suffix(segment_id)
        if not bucket_ranges:
            return self._subscribing(subscription, SubscriptionKind.EXCLUSIVE, name, schema)
        buckets = pb.KeySharedMeta(key_shared_mode=pb.STICKY, entryBucketDispatch=True)
        for first, last in bucket_ranges:
            buckets.hash_ranges.add(start=first, end=last)
        shared = self._subscribing(subscription, SubscriptionKind.KEY_SHARED, name, schema)
        return replace(shared, key_shared=buckets)


class StreamOptions(SubscriptionOptions, total=False):
    """The fields of `StreamSettings` as keyword arguments."""

    hand_over_timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings(ReceivingSettings):
    """The settings of `Client.checkpoint_consumer`."""

    def __post_init__(self) -> None:
        self._check()
        self.of_segment("-", "-", 0, None, EntryId(0, 0))

    def of_segment(
        self,
        reader: str,
        consumer_name: str,
        segment_id: int,
        schema: pb.Schema | None,
        start_after: EntryId,
    ) -> SubscribeSettings:
        """Return the settings to read a segment with.  Raises `InvalidArgument`."""
        name = consumer_name + segment_suffix(segment_id)
        return replace(
            self._receiving(reader, SubscriptionKind.EXCLUSIVE, name, schema),
            durable=False,
            start_after=start_after,
        )


class CheckpointOptions(ReceivingOptions, total=False):
    """The fields of `CheckpointSettings` as keyword arguments."""
