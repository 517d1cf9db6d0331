"""`EntryEncoder`, which encodes messages as SENDs.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from magnetar.compression import CompressionType, compress
from magnetar.errors import MessageTooLarge
from magnetar.produce.chunks import CHUNK_FIELDS_BYTES, chunk_uuid, fits, split_payload
from magnetar.produce.outgoing import OutgoingMessage, SentEntry
from magnetar.protocol.checksum import crc32c
from magnetar.protocol.hot_produce import (
    encode_key,
    encode_metadata_head,
    encode_metadata_tail,
    encode_send_head,
    encode_single_head,
    wrap_send,
)
from magnetar.protocol.ids import to_wire
from magnetar.protocol.pulsar_pb2 import CommandSend, MessageMetadata, SingleMessageMetadata


@dataclass(frozen=True, slots=True)
class EntryEncoder:
    """Encodes the messages of one attached producer; sizes are in bytes.

    A message alone is not a batch: its metadata is that of the entry.  Every entry has the lowest
    and the highest bucket hash of its messages.  Usual fields are encoded by hand
    (`magnetar.protocol.hot_produce`), and the bytes of rarer ones are appended.
    """

    producer_id: int
    producer_name: str
    max_message_size: int
    schema_version: bytes = b""
    compression: CompressionType = CompressionType.NONE
    chunking: bool = False
    buckets: int = 1

    def encode(self, batch: Sequence[OutgoingMessage], now_ms: int) -> list[SentEntry]:
        """Encode a batch as one SEND, or a large message as one for each chunk.

        Raises `MessageTooLarge` for a large message without `chunking`, and for a large batch.
        """
        if len(batch) == 1:
            return self._one(batch[0], now_ms)
        return [self._batch(batch, now_ms)]

    def _batch(self, batch: Sequence[OutgoingMessage], now_ms: int) -> SentEntry:
        first, count = batch[0], len(batch)
        parts: list[bytes] = [b"", b""]
        add = parts.append
        low = high = first.bucket_hash
        for message in batch:
            payload = message.payload
            if (
                message.properties
                or message.ordering_key is not None
                or message.null_value
                or message.bytes_key
            ):
                add(_single_head(message))
            else:
                add(
                    encode_single_head(
                        len(payload), message.number, message.key, message.event_time_ms
                    )
                )
            add(payload)
            bucket_hash = message.bucket_hash
            if bucket_hash < low:
                low = bucket_hash
            elif bucket_hash > high:
                high = bucket_hash
        uncompressed_size = 0
        if self.compression:
            payload = b"".join(parts)
            uncompressed_size = len(payload)
            parts[2:] = [compress(self.compression, payload)]
        highest = batch[-1].number
        # With several buckets the sequence ids between those of a batch belong to other batches,
        # so only the highest is sent.
        sequence_id = first.number if self.buckets == 1 else highest
        metadata = encode_metadata_head(self.producer_name.encode(), to_wire(sequence_id), now_ms)
        if first.key is not None:  # For dispatchers that do not unpack batches.
            metadata += encode_key(first.key)
        metadata += encode_metadata_tail(
            compression=self.compression,
            uncompressed_size=uncompressed_size,
            num_messages=count,
            schema_version=self.schema_version,
            highest_sequence_id=highest if self.buckets == 1 else 0,
            entry_hashes=(low, high),
        )
        if first.ordering_key is not None or first.bytes_key or first.txn is not None:
            rest = MessageMetadata()
            _set_transaction(rest, first)
            if first.bytes_key:
                rest.partition_key_b64_encoded = True
            if first.ordering_key is not None:
                rest.ordering_key = first.ordering_key
            metadata += rest.SerializePartialToString()
        parts[0] = len(metadata).to_bytes(4, "big")
        parts[1] = metadata
        checked = b"".join(parts)
        if len(checked) > self.max_message_size:
            raise _too_large(len(checked), self.max_message_size)
        return self._sent(batch, sequence_id, highest, checked)

    def _one(self, message: OutgoingMessage, now_ms: int) -> list[SentEntry]:
        payload = message.payload
        uncompressed_size = 0
        if self.compression:
            uncompressed_size = len(payload)
            payload = compress(self.compression, payload)
        metadata = encode_metadata_head(
            self.producer_name.encode(), to_wire(message.number), now_ms
        )
        if message.key is not None:
            metadata += encode_key(message.key)
        metadata += encode_metadata_tail(
            compression=self.compression,
            uncompressed_size=uncompressed_size,
            event_time_ms=message.event_time_ms,
            schema_version=self.schema_version,
            entry_hashes=(message.bucket_hash, message.bucket_hash),
        )
        if (
            message.properties
            or message.ordering_key is not None
            or message.deliver_at_ms is not None
            or message.null_value
            or message.bytes_key
            or message.txn is not None
        ):
            metadata += _rare_metadata(message)
        size = len(payload)
        if not fits(size, len(metadata) + 4, self.max_message_size):
            if not self.chunking:
                raise _too_large(size + len(metadata) + 4, self.max_message_size)
            return self._chunks(message, metadata, payload)
        checked = b"".join((len(metadata).to_bytes(4, "big"), metadata, payload))
        return [self._sent((message,), message.number, message.number, checked)]

    def _chunks(self, message: OutgoingMessage, metadata: bytes, payload: bytes) -> list[SentEntry]:
        uuid = chunk_uuid(self.producer_name, message.number)
        overhead = len(metadata) + len(uuid.encode()) + CHUNK_FIELDS_BYTES
        chunks = split_payload(payload, overhead, self.max_message_size)
        # The total size is that of the payload as it is sent, so after compression.
        fields = MessageMetadata(
            uuid=uuid, num_chunks_from_msg=len(chunks), total_chunk_msg_size=len(payload)
        )
        sends: list[SentEntry] = []
        for index, chunk in enumerate(chunks):
            fields.chunk_id = index
            whole = metadata + fields.SerializePartialToString()
            checked = b"".join((len(whole).to_bytes(4, "big"), whole, chunk))
            sent = self._sent((message,), message.number, message.number, checked, chunked=True)
            sent.index, sent.chunks = index, len(chunks)
            sends.append(sent)
        return sends

    def _sent(
        self,
        messages: Sequence[OutgoingMessage],
        sequence_id: int,
        highest: int,
        checked: bytes,
        *,
        chunked: bool = False,
    ) -> SentEntry:
        checksum = crc32c(checked)
        count, txn = len(messages), messages[0].txn
        sent_highest = highest if count > 1 and self.buckets == 1 else 0
        if txn is None and not chunked:
            head = encode_send_head(
                self.producer_id, to_wire(sequence_id), count, sent_highest, len(checked), checksum
            )
        else:
            send = CommandSend(producer_id=self.producer_id, sequence_id=to_wire(sequence_id))
            if count > 1:
                send.num_messages = count
            if sent_highest:
                send.highest_sequence_id = sent_highest
            if chunked:
                send.is_chunk = True
            if txn is not None:
                send.txnid_most_bits, send.txnid_least_bits = txn
            head = wrap_send(send.SerializeToString(), len(checked), checksum)
        return SentEntry(sequence_id, highest, messages, (head, checked), checksum)


def _single_head(message: OutgoingMessage) -> bytes:
    """The bytes of `encode_single_head`, for a message with any fields."""
    single = SingleMessageMetadata(
        payload_size=len(message.payload), sequence_id=to_wire(message.number)
    )
    for name, value in (message.properties or {}).items():
        single.properties.add(key=name, value=value)
    if message.key is not None:
        single.partition_key = message.key.decode()
    if message.ordering_key is not None:
        single.ordering_key = message.ordering_key
    if message.event_time_ms:
        single.event_time = message.event_time_ms
    if message.null_value:
        single.null_value = True
    if message.bytes_key:
        single.partition_key_b64_encoded = True
    raw = single.SerializeToString()
    return len(raw).to_bytes(4, "big") + raw


def _rare_metadata(message: OutgoingMessage) -> bytes:
    rest = MessageMetadata()
    for name, value in (message.properties or {}).items():
        rest.properties.add(key=name, value=value)
    if message.ordering_key is not None:
        rest.ordering_key = message.ordering_key
    if message.deliver_at_ms is not None:
        rest.deliver_at_time = message.deliver_at_ms
    if message.null_value:
        rest.null_value = True
    if message.bytes_key:
        rest.partition_key_b64_encoded = True
    _set_transaction(rest, message)
    return rest.SerializePartialToString()


def _set_transaction(metadata: MessageMetadata, message: OutgoingMessage) -> None:
    if message.txn is not None:
        metadata.txnid_most_bits, metadata.txnid_least_bits = message.txn


def _too_large(size: int, max_message_size: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"A message has {size} bytes with its metadata and the broker allows {max_message_size}: "
        "open the producer with chunking=True, or send less at once."
    )
