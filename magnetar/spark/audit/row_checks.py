"""Checks of V3 and V4 on single rows of suspect producers: copies, and rows out of order.

Pure.  `mark_copies` takes rows sorted by identity, `check_key` those of one producer and key
sorted by place; so each remembers one row at a time.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from magnetar.protocol.ids import Position
from magnetar.spark.audit.violations import Findings, Rule, Violation
from magnetar.spark.range_facts import Stamp

__all__ = ["KeyedRow", "RowPlace", "Sent", "SuspectRow", "check_key", "mark_copies"]


class RowPlace(NamedTuple):
    """The place of a row; places compare in the order of the topic, along each path of its DAG."""

    depth: int
    segment_id: int
    ledger_id: int
    entry_id: int
    batch_index: int

    @property
    def position(self) -> Position:
        """The position of the entry in its segment."""
        return Position(self.ledger_id, self.entry_id)

    def is_beside(self, other: "RowPlace") -> bool:
        """Whether both are in one entry."""
        return self[:-1] == other[:-1]


class Sent(NamedTuple):
    """The identity of a row; a row of a later entry with the same identity is a copy."""

    producer: str
    stamp: Stamp
    content: int
    """The hash of its key and value."""
    segment_id: int = -1
    """The segment of a row without key; -1 for a row with a key.

    Rows without key lie in any segment, and each segment numbers its own: equal ones of two
    segments are no copies.
    """


SuspectRow = tuple[tuple[Sent, RowPlace], str | None]
"""A row of a suspect producer, and its key."""


class KeyedRow(NamedTuple):
    """One row, among the rows of its producer and key in the order of the topic."""

    place: RowPlace
    stamp: Stamp
    original: RowPlace | None = None
    """The place of the first one, if this row is a copy."""


def mark_copies(rows: Iterable[SuspectRow]) -> Iterator[tuple[str, str | None, KeyedRow]]:
    """Producer, key and row of all rows that have a key or are copies; rows come sorted."""
    # Rows without key were promised no order, so only copies of them are checked.
    what: Sent | None = None
    first: RowPlace | None = None
    for (sent, place), key in rows:
        original = None
        if first is None or sent != what:
            what, first = sent, place
        # Rows of one entry may be equal: some clients number batches, not the messages in them.
        elif not place.is_beside(first):
            original = first
        if key is not None or original is not None:
            yield sent.producer, key, KeyedRow(place, sent.stamp, original)


def check_key(producer: str, key: str | None, rows: Iterable[KeyedRow], findings: Findings) -> None:
    """Check the rows of one producer and key, in the order of the topic (V3, V4).

    If `key` is None, the rows are the copies without key of a producer.
    """
    highest: KeyedRow | None = None
    for row in rows:
        if row.original is not None:
            findings.count_check(Rule.V3)
            findings.add(_twice(producer, key, row, row.original))
            continue
        findings.count_check(Rule.V4)
        if highest is not None and not _may_follow(row, highest):
            findings.add(_out_of_order(producer, key, highest, row))
            continue
        highest = row


def _may_follow(row: KeyedRow, before: KeyedRow) -> bool:
    # Between segments only times: each segment has sequence ids of its own.
    if row.place.segment_id != before.place.segment_id:
        return row.stamp.publish_time_ms >= before.stamp.publish_time_ms
    if row.stamp == before.stamp:
        return row.place.is_beside(before.place)
    return row.stamp.may_follow(before.stamp)


def _twice(producer: str, key: str | None, row: KeyedRow, first: RowPlace) -> Violation:
    return Violation(
        Rule.V3,
        f"Message {row.stamp.sequence_id} of producer {producer!r} {_with(key)} is there twice: in "
        f"segment {first.segment_id} at {first.position.text}, and here.",
        row.place.segment_id,
        row.place.position,
    )


def _out_of_order(producer: str, key: str | None, before: KeyedRow, row: KeyedRow) -> Violation:
    return Violation(
        Rule.V4,
        f"Message {row.stamp.sequence_id} of producer {producer!r} {_with(key)} comes after "
        f"{before.stamp.sequence_id}, which it sent later: that is in segment "
        f"{before.place.segment_id} at {before.place.position.text}.",
        row.place.segment_id,
        row.place.position,
    )


def _with(key: str | None) -> str:
    return "without key" if key is None else f"with key {key!r}"
