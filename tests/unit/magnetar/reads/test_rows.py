"""The columns of a batch take and refuse what the parser does, and say the same."""

from hypothesis import example, given
from hypothesis import strategies as st

from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.ids import from_wire
from magnetar.protocol.message import build_batch, iter_batch
from magnetar.protocol.pulsar_pb2 import KeyValue, SingleMessageMetadata
from magnetar.reads.rows import scan_rows

FIRST_ID = 77
"""Of messages without an id of their own."""
U64 = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([0, 127, 128, 16383, 16384, 2**63 - 1, 2**63])
)
TIMES = st.one_of(U64, st.integers(1_700_000_000_000, 1_700_000_001_000))
NAMES = st.one_of(st.text(max_size=3), st.sampled_from(["a", "ä" * 40, "x" * 127, "x" * 128]))
Row = tuple[int, str | None, bytes | None, int | None, int, tuple[tuple[str, str], ...]]


@st.composite
def metadata(draw: st.DrawFn) -> SingleMessageMetadata:
    """Mostly of the usual fields; sometimes of all."""
    made = SingleMessageMetadata(payload_size=0)
    if draw(st.booleans()):
        made.sequence_id = draw(U64)
    if draw(st.booleans()):
        made.partition_key = draw(st.text(max_size=150))
    if draw(st.booleans()):
        made.event_time = draw(TIMES)
    for name, value in draw(st.lists(st.tuples(NAMES, NAMES), max_size=3)):
        made.properties.append(KeyValue(key=name, value=value))
    if draw(st.integers(0, 5)) == 0:
        made.ordering_key = draw(st.binary())
        made.compacted_out = draw(st.booleans())
        made.null_value = draw(st.booleans())
        made.partition_key_b64_encoded = draw(st.booleans())
    return made


PAYLOADS = st.one_of(
    st.binary(max_size=20), st.sampled_from([0, 127, 128, 16383, 16384]).map(bytes)
)
BATCHES = st.lists(st.tuples(metadata(), PAYLOADS), min_size=1, max_size=6)


def parsed(payload: bytes, count: int) -> list[Row] | None:
    """What the parser says."""
    try:
        return [
            (
                index,
                own.partition_key if own.HasField("partition_key") else None,
                None if own.null_value else bytes(data),
                own.event_time or None,
                from_wire(own.sequence_id) if own.HasField("sequence_id") else FIRST_ID,
                tuple({each.key: each.value for each in own.properties}.items()),
            )
            for index, (own, data) in enumerate(iter_batch(payload, count))
            if not own.compacted_out
        ]
    except FrameError:
        return None


def in_rows(payload: bytes, count: int) -> list[Row] | None:
    """What the columns say."""
    try:
        rows = scan_rows(payload, count, FIRST_ID)
    except FrameError:
        return None
    properties = [rows.properties.get(place, ()) for place in range(len(rows.keys))]
    assert set(rows.properties) <= set(range(len(rows.keys)))
    columns = rows.indexes, rows.keys, rows.values, rows.event_times_ms, rows.sequence_ids
    return list(zip(*columns, properties, strict=True))


@given(BATCHES)
def test_finds_what_the_parser_finds(messages: list[tuple[SingleMessageMetadata, bytes]]) -> None:
    payload = build_batch(messages)
    found = in_rows(payload, len(messages))
    assert found is not None
    assert found == parsed(payload, len(messages))


@given(BATCHES, st.data())
def test_agrees_on_damaged_batches(
    messages: list[tuple[SingleMessageMetadata, bytes]], data: st.DataObject
) -> None:
    payload = bytearray(build_batch(messages))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(payload), 60) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    for each in (bytes(payload), cut):
        assert in_rows(each, len(messages)) == parsed(each, len(messages))


@given(st.binary(max_size=40))
@example(b"\x00\x00\x00\x03\x12\x01a")  # a key, and no payload size
@example(b"\x00\x00\x00\x02\x18\x80\x00")  # a size that goes on behind its metadata
@example(b"\x00\x00\x00\x00")
@example(b"\x00\x00\x00\x0c\x18\x00\x40" + b"\xff" * 9)  # an id that goes on
def test_agrees_on_anything(payload: bytes) -> None:
    assert in_rows(payload, 1) == parsed(payload, 1)


def test_usual_messages_are_not_left_to_the_parser() -> None:
    usual = SingleMessageMetadata(
        partition_key="key", payload_size=0, event_time=1_700_000_000_123, sequence_id=300_000
    )
    usual.properties.add(key="a", value="b")
    usual.properties.add(key="c", value="d")
    rows = scan_rows(build_batch([(usual, b"x" * 200)] * 3), 3, FIRST_ID)
    assert not rows.own
    assert rows.keys == ["key"] * 3
    assert rows.properties == dict.fromkeys(range(3), (("a", "b"), ("c", "d")))
    assert rows.event_times_ms == [1_700_000_000_123] * 3
    assert rows.sequence_ids == [300_000] * 3
