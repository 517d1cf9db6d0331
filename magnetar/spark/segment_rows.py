"""The rows of a range of a segment, as columns, a bounded number at a time.

A *piece* is one chunk of a chunked message.  The message belongs to the range that has its last
chunk, whose task has to find the chunks before the range.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from magnetar.errors import InvalidMessage, NotSupported
from magnetar.protocol.ids import EARLIEST, LONG_MAX, Position
from magnetar.reads.entries import StoredEntry
from magnetar.reads.messages import MessageColumns, Piece, take_apart, take_pieces
from magnetar.spark.cut import END
from magnetar.spark.errors import DataLost
from magnetar.spark.reading import Reading
from magnetar.spark.tasks import SegmentRange

__all__ = ["RowLimits", "SegmentRows"]

_log: Final = logging.getLogger(__name__)

LOOK_BACK_MS: Final = 600_000
"""The most time between the pieces of a message, if a client stamps each with its own time."""
MAX_OPEN_BYTES: Final = 256 * 1024 * 1024
"""The most bytes of incomplete messages; beyond it the oldest but the growing one are dropped."""
MAX_WITHOUT_BEGINNING: Final = 1000
"""The most messages remembered as lacking their first pieces; others are searched for again."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The size at which columns are yielded; their last entry may go beyond it."""

    rows: int = 16_384
    bytes: int = 16 * 1024 * 1024


class SegmentRows:
    """Iterator over the rows of one range, for one pass; columns are valid until the next ones.

    A range may begin and end inside a batch.  Iteration raises `DataLost` when a part of the range
    was not retained or not readable, and `InvalidMessage` for an entry that cannot be unpacked.
    `skip_lost` leaves out what is not retained, `skip_damaged` what cannot be unpacked; both log a
    warning.
    """

    def __init__(
        self,
        reading: Reading,
        range_: SegmentRange,
        *,
        limits: RowLimits | None = None,
        skip_damaged: bool = False,
        skip_lost: bool = False,
    ) -> None:
        self._reading = reading
        self._range: Final = range_
        self._limits: Final = limits or RowLimits()
        self._skip_damaged: Final = skip_damaged
        self._skip_lost: Final = skip_lost
        self._open: OrderedDict[str, list[Piece]] = OrderedDict()
        self._open_bytes = 0
        self._without_beginning: OrderedDict[str, None] = OrderedDict()
        self.damaged = 0
        """Number of entries, and of messages in pieces, that were left out."""
        self.gaps = 0
        """1 if a part of the range was not retained and was left out."""

    def __iter__(self) -> Iterator[MessageColumns]:
        columns, size = MessageColumns(), 0
        start, end = self._range.start.position, self._range.end.entries_end
        for entries in self._reading.entries(self._range.topic, start, end):
            for entry in entries:
                before = len(columns.runs)
                self._add(entry, columns)
                size += len(entry.data)
                if len(columns.runs) > before:
                    size += columns.runs[-1].metadata.uncompressed_size
                if len(columns) >= self._limits.rows or size >= self._limits.bytes:
                    if len(columns):
                        yield columns
                    columns, size = MessageColumns(), 0
        # After reading, so that what retention deletes meanwhile is noticed too.
        self._check_whole(start, end)
        if self.damaged:
            _log.warning(
                "Left out of segment %d from %s on, as they cannot be unpacked: %d",
                self._range.segment_id,
                self._range.start,
                self.damaged,
            )
        if len(columns):
            yield columns

    def _add(self, entry: StoredEntry, columns: MessageColumns) -> None:
        first, last = self._range.start, self._range.end
        try:
            take_apart(
                entry,
                columns,
                from_index=first.batch_index if entry.position == first.position else 0,
                before_index=last.batch_index if entry.position == last.position else None,
            )
            while columns.pieces:
                self._add_piece(columns.pieces.pop(), columns)
        except InvalidMessage:
            if not self._skip_damaged:
                raise
            self.damaged += 1

    def _add_piece(self, piece: Piece, columns: MessageColumns) -> None:
        """Add a piece to its message, and the message to the rows if it is the last one."""
        pieces = self._open.get(piece.uuid)
        if piece.number == 0:
            pieces = self._begin(piece.uuid, [])
        elif pieces is None:
            pieces = self._begin(piece.uuid, self._earlier(piece))
        if piece.number < len(pieces):
            return  # It came before: its producer has sent it twice.
        # Its producer never finished the message, or retention has deleted its first pieces.  It is
        # left out, as consumers do.
        if piece.number > len(pieces) or (piece.number and not pieces):
            self._give_up(piece.uuid)
            return
        pieces.append(piece)
        self._open_bytes += len(piece.data)
        if len(pieces) == piece.pieces:
            self._give_up(piece.uuid)
            take_pieces(pieces, columns)
            return
        while self._open_bytes > MAX_OPEN_BYTES and len(self._open) > 1:
            self._give_up(next(uuid for uuid in self._open if uuid != piece.uuid))

    def _begin(self, uuid: str, pieces: list[Piece]) -> list[Piece]:
        self._give_up(uuid)
        self._open[uuid] = pieces
        self._open_bytes += sum(len(piece.data) for piece in pieces)
        return pieces

    def _give_up(self, uuid: str) -> None:
        pieces = self._open.pop(uuid, [])
        self._open_bytes -= sum(len(piece.data) for piece in pieces)

    def _earlier(self, piece: Piece) -> list[Piece]:
        """Find the earlier pieces of its message; empty if they are not there."""
        if piece.uuid in self._without_beginning:
            return []
        # Most clients stamp all pieces of a message with the time of the first one.
        for margin_ms in (0, LOOK_BACK_MS):
            found = self._look_back(piece, piece.metadata.publish_time - margin_ms)
            if len(found) == piece.number:
                return found
        self._without_beginning[piece.uuid] = None
        if len(self._without_beginning) > MAX_WITHOUT_BEGINNING:
            self._without_beginning.popitem(last=False)
        return []

    def _look_back(self, piece: Piece, since_ms: int) -> list[Piece]:
        """Read the pieces of the same message that were published since then, in order."""
        topic, end = self._range.topic, Position(piece.ledger_id, piece.entry_id)
        from_ms = min(max(since_ms, 0), LONG_MAX)  # A producer's time may be beyond any bound.
        try:
            plan = self._reading.plan(
                topic, None, end=end, max_messages=1, from_publish_time_ms=from_ms
            )
        except NotSupported:
            # Apache Pulsar has no index by time: search from the beginning of the segment.
            plan = self._reading.plan(topic, None, end=end, max_messages=1)
        found: list[Piece] = []
        for entries in self._reading.entries(topic, plan.start, end):
            columns = MessageColumns()
            for entry in entries:
                if piece.uuid.encode() in entry.data:
                    take_apart(entry, columns)
            for each in columns.pieces:
                if each.uuid != piece.uuid:
                    continue
                if each.number == 0:
                    found.clear()
                if each.number == len(found):
                    found.append(each)
        return found

    def _check_whole(self, start: Position, end: Position) -> None:
        """Ask whether all of the range is retained and may be read.  Raises `DataLost`."""
        topic = self._range.topic
        plan = self._reading.plan(topic, start, end=end, max_messages=1)
        needed = min(end, plan.raw_end) if self._range.end == END else end
        # Apache Pulsar gives no end of a segment of which retention has deleted everything.
        lost, hidden = bool(plan.lost), EARLIEST < plan.horizon < needed
        lost = lost or plan.horizon == EARLIEST < needed
        what = f"A part of segment {self._range.segment_id} from {self._range.start} on"
        # Hidden entries fail the task even with `skip_lost`: a repeated batch would have them.
        if lost and self._skip_lost and not hidden:
            self.gaps += 1
            _log.warning("%s is not retained any more, and is left out", what)
        elif lost or hidden:
            why = "is not retained any more" if lost else "may not be read just now"
            raise DataLost(
                f"{what} {why}; the task is tried again. If it fails again, the data is gone: see "
                "the option failOnDataLoss."
            )
