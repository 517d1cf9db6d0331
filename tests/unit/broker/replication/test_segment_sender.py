"""When the sender of a segment sends, goes back, and acknowledges."""

from broker.replication.segment_plan import (
    MessageHashes,
    RemoteLayout,
    RemoteSegment,
    SourceEntry,
    Unattached,
)
from broker.replication.segment_sender import Planned, SegmentSender
from broker.topics.replicated_ranges import LAST_HASH, Mark, ReplicatedRanges
from magnetar.protocol.ids import Position

WHOLE = RemoteLayout(0, (RemoteSegment(0, 0, LAST_HASH),))
HALVES = RemoteLayout(1, (RemoteSegment(1, 0, 32767), RemoteSegment(2, 32768, LAST_HASH)))
LOW, HIGH = MessageHashes(100, 7), MessageHashes(40000, 7)


def entry(number: int, *messages: MessageHashes) -> SourceEntry:
    return SourceEntry(Position(1, number), messages or (LOW,))


def planned(sender: SegmentSender, taken: SourceEntry) -> Planned:
    found = sender.take(taken)
    assert isinstance(found, Planned)
    return found


def attached(layout: RemoteLayout) -> SegmentSender:
    sender = SegmentSender((0, LAST_HASH), layout)
    for each in layout.segments:
        nothing = ReplicatedRanges.nothing(each.hash_start, each.hash_end)
        sender.attached(each.segment_id, nothing)
    return sender


def sends(sender: SegmentSender, taken: SourceEntry) -> list[tuple[int, int, Position]]:
    return [
        (each.segment_id, each.sequence, each.position) for each in planned(sender, taken).sends
    ]


def test_an_entry_is_done_when_all_its_parts_are_answered() -> None:
    sender = attached(HALVES)
    assert sends(sender, entry(0, LOW, HIGH)) == [(1, 0, Position(1, 0)), (2, 0, Position(1, 0))]
    assert sender.in_flight == 1
    assert sender.answered(2) is None
    assert sender.answered(1) == Position(1, 0)
    assert sender.in_flight == 0


def test_an_entry_of_which_everything_is_stored_is_done_at_once() -> None:
    sender = SegmentSender((0, LAST_HASH), WHOLE)
    stored = ReplicatedRanges.nothing(0, LAST_HASH).all_raised(Mark(1, 4))
    sender.attached(0, stored)
    assert planned(sender, entry(4)) == Planned([], done=True)
    assert planned(sender, entry(5)).done is False


def test_a_lost_session_takes_reading_back_to_its_first_unanswered_entry() -> None:
    sender = attached(HALVES)
    for number in range(3):
        planned(sender, entry(number, HIGH if number == 1 else LOW))
    assert sender.read_from == Position(1, 3)
    sender.detached(2)
    assert sender.read_from == Position(1, 1)
    assert sender.take(entry(1, HIGH)) == Unattached(frozenset({2}))
    sender.attached(2, ReplicatedRanges.nothing(32768, LAST_HASH))
    assert sends(sender, entry(1, HIGH)) == [(2, 0, Position(1, 1))]
    # What the other session has on its way is not sent again.
    assert planned(sender, entry(2)) == Planned([], done=False)
    assert [sender.answered(1), sender.answered(1)] == [Position(1, 0), Position(1, 2)]


def test_an_entry_with_a_part_of_unknown_outcome_is_not_done_with_the_others() -> None:
    sender = attached(HALVES)
    planned(sender, entry(0, LOW, HIGH))
    sender.detached(2)
    assert sender.answered(1) is None
    sender.attached(2, ReplicatedRanges.nothing(32768, LAST_HASH).all_raised(Mark(1, 0)))
    assert planned(sender, entry(0, LOW, HIGH)) == Planned([], done=True)


def test_a_sealed_segment_ends_its_session_and_its_children_say_what_it_stored() -> None:
    sender = attached(WHOLE)
    for number in range(2):
        planned(sender, entry(number, LOW, HIGH))
    assert sender.learn(HALVES) == {0}
    assert sender.answered(0) is None
    assert sender.read_from == Position(1, 0)
    assert sender.take(entry(0, LOW, HIGH)) == Unattached(frozenset({1, 2}))
    final = ReplicatedRanges.nothing(0, LAST_HASH).all_raised(Mark(1, 0))
    sender.attached(1, final.cut(0, 32767))
    sender.attached(2, final.cut(32768, LAST_HASH))
    assert planned(sender, entry(0, LOW, HIGH)) == Planned([], done=True)
    assert sends(sender, entry(1, LOW, HIGH)) == [(1, 0, Position(1, 1)), (2, 0, Position(1, 1))]


def test_an_older_layout_changes_nothing() -> None:
    sender = attached(HALVES)
    assert sender.learn(WHOLE) == frozenset()
    assert sender.layout == HALVES
    assert sender.attached_to == {1, 2}


def test_many_entries_of_unknown_outcome_do_not_fill_the_window() -> None:
    sender = attached(WHOLE)
    for number in range(4):
        planned(sender, entry(number))
    sender.detached(0)
    assert sender.in_flight == 0


def test_all_chunks_of_a_message_go_together_and_again_to_the_segment_that_lacks_the_last() -> None:
    sender = attached(WHOLE)
    message = entry(3, HIGH)._replace(earlier=(Position(1, 0), Position(1, 2)))
    every = [Position(1, 0), Position(1, 2), Position(1, 3)]
    sent = planned(sender, message).sends
    assert [each.position for each in sent] == every
    assert [each.part is None for each in sent] == [True, True, False]
    assert sender.answered(0) is None
    sender.learn(HALVES)
    sender.attached(2, ReplicatedRanges.nothing(32768, LAST_HASH))
    assert [each.position for each in planned(sender, message).sends] == every
    assert [sender.answered(2), sender.answered(2), sender.answered(2)] == [
        None,
        None,
        Position(1, 3),
    ]


def test_a_chunked_message_that_is_stored_is_done() -> None:
    sender = SegmentSender((0, LAST_HASH), WHOLE)
    sender.attached(0, ReplicatedRanges.nothing(0, LAST_HASH).all_raised(Mark(1, 3)))
    message = entry(3)._replace(earlier=(Position(1, 0),))
    assert planned(sender, message) == Planned([], done=True)
