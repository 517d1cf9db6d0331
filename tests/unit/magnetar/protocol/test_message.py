"""Entries and batches: there and back, every way to be cut, sticky keys."""

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.checksum import seal_entry
from magnetar.protocol.frame_error import (
    FrameError,
    MalformedBatch,
    MalformedEntry,
    MalformedMetadata,
)
from magnetar.protocol.frames import FrameDecoder, encode_send
from magnetar.protocol.message import (
    build_batch,
    build_entry,
    iter_batch,
    parse_metadata,
    payload_of,
    sticky_key,
)
from tests.unit.magnetar.protocol.strategies import entries, text, u64

METADATA = pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=2)
SEND = pb.BaseCommand(type=pb.BaseCommand.SEND, send=pb.CommandSend(producer_id=1, sequence_id=7))
singles = st.builds(
    lambda key, sequence_id: pb.SingleMessageMetadata(
        partition_key=key, sequence_id=sequence_id, payload_size=0
    ),
    text,
    u64,
)
messages = st.lists(st.tuples(singles, st.binary(max_size=30)), max_size=6)


def entry_of(raw_metadata: bytes, payload: bytes = b"") -> bytes:
    return seal_entry(len(raw_metadata).to_bytes(4, "big") + raw_metadata + payload)


@given(text, u64, st.binary(max_size=100))
def test_entries_come_back(producer_name: str, sequence_id: int, payload: bytes) -> None:
    metadata = pb.MessageMetadata(
        producer_name=producer_name, sequence_id=sequence_id, publish_time=1
    )
    entry = build_entry(metadata, payload)
    assert parse_metadata(entry) == metadata
    assert payload_of(entry) == payload
    (frame,) = FrameDecoder(10_000).feed(encode_send(SEND, entry))
    assert frame.entry == entry
    assert frame.error is None


@pytest.mark.parametrize("size", range(10))
def test_truncated_entry_is_refused(size: int) -> None:
    entry = build_entry(METADATA, b"")[:size]
    with pytest.raises(MalformedEntry):
        parse_metadata(entry)
    with pytest.raises(MalformedEntry):
        payload_of(entry)


def test_an_entry_without_magic_is_none() -> None:
    with pytest.raises(MalformedEntry):
        parse_metadata(build_entry(METADATA, b"payload")[6:])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        pb.MessageMetadata(producer_name="p", sequence_id=1).SerializePartialToString(),
        METADATA.SerializeToString() + b"\x22\x00",
        METADATA.SerializeToString().replace(b"p", b"\xff", 1),
        METADATA.SerializeToString() + b"\x3a\x01\xff",
        METADATA.SerializeToString() + b"\x22\x06\x0a\x01k\x12\x01\xff",
    ],
)
def test_metadata_that_cannot_be_read(raw: bytes) -> None:
    with pytest.raises(MalformedMetadata):
        parse_metadata(entry_of(raw))


@given(entries(), st.integers(0, 10_000), st.integers(0, 255))
def test_a_mutated_entry_is_read_or_refused(entry: bytes, place: int, value: int) -> None:
    mutated = bytearray(entry)
    mutated[place % len(mutated)] = value
    try:
        metadata = parse_metadata(bytes(mutated))
        assert isinstance(metadata.producer_name, str)
        assert isinstance(sticky_key(metadata), bytes)
    except FrameError:
        pass


@given(messages)
def test_batches_come_back(batch: list[tuple[pb.SingleMessageMetadata, bytes]]) -> None:
    out = list(iter_batch(build_batch(batch), len(batch)))
    assert [bytes(payload) for _, payload in out] == [payload for _, payload in batch]
    for (given_metadata, payload), (metadata, _) in zip(batch, out, strict=True):
        assert metadata.payload_size == len(payload)
        assert metadata.partition_key == given_metadata.partition_key
        assert metadata.sequence_id == given_metadata.sequence_id


def test_golden_batch() -> None:
    one = pb.SingleMessageMetadata(partition_key="k", payload_size=99)
    batch = build_batch([(one, b"ab"), (pb.SingleMessageMetadata(payload_size=0), b"")])
    assert batch == bytes.fromhex("00000005 12016b 1802 6162 00000002 1800")
    assert one.payload_size == 99


@given(messages.filter(bool), st.data())
def test_truncated_batch_is_refused(
    batch: list[tuple[pb.SingleMessageMetadata, bytes]], data: st.DataObject
) -> None:
    raw = build_batch(batch)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(MalformedBatch):
        list(iter_batch(cut, len(batch)))


@given(messages)
def test_a_batch_of_another_size_is_refused(
    batch: list[tuple[pb.SingleMessageMetadata, bytes]],
) -> None:
    raw = build_batch(batch)
    with pytest.raises(MalformedBatch):
        list(iter_batch(raw, len(batch) + 1))
    if batch:
        with pytest.raises(MalformedBatch):
            list(iter_batch(raw, len(batch) - 1))


@given(st.binary(max_size=60), st.integers(-1, 5))
def test_noise_is_a_batch_or_refused(noise: bytes, count: int) -> None:
    try:
        assert len(list(iter_batch(noise, count))) == max(count, 0)
    except FrameError:
        pass


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\x18" + b"\xff" * 9 + b"\x01", MalformedBatch),
        (b"\x18\xff\xff\xff\xff\x07", MalformedBatch),
        (b"", MalformedMetadata),
        (b"\xff", MalformedMetadata),
        (b"\x18\x00\x12\x01\xff", MalformedMetadata),
    ],
)
def test_bad_heads_in_a_batch(raw: bytes, expected: type[FrameError]) -> None:
    with pytest.raises(expected):
        list(iter_batch(len(raw).to_bytes(4, "big") + raw, 1))


def with_key(**fields: str | bytes | int) -> pb.MessageMetadata:
    metadata = pb.MessageMetadata()
    metadata.CopyFrom(METADATA)
    for name, value in fields.items():
        setattr(metadata, name, value)
    return metadata


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        (with_key(), b"p-7"),
        (with_key(sequence_id=2**64 - 1), b"p--1"),
        (with_key(partition_key="ké"), "ké".encode()),
        (with_key(partition_key=""), b""),
        (with_key(partition_key="k", ordering_key=b"\xffo"), b"\xffo"),
        (
            with_key(partition_key=b64encode(b"\x00\xff").decode(), partition_key_b64_encoded=True),
            b"\x00\xff",
        ),
        (with_key(partition_key="no base64", partition_key_b64_encoded=True), b"no base64"),
    ],
)
def test_sticky_keys(metadata: pb.MessageMetadata, key: bytes) -> None:
    assert sticky_key(metadata) == key
