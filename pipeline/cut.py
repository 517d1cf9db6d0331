"""A cut through a topic's DAG: of each segment that reading has come to, what is to be read next.

Pure.  Rules:

- Nothing before the cut is read again, everything behind it is.  A segment is *behind* us if it is
  at its `END` or an ancestor of one in the cut, and *ahead* if it is a descendant.
- Segments of a cut are never ancestors of each other, and each segment of the layout is in the cut,
  behind it or ahead of it; so the ranges in the cut cover the key space exactly once, save where
  retention has taken one parent of a segment that still waits for the other.
- A segment that is sealed and read to its last entry goes to `END` and stays, while another parent
  of its child is unfinished.
- A child enters at its `BEGINNING` when all its parents are at `END` (`entered`): of a split both
  children at once, of a merge the child when the second parent ends.  The parents leave then.
- The DAG grows, and loses what is oldest, parents first, of which it then forgets that they were
  parents; so a cut goes with each later layout.  What is at `END` and pruned leaves.
- Partitions of a regular topic have no relatives: each enters when it is first seen.
- A cut never goes back: `moved` refuses.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from magnetar.layout import Layout, Segment
from pipeline.errors import InvalidCut
from protocol.ids import EARLIEST, LATEST, Position

__all__ = [
    "BEGINNING",
    "END",
    "Cut",
    "Place",
    "ahead_of",
    "ancestors",
    "behind",
    "entered",
    "not_retained",
]


class Place(NamedTuple):
    """What is to be read next of a segment; places of one segment compare in its order.

    `batch_index` counts messages of the entry, from 0; what is no batch has one message.
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
        """The end, exclusive, of the entries in which everything before it lies."""
        return Position(self.ledger_id, self.entry_id + (self.batch_index > 0))

    @classmethod
    def at(cls, position: Position) -> "Place":
        """The first message of an entry."""
        return cls(position.ledger_id, position.entry_id)


BEGINNING: Final = Place.at(EARLIEST)
"""The first entry that there ever was, retained or not."""
END: Final = Place.at(LATEST)
"""Of a sealed segment, after its last entry."""


@dataclass(frozen=True, slots=True)
class Cut:
    """See the module's rules.  Never changes; `pos` must not be changed by whoever gave it."""

    topic: str
    name: str
    """Tells apart sources of one query that read the same topic."""
    pos: Mapping[int, Place] = field(default_factory=dict)
    """By segment id."""
    through: tuple[int, ...] = ()
    """Segments that the step to this cut entered and finished, and that are in no `pos`: with them
    it can be seen that one is not retained any more when the step is read again."""

    @property
    def unfinished(self) -> dict[int, Place]:
        """Of `pos`, what is not at its `END`, in order of ids."""
        return {i: self.pos[i] for i in sorted(self.pos) if self.pos[i] != END}

    def moved(self, segment_id: int, place: Place) -> "Cut":
        """The cut with another place of one of its segments."""
        assert place >= self.pos[segment_id], (
            f"segment {segment_id} goes back from {self.pos[segment_id]} to {place}"
        )
        return replace(self, pos={**self.pos, segment_id: place})


def ancestors(segment_id: int, layout: Layout) -> set[int]:
    """Its parents, their parents and so on, as far as the layout has them."""
    return _reached([segment_id], layout, lambda segment: segment.parent_ids)


def behind(cut: Cut, layout: Layout) -> set[int]:
    """Segments of the layout that are read: at their end, or before one that is in the cut."""
    found = {i for i, place in cut.pos.items() if place == END and i in layout.segments}
    return found.union(*(ancestors(i, layout) for i in cut.pos))


def ahead_of(cut: Cut, layout: Layout) -> set[int]:
    """Segments of the layout that come after those in the cut."""
    return _reached(cut.pos, layout, lambda segment: segment.child_ids)


def _reached(
    begin: Iterable[int], layout: Layout, next_of: Callable[[Segment], Iterable[int]]
) -> set[int]:
    """Segments of the layout that are reached from some by one step or more."""
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
    """Unfinished segments of the cut that the layout has no more.

    Raises `InvalidCut` for one that the layout does not have yet.
    """
    newest = max(layout.segments)
    for segment_id in cut.pos:
        if segment_id > newest:
            raise InvalidCut(
                f"The offset names segment {segment_id} of {cut.topic}, whose newest segment is "
                f"{newest}. If the topic was deleted and made anew, begin with a new checkpoint."
            )
    return [i for i in cut.unfinished if i not in layout.segments]


def entered(cut: Cut, layout: Layout) -> Cut:
    """The cut with every segment that is due, without those that need not stay.

    Raises `InvalidCut` for a cut of which one segment is an ancestor of another.
    """
    _check_unrelated(cut, layout)
    done = behind(cut, layout)
    pos = dict(cut.pos)
    for segment_id, segment in layout.segments.items():
        is_new = segment_id not in pos and segment_id not in done
        parents = layout.segments.keys() & segment.parent_ids
        if is_new and parents <= done:
            pos[segment_id] = BEGINNING
    for segment_id in [i for i, place in pos.items() if place == END]:
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
