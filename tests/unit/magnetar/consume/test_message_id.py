"""Ids and checkpoints have the bytes of the Java client; the bytes here were made by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.checkpoint import Checkpoint, CheckpointKind
from magnetar.errors import InvalidArgument
from magnetar.message_id import EARLIEST_ENTRY, LATEST_ENTRY, EntryId, MessageId, sort_key

PLAIN = EntryId(5, 7)
BATCH = EntryId(5, 300, 2, 10)
OF_JAVA = {
    PLAIN: "080510073000",
    EntryId(5, 7, partition=3): "0805100718033000",
    BATCH: "080510ac022002300a",
    EntryId(5, 4, first_chunk=(5, 1)): "0805100430003a06080510013000",
    EARLIEST_ENTRY: "08ffffffffffffffffff0110ffffffffffffffffff013000",
    LATEST_ENTRY: "08ffffffffffffffff7f10ffffffffffffffff7f3000",
}
VECTOR = (
    "000000000000000200000009080510ac022002300a"
    "00000002000000000000000000000006080510073000000000000000000200000009080510ac022002300a"
)
TOPIC = "0000000d746f7069633a2f2f742f6e2f78"


@pytest.mark.parametrize(("entry", "raw"), OF_JAVA.items())
def test_entries_have_the_bytes_of_java(entry: EntryId, raw: str) -> None:
    assert entry.to_bytes().hex() == raw
    assert EntryId.from_bytes(bytes.fromhex(raw)) == entry


@pytest.mark.parametrize(
    ("message_id", "raw"),
    [
        (
            MessageId(BATCH, 2, {0: PLAIN, 2: BATCH}, "topic://t/n/x"),
            f"{VECTOR}{TOPIC}ffffffff",
        ),
        (MessageId(BATCH, 2), "000000000000000200000009080510ac022002300a00000000ffffffffffffffff"),
        (
            MessageId(
                BATCH, 2, {0: PLAIN, 2: BATCH}, "topic://t/n/x", {"topic://t/n/y": {1: PLAIN}}
            ),
            f"{VECTOR}{TOPIC}000000010000000d746f7069633a2f2f742f6e2f79"
            "00000001000000000000000100000006080510073000",
        ),
    ],
)
def test_ids_have_the_bytes_of_java(message_id: MessageId, raw: str) -> None:
    assert message_id.to_bytes().hex() == raw
    read = MessageId.from_bytes(bytes.fromhex(raw))
    assert read == message_id
    assert read.positions == message_id.positions
    assert read.topic == message_id.topic
    assert read.positions_of_topics == message_id.positions_of_topics


def test_an_id_may_end_after_the_entry() -> None:
    raw = MessageId(BATCH, 2).to_bytes()[: 8 + 4 + 9]
    assert MessageId.from_bytes(raw) == MessageId(BATCH, 2)


def test_checkpoints_have_the_bytes_of_java() -> None:
    raw = "0000000001000000000000000300000006080510073000"
    checkpoint = Checkpoint.of({3: PLAIN})
    assert checkpoint.to_bytes().hex() == raw
    assert Checkpoint.from_bytes(bytes.fromhex(raw)) == checkpoint
    assert Checkpoint.EARLIEST.to_bytes() == b"\1"
    assert Checkpoint.from_bytes(b"\1") is Checkpoint.EARLIEST
    assert Checkpoint.from_bytes(b"\2") is Checkpoint.LATEST


def test_a_checkpoint_says_where_reading_begins() -> None:
    checkpoint = Checkpoint.of({3: PLAIN})
    assert checkpoint.after(3) == PLAIN
    assert checkpoint.after(4) == EARLIEST_ENTRY
    assert Checkpoint.EARLIEST.after(3) == EARLIEST_ENTRY
    assert Checkpoint.LATEST.after(3) == LATEST_ENTRY
    assert checkpoint.kind is CheckpointKind.POSITIONS


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_and_nothing_else_happens(raw: bytes) -> None:
    for kind in (Checkpoint, MessageId, EntryId):
        try:
            again = kind.from_bytes(raw)
        except InvalidArgument:
            continue
        assert kind.from_bytes(again.to_bytes()) == again


@given(st.data())
def test_damaged_bytes_are_refused_or_read(data: st.DataObject) -> None:
    raw = bytearray.fromhex(f"{VECTOR}{TOPIC}ffffffff")
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        read = MessageId.from_bytes(cut)
    except InvalidArgument:
        return
    assert MessageId.from_bytes(read.to_bytes()) == read


def test_messages_of_a_batch_of_unknown_size_have_different_places() -> None:
    sent = [EntryId(1, 2, index) for index in range(3)]
    places = [sort_key(each) for each in (*sent, EntryId(1, 2), EntryId(1, 3, 0))]
    assert places == sorted(set(places))


def test_a_batch_is_behind_its_messages() -> None:
    ids = [EntryId(1, 1, index, 3) for index in range(3)]
    places = [sort_key(each) for each in (EntryId(1, 0), *ids, EntryId(1, 2), EntryId(2, 0))]
    assert places == sorted(places)
    assert sort_key(ids[-1]) > sort_key(ids[1])


def test_ids_print_as_in_java() -> None:
    assert str(BATCH) == "5:300:-1:2"
    assert str(PLAIN) == "5:7:-1"
    assert str(MessageId(PLAIN, 2)) == "2:5:7:-1"
