"""Paths and encoding of the records of managed ledgers and cursors: Pulsar's own formats.

`/managed-ledgers/<ledger path>` is the record of a stream; its children are the records of its
durable cursors.  Records are written plain; they are read plain, or with Pulsar's compression
header and LZ4 or ZLIB.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from uuid import UUID

import lz4.block
from google.protobuf.message import DecodeError

from magnetar.protocol import ack_set
from magnetar.protocol.ids import Position
from magnetar.protocol.names import decode_name, encode_name
from storage.managed_ledger import managed_ledger_pb2 as pb
from storage.managed_ledger.ack_ranges import AckRanges, BatchBits
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import CorruptRecord
from storage.offload.context import OffloadContext

ROOT = "/managed-ledgers"
NAMES_INDEX = "managed-ledgers"
"""Index of all streams by ledger path: their keys have several levels, which no scan covers."""
INLINE_LEDGER_ID = -1
"""In a cursor record: the position is in the record itself."""
_UNUSED_SINCE = "magnetar.unused-since-ms"
"""Number of a cursor's record: see `CursorSnapshot.unused_since_ms`."""
_BEGAN = ("magnetar.began-ledger-id", "magnetar.began-entry-id")
"""Numbers of a cursor's position: see `CursorSnapshot.began`."""
_NOTE = "magnetar.note-"
"""Numbers of a cursor's position: see `CursorSnapshot.notes`."""
_SENT_AS = "magnetar.sent-as"
"""Number of a cursor's position: see `CursorSnapshot.sent_as`; signed, as all of them."""
_SENT_TO = "magnetar.sent-to"
"""The same of `CursorSnapshot.sent_to`."""
REPLICATED = "pulsar.replicated.subscription"
"""Property of a cursor whose subscription is to be replicated; a number in records, as Pulsar's.

Its value is what the subscription has noted with that, "" for nothing.
"""
_REPLICATED_NOTE = "magnetar.replicated "
"""Number of a cursor's record whose name ends with the value of REPLICATED."""
_RANGE_BYTES = 16
_WORD_BYTES = 1
_COMPRESSION_MAGIC = b"\x47\x78"
_MAX_RECORD_BYTES = 64 * 1024 * 1024
_DOTS = {".": "%2E", "..": "%2E%2E"}


def ledger_key(name: str) -> str:
    """The record key of a stream; `name` is its ledger path."""
    return f"{ROOT}/{name}"


def is_ledger_key(key: str) -> bool:
    """Whether a key found in the index of streams is that of one: others may use the index too."""
    return key.startswith(f"{ROOT}/")


def cursor_key(name: str, cursor: str) -> str:
    """The record key of a durable cursor."""
    part = encode_name(cursor)
    return f"{ledger_key(name)}/{_DOTS.get(part, part)}"


def cursor_name(child: str) -> str:
    """The cursor's name from the last part of its key."""
    return decode_name(child)


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """The decoded record of a stream."""

    ledgers: tuple[LedgerInfo, ...] = ()
    terminated: Position | None = None
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CursorState:
    """A cursor's position as it was read.

    `spans` are acknowledged entries, as (exclusive, inclusive) ends that may cross ledgers; `words`
    are acknowledged entries as bit sets that begin at entry 0 of a ledger.  `numbers` are Apache
    Pulsar's own properties of the position.  `began`, `sent_as` and `sent_to` as in
    `CursorSnapshot`.
    """

    mark_delete: Position
    spans: tuple[tuple[Position, Position], ...] = ()
    words: tuple[tuple[int, tuple[int, ...]], ...] = ()
    batches: Mapping[Position, int] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    began: Position | None = None
    notes: tuple[int, ...] = ()
    sent_as: int | None = None
    sent_to: int | None = None


@dataclass(frozen=True, slots=True)
class CursorRecord:
    """The decoded record of a cursor."""

    ledger_id: int
    state: CursorState
    properties: Mapping[str, str]
    unused_since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CursorSnapshot:
    """A cursor's live state, not copied: encode it before anything changes."""

    mark_delete: Position
    acked: AckRanges
    batches: BatchBits
    unused_since_ms: int | None = None
    """When its last user left, in ms since 1970; None while it is used, or if nobody noted it."""
    began: Position | None = None
    """What `Cursor.began` is; it is written with the mark-delete position, never apart from it."""
    notes: tuple[int, ...] = ()
    """Numbers that the subscription has stored with the position, each less than 2**63."""
    sent_as: int | None = None
    """What `Cursor.sent_as` is; the same of it."""
    sent_to: int | None = None
    """What `Cursor.sent_to` is; the same of it."""


def encode_stream(record: StreamRecord) -> bytes:
    """The value of a stream's record; the ledger being written is listed by its id only."""
    info = pb.ManagedLedgerInfo()
    for ledger in record.ledgers:
        item = info.ledgerInfo.add(ledgerId=ledger.ledger_id)
        if ledger.closed_ms:
            item.entries = ledger.entries
            item.size = ledger.size_bytes
            item.timestamp = ledger.closed_ms
        if ledger.offload is not None:
            _encode_offload(item.offloadContext, ledger.offload)
    if record.terminated is not None:
        info.terminatedPosition.ledgerId = record.terminated.ledger_id
        info.terminatedPosition.entryId = record.terminated.entry_id
    for key in sorted(record.properties):
        info.properties.add(key=key, value=record.properties[key])
    return info.SerializeToString()


def decode_stream(key: str, value: bytes) -> StreamRecord:
    """Decode a stream's record.  Raises `CorruptRecord`."""
    info = pb.ManagedLedgerInfo()
    _parse(key, value, info)
    terminated = None
    if info.HasField("terminatedPosition"):
        terminated = _position(info.terminatedPosition)
    return StreamRecord(
        tuple(
            LedgerInfo(
                item.ledgerId, item.entries, item.size, item.timestamp, _decode_offload(item)
            )
            for item in sorted(info.ledgerInfo, key=lambda item: item.ledgerId)
        ),
        terminated,
        {item.key: item.value for item in info.properties},
    )


def _encode_offload(item: pb.OffloadContext, offload: OffloadContext) -> None:
    most, least = struct.unpack(">qq", offload.uid.bytes)
    item.uidMsb, item.uidLsb = most, least
    item.complete = offload.complete
    item.bookkeeperDeleted = offload.hot_deleted
    if offload.offloaded_ms:
        item.timestamp = offload.offloaded_ms
    item.driverMetadata.name = offload.driver
    for key in sorted(offload.properties):
        item.driverMetadata.properties.add(key=key, value=offload.properties[key])


def _decode_offload(ledger: pb.ManagedLedgerInfo.LedgerInfo) -> OffloadContext | None:
    item = ledger.offloadContext
    if not item.HasField("uidMsb"):
        return None
    return OffloadContext(
        UUID(bytes=struct.pack(">qq", item.uidMsb, item.uidLsb)),
        item.driverMetadata.name,
        {each.key: each.value for each in item.driverMetadata.properties},
        item.complete,
        item.bookkeeperDeleted,
        item.timestamp,
    )


def encode_cursor(
    ledger_id: int, snapshot: CursorSnapshot, properties: Mapping[str, str], now_ms: int
) -> bytes:
    """The value of a cursor's record: the whole position, or its mark-delete and the ledger's id.

    Acknowledged entries after the mark-delete are in it only if the position has no ledger.
    """
    info = pb.ManagedCursorInfo(
        cursorsLedgerId=ledger_id,
        markDeleteLedgerId=snapshot.mark_delete.ledger_id,
        markDeleteEntryId=snapshot.mark_delete.entry_id,
        lastActive=now_ms,
    )
    if ledger_id == INLINE_LEDGER_ID:
        info.individualDeletedMessages.extend(_encode_ranges(snapshot.acked))
        info.batchedEntryDeletionIndexInfo.extend(_encode_batches(snapshot.batches))
    if snapshot.unused_since_ms is not None:
        # Not lastActive: Pulsar, and earlier versions, set that without knowing of uses.
        info.properties.add(name=_UNUSED_SINCE, value=snapshot.unused_since_ms)
    info.properties.extend(_encode_noted(snapshot))
    if REPLICATED in properties:
        info.properties.add(name=REPLICATED, value=1)
        if properties[REPLICATED]:
            info.properties.add(name=_REPLICATED_NOTE + properties[REPLICATED], value=1)
    for name in sorted(properties.keys() - {REPLICATED}):
        info.cursorProperties.add(name=name, value=properties[name])
    return info.SerializeToString()


def decode_cursor(key: str, value: bytes) -> CursorRecord:
    """Decode a cursor's record.  Raises `CorruptRecord`."""
    info = pb.ManagedCursorInfo()
    _parse(key, value, info)
    numbers = {item.name: item.value for item in info.properties}
    unused_since_ms = numbers.pop(_UNUSED_SINCE, None)
    noted = _take_noted(numbers)
    properties = {item.name: item.value for item in info.cursorProperties}
    notes = [name for name in numbers if name.startswith(_REPLICATED_NOTE)]
    for name in notes:
        del numbers[name]
    if numbers.pop(REPLICATED, 0):
        properties[REPLICATED] = notes[0].removeprefix(_REPLICATED_NOTE) if notes else ""
    return CursorRecord(
        info.cursorsLedgerId,
        CursorState(
            Position(info.markDeleteLedgerId, info.markDeleteEntryId),
            _decode_ranges(info.individualDeletedMessages),
            (),
            _decode_batches(key, info.batchedEntryDeletionIndexInfo),
            numbers,
            *noted,
        ),
        properties,
        unused_since_ms,
    )


def encode_position(snapshot: CursorSnapshot) -> bytes:
    """One entry of a cursor's ledger: acknowledged entries as ranges or words, as is smaller."""
    info = pb.PositionInfo(
        ledgerId=snapshot.mark_delete.ledger_id, entryId=snapshot.mark_delete.entry_id
    )
    acked = snapshot.acked
    if acked.run_count() * _RANGE_BYTES <= acked.word_count() * _WORD_BYTES:
        info.individualDeletedMessages.extend(_encode_ranges(acked))
    else:
        for ledger_id, words in acked.words().items():
            info.individualDeletedMessageRanges.add(key=ledger_id, values=words)
    info.batchedEntryDeletionIndexInfo.extend(_encode_batches(snapshot.batches))
    info.properties.extend(_encode_noted(snapshot))
    return info.SerializeToString()


def decode_position(key: str, value: bytes) -> CursorState:
    """Decode an entry of a cursor's ledger; `key` names the cursor in errors.

    Words count only if there are no ranges, as in Pulsar.  Raises `CorruptRecord`.
    """
    info = pb.PositionInfo()
    _parse(key, value, info, compressed=False)
    spans = _decode_ranges(info.individualDeletedMessages)
    words = () if spans else tuple(info.individualDeletedMessageRanges)
    numbers = {item.name: item.value for item in info.properties}
    noted = _take_noted(numbers)
    return CursorState(
        Position(info.ledgerId, info.entryId),
        spans,
        tuple((item.key, tuple(item.values)) for item in words),
        _decode_batches(key, info.batchedEntryDeletionIndexInfo),
        numbers,
        *noted,
    )


def inline_bytes(snapshot: CursorSnapshot) -> int:
    """About the size in bytes of the snapshot in a cursor's record."""
    return (snapshot.acked.run_count() + 2 * len(snapshot.batches)) * _RANGE_BYTES


def _encode_noted(snapshot: CursorSnapshot) -> Iterator[pb.LongProperty]:
    """What Magnetar stores with a position, as properties of it."""
    if snapshot.began is not None:
        for name, value in zip(_BEGAN, snapshot.began, strict=True):
            yield pb.LongProperty(name=name, value=value)
    for number, note in enumerate(snapshot.notes):
        yield pb.LongProperty(name=f"{_NOTE}{number}", value=note)
    for name, incarnation in ((_SENT_AS, snapshot.sent_as), (_SENT_TO, snapshot.sent_to)):
        if incarnation is not None:
            signed = (incarnation + 2**63) % 2**64 - 2**63
            yield pb.LongProperty(name=name, value=signed)


def _take_noted(
    numbers: dict[str, int],
) -> tuple[Position | None, tuple[int, ...], int | None, int | None]:
    """Take `began`, `notes`, `sent_as` and `sent_to` out of the numbers of a position."""
    ledger_id, entry_id = (numbers.pop(name, None) for name in _BEGAN)
    began = None if ledger_id is None or entry_id is None else Position(ledger_id, entry_id)
    notes: list[int] = []
    while (note := numbers.pop(f"{_NOTE}{len(notes)}", None)) is not None:
        notes.append(note)
    sent_as, sent_to = (
        None if signed is None else signed % 2**64
        for signed in (numbers.pop(_SENT_AS, None), numbers.pop(_SENT_TO, None))
    )
    return began, tuple(notes), sent_as, sent_to


def _encode_ranges(acked: AckRanges) -> Iterator[pb.MessageRange]:
    for ledger_id, first, last in acked.ranges():
        yield pb.MessageRange(
            lowerEndpoint=pb.NestedPositionInfo(ledgerId=ledger_id, entryId=first - 1),
            upperEndpoint=pb.NestedPositionInfo(ledgerId=ledger_id, entryId=last),
        )


def _encode_batches(batches: BatchBits) -> Iterator[pb.BatchedEntryDeletionIndexInfo]:
    for position, remaining in batches.items():
        yield pb.BatchedEntryDeletionIndexInfo(
            position=pb.NestedPositionInfo(ledgerId=position.ledger_id, entryId=position.entry_id),
            deleteSet=ack_set.to_words(remaining),
        )


def _decode_ranges(
    ranges: Iterable[pb.MessageRange],
) -> tuple[tuple[Position, Position], ...]:
    return tuple((_position(item.lowerEndpoint), _position(item.upperEndpoint)) for item in ranges)


def _decode_batches(
    key: str, batches: Iterable[pb.BatchedEntryDeletionIndexInfo]
) -> dict[Position, int]:
    found: dict[Position, int] = {}
    for item in batches:
        words = list(item.deleteSet)
        if len(words) * 64 > ack_set.MAX_BATCH_SIZE:
            raise _corrupt(key, f"a batch with {len(words)} words of acknowledgements")
        bits = ack_set.from_words(words, len(words) * 64) if words else 0
        if bits:
            found[_position(item.position)] = bits
    return found


def _position(info: pb.NestedPositionInfo) -> Position:
    return Position(info.ledgerId, info.entryId)


def _parse(
    key: str,
    value: bytes,
    message: pb.ManagedLedgerInfo | pb.ManagedCursorInfo | pb.PositionInfo | pb.RecordCompression,
    *,
    compressed: bool = True,
) -> None:
    if compressed and value.startswith(_COMPRESSION_MAGIC):
        value = _decompress(key, value)
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise _corrupt(key, "bytes that are no such record") from error
    if not message.IsInitialized():
        raise _corrupt(key, "only part of such a record")


def _decompress(key: str, value: bytes) -> bytes:
    """Undo Pulsar's compression: magic, length of the head, head, compressed block."""
    head_end = 6 + int.from_bytes(value[2:6], "big")
    head = pb.RecordCompression()
    _parse(key, value[6:head_end], head, compressed=False)
    block, size = value[head_end:], head.uncompressedSize
    if not 0 <= size <= _MAX_RECORD_BYTES:
        raise _corrupt(key, f"a compressed block that says to be {size} bytes")
    if head.compressionType == 0:
        return block
    try:
        if head.compressionType == 1:
            return bytes(lz4.block.decompress(block, uncompressed_size=size))
        if head.compressionType == 2:
            return zlib.decompressobj().decompress(block, size)
    except (lz4.block.LZ4BlockError, zlib.error) as error:
        raise _corrupt(key, "a broken compressed block") from error
    raise CorruptRecord(
        f"Record {key} has a compression that Magnetar does not read (type "
        f"{head.compressionType}): have Pulsar rewrite it with "
        "managedLedgerInfoCompressionType=NONE and "
        "managedCursorInfoCompressionType=NONE."
    )


def _corrupt(key: str, what: str) -> CorruptRecord:
    return CorruptRecord(f"Record {key} holds {what}: restore it from a backup.")
