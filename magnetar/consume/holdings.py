"""The segments that an ordered consumer has, has to give back, or is given back.

Pure.  Rules:

- An assignment is complete: what it does not name is taken away, in whatever state it is.
- A segment that is taken away is left in order first (nothing more is handed out, what was is
  acknowledged); only then is it closed, which is what gives it to somebody else.
- A segment that is assigned again while it is being left is opened anew once it has been closed, so
  one consumer never has it twice.
- The same id under another topic name is another segment.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class AssignedSegment:
    """A segment that the controller wants this consumer to read."""

    segment_id: int
    hash_start: int
    hash_end: int
    topic: str


class Holding(Enum):
    """What one segment is to the consumer."""

    HELD = auto()
    """Assigned; it is open, or being opened."""
    LEAVING = auto()
    """Taken away; it is not closed yet."""
    RETURNING = auto()
    """Taken away and assigned again before it was closed."""
    GONE = auto()


class Happening(Enum):
    """What can happen to a segment."""

    ASSIGNED = auto()
    TAKEN = auto()
    CLOSED = auto()


_TRANSITIONS: Final[Mapping[tuple[Holding, Happening], Holding]] = MappingProxyType(
    {
        (Holding.GONE, Happening.ASSIGNED): Holding.HELD,
        (Holding.HELD, Happening.TAKEN): Holding.LEAVING,
        (Holding.LEAVING, Happening.ASSIGNED): Holding.RETURNING,
        (Holding.LEAVING, Happening.CLOSED): Holding.GONE,
        (Holding.RETURNING, Happening.TAKEN): Holding.LEAVING,
        (Holding.RETURNING, Happening.CLOSED): Holding.HELD,
    }
)
"""Anything else changes nothing."""


@dataclass(frozen=True, slots=True)
class Open:
    """Subscribe to the segment."""

    segment: AssignedSegment


@dataclass(frozen=True, slots=True)
class Leave:
    """Hand out nothing more of it, and close it when what was handed out is acknowledged."""

    segment: AssignedSegment


Effect = Open | Leave


class Holdings:
    """See the module's rules.  Whoever does the effects tells of each close (`closed`)."""

    __slots__ = ("_next", "_now", "_states")

    def __init__(self) -> None:
        self._states: dict[int, Holding] = {}
        self._now: dict[int, AssignedSegment] = {}
        self._next: dict[int, AssignedSegment] = {}

    def state(self, segment_id: int) -> Holding:
        """What a segment is to the consumer."""
        return self._states.get(segment_id, Holding.GONE)

    @property
    def held(self) -> frozenset[int]:
        """Ids of the segments that are open, or being opened, and stay."""
        return frozenset(i for i, state in self._states.items() if state is Holding.HELD)

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
                effects += self._happen(segment_id, Happening.TAKEN)
        for segment_id, segment in wanted.items():
            if self.state(segment_id) in (Holding.GONE, Holding.LEAVING):
                self._next[segment_id] = segment
                effects += self._happen(segment_id, Happening.ASSIGNED)
        return effects

    def closed(self, segment: AssignedSegment) -> list[Effect]:
        """A segment that was left is closed."""
        if self._now.get(segment.segment_id) != segment:
            return []
        return self._happen(segment.segment_id, Happening.CLOSED)

    def _assigned_to(self, segment_id: int) -> AssignedSegment | None:
        """What the last assignment said of a segment that is known."""
        match self.state(segment_id):
            case Holding.HELD:
                return self._now[segment_id]
            case Holding.RETURNING:
                return self._next[segment_id]
            case _:
                return None

    def _happen(self, segment_id: int, happening: Happening) -> list[Effect]:
        before = self.state(segment_id)
        after = _TRANSITIONS.get((before, happening), before)
        self._states[segment_id] = after
        match before, after:
            case ((Holding.GONE | Holding.RETURNING), Holding.HELD):
                self._now[segment_id] = self._next.pop(segment_id)
                return [Open(self._now[segment_id])]
            case Holding.HELD, Holding.LEAVING:
                return [Leave(self._now[segment_id])]
            case Holding.RETURNING, Holding.LEAVING:
                del self._next[segment_id]
            case _, Holding.GONE:
                del self._states[segment_id]
                self._now.pop(segment_id, None)
            case _:
                pass
        return []
