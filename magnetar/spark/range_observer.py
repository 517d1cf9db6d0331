"""Reduces the entries of a range, as they are read, to facts (`range_facts`).  Pure."""

from collections.abc import Iterable
from operator import lt

from magnetar.errors import InvalidMessage
from magnetar.protocol.ids import Position
from magnetar.protocol.message import transaction_named_by
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.txn_id import TxnId
from magnetar.reads import (
    EntryRun,
    MessageColumns,
    StoredEntry,
    Visibility,
    metadata_of,
    take_apart,
    take_pieces,
)
from magnetar.spark.message_pieces import OpenMessages
from magnetar.spark.range_facts import (
    HOLES_KEPT,
    NO_ROWS,
    PLAIN,
    Hole,
    SeenProducer,
    SeenRange,
    SeenTransaction,
    Stamp,
    Tally,
)
from magnetar.spark.row_hash import hash_sum, row_hash

__all__ = ["Observer"]


class Observer:
    """Takes the raw entries of one range, in order and each once, hidden ones included.

    A message in pieces whose first pieces lie before the range, or were dropped, is no row of the
    range: its transaction counts it as `incomplete`.
    """

    def __init__(self, segment_id: int, start: Position, end: Position) -> None:
        self._segment_id = segment_id
        self._start = start
        self._end = end
        self._entries = self._rows = self._bytes = self._encrypted = 0
        self._transactions: dict[str, SeenTransaction] = {}
        self._producers: dict[str, SeenProducer] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self._holes: list[Hole] = []
        self._damaged: list[Position] = []
        self._messages = OpenMessages()
        self._columns = MessageColumns()

    def take(self, entries: Iterable[StoredEntry]) -> None:
        """Take the entries that were read next."""
        for entry in entries:
            self._take(entry)

    def result(self) -> SeenRange:
        """The facts of the range, after its last entry was taken."""
        return SeenRange(
            self._segment_id,
            self._start,
            self._end,
            self._entries,
            self._rows,
            self._bytes,
            self._transactions,
            self._producers,
            self._spans,
            tuple(self._holes),
            tuple(self._damaged),
            sum(each.incomplete for each in self._transactions.values()),
            self._encrypted,
            self._rows - sum(each.readable.messages for each in self._transactions.values()),
        )

    def _take(self, entry: StoredEntry) -> None:
        self._entries += 1
        self._bytes += len(entry.data)
        self._follow(entry)
        if entry.visibility is Visibility.MARKER:
            return  # A marker of a broker is an entry without rows.
        columns = self._columns
        try:
            if (
                not take_apart(entry, columns)
                and columns.pieces
                and not self._whole(columns, entry)
            ):
                columns.clear()
                return
        except InvalidMessage:
            self._count_unopened(entry)
            columns.clear()
            return
        row = 0
        for run in columns.runs:
            self._count(run, columns, row, entry)
            row += run.messages
        columns.clear()

    def _count_unopened(self, entry: StoredEntry) -> None:
        try:
            metadata = metadata_of(entry)
        except InvalidMessage:
            metadata = None
        # An encrypted entry is counted and not reported: nothing is wrong with it.
        if metadata is not None and metadata.encryption_keys:
            self._encrypted += 1
            self._count_missed(metadata, entry, encrypted=metadata.num_messages_in_batch)
        elif len(self._damaged) < HOLES_KEPT:
            self._damaged.append(entry.position)

    def _follow(self, entry: StoredEntry) -> None:
        """Note the entry's number; a gap in the numbers of a ledger is a hole."""
        ledger_id, entry_id = entry.ledger_id, entry.entry_id
        span = self._spans.get(ledger_id)
        if span is None:
            self._spans[ledger_id] = entry_id, entry_id
            return
        if entry_id > span[1] + 1 and len(self._holes) < HOLES_KEPT:
            self._holes.append(Hole(ledger_id, span[1] + 1, entry_id - 1))
        self._spans[ledger_id] = span[0], entry_id

    def _whole(self, columns: MessageColumns, entry: StoredEntry) -> bool:
        """Take a piece; whether it completes its message, whose row is in `columns` then."""
        piece = columns.pieces.pop()
        known = self._messages.take(piece)
        if known is None:
            return False
        if len(known) < piece.pieces:
            self._count_missed(piece.metadata, entry, incomplete=1)
            return False
        take_pieces(known, columns)
        return True

    def _count_missed(
        self,
        metadata: MessageMetadata,
        entry: StoredEntry,
        *,
        incomplete: int = 0,
        encrypted: int = 0,
    ) -> None:
        """Count messages of a transaction that are no rows: incomplete or encrypted ones."""
        txn = transaction_named_by(metadata)
        name, at = PLAIN if txn is None else str(TxnId(*txn)), entry.position
        missed = SeenTransaction(
            self._segment_id, name, at, at, incomplete=incomplete, encrypted=encrypted
        )
        self._add(missed)

    def _count(self, run: EntryRun, columns: MessageColumns, row: int, entry: StoredEntry) -> None:
        end = row + run.messages
        self._rows += run.messages
        hashes = (
            row_hash(None if key is None else key.encode(), value)
            for key, value in zip(columns.keys[row:end], columns.values[row:end], strict=True)
        )
        tally = Tally(run.messages, hash_sum(hashes))
        position, txn = entry.position, PLAIN if run.txn_id is None else str(run.txn_id)
        seen = SeenTransaction(
            self._segment_id,
            txn,
            position,
            position,
            readable=tally if entry.visibility is Visibility.READABLE else NO_ROWS,
            aborted=tally if entry.visibility is Visibility.ABORTED else NO_ROWS,
            open=tally if entry.visibility is Visibility.OPEN else NO_ROWS,
        )
        self._add(seen)
        self._order(run, columns.sequence_ids[row:end], position)

    def _add(self, seen: SeenTransaction) -> None:
        known = self._transactions.get(seen.txn)
        self._transactions[seen.txn] = seen if known is None else known.plus(seen)

    def _order(self, run: EntryRun, sequence_ids: list[int], position: Position) -> None:
        first = Stamp(run.publish_time_ms, sequence_ids[0])
        last = Stamp(run.publish_time_ms, sequence_ids[-1])
        # Some clients number batches, not the messages in them: such a batch is in order.
        has_one = sequence_ids.count(sequence_ids[0]) == run.messages
        rises = has_one or all(map(lt, sequence_ids, sequence_ids[1:]))
        known = self._producers.get(run.producer)
        if known is None:
            self._producers[run.producer] = SeenProducer(
                self._segment_id,
                run.producer,
                first,
                last,
                run.messages,
                None if rises else position,
            )
            return
        suspect = known.suspect
        if suspect is None and not (rises and first.rises_from(known.last)):
            suspect = position
        self._producers[run.producer] = SeenProducer(
            self._segment_id,
            run.producer,
            known.first,
            last,
            known.messages + run.messages,
            suspect,
        )
