"""Entries for tests of compaction."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from magnetar.compression import CompressionType, compress, decompress
from magnetar.protocol.message import (
    build_batch,
    build_entry,
    iter_batch,
    parse_metadata,
    payload_of,
)
from magnetar.protocol.pulsar_pb2 import CompressionType as WireCompression
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata


class Message(NamedTuple):
    """A message: its key, or None, and its value; an empty one deletes the key."""

    key: str | None
    value: bytes


def metadata_of(sequence_id: int = 0) -> MessageMetadata:
    return MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1)


def single(message: Message, *, txn: int | None = None) -> bytes:
    metadata = metadata_of()
    if message.key is not None:
        metadata.partition_key = message.key
    if txn is not None:
        metadata.txnid_most_bits, metadata.txnid_least_bits = 0, txn
    return build_entry(metadata, message.value)


def batch(
    messages: Sequence[Message],
    kind: CompressionType = CompressionType.NONE,
    *,
    encrypted: bool = False,
) -> bytes:
    singles = [
        (
            SingleMessageMetadata(payload_size=0)
            if each.key is None
            else SingleMessageMetadata(partition_key=each.key, payload_size=0),
            each.value,
        )
        for each in messages
    ]
    payload = build_batch(singles)
    metadata = metadata_of()
    metadata.num_messages_in_batch = len(messages)
    if kind:
        metadata.compression = cast("WireCompression", int(kind))
        metadata.uncompressed_size = len(payload)
    if encrypted:
        metadata.encryption_keys.add(key="k", value=b"v")
    return build_entry(metadata, compress(kind, payload))


def marker() -> bytes:
    metadata = metadata_of()
    metadata.marker_type = 21
    return build_entry(metadata, b"")


def read_entry(data: bytes) -> list[tuple[int, Message]]:
    """The messages of an entry that a client would get, with their indexes."""
    metadata = parse_metadata(data)
    if not metadata.HasField("num_messages_in_batch"):
        key = metadata.partition_key if metadata.HasField("partition_key") else None
        return [(0, Message(key, bytes(payload_of(data))))]
    payload = decompress(metadata.compression, payload_of(data), metadata.uncompressed_size)
    return [
        (index, Message(one.partition_key if one.HasField("partition_key") else None, bytes(body)))
        for index, (one, body) in enumerate(iter_batch(payload, metadata.num_messages_in_batch))
        if not one.compacted_out
    ]
