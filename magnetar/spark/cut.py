"""A cut through a topic's DAG: for each segment that reading has reached, the next entry to read.

Pure.  A segment is *behind* a cut if it is read to its end (`END`) or is an ancestor of a segment
in the cut, and *ahead* of it if it is a descendant of one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from magnetar.layout import Layout, Segment
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.spark.errors import InvalidCut

__all__ = [
    "BEGINNING",
    "END",
    "Cut",
    "Place",
    "ahead_of",
    "ancestors",
    "behind",
    "enter_children",
    "not_retained",
]


class Place(NamedTuple):
    """The next message to read of a segment; places of one segment compare in its order.

    `batch_index` counts the messages of the entry, from 0; an entry without a batch has one.
    """

    ledger_id: int
    entry_id: int
    batch_index: int = 0

    def __str__(self) -> str:
        if self in (BEGINNING, END):
            return "its beginning" if self == BEGINNING else "its end"
        return ":".join(map(str, self if self.batch_index else self[:2]))

    @property
    def position(self) -> Position:
        """The entry."""
        return Position(self.ledger_id, self.entry_id)

    @property
    def entries_end(self) -> Position:
        """The end, exclusive, of the entries that hold all messages before this place."""
        return Position(self.ledger_id, self.entry_id + (self.batch_index > 0))

    @classmethod
    def at(cls, position: Position) -> "Place":
        """The first message of an entry."""
        return cls(position.ledger_id, position.entry_id)


BEGINNING: Final = Place.at(EARLIEST)
"""The place before the very first entry of a segment, retained or not."""
END: Final = Place.at(LATEST)
"""The place after the last entry of a sealed segment."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut: what lies before it has been read, what lies after it has not.  Immutable.

    No segment of a cut is an ancestor of another one, and each segment of the layout is in the cut,
    behind it or ahead of it.  So the segments in `pos` cover the key space exactly once, except
    where retention has deleted one parent of a segment that still waits for the other.

    It stays valid with every later layout: the DAG only grows, and loses its oldest segments,
    parents first.
    """

    topic: str
    name: str
    """Tells apart sources of one query that read the same topic."""
    pos: Mapping[int, Place] = field(default_factory=dict)
    """Places by segment id; the caller must not change the mapping."""
    through: tuple[int, ...] = ()
    """Segments that the step to this cut both entered and finished, so that no `pos` has them.

    When the step is read again, they show that one of them is not retained any more.
    """

    @property
    def unfinished(self) -> dict[int, Place]:
        """The places of `pos` that are not `END`, in order of segment ids."""
        return {i: self.pos[i] for i in sorted(self.pos) if self.pos[i] != END}

    def moved(self, segment_id: int, place: Place) -> "Cut":
        """The cut with one of its segments moved forward; a cut never goes back."""
        assert place >= self.pos[segment_id], (
            f"segment {segment_id} goes back from {self.pos[segment_id]} to {place}"
        )
        return replace(self, pos={**self.pos, segment_id: place})


def ancestors(segment_id: int, layout: Layout) -> set[int]:
    """The parents of a segment, their parents and so on, as far as the layout has them."""
    return _reached([segment_id], layout, lambda segment: segment.parent_ids)


def behind(cut: Cut, layout: Layout) -> set[int]:
    """Segments of the layout that are read: at `END`, or ancestors of one in the cut."""
    found = {i for i, place in cut.pos.items() if place == END and i in layout.segments}
    return found.union(*(ancestors(i, layout) for i in cut.pos))


def ahead_of(cut: Cut, layout: Layout) -> set[int]:
    """Segments of the layout that are descendants of those in the cut."""
    return _reached(cut.pos, layout, lambda segment: segment.child_ids)


def _reached(
    begin: Iterable[int], layout: Layout, next_of: Callable[[Segment], Iterable[int]]
) -> set[int]:
    """Segments of the layout that are reached from `begin` by one step or more."""
    found: set[int] = set()
    to_do = list(begin)
    while to_do:
        segment = layout.segments.get(to_do.pop())
        for segment_id in () if segment is None else next_of(segment):
            if segment_id in layout.segments and segment_id not in found:
                found.add(segment_id)
                to_do.append(segment_id)
    return found


def not_retained(cut: Cut, layout: Layout) -> list[int]:
    """Unfinished segments of the cut that the layout does not have any more.

    Raises `InvalidCut` for a segment that is newer than the layout's newest one.
    """
    newest = max(layout.segments)
    for segment_id in cut.pos:
        if segment_id > newest:
            raise InvalidCut(
                f"The offset names segment {segment_id} of {cut.topic}, whose newest segment is "
                f"{newest}. If the topic was deleted and made anew, begin with a new checkpoint."
            )
    return [i for i in cut.unfinished if i not in layout.segments]


def enter_children(cut: Cut, layout: Layout) -> Cut:
    """Add every child whose parents are all at `END` to a cut, and remove parents that may leave.

    Both children of a split enter at once, the child of a merge when its second parent ends.
    Partitions of a regular topic have no parents, so each enters when it is first seen.
    Raises `InvalidCut` for a cut of which one segment is an ancestor of another.
    """
    _check_unrelated(cut, layout)
    done = behind(cut, layout)
    pos = dict(cut.pos)
    for segment_id, segment in layout.segments.items():
        is_new = segment_id not in pos and segment_id not in done
        # A pruned parent is not waited for.
        parents = layout.segments.keys() & segment.parent_ids
        if is_new and parents <= done:
            pos[segment_id] = BEGINNING
    for segment_id in [i for i, place in pos.items() if place == END]:
        # Pruned, it leaves.  Retained, it stays until all its children are in the cut.
        known = layout.segments.get(segment_id)
        # Without children the layout is older than the end: the children are still to come.
        if known is None or (known.child_ids and pos.keys() >= set(known.child_ids)):
            del pos[segment_id]
    return cut if pos == cut.pos else replace(cut, pos=pos)


def _check_unrelated(cut: Cut, layout: Layout) -> None:
    related = sorted(ahead_of(cut, layout) & cut.pos.keys())
    if related:
        raise InvalidCut(
            f"The offset of {cut.topic} names segments {related} and segments that they come "
            "from; give an offset as it was written."
        )
