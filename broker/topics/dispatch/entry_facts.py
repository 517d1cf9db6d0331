"""Properties of an entry that dispatch reads from its metadata.

Permits and unacknowledged bounds count messages, so every entry's metadata is parsed once for each
subscription.  The C protobuf parser takes 0.9 us for that; scanning the fields in Python was
measured slower (1.2 us for six fields, growing with properties), and keeping the result for the
next subscription costs about as much as it saves.

An entry whose metadata cannot be read counts as one message without key, and one that names a
number of messages that no batch has as one message: it is delivered as it is, and the client
decides.
"""

from collections.abc import Callable, Sequence
from typing import Final, cast

from google.protobuf.message import DecodeError

from broker.topics.deduplication import Chunk, chunk_of
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.key_hash import HashRange, sticky_hash
from magnetar.protocol.message import sticky_key, transaction_named_by
from magnetar.protocol.pulsar_pb2 import MessageMetadata

_PARSE: Final = cast("Callable[[bytes], MessageMetadata]", MessageMetadata.FromString)
_SIZE_FROM: Final = 6
_METADATA_FROM: Final = 10
_KEYLESS_HASH: Final = 1


def _metadata(data: bytes) -> MessageMetadata | None:
    size = int.from_bytes(data[_SIZE_FROM:_METADATA_FROM], "big")
    try:
        return _PARSE(data[_METADATA_FROM : _METADATA_FROM + size])
    except DecodeError:
        return None


def facts_of(data: bytes) -> tuple[int, bool]:
    """The number of messages in an entry, and whether the entry is special.

    Special are markers, entries of transactions, those with a delivery time, and chunks.
    """
    metadata = _metadata(data)
    if metadata is None:
        return 1, False
    count = metadata.num_messages_in_batch  # no more calls than need be: this is for every entry
    return (
        count if 0 < count <= MAX_BATCH_SIZE else 1,
        metadata.marker_type != 0
        or metadata.deliver_at_time != 0
        or metadata.num_chunks_from_msg > 1
        or metadata.HasField("txnid_least_bits"),
    )


def keyed_facts_of(data: bytes) -> tuple[int, bool, int]:
    """As `facts_of`, and the Key_Shared hash of the entry: 1 to 65535."""
    metadata = _metadata(data)
    if metadata is None:
        return 1, False, _KEYLESS_HASH
    count = metadata.num_messages_in_batch
    return (
        count if 0 < count <= MAX_BATCH_SIZE else 1,
        metadata.marker_type != 0
        or metadata.deliver_at_time != 0
        or metadata.num_chunks_from_msg > 1
        or metadata.HasField("txnid_least_bits"),
        sticky_hash(sticky_key(metadata)),
    )


def has_key_within(data: bytes, ranges: Sequence[HashRange]) -> bool:
    """Whether the key of an entry has its hash in one of the ranges."""
    _, _, key_hash = keyed_facts_of(data)
    return any(first <= key_hash <= last for first, last in ranges)


def bucketed_facts_of(data: bytes) -> tuple[int, bool, int, bool]:
    """As `facts_of`, the hash that decides the entry bucket (PIP-486), and whether it is a stamp.

    That is the lowest hash of its messages, with which producers after 5.0.0-M1 stamp entries, else
    the hash of its sticky key.
    """
    metadata = _metadata(data)
    if metadata is None:
        return 1, False, _KEYLESS_HASH, False
    count, stamped = metadata.num_messages_in_batch, metadata.HasField("entry_hash_min")
    return (
        count if 0 < count <= MAX_BATCH_SIZE else 1,
        metadata.marker_type != 0
        or metadata.deliver_at_time != 0
        or metadata.num_chunks_from_msg > 1
        or metadata.HasField("txnid_least_bits"),
        metadata.entry_hash_min if stamped else sticky_hash(sticky_key(metadata)),
        stamped,
    )


def chunk_in(data: bytes) -> Chunk | None:
    """The chunk of a message that the entry is; None for a whole message."""
    metadata = _metadata(data)
    return None if metadata is None else chunk_of(metadata)


def marker_or_transaction(data: bytes) -> tuple[bool, tuple[int, int] | None]:
    """Whether the entry is a marker, and the transaction that it is part of."""
    metadata = _metadata(data)
    if metadata is None:
        return False, None
    return metadata.marker_type != 0, transaction_named_by(metadata)


def is_marker(data: bytes) -> bool:
    """Whether the entry is a marker, written by a broker for brokers: no consumer gets it."""
    metadata = _metadata(data)
    return metadata is not None and metadata.marker_type != 0


def publish_time_ms(data: bytes) -> int:
    """Publish time of the entry, by the producer's clock; 0 when that cannot be read."""
    metadata = _metadata(data)
    return 0 if metadata is None else metadata.publish_time


def deliver_at_ms(data: bytes) -> int:
    """Earliest time of delivery, since 1970; 0 or less: at once."""
    metadata = _metadata(data)
    return 0 if metadata is None else metadata.deliver_at_time


def last_batch_index(data: bytes) -> int:
    """The index of the newest message of an entry: -1 when it is no batch."""
    metadata = _metadata(data)
    if metadata is None or not metadata.HasField("num_messages_in_batch"):
        return -1
    return facts_of(data)[0] - 1
