"""Pure: the ordered consumers of one subscription, from events to assignments."""

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from broker.scalable.assignment import Holdings, assignable, rebalance, release
from broker.scalable.layout import Layout
from magnetar.protocol.server_error import InternalError
from magnetar.protocol.state_table import StateTable


class GroupAssertion(InternalError):
    """A consumer group broke one of its own rules."""


class SessionState(enum.Enum):
    """The state of a registered consumer."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """The connection of the consumer is lost; the consumer keeps its segments."""
    LEFT = "left"
    """It gets no segments and is forgotten.  Segments where it is still attached wait for that."""


_MOVES: StateTable[SessionState] = StateTable(
    {
        SessionState.CONNECTED: frozenset(SessionState),
        SessionState.DISCONNECTED: frozenset(SessionState),
        SessionState.LEFT: frozenset(),
    },
    defect=GroupAssertion,
)


@dataclass(slots=True)
class Session:
    """One consumer, by name.  `assigned` are the segments of the last assignment sent to it."""

    name: str
    state: SessionState
    assigned: frozenset[int] = frozenset()
    taken_up: set[int] = field(default_factory=set)
    """Granted segments where it has attached since they were granted."""
    closed: set[int] = field(default_factory=set)
    """Granted segments that it closed by command."""
    seen: bool = False
    """Whether it has ever attached to a segment."""
    expected: set[int] = field(default_factory=set)
    """Granted segments where it has not attached since the assignment was sent."""
    finished: set[int] = field(default_factory=set)
    """Granted sealed segments that it closed by command: it may have read them to their ends."""


Assignments = Mapping[str, frozenset[int]]
"""Consumer to its complete new set of segments; only those whose set has changed."""


class ConsumerGroup:
    """The consumers of one subscription and the segments that each one is assigned.

    A consumer's segments are known from two sides: those granted here, and those where a segment
    consumer named `<consumer>-seg-<id>` is attached.  A segment that is taken from a consumer is
    free when its segment consumer has detached; if that never attached, when the consumer is gone
    or `give_up_waiting` was called.

    Methods that change something return the complete new assignments of the consumers whose set of
    segments has changed.  `ordered` is True for STREAM subscriptions.
    """

    def __init__(self, layout: Layout, *, ordered: bool) -> None:
        self.ordered = ordered
        self.sessions: dict[str, Session] = {}
        self.holdings = Holdings()
        self.drained: set[int] = set()
        self._layout = layout
        self._attached: Counter[tuple[int, str]] = Counter()
        self._never_seen: set[int] = set()

    # Consumers

    def restore(self, name: str) -> None:
        """Add a consumer that was registered before this controller, DISCONNECTED."""
        self.sessions[name] = Session(name, SessionState.DISCONNECTED)

    def connect(self, name: str) -> Assignments:
        """Register a consumer, anew or again; its own set is always in the result."""
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = Session(name, SessionState.CONNECTED)
            self._reclaim(session)
        else:
            self._move(session, SessionState.CONNECTED)
            session.closed.clear()
            session.finished.clear()
            session.taken_up = {s for s in session.taken_up if self._attached[s, name]}
            session.expected = set(session.assigned - session.taken_up)
            self._never_seen -= {s for s, o in self.holdings.releasing.items() if o == name}
        changed = self._deal()
        return {**changed, name: session.assigned}

    def disconnect(self, name: str) -> Assignments:
        """Note a lost connection: the consumer keeps its segments, and is not waited for."""
        session = self.sessions.get(name)
        if session is None or session.state is not SessionState.CONNECTED:
            return {}
        self._move(session, SessionState.DISCONNECTED)
        return self._deal()

    def leave(self, name: str) -> Assignments:
        """Give the segments of a consumer that left, or was gone too long, to the others."""
        session = self.sessions.get(name)
        if session is None:
            return {}
        self._move(session, SessionState.LEFT)
        return self._deal()

    def registered(self) -> list[str]:
        """Return the names of the consumers that get segments, in order."""
        return sorted(n for n, s in self.sessions.items() if s.state is not SessionState.LEFT)

    # Segments

    def attached(self, segment_id: int, name: str) -> None:
        """Note that the segment consumer of `name` attached to a segment."""
        self._attached[segment_id, name] += 1
        session = self.sessions.get(name)
        if session is not None:
            session.seen = True
        granted, releasing = self.holdings.granted, self.holdings.releasing
        if granted.get(segment_id) == name and session is not None:
            session.closed.discard(segment_id)
            session.finished.discard(segment_id)
            session.expected.discard(segment_id)
            session.taken_up.add(segment_id)
        elif releasing.get(segment_id) == name:
            self._never_seen.discard(segment_id)
        elif segment_id in granted or segment_id in releasing:
            return
        elif session is not None and session.state is SessionState.DISCONNECTED:
            # It had the segment before this controller came, and goes on there.
            self.holdings = Holdings({**granted, segment_id: name}, releasing)
            session.taken_up.add(segment_id)
        else:
            self.holdings = Holdings(granted, {**releasing, segment_id: name})

    def detached(self, segment_id: int, name: str, *, by_command: bool) -> Assignments:
        """Note that the segment consumer of `name` detached from a segment."""
        self._attached[segment_id, name] -= 1
        if self._attached[segment_id, name] > 0:
            return {}
        del self._attached[segment_id, name]
        session = self.sessions.get(name)
        segment = self._layout.segments.get(segment_id)
        if session is not None and by_command and segment_id in self.holdings.of(name):
            if segment is not None and segment.active:
                session.closed.add(segment_id)
            else:
                # It may have read the segment to its end: it has not closed down.
                session.finished.add(segment_id)
                if self.ordered:
                    session.taken_up.discard(segment_id)
        return self._deal()

    def lost_sight(self, segment_id: int, name: str) -> Assignments:
        """Note that the segment consumer of `name` is missing, for an unknown reason.

        The consumer has not left, but has to attach there again.
        """
        session = self.sessions.get(name)
        if session is not None and self._attached[segment_id, name] <= 1:
            session.taken_up.discard(segment_id)
            if segment_id in session.assigned:
                session.expected.add(segment_id)
        return self.detached(segment_id, name, by_command=False)

    def has_closed_down(self, name: str) -> bool:
        """Whether a consumer closed a segment of its own, and is attached at none of the others.

        The official client sends nothing else to the controller when it is closed.  Closing
        a segment that was taken from it is no sign of that.
        """
        session = self.sessions.get(name)
        if session is None:
            return False
        own = self.holdings.of(name)
        return bool(own & session.closed) and not any(self._attached[s, name] for s in own)

    def is_idle(self, name: str) -> bool:
        """Whether a consumer has segments, and attached to none of them or closed those."""
        session = self.sessions.get(name)
        own = self.holdings.of(name)
        return session is not None and bool(own) and not own & session.taken_up

    def was_seen(self, name: str) -> bool:
        """Whether a consumer has ever attached to a segment since it registered."""
        session = self.sessions.get(name)
        return session is not None and session.seen

    def missing_from(self, name: str) -> frozenset[int]:
        """Return the segments where a connected consumer has yet to attach."""
        session = self.sessions.get(name)
        if session is None or session.state is not SessionState.CONNECTED or not session.expected:
            return frozenset()
        return frozenset(session.expected & self.holdings.of(name))

    def to_send_again(self, name: str) -> frozenset[int]:
        """Return a consumer's segments without those that it has finished.

        The official client would open a finished one again: a checkpoint reader would read the
        whole segment a second time.
        """
        session = self.sessions.get(name)
        own = self.holdings.of(name)
        return own if session is None else own - session.finished

    def not_released_by(self, name: str) -> frozenset[int]:
        """Return the segments that were taken from a connected consumer that is attached there."""
        session = self.sessions.get(name)
        if session is None or session.state is not SessionState.CONNECTED:
            return frozenset()
        releasing = self.holdings.releasing.items()
        return frozenset(s for s, owner in releasing if owner == name and self._attached[s, name])

    def awaited(self) -> frozenset[int]:
        """Return the segments taken from connected consumers before they attached there.

        Their subscribe may be under way.
        """
        return frozenset(self._never_seen)

    def give_up_waiting(self, segment_ids: Collection[int]) -> Assignments:
        """Free segments of `awaited()`."""
        self._never_seen -= frozenset(segment_ids)
        return self._deal()

    def set_drained(self, drained: Collection[int]) -> Assignments:
        """Replace the set of sealed segments of which everything is acknowledged."""
        self.drained = set(drained)
        return self._deal()

    def set_layout(self, layout: Layout) -> Assignments:
        """Take a new layout."""
        self._layout = layout
        self.drained &= layout.segments.keys()
        return self._deal()

    def start(self) -> Assignments:
        """Assign segments for the first time, once consumers and attachments are restored."""
        return self._deal()

    # Within

    def _reclaim(self, session: Session) -> None:
        """Grant a new consumer the segments where it is attached already."""
        own = {s for s, owner in self.holdings.releasing.items() if owner == session.name}
        for segment_id in own:
            self.holdings = release(self.holdings, segment_id)
        self.holdings = Holdings(
            {**self.holdings.granted, **dict.fromkeys(own, session.name)}, self.holdings.releasing
        )
        session.taken_up = own
        session.seen = bool(own)

    def _move(self, session: Session, state: SessionState) -> None:
        session.state = _MOVES.move(session.state, state, "Consumer {}", session.name)

    def _deal(self) -> Assignments:
        """Rebalance until no segment that can be free is held back; return what has changed."""
        segments = assignable(self._layout, self.drained, ordered=self.ordered)
        ids = [segment.segment_id for segment in segments]
        while True:
            before = self.holdings.releasing
            self.holdings = rebalance(self.holdings, ids, self.registered())
            self._await_unseen(self.holdings.releasing.keys() - before.keys())
            free = [s for s, owner in self.holdings.releasing.items() if self._is_off(s, owner)]
            if not free:
                return self._tell()
            for segment_id in free:
                self.holdings = release(self.holdings, segment_id)
                self._never_seen.discard(segment_id)

    def _tell(self) -> Assignments:
        changed: dict[str, frozenset[int]] = {}
        for name, session in list(self.sessions.items()):
            if session.state is SessionState.LEFT:
                del self.sessions[name]
                continue
            own = self.holdings.of(name)
            if own != session.assigned:
                session.expected = (session.expected & own) | (own - session.assigned)
                session.expected -= {s for s in own if self._attached[s, name]}
                session.assigned = own
                session.taken_up &= own
                session.closed &= own
                session.finished &= own
                changed[name] = own
        return changed

    def _await_unseen(self, taken: Collection[int]) -> None:
        """Wait for consumers that may be subscribing to a segment just taken from them."""
        for segment_id in taken:
            session = self.sessions.get(self.holdings.releasing[segment_id])
            if (
                session is not None
                and session.state is SessionState.CONNECTED
                and segment_id in session.assigned
                and segment_id not in session.taken_up
            ):
                self._never_seen.add(segment_id)

    def _is_off(self, segment_id: int, owner: str) -> bool:
        """Whether a former owner certainly does not use a segment any more."""
        if self._attached[segment_id, owner]:
            return False
        session = self.sessions.get(owner)
        connected = session is not None and session.state is SessionState.CONNECTED
        return not (connected and segment_id in self._never_seen)
