"""Entries: their metadata and their messages.

An entry is `0x0e01, crc32c, u32 metadata size, MessageMetadata, payload`.  With
`num_messages_in_batch` in the metadata the payload is a batch: so many times `u32 size,
SingleMessageMetadata, payload_size bytes`.  A compressed or encrypted payload must be unpacked
before `iter_batch`; a broker never unpacks payloads.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from magnetar.protocol.checksum import CHECKED_FROM, CHECKSUM_MAGIC, seal_entry
from magnetar.protocol.frame_error import MalformedBatch, MalformedEntry, MalformedMetadata
from magnetar.protocol.ids import from_wire
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.protocol.text_check import has_broken_text, text_plan

_U32: Final = Struct(">I")
_METADATA_FROM: Final = CHECKED_FROM + 4
_METADATA_TEXT: Final = text_plan(cast("Descriptor", MessageMetadata.DESCRIPTOR))
_SINGLE_TEXT: Final = text_plan(cast("Descriptor", SingleMessageMetadata.DESCRIPTOR))


def parse_metadata(entry: bytes) -> MessageMetadata:
    """The metadata of an entry.  Raises `MalformedEntry` or `MalformedMetadata`."""
    raw = entry[_METADATA_FROM : _payload_start(entry)]
    try:
        metadata = MessageMetadata.FromString(raw)
    except DecodeError as error:
        raise _unreadable(f"not a MessageMetadata ({error})") from error
    if not metadata.IsInitialized():
        raise _unreadable("without producer name, sequence id, publish time or a nested field")
    if _METADATA_TEXT and not raw.isascii() and has_broken_text(metadata, _METADATA_TEXT):
        raise _unreadable("text that is not UTF-8")
    return metadata


def transaction_named_by(metadata: MessageMetadata) -> tuple[int, int] | None:
    """The most and least bits of the messages' transaction, or None."""
    if not metadata.HasField("txnid_least_bits"):
        return None
    return metadata.txnid_most_bits, metadata.txnid_least_bits


def naming_transaction(entry: bytes, txn: tuple[int, int]) -> bytes:
    """The entry with a transaction in its metadata, which names none.  Raises `MalformedEntry`."""
    start = _payload_start(entry)
    # Fields at the end of the metadata are as good as in their place.
    named = MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
    raw = entry[_METADATA_FROM:start] + named.SerializePartialToString()
    return seal_entry(b"".join((_U32.pack(len(raw)), raw, entry[start:])))


def _unreadable(what: str) -> MalformedMetadata:
    return MalformedMetadata(
        f"The metadata of a message is {what}; correct the producer, or skip the message."
    )


def payload_of(entry: bytes) -> memoryview:
    """The payload of an entry, without a copy.  Raises `MalformedEntry`."""
    return memoryview(entry)[_payload_start(entry) :]


def _payload_start(entry: bytes) -> int:
    if len(entry) >= _METADATA_FROM and entry[:2] == CHECKSUM_MAGIC:
        (size,) = _U32.unpack_from(entry, CHECKED_FROM)
        start = _METADATA_FROM + int(size)
        if start <= len(entry):
            return start
    raise MalformedEntry(
        f"{len(entry)} bytes are not an entry: magic, checksum, metadata size and metadata are "
        "missing or cut; restore the entry or skip it."
    )


def build_entry(metadata: MessageMetadata, payload: bytes) -> bytes:
    """Make the entry of this metadata and payload, with its checksum."""
    raw = metadata.SerializeToString()
    return seal_entry(b"".join((_U32.pack(len(raw)), raw, payload)))


def iter_batch(
    payload: bytes | memoryview, count: int
) -> Iterator[tuple[SingleMessageMetadata, memoryview]]:
    """The `count` messages of an uncompressed batch payload, without a copy.

    Raises `MalformedBatch` if the payload has fewer or more messages, or a size that does not fit,
    and `MalformedMetadata` for metadata that cannot be read.
    """
    view = memoryview(payload)
    position = 0
    for index in range(count):
        if len(view) - position < 4:
            raise _bad_batch(f"ends before message {index} of {count}")
        (size,) = _U32.unpack_from(view, position)
        start = position + 4 + size
        if start > len(view):
            raise _bad_batch(f"ends inside the metadata of message {index} of {count}")
        metadata = parse_single_metadata(bytes(view[position + 4 : start]))
        end = start + metadata.payload_size
        if not start <= end <= len(view):
            raise _bad_batch(
                f"has {len(view) - start} bytes for message {index} of {count}, which announces "
                f"{metadata.payload_size}"
            )
        yield metadata, view[start:end]
        position = end
    if position != len(view):
        raise _bad_batch(f"has {len(view) - position} bytes after its {count} messages")


def parse_single_metadata(raw: bytes) -> SingleMessageMetadata:
    """The metadata of a message in a batch.  Raises `MalformedMetadata`."""
    try:
        metadata = SingleMessageMetadata.FromString(raw)
    except DecodeError as error:
        raise _unreadable(f"not a SingleMessageMetadata ({error})") from error
    if not metadata.IsInitialized():
        raise _unreadable("without payload size or a nested field")
    if _SINGLE_TEXT and not raw.isascii() and has_broken_text(metadata, _SINGLE_TEXT):
        raise _unreadable("text that is not UTF-8")
    return metadata


def _bad_batch(what: str) -> MalformedBatch:
    return MalformedBatch(
        f"A batch {what}; unpack compressed payloads first, and compare num_messages_in_batch."
    )


def build_batch(messages: Iterable[tuple[SingleMessageMetadata, bytes]]) -> bytes:
    """Make the uncompressed batch payload of these messages; sets each `payload_size`."""
    parts: list[bytes] = []
    for given, payload in messages:
        metadata = SingleMessageMetadata()
        metadata.CopyFrom(given)
        metadata.payload_size = len(payload)
        raw = metadata.SerializeToString()
        parts += (_U32.pack(len(raw)), raw, payload)
    return b"".join(parts)


def sticky_key(metadata: MessageMetadata) -> bytes:
    """The key by which Key_Shared groups messages.

    It is the ordering key, else the key, else `<producer>-<sequence id>`.
    """
    if metadata.HasField("ordering_key"):
        return metadata.ordering_key
    key = partition_key(metadata)
    if key is None:
        return f"{metadata.producer_name}-{from_wire(metadata.sequence_id)}".encode()
    return key


def partition_key(metadata: MessageMetadata | SingleMessageMetadata) -> bytes | None:
    """The key of a message, also of one in a batch, or of the first one of a batch; None without.

    A key that is marked as base64 and is not counts as text.
    """
    if not metadata.HasField("partition_key"):
        return None
    key = metadata.partition_key.encode()
    if metadata.partition_key_b64_encoded:
        try:
            return b64decode(key, validate=True)
        except Base64Error:
            return key
    return key
