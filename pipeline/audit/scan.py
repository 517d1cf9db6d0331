"""What the tasks of an audit do: read a range of a segment raw, and tell what was seen.

Runs on executors.  Rules: a range is read once, with a client of the process; what comes back does
not grow with the rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from magnetar.errors import InvalidMessage, TopicNotFound
from magnetar.reads import MessageColumns, StoredEntry, Visibility, take_apart
from pipeline.audit.observer import Observer
from pipeline.audit.seen import SeenRange, Stamp
from pipeline.connecting import connected
from pipeline.options import Connection
from pipeline.row_hash import row_hash
from protocol.ids import Position

__all__ = ["AuditedRange", "Place", "SuspectRow", "scan", "suspect_rows"]


class AuditedRange(NamedTuple):
    """One task's part: of one segment, the entries from `start` on and before `end`."""

    segment_id: int
    topic: str
    start: Position
    end: Position
    depth: int = 0
    """Generations above the segment."""
    readable: bool = True
    """Whether it lies below the horizon of the cut."""


class Place(NamedTuple):
    """Of a row; places compare in the order of the topic along each path of its DAG."""

    depth: int
    segment_id: int
    ledger_id: int
    entry_id: int
    batch_index: int


SuspectRow = tuple[tuple[str, str], tuple[Place, Stamp, int]]
"""(producer, key), and the row's place, what it was sent with, and the hash of its content."""


def scan(connection: Connection, part: AuditedRange, *, raw: bool = True) -> SeenRange:
    """Everything that is in the range; not raw: what consumers get of it."""
    observer = Observer(part.segment_id, part.start, part.end)
    for entries in _entries(connection, part, raw):
        observer.take(entries)
    return observer.result()


def suspect_rows(
    connection: Connection, producers: frozenset[str], part: AuditedRange
) -> Iterator[SuspectRow]:
    """The rows of these producers, one by one; what is aborted is nobody's order."""
    columns = MessageColumns()
    for entries in _entries(connection, part, True):
        for entry in entries:
            if entry.visibility not in (Visibility.READABLE, Visibility.OPEN):
                continue
            try:
                take_apart(entry, columns)
            except InvalidMessage:
                continue  # The scan has told it.
            yield from _rows(columns, producers, part)
            columns.clear()


def _rows(
    columns: MessageColumns, producers: frozenset[str], part: AuditedRange
) -> Iterator[SuspectRow]:
    row = 0
    for run in columns.runs:
        for at in range(row, row + run.messages):
            if run.producer not in producers:
                break
            key = columns.keys[at]
            if key is None:
                continue
            index = columns.batch_indexes[at]
            place = Place(part.depth, part.segment_id, run.ledger_id, run.entry_id, index)
            content = row_hash(key.encode(), columns.values[at])
            stamp = Stamp(run.publish_time_ms, columns.sequence_ids[at])
            yield (run.producer, key), (place, stamp, content)
        row += run.messages


def _entries(
    connection: Connection, part: AuditedRange, raw: bool
) -> Iterator[Sequence[StoredEntry]]:
    try:
        yield from connected(connection).iterate(
            lambda client: client.read_range(part.topic, part.start, part.end, raw=raw)
        )
    except TopicNotFound:
        pass  # Retention took the segment meanwhile, which shows when its place is asked for again.
