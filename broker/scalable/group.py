"""Pure: the ordered consumers of one subscription, from events to assignments."""

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from broker.scalable.assignment import (
    NO_SEGMENTS,
    Holdings,
    assignable,
    by_consumer,
    granting,
    rebalance,
    release,
    still_attached,
)
from broker.scalable.assignment_record import StoredAssignment
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
    shared: frozenset[int] = frozenset()
    """Those of `assigned` that it shares with other consumers."""
    can_share: bool = False
    """Whether its client can share segments."""
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
"""Consumer to its complete new set of segments; only those whose set, or a mode in it, changed."""


class ConsumerGroup:
    """The consumers of one subscription and the segments that each one is assigned.

    A consumer's segments are known from two sides: those granted here, and those where a segment
    consumer named `<consumer>-seg-<id>` is attached.  A segment that is taken from a consumer is
    free when its segment consumer has detached; if that never attached, when the consumer is gone
    or `give_up_waiting` was called.

    Methods that change something return the complete new assignments of the consumers whose set of
    segments has changed.  Those that end in `_needs_deal` return whether `deal` has to be called.
    So one call can serve many events: the cost of `deal` grows with the segments of the topic, and
    so does the number of events when a consumer comes or goes.  `ordered` is True for STREAM
    subscriptions.
    """

    def __init__(self, layout: Layout, *, ordered: bool) -> None:
        self.ordered = ordered
        self.sessions: dict[str, Session] = {}
        self.holdings = Holdings()
        self.drained: set[int] = set()
        self.shareable: set[int] = set()
        """Segments that consumers may share, as far as their messages are concerned."""
        self._layout = layout
        self._attached: Counter[tuple[int, str]] = Counter()
        self._never_seen: set[tuple[int, str]] = set()
        self._from_record: set[tuple[int, str]] = set()
        """Segments that consumers have, or have yet to release, by the record alone: nothing was
        seen of these consumers since this controller began."""
        self._dealt: Holdings | None = None
        """The holdings after the last deal."""
        self._dealt_segments = 0
        """The number of segments in the last deal."""

    # Consumers

    def restore(self, names: Collection[str], stored: StoredAssignment | None) -> None:
        """Add consumers that were registered before this controller, DISCONNECTED.

        Each has what `stored` says, if an assignment was stored.  Segments that were taken from a
        consumer, which may still be attached there, are free when that consumer has come back
        or is given up.  Segments of others than `names` are free.
        """
        can_share = stored is not None and stored.can_share
        for name in names:
            self.sessions[name] = Session(name, SessionState.DISCONNECTED, can_share=can_share)
        if stored is None:
            return
        granted = _by_segment(stored.granted, names)
        releasing = _by_segment(stored.releasing, names)
        alone = {s for s, owners in granted.items() if len(owners) == 1 and s not in releasing}
        granted = {s: o for s, o in granted.items() if s in stored.shared or s in alone}
        plan = _by_segment(stored.planned, names)
        shared = stored.shared & (granted.keys() | releasing.keys())
        self.holdings = Holdings(granted, releasing, shared, plan)
        # What was shared stays so, until it is known that it must not.
        self.shareable = {s for s, owners in plan.items() if len(owners) > 1}
        used = (*granted.items(), *releasing.items())
        self._from_record = {(s, name) for s, owners in used for name in owners}

    def to_store(self) -> StoredAssignment:
        """The assignment, as it is stored."""
        nothing = dict.fromkeys(self.registered(), NO_SEGMENTS)
        return StoredAssignment(
            {**nothing, **by_consumer(self.holdings.granted)},
            by_consumer(self.holdings.releasing),
            {**nothing, **by_consumer(self.holdings.plan)},
            self.holdings.shared,
            self.can_share,
        )

    def connect(self, name: str, *, can_share: bool = False) -> Assignments:
        """Register a consumer, anew or again; its own set is always in the result.

        `can_share`: its client can share segments.
        """
        session = self.sessions.get(name)
        if session is None:
            session = Session(name, SessionState.CONNECTED, can_share=can_share)
            self.sessions[name] = session
            self._reclaim(session)
        else:
            self._move(session, SessionState.CONNECTED)
            session.can_share = can_share
            session.closed.clear()
            session.finished.clear()
            session.taken_up = {s for s in session.taken_up if self._attached[s, name]}
            session.expected = set(session.assigned - session.taken_up)
            self._never_seen -= {each for each in self._never_seen if each[1] == name}
            self._from_record -= {each for each in self._from_record if each[1] == name}
        changed = self.deal()
        return {**changed, name: session.assigned}

    def disconnect(self, name: str) -> Assignments:
        """Note a lost connection: the consumer keeps its segments, and is not waited for."""
        session = self.sessions.get(name)
        if session is None or session.state is not SessionState.CONNECTED:
            return {}
        self._move(session, SessionState.DISCONNECTED)
        return self.deal()

    def leave(self, name: str) -> Assignments:
        """Give the segments of a consumer that left, or was gone too long, to the others."""
        session = self.sessions.get(name)
        if session is None:
            return {}
        self._move(session, SessionState.LEFT)
        return self.deal()

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
        self._from_record.discard((segment_id, name))
        owners = self.holdings.owners(segment_id)
        if session is not None and name in owners:
            session.closed.discard(segment_id)
            session.finished.discard(segment_id)
            session.expected.discard(segment_id)
            session.taken_up.add(segment_id)
            return
        former = self.holdings.former(segment_id)
        if name in former:
            self._never_seen.discard((segment_id, name))
            return
        # Of others it is only known from the record that they have, or had, the segment.
        unseen = {each for each in owners | former if (segment_id, each) in self._from_record}
        if session is not None and session.state is SessionState.DISCONNECTED:
            if unseen == owners | former:
                # It had the segment before this controller came, and goes on there.
                self._grant_attached(segment_id, session)
        elif not (owners or former):
            self.holdings = still_attached(self.holdings, segment_id, name)

    def detached(self, segment_id: int, name: str, *, by_command: bool) -> Assignments:
        """Note that the segment consumer of `name` detached from a segment."""
        if self.detached_needs_deal(segment_id, name, by_command=by_command):
            return self.deal()
        return {}

    def detached_needs_deal(self, segment_id: int, name: str, *, by_command: bool) -> bool:
        """As `detached`, without the deal: only a segment that was taken away becomes free."""
        self._attached[segment_id, name] -= 1
        if self._attached[segment_id, name] > 0:
            return False
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
        return name in self.holdings.former(segment_id) or self.holdings is not self._dealt

    def lost_sight_needs_deal(self, segment_id: int, name: str) -> bool:
        """Note that the segment consumer of `name` is missing, for an unknown reason.

        The consumer has not left, but has to attach there again.  Returns whether to call `deal`.
        """
        session = self.sessions.get(name)
        if session is not None and self._attached[segment_id, name] <= 1:
            session.taken_up.discard(segment_id)
            if segment_id in session.assigned:
                session.expected.add(segment_id)
        return self.detached_needs_deal(segment_id, name, by_command=False)

    def set_shareable(self, shareable: Collection[int]) -> Assignments:
        """Replace the set of segments that consumers may share, as far as messages go."""
        return self.deal() if self.shareable_needs_deal(shareable) else {}

    def shareable_needs_deal(self, shareable: Collection[int]) -> bool:
        """As `set_shareable`, without the deal: it changes nothing while each consumer has one."""
        self.shareable = set(shareable)
        if self.holdings is not self._dealt:
            return True
        return len(self.sessions) > self._dealt_segments and self.can_share

    @property
    def can_share(self) -> bool:
        """Whether the clients of all consumers can share segments, by entry buckets (PIP-486)."""
        sharing = [s.can_share for s in self.sessions.values() if s.state is not SessionState.LEFT]
        return self.ordered and bool(sharing) and all(sharing)

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
        to_release = self.holdings.to_release(name)
        return frozenset(each for each in to_release if self._attached[each, name])

    def awaited(self) -> frozenset[tuple[int, str]]:
        """Return segments, with the consumers that may attach there yet though they lost them.

        The subscribe of a connected one may be under way.  One that has not come back after a
        restart may be attached there before it learns that the segment was taken from it.
        """
        recorded = {(s, o) for s, o in self._from_record if o in self.holdings.former(s)}
        return frozenset(self._never_seen | recorded)

    def give_up_waiting(self, awaited: Collection[tuple[int, str]]) -> Assignments:
        """Wait no longer for these of `awaited()`."""
        self._never_seen -= frozenset(awaited)
        self._from_record -= frozenset(awaited)
        return self.deal()

    def set_drained(self, drained: Collection[int]) -> Assignments:
        """Replace the set of sealed segments of which everything is acknowledged."""
        self.drained = set(drained)
        return self.deal()

    def set_layout(self, layout: Layout) -> Assignments:
        """Take a new layout."""
        self._layout = layout
        self.drained &= layout.segments.keys()
        self.shareable &= layout.segments.keys()
        return self.deal()

    def deal(self) -> Assignments:
        """Assign the segments anew, as far as they are free or can be taken from a consumer.

        Call it first when consumers and attachments are restored.
        """
        changed = self._deal()
        self._dealt = self.holdings
        return changed

    # Within

    def _grant_attached(self, segment_id: int, session: Session) -> None:
        """Grant a segment to a consumer that is attached there."""
        if segment_id not in self.holdings.shared:
            # What the record says of others is older.
            self._from_record -= {each for each in self._from_record if each[0] == segment_id}
            for name in self.holdings.former(segment_id):
                self.holdings = release(self.holdings, segment_id, name)
        self.holdings = granting(self.holdings, segment_id, session.name)
        session.taken_up.add(segment_id)

    def _reclaim(self, session: Session) -> None:
        """Grant a new consumer the segments where it is attached already."""
        own = {s for s, former in self.holdings.releasing.items() if former == {session.name}}
        for segment_id in own:
            self.holdings = granting(self.holdings, segment_id, session.name)
        session.taken_up = own
        session.seen = bool(own)

    def _move(self, session: Session, state: SessionState) -> None:
        session.state = _MOVES.move(session.state, state, "Consumer {}", session.name)

    def _deal(self) -> Assignments:
        """Rebalance until no segment that can be free is held back; return what has changed."""
        segments = assignable(self._layout, self.drained, ordered=self.ordered)
        ids = [segment.segment_id for segment in segments]
        self._dealt_segments = len(ids)
        places: dict[int, int] = {}
        if self.can_share:
            shareable = (each for each in segments if each.segment_id in self.shareable)
            places = {each.segment_id: each.entry_buckets for each in shareable}
        names = self.registered()
        while True:
            before = self.holdings
            self.holdings = rebalance(before, ids, names, places)
            taken = _pairs(self.holdings.releasing) - _pairs(before.releasing)
            given = _pairs(self.holdings.granted) - _pairs(before.granted)
            self._from_record -= taken | given
            self._await_unseen(taken)
            free = [each for each in _pairs(self.holdings.releasing) if self._is_off(*each)]
            if not free:
                return self._tell()
            for segment_id, name in free:
                self.holdings = release(self.holdings, segment_id, name)
                self._never_seen.discard((segment_id, name))
                self._from_record.discard((segment_id, name))

    def _tell(self) -> Assignments:
        changed: dict[str, frozenset[int]] = {}
        granted = by_consumer(self.holdings.granted)
        for name, session in list(self.sessions.items()):
            if session.state is SessionState.LEFT:
                del self.sessions[name]
                continue
            own = granted.get(name, NO_SEGMENTS)
            shared = own & self.holdings.shared
            if own != session.assigned or shared != session.shared:
                # A segment in another mode is subscribed to anew.
                kept = (own & session.assigned) - (shared ^ session.shared)
                attached = {s for s in own - kept if self._attached[s, name]}
                session.expected = (session.expected & kept) | (own - kept - attached)
                session.assigned, session.shared = own, shared
                session.taken_up = (session.taken_up & kept) | attached
                session.closed &= kept
                session.finished &= kept
                changed[name] = own
        return changed

    def _await_unseen(self, taken: Collection[tuple[int, str]]) -> None:
        """Wait for consumers that may be subscribing to a segment just taken from them."""
        for segment_id, name in taken:
            session = self.sessions.get(name)
            if (
                session is not None
                and session.state is SessionState.CONNECTED
                and segment_id in session.assigned
                and segment_id not in session.taken_up
            ):
                self._never_seen.add((segment_id, name))

    def _is_off(self, segment_id: int, name: str) -> bool:
        """Whether a former consumer certainly does not use a segment any more."""
        if self._attached[segment_id, name]:
            return False
        session = self.sessions.get(name)
        if session is None or session.state is SessionState.LEFT:
            return True
        if session.state is SessionState.CONNECTED:
            return (segment_id, name) not in self._never_seen
        # After a restart its client may be attached there again before it registers again.
        return (segment_id, name) not in self._from_record


def _pairs(consumers: Mapping[int, frozenset[str]]) -> set[tuple[int, str]]:
    return {(segment_id, name) for segment_id, names in consumers.items() for name in names}


def _by_segment(
    segments: Mapping[str, frozenset[int]], names: Collection[str]
) -> dict[int, frozenset[str]]:
    found: dict[int, set[str]] = {}
    for name in segments.keys() & set(names):
        for segment_id in segments[name]:
            found.setdefault(segment_id, set()).add(name)
    return {segment_id: frozenset(owners) for segment_id, owners in found.items()}
