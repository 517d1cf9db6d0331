"""Decodes stored entries into columns of messages: for tables, where objects are too slow.  Pure.

columns = MessageColumns()
for entry in entries:                       # of client.read_range
    take_apart(entry, columns)
columns.keys, columns.values, ...           # lists: one item for each message, a "row"
for run in columns.runs: ...                # the values that `run.messages` rows share
columns.clear()
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
    """The number of rows of one entry, and the values that they share."""

    ledger_id: int
    entry_id: int
    messages: int
    """The number of rows."""
    batch_size: int
    """Messages in the entry; 0 if it is not a batch, then the index of its row is -1."""
    publish_time_ms: int
    producer: str
    txn_id: TxnId | None
    schema_version: bytes | None
    first_piece: tuple[int, int] | None
    """Ledger and entry of the first chunk, if the message is chunked."""
    metadata: MessageMetadata
    """All metadata of the entry."""


class Piece(NamedTuple):
    """An entry with one chunk of a message."""

    ledger_id: int
    entry_id: int
    uuid: str
    """The same in all chunks of a message."""
    number: int
    """The number of the chunk, from 0 on."""
    pieces: int
    """The number of chunks of the message."""
    size: int
    """Bytes of all chunks together."""
    metadata: MessageMetadata
    data: bytes
    """The part of the payload, compressed as it was sent."""


class MessageColumns:
    """Columns of messages, filled by `take_apart` and `take_pieces`.

    Rows are in the order of the segment.  The lists have an item for each row, but `runs` for each
    entry with rows.  `properties` and `own` map row numbers, and hold only rows that have some.
    """

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
        """The key, in base64 if the producer gave bytes."""
        self.values: list[bytes | None] = []
        """The payload, decompressed; None if the message has no value."""
        self.event_times_ms: list[int | None] = []
        self.sequence_ids: list[int] = []
        self.batch_indexes: list[int] = []
        """The index in the batch; -1 for a message alone in its entry."""
        self.properties: dict[int, Properties] = {}
        """Names and values, each name once, of rows that have any."""
        self.own: dict[int, SingleMessageMetadata | MessageMetadata] = {}
        """Metadata of rows that may have more: bytes as key, an ordering key, ..."""
        self.runs: list[EntryRun] = []
        self.pieces: list[Piece] = []
        """Chunks of messages whose rows are not made yet."""

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.values)

    def clear(self) -> None:
        """Begin new lists.  Lists that callers hold stay as they are."""
        MessageColumns.__init__(self)


def metadata_of(entry: StoredEntry) -> MessageMetadata:
    """The metadata of an entry, also of an encrypted one.

    Raises `InvalidMessage` for a wrong checksum or malformed metadata.
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
    """Append the messages of an entry, whatever its visibility; returns the number of rows.

    Of a batch only those from `from_index` on and before `before_index` are added; a message alone
    in its entry has the index 0 here.  A chunk of a message is added to `columns.pieces`, and makes
    no row.  A marker, and messages that compaction removed, make no row either.

    Raises `InvalidMessage`, and adds nothing, if the checksum is wrong, or the entry is encrypted
    or cannot be unpacked.
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
    """Append the message with these chunks, all of them in order: one row, with the last one's id.

    Chunks of one message have the same `uuid` and the numbers 0 to `pieces` - 1.  Raises
    `InvalidMessage` if some are missing, or they cannot be unpacked.
    """
    last = pieces[-1] if pieces else None
    if last is None or [each.number for each in pieces] != list(range(last.pieces)):
        raise InvalidMessage(
            "These are not all chunks of a message in their order; read the entries between its "
            "first and its last one, and give one of each number."
        )
    whole = b"".join(each.data for each in pieces)
    if len({each.uuid for each in pieces}) != 1 or len(whole) != last.size:
        raise InvalidMessage(
            f"The chunks that end at {last.ledger_id}:{last.entry_id} are of several messages, or "
            "do not have the announced size; group them by their uuid."
        )
    metadata = last.metadata
    try:
        data = bytes(decompress(metadata.compression, whole, metadata.uncompressed_size))
    except InvalidMessage as error:
        raise _damaged(StoredEntry(last.ledger_id, last.entry_id, b""), str(error)) from error
    first = pieces[0].ledger_id, pieces[0].entry_id
    return _add_single(columns, last.ledger_id, last.entry_id, metadata, data, first)


def message_ids(columns: MessageColumns, segment_id: int) -> list[bytes]:
    """The bytes of the `MessageId` of each row (`MessageId.to_bytes`), all of one segment."""
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
    """The entry without broker metadata and checksum.  Raises `ChecksumMismatch`."""
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
        f"The entry {entry.ledger_id}:{entry.entry_id} cannot be decoded ({why}); skip it, and "
        "check its producer."
    )
