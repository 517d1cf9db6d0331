"""Fast encoders of the parts that a client writes for each message or batch.

The bytes are those of the protobuf encoder for the same fields (a property test compares them).
Numbers are unsigned.  Rarer fields are left to the generated encoder: protobuf fields may come in
any order, so its bytes are appended.
"""

from struct import Struct
from typing import Final

from magnetar.protocol.checksum import CHECKSUM_MAGIC
from magnetar.protocol.hot_frames import varint

_SIZES: Final = Struct(">II")
_U32: Final = Struct(">I")
_pack_u32: Final = _U32.pack
_MAGIC_CRC: Final = 6
"""Bytes before the checksummed part of an entry."""


def encode_single_head(
    payload_size: int, sequence_id: int, partition_key: bytes | None = None, event_time_ms: int = 0
) -> bytes:
    """The size and the SingleMessageMetadata of a message in a batch; its payload follows.

    `event_time_ms` is omitted when 0, the key when None.
    """
    head = b"\x18" + varint(payload_size)
    if partition_key is not None:
        head = b"\x12%b%b%b" % (varint(len(partition_key)), partition_key, head)
    if event_time_ms:
        head += b"\x28" + varint(event_time_ms)
    head += b"\x40" + varint(sequence_id)
    return _pack_u32(len(head)) + head


def encode_metadata_head(producer_name: bytes, sequence_id: int, publish_time_ms: int) -> bytes:
    """The required fields of a MessageMetadata, with which it begins."""
    return b"\x0a%b%b\x10%b\x18%b" % (
        varint(len(producer_name)),
        producer_name,
        varint(sequence_id),
        varint(publish_time_ms),
    )


def encode_key(partition_key: bytes) -> bytes:
    """The key in a MessageMetadata, to be appended to `encode_metadata_head`."""
    return b"\x32%b%b" % (varint(len(partition_key)), partition_key)


def encode_metadata_tail(
    *,
    compression: int = 0,
    uncompressed_size: int = 0,
    num_messages: int = 0,
    event_time_ms: int = 0,
    schema_version: bytes = b"",
    highest_sequence_id: int = 0,
    entry_hashes: tuple[int, int] | None = None,
) -> bytes:
    """The usual optional fields; each is omitted when 0, empty or None.

    `uncompressed_size` is written with every compression, even when 0.
    """
    tail = b""
    if compression:
        tail = b"\x40%b\x48%b" % (varint(compression), varint(uncompressed_size))
    if num_messages:
        tail += b"\x58" + varint(num_messages)
    if event_time_ms:
        tail += b"\x60" + varint(event_time_ms)
    if schema_version:
        tail += b"\x82\x01%b%b" % (varint(len(schema_version)), schema_version)
    if highest_sequence_id:
        tail += b"\xc0\x01" + varint(highest_sequence_id)
    if entry_hashes is not None:
        tail += b"\x88\x02%b\x90\x02%b" % (varint(entry_hashes[0]), varint(entry_hashes[1]))
    return tail


def encode_send_head(
    producer_id: int,
    sequence_id: int,
    num_messages: int,
    highest_sequence_id: int,
    checked_size: int,
    checksum: int,
) -> bytes:
    """The bytes before the checksummed part, of `checked_size` bytes, of a plain SEND.

    `num_messages` is omitted when 1, `highest_sequence_id` when 0.
    """
    send = b"\x08%b\x10%b" % (varint(producer_id), varint(sequence_id))
    if num_messages != 1:
        send += b"\x18" + varint(num_messages)
    if highest_sequence_id:
        send += b"\x30" + varint(highest_sequence_id)
    return wrap_send(send, checked_size, checksum)


def wrap_send(send: bytes, checked_size: int, checksum: int) -> bytes:
    """Like `encode_send_head`, for the bytes of any CommandSend."""
    command = b"\x08\x06\x32%b%b" % (varint(len(send)), send)
    size = len(command)
    return b"%b%b%b%b" % (
        _SIZES.pack(size + 4 + _MAGIC_CRC + checked_size, size),
        command,
        CHECKSUM_MAGIC,
        _pack_u32(checksum),
    )
