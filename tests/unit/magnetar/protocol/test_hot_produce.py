"""What a client writes for each message is byte for byte what the protobuf encoder writes."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.checksum import crc32c
from magnetar.protocol.frames import FrameDecoder, Send, encode_send
from magnetar.protocol.hot_produce import (
    encode_key,
    encode_metadata_head,
    encode_metadata_tail,
    encode_send_head,
    encode_single_head,
    wrap_send,
)
from magnetar.protocol.message import build_entry
from tests.unit.magnetar.protocol.strategies import text, u32, u64

EDGES = st.sampled_from([(1 << bits) + off for bits in range(1, 64) for off in (-1, 0)])
numbers = u64 | EDGES
sizes = st.integers(0, 2**31 - 1) | st.integers(0, 300)
hashes = st.integers(0, 65535)


@given(sizes, numbers, st.none() | text, st.just(0) | numbers)
def test_single_head(size: int, sequence: int, key: str | None, event_time_ms: int) -> None:
    single = pb.SingleMessageMetadata(payload_size=size, sequence_id=sequence, partition_key=key)
    if event_time_ms:
        single.event_time = event_time_ms
    raw = single.SerializeToString()
    encoded = None if key is None else key.encode()
    head = encode_single_head(size, sequence, encoded, event_time_ms)
    assert head == len(raw).to_bytes(4, "big") + raw


@given(
    st.tuples(text, numbers, numbers, st.none() | text),
    st.tuples(st.integers(0, 4), u32, st.integers(0, 2**31 - 1), st.just(0) | numbers),
    st.tuples(st.binary(max_size=10), st.just(0) | numbers),
    st.none() | st.tuples(hashes, hashes),
)
def test_metadata(
    head: tuple[str, int, int, str | None],
    tail: tuple[int, int, int, int],
    end: tuple[bytes, int],
    entry_hashes: tuple[int, int] | None,
) -> None:
    name, sequence, publish_time, key = head
    compression, uncompressed_size, count, event_time = tail
    schema_version, highest = end
    metadata = pb.MessageMetadata(
        producer_name=name, sequence_id=sequence, publish_time=publish_time, partition_key=key
    )
    if compression:
        metadata.compression = cast("pb.CompressionType", compression)
        metadata.uncompressed_size = uncompressed_size
    if count:
        metadata.num_messages_in_batch = count
    if event_time:
        metadata.event_time = event_time
    if schema_version:
        metadata.schema_version = schema_version
    if highest:
        metadata.highest_sequence_id = highest
    if entry_hashes is not None:
        metadata.entry_hash_min, metadata.entry_hash_max = entry_hashes
    raw = (
        encode_metadata_head(name.encode(), sequence, publish_time)
        + (b"" if key is None else encode_key(key.encode()))
        + encode_metadata_tail(
            compression=compression,
            uncompressed_size=uncompressed_size,
            num_messages=count,
            event_time_ms=event_time,
            schema_version=schema_version,
            highest_sequence_id=highest,
            entry_hashes=entry_hashes,
        )
    )
    assert raw == metadata.SerializeToString()


@given(numbers, numbers, sizes, st.just(0) | numbers, st.binary(max_size=300))
def test_send(producer: int, sequence: int, count: int, highest: int, payload: bytes) -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2)
    entry = build_entry(metadata, payload)
    send = pb.CommandSend(producer_id=producer, sequence_id=sequence)
    if count != 1:
        send.num_messages = count
    if highest:
        send.highest_sequence_id = highest
    frame = encode_send(pb.BaseCommand(type=pb.BaseCommand.SEND, send=send), entry)
    checked = entry[6:]
    head = encode_send_head(producer, sequence, count, highest, len(checked), crc32c(checked))
    assert head + checked == frame


def test_any_send() -> None:
    checked = build_entry(
        pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2), b"payload"
    )[6:]
    send = pb.CommandSend(producer_id=1, sequence_id=2, txnid_least_bits=3, txnid_most_bits=4)
    frame = wrap_send(send.SerializeToString(), len(checked), crc32c(checked)) + checked
    (received,) = FrameDecoder(1000).feed(frame)
    assert isinstance(received, Send)
    assert (received.txnid, received.error) == ((4, 3), None)
    assert received.entry is not None
    assert received.entry.endswith(checked)
