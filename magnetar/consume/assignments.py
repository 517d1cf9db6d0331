"""Pure: the segments that an ordered consumer has, has to give back, or is given back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from magnetar.errors import NotSupported
from magnetar.protocol import pulsar_pb2 as pb


@dataclass(frozen=True, slots=True)
class AssignedSegment:
    """A segment that the controller wants this consumer to read."""

    segment_id: int
    hash_start: int
    hash_end: int
    topic: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """All segments that the consumer is to read, of a layout of that epoch."""

    layout_epoch: int
    segments: tuple[AssignedSegment, ...]


def assignment_of(told: pb.ScalableConsumerAssignment) -> Assignment:
    """The assignment that a controller told.

    Raises `NotSupported` if it shares a segment among consumers by entry buckets.
    """
    for segment in told.segments:
        if segment.bucket_ranges:
            raise NotSupported(
                f"The controller shares segment {segment.segment_topic} among several consumers, "
                "which this client cannot do; use no more consumers in the subscription than the "
                "topic has segments, or set its scalableTopicEntryBucketBudget to 1."
            )
    return Assignment(
        told.layout_epoch,
        tuple(
            AssignedSegment(
                segment.segment_id, segment.hash_start, segment.hash_end, segment.segment_topic
            )
            for segment in told.segments
        ),
    )


class HoldingState(Enum):
    """Where one segment stands with the consumer."""

    HELD = auto()
    """Assigned; it is open, or being opened."""
    LEAVING = auto()
    """Taken away; it is not closed yet."""
    RETURNING = auto()
    """Taken away and assigned again before it was closed."""
    GONE = auto()


class HoldingEvent(Enum):
    """An event in the life of an assigned segment."""

    ASSIGNED = auto()
    TAKEN = auto()
    CLOSED = auto()


_TRANSITIONS: Final[Mapping[tuple[HoldingState, HoldingEvent], HoldingState]] = MappingProxyType(
    {
        (HoldingState.GONE, HoldingEvent.ASSIGNED): HoldingState.HELD,
        (HoldingState.HELD, HoldingEvent.TAKEN): HoldingState.LEAVING,
        (HoldingState.LEAVING, HoldingEvent.ASSIGNED): HoldingState.RETURNING,
        (HoldingState.LEAVING, HoldingEvent.CLOSED): HoldingState.GONE,
        (HoldingState.RETURNING, HoldingEvent.TAKEN): HoldingState.LEAVING,
        (HoldingState.RETURNING, HoldingEvent.CLOSED): HoldingState.HELD,
    }
)
"""Anything else changes nothing."""


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """Subscribe to the segment."""

    segment: AssignedSegment


@dataclass(frozen=True, slots=True)
class LeaveSegment:
    """Hand out nothing more of it, and close it when what was handed out is acknowledged."""

    segment: AssignedSegment


Effect = OpenSegment | LeaveSegment


class Holdings:
    """The assigned segments.  The shell carries out the effects and reports each close (`closed`).

    - An assignment is complete: what it does not name is taken away, in whatever state it is.
    - A segment that is taken away is left in order first (nothing more is handed out, what was is
      acknowledged); only then is it closed, which is what gives it to somebody else.
    - A segment that is assigned again while it is being left is opened anew once it has been
      closed, so one consumer never has it twice.
    - The same id under another topic name is another segment.
    """

    __slots__ = ("_next", "_now", "_states")

    def __init__(self) -> None:
        self._states: dict[int, HoldingState] = {}
        self._now: dict[int, AssignedSegment] = {}
        self._next: dict[int, AssignedSegment] = {}

    def state(self, segment_id: int) -> HoldingState:
        """Return where a segment stands with the consumer."""
        return self._states.get(segment_id, HoldingState.GONE)

    @property
    def held(self) -> frozenset[int]:
        """Ids of the segments that are open, or being opened, and stay."""
        return frozenset(i for i, state in self._states.items() if state is HoldingState.HELD)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is open or being left."""
        return not self._states

    def assign(self, segments: Iterable[AssignedSegment]) -> list[Effect]:
        """Take in a complete assignment."""
        wanted = {segment.segment_id: segment for segment in segments}
        effects: list[Effect] = []
        for segment_id in list(self._states):
            if self._assigned_to(segment_id) != wanted.get(segment_id):
                effects += self._apply_event(segment_id, HoldingEvent.TAKEN)
        for segment_id, segment in wanted.items():
            if self.state(segment_id) in (HoldingState.GONE, HoldingState.LEAVING):
                self._next[segment_id] = segment
                effects += self._apply_event(segment_id, HoldingEvent.ASSIGNED)
        return effects

    def closed(self, segment: AssignedSegment) -> list[Effect]:
        """A segment that was left is closed."""
        if self._now.get(segment.segment_id) != segment:
            return []
        return self._apply_event(segment.segment_id, HoldingEvent.CLOSED)

    def _assigned_to(self, segment_id: int) -> AssignedSegment | None:
        """Return the segment as the last assignment named it, if it is known."""
        match self.state(segment_id):
            case HoldingState.HELD:
                return self._now[segment_id]
            case HoldingState.RETURNING:
                return self._next[segment_id]
            case _:
                return None

    def _apply_event(self, segment_id: int, happening: HoldingEvent) -> list[Effect]:
        before = self.state(segment_id)
        after = _TRANSITIONS.get((before, happening), before)
        self._states[segment_id] = after
        match before, after:
            case ((HoldingState.GONE | HoldingState.RETURNING), HoldingState.HELD):
                self._now[segment_id] = self._next.pop(segment_id)
                return [OpenSegment(self._now[segment_id])]
            case HoldingState.HELD, HoldingState.LEAVING:
                return [LeaveSegment(self._now[segment_id])]
            case HoldingState.RETURNING, HoldingState.LEAVING:
                del self._next[segment_id]
            case _, HoldingState.GONE:
                del self._states[segment_id]
                self._now.pop(segment_id, None)
            case _:
                pass
        return []
