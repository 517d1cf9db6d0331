"""Which segment takes a message while layouts change."""

import pytest

from magnetar.layout import Segment
from magnetar.produce.outgoing import OutgoingMessage
from magnetar.produce.segment_router import SegmentRouter, SegmentState
from magnetar.protocol.key_hash import segment_hash
from tests.unit.magnetar.produce.fakes import layout, outgoing, segment

LOW, HIGH = "k11", "b"
"""Keys of the lower and the upper half of the key space."""
WHOLE = layout(0, segment(0))
HALVES = layout(
    1,
    segment(0, active=False),
    segment(1, 0, 32767, parents=(0,)),
    segment(2, 32768, 65535, parents=(0,)),
)
MERGED = layout(
    2,
    segment(1, 0, 32767, active=False),
    segment(2, 32768, 65535, active=False),
    segment(3, parents=(1, 2)),
)


def ids(placed: list[tuple[Segment, OutgoingMessage]]) -> list[tuple[int, OutgoingMessage]]:
    return [(where.segment_id, message) for where, message in placed]


def placed_at(router: SegmentRouter, message: OutgoingMessage) -> int | None:
    where = router.place(message)
    return None if where is None else where.segment_id


def test_the_keys_are_where_they_are_said_to_be() -> None:
    assert segment_hash(LOW.encode()) < 32768 <= segment_hash(HIGH.encode())


def test_a_split_holds_until_the_parent_is_drained_and_what_came_back_goes_first() -> None:
    router = SegmentRouter(WHOLE)
    assert placed_at(router, outgoing(key=LOW)) == 0
    assert [each.segment_id for each in router.change_layout(HALVES)] == [0]
    assert router.state_of(0) is SegmentState.DRAINING
    low, high = outgoing(key=LOW), outgoing(key=HIGH)
    assert placed_at(router, low) is None
    assert placed_at(router, high) is None
    assert router.take_released() == []
    back = [outgoing(key=HIGH), outgoing(key=LOW)]
    router.drained(0, back)
    assert ids(router.take_released()) == [(2, back[0]), (1, back[1]), (1, low), (2, high)]
    assert router.state_of(0) is None
    assert placed_at(router, outgoing(key=LOW)) == 1
    assert not router.held


def test_a_merge_holds_until_both_parents_are_drained() -> None:
    router = SegmentRouter(HALVES)
    assert len(router.change_layout(MERGED)) == 2
    held = outgoing(key=LOW)
    assert placed_at(router, held) is None
    router.drained(1, ())
    assert router.take_released() == []
    router.drained(2, ())
    assert ids(router.take_released()) == [(3, held)]


def test_messages_of_two_parents_are_sent_in_the_order_of_the_program() -> None:
    """Sequence ids of the program rise only so, and a broker that deduplicates drops others."""
    router = SegmentRouter(HALVES)
    messages = [outgoing(key=LOW if number % 2 else HIGH) for number in range(6)]
    for number, message in enumerate(messages):
        message.place = number
    assert [placed_at(router, message) for message in messages[:4]] == [2, 1, 2, 1]
    router.change_layout(MERGED)
    assert [placed_at(router, message) for message in messages[4:]] == [None, None]
    router.drained(1, [messages[1], messages[3]])
    router.drained(2, [messages[0], messages[2]])
    assert ids(router.take_released()) == [(3, message) for message in messages]


def test_a_segment_that_is_sealed_before_it_took_passes_its_messages_on() -> None:
    router = SegmentRouter(WHOLE)
    router.change_layout(HALVES)
    held = outgoing(key=HIGH)
    router.place(held)
    assert router.change_layout(MERGED) == []
    assert router.state_of(3) is SegmentState.HELD
    router.drained(0, ())
    assert router.state_of(3) is SegmentState.TAKING
    assert ids(router.take_released()) == [(3, held)]


def test_long_chains_of_segments_that_never_took_do_not_hold_each_other() -> None:
    router = SegmentRouter(WHOLE)
    last = 0
    for step in range(1, 30):
        width = 65536 // (1 + step % 3)
        actives = []
        for part in range(1 + step % 3):
            end = 65535 if part == step % 3 else (part + 1) * width - 1
            actives.append(segment(last + 1 + part, part * width, end))
        last += len(actives)
        router.change_layout(layout(step, *actives))
    router.place(outgoing(key=LOW))
    router.drained(0, ())
    assert not router.is_switching
    assert len(router.take_released()) == 1


def test_a_segment_that_its_broker_ends_waits_for_the_layout() -> None:
    router = SegmentRouter(HALVES)
    assert router.ended(1)
    assert not router.ended(1)
    back = outgoing(key=LOW)
    router.drained(1, [back])
    assert router.take_released() == []
    assert router.awaits_layout
    assert placed_at(router, outgoing(key=HIGH)) == 2
    assert router.change_layout(MERGED)[0].segment_id == 2
    assert not router.awaits_layout
    router.drained(2, ())
    assert ids(router.take_released()) == [(3, back)]


def test_messages_without_a_new_layout_are_stranded() -> None:
    router = SegmentRouter(WHOLE)
    held = outgoing(key=LOW)
    router.ended(0)
    router.drained(0, [held])
    router.place(without_key := outgoing())
    assert router.take_stranded() == [held, without_key]
    assert router.take_stranded() == []


def test_messages_of_a_split_do_not_strand() -> None:
    router = SegmentRouter(WHOLE)
    router.change_layout(HALVES)
    router.place(outgoing(key=LOW))
    router.place(outgoing())
    assert router.take_stranded() == []
    assert len(router.held) == 2


def test_messages_without_key_rotate_and_skip_segments_that_do_not_take() -> None:
    router = SegmentRouter(HALVES, turn=1, run=2)
    assert [placed_at(router, outgoing()) for _ in range(6)] == [2, 2, 1, 1, 2, 2]
    router.ended(2)
    router.drained(2, ())
    assert {placed_at(router, outgoing()) for _ in range(6)} == {1}
    router.ended(1)
    assert placed_at(router, outgoing()) is None


def test_partitions_of_a_regular_topic_all_come_before_what_follows_them() -> None:
    parts = layout(0, segment(0, 0, 32767, legacy=True), segment(1, 32768, legacy=True))
    router = SegmentRouter(parts)
    after = layout(
        1,
        segment(0, active=False, legacy=True),
        segment(1, active=False, legacy=True),
        segment(2, 0, 32767, parents=(0, 1)),
        segment(3, 32768, parents=(0, 1)),
    )
    router.change_layout(after)
    router.drained(0, ())
    assert router.state_of(2) is router.state_of(3) is SegmentState.HELD
    router.drained(1, ())
    assert router.state_of(2) is router.state_of(3) is SegmentState.TAKING


def test_cancelled_messages_leave_the_held_queue() -> None:
    router = SegmentRouter(WHOLE)
    router.change_layout(HALVES)
    first, second = outgoing(key=LOW), outgoing(key=LOW)
    router.place(first)
    router.place(second)
    first.outcome.set_exception(TimeoutError())
    assert router.prune() == [first]
    assert list(router.held) == [second]


def test_states_move_only_as_the_table_says() -> None:
    router = SegmentRouter(WHOLE)
    with pytest.raises(RuntimeError, match="cannot go"):
        router.drained(0, ())
