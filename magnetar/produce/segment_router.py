"""`SegmentRouter`, which chooses the segment of each message while the layout changes.  Pure."""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from magnetar.layout import Layout, Segment
from magnetar.produce.outgoing import OutgoingMessage
from magnetar.protocol.state_table import StateTable


class SegmentState(enum.Enum):
    """The state of a segment in the router."""

    HELD = "held"
    """It will take messages when every segment that had its keys is drained."""
    TAKING = "taking"
    """It takes messages."""
    DRAINING = "draining"
    """It takes no more messages; those it got are being sent, or come back."""
    DRAINED = "drained"
    """None of its messages is on its way any more."""


_S = SegmentState
_MOVES: Final[StateTable[SegmentState]] = StateTable(
    {
        _S.HELD: frozenset({_S.TAKING, _S.DRAINED}),
        _S.TAKING: frozenset({_S.DRAINING}),
        _S.DRAINING: frozenset({_S.DRAINED}),
        _S.DRAINED: frozenset({_S.TAKING}),
    },
    defect=RuntimeError,
)
Placed = tuple[Segment, OutgoingMessage]
"""A message and the segment that is to send it."""


class _KnownSegment:
    """One segment, as in the newest layout that had it, and its state."""

    __slots__ = ("segment", "state")

    def __init__(self, segment: Segment, state: SegmentState) -> None:
        self.segment = segment
        self.state = state


class SegmentRouter:
    """Chooses the segment of each message while splits and merges change the layout.

    A message for a segment that does not take messages is held.  When the segment begins to take,
    the held messages go there in order, before newer ones.  So the messages of one key are stored
    in the order in which they were sent.

    A segment drains when a layout no longer has it active, or when its broker ends it before that;
    then its messages wait for that layout.  Messages without key go in turn to the segments that
    take messages, a batch at a time.
    """

    def __init__(self, layout: Layout, turn: int = 0, run: int = 1) -> None:
        """Messages without key begin at segment `turn`; `run` of them go to a segment in turn."""
        self._layout = layout
        self._known = {s.segment_id: _KnownSegment(s, _S.TAKING) for s in layout.active}
        self._held: deque[OutgoingMessage] = deque()
        self._taking: list[Segment] = list(layout.active)
        self._only: Segment | None = None
        self._turn = turn
        self._run = run
        self._left = run
        self._choose_only()

    @property
    def layout(self) -> Layout:
        """The newest layout."""
        return self._layout

    @property
    def held(self) -> Sequence[OutgoingMessage]:
        """The messages that wait for a segment, in order."""
        return self._held

    @property
    def is_switching(self) -> bool:
        """Whether an active segment of the layout does not take messages."""
        return len(self._taking) != len(self._layout.active)

    def state_of(self, segment_id: int) -> SegmentState | None:
        """The state of a segment; None if it is unknown or forgotten."""
        known = self._known.get(segment_id)
        return None if known is None else known.state

    # Messages

    def place(self, message: OutgoingMessage) -> Segment | None:
        """The segment for a new message; None if the message is held."""
        if self._only is not None:
            return self._only
        segment = self._of(message)
        if segment is None:
            self._held.append(message)
        return segment

    def prune(self) -> list[OutgoingMessage]:
        """Remove and return held messages for which no caller waits."""
        unwanted = [message for message in self._held if message.outcome.done()]
        if unwanted:
            self._held = deque(m for m in self._held if not m.outcome.done())
        return unwanted

    @property
    def awaits_layout(self) -> bool:
        """Whether a broker has ended a segment that is active in the layout."""
        return any(
            self._known[segment.segment_id].state in (_S.DRAINED, _S.DRAINING)
            for segment in self._layout.active
        )

    def take_stranded(self) -> list[OutgoingMessage]:
        """Remove and return the messages held for segments that ended but are active in the layout.

        Such a segment takes messages again, so that the next message asks its broker again.
        """
        stranded: list[OutgoingMessage] = []
        still: deque[OutgoingMessage] = deque()
        for message in self._held:
            (stranded if self._is_stranded(message) else still).append(message)
        self._held = still
        for segment in self._layout.active:
            if self._known[segment.segment_id].state is _S.DRAINED:
                self._move(segment.segment_id, _S.TAKING)
        self._settle()
        return stranded

    def _is_stranded(self, message: OutgoingMessage) -> bool:
        if message.key is None:
            return not self._taking and self.awaits_layout
        segment = self._layout.of_key(message.key)
        return self._known[segment.segment_id].state is _S.DRAINED

    def _of(self, message: OutgoingMessage) -> Segment | None:
        if message.key is None:
            return self._next_taking()
        segment = self._layout.of_key(message.key)
        return segment if self._known[segment.segment_id].state is _S.TAKING else None

    def _next_taking(self) -> Segment | None:
        taking = self._taking
        if not taking:
            return None
        if self._left == 0:
            self._turn += 1
            self._left = self._run
        self._left -= 1
        return taking[self._turn % len(taking)]

    # Changes of segments

    def change_layout(self, layout: Layout) -> list[Segment]:
        """Take a newer layout; returns the segments to drain.

        Call `take_released` afterwards, and after each `drained`.
        """
        self._layout = layout
        for segment in layout.segments.values():
            known = self._known.get(segment.segment_id)
            if known is not None:
                known.segment = segment
            elif segment.active:
                self._known[segment.segment_id] = _KnownSegment(segment, _S.HELD)
        active = {segment.segment_id for segment in layout.active}
        draining = [
            known.segment
            for segment_id, known in self._known.items()
            if segment_id not in active and known.state is _S.TAKING
        ]
        for segment in draining:
            self._move(segment.segment_id, _S.DRAINING)
        self._settle()
        return draining

    def restart(self, layout: Layout, unsent: Iterable[OutgoingMessage]) -> None:
        """Begin again with the layout of a topic that was deleted and created again.

        `unsent` are the messages that the old segments did not store, in order; held ones come
        after them.  Call `take_released` afterwards.
        """
        self._layout = layout
        self._known = {s.segment_id: _KnownSegment(s, _S.TAKING) for s in layout.active}
        self._hold_again(unsent)
        self._settle()

    def ended(self, segment_id: int) -> bool:
        """Note that its broker accepts no more messages; returns whether to drain it now."""
        known = self._known.get(segment_id)
        if known is None or known.state is not _S.TAKING:
            return False
        self._move(segment_id, _S.DRAINING)
        self._settle()
        return True

    def drained(self, segment_id: int, unsent: Iterable[OutgoingMessage]) -> None:
        """Note that all messages of a segment are stored, except for `unsent`, in order."""
        self._move(segment_id, _S.DRAINED)
        self._hold_again(unsent)
        self._settle()

    def take_released(self) -> list[Placed]:
        """Remove and return the held messages that can be sent now, in order."""
        if not self._held:
            return []
        placed: list[Placed] = []
        still: deque[OutgoingMessage] = deque()
        for message in self._held:
            segment = self._of(message)
            if segment is None:
                still.append(message)
            else:
                placed.append((segment, message))
        self._held = still
        return placed

    def _hold_again(self, unsent: Iterable[OutgoingMessage]) -> None:
        """Hold messages that a segment did not store; all that are held stay in sending order."""
        before = len(self._held)
        self._held.extendleft(reversed(list(unsent)))
        if len(self._held) > before > 0:
            # A merged segment gets the messages of several, and sequence ids have to rise there.
            self._held = deque(sorted(self._held, key=lambda message: message.place))

    def _move(self, segment_id: int, to: SegmentState) -> None:
        known = self._known[segment_id]
        known.state = _MOVES.move(known.state, to, "Segment {}", segment_id)

    def _settle(self) -> None:
        """Move held segments as far as possible, and forget drained ones."""
        active = {segment.segment_id for segment in self._layout.active}
        moved = True
        while moved:
            moved = False
            for segment_id, known in list(self._known.items()):
                if known.state is _S.HELD and not self._is_fed(known.segment, active):
                    self._move(segment_id, _S.TAKING if segment_id in active else _S.DRAINED)
                    moved = True
        for segment_id, known in list(self._known.items()):
            if known.state is _S.DRAINED and segment_id not in active:
                del self._known[segment_id]
        self._taking = [
            segment
            for segment in self._layout.active
            if self._known[segment.segment_id].state is _S.TAKING
        ]
        self._choose_only()

    def _choose_only(self) -> None:
        """Set the segment that takes every message, if there is one."""
        alone = len(self._taking) == 1 and len(self._layout.active) == 1
        self._only = self._taking[0] if alone else None

    def _is_fed(self, segment: Segment, active: set[int]) -> bool:
        """Whether an earlier segment may still get messages of its keys."""
        # `_known` is in the order of layouts, so segments that had its keys come before it.
        for segment_id, other in self._known.items():
            if segment_id == segment.segment_id:
                return False
            on_its_way = other.state is _S.DRAINING or (
                other.state is _S.HELD and segment_id not in active
            )
            if on_its_way and _had_keys_of(other.segment, segment):
                return True
        return False


def _had_keys_of(before: Segment, after: Segment) -> bool:
    """Whether `before` may have had a key of `after`."""
    return (
        before.legacy  # The range of a partition does not bound its keys.
        or before.segment_id in after.parent_ids
        or (before.hash_start <= after.hash_end and after.hash_start <= before.hash_end)
    )
