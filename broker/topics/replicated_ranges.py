"""Pure: how far a segment of another cluster's scalable topic is replicated here, by ranges.

A source segment has one log, and the messages of one hash in it are one sequence.  What this
cluster has of a hash is a prefix of that.  So one mark for each range of hashes says everything,
whatever the layouts of both clusters were (`../../docs/decisions/replicated-segments.md`).
"""

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Self

from magnetar.protocol.ids import LONG_MAX, Position
from magnetar.protocol.key_hash import KEY_SPACE
from magnetar.protocol.pulsar_pb2 import MessageMetadata, ReplicatedPart, ReplicatedRange

LAST_HASH: Final = KEY_SPACE - 1


class Mark(NamedTuple):
    """What is stored here of a source segment, for one hash.

    All earlier entries of the source, and of this one the messages with a bucket hash up to
    `bucket_hash`.  A part for one of several entry buckets ends at the end of its bucket.
    """

    ledger_id: int
    entry_id: int
    bucket_hash: int = LAST_HASH

    @property
    def position(self) -> Position:
        """The entry."""
        return Position(self.ledger_id, self.entry_id)


NOTHING: Final = Mark(-1, -1)
"""Before the first entry."""
EVERYTHING: Final = Mark(LONG_MAX, LONG_MAX)
"""The mark of a source segment of which nothing more is taken."""


class Run(NamedTuple):
    """Hashes with one mark; both ends are included."""

    hash_start: int
    hash_end: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class ReplicatedRanges:
    """The marks of a range of hashes, as few runs of them as there can be.

    Two are equal exactly if each hash has the same mark in both.
    """

    runs: tuple[Run, ...]
    """In order of hashes, without gaps; neighbours have different marks."""

    @classmethod
    def nothing(cls, hash_start: int, hash_end: int) -> Self:
        """The marks of a range before the first message."""
        return cls((Run(hash_start, hash_end, NOTHING),))

    @property
    def hash_start(self) -> int:
        """The first hash."""
        return self.runs[0].hash_start

    @property
    def hash_end(self) -> int:
        """The last hash, included."""
        return self.runs[-1].hash_end

    def at(self, key_hash: int) -> Mark:
        """The mark of one hash of the range."""
        starts = [run.hash_start for run in self.runs]
        return self.runs[bisect_right(starts, key_hash) - 1].mark

    def within(self, hash_start: int, hash_end: int) -> Iterator[Run]:
        """The runs of a part of the range."""
        for run in self.runs:
            start, end = max(run.hash_start, hash_start), min(run.hash_end, hash_end)
            if start <= end:
                yield Run(start, end, run.mark)

    def raised(self, hash_start: int, hash_end: int, mark: Mark) -> Self:
        """With this mark for these hashes, where theirs is not as high already."""
        runs: list[Run] = []
        for run in self.runs:
            start, end = max(run.hash_start, hash_start), min(run.hash_end, hash_end)
            if start > end or run.mark >= mark:
                _add(runs, run)
                continue
            if run.hash_start < start:
                _add(runs, Run(run.hash_start, start - 1, run.mark))
            _add(runs, Run(start, end, mark))
            if end < run.hash_end:
                _add(runs, Run(end + 1, run.hash_end, run.mark))
        return type(self)(tuple(runs))

    def all_raised(self, mark: Mark) -> Self:
        """With this mark for all hashes, where theirs is not as high already."""
        return self.raised(self.hash_start, self.hash_end, mark)

    def is_past(self, last: Position) -> bool:
        """Whether an entry is stored that a log which ends at `last` never had.

        Then the positions of the log went back, as after its cluster was restored from a backup.
        """
        # A mark before the first entry of a ledger is that of a cursor, and of no entry.
        return any(
            run.mark != EVERYTHING and run.mark.position.entry_id >= 0 and run.mark.position > last
            for run in self.runs
        )

    def cut(self, hash_start: int, hash_end: int) -> Self:
        """The marks of a part of the range: what a child of a split begins with."""
        return type(self)(tuple(self.within(hash_start, hash_end)))

    @classmethod
    def side_by_side(cls, hash_start: int, hash_end: int, parents: Iterable[Self]) -> Self:
        """The marks that a segment of this range begins with: those of its parents (R6).

        One mark for a whole parent would not do.  The highest one of all parents drops what a
        slower parent lacks, and the lowest one stores again what a faster one has.  Hashes that no
        parent has are before the first message.  Raises ValueError for parents that overlap.
        """
        runs: list[Run] = []
        begin = hash_start
        shared = [run for parent in parents for run in parent.within(hash_start, hash_end)]
        for run in sorted(shared):
            if run.hash_start < begin:
                raise ValueError(f"two parents have the hash {run.hash_start}")
            if begin < run.hash_start:
                _add(runs, Run(begin, run.hash_start - 1, NOTHING))
            _add(runs, run)
            begin = run.hash_end + 1
        if begin <= hash_end:
            _add(runs, Run(begin, hash_end, NOTHING))
        return cls(tuple(runs))

    def to_wire(self) -> list[ReplicatedRange]:
        """What PRODUCER_SUCCESS tells a sender of them."""
        ranges = []
        for run in self.runs:
            each = ReplicatedRange(
                hash_start=run.hash_start,
                ledger_id=run.mark.ledger_id,
                entry_id=run.mark.entry_id,
            )
            if run.mark.bucket_hash != LAST_HASH:
                each.bucket_hash = run.mark.bucket_hash
            ranges.append(each)
        return ranges

    @classmethod
    def from_wire(cls, ranges: Iterable[ReplicatedRange], hash_start: int, hash_end: int) -> Self:
        """Decode what PRODUCER_SUCCESS tells of a segment with this range.  Raises ValueError."""
        rows = [
            [
                each.hash_start,
                each.ledger_id,
                each.entry_id,
                *([each.bucket_hash] if each.HasField("bucket_hash") else ()),
            ]
            for each in ranges
        ]
        return cls.from_rows(rows, hash_start, hash_end)

    def to_rows(self) -> list[list[int]]:
        """JSON: for each run its first hash and its mark, whose bucket is left out if whole."""
        rows = []
        for run in self.runs:
            whole = run.mark.bucket_hash == LAST_HASH
            rows.append([run.hash_start, *(run.mark[:2] if whole else run.mark)])
        return rows

    @classmethod
    def from_rows(cls, rows: object, hash_start: int, hash_end: int) -> Self:
        """Decode the rows of a segment with this range.  Raises ValueError."""
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"these are no replicated ranges: {rows!r}")
        decoded = [_row(row) for row in rows]
        starts = [start for start, _ in decoded]
        rising = all(low < high for low, high in pairwise(starts))
        if starts[0] != hash_start or not rising or starts[-1] > hash_end:
            raise ValueError(f"replicated ranges of {hash_start} to {hash_end} start at {starts}")
        runs: list[Run] = []
        ends = [start - 1 for start in starts[1:]] + [hash_end]
        for (start, mark), end in zip(decoded, ends, strict=True):
            _add(runs, Run(start, end, mark))
        return cls(tuple(runs))


def _row(row: object) -> tuple[int, Mark]:
    if not isinstance(row, Sequence) or not all(type(each) is int for each in row):
        raise ValueError(f"a replicated range is three or four numbers, not {row!r}")
    if len(row) not in (3, 4) or max(row) > LONG_MAX or min(row) < -1:
        raise ValueError(f"a replicated range is three or four numbers, not {row!r}")
    start, *mark = row
    return start, Mark(*mark)


def _add(runs: list[Run], run: Run) -> None:
    """Append a run; one with the mark of its neighbour becomes one with it."""
    if runs and runs[-1].mark == run.mark:
        runs[-1] = runs[-1]._replace(hash_end=run.hash_end)
    else:
        runs.append(run)


class PartState(enum.Enum):
    """Whether a part of an entry is stored already."""

    NEW = "nothing of it"
    STORED = "all of it"
    MIXED = "some of it, or something before it is missing"


class SourceSegment(NamedTuple):
    """A segment of another cluster's scalable topic.

    `incarnation` is of the topic there: a topic that was deleted and created anew, or restored
    from a backup, begins its positions anew and has another one.
    """

    cluster: str
    incarnation: int
    segment_id: int


class PartRecord(NamedTuple):
    """What each replicated entry says of itself: the source, and which of its messages are here.

    Those with a hash from `hash_start` to `hash_end` and a bucket hash from `bucket_start` to
    `bucket_end`, all included.  They became durable with the record in one append (R5).
    """

    position: Position
    hash_start: int
    hash_end: int
    bucket_start: int = 0
    bucket_end: int = LAST_HASH

    @property
    def mark(self) -> Mark:
        """The mark of its hashes once it is stored."""
        return Mark(*self.position, self.bucket_end)

    def to_wire(self, source: SourceSegment) -> ReplicatedPart:
        """The record in an entry's metadata; `replicated_from` has the cluster."""
        part = ReplicatedPart(
            incarnation=source.incarnation,
            segment_id=source.segment_id,
            ledger_id=self.position.ledger_id,
            entry_id=self.position.entry_id,
        )
        if (self.hash_start, self.hash_end) != (0, LAST_HASH):
            part.hash_start, part.hash_end = self.hash_start, self.hash_end
        if (self.bucket_start, self.bucket_end) != (0, LAST_HASH):
            part.bucket_start, part.bucket_end = self.bucket_start, self.bucket_end
        return part

    def state(self, ranges: ReplicatedRanges) -> PartState:
        """Whether it is stored (R7)."""
        marks = [run.mark for run in ranges.within(self.hash_start, self.hash_end)]
        if all(mark >= self.mark for mark in marks):
            return PartState.STORED
        if self.bucket_start == 0:
            new = all(mark.position < self.position for mark in marks)
        else:
            before = Mark(*self.position, self.bucket_start - 1)
            new = all(mark == before for mark in marks)
        return PartState.NEW if new else PartState.MIXED


def record_of(metadata: MessageMetadata) -> tuple[SourceSegment, PartRecord] | None:
    """What an entry says of its source; None for one that is not from another cluster's segment.

    Raises ValueError for a record that no sender makes.
    """
    if not (metadata.replicated_from and metadata.HasField("replicated_part")):
        return None
    part = metadata.replicated_part
    hashes, buckets = (part.hash_start, part.hash_end), (part.bucket_start, part.bucket_end)
    numbers = max(part.segment_id, part.ledger_id, part.entry_id)
    # LONG_MAX is that of `EVERYTHING`.
    if numbers >= LONG_MAX or any(
        not start <= end <= LAST_HASH for start, end in (hashes, buckets)
    ):
        raise ValueError(f"this is no record of a replicated part: {part}")
    source = SourceSegment(metadata.replicated_from, part.incarnation, part.segment_id)
    return source, PartRecord(Position(part.ledger_id, part.entry_id), *hashes, *buckets)
