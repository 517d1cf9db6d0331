"""What can be set of consumers that read in order, checked when it is given.

Rules: as in `magnetar.settings`: frozen, units last in the names, `InvalidArgument` for what cannot
be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from magnetar.bounds import CHUNKED_BYTES
from magnetar.consume.consumer_settings import (
    InitialPosition,
    InitialPositionName,
    SubscribeSettings,
    SubscriptionKind,
)
from magnetar.errors import InvalidArgument
from magnetar.message_id import EntryId
from magnetar.settings import check_positive, member_of
from protocol import pulsar_pb2 as pb

__all__ = ["CheckpointOptions", "CheckpointSettings", "StreamOptions", "StreamSettings"]


def _check_name(name: str | None) -> None:
    if name is not None and not name.strip():
        raise InvalidArgument("consumer_name is empty; give it a name, or leave it out.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Of `Client.stream_consumer`."""

    initial_position: InitialPosition | InitialPositionName = InitialPosition.LATEST
    """Where the subscription begins if it is new."""
    consumer_name: str | None = None
    """By which the controller knows it: who comes back under its name gets back what it had."""
    receiver_queue_size: int = 1000
    """Messages of each segment that are fetched ahead."""
    receiver_queue_bytes: int = 64 * 1024 * 1024
    """Bytes of all segments above which nothing more is asked for."""
    ack_grouping_ms: int = 100
    """How long an acknowledgement may wait for others; 0: not at all."""
    hand_over_timeout_s: float | None = None
    """How long a segment that goes to another consumer waits until what was handed out of it is
    acknowledged; what is not by then is delivered to the other one again.  None: without limit."""
    subscription_properties: Mapping[str, str] = field(default_factory=dict)
    """Kept with the subscription if it is new."""
    max_pending_chunked_messages: int = 10
    """Messages in pieces of which some are missing, on each segment."""
    max_pending_chunked_bytes: int = CHUNKED_BYTES
    """Bytes of all of them; of one alone there may be more."""
    expire_chunked_after_ms: int = 60_000
    """After that a message in pieces of which some are missing is given up; 0: never."""

    def __post_init__(self) -> None:
        check_positive("receiver_queue_bytes", self.receiver_queue_bytes)
        if self.hand_over_timeout_s is not None:
            check_positive("hand_over_timeout_s", self.hand_over_timeout_s)
        _check_name(self.consumer_name)
        self.of_segment("-", "-", 0, None)

    def of_segment(
        self, subscription: str, consumer_name: str, segment_id: int, schema: pb.Schema | None
    ) -> SubscribeSettings:
        """What to subscribe to a segment with.  Raises `InvalidArgument`."""
        return SubscribeSettings(
            subscription=subscription,
            kind=SubscriptionKind.EXCLUSIVE,
            initial_position=member_of(InitialPosition, self.initial_position),
            consumer_name=f"{consumer_name}-seg-{segment_id}",
            schema=schema,
            subscription_properties=self.subscription_properties,
            receiver_queue_size=self.receiver_queue_size,
            ack_grouping_ms=self.ack_grouping_ms,
            max_pending_chunked_messages=self.max_pending_chunked_messages,
            max_pending_chunked_bytes=self.max_pending_chunked_bytes,
            expire_chunked_after_ms=self.expire_chunked_after_ms,
        )


class StreamOptions(TypedDict, total=False):
    """The fields of `StreamSettings`, to be given by name."""

    initial_position: InitialPosition | InitialPositionName
    consumer_name: str | None
    receiver_queue_size: int
    receiver_queue_bytes: int
    ack_grouping_ms: int
    hand_over_timeout_s: float | None
    subscription_properties: Mapping[str, str]
    max_pending_chunked_messages: int
    max_pending_chunked_bytes: int
    expire_chunked_after_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Of `Client.checkpoint_consumer`."""

    consumer_name: str | None = None
    """In a group the name by which the controller knows it; else only in statistics."""
    receiver_queue_size: int = 1000
    """Messages of each segment that are fetched ahead."""
    receiver_queue_bytes: int = 64 * 1024 * 1024
    """Bytes of all segments above which nothing more is asked for."""
    max_pending_chunked_messages: int = 10
    """Messages in pieces of which some are missing, on each segment."""
    max_pending_chunked_bytes: int = CHUNKED_BYTES
    """Bytes of all of them; of one alone there may be more."""
    expire_chunked_after_ms: int = 60_000
    """After that a message in pieces of which some are missing is given up; 0: never."""

    def __post_init__(self) -> None:
        check_positive("receiver_queue_bytes", self.receiver_queue_bytes)
        _check_name(self.consumer_name)
        self.of_segment("-", "-", 0, None, EntryId(0, 0))

    def of_segment(
        self,
        reader: str,
        consumer_name: str,
        segment_id: int,
        schema: pb.Schema | None,
        start_after: EntryId,
    ) -> SubscribeSettings:
        """What to read a segment with.  Raises `InvalidArgument`."""
        return SubscribeSettings(
            subscription=reader,
            kind=SubscriptionKind.EXCLUSIVE,
            durable=False,
            start_after=start_after,
            consumer_name=f"{consumer_name}-seg-{segment_id}",
            schema=schema,
            receiver_queue_size=self.receiver_queue_size,
            max_pending_chunked_messages=self.max_pending_chunked_messages,
            max_pending_chunked_bytes=self.max_pending_chunked_bytes,
            expire_chunked_after_ms=self.expire_chunked_after_ms,
        )


class CheckpointOptions(TypedDict, total=False):
    """The fields of `CheckpointSettings`, to be given by name."""

    consumer_name: str | None
    receiver_queue_size: int
    receiver_queue_bytes: int
    max_pending_chunked_messages: int
    max_pending_chunked_bytes: int
    expire_chunked_after_ms: int
