"""Pure: the entries of a segment for the planner, and what another cluster gets of them.

Parts of a batch keep the metadata of the batch and of each message, their order and the codec.  The
sequence ids and the key of the batch become those of the messages that a part has.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from broker.replication.entries import with_origin
from broker.replication.segment_plan import (
    MessageHashes,
    Part,
    SourceEntry,
    hash_without_key,
)
from broker.topics.replicated_ranges import SourceSegment
from config.bounds import OPENED_BATCHES_BYTES
from magnetar.compression import CompressionType, compress, decompress
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import key_hash
from magnetar.protocol.message import (
    build_batch,
    build_entry,
    iter_batch,
    partition_key,
    payload_of,
)
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.protocol.server_error import MagnetarError

Messages = Sequence[tuple[SingleMessageMetadata, bytes]]


class SourceRange(NamedTuple):
    """The hashes of the segment here, and how clients of the other cluster choose a segment."""

    hash_start: int
    hash_end: int
    segment_hash: Callable[[bytes], int]


def is_openable(metadata: MessageMetadata) -> bool:
    """Whether an entry is a batch that can be opened."""
    return (
        metadata.HasField("num_messages_in_batch")
        and 0 < metadata.num_messages_in_batch <= MAX_BATCH_SIZE
        and metadata.uncompressed_size <= OPENED_BATCHES_BYTES
        and not metadata.encryption_keys
    )


def open_batch(entry: bytes, metadata: MessageMetadata) -> Messages:
    """The messages of an entry that is openable.

    Raises `MalformedBatch`, `MalformedMetadata`, `MalformedEntry`, and `InvalidMessage` for a
    payload that cannot be unpacked.
    """
    payload = decompress(metadata.compression, payload_of(entry), metadata.uncompressed_size)
    return [
        (single, bytes(body))
        for single, body in iter_batch(payload, metadata.num_messages_in_batch)
    ]


class OpenedBatch(NamedTuple):
    """A batch that was opened: what the planner has to know of it, and its messages."""

    source_entry: SourceEntry
    messages: Messages | None


def opened_batch(
    entry: bytes, metadata: MessageMetadata, position: Position, source: SourceRange
) -> OpenedBatch:
    """Open a batch; without messages it cannot be read, and goes whole, by the key of the entry."""
    messages = None
    with suppress(FrameError, MagnetarError):
        messages = open_batch(entry, metadata) if is_openable(metadata) else None
    if messages is not None:
        return OpenedBatch(source_entry_of(metadata, position, source, messages), messages)
    whole = MessageMetadata()
    whole.CopyFrom(metadata)
    whole.ClearField("num_messages_in_batch")
    return OpenedBatch(source_entry_of(whole, position, source), None)


def source_entry_of(
    metadata: MessageMetadata,
    position: Position,
    source: SourceRange,
    messages: Messages | None = None,
    earlier: tuple[Position, ...] = (),
) -> SourceEntry:
    """An entry for the planner; `messages` are those of one that was opened.

    `earlier` are the chunks before this last one of its message.
    """
    if messages is not None:
        keyless = hash_without_key(position.text.encode(), source.hash_start, source.hash_end)
        hashes = [_hashes(single, source, keyless) for single, _ in messages]
        return SourceEntry(position, hashes)
    if is_openable(metadata):
        stamp = None
        if metadata.HasField("entry_hash_min") and metadata.HasField("entry_hash_max"):
            stamp = (metadata.entry_hash_min, metadata.entry_hash_max)
        return SourceEntry(position, None, stamp)
    # The chunks of a message, which have entries of their own, must have one hash.
    together = metadata.uuid if metadata.HasField("chunk_id") else position.text
    keyless = hash_without_key(together.encode(), source.hash_start, source.hash_end)
    return SourceEntry(position, [_hashes(metadata, source, keyless)], earlier=earlier)


def _hashes(
    metadata: MessageMetadata | SingleMessageMetadata, source: SourceRange, keyless: int
) -> MessageHashes:
    key = partition_key(metadata)
    sticky = metadata.ordering_key if metadata.HasField("ordering_key") else key
    return MessageHashes(
        keyless if key is None else source.segment_hash(key),
        # As clients do: without a key it is the first entry bucket.
        0 if sticky is None else key_hash(sticky) & 0xFFFF,
    )


class Origin(NamedTuple):
    """Where an entry is from, and the version of its schema in the other cluster."""

    source: SourceSegment
    schema_version: bytes | None


def outgoing_part(
    entry: bytes,
    metadata: MessageMetadata,
    part: Part | None,
    origin: Origin,
    messages: Messages | None = None,
    hashes: Sequence[MessageHashes] | None = None,
) -> bytes:
    """The entry for the other cluster; `metadata` is its own, and is left as it is.

    Without `part` it is a chunk before the last one of its message, and has no record.  `hashes`
    are those of a batch that was opened, `messages` are needed where it is divided.  Raises
    `MalformedEntry`.
    """
    sent = with_origin(metadata, origin.source.cluster, origin.schema_version)
    sent.ClearField("replicated_part")
    payload = bytes(payload_of(entry))
    if part is not None:
        sent.replicated_part.CopyFrom(part.record.to_wire(origin.source))
        if part.indexes is not None:
            assert messages is not None, "a batch is divided once it was opened"
            payload = _divide(sent, [messages[index] for index in part.indexes])
        if hashes is not None:
            indexes = range(len(hashes)) if part.indexes is None else part.indexes
            buckets = [hashes[index].bucket for index in indexes]
            sent.entry_hash_min, sent.entry_hash_max = min(buckets), max(buckets)
    return build_entry(sent, payload)


def divided_batch(
    entry: bytes,
    metadata: MessageMetadata,
    parts: Sequence[Part | None],
    origin: Origin,
    hashes: Sequence[MessageHashes] | None,
) -> list[bytes]:
    """Open a batch, and build these parts of it.  Raises as `open_batch`."""
    messages = open_batch(entry, metadata)
    return [outgoing_part(entry, metadata, part, origin, messages, hashes) for part in parts]


def _divide(sent: MessageMetadata, chosen: Messages) -> bytes:
    """Make the metadata that of a batch with these messages; the batch's payload."""
    first, last = chosen[0][0], chosen[-1][0]
    sent.num_messages_in_batch = len(chosen)
    sent.ClearField("compacted_batch_indexes")
    for name in ("partition_key", "partition_key_b64_encoded", "null_partition_key"):
        sent.ClearField(name)
        if first.HasField(name):
            setattr(sent, name, getattr(first, name))
    sent.ClearField("ordering_key")
    if first.HasField("ordering_key"):
        sent.ordering_key = first.ordering_key
    if first.HasField("sequence_id") and last.HasField("sequence_id"):
        sent.sequence_id = first.sequence_id
        if sent.HasField("highest_sequence_id"):
            sent.highest_sequence_id = last.sequence_id
    payload = build_batch(chosen)
    if sent.compression:
        sent.uncompressed_size = len(payload)
        payload = compress(CompressionType(sent.compression), payload)
    return payload
