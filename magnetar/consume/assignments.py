"""The segments assigned to an ordered consumer, and how it opens and leaves them.  Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb


@dataclass(frozen=True, slots=True)
class AssignedSegment:
    """A segment that the controller assigns to this consumer.

    It has no range of hashes: that of a partition changes when its topic becomes scalable, and the
    partition must be read on.  A reader that closes meanwhile holds no messages at the broker,
    which deletes them as soon as all durable subscriptions have acknowledged them.

    With `bucket_ranges` it shares the segment with others: these are all its entry buckets, the
    same for each consumer (PIP-486).
    """

    segment_id: int
    topic: str
    bucket_ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """All segments assigned to the consumer, of a layout of that epoch."""

    layout_epoch: int
    segments: tuple[AssignedSegment, ...]


def assignment_of(message: pb.ScalableConsumerAssignment) -> Assignment:
    """The assignment in a controller's message."""
    return Assignment(
        message.layout_epoch,
        tuple(
            AssignedSegment(
                segment.segment_id,
                segment.segment_topic,
                tuple((each.start, each.end) for each in segment.bucket_ranges),
            )
            for segment in message.segments
        ),
    )


class HoldingState(Enum):
    """The state of a segment in a consumer."""

    HELD = auto()
    """Assigned; it is open, or being opened."""
    LEAVING = auto()
    """Taken away; it is not closed yet."""
    RETURNING = auto()
    """Taken away and assigned again before it was closed."""
    GONE = auto()
    """Not assigned, and closed."""


class HoldingEvent(Enum):
    """An event that may change the state of a segment."""

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
"""Any other event changes nothing."""


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """An effect: subscribe to the segment."""

    segment: AssignedSegment


@dataclass(frozen=True, slots=True)
class LeaveSegment:
    """An effect: hand out no more messages, and close when those handed out are acknowledged."""

    segment: AssignedSegment


Effect = OpenSegment | LeaveSegment


class Holdings:
    """The assigned segments.  The shell carries out the effects and reports each close (`closed`).

    A segment that is taken away is left first, and closed after that; the close lets the controller
    give it to another consumer.  A segment that is assigned again while it is being left is opened
    after it was closed, so a consumer never has it twice.  A segment that is shared from now on, or
    no longer, is left and opened too.
    """

    __slots__ = ("_next", "_now", "_states")

    def __init__(self) -> None:
        self._states: dict[int, HoldingState] = {}
        self._now: dict[int, AssignedSegment] = {}
        self._next: dict[int, AssignedSegment] = {}

    def state(self, segment_id: int) -> HoldingState:
        """The state of a segment."""
        return self._states.get(segment_id, HoldingState.GONE)

    @property
    def held(self) -> frozenset[int]:
        """The ids of the segments in state HELD."""
        return frozenset(i for i, state in self._states.items() if state is HoldingState.HELD)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is open or being left."""
        return not self._states

    def assign(self, segments: Iterable[AssignedSegment]) -> list[Effect]:
        """Take a complete assignment: segments that it does not name are taken away."""
        wanted = {segment.segment_id: segment for segment in segments}
        effects: list[Effect] = []
        for segment_id in list(self._states):
            # The same id under another topic name is another segment, and a segment that is to be
            # shared is used in another way.
            if self._assigned_to(segment_id) != wanted.get(segment_id):
                effects += self._apply_event(segment_id, HoldingEvent.TAKEN)
        for segment_id, segment in wanted.items():
            if self.state(segment_id) in (HoldingState.GONE, HoldingState.LEAVING):
                self._next[segment_id] = segment
                effects += self._apply_event(segment_id, HoldingEvent.ASSIGNED)
        return effects

    def closed(self, segment: AssignedSegment) -> list[Effect]:
        """Note that a segment that was left is closed."""
        if self._now.get(segment.segment_id) != segment:
            return []
        return self._apply_event(segment.segment_id, HoldingEvent.CLOSED)

    def _assigned_to(self, segment_id: int) -> AssignedSegment | None:
        """The segment as the last assignment named it, unless it was taken away."""
        match self.state(segment_id):
            case HoldingState.HELD:
                return self._now[segment_id]
            case HoldingState.RETURNING:
                return self._next[segment_id]
            case _:
                return None

    def _apply_event(self, segment_id: int, event: HoldingEvent) -> list[Effect]:
        before = self.state(segment_id)
        after = _TRANSITIONS.get((before, event), before)
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
