"""What can be asked of a segment where it runs: one type for each request, and their table.

Rules:

- The broker that owns the segment carries a request out, on the running topic, which is loaded if
  need be; everything raises `TopicNotFound` for a segment that is none.
- SEGMENT_REQUESTS is the one table: whoever asks, here or at another broker, asks with these.
- All requests may be made twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, TypeVar

from broker.placement.typed_request import Request
from broker.scalable.local_segments import LocalSegments
from broker.scalable.segment_view import SegmentView
from magnetar.protocol.ids import Position
from magnetar.protocol.names import SegmentName

A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SegmentRequest(Request[LocalSegments, A_co]):
    """A request to the owner of a segment."""

    segment: SegmentName


@dataclass(frozen=True, slots=True)
class ViewSegment(SegmentRequest[SegmentView]):
    """Ask what is so now."""

    KIND: ClassVar[str] = "view"

    async def run(self, segments: LocalSegments) -> SegmentView:
        """See `LocalSegments.view`."""
        return await segments.view(self.segment)


@dataclass(frozen=True, slots=True)
class ViewRunningSegment(SegmentRequest[SegmentView | None]):
    """Ask what is so now; None if it is not loaded."""

    KIND: ClassVar[str] = "view-running"

    async def run(self, segments: LocalSegments) -> SegmentView | None:
        """See `LocalSegments.view_of_running`."""
        return await segments.view_of_running(self.segment)


@dataclass(frozen=True, slots=True)
class CreateSubscription(SegmentRequest[None]):
    """Make a durable subscription at EARLIEST or LATEST, unless it exists."""

    KIND: ClassVar[str] = "create-subscription"
    name: str
    start: Position
    properties: Mapping[str, str] = field(default_factory=dict)

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.create_subscription`."""
        await segments.create_subscription(self.segment, self.name, self.start, self.properties)


@dataclass(frozen=True, slots=True)
class DeleteSubscription(SegmentRequest[None]):
    """Delete a subscription.  Raises `SubscriptionNotFound`, `ConsumerBusy` unless forced."""

    KIND: ClassVar[str] = "delete-subscription"
    name: str
    force: bool

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.delete_subscription`."""
        await segments.delete_subscription(self.segment, self.name, force=self.force)


@dataclass(frozen=True, slots=True)
class SeekSubscription(SegmentRequest[None]):
    """Go on at EARLIEST or LATEST.  Raises `SubscriptionNotFound`."""

    KIND: ClassVar[str] = "seek"
    name: str
    position: Position

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.seek`."""
        await segments.seek(self.segment, self.name, self.position)


@dataclass(frozen=True, slots=True)
class SeekSubscriptionToTime(SegmentRequest[None]):
    """Go on with the first message published at or after a time."""

    KIND: ClassVar[str] = "seek-to-time"
    name: str
    timestamp_ms: int

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.seek_to_time`."""
        await segments.seek_to_time(self.segment, self.name, self.timestamp_ms)


@dataclass(frozen=True, slots=True)
class SealSegment(SegmentRequest[None]):
    """Take no new producers, let attached ones finish, terminate."""

    KIND: ClassVar[str] = "seal"

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.seal`."""
        await segments.seal(self.segment)


@dataclass(frozen=True, slots=True)
class DeleteSegment(SegmentRequest[None]):
    """Remove a segment that no layout names (any longer)."""

    KIND: ClassVar[str] = "delete"

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.delete`."""
        await segments.delete(self.segment)


@dataclass(frozen=True, slots=True)
class SegmentStats(SegmentRequest[dict[str, object]]):
    """Ask what is counted there."""

    KIND: ClassVar[str] = "stats"

    async def run(self, segments: LocalSegments) -> dict[str, object]:
        """See `LocalSegments.stats`."""
        return await segments.stats(self.segment)


@dataclass(frozen=True, slots=True)
class OffloadSegment(SegmentRequest[None]):
    """Have what has ended copied.  Raises `OffloadNotConfigured`, `InvalidOffloadUrl`."""

    KIND: ClassVar[str] = "offload"
    url: str | None

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.offload`."""
        await segments.offload(self.segment, self.url)


@dataclass(frozen=True, slots=True)
class OffloadManifest(SegmentRequest[dict[str, object]]):
    """Ask how offloading stands, and what is known of the copies."""

    KIND: ClassVar[str] = "offload-manifest"

    async def run(self, segments: LocalSegments) -> dict[str, object]:
        """See `LocalSegments.offload_manifest`."""
        return await segments.offload_manifest(self.segment)


@dataclass(frozen=True, slots=True)
class DropHotLedgers(SegmentRequest[list[int]]):
    """Delete ledgers (these, or all) whose copy is whole; the answer says which they were."""

    KIND: ClassVar[str] = "drop-hot"
    ledger_ids: Sequence[int] | None

    async def run(self, segments: LocalSegments) -> list[int]:
        """See `LocalSegments.drop_hot`."""
        return await segments.drop_hot(self.segment, self.ledger_ids)


SEGMENT_REQUESTS: Mapping[str, type[SegmentRequest[object]]] = MappingProxyType(
    {
        each.KIND: each
        for each in (
            ViewSegment,
            ViewRunningSegment,
            CreateSubscription,
            DeleteSubscription,
            SeekSubscription,
            SeekSubscriptionToTime,
            SealSegment,
            DeleteSegment,
            SegmentStats,
            OffloadSegment,
            OffloadManifest,
            DropHotLedgers,
        )
    }
)
