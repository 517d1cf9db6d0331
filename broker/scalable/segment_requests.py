"""Typed requests to the owner of a segment, and their table.

Requests of this broker and of others, and of operators over REST, are of these types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, TypeVar

from broker.placement.owner_requests import OwnedRequest
from broker.scalable.key_sample import KeySample
from broker.scalable.local_segments import LocalSegments
from broker.scalable.segment_view import SegmentView
from broker.topics.carried_ids import FinalSequences
from broker.topics.completeness import INCOMPLETE, Completeness
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    PositionsTold,
    SubscriptionState,
)
from magnetar.protocol.ids import Position
from magnetar.protocol.names import SegmentName, TopicName

A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SegmentRequest(OwnedRequest[LocalSegments, A_co]):
    """A request to the owner of a segment.

    The owner loads the segment if need be; then a segment that does not exist raises
    `TopicNotFound`.
    """

    segment: SegmentName

    @property
    def owned(self) -> TopicName:
        """See `OwnedRequest`."""
        return self.segment.topic_name


@dataclass(frozen=True, slots=True)
class ViewSegment(SegmentRequest[SegmentView]):
    """Return the current state of the segment."""

    KIND: ClassVar[str] = "segment.view"

    async def run(self, segments: LocalSegments) -> SegmentView:
        """See `LocalSegments.view`."""
        return await segments.view(self.segment)


@dataclass(frozen=True, slots=True)
class ViewRunningSegment(SegmentRequest[SegmentView | None]):
    """Return the current state of the segment, None if it is not loaded."""

    KIND: ClassVar[str] = "segment.view-running"

    async def run(self, segments: LocalSegments) -> SegmentView | None:
        """See `LocalSegments.view_of_running`."""
        return await segments.view_of_running(self.segment)


@dataclass(frozen=True, slots=True)
class SampleKeys(SegmentRequest[KeySample | None]):
    """Return a sample of the keys of the newest entries, None if the segment is not loaded."""

    KIND: ClassVar[str] = "segment.sample-keys"

    async def run(self, segments: LocalSegments) -> KeySample | None:
        """See `LocalSegments.sample_keys`."""
        return await segments.sample_keys(self.segment)


@dataclass(frozen=True, slots=True)
class CreateSubscription(SegmentRequest[None]):
    """Make a durable subscription at EARLIEST or LATEST, unless it exists."""

    KIND: ClassVar[str] = "segment.create-subscription"
    name: str
    start: Position
    properties: Mapping[str, str] = field(default_factory=dict)
    replicated: bool = False
    completeness: Completeness = INCOMPLETE

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.create_subscription`."""
        await segments.create_subscription(
            self.segment,
            self.name,
            self.start,
            self.properties,
            replicated=self.replicated,
            completeness=self.completeness,
        )


@dataclass(frozen=True, slots=True)
class DeleteSubscription(SegmentRequest[None]):
    """Delete a subscription.  Raises `SubscriptionNotFound`, `ConsumerBusy` unless forced."""

    KIND: ClassVar[str] = "segment.delete-subscription"
    name: str
    force: bool

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.delete_subscription`."""
        await segments.delete_subscription(self.segment, self.name, force=self.force)


@dataclass(frozen=True, slots=True)
class SetReplicated(SegmentRequest[None]):
    """Have a subscription move in other clusters too, or not.  Raises `SubscriptionNotFound`."""

    KIND: ClassVar[str] = "segment.set-replicated"
    name: str
    replicated: bool

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.set_replicated`."""
        await segments.set_replicated(self.segment, self.name, replicated=self.replicated)


@dataclass(frozen=True, slots=True)
class SeekSubscription(SegmentRequest[None]):
    """Move a subscription to EARLIEST or LATEST.  Raises `SubscriptionNotFound`."""

    KIND: ClassVar[str] = "segment.seek"
    name: str
    position: Position

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.seek`."""
        await segments.seek(self.segment, self.name, self.position)


@dataclass(frozen=True, slots=True)
class SkipSegmentBacklog(SegmentRequest[None]):
    """Skip all published messages of a subscription.  Raises `SubscriptionNotFound`."""

    KIND: ClassVar[str] = "segment.skip-backlog"
    name: str

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.skip_backlog`."""
        await segments.skip_backlog(self.segment, self.name)


@dataclass(frozen=True, slots=True)
class SeekSubscriptionToTime(SegmentRequest[None]):
    """Move a subscription to the first message published at or after a time.

    Raises `SubscriptionNotFound`.
    """

    KIND: ClassVar[str] = "segment.seek-to-time"
    name: str
    timestamp_ms: int

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.seek_to_time`."""
        await segments.seek_to_time(self.segment, self.name, self.timestamp_ms)


@dataclass(frozen=True, slots=True)
class ViewSubscriptions(SegmentRequest[SubscriptionState]):
    """Return how far the replicated subscriptions have come, for another cluster."""

    KIND: ClassVar[str] = "segment.view-subscriptions"
    cluster: str

    async def run(self, segments: LocalSegments) -> SubscriptionState:
        """See `LocalSegments.subscription_state`."""
        return await segments.subscription_state(self.segment, self.cluster)


@dataclass(frozen=True, slots=True)
class TakePositions(SegmentRequest[CopiesLeft]):
    """Acknowledge copies that are acknowledged in their source cluster; return what is left.

    Raises `StaleSender` if a newer layout of the source topic is known than the one given.
    """

    KIND: ClassVar[str] = "segment.take-positions"
    told: PositionsTold

    async def run(self, segments: LocalSegments) -> CopiesLeft:
        """See `LocalSegments.take_positions`."""
        return await segments.take_positions(self.segment, self.told)


@dataclass(frozen=True, slots=True)
class NoteComplete(SegmentRequest[None]):
    """Note of which replicated subscriptions nothing of another cluster is missing."""

    KIND: ClassVar[str] = "segment.note-complete"
    cluster: str
    names: Sequence[str]

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.note_complete`."""
        await segments.note_complete(self.segment, self.cluster, self.names)


@dataclass(frozen=True, slots=True)
class TakeAnswer(SegmentRequest[None]):
    """Acknowledge what another cluster has no copy of any more that is not acknowledged."""

    KIND: ClassVar[str] = "segment.take-answer"
    answered: CopiesAnswered

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.take_answer`."""
        await segments.take_answer(self.segment, self.answered)


@dataclass(frozen=True, slots=True)
class SealSegment(SegmentRequest[None]):
    """Refuse new producers, let attached ones finish, terminate the segment."""

    KIND: ClassVar[str] = "segment.seal"

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.seal`."""
        await segments.seal(self.segment)


@dataclass(frozen=True, slots=True)
class PauseSends(SegmentRequest[bool]):
    """Return once the senders to segments of one owner have paused; whether there are any.

    `segment` is one of them, or of the others.
    """

    KIND: ClassVar[str] = "segment.pause-sends"
    closing: Sequence[SegmentName]
    others: Sequence[SegmentName]
    holder: str

    async def run(self, segments: LocalSegments) -> bool:
        """See `PausedSends.pause`."""
        return await segments.paused_sends.pause(self.closing, self.others, self.holder)


@dataclass(frozen=True, slots=True)
class ResumeSends(SegmentRequest[None]):
    """End a pause: its holder has pushed the layout."""

    KIND: ClassVar[str] = "segment.resume-sends"
    holder: str

    async def run(self, segments: LocalSegments) -> None:
        """See `PausedSends.resume`."""
        segments.paused_sends.resume(self.holder)


@dataclass(frozen=True, slots=True)
class ViewFinalSequences(SegmentRequest[FinalSequences]):
    """Return the last sequence ids of a sealed segment, its parents' included.

    `changed_ms` is when the layout change began that sealed it.
    """

    KIND: ClassVar[str] = "segment.final-sequences"
    changed_ms: int

    async def run(self, segments: LocalSegments) -> FinalSequences:
        """See `LocalSegments.final_sequences`."""
        return await segments.final_sequences(self.segment, self.changed_ms)


@dataclass(frozen=True, slots=True)
class InheritSequences(SegmentRequest[None]):
    """Give the segment the last sequence ids of its parents, durably; it takes them once."""

    KIND: ClassVar[str] = "segment.inherit-sequences"
    finals: FinalSequences

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.inherit_sequences`."""
        await segments.inherit_sequences(self.segment, self.finals)


@dataclass(frozen=True, slots=True)
class DeleteSegment(SegmentRequest[None]):
    """Delete a segment that is in no layout.  Raises `SegmentNamed`.

    An undo gives the attempt of the step that it undoes.
    """

    KIND: ClassVar[str] = "segment.delete"
    attempt: str = ""

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.delete`."""
        await segments.delete(self.segment, self.attempt)


@dataclass(frozen=True, slots=True)
class SegmentStats(SegmentRequest[dict[str, object]]):
    """Return the statistics of the segment."""

    KIND: ClassVar[str] = "segment.stats"

    async def run(self, segments: LocalSegments) -> dict[str, object]:
        """See `LocalSegments.stats`."""
        return await segments.stats(self.segment)


@dataclass(frozen=True, slots=True)
class OffloadSegment(SegmentRequest[None]):
    """Offload ended ledgers.  Raises `OffloadNotConfigured`, `InvalidOffloadUrl`."""

    KIND: ClassVar[str] = "segment.offload"
    url: str | None

    async def run(self, segments: LocalSegments) -> None:
        """See `LocalSegments.offload`."""
        await segments.offload(self.segment, self.url)


@dataclass(frozen=True, slots=True)
class OffloadManifest(SegmentRequest[dict[str, object]]):
    """Return the state of offloading, and each ledger with its copy."""

    KIND: ClassVar[str] = "segment.offload-manifest"

    async def run(self, segments: LocalSegments) -> dict[str, object]:
        """See `LocalSegments.offload_manifest`."""
        return await segments.offload_manifest(self.segment)


@dataclass(frozen=True, slots=True)
class DropHotLedgers(SegmentRequest[list[int]]):
    """Delete these ledgers, or all, that are copied as a whole; return their ids."""

    KIND: ClassVar[str] = "segment.drop-hot"
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
            SampleKeys,
            CreateSubscription,
            DeleteSubscription,
            SetReplicated,
            SeekSubscription,
            SeekSubscriptionToTime,
            SkipSegmentBacklog,
            ViewSubscriptions,
            TakePositions,
            NoteComplete,
            TakeAnswer,
            SealSegment,
            PauseSends,
            ResumeSends,
            ViewFinalSequences,
            InheritSequences,
            DeleteSegment,
            SegmentStats,
            OffloadSegment,
            OffloadManifest,
            DropHotLedgers,
        )
    }
)
