"""What is sent can be read back with the generated parsers."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.compression import CompressionType, decompress
from magnetar.errors import MessageTooLarge
from magnetar.produce.entries import EntryEncoder
from magnetar.produce.outgoing import OutgoingMessage, SentEntry
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import FrameDecoder, Send
from magnetar.protocol.message import iter_batch, parse_metadata, payload_of
from tests.unit.magnetar.produce.fakes import outgoing

NOW_MS = 1_700_000_000_000


def encoder(**changes: object) -> EntryEncoder:
    facts: dict[str, object] = {
        "producer_id": 7,
        "producer_name": "p-1",
        "max_message_size": 5 * 1024 * 1024,
    }
    return EntryEncoder(**(facts | changes))  # type: ignore[arg-type]


def numbered(*messages: OutgoingMessage, first: int = 0) -> list[OutgoingMessage]:
    for number, message in enumerate(messages, first):
        message.number = number
    return list(messages)


def received(sent: SentEntry) -> tuple[Send, pb.MessageMetadata, bytes]:
    """What the broker gets of one SEND."""
    (send,) = FrameDecoder(100_000_000).feed(b"".join(sent.parts))
    assert isinstance(send, Send)
    assert send.error is None
    assert send.entry is not None
    metadata = parse_metadata(send.entry)
    assert metadata.publish_time == NOW_MS
    assert metadata.producer_name == "p-1"
    return send, metadata, bytes(payload_of(send.entry))


def one(sends: list[SentEntry]) -> tuple[Send, pb.MessageMetadata, bytes]:
    (sent,) = sends
    return received(sent)


def rich(payload: bytes = b"value") -> OutgoingMessage:
    message = OutgoingMessage(
        outgoing().outcome,
        payload,
        b"key",
        300,
        b"order",
        {"a": "1", "b": "2"},
        1234,
        deliver_at_ms=99,
    )
    message.txn = (3, 4)
    return message


@pytest.mark.parametrize("kind", CompressionType)
def test_one_message(kind: CompressionType) -> None:
    message = rich(b"value" * 100)
    message.number = 5
    send, metadata, payload = one(
        encoder(compression=kind, schema_version=b"\0" * 8).encode([message], NOW_MS)
    )
    assert (send.producer_id, send.sequence_id, send.num_messages) == (7, 5, 1)
    assert send.txnid == (metadata.txnid_most_bits, metadata.txnid_least_bits) == (3, 4)
    assert metadata.sequence_id == 5
    assert (metadata.partition_key, metadata.ordering_key) == ("key", b"order")
    assert {each.key: each.value for each in metadata.properties} == {"a": "1", "b": "2"}
    assert (metadata.event_time, metadata.deliver_at_time) == (1234, 99)
    assert metadata.schema_version == b"\0" * 8
    assert not metadata.HasField("num_messages_in_batch")
    assert (metadata.entry_hash_min, metadata.entry_hash_max) == (300, 300)
    assert metadata.compression == int(kind)
    size = metadata.uncompressed_size or len(payload)
    assert decompress(kind, payload, size) == b"value" * 100


@pytest.mark.parametrize("kind", CompressionType)
def test_a_batch(kind: CompressionType) -> None:
    plain = outgoing(b"one", key="k", bucket_hash=500)
    empty = outgoing(b"")
    full = rich()
    full.txn = None
    full.deliver_at_ms = None
    null = outgoing(b"")
    null.null_value = True
    full.bytes_key = True
    batch = numbered(plain, empty, full, null, first=10)
    send, metadata, payload = one(encoder(compression=kind).encode(batch, NOW_MS))
    assert (send.sequence_id, send.highest_sequence_id, send.num_messages) == (10, 13, 4)
    assert (metadata.sequence_id, metadata.highest_sequence_id) == (10, 13)
    assert metadata.num_messages_in_batch == 4
    assert (metadata.entry_hash_min, metadata.entry_hash_max) == (0, 500)
    assert metadata.partition_key == "k"
    size = metadata.uncompressed_size or len(payload)
    singles = list(iter_batch(decompress(kind, payload, size), 4))
    assert [bytes(body) for _, body in singles] == [b"one", b"", b"value", b""]
    heads = [head for head, _ in singles]
    assert [head.sequence_id for head in heads] == [10, 11, 12, 13]
    assert [head.partition_key for head in heads] == ["k", "", "key", ""]
    assert heads[2].ordering_key == b"order"
    assert {each.key: each.value for each in heads[2].properties} == {"a": "1", "b": "2"}
    assert heads[2].event_time == 1234
    assert [head.null_value for head in heads] == [False, False, False, True]
    assert [head.partition_key_b64_encoded for head in heads] == [False, False, True, False]
    assert not metadata.partition_key_b64_encoded


@pytest.mark.parametrize("more", [0, 1])
def test_an_entry_has_a_key_of_bytes_from_its_first_message(more: int) -> None:
    first = outgoing(b"one", key="aw==")
    first.bytes_key = True
    batch = numbered(first, *(outgoing(b"two") for _ in range(more)))
    _, metadata, _ = one(encoder().encode(batch, NOW_MS))
    assert (metadata.partition_key, metadata.partition_key_b64_encoded) == ("aw==", True)


def test_a_batch_in_a_transaction() -> None:
    batch = numbered(outgoing(txn=(1, 2)), outgoing(txn=(1, 2)))
    send, metadata, _ = one(encoder().encode(batch, NOW_MS))
    assert send.txnid == (1, 2) == (metadata.txnid_most_bits, metadata.txnid_least_bits)
    assert (send.num_messages, send.highest_sequence_id) == (2, 1)


def test_a_batch_of_one_bucket_of_several_goes_by_its_highest_number() -> None:
    batch = numbered(outgoing(bucket_hash=5), outgoing(bucket_hash=9), first=3)
    (sent,) = encoder(buckets=4).encode(batch, NOW_MS)
    send, metadata, _ = received(sent)
    assert (send.sequence_id, send.highest_sequence_id, send.num_messages) == (4, 0, 2)
    assert metadata.sequence_id == 4
    assert not metadata.HasField("highest_sequence_id")
    assert (metadata.entry_hash_min, metadata.entry_hash_max) == (5, 9)
    assert (sent.sequence_id, sent.highest) == (4, 4)


@given(st.integers(0, 6000), st.integers(600, 2000))
def test_chunks_put_together_are_the_payload(size: int, limit: int) -> None:
    message = rich(uuid.UUID(int=size).bytes * (size // 16 + 1))
    message.number = 9
    sends = encoder(max_message_size=limit, chunking=True).encode([message], NOW_MS)
    got = [received(sent) for sent in sends]
    assert b"".join(payload for _, _, payload in got) == message.payload
    assert all(sent.sequence_id == sent.highest == 9 for sent in sends)
    if len(sends) == 1:
        return
    assert [(sent.index, sent.chunks) for sent in sends] == [
        (index, len(sends)) for index in range(len(sends))
    ]
    for index, (send, metadata, payload) in enumerate(got):
        assert send.is_chunk
        assert send.txnid == (3, 4)
        assert (metadata.chunk_id, metadata.num_chunks_from_msg) == (index, len(sends))
        assert metadata.total_chunk_msg_size == len(message.payload)
        assert metadata.uuid == "p-1-9"
        assert metadata.partition_key == "key"
        assert len(metadata.SerializeToString()) + 4 + len(payload) <= limit


def test_chunks_of_a_compressed_payload_are_of_what_is_sent() -> None:
    payload = b"".join(uuid.UUID(int=n * 7919).bytes for n in range(500))
    (message,) = numbered(outgoing(payload))
    sends = encoder(max_message_size=1000, chunking=True, compression=CompressionType.ZSTD).encode(
        [message], NOW_MS
    )
    got = [received(sent) for sent in sends]
    assert len(got) > 1
    packed = b"".join(part for _, _, part in got)
    assert got[0][1].total_chunk_msg_size == len(packed)
    assert got[0][1].uncompressed_size == len(payload)
    assert decompress(CompressionType.ZSTD, packed, len(payload)) == payload


def test_message_above_the_largest_size_is_refused() -> None:
    with pytest.raises(MessageTooLarge, match="chunking=True"):
        encoder(max_message_size=1000).encode(numbered(outgoing(bytes(1000))), NOW_MS)
    batch = numbered(outgoing(bytes(600)), outgoing(bytes(600)))
    with pytest.raises(MessageTooLarge):
        encoder(max_message_size=1000).encode(batch, NOW_MS)
    huge_key = numbered(outgoing(bytes(1000), key="k" * 1000))
    with pytest.raises(MessageTooLarge, match="key"):
        encoder(max_message_size=1000, chunking=True).encode(huge_key, NOW_MS)


def test_message_of_exactly_the_largest_size_is_sent() -> None:
    (message,) = numbered(outgoing(bytes(900)))
    (sent,) = encoder().encode([message], NOW_MS)
    size = len(sent.parts[1])
    assert len(encoder(max_message_size=size).encode([message], NOW_MS)) == 1
    with pytest.raises(MessageTooLarge):
        encoder(max_message_size=size - 1).encode([message], NOW_MS)
