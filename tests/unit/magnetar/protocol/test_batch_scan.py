"""The scanner takes and refuses the same batches as the parser, and finds the same in them."""

from struct import pack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magnetar.protocol.batch_scan import Scanned, scan_batch
from magnetar.protocol.frame_error import FrameError, MalformedBatch
from magnetar.protocol.message import build_batch, iter_batch
from magnetar.protocol.pulsar_pb2 import KeyValue, SingleMessageMetadata

U64 = st.integers(0, 2**64 - 1)


@st.composite
def metadata(draw: st.DrawFn) -> SingleMessageMetadata:
    """Mostly of the usual fields; sometimes of all."""
    made = SingleMessageMetadata(payload_size=0)
    if draw(st.booleans()):
        made.sequence_id = draw(U64)
    if draw(st.booleans()):
        made.partition_key = draw(st.text(max_size=150))
    if draw(st.booleans()):
        made.event_time = draw(U64)
    if draw(st.booleans()):
        made.partition_key_b64_encoded = draw(st.booleans())
    if draw(st.integers(0, 5)) == 0:
        made.properties.append(KeyValue(key=draw(st.text()), value=draw(st.text())))
        made.ordering_key = draw(st.binary())
        made.compacted_out = draw(st.booleans())
        made.null_value = draw(st.booleans())
    return made


PAYLOADS = st.one_of(
    st.binary(max_size=20), st.sampled_from([0, 127, 128, 16383, 16384]).map(bytes)
)
BATCHES = st.lists(st.tuples(metadata(), PAYLOADS), min_size=1, max_size=6)


def parsed(payload: bytes, count: int) -> list[tuple[int, SingleMessageMetadata, bytes]] | None:
    try:
        return [
            (index, each, bytes(data))
            for index, (each, data) in enumerate(iter_batch(payload, count))
            if not each.compacted_out
        ]
    except FrameError:
        return None


def scanned(payload: bytes, count: int) -> list[tuple[int, SingleMessageMetadata, bytes]] | None:
    try:
        found: list[Scanned] = scan_batch(payload, count)
    except FrameError:
        return None
    return [(index, SingleMessageMetadata.FromString(raw), data) for index, raw, data in found]


@given(BATCHES)
def test_finds_what_the_parser_finds(messages: list[tuple[SingleMessageMetadata, bytes]]) -> None:
    payload = build_batch(messages)
    found = scanned(payload, len(messages))
    assert found == parsed(payload, len(messages))
    assert found is not None


@given(BATCHES, st.data())
def test_agrees_on_damaged_batches(
    messages: list[tuple[SingleMessageMetadata, bytes]], data: st.DataObject
) -> None:
    payload = bytearray(build_batch(messages))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, min(len(payload), 60) - 1))] = data.draw(
            st.integers(0, 255)
        )
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    for each in (bytes(payload), cut):
        assert scanned(each, len(messages)) == parsed(each, len(messages))


@given(st.binary(max_size=40), st.integers(1, 3))
@example(b"\x18\x80\x00", 1)
@example(b"\x40\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x18\x00", 1)
@example(b"\x18\x00\x18\x01", 1)
@example(b"\x12\x01\xff\x18\x00", 1)
def test_agrees_on_any_metadata(raw: bytes, extra: int) -> None:
    payload = pack(">I", len(raw)) + raw + bytes(extra)
    assert scanned(payload, 1) == parsed(payload, 1)


def test_refuses_what_is_left_over() -> None:
    payload = build_batch([(SingleMessageMetadata(payload_size=0), b"one")])
    with pytest.raises(MalformedBatch):
        scan_batch(payload + b"\0", 1)
    with pytest.raises(MalformedBatch):
        scan_batch(payload, 2)
