"""Pure: which messages of an entry go to which segment of another cluster.

A segment here and those there have independent ranges.  An entry goes as it is (verbatim) where it
is for one segment and one entry bucket there.  Else it goes in parts, in the order of its messages
(R3 of `../../docs/decisions/replicated-segments.md`).
"""

import enum
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

from broker.topics.replicated_ranges import LAST_HASH, PartRecord, ReplicatedRanges
from magnetar.protocol.ids import Position


class RemoteSegment(NamedTuple):
    """An ACTIVE segment of the other cluster; both ends of its range are included.

    `bucket_splits` are the first bucket hashes of its entry buckets but the first.
    """

    segment_id: int
    hash_start: int
    hash_end: int
    bucket_splits: tuple[int, ...] = ()

    def bucket_end(self, bucket_hash: int) -> int:
        """The last bucket hash of the entry bucket of this one."""
        number = bisect_right(self.bucket_splits, bucket_hash)
        ends = self.bucket_splits
        return ends[number] - 1 if number < len(ends) else LAST_HASH


@dataclass(frozen=True)
class RemoteLayout:
    """The ACTIVE segments of the other cluster's topic at one epoch, in the order of hashes."""

    epoch: int
    segments: tuple[RemoteSegment, ...]

    @cached_property
    def _starts(self) -> list[int]:
        return [segment.hash_start for segment in self.segments]

    @cached_property
    def ids(self) -> frozenset[int]:
        """The ids of the segments."""
        return frozenset(segment.segment_id for segment in self.segments)

    def route(self, key_hash: int) -> RemoteSegment:
        """The segment whose range contains a hash."""
        return self.segments[bisect_right(self._starts, key_hash) - 1]


class MessageHashes(NamedTuple):
    """The hashes by which producers of the other cluster choose segment and entry bucket."""

    segment: int
    bucket: int


class SourceEntry(NamedTuple):
    """An entry as the plan sees it.

    `hashes` has a pair for each message of a batch that was opened, and one pair for what cannot be
    divided: a single message, a chunk, an encrypted batch.  None: a batch that was not opened.
    `buckets` are the least and the greatest bucket hash of a batch that is stamped with them.
    `earlier` are the entries of the other chunks of a chunked message, whose last chunk this is.
    """

    position: Position
    hashes: Sequence[MessageHashes] | None
    buckets: tuple[int, int] | None = None
    earlier: tuple[Position, ...] = ()


class Part(NamedTuple):
    """Messages of one entry for one remote segment: those of these indexes, None for all."""

    segment_id: int
    record: PartRecord
    indexes: tuple[int, ...] | None


class Unplanned(enum.Enum):
    """Why an entry has no plan yet."""

    OPEN = "it has to be opened"


class Unattached(NamedTuple):
    """The plan needs to know what these segments have: attach there first (R7)."""

    segment_ids: frozenset[int]


def hash_without_key(source: bytes, hash_start: int, hash_end: int) -> int:
    """The hash that chooses the segment of a message without key, within its segment's range here.

    It spreads such messages over the remote segments, and is the same when they are sent again.
    `source` is what is sent together: the position of the entry, or the uuid of a chunked message.
    """
    digest = int.from_bytes(blake2b(source, digest_size=8).digest())
    return hash_start + digest % (hash_end - hash_start + 1)


def plan(
    entry: SourceEntry,
    own_range: tuple[int, int] | None,
    layout: RemoteLayout,
    stored: Mapping[int, ReplicatedRanges],
) -> list[Part] | Unattached | Unplanned:
    """The parts of an entry that are not stored there yet, in the order in which they are sent.

    `own_range` has the hashes of the segment here; None if clients here choose segments by another
    hash than those there.  `stored` says what the attached segments there have of it.
    """
    if entry.hashes is None:
        return _plan_unopened(entry, own_range, layout, stored)
    wanted: dict[int, list[int]] = {}
    targets: dict[int, RemoteSegment] = {}
    for index, hashes in enumerate(entry.hashes):
        target = layout.route(hashes.segment)
        wanted.setdefault(target.segment_id, []).append(index)
        targets[target.segment_id] = target
    missing = frozenset(wanted.keys() - stored.keys())
    if missing:
        return Unattached(missing)
    parts: list[Part] = []
    for segment_id in sorted(wanted):
        parts += _parts(entry, targets[segment_id], wanted[segment_id], stored[segment_id])
    return parts


def _plan_unopened(
    entry: SourceEntry,
    own_range: tuple[int, int] | None,
    layout: RemoteLayout,
    stored: Mapping[int, ReplicatedRanges],
) -> list[Part] | Unattached | Unplanned:
    if own_range is None:
        return Unplanned.OPEN
    target = layout.route(own_range[0])
    if own_range[1] > target.hash_end or not _in_one_bucket(entry, target):
        return Unplanned.OPEN
    ranges = stored.get(target.segment_id)
    if ranges is None:
        return Unattached(frozenset((target.segment_id,)))
    marks = [run.mark for run in ranges.within(*own_range)]
    record = PartRecord(entry.position, target.hash_start, target.hash_end)
    if all(mark >= record.mark for mark in marks):
        return []
    if any(run.mark.position >= entry.position for run in ranges.runs):
        return Unplanned.OPEN  # some of it is stored
    return [Part(target.segment_id, record, None)]


def _in_one_bucket(entry: SourceEntry, target: RemoteSegment) -> bool:
    if not target.bucket_splits:
        return True
    if entry.buckets is None:
        return False
    least, greatest = entry.buckets
    return greatest <= target.bucket_end(least)


class _Gap(NamedTuple):
    """Hashes that lack the messages of an entry from a bucket hash on."""

    hash_start: int
    hash_end: int
    bucket_start: int


def _parts(
    entry: SourceEntry, target: RemoteSegment, indexes: Sequence[int], ranges: ReplicatedRanges
) -> list[Part]:
    """The parts for one remote segment, by entry bucket.

    Those of a gap tile it, so that once all are stored its hashes have one mark again.
    """
    of_messages = entry.hashes or ()
    parts: list[Part] = []
    for gap in _gaps(entry.position, ranges):
        by_bucket: dict[int, list[int]] = {}
        for index in indexes:
            hashes = of_messages[index]
            inside = gap.hash_start <= hashes.segment <= gap.hash_end
            if inside and hashes.bucket >= gap.bucket_start:
                by_bucket.setdefault(target.bucket_end(hashes.bucket), []).append(index)
        begin = gap.bucket_start
        ends = sorted(by_bucket)
        for end in ends:
            last = LAST_HASH if end == ends[-1] else end
            record = PartRecord(entry.position, gap.hash_start, gap.hash_end, begin, last)
            chosen = by_bucket[end]
            whole = len(chosen) == len(of_messages)
            parts.append(Part(target.segment_id, record, None if whole else tuple(chosen)))
            begin = end + 1
    return parts


def _gaps(position: Position, ranges: ReplicatedRanges) -> list[_Gap]:
    gaps: list[_Gap] = []
    for run in ranges.runs:
        mark = run.mark
        if mark.position > position or (mark.position == position and mark[2] == LAST_HASH):
            continue
        begin = mark.bucket_hash + 1 if mark.position == position else 0
        before = gaps[-1] if gaps else None
        if before is not None and before[1:] == (run.hash_start - 1, begin):
            gaps[-1] = before._replace(hash_end=run.hash_end)
        else:
            gaps.append(_Gap(run.hash_start, run.hash_end, begin))
    return gaps
