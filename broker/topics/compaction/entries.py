"""Pure: the messages of an entry as compaction sees them, and entries without some of them.

A batch counts as many messages as its metadata says; every other entry, and an encrypted batch,
counts as one message.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnetar.compression import CompressionType, compress, decompress
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.message import (
    build_batch,
    build_entry,
    iter_batch,
    parse_metadata,
    payload_of,
)
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.protocol.server_error import MagnetarError


class KeyedMessage(NamedTuple):
    """A message with a key: its index in the entry, its key, and whether it deletes the key."""

    batch_index: int
    key: bytes
    deletes: bool


class Chunk(NamedTuple):
    """The part of a chunked message that an entry is."""

    uuid: str
    last: bool


@dataclass(frozen=True, slots=True)
class EntryMessages:
    """The messages of one entry.

    `keyed` are those that may be kept: messages without a key are dropped.  An entry that cannot
    be read is `kept` as it is.  Of a chunked message only the last chunk is keyed.
    """

    count: int
    keyed: Sequence[KeyedMessage] = ()
    kept: bool = False
    chunk: Chunk | None = None
    transaction: tuple[int, int] | None = None


def message_count(data: bytes) -> int:
    """The number of messages in an entry: `EntryMessages.count`, from the metadata alone."""
    try:
        return _count(parse_metadata(data))
    except MagnetarError:
        return 1


def messages_of(data: bytes) -> EntryMessages:
    """The messages of an entry; a marker has none that is kept."""
    count = 1
    try:
        metadata = parse_metadata(data)
        count = _count(metadata)
        if metadata.marker_type:
            return EntryMessages(count)
        txn = None
        if metadata.HasField("txnid_least_bits"):
            txn = (metadata.txnid_most_bits, metadata.txnid_least_bits)
        if is_readable_batch(metadata):
            return _batch_messages(data, metadata, txn)
        return _single_message(data, metadata, txn)
    except MagnetarError:
        return EntryMessages(count, kept=True)


def _count(metadata: MessageMetadata) -> int:
    return metadata.num_messages_in_batch if is_readable_batch(metadata) else 1


def is_readable_batch(metadata: MessageMetadata) -> bool:
    """Whether the payload is a batch whose messages a broker can see."""
    return (
        metadata.HasField("num_messages_in_batch")
        and 0 < metadata.num_messages_in_batch <= MAX_BATCH_SIZE
        and not metadata.encryption_keys
    )


def _single_message(
    data: bytes, metadata: MessageMetadata, txn: tuple[int, int] | None
) -> EntryMessages:
    """The entry as one message, under its outer key."""
    chunk = None
    if metadata.num_chunks_from_msg > 1 and metadata.HasField("uuid"):
        last = metadata.chunk_id == metadata.num_chunks_from_msg - 1
        chunk = Chunk(metadata.uuid, last)
        if not last:
            return EntryMessages(1, chunk=chunk, transaction=txn)
    if not metadata.HasField("partition_key"):
        return EntryMessages(1, chunk=chunk, transaction=txn)
    size = len(payload_of(data))
    if metadata.HasField("uncompressed_size") and not chunk:
        size = metadata.uncompressed_size
    deletes = not size or metadata.null_value
    message = KeyedMessage(0, metadata.partition_key.encode(), deletes)
    return EntryMessages(1, (message,), chunk=chunk, transaction=txn)


def _batch_messages(
    data: bytes, metadata: MessageMetadata, txn: tuple[int, int] | None
) -> EntryMessages:
    count = metadata.num_messages_in_batch
    keyed = [
        KeyedMessage(index, single.partition_key.encode(), _deletes(single))
        for index, (single, _) in enumerate(iter_batch(_unpacked(data, metadata), count))
        if single.HasField("partition_key") and not single.compacted_out
    ]
    return EntryMessages(count, keyed, transaction=txn)


def _deletes(single: SingleMessageMetadata) -> bool:
    return not single.payload_size or single.null_value


def _unpacked(data: bytes, metadata: MessageMetadata) -> bytes | memoryview:
    return decompress(metadata.compression, payload_of(data), metadata.uncompressed_size)


def with_messages(data: bytes, count: int, kept: Collection[int]) -> bytes | None:
    """The entry with these messages of its `count`; None if that is none.

    The others of a batch become `compacted_out`, without payload, so that indexes stay.
    """
    if not kept:
        return None
    if count == 1 or len(kept) == count:
        return data
    metadata = parse_metadata(data)
    removed = SingleMessageMetadata(compacted_out=True, payload_size=0)
    payload = build_batch(
        (single, bytes(body)) if index in kept else (removed, b"")
        for index, (single, body) in enumerate(iter_batch(_unpacked(data, metadata), count))
    )
    del metadata.compacted_batch_indexes[:]
    metadata.compacted_batch_indexes.extend(sorted(kept))
    if metadata.compression:
        metadata.uncompressed_size = len(payload)
        payload = compress(CompressionType(metadata.compression), payload)
    return build_entry(metadata, payload)


def last_kept_index(data: bytes) -> int:
    """The index of the last message of an entry that is still there: -1 when it is no batch."""
    try:
        metadata = parse_metadata(data)
        if not metadata.HasField("num_messages_in_batch"):
            return -1
        count = metadata.num_messages_in_batch
        if metadata.compacted_batch_indexes:
            return min(max(metadata.compacted_batch_indexes), count - 1)
        return count - 1
    except MagnetarError:
        return -1
