"""Sequence ids that a segment takes over from its parents, and the messages that they cover.  Pure.

The rules, and the reasons for them, are in docs/decisions/carried-sequence-ids.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Self

from config.bounds import CARRIED_RANGES
from magnetar.protocol.ids import from_wire
from magnetar.protocol.key_hash import segment_hash, segment_hash_m1
from magnetar.protocol.message import partition_key
from magnetar.protocol.names import SegmentName, segment_suffix
from magnetar.protocol.pulsar_pb2 import MessageMetadata

_RANDOM_IDS_FROM = 2**32
"""Clients whose request ids start at a random 63-bit number are practically always above this."""
_REQUESTS_OF_ONE_CLIENT = 2**32
"""Two request ids that are closer than this are of one client, if both are random."""


class LiveWriter(NamedTuple):
    """The client that wrote last under a name, if it may have outlived the layout change.

    `request_id` is that of its PRODUCER.  `first` is the first sequence id that it sent; None: that
    is not known.
    """

    request_id: int
    first: int | None

    def is_client(self, request_id: int | None) -> bool:
        """Whether a PRODUCER with this request id may come from the same client.

        Java clients begin to count requests at a random number, so two of them practically always
        differ.  Clients that begin at 0 do not: two of them count as one.
        """
        if request_id is None:
            return False
        if min(self.request_id, request_id) >= _RANDOM_IDS_FROM:
            return abs(self.request_id - request_id) < _REQUESTS_OF_ONE_CLIENT
        return max(self.request_id, request_id) < _RANDOM_IDS_FROM


class CarriedId(NamedTuple):
    """The last sequence id that a producer name had on a parent when that was sealed.

    `hash_start` to `hash_end`, both included, are the keys that the parent and this segment share.
    `m1_hashes` says which hash chose the parent for a key; None: that is not known.
    """

    hash_start: int
    hash_end: int
    last: int
    m1_hashes: bool | None
    writer: LiveWriter | None

    def may_cover(self, key: bytes | None) -> bool:
        """Whether a message with this key may have gone to the parent; None: a key is not known."""
        if key is None:
            return True
        start, end = self.hash_start, self.hash_end
        low = self.m1_hashes is not False and start <= segment_hash_m1(key) <= end
        return low or (self.m1_hashes is not True and start <= segment_hash(key) <= end)

    def is_repeated_by(self, first: int | None, last: int, request_id: int | None) -> bool:
        """Whether a new message with these ids shows that its client counts from the start again.

        With `initialSequenceId`, Pulsar's Java client begins at the same id on every segment.
        """
        writer = self.writer
        return (
            writer is not None
            and last <= self.last
            and (first is None or writer.first is None or first == writer.first)
            and writer.is_client(request_id)
        )


def first_sequence(sequence_id: int, highest_sequence_id: int, messages: int) -> int | None:
    """The first sequence id of a message or batch; None for a batch that gives its last one only.

    The arguments are the fields of the wire.
    """
    first = from_wire(sequence_id)
    return None if messages > 1 and from_wire(highest_sequence_id) <= first else first


def routing_key(metadata: MessageMetadata) -> bytes | None:
    """The key by which a client chose the segment; None for a batch, or a message without key."""
    return None if metadata.HasField("num_messages_in_batch") else partition_key(metadata)


def last_carried(carried: Iterable[CarriedId]) -> int:
    """The highest of the ids, -1 if there are none."""
    return max((each.last for each in carried), default=-1)


def are_stored(
    carried: Sequence[CarriedId], last: int, key: bytes | None, segment: SegmentName
) -> bool:
    """Whether every parent of a segment that may have got the message has it, and there is one."""
    parents = [each for each in carried if each.may_cover(key)]
    if key is None and not _cover(carried, segment):
        return False  # it may have gone to a parent without the name
    if key is not None and any(each.m1_hashes is None for each in parents):
        # By one hash it went to one of these; by the other, maybe to one without the name.
        for place in (segment_hash(key), segment_hash_m1(key)):
            if not any(each.hash_start <= place <= each.hash_end for each in carried):
                return False
    return bool(parents) and all(last <= each.last for each in parents)


def _cover(carried: Iterable[CarriedId], segment: SegmentName) -> bool:
    """Whether there is an id for each key of the segment."""
    begin = segment.hash_start
    for each in sorted(carried, key=lambda row: row.hash_start):
        if each.hash_start > begin:
            return False
        begin = max(begin, each.hash_end + 1)
    return begin > segment.hash_end


class FinalIds(NamedTuple):
    """The ids of one producer at the end of a parent, as the parent's owner sends them.

    `numbered`: the producer has the name `<name>-seg-<id>` on each segment.
    """

    name: str
    numbered: bool
    seen_ms: int
    ids: tuple[CarriedId, ...]


class FinalRanges(NamedTuple):
    """What a parent has of the segments of other clusters, at its end.

    `hash_start` to `hash_end`, both included, are the parent's; `sources` is the JSON of its
    `SegmentSources`.
    """

    hash_start: int
    hash_end: int
    sources: Sequence[object]


@dataclass(frozen=True, slots=True)
class FinalSequences:
    """What a parent, or several, had at the end: the ids of all producers, and the ranges."""

    producers: Sequence[FinalIds]
    ranges: Sequence[FinalRanges] = ()

    @classmethod
    def together(cls, finals: Sequence["FinalSequences"]) -> "FinalSequences":
        """Those of several parents, whose keys differ."""
        return cls(
            [each for final in finals for each in final.producers],
            [each for final in finals for each in final.ranges],
        )

    def to_json(self) -> dict[str, object]:
        """The JSON that brokers send each other."""
        return {
            "producers": [
                [each.name, each.numbered, each.seen_ms, rows_of(each.ids)]
                for each in self.producers
            ],
            "ranges": [list(each) for each in self.ranges],
        }

    @classmethod
    def from_json(cls, members: object) -> Self:
        """Decode the JSON of another broker.  Raises ValueError."""
        try:
            if not isinstance(members, dict):
                raise TypeError("no object")
            return cls(
                [
                    FinalIds(str(name), bool(numbered), int(seen_ms), ids_of(rows))
                    for name, numbered, seen_ms, rows in members["producers"]
                ],
                [
                    FinalRanges(int(start), int(end), list(sources))
                    for start, end, sources in members["ranges"]
                ],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"these are not final sequence ids: {error!r}") from error


def common_to_partitions(finals: Sequence[FinalSequences]) -> FinalSequences:
    """The ids of several partitions of one topic together.

    A message may be on any of them, as a partition is not chosen by ranges of hashes.  So each name
    has its lowest id, if all partitions have the name.  Partitions have no ranges.
    """
    by_name: dict[tuple[str, bool], list[FinalIds]] = {}
    for final in finals:
        for each in final.producers:
            by_name.setdefault((each.name, each.numbered), []).append(each)
    return FinalSequences(
        [
            FinalIds(
                name,
                numbered,
                max(each.seen_ms for each in found),
                (min((row for each in found for row in each.ids), key=lambda row: row.last),),
            )
            for (name, numbered), found in by_name.items()
            if len(found) == len(finals)
        ]
    )


def rows_of(ids: Iterable[CarriedId]) -> list[list[object]]:
    """The ids as JSON."""
    return [[*each[:4], None if each.writer is None else [*each.writer]] for each in ids]


def ids_of(rows: Iterable[Sequence[object]]) -> tuple[CarriedId, ...]:
    """The ids of their JSON.  Raises TypeError, ValueError."""
    return tuple(_id_of(*row) for row in rows)


def _id_of(start: object, end: object, last: object, m1: object, writer: object) -> CarriedId:
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(last, int)):
        raise TypeError("a range of hashes and a sequence id are numbers")
    live: LiveWriter | None = None
    if isinstance(writer, list):
        request_id, first = writer
        live = LiveWriter(int(request_id), None if first is None else int(first))
    return CarriedId(start, end, last, m1 if isinstance(m1, bool) else None, live)


class RangeTable:
    """The ranges of carried ids in one snapshot: most of its names have the same ones.

    The ids of a name are one row.  It has a request id, from which those of writers are counted,
    and then for each id: the number of its range, the id, and for a live writer its request id and
    first sequence id.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, bool | None], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def row_of(self, ids: Sequence[CarriedId]) -> list[object]:
        """The row of a name's ids; their ranges are added."""
        base = next((each.writer.request_id for each in ids if each.writer is not None), 0)
        row: list[object] = [base]
        for each in ids:
            key = (each.hash_start, each.hash_end, each.m1_hashes)
            number = self._numbers.setdefault(key, len(self._numbers))
            writer = each.writer
            wrote = [] if writer is None else [writer.request_id - base, writer.first]
            row.append([number, each.last, *wrote])
        return row

    def rows(self, first: int = 0) -> list[tuple[int, int, bool | None]]:
        """The ranges from the one with this number on."""
        return list(islice(self._numbers, first, None))

    def drop(self, first: int) -> None:
        """Remove the ranges from the one with this number on, as their name was left out."""
        for key in self.rows(first):
            del self._numbers[key]


def ids_of_row(
    row: Sequence[object], ranges: Mapping[int, Sequence[object]]
) -> tuple[CarriedId, ...]:
    """The ids of a row, with the ranges of its table.  Raises KeyError, TypeError, ValueError."""
    base, *members = row
    if not isinstance(base, int):
        raise TypeError("a request id is a number")
    found: list[CarriedId] = []
    for member in members:
        if not isinstance(member, list):
            raise TypeError("an id is a list")
        number, last, *wrote = member
        start, end, m1 = ranges[number]
        writer = [base + wrote[0], wrote[1]] if wrote else None
        found.append(_id_of(start, end, last, m1, writer))
    return tuple(found)


def base_name(name: str, segment: SegmentName) -> tuple[str, bool]:
    """The name that a producer has on all segments; True if its client adds the segment's id."""
    base = name.removesuffix(segment_suffix(segment.segment_id))
    return (base, True) if base and base != name else (name, False)


def name_on(base: str, segment: SegmentName, *, numbered: bool) -> str:
    """The name that this producer has on a segment."""
    return base + segment_suffix(segment.segment_id) if numbered else base


def within(segment: SegmentName, ids: Iterable[CarriedId]) -> tuple[CarriedId, ...]:
    """The ids for the keys of a segment, one for each range, at most CARRIED_RANGES.

    Where there are more, those of the highest ids stay: a message outside of them is stored, at
    worst twice.
    """
    ranges: dict[tuple[int, int], CarriedId] = {}
    for each in ids:
        start = max(each.hash_start, segment.hash_start)
        end = min(each.hash_end, segment.hash_end)
        if start <= end:
            known = ranges.get((start, end))
            if known is None or known.last < each.last:
                ranges[start, end] = each._replace(hash_start=start, hash_end=end)
    highest = sorted(ranges.values(), key=lambda each: each.last, reverse=True)[:CARRIED_RANGES]
    return _joined(sorted(highest))


def _joined(ids: Iterable[CarriedId]) -> tuple[CarriedId, ...]:
    """The ids, with neighbouring ranges that do not differ made one."""
    joined: list[CarriedId] = []
    for each in ids:
        before = joined[-1] if joined else None
        if before is not None and before[1] + 1 == each.hash_start and before[2:] == each[2:]:
            joined[-1] = before._replace(hash_end=each.hash_end)
        else:
            joined.append(each)
    return tuple(joined)


def final_ids(
    segment: SegmentName, own: CarriedId | None, carried: Sequence[CarriedId]
) -> tuple[CarriedId, ...]:
    """The ids that a sealed segment passes on: for each range the higher of own and carried one.

    `own` is for the whole segment; None: it has no message of this name.
    """
    if own is None:
        return tuple(carried)
    ids: list[CarriedId] = []
    start = segment.hash_start
    for each in sorted(carried):
        if each.last <= own.last:
            continue
        if start < each.hash_start:
            ids.append(own._replace(hash_start=start, hash_end=each.hash_start - 1))
        ids.append(each)
        start = each.hash_end + 1
    if start <= segment.hash_end:
        ids.append(own._replace(hash_start=start))
    return tuple(ids)
