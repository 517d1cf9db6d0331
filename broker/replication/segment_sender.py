"""Pure: what is sent of one segment to the segments of another cluster, and when it is done.

The owner of the segment here holds a `SegmentSender`, reads the entries in the order of the log and
gives them to it.  It keeps R3, R4, R7 and R9 of `../../docs/decisions/replicated-segments.md`.
"""

from collections import deque
from typing import NamedTuple

from broker.replication.segment_plan import (
    Part,
    RemoteLayout,
    SourceEntry,
    Unattached,
    Unplanned,
    plan,
)
from broker.topics.replicated_ranges import ReplicatedRanges
from magnetar.protocol.ids import EARLIEST, Position


class Send(NamedTuple):
    """One send of the entry at `position`, with its sequence id in the session with the segment.

    Without `part` the entry is a chunk before the last one of its message: it goes as it is, and
    has no record.
    """

    sequence: int
    segment_id: int
    position: Position
    part: Part | None


class Planned(NamedTuple):
    """The sends of an entry; `done`: nothing of it is unanswered, so it is acknowledged."""

    sends: list[Send]
    done: bool


class _Session:
    """A session with one remote segment."""

    def __init__(self, stored: ReplicatedRanges) -> None:
        self.stored = stored
        """The ranges that are stored there once every part is stored that was sent."""
        self.sequence = 0
        """The sequence id of the next part."""
        self.unanswered: deque[Position] = deque()


class SegmentSender:
    """Sends one segment to one other cluster, over a session with each segment there.

    When a session ends, nobody knows which of its unanswered parts are stored.  So reading goes
    back to the first of their entries, and what is sent then is what the segments say they lack.
    """

    def __init__(self, own_range: tuple[int, int] | None, layout: RemoteLayout) -> None:
        """`own_range` as in `plan`."""
        self.read_from = EARLIEST
        """The next entry to give to `take` is the first one here or after this."""
        self._own_range = own_range
        self._layout = layout
        self._sessions: dict[int, _Session] = {}
        self._unanswered: dict[Position, int] = {}
        """The number of parts of each entry that are not answered."""
        self._again: set[Position] = set()
        """Entries with parts of which nobody knows whether they are stored."""

    @property
    def layout(self) -> RemoteLayout:
        """The newest layout of the other cluster that it knows."""
        return self._layout

    @property
    def attached_to(self) -> frozenset[int]:
        """The remote segments with which it has a session."""
        return frozenset(self._sessions)

    @property
    def in_flight(self) -> int:
        """The entries with parts that are not answered; the caller bounds them."""
        return len(self._unanswered)

    def learn(self, layout: RemoteLayout) -> frozenset[int]:
        """Take a newer layout: the segments whose sessions end, as they are sealed (R4).

        What they have stored is told by their children, which have it from them (R6).
        """
        if layout.epoch <= self._layout.epoch:
            return frozenset()
        self._layout = layout
        sealed = frozenset(self._sessions.keys() - layout.ids)
        for segment_id in sealed:
            self.detached(segment_id)
        return sealed

    def attached(self, segment_id: int, stored: ReplicatedRanges) -> None:
        """A session begins with a remote segment, which has this of the segment here (R7)."""
        self.detached(segment_id)
        self._sessions[segment_id] = _Session(stored)

    def detached(self, segment_id: int) -> None:
        """A session has ended, for whatever reason: read on from its first unanswered entry."""
        session = self._sessions.pop(segment_id, None)
        if session is None:
            return
        for position in session.unanswered:
            self._answer(position)
            self._again.add(position)
            self.read_from = min(self.read_from, position)

    def take(self, entry: SourceEntry) -> Planned | Unattached | Unplanned:
        """Plan an entry, and count what is sent of it.

        For `Unattached` and `Unplanned` the caller does what they say and gives it again.
        """
        stored = {segment_id: each.stored for segment_id, each in self._sessions.items()}
        parts = plan(entry, self._own_range, self._layout, stored)
        if not isinstance(parts, list):
            return parts
        position = entry.position
        sends: list[Send] = []
        for part in parts:
            sends += [self._send(part.segment_id, position, each) for each in entry.earlier]
            sends.append(self._send(part.segment_id, position, position, part))
        self.skip(position)
        return Planned(sends, position not in self._unanswered)

    def skip(self, position: Position) -> None:
        """Read on after an entry of which nothing more is to be sent."""
        self._again.discard(position)
        self.read_from = position.following

    def answered(self, segment_id: int) -> Position | None:
        """The oldest send of a session is stored: its entry, if all of it is answered (R9)."""
        session = self._sessions.get(segment_id)
        if session is None:
            return None
        position = session.unanswered.popleft()
        self._answer(position)
        done = position not in self._unanswered and position not in self._again
        return position if done else None

    def _send(
        self, segment_id: int, of: Position, position: Position, part: Part | None = None
    ) -> Send:
        """Count a send of the entry at `position`, which is answered for that at `of`."""
        session = self._sessions[segment_id]
        if part is not None:
            record = part.record
            session.stored = session.stored.raised(record.hash_start, record.hash_end, record.mark)
        session.unanswered.append(of)
        self._unanswered[of] = self._unanswered.get(of, 0) + 1
        session.sequence += 1
        return Send(session.sequence - 1, segment_id, position, part)

    def _answer(self, position: Position) -> None:
        left = self._unanswered[position] - 1
        if left:
            self._unanswered[position] = left
        else:
            del self._unanswered[position]
