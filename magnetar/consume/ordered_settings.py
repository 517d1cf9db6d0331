"""What can be set of consumers that read in order, checked when it is given.

Rules: as in `magnetar.settings`: frozen, units last in the names, `InvalidArgument` for what cannot
be.
"""

from dataclasses import dataclass, replace

from magnetar.consume.consumer_settings import (
    ReceivingOptions,
    ReceivingSettings,
    SubscribeSettings,
    SubscriptionKind,
    SubscriptionOptions,
    SubscriptionSettings,
)
from magnetar.message_id import EntryId
from magnetar.settings import check_positive
from protocol import pulsar_pb2 as pb

__all__ = ["CheckpointOptions", "CheckpointSettings", "StreamOptions", "StreamSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings(SubscriptionSettings):
    """Of `Client.stream_consumer`."""

    hand_over_timeout_s: float | None = None
    """How long a segment that goes to another consumer waits until what was handed out of it is
    acknowledged; what is not by then is delivered to the other one again.  None: without limit."""

    def __post_init__(self) -> None:
        self._check()
        if self.hand_over_timeout_s is not None:
            check_positive("hand_over_timeout_s", self.hand_over_timeout_s)
        self.of_segment("-", "-", 0, None)

    def of_segment(
        self, subscription: str, consumer_name: str, segment_id: int, schema: pb.Schema | None
    ) -> SubscribeSettings:
        """What to subscribe to a segment with.  Raises `InvalidArgument`."""
        name = f"{consumer_name}-seg-{segment_id}"
        return self._subscribing(subscription, SubscriptionKind.EXCLUSIVE, name, schema)


class StreamOptions(SubscriptionOptions, total=False):
    """The fields of `StreamSettings`, to be given by name."""

    hand_over_timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings(ReceivingSettings):
    """Of `Client.checkpoint_consumer`."""

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
        """What to read a segment with.  Raises `InvalidArgument`."""
        name = f"{consumer_name}-seg-{segment_id}"
        return replace(
            self._receiving(reader, SubscriptionKind.EXCLUSIVE, name, schema),
            durable=False,
            start_after=start_after,
        )


class CheckpointOptions(ReceivingOptions, total=False):
    """The fields of `CheckpointSettings`, to be given by name."""
