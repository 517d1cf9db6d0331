"""The tasks of an audit, for executors: read a range of a segment raw, and reduce it to facts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from magnetar.errors import InvalidMessage, TopicNotFound
from magnetar.protocol.ids import Position
from magnetar.reads import MessageColumns, StoredEntry, Visibility, take_apart, take_pieces
from magnetar.spark.audit.row_checks import RowPlace, Sent, SuspectRow
from magnetar.spark.connecting import process_client
from magnetar.spark.message_pieces import OpenMessages
from magnetar.spark.options import Connection
from magnetar.spark.range_facts import SeenRange, Stamp
from magnetar.spark.range_observer import Observer
from magnetar.spark.row_hash import row_hash

__all__ = ["AuditedRange", "scan", "suspect_rows"]


class AuditedRange(NamedTuple):
    """The entries of one segment that one task reads, from `start` to before `end`."""

    segment_id: int
    topic: str
    start: Position
    end: Position
    depth: int = 0
    """Generations above the segment."""
    readable: bool = True
    """Whether it lies below the horizon of the cut."""


def scan(connection: Connection, part: AuditedRange, *, raw: bool = True) -> SeenRange:
    """Read a range once; its facts, which do not grow with its rows.

    `raw` False reads only the entries that consumers get.
    """
    observer = Observer(part.segment_id, part.start, part.end)
    for entries in _entries(connection, part, raw):
        observer.take(entries)
    return observer.result()


def suspect_rows(
    connection: Connection, producers: frozenset[str], part: AuditedRange
) -> Iterator[SuspectRow]:
    """Iterate over the rows of these producers, except aborted rows, which have no order."""
    columns, messages = MessageColumns(), OpenMessages()
    for entries in _entries(connection, part, True):
        for entry in entries:
            if entry.visibility not in (Visibility.READABLE, Visibility.OPEN):
                continue
            try:
                take_apart(entry, columns)
                _put_together(messages, columns)
            except InvalidMessage:
                pass  # The scan has reported the entry.
            yield from _rows(columns, producers, part)
            columns.clear()


def _put_together(messages: OpenMessages, columns: MessageColumns) -> None:
    """Add the row of a message in pieces to `columns` if its last piece has come and none lacks."""
    for piece in columns.pieces:
        known = messages.take(piece)
        if known is not None and len(known) == piece.pieces:
            take_pieces(known, columns)


def _rows(
    columns: MessageColumns, producers: frozenset[str], part: AuditedRange
) -> Iterator[SuspectRow]:
    row = 0
    for run in columns.runs:
        for at in range(row, row + run.messages):
            if run.producer not in producers:
                break
            key = columns.keys[at]
            index = columns.batch_indexes[at]
            place = RowPlace(part.depth, part.segment_id, run.ledger_id, run.entry_id, index)
            content = row_hash(None if key is None else key.encode(), columns.values[at])
            stamp = Stamp(run.publish_time_ms, columns.sequence_ids[at])
            where = part.segment_id if key is None else -1
            yield (Sent(run.producer, stamp, content, where), place), key
        row += run.messages


def _entries(
    connection: Connection, part: AuditedRange, raw: bool
) -> Iterator[Sequence[StoredEntry]]:
    try:
        yield from process_client(connection).iterate(
            lambda client: client.read_range(part.topic, part.start, part.end, raw=raw)
        )
    except TopicNotFound:
        pass  # Retention took the segment meanwhile, which shows when its place is asked for again.
