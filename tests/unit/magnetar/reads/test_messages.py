"""Stored entries, taken apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.compression import CompressionType, compress
from magnetar.errors import InvalidMessage
from magnetar.message_id import EntryId, MessageId
from magnetar.protocol.message import build_batch, build_entry
from magnetar.protocol.pulsar_pb2 import BrokerEntryMetadata, MessageMetadata, SingleMessageMetadata
from magnetar.protocol.txn_id import TxnId
from magnetar.reads.entries import StoredEntry, Visibility
from magnetar.reads.ids import IdWriter
from magnetar.reads.messages import (
    MessageColumns,
    message_ids,
    take_apart,
    take_pieces,
)

BATCH = [
    (SingleMessageMetadata(payload_size=0, partition_key=f"k{i}", sequence_id=i + 5), bytes([i]))
    for i in range(4)
]


def metadata(**fields: object) -> MessageMetadata:
    made = MessageMetadata(producer_name="p", sequence_id=5, publish_time=1_700_000_000_000)
    made.MergeFrom(MessageMetadata(**fields))  # type: ignore[arg-type]
    return made


def stored(about: MessageMetadata, payload: bytes, entry_id: int = 7) -> StoredEntry:
    return StoredEntry(3, entry_id, build_entry(about, payload))


def batch(**fields: object) -> StoredEntry:
    return stored(metadata(num_messages_in_batch=4, **fields), build_batch(BATCH))


def test_a_batch_is_a_run_of_rows() -> None:
    columns = MessageColumns()
    about = {"txnid_most_bits": 2, "txnid_least_bits": 9, "schema_version": b"\0\1"}
    assert take_apart(batch(**about), columns) == 4
    assert len(columns) == 4
    assert columns.keys == ["k0", "k1", "k2", "k3"]
    assert columns.values == [b"\0", b"\1", b"\2", b"\3"]
    assert columns.sequence_ids == [5, 6, 7, 8]
    assert columns.batch_indexes == [0, 1, 2, 3]
    assert columns.event_times_ms == [None] * 4
    assert not columns.properties
    (run,) = columns.runs
    assert (run.ledger_id, run.entry_id, run.messages, run.batch_size) == (3, 7, 4, 4)
    assert run.publish_time_ms == 1_700_000_000_000
    assert (run.producer, run.txn_id, run.schema_version) == ("p", TxnId(2, 9), b"\0\1")


def test_a_message_alone_has_the_metadata_of_its_entry() -> None:
    columns = MessageColumns()
    about = metadata(partition_key="k", event_time=12, ordering_key=b"o")
    about.properties.add(key="a", value="1")
    about.properties.add(key="a", value="2")
    assert take_apart(stored(about, b"v"), columns) == 1
    assert columns.keys == ["k"]
    assert columns.values == [b"v"]
    assert columns.properties == {0: (("a", "2"),)}
    assert columns.event_times_ms == [12]
    assert columns.batch_indexes == [-1]
    assert columns.own[0].ordering_key == b"o"
    assert columns.runs[0].batch_size == 0


def test_message_without_value_is_none() -> None:
    columns = MessageColumns()
    take_apart(stored(metadata(null_value=True), b""), columns)
    singles = [(SingleMessageMetadata(payload_size=0, null_value=True), b""), *BATCH[:1]]
    take_apart(stored(metadata(num_messages_in_batch=2), build_batch(singles)), columns)
    assert columns.values == [None, None, b"\0"]


@pytest.mark.parametrize("kind", list(CompressionType))
def test_compressed_batches(kind: CompressionType) -> None:
    columns = MessageColumns()
    payload = build_batch(BATCH)
    about = metadata(num_messages_in_batch=4, uncompressed_size=len(payload))
    about.compression = int(kind)  # type: ignore[assignment]
    take_apart(stored(about, compress(kind, payload)), columns)
    assert columns.values == [b"\0", b"\1", b"\2", b"\3"]


def test_a_part_of_a_batch() -> None:
    columns = MessageColumns()
    assert take_apart(batch(compacted_batch_indexes=[2]), columns, from_index=1) == 2
    assert columns.batch_indexes == [1, 3]
    assert columns.keys == ["k1", "k3"]
    assert take_apart(batch(), columns, before_index=1) == 1
    assert take_apart(batch(), columns, from_index=4) == 0
    assert [run.messages for run in columns.runs] == [2, 1]
    single = stored(metadata(), b"v")
    assert take_apart(single, columns, from_index=1) == 0
    assert take_apart(single, columns, before_index=0) == 0


def test_broker_entry_metadata_is_skipped() -> None:
    columns = MessageColumns()
    entry = batch()
    before = BrokerEntryMetadata(index=4, broker_timestamp=5).SerializeToString()
    data = b"\x0e\x02" + len(before).to_bytes(4, "big") + before + entry.data
    assert take_apart(entry._replace(data=data), columns) == 4


def test_markers_give_nothing() -> None:
    columns = MessageColumns()
    entry = stored(metadata(marker_type=21), b"")._replace(visibility=Visibility.MARKER)
    assert take_apart(entry, columns) == 0
    assert not columns.runs


def broken() -> list[StoredEntry]:
    good = batch().data
    encrypted = metadata()
    encrypted.encryption_keys.add(key="k", value=b"v")
    return [
        StoredEntry(3, 7, good[:-1] + b"x"),
        StoredEntry(3, 7, good[:12]),
        StoredEntry(3, 7, b""),
        stored(encrypted, b"secret"),
        stored(metadata(num_messages_in_batch=5), build_batch(BATCH)),
        stored(metadata(num_messages_in_batch=0), b""),
        stored(metadata(compression=3, uncompressed_size=4), b"abcd"),
    ]


@pytest.mark.parametrize("entry", broken())
def test_broken_entry_adds_no_rows(entry: StoredEntry) -> None:
    columns = MessageColumns()
    take_apart(batch(), columns)
    with pytest.raises(InvalidMessage, match="3:7 cannot be decoded"):
        take_apart(entry, columns)
    assert len(columns) == len(columns.keys) == len(columns.batch_indexes) == 4
    assert len(columns.runs) == 1


def pieces_of(payload: bytes, kind: CompressionType) -> MessageColumns:
    columns = MessageColumns()
    packed = compress(kind, payload)
    for number, start in enumerate((0, 4, 8)):
        part = packed[start : start + 4] if number < 2 else packed[start:]
        about = metadata(
            uuid="u",
            chunk_id=number,
            num_chunks_from_msg=3,
            total_chunk_msg_size=len(packed),
            uncompressed_size=len(payload),
            partition_key="k",
        )
        about.compression = int(kind)  # type: ignore[assignment]
        assert take_apart(stored(about, part, entry_id=number), columns) == 0
    return columns


@pytest.mark.parametrize("kind", [CompressionType.NONE, CompressionType.ZLIB])
def test_pieces_make_a_message(kind: CompressionType) -> None:
    columns = pieces_of(b"a long value in pieces", kind)
    pieces = columns.pieces
    assert [each.number for each in pieces] == [0, 1, 2]
    assert take_pieces(pieces, columns) == 1
    assert columns.values == [b"a long value in pieces"]
    assert columns.keys == ["k"]
    (run,) = columns.runs
    assert (run.entry_id, run.first_piece, run.batch_size) == (2, (3, 0), 0)
    assert message_ids(columns, 5) == [
        MessageId(EntryId(3, 2, first_chunk=(3, 0)), 5).to_bytes(),
    ]


def test_pieces_of_which_some_are_missing_are_no_message() -> None:
    columns = pieces_of(b"a long value in pieces", CompressionType.NONE)
    pieces = columns.pieces
    other = pieces[1]._replace(uuid="v")
    for wrong in (pieces[1:], pieces[::-1], [], [pieces[0], other, pieces[2]]):
        with pytest.raises(InvalidMessage):
            take_pieces(wrong, columns)
    assert not len(columns)


def test_message_ids_are_those_of_consumers() -> None:
    columns = MessageColumns()
    take_apart(batch(), columns)
    take_apart(stored(metadata(), b"v", entry_id=8), columns)
    assert message_ids(columns, 300) == [
        *(MessageId(EntryId(3, 7, i, 4), 300).to_bytes() for i in range(4)),
        MessageId(EntryId(3, 8), 300).to_bytes(),
    ]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.data())
def test_ids_in_bulk_are_those_of_one(
    segment_id: int, ledger_id: int, entry_id: int, data: st.DataObject
) -> None:
    size = data.draw(st.one_of(st.integers(1, 300), st.sampled_from([16384, 16385, 20000])))
    indexes = data.draw(st.lists(st.integers(0, size - 1), max_size=5))
    key = ledger_id, entry_id
    writer = IdWriter(segment_id)
    assert writer.of_batch(key, size, indexes) == [
        MessageId(EntryId(*key, each, size), segment_id).to_bytes() for each in indexes
    ]
    assert (
        writer.of_single(key, key)
        == MessageId(EntryId(*key, first_chunk=key), segment_id).to_bytes()
    )


def test_clearing_leaves_what_was_taken() -> None:
    columns = MessageColumns()
    take_apart(batch(), columns)
    taken = columns.values
    columns.clear()
    assert len(columns) == 0
    assert len(taken) == 4
