"""The layout of a topic as a client sees it, and the segment of each key.  Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from magnetar.errors import BrokerFailed
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import KEY_SPACE, key_hash
from magnetar.protocol.names import SegmentName, parse_topic_name

LAST_HASH: Final = KEY_SPACE - 1
_NON_NEGATIVE: Final = 0x7FFFFFFF
SegmentIdentity = tuple[int, str, int]
"""See `Segment.identity`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment: the hashes `hash_start` to `hash_end`, both included.

    `topic` is the name for PRODUCER and SUBSCRIBE: the segment's own, or that of the regular topic
    or partition for which it stands (`legacy`).  `bucket_splits` are the first hashes of its entry
    buckets, without that of the first; an empty tuple means one bucket.
    """

    segment_id: int
    hash_start: int
    hash_end: int
    active: bool
    parent_ids: tuple[int, ...]
    child_ids: tuple[int, ...]
    topic: str
    legacy: bool = False
    bucket_splits: tuple[int, ...] = ()
    created_at_ms: int = 0

    @property
    def identity(self) -> SegmentIdentity:
        """The identity of the segment: no other segment has the same."""
        # A topic that was deleted and created again counts its ids from 0 again.
        return self.segment_id, self.topic, 0 if self.legacy else self.created_at_ms

    def of_bucket(self, bucket_hash: int) -> int:
        """The index of the entry bucket that holds a hash (see `bucket_hash_of`)."""
        return bisect_right(self.bucket_splits, bucket_hash)

    def bucket_range(self, index: int) -> tuple[int, int]:
        """The first and last hash of an entry bucket."""
        splits = self.bucket_splits
        start = splits[index - 1] if index else 0
        return start, splits[index] - 1 if index < len(splits) else LAST_HASH


class Layout:
    """One version of a topic's layout, immutable: all segments not yet pruned, active and sealed.

    A newer layout has a higher epoch.  Raises `BrokerFailed` if the ranges of the active segments
    do not cover the key space, each hash once.
    """

    __slots__ = ("_partitions", "_starts", "active", "epoch", "sealed", "segments")

    def __init__(self, epoch: int, segments: Iterable[Segment]) -> None:
        every = tuple(segments)
        by_id = {segment.segment_id: segment for segment in every}
        if len(by_id) != len(every):
            raise _broken(epoch, "two segments with one id")
        self.epoch: Final = epoch
        self.segments: Final[Mapping[int, Segment]] = MappingProxyType(by_id)
        """Every segment by its id."""
        self.active: Final = tuple(
            sorted((s for s in every if s.active), key=lambda segment: segment.hash_start)
        )
        """The segments that take messages, in order of hashes."""
        self.sealed: Final = tuple(by_id[i] for i in sorted(by_id) if not by_id[i].active)
        """The segments that are only read, in order of ids."""
        self._starts = tuple(segment.hash_start for segment in self.active)
        self._partitions: tuple[Segment, ...] = ()
        if not self.active:
            raise _broken(epoch, "no active segment")
        if all(segment.legacy for segment in self.active):
            by_partition = sorted(self.active, key=lambda segment: segment.segment_id)
            self._partitions = tuple(by_partition)
        else:
            _check_cover(epoch, self.active)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.epoch == other.epoch and self.segments == other.segments

    def __hash__(self) -> int:
        return hash((self.epoch, tuple(self.segments)))

    def __repr__(self) -> str:
        active = [segment.segment_id for segment in self.active]
        return f"Layout(epoch={self.epoch}, active={active}, of={len(self.segments)})"

    def may_follow(self, last: "Layout") -> bool:
        """Whether this layout is newer than `last`, or the same."""
        if self.epoch >= last.epoch:
            # Epochs begin anew with a topic: if every segment is older than those of `last`, this
            # is the layout of a topic that was deleted since.
            return not (last._is_newer(self) and min(last.segments) <= min(self.segments))
        # A broker that does not know the last change yet still has the lower epoch.  If every
        # segment is newer than those of `last`, the topic was deleted and created again.
        return self._is_newer(last)

    def is_anew_after(self, last: "Layout") -> bool:
        """Whether the topic was deleted and created again between `last` and this layout."""
        return self.epoch < last.epoch or any(
            segment.identity != last.segments.get(segment_id, segment).identity
            for segment_id, segment in self.segments.items()
        )

    def _is_newer(self, other: "Layout") -> bool:
        """Whether each of its segments was created after all segments of `other`."""
        known = max(segment.created_at_ms for segment in other.segments.values())
        return all(segment.created_at_ms > known for segment in self.segments.values())

    def of_key(self, key: bytes) -> Segment:
        """The active segment that messages with this key go to."""
        active = self.active
        if len(active) == 1:
            return active[0]
        if self._partitions:  # Partitions of a regular topic keep the rule of partitions.
            return self._partitions[(key_hash(key) & _NON_NEGATIVE) % len(active)]
        return active[bisect_right(self._starts, key_hash(key) >> 16) - 1]


def bucket_hash_of(sticky_key: bytes | None) -> int:
    """The low half of the key's hash, which chooses an entry bucket; 0 without a key.

    `sticky_key` is the ordering key of a message, else its key.
    """
    return 0 if sticky_key is None else key_hash(sticky_key) & LAST_HASH


def layout_of(dag: pb.ScalableTopicDAG, topic: str) -> Layout:
    """The layout in a broker's answer on the topic `topic` (a `topic://` name).

    Raises `BrokerFailed` for an invalid layout, and `InvalidTopicName`.
    """
    parent = parse_topic_name(topic)
    segments: list[Segment] = []
    for info in dag.segments:
        start, end = info.hash_start, info.hash_end
        if not start <= end <= LAST_HASH:
            raise _broken(dag.epoch, f"segment {info.segment_id} of hashes {start} to {end}")
        legacy = info.legacy_topic_name
        name = legacy or str(SegmentName(parent, start, end, info.segment_id))
        segments.append(
            Segment(
                segment_id=info.segment_id,
                hash_start=start,
                hash_end=end,
                active=info.state == pb.ACTIVE,
                parent_ids=tuple(info.parent_ids),
                child_ids=tuple(info.child_ids),
                topic=name,
                legacy=bool(legacy),
                bucket_splits=_splits(dag.epoch, info),
                created_at_ms=info.created_at_ms,
            )
        )
    return Layout(dag.epoch, segments)


def _splits(epoch: int, info: pb.SegmentInfoProto) -> tuple[int, ...]:
    splits = tuple(info.entry_bucket_splits)
    before = (0, *splits)
    if any(not low < high <= LAST_HASH for low, high in zip(before, splits, strict=False)):
        raise _broken(epoch, f"segment {info.segment_id} with entry buckets out of order")
    return splits


def _check_cover(epoch: int, active: tuple[Segment, ...]) -> None:
    expected = 0
    for segment in active:
        if segment.hash_start != expected:
            raise _broken(
                epoch, f"a hole or an overlap at hash {min(expected, segment.hash_start)}"
            )
        expected = segment.hash_end + 1
    if expected != KEY_SPACE:
        raise _broken(epoch, f"a hole at hash {expected}")


def _broken(epoch: int, defect: str) -> BrokerFailed:
    return BrokerFailed(
        f"The broker sent a layout of epoch {epoch} with {defect}; it is asked again. "
        "If this goes on, check the topic's record at the broker."
    )
