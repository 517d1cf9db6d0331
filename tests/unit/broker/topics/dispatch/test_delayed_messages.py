"""What is kept back until its time: order, bound, what is acknowledged meanwhile."""

from hypothesis import given
from hypothesis import strategies as st

from broker.topics.dispatch.delayed_messages import DelayedMessages
from magnetar.protocol.ids import Position

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 20), st.integers(0, 0)),
        st.tuples(st.just("discard"), st.integers(0, 20), st.integers(0, 0)),
        st.tuples(st.just("pop"), st.integers(0, 30), st.integers(1, 5)),
    ),
    max_size=60,
)


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def due_ms_of(entry_id: int) -> int:
    """Of a position it never changes; several share one."""
    return entry_id * 7 % 10


def test_due_messages_come_by_time_and_then_by_position() -> None:
    delayed = DelayedMessages()
    for entry_id, due_ms in ((4, 20), (1, 30), (3, 10), (2, 20)):
        delayed.add(at(entry_id), due_ms, key_hash=entry_id)
    assert delayed.next_due_ms == 10
    assert delayed.pop_due(9, 10) == []
    assert delayed.pop_due(20, 2) == [(at(3), 3), (at(2), 2)]
    assert delayed.pop_due(20, 2) == [(at(4), 4)]
    assert (len(delayed), delayed.next_due_ms) == (1, 30)


def test_delayed_messages_are_full_at_the_bound() -> None:
    delayed = DelayedMessages(bound=2)
    delayed.add(at(1), 10)
    delayed.add(at(1), 10)
    assert not delayed.full
    delayed.add(at(2), 20)
    assert delayed.full
    delayed.add(at(3), 30)
    assert delayed.discard(at(3)) == 0
    assert delayed.full
    assert delayed.pop_due(10, 10) == [(at(1), 0)]
    assert not delayed.full
    delayed.add(at(4), 40)
    delayed.discard(at(2))
    assert not delayed.full


def test_discarded_messages_free_their_memory_before_they_are_due() -> None:
    delayed = DelayedMessages()
    delayed.add(at(0), 5)
    for entry_id in range(1, 10_000):
        delayed.add(at(entry_id), 1_000_000)
        delayed.discard(at(entry_id))
    assert len(delayed._heap) < 2_000
    assert delayed.pop_due(2_000_000, 10) == [(at(0), 0)]


@given(MOVES)
def test_delayed_messages_behave_as_a_sorted_set(moves: list[tuple[str, int, int]]) -> None:
    delayed = DelayedMessages(bound=8)
    expected: set[tuple[int, Position]] = set()
    for move, number, count in moves:
        item = (due_ms_of(number), at(number))
        if move == "add":
            delayed.add(at(number), due_ms_of(number), number)
            expected.add(item)
        elif move == "discard":
            assert delayed.discard(at(number)) == (number if item in expected else None)
            expected.discard(item)
        else:
            due = sorted(each for each in expected if each[0] <= number)[:count]
            popped = delayed.pop_due(number, count)
            assert popped == [(position, position.entry_id) for _, position in due]
            expected -= set(due)
        assert len(delayed) == len(expected)
        assert delayed.full == (len(expected) >= 8)
        assert delayed.next_due_ms == min((each[0] for each in expected), default=None)
        assert all(
            (at(each) in delayed) == ((due_ms_of(each), at(each)) in expected) for each in range(21)
        )
