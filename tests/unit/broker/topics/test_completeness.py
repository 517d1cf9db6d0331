"""Which clusters a replicated subscription of a segment has had every copy of."""

import pytest

from broker.topics.completeness import INCOMPLETE, Completeness, received_of, still_lacking
from broker.topics.replicated_ranges import EVERYTHING, SourceSegment
from config.bounds import RECEIVED_SEGMENTS_NOTED
from magnetar.protocol.ids import Position


def at(entry_id: int) -> Position:
    return Position(5, entry_id)


EAST, WEST = SourceSegment("east", 2**64 - 1, 3), SourceSegment("west", 7, 0)


def test_a_note_says_all_of_it() -> None:
    every = Completeness(True, "west", frozenset({"north"}), {EAST: at(4), WEST: at(5)})
    assert Completeness.parse(every.note) == every
    nothing = Completeness(received={})
    assert Completeness.parse(nothing.note) == nothing != INCOMPLETE
    assert INCOMPLETE.note == ""
    assert Completeness.parse("") == INCOMPLETE


@pytest.mark.parametrize(
    "note",
    [
        "{",
        "[]",
        "1",
        '{"fromStart":1,"madeFor":"","clusters":[],"received":null}',
        '{"fromStart":true,"madeFor":"","clusters":[]}',
        '{"fromStart":true,"madeFor":"","clusters":[],"received":[["east","5",1,2]]}',
        '{"fromStart":true,"madeFor":"","clusters":[],"received":[["east","x",1,2,3]]}',
    ],
)
def test_a_note_that_nobody_wrote_is_refused(note: str) -> None:
    with pytest.raises(ValueError, match=r"says nothing|Expecting|invalid literal"):
        Completeness.parse(note)


def test_what_had_been_received_is_noted_by_source_until_it_is_complete() -> None:
    received = {EAST: at(4), WEST: at(5)}
    assert received_of(received, "east", EAST.incarnation) == {3: at(4)}
    assert received_of(received, "east", 1) == {}
    made = INCOMPLETE.begun(received, from_start=False)
    assert made.received == received
    assert made.complete_for("east").received == {WEST: at(5)}
    many = {EAST._replace(segment_id=each): at(0) for each in range(RECEIVED_SEGMENTS_NOTED + 1)}
    assert INCOMPLETE.begun(many, from_start=True) == Completeness(True, received=None)


def test_a_child_has_what_is_true_of_all_parents() -> None:
    one = Completeness(False, "west", frozenset({"east", "north"}), {WEST: at(5)})
    two = Completeness(True, "west", frozenset({"east"}), {WEST: at(3), EAST: at(4)})
    assert Completeness.inherited([one, two]) == Completeness(
        True, "west", frozenset({"east"}), {WEST: at(5), EAST: at(4)}
    )
    other = Completeness(True, "east", frozenset({"east"}))
    assert Completeness.inherited([one, other]) == Completeness(True, "", frozenset({"east"}))


def test_a_child_is_not_complete_of_what_a_parent_without_the_subscription_had() -> None:
    one = Completeness(True, "", frozenset({"east"}), {})
    assert Completeness.inherited([one, None]) == Completeness(True)


def test_copies_may_be_missing_until_their_cluster_tells_that_it_has_consumed_them() -> None:
    lacking = {0: at(7), 1: at(7), 2: at(7), 3: EVERYTHING.position, 4: EVERYTHING.position}
    below = {0: at(7), 1: at(8), 3: at(9), 4: EVERYTHING.position}
    # Nothing was told of 2.
    assert still_lacking(lacking, below, range(5)) == {each: lacking[each] for each in (0, 2, 3)}
    # A segment is pruned when all of it is consumed.
    assert still_lacking(lacking, below, {0}) == {0: at(7)}
