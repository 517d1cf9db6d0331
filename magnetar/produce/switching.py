"""Which segment takes a message, over splits, merges and whatever else changes a layout.  Pure.

Pure: layouts, messages and endings in; messages with their segments out.  Rules:

    TAKING    takes messages
    DRAINING  takes no more; what it was given is being sent and receipted, or comes back
    DRAINED   nothing of it is on its way any more
    HELD      will take messages when every segment that had its keys is drained

- A segment drains when a layout no longer has it active, and when its broker ends it before (then
  its messages wait for the layout that says so).  A drained one takes again only if no such layout
  comes: what waited for it fails then, and with the next message its broker is asked again.
- Where a topic was deleted and made anew, ids begin anew: nothing of before counts any more.
- A message for a segment that does not take is held.  What comes back unsent was given earlier than
  whatever is held of the same keys, so it goes before that.  When a segment begins to take, what is
  held for it goes there in order, before anything newer.  So messages of one key are stored in the
  order in which they were sent.
- Messages without key go in turn to the segments that take, a batch at a time.
"""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from magnetar.layout import Layout, Segment
from magnetar.produce.outgoing import Outgoing
from magnetar.protocol.state_table import StateTable


class SegmentState(enum.Enum):
    """Whether a segment takes messages."""

    HELD = "held"
    TAKING = "taking"
    DRAINING = "draining"
    DRAINED = "drained"


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
Placed = tuple[Segment, Outgoing]
"""A message and the segment that is to send it."""


class _Known:
    """What is known of one segment; `segment` as the newest layout that had it says."""

    __slots__ = ("segment", "state")

    def __init__(self, segment: Segment, state: SegmentState) -> None:
        self.segment = segment
        self.state = state


class Switching:
    """Chooses the segment of each message while splits and merges change the layout."""

    def __init__(self, layout: Layout, turn: int = 0, run: int = 1) -> None:
        """`turn` is where messages without key begin; `run` how many go to one segment in turn."""
        self._layout = layout
        self._known = {s.segment_id: _Known(s, _S.TAKING) for s in layout.active}
        self._held: deque[Outgoing] = deque()
        self._taking: list[Segment] = list(layout.active)
        self._only: Segment | None = None
        self._turn = turn
        self._run = run
        self._left = run
        self._choose_only()

    @property
    def layout(self) -> Layout:
        """The newest one."""
        return self._layout

    @property
    def held(self) -> Sequence[Outgoing]:
        """What waits for a segment, in order."""
        return self._held

    @property
    def is_switching(self) -> bool:
        """Whether some segment of the layout does not take."""
        return len(self._taking) != len(self._layout.active)

    def state_of(self, segment_id: int) -> SegmentState | None:
        """Whether that segment takes messages; None if it was never heard of, or is forgotten."""
        known = self._known.get(segment_id)
        return None if known is None else known.state

    # Messages

    def place(self, message: Outgoing) -> Segment | None:
        """Where a new message goes; None: it is held."""
        if self._only is not None:
            return self._only
        segment = self._of(message)
        if segment is None:
            self._held.append(message)
        return segment

    def prune(self) -> list[Outgoing]:
        """Take out of the hold what nobody waits for any more."""
        unwanted = [message for message in self._held if message.outcome.done()]
        if unwanted:
            self._held = deque(m for m in self._held if not m.outcome.done())
        return unwanted

    @property
    def awaits_layout(self) -> bool:
        """Whether a segment that the layout has active was ended by its broker."""
        return any(
            self._known[segment.segment_id].state in (_S.DRAINED, _S.DRAINING)
            for segment in self._layout.active
        )

    def take_stranded(self) -> list[Outgoing]:
        """What is held for a segment that has ended while the layout has it active still.

        Such a segment takes again: nothing of it is on its way or held any more.
        """
        stranded: list[Outgoing] = []
        still: deque[Outgoing] = deque()
        for message in self._held:
            (stranded if self._is_stranded(message) else still).append(message)
        self._held = still
        for segment in self._layout.active:
            if self._known[segment.segment_id].state is _S.DRAINED:
                self._move(segment.segment_id, _S.TAKING)
        self._settle()
        return stranded

    def _is_stranded(self, message: Outgoing) -> bool:
        if message.key is None:
            return not self._taking and self.awaits_layout
        segment = self._layout.of_key(message.key)
        return self._known[segment.segment_id].state is _S.DRAINED

    def _of(self, message: Outgoing) -> Segment | None:
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

    # What happens to segments

    def changed(self, layout: Layout) -> list[Segment]:
        """A newer layout: returns the segments that are to be drained.

        Call `released` afterwards, and whenever one of them is `drained`.
        """
        self._layout = layout
        for segment in layout.segments.values():
            known = self._known.get(segment.segment_id)
            if known is not None:
                known.segment = segment
            elif segment.active:
                self._known[segment.segment_id] = _Known(segment, _S.HELD)
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

    def made_anew(self, layout: Layout, unsent: Iterable[Outgoing]) -> None:
        """The layout of a topic that was deleted and made anew.  Call `released` afterwards.

        `unsent` is what its segments had and did not store, in order; what is held comes after it.
        """
        self._layout = layout
        self._known = {s.segment_id: _Known(s, _S.TAKING) for s in layout.active}
        self._held.extendleft(reversed(list(unsent)))
        self._settle()

    def ended(self, segment_id: int) -> bool:
        """Its broker takes no more messages for it.  Returns whether it is to be drained now."""
        known = self._known.get(segment_id)
        if known is None or known.state is not _S.TAKING:
            return False
        self._move(segment_id, _S.DRAINING)
        self._settle()
        return True

    def drained(self, segment_id: int, unsent: Iterable[Outgoing]) -> None:
        """All that it was given is stored, but for these, in their order."""
        self._move(segment_id, _S.DRAINED)
        self._held.extendleft(reversed(list(unsent)))
        self._settle()

    def released(self) -> list[Placed]:
        """What was held and goes on now, in order."""
        if not self._held:
            return []
        placed: list[Placed] = []
        still: deque[Outgoing] = deque()
        for message in self._held:
            segment = self._of(message)
            if segment is None:
                still.append(message)
            else:
                placed.append((segment, message))
        self._held = still
        return placed

    def _move(self, segment_id: int, to: SegmentState) -> None:
        known = self._known[segment_id]
        known.state = _MOVES.move(known.state, to, "Segment {}", segment_id)

    def _settle(self) -> None:
        """Move what is held as far as it may go, and forget what is over."""
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
        """The segment of every message, if there is one."""
        alone = len(self._taking) == 1 and len(self._layout.active) == 1
        self._only = self._taking[0] if alone else None

    def _is_fed(self, segment: Segment, active: set[int]) -> bool:
        """Whether messages of its keys may be on their way elsewhere, or are held for there.

        Segments are known in the order of layouts, so those that had its keys come before it.
        """
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
    """Whether a key of `after` may have been one of `before`, whose range may not say it."""
    return (
        before.legacy
        or before.segment_id in after.parent_ids
        or (before.hash_start <= after.hash_end and after.hash_start <= before.hash_end)
    )
