"""Pure: an entry as Apache Pulsar's REST shows it, its metadata as headers and its payload as body.

The names and forms of the headers are those that Pulsar's admin library reads.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from magnetar.compression import decompress
from magnetar.protocol.message import parse_metadata, payload_of, transaction_named_by
from magnetar.protocol.pulsar_pb2 import CompressionType, MessageMetadata
from storage.managed_ledger.types import Entry

PREFIX = "X-Pulsar-"
_PLAIN = {
    "sequence_id": "sequence-id",
    "highest_sequence_id": "highest-sequence-id",
    "txnid_most_bits": "txnid-most-bits",
    "txnid_least_bits": "txnid-least-bits",
    "num_chunks_from_msg": "num-chunks-from-msg",
    "total_chunk_msg_size": "total-chunk-msg-size",
    "chunk_id": "chunk-id",
    "uncompressed_size": "uncompressed-size",
    "marker_type": "marker-type",
}
"""Numbers, by their fields."""
_TEXTS = {
    "producer_name": "producer-name",
    "replicated_from": "replicated-from",
    "partition_key": "partition-key",
    "encryption_algo": "encryption-algo",
    "uuid": "uuid",
}
_FLAGS = {
    "null_value": "null-value",
    "partition_key_b64_encoded": "partition-key-b64-encoded",
    "null_partition_key": "null-partition-key",
}
_TIMES = {
    "publish_time": "publish-time",
    "event_time": "event-time",
    "deliver_at_time": "deliver-at-time",
}
_BYTES = {
    "ordering_key": "Base64-ordering-key",
    "schema_version": "Base64-schema-version-b64encoded",
    "encryption_param": "Base64-encryption-param",
}


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """The headers and the body of an answer."""

    headers: Sequence[tuple[str, str]]
    """Names and values.  A name comes once for each value of a list."""
    body: bytes


def shown_message(entry: Entry, *, aborted: bool, readable: bool) -> ShownMessage:
    """Show an entry: a batch as a whole, an encrypted payload as it is, any other uncompressed.

    `aborted`: its transaction is; `readable`: no open transaction holds readers before it.
    Raises `MalformedMetadata`, `InvalidMessage`.
    """
    metadata = parse_metadata(entry.data)
    payload: bytes | memoryview = payload_of(entry.data)
    encrypted = bool(metadata.encryption_keys)
    if not encrypted:
        payload = decompress(metadata.compression, payload, metadata.uncompressed_size)
    in_transaction = transaction_named_by(metadata) is not None
    headers = (
        ("Message-ID", f"{entry.position.ledger_id}:{entry.position.entry_id}"),
        *_fields(metadata),
        ("Is-Encrypted", _flag(encrypted)),
        ("txn-aborted", _flag(aborted)),
        ("txn-uncommitted", _flag(in_transaction and not aborted and not readable)),
    )
    return ShownMessage([(PREFIX + name, text) for name, text in headers], bytes(payload))


def _fields(metadata: MessageMetadata) -> Iterator[tuple[str, str]]:
    for field, value in metadata.ListFields():
        if (name := _PLAIN.get(field.name)) is not None:
            yield name, str(value)
        elif (name := _TEXTS.get(field.name)) is not None:
            yield name, _header_text(value)
        elif (name := _FLAGS.get(field.name)) is not None:
            yield name, _flag(value)
        elif (name := _TIMES.get(field.name)) is not None:
            yield name, _time_text(value)
        elif (name := _BYTES.get(field.name)) is not None:
            yield name, base64.b64encode(value).decode()
    if metadata.properties:
        yield "PROPERTY", json.dumps({each.key: each.value for each in metadata.properties})
    if metadata.HasField("num_messages_in_batch"):
        yield "num-batch-message", str(metadata.num_messages_in_batch)
        yield "batch-size", str(metadata.uncompressed_size)
    if metadata.HasField("compression"):
        yield "compression", CompressionType.Name(metadata.compression)
    if metadata.HasField("num_chunks_from_msg"):
        yield "PROPERTY-TOTAL-CHUNKS", str(metadata.num_chunks_from_msg)
        yield "PROPERTY-CHUNK-ID", str(metadata.chunk_id)
    for cluster in metadata.replicate_to:
        yield "replicated-to", _header_text(cluster)
    for key in metadata.encryption_keys:
        yield "Base64-encryption-keys", base64.b64encode(key.SerializeToString()).decode()


def _header_text(text: str) -> str:
    """A text that a header may carry: what it may not is written as in a URL."""
    return quote(text, safe="".join(chr(code) for code in range(0x20, 0x7F)))


def _time_text(ms: int) -> str:
    try:
        when = datetime.fromtimestamp(ms / 1000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        when = datetime.max.replace(tzinfo=UTC)
    return when.isoformat(timespec="milliseconds")


def _flag(value: bool) -> str:
    return str(value).lower()
