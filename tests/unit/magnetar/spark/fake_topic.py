"""A topic made of lists: it splits, merges, hides and forgets, and answers what `Reading` asks."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magnetar.layout import Layout, Segment
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import KEY_SPACE
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import PlanLimits, RangePlan

ENTRIES_OF_LEDGER = 3


class Row(NamedTuple):
    """One message: which of its key, and which of those."""

    key: int
    number: int


@dataclass
class FakeEntry:
    where: Position
    rows: list[Row]
    publish_time_ms: int


@dataclass
class FakeSegment:
    segment_id: int
    hash_start: int
    hash_end: int
    first_ledger: int
    parents: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    entries: list[FakeEntry] = field(default_factory=list)
    hidden_from: int | None = None
    """Of the first entry that may not be read yet, the index."""
    trimmed: int = 0

    @property
    def active(self) -> bool:
        return not self.children

    @property
    def topic(self) -> str:
        return f"segment://{self.segment_id}"

    @property
    def horizon(self) -> int:
        return len(self.entries) if self.hidden_from is None else self.hidden_from

    def at(self, index: int) -> Position:
        """The position of an entry, or behind the last one."""
        if index < len(self.entries):
            return self.entries[index].where
        if not self.entries:
            return Position(self.first_ledger, 0)
        last = self.entries[-1].where
        return Position(last.ledger_id, last.entry_id + 1)

    def index(self, position: Position) -> int:
        return bisect_left([entry.where for entry in self.entries], position)


class FakeTopic:
    """See the module.  `size` of a row is 10 bytes."""

    def __init__(self, segments: int = 1) -> None:
        self.segments: dict[int, FakeSegment] = {}
        self.pruned: set[int] = set()
        self.epoch = 0
        self.now_ms = 1000
        self._next_ledger = 10
        self._numbers: dict[int, int] = {}
        self.plans = 0
        step = KEY_SPACE // segments
        for number in range(segments):
            end = KEY_SPACE - 1 if number == segments - 1 else (number + 1) * step - 1
            self._make(number * step, end, [])

    # What happens to it

    @property
    def active(self) -> list[FakeSegment]:
        live = (s for s in self.segments.values() if s.active and s.segment_id not in self.pruned)
        return sorted(live, key=lambda segment: segment.hash_start)

    def send(self, keys: Sequence[int]) -> list[Row]:
        """One entry in each segment that some of the keys belong to; keys are hashes."""
        self.now_ms += 10
        sent: list[Row] = []
        for segment in self.active:
            mine = [key for key in keys if segment.hash_start <= key <= segment.hash_end]
            rows = []
            for key in mine:
                self._numbers[key] = self._numbers.get(key, 0) + 1
                rows.append(Row(key, self._numbers[key]))
            if rows:
                segment.entries.append(FakeEntry(self._place(segment), rows, self.now_ms))
                sent += rows
        return sent

    def split(self, segment: FakeSegment) -> None:
        middle = (segment.hash_start + segment.hash_end) // 2
        if segment.hash_start == segment.hash_end:
            return
        segment.children = [
            self._make(segment.hash_start, middle, [segment.segment_id]),
            self._make(middle + 1, segment.hash_end, [segment.segment_id]),
        ]
        self.epoch += 1

    def merge(self, lower: FakeSegment, upper: FakeSegment) -> None:
        child = self._make(lower.hash_start, upper.hash_end, [lower.segment_id, upper.segment_id])
        lower.children, upper.children = [child], [child]
        self.epoch += 1

    def prune_oldest(self) -> list[int]:
        """Forget the segments without parents that are sealed."""
        gone = [
            s.segment_id
            for s in self.segments.values()
            if not s.active
            and s.segment_id not in self.pruned
            and all(parent in self.pruned for parent in s.parents)
        ]
        self.pruned.update(gone)
        return gone

    # `Reading`

    def layout_with(self, newest: int) -> Layout:
        found = self.layout()
        assert max(found.segments) >= newest
        return found

    def layout(self) -> Layout:
        def retained(ids: list[int]) -> tuple[int, ...]:
            return tuple(i for i in ids if i not in self.pruned)

        return Layout(
            self.epoch,
            [
                Segment(
                    segment_id=s.segment_id,
                    hash_start=s.hash_start,
                    hash_end=s.hash_end,
                    active=s.active,
                    parent_ids=retained(s.parents),
                    child_ids=retained(s.children),
                    topic=s.topic,
                )
                for s in self.segments.values()
                if s.segment_id not in self.pruned
            ],
        )

    def plan(
        self,
        segment_topic: str,
        start: Position | None,
        *,
        end: Position | None = None,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        from_publish_time_ms: int | None = None,
        before_publish_time_ms: int | None = None,
    ) -> RangePlan:
        PlanLimits(max_messages, max_bytes, from_publish_time_ms, before_publish_time_ms)
        self.plans += 1
        segment = self._of(segment_topic)
        horizon = segment.horizon
        first = segment.trimmed if start is None else segment.index(start)
        lost = first < segment.trimmed
        first = max(first, segment.trimmed)
        if from_publish_time_ms is not None:
            while first < horizon and (
                segment.entries[first].publish_time_ms < from_publish_time_ms
            ):
                first += 1
        last = horizon if end is None else min(horizon, segment.index(end))
        messages, stop = 0, min(first, last)
        while stop < last:
            entry = segment.entries[stop]
            if before_publish_time_ms is not None and (
                entry.publish_time_ms >= before_publish_time_ms
            ):
                break
            more = messages + len(entry.rows)
            if stop > first and (
                (max_messages is not None and more > max_messages)
                or (max_bytes is not None and more * 10 > max_bytes)
            ):
                break
            messages, stop = more, stop + 1
        backlog = sum(len(entry.rows) for entry in segment.entries[first:horizon])
        times = [entry.publish_time_ms for entry in segment.entries[first:stop]]
        return RangePlan(
            start=segment.at(first),
            end=segment.at(max(stop, first)),
            entries=stop - min(first, stop),
            messages=messages,
            bytes=messages * 10,
            first_publish_time_ms=min(times, default=None),
            last_publish_time_ms=max(times, default=None),
            earliest=segment.at(segment.trimmed),
            horizon=segment.at(horizon),
            raw_end=segment.at(len(segment.entries)),
            sealed=not segment.active,
            lost=lost,
            backlog_messages=backlog,
            backlog_bytes=backlog * 10,
            hidden_messages=sum(len(entry.rows) for entry in segment.entries[horizon:]),
        )

    def entries(
        self, segment_topic: str, start: Position, end: Position
    ) -> Iterator[Sequence[StoredEntry]]:
        raise NotImplementedError("rows are read by `rows`")

    def rows(self, segment_topic: str, start: Position, end: Position) -> list[Row]:
        """What may be read from `start` to before `end`."""
        segment = self._of(segment_topic)
        readable = segment.entries[segment.trimmed : segment.horizon]
        return [row for entry in readable if start <= entry.where < end for row in entry.rows]

    def _of(self, topic: str) -> FakeSegment:
        segment = self.segments[int(topic.removeprefix("segment://"))]
        assert segment.segment_id not in self.pruned, "a pruned segment was asked for"
        return segment

    def _make(self, hash_start: int, hash_end: int, parents: list[int]) -> int:
        segment_id = len(self.segments)
        self._next_ledger += 1
        self.segments[segment_id] = FakeSegment(
            segment_id, hash_start, hash_end, self._next_ledger, parents
        )
        return segment_id

    def _place(self, segment: FakeSegment) -> Position:
        if not segment.entries:
            return Position(segment.first_ledger, 0)
        last = segment.entries[-1].where
        if last.entry_id + 1 < ENTRIES_OF_LEDGER:
            return Position(last.ledger_id, last.entry_id + 1)
        self._next_ledger += 1
        return Position(self._next_ledger, 0)
