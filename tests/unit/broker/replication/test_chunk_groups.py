"""Which chunks of a segment are sent together, and which are given up."""

from broker.replication.chunk_groups import ChunkGroups
from magnetar.protocol.ids import Position


def at(entry: int) -> Position:
    return Position(1, entry)


def test_a_message_is_whole_with_its_last_chunk() -> None:
    groups = ChunkGroups()
    assert groups.add(at(0), "a", 0, 3, 0) is None
    assert groups.add(at(1), "b", 0, 2, 0) is None
    assert groups.add(at(2), "a", 1, 3, 0) is None
    assert groups.add(at(3), "a", 2, 3, 0) == (at(0), at(2))
    assert groups.done(at(3)) == (at(0), at(2), at(3))
    assert groups.dropped() == []


def test_an_entry_that_is_no_chunk_is_acknowledged_alone() -> None:
    assert ChunkGroups().done(at(7)) == (at(7),)


def test_chunks_that_are_read_again_are_answered_as_before() -> None:
    groups = ChunkGroups()
    for _ in range(2):
        assert groups.add(at(0), "a", 0, 2, 0) is None
        assert groups.add(at(1), "a", 1, 2, 0) == (at(0),)
    assert groups.dropped() == []


def test_a_producer_that_begins_anew_leaves_what_it_sent_before() -> None:
    groups = ChunkGroups()
    groups.add(at(0), "a", 0, 2, 0)
    groups.add(at(1), "a", 0, 2, 0)
    assert groups.add(at(2), "a", 1, 2, 0) == (at(1),)
    assert groups.dropped() == [at(0)]


def test_a_chunk_that_is_there_twice_goes_once() -> None:
    groups = ChunkGroups()
    groups.add(at(0), "a", 0, 3, 0)
    groups.add(at(1), "a", 1, 3, 0)
    assert groups.add(at(2), "a", 1, 3, 0) is None
    assert groups.add(at(3), "a", 2, 3, 0) == (at(0), at(1))
    assert groups.dropped() == [at(2)]


def test_a_message_with_a_gap_is_not_sent() -> None:
    groups = ChunkGroups()
    groups.add(at(0), "a", 0, 3, 0)
    assert groups.add(at(1), "a", 2, 3, 0) is None
    assert sorted(groups.dropped()) == [at(0), at(1)]
    assert groups.add(at(2), "b", 1, 2, 0) is None
    assert groups.dropped() == [at(2)]


def test_messages_that_are_not_whole_are_given_up_by_age_or_all() -> None:
    groups = ChunkGroups()
    groups.add(at(0), "a", 0, 2, 10)
    groups.add(at(1), "b", 0, 2, 20)
    groups.add(at(2), "c", 0, 2, 20)
    groups.add(at(3), "c", 1, 2, 20)
    groups.give_up(15)
    assert groups.dropped() == [at(0)]
    groups.give_up()
    assert groups.dropped() == [at(1)]
    assert groups.done(at(3)) == (at(2), at(3))


def test_the_message_begun_first_is_given_up_above_the_limit() -> None:
    groups = ChunkGroups(limit=2)
    for number, uuid in enumerate("abc"):
        groups.add(at(number), uuid, 0, 2, 0)
    assert groups.dropped() == [at(0)]
    assert groups.add(at(3), "b", 1, 2, 0) == (at(1),)


def test_chunks_of_a_message_that_was_given_up_cost_no_other_one() -> None:
    groups = ChunkGroups(limit=2)
    for number, uuid in enumerate("abc"):
        groups.add(at(number), uuid, 0, 3, 0)
    for number, uuid in enumerate("abc"):
        assert groups.add(at(3 + number), uuid, 1, 3, 0) is None
    assert groups.add(at(6), "a", 2, 3, 0) is None
    assert groups.dropped() == [at(0), at(3), at(6)]
    assert groups.add(at(7), "b", 2, 3, 0) == (at(1), at(4))
    assert groups.add(at(8), "c", 2, 3, 0) == (at(2), at(5))


def test_a_whole_message_that_comes_twice_is_sent_twice() -> None:
    groups = ChunkGroups()
    groups.add(at(0), "a", 0, 2, 0)
    assert groups.add(at(1), "a", 1, 2, 0) == (at(0),)
    assert groups.add(at(2), "a", 0, 2, 0) is None
    assert groups.add(at(3), "a", 1, 2, 0) == (at(2),)
    assert groups.dropped() == []
    assert groups.done(at(1)) == (at(0), at(1))
