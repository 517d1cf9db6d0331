"""The layout of a scalable topic: a DAG of range segments, as immutable values.  Pure."""

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from http import HTTPStatus
from itertools import pairwise
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from config.bounds import MAX_ENTRY_BUCKETS, MAX_INITIAL_SEGMENTS, MAX_MIGRATED_PARTITIONS
from magnetar.protocol.key_hash import KEY_SPACE
from magnetar.protocol.server_error import InternalError, PeerError, ServerError

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
    """Only ACTIVE segments can be split, merged or rebucketed."""


class SegmentsNotAdjacent(IllegalReshape):
    """Only neighbours in the key space can be merged, at least two."""


class SegmentTooNarrow(IllegalReshape):
    """A range cannot be split into more parts than it has hashes."""


class IllegalBucketCount(IllegalReshape):
    """A segment has at least one entry bucket, and not more than it may have."""


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
    wall-clock milliseconds.  `entry_bucket_splits` are the first hashes of its entry buckets but
    the first (PIP-486); without any the segment is one bucket.
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
    entry_bucket_splits: tuple[int, ...] = ()

    @property
    def entry_buckets(self) -> int:
        """The number of its entry buckets."""
        return len(self.entry_bucket_splits) + 1

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

    @cached_property
    def legacy(self) -> Mapping[str, Segment]:
        """The segments that were ordinary topics or partitions, by the names of those."""
        every = self.segments.values()
        return {s.legacy_topic_name: s for s in every if s.legacy_topic_name is not None}

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


class ReshapeKind(enum.Enum):
    """The kind of a change that seals segments and creates others."""

    SPLIT = enum.auto()
    MERGE = enum.auto()
    REBUCKET = enum.auto()
    MIGRATE = enum.auto()


@dataclass(frozen=True, slots=True)
class Reshape:
    """A layout after a split, merge, rebucket or migration: what it sealed, and what it created."""

    layout: Layout
    parents: tuple[Segment, ...]
    children: tuple[Segment, ...]

    @property
    def kind(self) -> ReshapeKind:
        """The kind of the change."""
        if any(parent.legacy_topic_name is not None for parent in self.parents):
            return ReshapeKind.MIGRATE
        if any(len(child.parent_ids) > 1 for child in self.children):
            return ReshapeKind.MERGE
        split = any(len(parent.child_ids) > 1 for parent in self.parents)
        return ReshapeKind.SPLIT if split else ReshapeKind.REBUCKET


def even_ranges(count: int) -> list[tuple[int, int]]:
    """Divide the key space into `count` ranges of equal width; the last takes the rest."""
    width = KEY_SPACE // count
    starts = range(0, count * width, width)
    return [(start, start + width - 1) for start in starts[:-1]] + [(starts[-1], KEY_SPACE - 1)]


def even_bucket_splits(count: int) -> tuple[int, ...]:
    """The first hashes of all buckets but the first, of `count` even ones (PIP-486).

    Raises `IllegalBucketCount`.
    """
    require_bucket_count(count, MAX_ENTRY_BUCKETS)
    return tuple(number * KEY_SPACE // count for number in range(1, count))


def require_bucket_count(count: int, most: int) -> None:
    """Raise `IllegalBucketCount` unless a segment may have `count` entry buckets."""
    if not 1 <= count <= most:
        raise IllegalBucketCount(
            f"A segment cannot have {count} entry buckets: give it 1 to {most}."
        )


def initial(count: int, *, now_ms: int, bucket_budget: int = 1) -> Layout:
    """The layout of a new topic: `count` segments of equal width, at epoch 0.

    `bucket_budget` is the number of entry buckets that they have together; each has at least one,
    and at most MAX_ENTRY_BUCKETS.
    Raises `IllegalSegmentCount`.
    """
    if not 1 <= count <= MAX_INITIAL_SEGMENTS:
        raise IllegalSegmentCount(
            f"A topic cannot start with {count} segments: ask for 1 to {MAX_INITIAL_SEGMENTS}."
        )
    splits = even_bucket_splits(_buckets_of_each(count, bucket_budget))
    segments = [
        Segment(
            number,
            start,
            end,
            created_at_epoch=0,
            created_at_ms=now_ms,
            entry_bucket_splits=splits,
        )
        for number, (start, end) in enumerate(even_ranges(count))
    ]
    return _layout(0, count, segments)


def migrated(legacy_topics: Sequence[str], *, now_ms: int, bucket_budget: int = 1) -> Reshape:
    """The layout of a topic that was an ordinary one, of one topic or these partitions in order.

    Each is a SEALED segment of the whole key space, as partitions are chosen by another rule than
    ranges, and a parent of every ACTIVE segment; of these there are as many, of equal width.  The
    epoch is 1: that of the layout which clients of an ordinary topic get is 0.  `bucket_budget` as
    in `initial`.  Raises `IllegalSegmentCount`.
    """
    count = len(legacy_topics)
    if not 1 <= count <= MAX_MIGRATED_PARTITIONS:
        raise IllegalSegmentCount(
            f"A topic of {count} partitions cannot be migrated: {MAX_MIGRATED_PARTITIONS} are the "
            "most. Create a scalable topic beside it, and copy the messages."
        )
    parents = tuple(
        Segment(number, 0, KEY_SPACE - 1, 0, now_ms, legacy_topic_name=name)
        for number, name in enumerate(legacy_topics)
    )
    # Before it there was no layout: the ranges of these do not cover each hash once.
    before = Layout(0, count, {parent.segment_id: parent for parent in parents})
    buckets = _buckets_of_each(count, bucket_budget)
    children = [_Child(parents, span, buckets) for span in even_ranges(count)]
    return _reshape(before, children, now_ms)


def _buckets_of_each(segments: int, budget: int) -> int:
    """The entry buckets of each of the segments that share a budget of them."""
    return min(max(1, budget // segments), MAX_ENTRY_BUCKETS)


def split(layout: Layout, segment_id: int, *, now_ms: int, parts: int = 2) -> Reshape:
    """Split an ACTIVE segment into `parts` of equal width, give or take a hash.

    Of two, the lower one is the larger if the width is odd.  The parts share its entry buckets;
    each has at least one.  Halves have `buckets // 2` each, as in Apache Pulsar, so one of an odd
    number is lost.  More parts, which Pulsar does not make, lose none: the lower ones have one
    more.
    Raises `UnknownSegment`, `SegmentNotActive`, `SegmentTooNarrow`.
    """
    if parts < 2:
        raise ValueError(f"a segment was to be split into {parts}")
    parent = _active(layout, segment_id)
    width = parent.hash_end - parent.hash_start + 1
    if width < parts:
        raise SegmentTooNarrow(
            f"Segment {segment_id} holds the hashes {parent.hash_start} to {parent.hash_end} and "
            f"cannot be split into {parts}: split another one."
        )
    starts = [parent.hash_start + -(-width * number // parts) for number in range(parts)]
    ends = [start - 1 for start in starts[1:]] + [parent.hash_end]
    buckets = _shared_out(parent.entry_buckets, parts)
    children = [
        _Child((parent,), (start, end), count)
        for start, end, count in zip(starts, ends, buckets, strict=True)
    ]
    return _reshape(layout, children, now_ms)


def _shared_out(buckets: int, parts: int) -> list[int]:
    """The entry buckets of each part of a segment that is split; see `split`."""
    each, rest = divmod(buckets, parts)
    if parts == 2:
        rest = 0
    return [max(1, each + (number < rest)) for number in range(parts)]


def merge(
    layout: Layout,
    segment_ids: Collection[int],
    *,
    now_ms: int,
    max_buckets: int = MAX_ENTRY_BUCKETS,
) -> Reshape:
    """Merge ACTIVE neighbours, two or more in any order, into one segment with all their buckets.

    It gets at most `max_buckets` of them.

    Raises `UnknownSegment`, `SegmentNotActive`, `SegmentsNotAdjacent`.
    """
    parents = tuple(sorted((_active(layout, each) for each in segment_ids), key=_range_key))
    touching = all(low.hash_end + 1 == high.hash_start for low, high in pairwise(parents))
    if len(parents) < 2 or not touching:
        raise SegmentsNotAdjacent(
            f"Segments {_listed(segment_ids)} are not neighbours in the key space: "
            f"merge two or more whose ranges touch ({_neighbours(layout)})."
        )
    buckets = min(sum(parent.entry_buckets for parent in parents), max_buckets)
    span = (parents[0].hash_start, parents[-1].hash_end)
    return _reshape(layout, [_Child(parents, span, buckets)], now_ms)


def rebucket(
    layout: Layout, segment_ids: Collection[int], bucket_count: int, *, now_ms: int
) -> Reshape:
    """Replace ACTIVE segments, each by one of the same range with `bucket_count` entry buckets.

    Raises `UnknownSegment`, `SegmentNotActive`, `IllegalBucketCount`.
    """
    parents = sorted((_active(layout, each) for each in segment_ids), key=_range_key)
    same = [parent.segment_id for parent in parents if parent.entry_buckets == bucket_count]
    if same:
        raise IllegalBucketCount(
            f"Segment {_listed(same)} has {bucket_count} entry buckets already: ask for another "
            "number."
        )
    children = [
        _Child((parent,), (parent.hash_start, parent.hash_end), bucket_count) for parent in parents
    ]
    return _reshape(layout, children, now_ms)


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
    if expected != KEY_SPACE:
        yield f"ACTIVE ranges end at hash {expected - 1}"
    for segment_id, segment in layout.segments.items():
        if segment_id != segment.segment_id or segment_id >= layout.next_segment_id:
            yield f"segment {segment_id} has a wrong id"
        splits = segment.entry_bucket_splits
        if any(low >= high for low, high in pairwise((0, *splits, KEY_SPACE))):
            yield f"the entry buckets of segment {segment_id} do not rise: {splits}"
        if segment.active == bool(segment.child_ids):
            yield f"{segment.state.value} segment {segment_id} has children {segment.child_ids}"
        if segment.active != (segment.sealed_at_epoch == NEVER):
            yield f"segment {segment_id} is {segment.state.value} at the wrong epoch"
        if max(segment.created_at_epoch, segment.sealed_at_epoch) > layout.epoch:
            yield f"segment {segment_id} is newer than the layout"
    yield from _broken_links(layout)


def _broken_links(layout: Layout) -> Iterator[str]:
    # All at once: after a migration each of many parents has each of many children.
    every = layout.segments.values()
    named_by_child = {(parent, each.segment_id) for each in every for parent in each.parent_ids}
    named_by_parent = {(each.segment_id, child) for each in every for child in each.child_ids}
    for parent, child in sorted(named_by_child ^ named_by_parent):
        yield f"segment {child} and its parent {parent} do not agree"
    for parent, child in sorted(named_by_child):
        if parent >= child:
            yield f"segment {child} is older than its parent {parent}"


def _active(layout: Layout, segment_id: int) -> Segment:
    segment = layout.segment(segment_id)
    if not segment.active:
        raise SegmentNotActive(
            f"Segment {segment_id} was sealed at epoch {segment.sealed_at_epoch} and cannot be "
            f"changed: name an ACTIVE one ({_listed(s.segment_id for s in layout.active)})."
        )
    return segment


class _Child(NamedTuple):
    """A segment to be made: its parents, its range and the number of its entry buckets."""

    parents: tuple[Segment, ...]
    span: tuple[int, int]
    buckets: int


def _reshape(layout: Layout, made: Sequence[_Child], now_ms: int) -> Reshape:
    """The layout after these children took the place of their parents."""
    epoch = layout.epoch + 1
    children = tuple(
        Segment(
            segment_id=layout.next_segment_id + number,
            hash_start=child.span[0],
            hash_end=child.span[1],
            created_at_epoch=epoch,
            created_at_ms=now_ms,
            parent_ids=tuple(sorted(parent.segment_id for parent in child.parents)),
            entry_bucket_splits=even_bucket_splits(child.buckets),
        )
        for number, child in enumerate(made)
    )
    child_ids: dict[int, list[int]] = {}
    for segment in children:
        for parent_id in segment.parent_ids:
            child_ids.setdefault(parent_id, []).append(segment.segment_id)
    parents = {parent.segment_id: parent for child in made for parent in child.parents}
    sealed = tuple(
        replace(
            parent,
            state=SegmentState.SEALED,
            child_ids=tuple(child_ids[parent.segment_id]),
            sealed_at_epoch=epoch,
            sealed_at_ms=now_ms,
        )
        for parent in parents.values()
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
