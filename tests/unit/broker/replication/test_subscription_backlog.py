"""What a replicated subscription has not acknowledged in a segment, by where it is from."""

import pytest

from broker.replication.subscription_backlog import (
    NONE_LEFT,
    EntryRoom,
    StoredEntry,
    SubscriptionBacklog,
    stored_entry_of,
)
from broker.topics.replicated_ranges import PartRecord, SourceSegment
from broker.topics.subscription_positions import FirstCopy, first_left
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position
from tests.support.bounds import set_bound

X = SourceSegment("east", 1, 0)
Y = SourceSegment("east", 1, 5)
OLD = SourceSegment("east", 9, 0)
Z = SourceSegment("north", 1, 0)


def at(entry: int) -> Position:
    return Position(3, entry)


class Cursor:
    """The acknowledged positions, and the backlog that asks for them."""

    def __init__(
        self, *entries: StoredEntry, limit: int = 100, room: EntryRoom | None = None
    ) -> None:
        self.acked: set[Position] = set()
        self.backlog = SubscriptionBacklog(
            EARLIEST,
            self.acked.__contains__,
            limit=limit,
            room=room,
            progress=lambda: len(self.acked),
        )
        for entry in entries:
            self.backlog.add(entry)

    def acknowledge(self, *positions: Position) -> None:
        self.acked.update(positions)


def own(entry: int, *clusters: str) -> StoredEntry:
    return StoredEntry(at(entry), clusters=clusters or None)


def copied(entry: int, source: SourceSegment, source_entry: int) -> StoredEntry:
    return StoredEntry(at(entry), (source, Position(7, source_entry)))


def test_a_segment_tells_its_first_entry_that_is_not_acknowledged() -> None:
    cursor = Cursor(own(0), copied(1, X, 0), own(2), own(3))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(0)
    cursor.acknowledge(at(0), at(3))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(2)
    cursor.acknowledge(at(2))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(4)
    assert cursor.backlog.acknowledged_below("west", at(1)) == at(2)


def test_a_segment_tells_nothing_of_what_was_not_answered() -> None:
    """In a restored log later positions may be of other messages than in the other cluster."""
    cursor = Cursor(own(0), own(1), own(2))
    cursor.acknowledge(at(0), at(1))
    assert cursor.backlog.acknowledged_below("west", EARLIEST) == Position(-1, 0)
    assert cursor.backlog.acknowledged_below("west", at(0)) == at(1)
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(2)


def test_an_entry_that_a_cluster_does_not_get_is_neither_told_to_it_nor_acknowledged_by_it() -> (
    None
):
    cursor = Cursor(own(0, "north"), own(1), own(2, "north", "west"))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(1)
    assert cursor.backlog.acknowledge_own("west", at(9), EARLIEST, at(9)) == [at(1), at(2)]
    assert cursor.backlog.acknowledged_below("north", at(9)) == at(0)
    assert cursor.backlog.acknowledge_own("north", at(9), EARLIEST, at(9)) == [at(0)]


def test_copies_below_what_their_home_tells_are_acknowledged() -> None:
    cursor = Cursor(copied(0, X, 4), copied(1, Z, 5), own(2), copied(3, X, 6), copied(4, X, 8))
    assert cursor.backlog.acknowledge_copies(X, Position(7, 8)) == [at(0), at(3)]
    assert cursor.backlog.acknowledge_copies(X, Position(7, 8)) == []
    assert cursor.backlog.acknowledge_copies(OLD, NONE_LEFT) == []
    assert cursor.backlog.acknowledge_copies(X, NONE_LEFT) == [at(4)]


def test_a_copy_that_a_consumer_has_acknowledged_is_not_acknowledged_again() -> None:
    cursor = Cursor(copied(0, X, 4), copied(1, X, 5))
    cursor.acknowledge(at(0))
    assert cursor.backlog.acknowledge_copies(X, NONE_LEFT) == [at(1)]


def test_a_segment_tells_its_first_copy_that_is_left() -> None:
    cursor = Cursor(copied(0, X, 4), copied(1, Y, 1), copied(2, X, 6))
    assert cursor.backlog.first_copy(X, is_all_read=True) == Position(7, 4)
    cursor.acknowledge(at(0))
    assert cursor.backlog.first_copy(X, is_all_read=False) == Position(7, 6)
    cursor.acknowledge(at(2))
    assert cursor.backlog.first_copy(X, is_all_read=False) == Position(7, 6)
    assert cursor.backlog.first_copy(X, is_all_read=True) == NONE_LEFT
    assert cursor.backlog.first_copy(Z, is_all_read=False) == EARLIEST


def test_own_entries_are_acknowledged_below_the_first_copy_and_up_to_what_was_answered() -> None:
    cursor = Cursor(own(0), own(1), own(2), own(3))
    assert cursor.backlog.acknowledge_own("west", at(2), EARLIEST, at(0)) == [at(0)]
    assert cursor.backlog.acknowledge_own("west", at(2), EARLIEST, at(3)) == [at(1)]
    assert cursor.backlog.acknowledge_own("west", NONE_LEFT, EARLIEST, at(2)) == [at(2)]


def test_entries_from_before_replication_began_stay() -> None:
    chunk = StoredEntry(at(1), uuid="u", is_last=False)
    cursor = Cursor(own(0), chunk, own(2), StoredEntry(at(3), uuid="u"), own(4))
    assert cursor.backlog.acknowledge_own("west", NONE_LEFT, at(1), at(9)) == [at(2), at(4)]
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(0)


def test_chunks_are_acknowledged_with_the_last_one_of_their_message() -> None:
    chunks = [StoredEntry(at(n), uuid="u", is_last=False) for n in (0, 1, 2)]
    last = StoredEntry(at(4), (X, Position(7, 5)), uuid="u")
    cursor = Cursor(*chunks, StoredEntry(at(3), uuid="other", is_last=False), last)
    assert cursor.backlog.first_copy(X, is_all_read=True) == Position(7, 5)
    assert cursor.backlog.acknowledge_copies(X, Position(7, 6)) == [at(0), at(1), at(2), at(4)]


def test_a_message_that_lacks_chunks_is_not_told_as_acknowledged() -> None:
    cursor = Cursor(StoredEntry(at(0), uuid="u", is_last=False))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(1)
    cursor.backlog.add(StoredEntry(at(1), uuid="u"))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(1)
    cursor.acknowledge(at(1))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(1)
    cursor.acknowledge(at(0))
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(2)


def test_copies_from_pruned_segments_are_acknowledged() -> None:
    entries = copied(0, X, 1), copied(1, Y, 1), copied(2, OLD, 1), copied(3, Z, 1)
    cursor = Cursor(*entries)
    assert cursor.backlog.acknowledge_pruned("east", 1, {5}) == [at(0)]
    assert cursor.backlog.first_copy(X, is_all_read=False) == EARLIEST
    assert cursor.backlog.first_copy(Y, is_all_read=True) == Position(7, 1)


def test_entries_of_no_origin_stay() -> None:
    cursor = Cursor(StoredEntry(at(0), (X, Position(7, 1)), of_no_origin=True))
    assert cursor.backlog.acknowledge_copies(X, NONE_LEFT) == []
    assert cursor.backlog.first_copy(X, is_all_read=False) == EARLIEST


def test_reading_waits_until_an_entry_is_acknowledged_anywhere() -> None:
    entries = own(0), copied(1, X, 1), StoredEntry(at(2), uuid="u", is_last=False)
    cursor = Cursor(*entries, StoredEntry(at(3), of_no_origin=True), limit=4)
    assert not cursor.backlog.has_room()
    for position in (at(3), at(2), at(1), at(0)):
        cursor.acknowledge(position)
        assert cursor.backlog.has_room()
        cursor.backlog.add(copied(10 + position.entry_id, Y, 1))
        assert not cursor.backlog.has_room()


def test_what_the_mark_delete_position_has_passed_need_not_be_read() -> None:
    cursor = Cursor(own(0))
    cursor.acknowledge(at(0))
    cursor.backlog.moved(at(7))
    assert cursor.backlog.read == at(7)
    assert cursor.backlog.acknowledged_below("west", at(9)) == at(8)
    cursor.backlog.moved(at(2))
    assert cursor.backlog.read == at(7)


def test_three_clusters_do_not_wait_for_each_other() -> None:
    """Each has a copy from another cluster first, and all is consumed in a third one."""
    east, north = Cursor(copied(0, Z, 0), own(1)), Cursor(copied(0, X, 1), own(1))
    for cursor in (east, north):
        assert cursor.backlog.acknowledge_own("west", NONE_LEFT, EARLIEST, at(1)) == [at(1)]
        cursor.acknowledge(at(1))
        assert cursor.backlog.acknowledged_below("north", at(9)) == at(2)
    assert east.backlog.acknowledge_copies(Z, Position(7, 1)) == [at(0)]
    assert north.backlog.acknowledge_copies(X, Position(7, 2)) == [at(0)]


RECORD = PartRecord(Position(7, 2), 0, 0x7FFF).to_wire(X)
CHUNK = pb.MessageMetadata(uuid="u", chunk_id=0, num_chunks_from_msg=2)
LAST = pb.MessageMetadata(uuid="u", chunk_id=1, num_chunks_from_msg=2)
EAST = pb.MessageMetadata(replicated_from="east")
COPY = pb.MessageMetadata(replicated_from="east", replicated_part=RECORD)
BROKEN = pb.ReplicatedPart(incarnation=1, segment_id=1, ledger_id=1, entry_id=1, hash_end=1 << 20)
NOBODY = StoredEntry(at(0), of_no_origin=True)


def merged(*parts: pb.MessageMetadata) -> pb.MessageMetadata:
    made = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    for part in parts:
        made.MergeFrom(part)
    return made


@pytest.mark.parametrize(
    ("metadata", "known"),
    [
        (merged(), StoredEntry(at(0))),
        (
            merged(pb.MessageMetadata(replicate_to=["north", "west"])),
            StoredEntry(at(0), clusters=("north", "west")),
        ),
        (merged(CHUNK), StoredEntry(at(0), uuid="/u", is_last=False)),
        (merged(LAST), StoredEntry(at(0), uuid="/u")),
        (merged(COPY), StoredEntry(at(0), (X, Position(7, 2)))),
        (merged(EAST, CHUNK), StoredEntry(at(0), uuid="east/u", is_last=False)),
        (merged(COPY, LAST), StoredEntry(at(0), (X, Position(7, 2)), uuid="east/u")),
        (merged(EAST), NOBODY),
        (merged(EAST, LAST), NOBODY),
        (merged(EAST, pb.MessageMetadata(replicated_part=BROKEN)), NOBODY),
        (merged(pb.MessageMetadata(marker_type=10)), NOBODY),
        (merged(pb.MessageMetadata(replicated_part=RECORD)), StoredEntry(at(0))),
    ],
)
def test_an_entry_says_where_it_is_from(metadata: pb.MessageMetadata, known: StoredEntry) -> None:
    assert stored_entry_of(metadata, at(0)) == known


LEFT, NOTHING = FirstCopy(Position(7, 3), is_terminated=False), FirstCopy(NONE_LEFT, False)
ENDED = FirstCopy(NONE_LEFT, is_terminated=True)


@pytest.mark.parametrize(
    ("answers", "first"),
    [
        ({1: ENDED, 2: NOTHING, 3: LEFT}, Position(7, 3)),
        ({1: FirstCopy(Position(7, 2), is_terminated=True), 2: LEFT, 3: LEFT}, Position(7, 2)),
        ({1: ENDED, 2: NOTHING, 3: NOTHING}, NONE_LEFT),
        ({1: ENDED, 2: NOTHING}, None),
        ({2: NOTHING, 3: NOTHING}, None),
        ({1: ENDED, 2: ENDED, 3: NOTHING}, None),
    ],
)
def test_all_segments_answer_and_none_that_is_active_has_ended(
    answers: dict[int, FirstCopy], first: Position | None
) -> None:
    assert first_left({2, 3}, {1, 2, 3}, answers) == first


def test_full_backlog_is_counted_again_once_more_entries_are_acknowledged() -> None:
    acked: set[Position] = set()
    asked: list[Position] = []

    def is_acknowledged(position: Position) -> bool:
        asked.append(position)
        return position in acked

    backlog = SubscriptionBacklog(EARLIEST, is_acknowledged, limit=3, progress=lambda: len(acked))
    for number in range(3):
        backlog.add(own(number))
    assert not backlog.has_room()
    asked.clear()
    assert not backlog.has_room()
    assert not asked
    acked.add(at(1))
    assert backlog.has_room()
    backlog.add(own(3))
    assert not backlog.has_room()
    acked.add(at(3))
    assert backlog.has_room()


def test_backlogs_of_a_broker_share_its_room_and_each_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER", 4)
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES_ASSURED", 2)
    room = EntryRoom()
    first, second = Cursor(room=room), Cursor(limit=3, room=room)

    def fill(cursor: Cursor) -> int:
        added = 0
        while cursor.backlog.has_room():
            cursor.backlog.add(own(added))
            added += 1
        return added

    assert [fill(first), fill(second), room.held] == [4, 2, 6]
    assert second.backlog.waits_for_others
    assert first.backlog.waits_for_others
    first.acknowledge(at(0), at(1))
    assert not first.backlog.has_room()
    assert [room.held, second.backlog.has_room()] == [4, False]
    first.acknowledge(at(2))
    assert not second.backlog.has_room()
    assert first.backlog.has_room()
    assert second.backlog.has_room()
    second.backlog.add(own(2))
    assert not second.backlog.has_room()
    assert not second.backlog.waits_for_others


def test_backlog_that_is_not_used_any_more_takes_no_room() -> None:
    room = EntryRoom()
    kept, closed = Cursor(own(0), room=room), Cursor(own(0), own(1), room=room)
    closed.backlog.close()
    assert room.held == 1
    assert closed.backlog.acknowledge_own("west", at(9), EARLIEST, at(9)) == [at(0), at(1)]
    assert kept.backlog.acknowledge_own("west", at(9), EARLIEST, at(9)) == [at(0)]
    assert room.held == 0
