"""From MESSAGE to messages: permits, batches, compression, pieces, damage."""

from collections.abc import Sequence
from random import Random

import pytest

from magnetar.compression import CompressionType, compress
from magnetar.consume.ack_tracker import AckTracker
from magnetar.consume.decoding import ChunkAssembly, DecodedEntry, Decoder, Permits
from magnetar.message_id import EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch, build_entry

NOW_MS = 1_000_000


def acknowledge(tracker: AckTracker, message_id: EntryId) -> None:
    tracker.acknowledge(message_id.key, message_id.batch_index, message_id.batch_size)


def metadata(**fields: object) -> pb.MessageMetadata:
    made = pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=NOW_MS)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def batch_of(
    *payloads: bytes, kind: CompressionType = CompressionType.NONE, gone: Sequence[int] = ()
) -> bytes:
    raw = build_batch(
        (pb.SingleMessageMetadata(payload_size=0, sequence_id=at, compacted_out=at in gone), each)
        for at, each in enumerate(payloads)
    )
    return build_entry(
        metadata(
            num_messages_in_batch=len(payloads), compression=int(kind), uncompressed_size=len(raw)
        ),
        bytes(compress(kind, raw)),
    )


class Reader:
    """A decoder with what it stands on."""

    def __init__(
        self,
        after: EntryId | None = None,
        *,
        tracks: bool = True,
        in_order: bool = False,
        max_bytes: int = 1000,
        ordered_pending: int = 1000,
    ) -> None:
        self.tracker = AckTracker()
        self.chunks = ChunkAssembly(
            max_pending=2,
            expire_after_ms=60_000,
            max_size=1000,
            max_bytes=max_bytes,
            in_order=in_order,
            ordered_pending=ordered_pending,
        )
        self.decoder: Decoder[str] = Decoder(
            "segment", self.chunks, self.tracker if tracks else None, after
        )

    def read(
        self,
        entry: bytes | None,
        key: tuple[int, int] = (1, 1),
        ack_set: Sequence[int] = (),
        now_ms: int = NOW_MS,
    ) -> DecodedEntry[str]:
        where = pb.MessageIdData(ledger_id=key[0], entry_id=key[1])
        message = pb.CommandMessage(consumer_id=1, message_id=where, redelivery_count=3)
        message.ack_set.extend(ack_set)
        return self.decoder.decode(message, entry, now_ms)


def payloads(decoded: DecodedEntry[str]) -> list[bytes]:
    return [each.payload for each in decoded.messages]


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_without_messages_is_damaged(size: int) -> None:
    """Where the number is absent, it is no batch; a batch of none is nothing that could be read."""
    entry = build_entry(metadata(num_messages_in_batch=size), b"something")
    decoded = Reader().read(entry)
    assert decoded.messages == []
    assert decoded.damage == pb.CommandAck.BatchDeSerializeError
    assert decoded.permits == 1
    assert payloads(Reader().read(build_entry(metadata(), b"something"))) == [b"something"]


@pytest.mark.parametrize("kind", list(CompressionType))
def test_batches_are_unpacked_whatever_they_are_compressed_by(kind: CompressionType) -> None:
    decoded = Reader().read(batch_of(b"a", b"b" * 1000, b"", kind=kind))
    assert payloads(decoded) == [b"a", b"b" * 1000, b""]
    assert [each.entry_id for each in decoded.messages] == [
        EntryId(1, 1, index, 3) for index in range(3)
    ]
    assert decoded.permits == 3
    assert decoded.messages[1].entry.redelivery_count == 3
    assert decoded.messages[1].segment == "segment"
    single = decoded.messages[2].single
    assert single is not None
    assert single.sequence_id == 2


def test_a_single_message_is_no_batch() -> None:
    decoded = Reader().read(build_entry(metadata(partition_key="k"), b"a"))
    (message,) = decoded.messages
    assert message.entry_id == EntryId(1, 1)
    assert message.single is None
    assert message.own_metadata.partition_key == "k"
    assert decoded.permits == 1


def test_a_batch_of_one_is_a_batch() -> None:
    (message,) = Reader().read(batch_of(b"a")).messages
    assert message.entry_id == EntryId(1, 1, 0, 1)


def test_acknowledged_and_compacted_messages_are_left_out_and_counted() -> None:
    decoded = Reader().read(batch_of(b"a", b"b", b"c", b"d", gone=[3]), ack_set=[0b1011])
    assert payloads(decoded) == [b"a", b"b"]
    assert decoded.permits == 4
    assert [each.batch_index for each in decoded.messages] == [0, 1]


def test_indexes_that_compaction_names_are_left_out() -> None:
    raw = build_batch((pb.SingleMessageMetadata(payload_size=0), each) for each in (b"a", b"b"))
    made = metadata(num_messages_in_batch=2)
    made.compacted_batch_indexes.append(0)
    assert payloads(Reader().read(build_entry(made, raw))) == [b"b"]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (EntryId(1, 0), [b"a", b"b", b"c"]),
        (EntryId(1, 1, 0, 3), [b"b", b"c"]),
        (EntryId(1, 1, 2, 3), []),
        (EntryId(1, 1), []),
        (EntryId(1, 2), []),
        (EntryId(-1, -1), [b"a", b"b", b"c"]),
    ],
)
def test_reading_begins_behind_a_message(after: EntryId, expected: list[bytes]) -> None:
    reader = Reader(after, tracks=False)
    assert payloads(reader.read(batch_of(b"a", b"b", b"c"))) == expected
    single = reader.read(build_entry(metadata(), b"x"), key=(1, 2))
    assert payloads(single) == ([b"x"] if after < EntryId(1, 2) else [])


@pytest.mark.parametrize(
    ("entry", "damage"),
    [
        (None, pb.CommandAck.ChecksumMismatch),
        (b"\x0e\x01", pb.CommandAck.BatchDeSerializeError),
        (
            build_entry(metadata(num_messages_in_batch=2), b"no batch"),
            pb.CommandAck.BatchDeSerializeError,
        ),
        (
            build_entry(metadata(num_messages_in_batch=2**30), b"no batch"),
            pb.CommandAck.BatchDeSerializeError,
        ),
        (
            build_entry(metadata(compression=3, uncompressed_size=3), b"no zstd"),
            pb.CommandAck.DecompressionError,
        ),
    ],
)
def test_undecodable_entry_is_reported(
    entry: bytes | None, damage: pb.CommandAck.ValidationError
) -> None:
    decoded = Reader().read(entry)
    assert decoded.damage == damage
    assert decoded.why
    assert decoded.messages == []


def test_encrypted_entry_is_left_at_the_broker() -> None:
    made = metadata()
    made.encryption_keys.add(key="k", value=b"v")
    decoded = Reader().read(build_entry(made, b"secret"))
    assert decoded.damage is None
    assert decoded.messages == []
    assert "encrypted" in decoded.why


# Pieces


def pieces_of(data: bytes, count: int, uuid: str = "u", **fields: object) -> list[bytes]:
    step = -(-len(data) // count)
    return [
        build_entry(
            metadata(
                uuid=uuid,
                chunk_id=at,
                num_chunks_from_msg=count,
                total_chunk_msg_size=len(data),
                **fields,
            ),
            data[at * step : (at + 1) * step],
        )
        for at in range(count)
    ]


def test_pieces_become_one_message_that_is_acknowledged_with_all_its_entries() -> None:
    reader = Reader()
    data = bytes(range(200)) * 2
    packed = bytes(compress(CompressionType.ZLIB, data))
    entries = pieces_of(packed, 3, compression=2, uncompressed_size=len(data))
    decoded = [reader.read(each, key=(1, at)) for at, each in enumerate(entries)]
    assert [payloads(each) for each in decoded] == [[], [], [data]]
    (message,) = decoded[2].messages
    assert message.entry_id == EntryId(1, 2, first_chunk=(1, 0))
    acknowledge(reader.tracker, message.entry_id)
    assert [ack.key for ack in reader.tracker.take_group()[1]] == [(1, 0), (1, 1), (1, 2)]


def test_pieces_of_several_messages_may_be_mixed() -> None:
    reader = Reader()
    one, two = pieces_of(b"aabb", 2, "one"), pieces_of(b"ccdd", 2, "two")
    found = [
        payloads(reader.read(each, key=(1, at)))
        for at, each in enumerate((one[0], two[0], two[1], one[1]))
    ]
    assert found == [[], [], [b"ccdd"], [b"aabb"]]


def test_a_piece_that_comes_twice_is_dropped_alone() -> None:
    reader = Reader()
    first, second = pieces_of(b"aabb", 2)
    reader.read(first, key=(1, 0))
    again = reader.read(first, key=(1, 0))
    assert (again.again, again.too_old) == ((), ())
    assert payloads(reader.read(second, key=(1, 1))) == [b"aabb"]


def test_a_message_with_a_hole_is_asked_for_again() -> None:
    reader = Reader()
    entries = pieces_of(b"aabbcc", 3)
    reader.read(entries[0], key=(1, 0))
    assert reader.read(entries[2], key=(1, 2)).again == ((1, 0), (1, 2))
    assert reader.read(entries[1], key=(1, 1)).again == ((1, 1),)
    assert len(reader.chunks) == 0


def test_oldest_incomplete_message_is_dropped_at_the_count_bound() -> None:
    reader = Reader()
    for at, uuid in enumerate("abc"):
        decoded = reader.read(pieces_of(b"aabb", 2, uuid)[0], key=(1, at))
    assert decoded.again == ((1, 0),)
    assert len(reader.chunks) == 2


def test_oldest_incomplete_message_is_dropped_at_the_byte_bound() -> None:
    reader = Reader(max_bytes=100)
    old, new = pieces_of(bytes(120), 3, "old"), pieces_of(bytes(120), 3, "new")
    reader.read(old[0], key=(1, 0))
    reader.read(old[1], key=(1, 1))
    assert (len(reader.chunks), reader.chunks.held_bytes) == (1, 80)
    assert reader.read(new[0], key=(1, 2)).again == ((1, 0), (1, 1))
    assert (len(reader.chunks), reader.chunks.held_bytes) == (1, 40)
    assert reader.read(old[2], key=(1, 3)).again == ((1, 3),)
    found = [payloads(reader.read(each, key=(1, at))) for at, each in enumerate(new[1:], 4)]
    assert found == [[], [bytes(120)]], "alone it may be larger than all may be together"
    assert (len(reader.chunks), reader.chunks.held_bytes) == (0, 0)
    one, two = pieces_of(bytes(120), 2, "one"), pieces_of(bytes(100), 2, "two")
    for at, piece in ((6, two[0]), (7, one[0])):
        reader.read(piece, key=(1, at))
    assert reader.chunks.held_bytes == 60
    reader.chunks.clear()
    assert reader.chunks.held_bytes == 0


@pytest.mark.parametrize("sizes", [(90, 90), (100, 20)], ids=["a new one", "more of an old one"])
def test_in_order_too_many_bytes_of_incomplete_messages_are_a_failure(
    sizes: tuple[int, int],
) -> None:
    reader = Reader(in_order=True, max_bytes=80)
    one, two = (pieces_of(bytes(size), 3, uuid) for size, uuid in zip(sizes, "ab", strict=True))
    for at, piece in enumerate((one[0], two[0])):
        decoded = reader.read(piece, key=(1, at))
        assert (decoded.failure, decoded.again) == (None, ())
    failure = reader.read(one[1], key=(1, 2)).failure
    assert (failure is not None) is (sizes == (90, 90))
    if failure is None:
        failure = reader.read(two[1], key=(1, 3)).failure
    assert "max_pending_chunked_bytes" in str(failure)


def test_chunked_message_incomplete_for_too_long_is_given_up() -> None:
    reader = Reader()
    late = NOW_MS + 60_001
    reader.read(pieces_of(b"aabb", 2, "a")[0], key=(1, 0))
    decoded = reader.read(pieces_of(b"aabb", 2, "b")[1], key=(1, 1), now_ms=late)
    assert decoded.too_old == ((1, 0), (1, 1))
    assert decoded.again == ()


def test_a_message_that_promises_too_much_is_given_up() -> None:
    reader = Reader()
    assert reader.read(pieces_of(bytes(1001), 2)[0], key=(1, 0)).again == ((1, 0),)
    assert len(reader.chunks) == 0


def test_in_order_the_oldest_incomplete_message_is_kept() -> None:
    reader = Reader(in_order=True, ordered_pending=3)
    for at, uuid in enumerate("abc"):
        decoded = reader.read(pieces_of(b"aabb", 2, uuid)[0], key=(1, at))
        assert decoded.again == ()
    assert reader.read(pieces_of(b"aabb", 2, "d")[0], key=(1, 3)).failure is not None
    reader.chunks.clear()
    assert payloads(reader.read(pieces_of(b"aabb", 2, "a")[1], key=(1, 4))) == [b"aabb"]


def test_in_order_it_is_known_what_lies_across_a_place() -> None:
    reader = Reader(in_order=True)
    one, two = pieces_of(b"aabb", 2, "one"), pieces_of(b"ccdd", 2, "two")
    for at, piece in ((1, one[0]), (3, two[0]), (5, one[1])):
        reader.read(piece, key=(1, at))
    across = reader.chunks.open_across
    assert [across((1, at)) for at in (0, 2, 4, 6)] == [None, (1, 1), (1, 1), (1, 3)]
    reader.chunks.pass_up_to((1, 4))
    assert across((1, 4)) == (1, 1)
    reader.chunks.pass_up_to((1, 5))
    assert [across((1, at)) for at in (2, 4, 6)] == [None, (1, 3), (1, 3)]
    reader.read(two[1], key=(1, 7))
    assert [across((1, at)) for at in (6, 7)] == [(1, 3), None]


@pytest.mark.parametrize("counts_acknowledged", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_the_application_gets_everything_and_the_queue_stays_bounded(
    seed: int, counts_acknowledged: bool
) -> None:
    rng = Random(seed)
    size = rng.choice((1, 2, 10, 100))
    largest = rng.choice((1, 5, 150))
    permits = Permits(size)
    at_broker = permits.to_ask()
    assert at_broker == size
    waiting = taken = 0
    sent = surplus = 0
    for _ in range(2000):
        if rng.random() < 0.5 and at_broker > 0:
            messages = rng.randint(1, largest)
            kept = rng.randint(0, messages)
            at_broker -= messages if counts_acknowledged else max(kept, 1)
            surplus += 0 if counts_acknowledged else messages - max(kept, 1)
            permits.arrived(messages, kept)
            waiting += kept
            sent += kept
            limit = size + largest + (0 if counts_acknowledged else surplus)
            assert waiting <= limit
        elif waiting:
            waiting -= 1
            taken += 1
            permits.taken()
        at_broker += permits.to_ask()
        assert permits.waiting == waiting
        if counts_acknowledged:
            assert at_broker <= size
        if not waiting:
            assert at_broker > 0, "nothing waits and nothing will come"
    assert taken + waiting == sent


def test_half_of_the_queue_is_asked_for_at_a_time() -> None:
    permits = Permits(10)
    assert permits.to_ask() == 10
    for _ in range(10):
        permits.arrived(1, 1)
    asked = []
    for _ in range(10):
        permits.taken()
        asked.append(permits.to_ask())
    assert asked == [0, 0, 0, 0, 5, 0, 0, 0, 0, 5]


def test_a_batch_that_brought_too_much_is_made_up_for() -> None:
    permits = Permits(10)
    at_broker = permits.to_ask() - 100
    permits.arrived(100, 100)
    assert permits.to_ask() == 0
    permits.taken(95)
    at_broker += permits.to_ask()
    assert at_broker == 5


def test_a_new_attachment_begins_with_the_whole_queue() -> None:
    permits = Permits(10)
    permits.to_ask()
    permits.arrived(4, 4)
    permits.reset()
    assert permits.to_ask() == 10
    permits.reset()
    permits.keep(4)
    assert permits.to_ask() == 6


def test_more_permits_than_were_known_are_used_up_and_not_renewed() -> None:
    permits = Permits(10)
    at_broker = permits.to_ask()
    for _ in range(100):
        # Of ten messages nine are acknowledged, and this broker counts one.
        permits.arrived(10, 1)
        permits.taken()
        at_broker += permits.to_ask() - 1
    assert at_broker > 500
    while at_broker > 0:
        permits.arrived(10, 10)
        at_broker += permits.to_ask() - 10
    permits.taken(permits.waiting)
    assert at_broker + permits.to_ask() <= 20
