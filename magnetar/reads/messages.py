"""Takes stored entries apart into messages, as columns: for tables, where objects are too slow.
Pure.

    columns = MessageColumns()
    for entry in entries:                       # of client.read_range
        take_apart(entry, columns)
    columns.keys, columns.values, ...           # lists: one item for each message, a "row"
    for run in columns.runs: ...                # what `run.messages` rows in a row have in common
    columns.clear()

Pure.  Rules:

- Rows are in the order of the segment.  `keys`, `values`, `event_times_ms`, `sequence_ids` and
  `batch_indexes` have an item for each.  `properties` and `own` are by row number, and only have
  rows that have some.
- An entry gives one run, or none if it has no rows: it is a marker, or a piece, or compaction
  removed all of it, or all of it is outside of what was asked for.
- A piece of a message that has several is put in `pieces`.  When all pieces of a message (same
  `uuid`, `number` 0 to `pieces` - 1) are together, `take_pieces` makes the row of it, which lies
  where its last piece does.
- What cannot be taken apart raises `InvalidMessage`, and has added nothing.
- Whether an entry is readable is no question here: `entry.visibility` says so.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from magnetar.compression import decompress
from magnetar.errors import InvalidMessage
from magnetar.protocol.checksum import BROKER_METADATA_MAGIC, CHECKED_FROM, CHECKSUM_MAGIC, crc32c
from magnetar.protocol.frame_error import ChecksumMismatch, FrameError
from magnetar.protocol.ids import from_wire
from magnetar.protocol.message import parse_metadata, payload_of, transaction_named_by
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.protocol.txn_id import TxnId
from magnetar.reads.entries import StoredEntry
from magnetar.reads.ids import IdWriter
from magnetar.reads.rows import Properties, Rows, key_of, properties_of, scan_rows

__all__ = [
    "EntryRun",
    "MessageColumns",
    "Piece",
    "message_ids",
    "metadata_of",
    "take_apart",
    "take_pieces",
]

_BROKER_HEAD: Final = 6
"""Magic and size before a BrokerEntryMetadata."""


class EntryRun(NamedTuple):
    """Rows of one entry, and what they have in common."""

    ledger_id: int
    entry_id: int
    messages: int
    """Rows that it stands for."""
    batch_size: int
    """Messages in the entry; 0: it is no batch, and the index of its row is -1."""
    publish_time_ms: int
    producer: str
    txn_id: TxnId | None
    schema_version: bytes | None
    first_piece: tuple[int, int] | None
    """Ledger and entry of the first piece, of a message in pieces."""
    metadata: MessageMetadata
    """Of the entry, with everything else."""


class Piece(NamedTuple):
    """An entry with a piece of a message."""

    ledger_id: int
    entry_id: int
    uuid: str
    """The same in all pieces of a message."""
    number: int
    """From 0 on."""
    pieces: int
    """How many the message has."""
    size: int
    """Bytes of all pieces."""
    metadata: MessageMetadata
    data: bytes
    """Of the payload, compressed as it was sent."""


class MessageColumns:
    """Takes stored entries apart into columns of messages."""

    __slots__ = (
        "batch_indexes",
        "event_times_ms",
        "keys",
        "own",
        "pieces",
        "properties",
        "runs",
        "sequence_ids",
        "values",
    )

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        """The key; base64 of it if the producer gave bytes."""
        self.values: list[bytes | None] = []
        """The payload, decompressed; None: the message says that it has no value."""
        self.event_times_ms: list[int | None] = []
        self.sequence_ids: list[int] = []
        self.batch_indexes: list[int] = []
        """-1: alone in its entry."""
        self.properties: dict[int, Properties] = {}
        """Names and values, each name once, of rows that have any."""
        self.own: dict[int, SingleMessageMetadata | MessageMetadata] = {}
        """Metadata of rows that may have more: bytes as key, an ordering key, ..."""
        self.runs: list[EntryRun] = []
        self.pieces: list[Piece] = []

    def __len__(self) -> int:
        """Rows."""
        return len(self.values)

    def clear(self) -> None:
        """Forget everything, with new lists: those that were taken stay as they are."""
        MessageColumns.__init__(self)


def metadata_of(entry: StoredEntry) -> MessageMetadata:
    """What an entry says of itself, also if it is encrypted.

    Raises `InvalidMessage` where the checksum is wrong, or it says nothing.
    """
    try:
        return parse_metadata(_checked(entry.data))
    except FrameError as error:
        raise _damaged(entry, str(error)) from error


def take_apart(
    entry: StoredEntry,
    columns: MessageColumns,
    *,
    from_index: int = 0,
    before_index: int | None = None,
) -> int:
    """Append the messages of an entry; how many rows that are.

    Of a batch only those from `from_index` on and before `before_index`; what is no batch has the
    index 0 here.  Raises `InvalidMessage` where the checksum is wrong, it is encrypted, or it
    cannot be unpacked.
    """
    try:
        checked = _checked(entry.data)
        metadata = parse_metadata(checked)
        payload = payload_of(checked)
    except FrameError as error:
        raise _damaged(entry, str(error)) from error
    if metadata.HasField("marker_type"):
        return 0
    if metadata.encryption_keys:
        raise _damaged(entry, "it is encrypted; this client has no keys")
    if metadata.num_chunks_from_msg > 1:
        if from_index <= 0 and before_index != 0:
            columns.pieces.append(_piece_of(entry, metadata, bytes(payload)))
        return 0
    try:
        unpacked = decompress(metadata.compression, payload, metadata.uncompressed_size)
        data = unpacked if isinstance(unpacked, bytes) else bytes(unpacked)
        if not metadata.HasField("num_messages_in_batch"):
            if from_index > 0 or before_index == 0:
                return 0
            return _add_single(columns, entry.ledger_id, entry.entry_id, metadata, data)
        if metadata.num_messages_in_batch <= 0:
            raise InvalidMessage("it says that it is a batch without messages")
        rows = scan_rows(data, metadata.num_messages_in_batch, from_wire(metadata.sequence_id))
    except (FrameError, InvalidMessage) as error:
        raise _damaged(entry, str(error)) from error
    return _add_batch(columns, entry, metadata, rows, from_index, before_index)


def take_pieces(pieces: Sequence[Piece], columns: MessageColumns) -> int:
    """Append the message of which these are all the pieces, in their order: one row.

    Raises `InvalidMessage` if they are not, or cannot be unpacked.
    """
    last = pieces[-1] if pieces else None
    if last is None or [each.number for each in pieces] != list(range(last.pieces)):
        raise InvalidMessage(
            "These are not all pieces of a message in their order; read the entries between the "
            "first and the last one of it, and give one of each number."
        )
    whole = b"".join(each.data for each in pieces)
    if len({each.uuid for each in pieces}) != 1 or len(whole) != last.size:
        raise InvalidMessage(
            f"The pieces that end at {last.ledger_id}:{last.entry_id} are of several messages, or "
            "have not the size that they announce; group them by their uuid."
        )
    metadata = last.metadata
    try:
        data = bytes(decompress(metadata.compression, whole, metadata.uncompressed_size))
    except InvalidMessage as error:
        raise _damaged(StoredEntry(last.ledger_id, last.entry_id, b""), str(error)) from error
    first = pieces[0].ledger_id, pieces[0].entry_id
    return _add_single(columns, last.ledger_id, last.entry_id, metadata, data, first)


def message_ids(columns: MessageColumns, segment_id: int) -> list[bytes]:
    """The bytes of `MessageId` of each row, all of one segment (see `MessageId.to_bytes`)."""
    writer = IdWriter(segment_id)
    ids: list[bytes] = []
    row = 0
    for run in columns.runs:
        key, end = (run.ledger_id, run.entry_id), row + run.messages
        if run.batch_size:
            ids += writer.of_batch(key, run.batch_size, columns.batch_indexes[row:end])
        else:
            ids.append(writer.of_single(key, run.first_piece))
        row = end
    return ids


def _checked(data: bytes) -> bytes:
    """The entry without what a broker put before it.  Raises `ChecksumMismatch`."""
    if data[:2] == BROKER_METADATA_MAGIC:
        data = data[_BROKER_HEAD + int.from_bytes(data[2:_BROKER_HEAD], "big") :]
    if data[:2] == CHECKSUM_MAGIC and len(data) >= CHECKED_FROM:
        checksum = int.from_bytes(data[2:CHECKED_FROM], "big")
        if crc32c(data[CHECKED_FROM:]) != checksum:
            raise ChecksumMismatch("its checksum is wrong")
    return data


def _piece_of(entry: StoredEntry, metadata: MessageMetadata, data: bytes) -> Piece:
    return Piece(
        entry.ledger_id,
        entry.entry_id,
        metadata.uuid,
        metadata.chunk_id,
        metadata.num_chunks_from_msg,
        metadata.total_chunk_msg_size,
        metadata,
        data,
    )


def _run_of(
    ledger_id: int,
    entry_id: int,
    metadata: MessageMetadata,
    messages: int,
    first_piece: tuple[int, int] | None = None,
) -> EntryRun:
    txn = transaction_named_by(metadata)
    is_batch = metadata.HasField("num_messages_in_batch") and first_piece is None
    return EntryRun(
        ledger_id,
        entry_id,
        messages,
        metadata.num_messages_in_batch if is_batch else 0,
        metadata.publish_time,
        metadata.producer_name,
        None if txn is None else TxnId(*txn),
        metadata.schema_version if metadata.HasField("schema_version") else None,
        first_piece,
        metadata,
    )


def _add_single(
    columns: MessageColumns,
    ledger_id: int,
    entry_id: int,
    metadata: MessageMetadata,
    data: bytes,
    first_piece: tuple[int, int] | None = None,
) -> int:
    row = len(columns.values)
    if metadata.properties:
        columns.properties[row] = properties_of(metadata)
    columns.own[row] = metadata
    columns.keys.append(key_of(metadata))
    columns.values.append(None if metadata.null_value else data)
    columns.event_times_ms.append(metadata.event_time or None)
    columns.sequence_ids.append(from_wire(metadata.sequence_id))
    columns.batch_indexes.append(-1)
    columns.runs.append(_run_of(ledger_id, entry_id, metadata, 1, first_piece))
    return 1


def _add_batch(
    columns: MessageColumns,
    entry: StoredEntry,
    metadata: MessageMetadata,
    rows: Rows,
    from_index: int,
    before_index: int | None,
) -> int:
    first, count = len(columns.values), len(rows.values)
    size = metadata.num_messages_in_batch
    gone = set(metadata.compacted_batch_indexes)
    if gone or from_index > 0 or (before_index is not None and before_index < size):
        before = size if before_index is None else before_index
        wanted = [
            place
            for place, index in enumerate(rows.indexes)
            if from_index <= index < before and index not in gone
        ]
        rows = _chosen(rows, wanted)
        count = len(wanted)
    if not count:
        return 0
    columns.keys += rows.keys
    columns.values += rows.values
    columns.event_times_ms += rows.event_times_ms
    columns.sequence_ids += rows.sequence_ids
    columns.batch_indexes += rows.indexes
    for place, own in rows.own.items():
        columns.own[first + place] = own
    for place, pairs in rows.properties.items():
        columns.properties[first + place] = pairs
    columns.runs.append(_run_of(entry.ledger_id, entry.entry_id, metadata, count))
    return count


def _chosen(rows: Rows, places: Sequence[int]) -> Rows:
    chosen = Rows()
    chosen.indexes = [rows.indexes[place] for place in places]
    chosen.keys = [rows.keys[place] for place in places]
    chosen.values = [rows.values[place] for place in places]
    chosen.event_times_ms = [rows.event_times_ms[place] for place in places]
    chosen.sequence_ids = [rows.sequence_ids[place] for place in places]
    chosen.own = {at: rows.own[place] for at, place in enumerate(places) if place in rows.own}
    chosen.properties = {
        at: rows.properties[place] for at, place in enumerate(places) if place in rows.properties
    }
    return chosen


def _damaged(entry: StoredEntry, why: str) -> InvalidMessage:
    return InvalidMessage(
        f"The entry {entry.ledger_id}:{entry.entry_id} cannot be taken apart ({why}); skip it, and "
        "look at its producer."
    )
