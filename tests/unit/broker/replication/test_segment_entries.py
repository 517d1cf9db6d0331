"""What the planner is told of an entry, and what another cluster gets of it."""

import pytest

from broker.replication.segment_entries import (
    Messages,
    Origin,
    SourceRange,
    is_openable,
    open_batch,
    opened_batch,
    outgoing_part,
    source_entry_of,
)
from broker.replication.segment_plan import (
    MessageHashes,
    Part,
    RemoteLayout,
    RemoteSegment,
    SourceEntry,
    plan,
)
from broker.topics.replicated_ranges import (
    LAST_HASH,
    PartRecord,
    ReplicatedRanges,
    SourceSegment,
    record_of,
)
from config.bounds import OPENED_BATCHES_BYTES
from magnetar.compression import CompressionType, compress
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import key_hash, segment_hash, segment_hash_m1
from magnetar.protocol.message import build_batch, build_entry, parse_metadata, payload_of
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata

HERE = Position(7, 3)
SOURCE = SourceSegment("east", 2**60, 5)
ORIGIN = Origin(SOURCE, None)
WHOLE = SourceRange(0, LAST_HASH, segment_hash)
RECORD = PartRecord(HERE, 0, LAST_HASH)
KEYS = ("a", "b", "c", "a", "d")


def metadata(**fields: object) -> MessageMetadata:
    made = MessageMetadata(producer_name="p", sequence_id=5, publish_time=1000)
    made.MergeFrom(MessageMetadata(**fields))  # type: ignore[arg-type]
    return made


def batch_of(kind: CompressionType) -> tuple[bytes, MessageMetadata]:
    singles = [
        SingleMessageMetadata(partition_key=key, sequence_id=20 + index, payload_size=0)
        for index, key in enumerate(KEYS)
    ]
    payload = build_batch((each, b"%d" % index) for index, each in enumerate(singles))
    made = metadata(
        num_messages_in_batch=len(KEYS),
        partition_key="a",
        sequence_id=20,
        highest_sequence_id=24,
        event_time=9,
        compression=int(kind),
        uncompressed_size=len(payload),
        txnid_least_bits=4,
        txnid_most_bits=3,
    )
    return build_entry(made, compress(kind, payload) if kind else payload), made


def bodies(messages: Messages) -> list[bytes]:
    return [body for _, body in messages]


@pytest.mark.parametrize("kind", list(CompressionType))
def test_a_part_of_a_batch_is_a_batch_of_its_messages(kind: CompressionType) -> None:
    entry, before = batch_of(kind)
    messages = open_batch(entry, before)
    hashes = source_entry_of(before, HERE, WHOLE, messages).hashes
    part = Part(1, RECORD, (1, 2, 4))
    sent = outgoing_part(entry, before, part, ORIGIN, messages, hashes)
    after = parse_metadata(sent)
    divided = open_batch(sent, after)
    assert bodies(divided) == [b"1", b"2", b"4"]
    assert [single.sequence_id for single, _ in divided] == [21, 22, 24]
    assert (after.sequence_id, after.highest_sequence_id) == (21, 24)
    assert after.partition_key == "b"
    assert (after.producer_name, after.publish_time, after.event_time) == ("p", 1000, 9)
    assert after.replicated_from == "east"
    assert not after.HasField("txnid_least_bits")
    assert record_of(after) == (SOURCE, RECORD)
    buckets = [key_hash(key.encode()) & 0xFFFF for key in ("b", "c", "d")]
    assert (after.entry_hash_min, after.entry_hash_max) == (min(buckets), max(buckets))


def test_an_entry_that_goes_as_it_is_keeps_its_payload_and_stamp() -> None:
    entry, before = batch_of(CompressionType.ZSTD)
    before.entry_hash_min, before.entry_hash_max = 3, 9
    sent = outgoing_part(
        build_entry(before, bytes(payload_of(entry))), before, Part(1, RECORD, None), ORIGIN
    )
    assert payload_of(sent) == payload_of(entry)
    after = parse_metadata(sent)
    assert (after.entry_hash_min, after.entry_hash_max) == (3, 9)
    assert after.num_messages_in_batch == len(KEYS)
    assert record_of(after) == (SOURCE, RECORD)


def test_a_chunk_before_the_last_one_has_no_record() -> None:
    before = metadata(uuid="u", chunk_id=0, num_chunks_from_msg=2)
    after = parse_metadata(outgoing_part(build_entry(before, b"x"), before, None, ORIGIN))
    assert after.replicated_from == "east"
    assert record_of(after) is None


def test_messages_in_all_parts_are_those_of_the_entry_in_their_order() -> None:
    entry, before = batch_of(CompressionType.LZ4)
    messages = open_batch(entry, before)
    facts = source_entry_of(before, HERE, WHOLE, messages)
    layout = RemoteLayout(
        0,
        (
            RemoteSegment(1, 0, 30_000, (20_000,)),
            RemoteSegment(2, 30_001, 45_000),
            RemoteSegment(3, 45_001, LAST_HASH),
        ),
    )
    stored = {
        each.segment_id: ReplicatedRanges.nothing(each.hash_start, each.hash_end)
        for each in layout.segments
    }
    parts = plan(facts, (0, LAST_HASH), layout, stored)
    assert isinstance(parts, list)
    assert len(parts) > 1
    arrived: list[tuple[str, bytes]] = []
    for part in parts:
        sent = outgoing_part(entry, before, part, ORIGIN, messages, facts.hashes)
        arrived += [
            (one.partition_key, body) for one, body in open_batch(sent, parse_metadata(sent))
        ]
    assert sorted(body for _, body in arrived) == bodies(messages)
    assert [body for key, body in arrived if key == "a"] == [b"0", b"3"]


def test_hashes_are_those_of_clients_of_the_other_cluster() -> None:
    entry, before = batch_of(CompressionType.NONE)
    messages = open_batch(entry, before)
    older = SourceRange(0, LAST_HASH, segment_hash_m1)
    assert source_entry_of(before, HERE, older, messages).hashes == [
        MessageHashes(segment_hash_m1(key.encode()), key_hash(key.encode()) & 0xFFFF)
        for key in KEYS
    ]


def test_a_batch_is_unopened_and_has_its_stamp() -> None:
    _, before = batch_of(CompressionType.NONE)
    assert source_entry_of(before, HERE, WHOLE) == SourceEntry(HERE, None)
    before.entry_hash_min, before.entry_hash_max = 3, 9
    assert source_entry_of(before, HERE, WHOLE) == SourceEntry(HERE, None, (3, 9))


def test_a_single_message_goes_by_its_key_and_its_bucket_by_its_ordering_key() -> None:
    before = metadata(partition_key="a2V5", partition_key_b64_encoded=True, ordering_key=b"o")
    assert source_entry_of(before, HERE, WHOLE).hashes == [
        MessageHashes(segment_hash(b"key"), key_hash(b"o") & 0xFFFF)
    ]


def test_an_encrypted_batch_is_not_opened_and_goes_by_its_key() -> None:
    _, before = batch_of(CompressionType.NONE)
    before.encryption_keys.add(key="k", value=b"v")
    assert not is_openable(before)
    assert source_entry_of(before, HERE, WHOLE).hashes == [
        MessageHashes(segment_hash(b"a"), key_hash(b"a") & 0xFFFF)
    ]


@pytest.mark.parametrize("fault", ["torn", "encrypted", "too large"])
def test_a_batch_that_cannot_be_opened_goes_whole_by_its_key(fault: str) -> None:
    entry, before = batch_of(CompressionType.NONE)
    if fault == "torn":
        entry = entry[:-1]
    elif fault == "encrypted":
        before.encryption_keys.add(key="k", value=b"v")
    else:
        before.uncompressed_size = OPENED_BATCHES_BYTES + 1
    opened = opened_batch(entry, before, HERE, WHOLE)
    assert opened.messages is None
    assert opened.source_entry.hashes == [
        MessageHashes(segment_hash(b"a"), key_hash(b"a") & 0xFFFF)
    ]


def test_chunks_of_one_message_without_key_go_to_one_segment_and_others_elsewhere() -> None:
    narrow = SourceRange(100, 50_000, segment_hash)

    def of(entry_id: int, **fields: object) -> int:
        facts = source_entry_of(metadata(**fields), Position(7, entry_id), narrow)
        assert facts.hashes is not None
        return facts.hashes[0].segment

    chunks = {of(entry, uuid="u", chunk_id=entry, num_chunks_from_msg=9) for entry in range(9)}
    assert len(chunks) == 1
    alone = {of(entry) for entry in range(9)}
    assert len(alone) > 1
    assert all(100 <= each <= 50_000 for each in chunks | alone)
