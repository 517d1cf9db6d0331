"""The layout of a scalable topic: a DAG of range segments, as immutable values.  Pure."""

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from http import HTTPStatus
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar

from config.bounds import MAX_INITIAL_SEGMENTS
from magnetar.protocol.server_error import InternalError, PeerError, ServerError

KEYSPACE = 65536
"""Hashes run from 0 to one less than this."""

NEVER = -1
"""`sealed_at_epoch` and `sealed_at_ms` of a segment that is not sealed."""


class UnknownSegment(PeerError):
    """The topic has no segment of that id."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class IllegalReshape(PeerError):
    """The segments exist, but they cannot be changed that way."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class SegmentNotActive(IllegalReshape):
    """Only ACTIVE segments can be split or merged."""


class SegmentsNotAdjacent(IllegalReshape):
    """Only two neighbours in the key space can be merged."""


class SegmentTooNarrow(IllegalReshape):
    """A range of one hash cannot be split."""


class IllegalSegmentCount(IllegalReshape):
    """A topic starts with at least one segment, and not with more than it may have."""


class CorruptLayout(InternalError):
    """A layout is broken: it is not what `Layout` says of every layout."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class SegmentState(enum.Enum):
    """An ACTIVE segment takes new messages; a SEALED one is only read."""

    ACTIVE = "ACTIVE"
    SEALED = "SEALED"


@dataclass(frozen=True, slots=True)
class Segment:
    """One node of the DAG.

    The hash range is inclusive at both ends, as in segment names and on the wire.  Times are
    wall-clock milliseconds.
    """

    segment_id: int
    hash_start: int
    hash_end: int
    created_at_epoch: int
    created_at_ms: int
    state: SegmentState = SegmentState.ACTIVE
    parent_ids: tuple[int, ...] = ()
    child_ids: tuple[int, ...] = ()
    sealed_at_epoch: int = NEVER
    sealed_at_ms: int = NEVER
    legacy_topic_name: str | None = None

    @property
    def active(self) -> bool:
        """Whether it takes new messages."""
        return self.state is SegmentState.ACTIVE

    @property
    def range_key(self) -> tuple[int, int, int]:
        """The key of Pulsar's order of segments: by range, then id."""
        return (self.hash_start, self.hash_end, self.segment_id)

    def covers(self, key_hash: int) -> bool:
        """Whether the range contains a hash."""
        return self.hash_start <= key_hash <= self.hash_end


@dataclass(frozen=True)
class Layout:
    """The whole DAG at one epoch.  `segments` has them by id, in the order of ids.

    The ranges of the ACTIVE segments cover each hash of 0..65535 exactly once.  Every change raises
    the epoch; ids rise and are never used again.  Links are mutual: a child names its parents and a
    parent its children, as long as both are in the DAG.  ACTIVE segments have no children, SEALED
    ones do.  `verify` checks all of this after every change.
    """

    epoch: int
    next_segment_id: int
    segments: Mapping[int, Segment]

    @cached_property
    def active(self) -> tuple[Segment, ...]:
        """The ACTIVE segments in hash order."""
        return tuple(sorted((s for s in self.segments.values() if s.active), key=_range_key))

    @cached_property
    def sealed(self) -> tuple[Segment, ...]:
        """The SEALED segments in id order."""
        return tuple(s for s in self.segments.values() if not s.active)

    def segment(self, segment_id: int) -> Segment:
        """The segment of that id.  Raises `UnknownSegment`."""
        found = self.segments.get(segment_id)
        if found is None:
            raise UnknownSegment(
                f"The topic has no segment {segment_id}: it has {_listed(self.segments)}. "
                "Read the layout again and name one of those."
            )
        return found

    def route(self, key_hash: int) -> Segment:
        """The ACTIVE segment whose range contains a 16-bit hash."""
        for segment in self.active:
            if segment.covers(key_hash):
                return segment
        raise CorruptLayout(
            f"No ACTIVE segment holds the hash {key_hash} at epoch {self.epoch}: "
            "restore the topic's record from a backup."
        )

    def ancestors(self, segment_id: int) -> frozenset[int]:
        """Ids of all ancestors of a segment that are still in the DAG."""
        return self._closure(segment_id, lambda segment: segment.parent_ids)

    def descendants(self, segment_id: int) -> frozenset[int]:
        """Ids of all descendants of a segment."""
        return self._closure(segment_id, lambda segment: segment.child_ids)

    def _closure(
        self, segment_id: int, links: Callable[[Segment], tuple[int, ...]]
    ) -> frozenset[int]:
        seen: set[int] = set()
        waiting = list(links(self.segment(segment_id)))
        while waiting:
            found = waiting.pop()
            if found not in seen:
                seen.add(found)
                waiting.extend(links(self.segments[found]))
        return frozenset(seen)


@dataclass(frozen=True, slots=True)
class Reshape:
    """A layout after a split or merge, the segments it sealed and those it created."""

    layout: Layout
    parents: tuple[Segment, ...]
    children: tuple[Segment, ...]


def even_ranges(count: int) -> list[tuple[int, int]]:
    """Divide the key space into `count` ranges of equal width; the last takes the rest."""
    width = KEYSPACE // count
    starts = range(0, count * width, width)
    return [(start, start + width - 1) for start in starts[:-1]] + [(starts[-1], KEYSPACE - 1)]


def initial(count: int, *, now_ms: int) -> Layout:
    """The layout of a new topic: `count` segments of equal width, at epoch 0.

    Raises `IllegalSegmentCount`.
    """
    if not 1 <= count <= MAX_INITIAL_SEGMENTS:
        raise IllegalSegmentCount(
            f"A topic cannot start with {count} segments: ask for 1 to {MAX_INITIAL_SEGMENTS}."
        )
    segments = [
        Segment(number, start, end, created_at_epoch=0, created_at_ms=now_ms)
        for number, (start, end) in enumerate(even_ranges(count))
    ]
    return _layout(0, count, segments)


def split(layout: Layout, segment_id: int, *, now_ms: int) -> Reshape:
    """Split an ACTIVE segment into halves; the lower one is the larger if the width is odd.

    Raises `UnknownSegment`, `SegmentNotActive`, `SegmentTooNarrow`.
    """
    parent = _active(layout, segment_id)
    if parent.hash_start == parent.hash_end:
        raise SegmentTooNarrow(
            f"Segment {segment_id} holds the single hash {parent.hash_start} and cannot be split: "
            "split another one."
        )
    middle = parent.hash_start + (parent.hash_end - parent.hash_start) // 2
    return _reshape(
        layout,
        (parent,),
        ((parent.hash_start, middle), (middle + 1, parent.hash_end)),
        now_ms,
    )


def merge(layout: Layout, first_id: int, second_id: int, *, now_ms: int) -> Reshape:
    """Merge two ACTIVE neighbours, given in either order, into one segment.

    Raises `UnknownSegment`, `SegmentNotActive`, `SegmentsNotAdjacent`.
    """
    pair = (_active(layout, first_id), _active(layout, second_id))
    lower, upper = sorted(pair, key=_range_key)
    if lower.hash_end + 1 != upper.hash_start:
        raise SegmentsNotAdjacent(
            f"Segments {first_id} and {second_id} are not neighbours in the key space: "
            f"merge two whose ranges touch ({_neighbours(layout)})."
        )
    return _reshape(layout, (lower, upper), ((lower.hash_start, upper.hash_end),), now_ms)


def prune(layout: Layout, segment_ids: Collection[int]) -> Layout:
    """Drop SEALED segments, parents before or together with their children.

    Raises `UnknownSegment`, `IllegalReshape`.
    """
    gone = set(segment_ids)
    for segment_id in gone:
        segment = layout.segment(segment_id)
        above = set(segment.parent_ids) - gone
        if segment.active or above:
            why = "it is ACTIVE" if segment.active else f"its parents {_listed(above)} are there"
            raise IllegalReshape(
                f"Segment {segment_id} cannot be pruned because {why}: drain and prune in order."
            )
    kept = (
        replace(
            segment,
            parent_ids=tuple(p for p in segment.parent_ids if p not in gone),
            child_ids=tuple(c for c in segment.child_ids if c not in gone),
        )
        for segment in layout.segments.values()
        if segment.segment_id not in gone
    )
    return _layout(layout.epoch + 1, layout.next_segment_id, kept)


def verify(layout: Layout) -> Layout:
    """Return the layout if it is as `Layout` says.  Raises `CorruptLayout`."""
    problem = next(_problems(layout), None)
    if problem is not None:
        raise CorruptLayout(
            f"The layout of epoch {layout.epoch} is broken: {problem}. "
            "Restore the topic's record from a backup."
        )
    return layout


def _problems(layout: Layout) -> Iterator[str]:
    expected = 0
    for segment in layout.active:
        if segment.hash_start != expected or segment.hash_end < segment.hash_start:
            yield f"ACTIVE ranges have a hole or overlap at hash {expected}"
        expected = segment.hash_end + 1
    if expected != KEYSPACE:
        yield f"ACTIVE ranges end at hash {expected - 1}"
    for segment_id, segment in layout.segments.items():
        if segment_id != segment.segment_id or segment_id >= layout.next_segment_id:
            yield f"segment {segment_id} has a wrong id"
        if segment.active == bool(segment.child_ids):
            yield f"{segment.state.value} segment {segment_id} has children {segment.child_ids}"
        if segment.active != (segment.sealed_at_epoch == NEVER):
            yield f"segment {segment_id} is {segment.state.value} at the wrong epoch"
        if max(segment.created_at_epoch, segment.sealed_at_epoch) > layout.epoch:
            yield f"segment {segment_id} is newer than the layout"
        yield from _broken_links(layout, segment)


def _broken_links(layout: Layout, segment: Segment) -> Iterator[str]:
    own = segment.segment_id
    for parent_id in segment.parent_ids:
        parent = layout.segments.get(parent_id)
        if parent is None or own not in parent.child_ids or parent_id >= own:
            yield f"segment {own} and its parent {parent_id} do not agree"
    for child_id in segment.child_ids:
        child = layout.segments.get(child_id)
        if child is None or own not in child.parent_ids:
            yield f"segment {own} and its child {child_id} do not agree"


def _active(layout: Layout, segment_id: int) -> Segment:
    segment = layout.segment(segment_id)
    if not segment.active:
        raise SegmentNotActive(
            f"Segment {segment_id} was sealed at epoch {segment.sealed_at_epoch} and cannot be "
            f"changed: name an ACTIVE one ({_listed(s.segment_id for s in layout.active)})."
        )
    return segment


def _reshape(
    layout: Layout,
    parents: tuple[Segment, ...],
    ranges: tuple[tuple[int, int], ...],
    now_ms: int,
) -> Reshape:
    epoch = layout.epoch + 1
    parent_ids = tuple(sorted(parent.segment_id for parent in parents))
    children = tuple(
        Segment(
            segment_id=layout.next_segment_id + number,
            hash_start=start,
            hash_end=end,
            created_at_epoch=epoch,
            created_at_ms=now_ms,
            parent_ids=parent_ids,
        )
        for number, (start, end) in enumerate(ranges)
    )
    sealed = tuple(
        replace(
            parent,
            state=SegmentState.SEALED,
            child_ids=tuple(child.segment_id for child in children),
            sealed_at_epoch=epoch,
            sealed_at_ms=now_ms,
        )
        for parent in parents
    )
    segments = {**layout.segments, **{s.segment_id: s for s in (*sealed, *children)}}
    after = _layout(epoch, layout.next_segment_id + len(children), segments.values())
    return Reshape(after, sealed, children)


def _layout(epoch: int, next_segment_id: int, segments: Iterable[Segment]) -> Layout:
    ordered = sorted(segments, key=lambda segment: segment.segment_id)
    by_id = MappingProxyType({segment.segment_id: segment for segment in ordered})
    return verify(Layout(epoch, next_segment_id, by_id))


def _neighbours(layout: Layout) -> str:
    ids = [segment.segment_id for segment in layout.active]
    pairs = [f"{lower} and {upper}" for lower, upper in pairwise(ids)]
    return ", ".join(pairs[:4]) + (", ..." if len(pairs) > 4 else "") or "there are none"


def _range_key(segment: Segment) -> tuple[int, int, int]:
    return segment.range_key


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(str(segment_id) for segment_id in sorted(ids)) or "none"
