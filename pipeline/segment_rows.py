"""The rows of a range of a segment, as columns, a bounded number at a time.

Rules:

- A range may begin and end inside of a batch.
- A message in pieces belongs to the range in which its last piece lies.  If its first pieces are
  before the range, or were dropped because too many messages are open, they are read again: from
  the first entry that was published when the piece was, as pieces of a message share that time.
  If they are not found there, once more from `LOOK_BACK_MS` earlier; then the message has no
  beginning, because its producer never finished it or retention took it, and is left out, as
  consumers do.
  Where brokers know no times they are looked for from the beginning of the segment on.
- Nothing is skipped unseen: when a range was read it is asked whether all of it is still retained,
  and may be read.  If not, `DataLost`, so the task fails and is tried again.  With `skip_lost` the
  rows go on behind what is gone, with a warning; what may not be read fails the task all the same,
  for it would be there when the batch is run again.
- An entry that cannot be taken apart fails the task, or is left out (`skip_damaged`), with a
  warning that says how many were.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from magnetar.errors import InvalidMessage, NotSupported
from magnetar.reads.entries import StoredEntry
from magnetar.reads.messages import MessageColumns, Piece, take_apart, take_pieces
from pipeline.cut import END
from pipeline.errors import DataLost
from pipeline.reading import Reading
from pipeline.tasks import SegmentRange
from protocol.ids import EARLIEST, LONG_MAX, Position

__all__ = ["RowLimits", "SegmentRows"]

_log: Final = logging.getLogger(__name__)

LOOK_BACK_MS: Final = 600_000
"""How much earlier the first piece may be, of clients that give each piece a time of its own."""
MAX_OPEN_BYTES: Final = 256 * 1024 * 1024
"""Of messages in pieces that are not complete, beside the one that grows."""
MAX_WITHOUT_BEGINNING: Final = 1000
"""Messages whose first pieces were not found; the oldest are forgotten, and looked for again."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """After how much the rows so far are handed out; one entry may be above it."""

    rows: int = 16_384
    bytes: int = 16 * 1024 * 1024


class SegmentRows:
    """See the module's rules.  Iterate over it once; `columns` are valid until the next ones."""

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
        """Entries, and messages in pieces, that were left out."""
        self.gaps = 0
        """Beginnings of the range, or all of it, that are not retained and were left out."""

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
        """Put it to the others of its message; a row if it is the last one."""
        pieces = self._open.get(piece.uuid)
        if piece.number == 0:
            pieces = self._begin(piece.uuid, [])
        elif pieces is None:
            pieces = self._begin(piece.uuid, self._earlier(piece))
        if piece.number < len(pieces):
            return  # It came before: its producer has sent it twice.
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
        """The pieces of its message before it; none if they are not there."""
        if piece.uuid in self._without_beginning:
            return []
        for margin_ms in (0, LOOK_BACK_MS):
            found = self._look_back(piece, piece.metadata.publish_time - margin_ms)
            if len(found) == piece.number:
                return found
        self._without_beginning[piece.uuid] = None
        if len(self._without_beginning) > MAX_WITHOUT_BEGINNING:
            self._without_beginning.popitem(last=False)
        return []

    def _look_back(self, piece: Piece, since_ms: int) -> list[Piece]:
        """Of the same message, in order, published since then; no others are kept."""
        topic, end = self._range.topic, Position(piece.ledger_id, piece.entry_id)
        from_ms = min(max(since_ms, 0), LONG_MAX)  # producers may say what is later than any bound
        try:
            plan = self._reading.plan(
                topic, None, end=end, max_messages=1, from_publish_time_ms=from_ms
            )
        except NotSupported:
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
        """Whether all that was to be read could be."""
        topic = self._range.topic
        plan = self._reading.plan(topic, start, end=end, max_messages=1)
        needed = min(end, plan.raw_end) if self._range.end == END else end
        # Stock brokers know no end of a segment of which retention has taken everything.
        lost, hidden = bool(plan.lost), EARLIEST < plan.horizon < needed
        lost = lost or plan.horizon == EARLIEST < needed
        what = f"A part of segment {self._range.segment_id} from {self._range.start} on"
        if lost and self._skip_lost and not hidden:
            self.gaps += 1
            _log.warning("%s is not retained any more, and is left out", what)
        elif lost or hidden:
            why = "is not retained any more" if lost else "may not be read just now"
            raise DataLost(
                f"{what} {why}; the task is tried again. If it fails again, the data is gone: see "
                "the option failOnDataLoss."
            )
