"""When messages are asked for again."""

import pytest

from magnetar.consume.redelivery import Redelivery, delay_ms


@pytest.mark.parametrize(
    ("count", "delay"), [(0, 1000), (1, 2000), (3, 8000), (6, 60_000), (10_000, 60_000)]
)
def test_the_delay_grows_up_to_a_limit(count: int, delay: int) -> None:
    assert delay_ms(1000, 60_000, 2.0, count) == delay


def test_it_never_ends_a_delay_too_early_and_asks_for_an_entry_once() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1)], 0, 1003)
    redelivery.add([(1, 2)], 1, 1003)
    redelivery.add([(1, 1)], 5, 1003)
    assert redelivery.next_ms == 1110
    assert redelivery.due(1109) == []
    assert redelivery.due(1110) == [(1, 1)]
    assert redelivery.next_ms == 1210
    assert redelivery.due(5000) == [(1, 2)]
    assert redelivery.next_ms is None or redelivery.due(5000) == []
    assert len(redelivery) == 0


def test_the_earliest_time_counts() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1)], 3, 0)
    redelivery.add([(1, 1)], 0, 0)
    assert redelivery.due(100) == [(1, 1)]
    assert redelivery.due(10_000) == []


def test_what_was_acknowledged_after_all_is_not_asked_for() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1), (1, 2)], 0, 0)
    redelivery.forget((1, 1))
    assert redelivery.due(100) == [(1, 2)]


def test_an_entry_is_forgotten_when_none_of_its_messages_is_wanted_again() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1)], 0, 0, 0)
    redelivery.add([(1, 1)], 0, 0, 2)
    redelivery.add([(1, 2)], 0, 0, 0)
    redelivery.forget((1, 1), 1)
    redelivery.forget((1, 1), 0)
    redelivery.forget((1, 2), 0)
    assert len(redelivery) == 1
    assert redelivery.due(100) == [(1, 1)]


def test_indexes_of_what_was_asked_for_count_no_more() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1)], 0, 0, 0)
    assert redelivery.due(100) == [(1, 1)]
    redelivery.add([(1, 1)], 0, 100, 1)
    redelivery.forget((1, 1), 1)
    assert redelivery.due(300) == []
    redelivery.add([(1, 1)], 0, 300, 0)
    redelivery.clear()
    redelivery.add([(1, 1)], 0, 300, 1)
    redelivery.forget((1, 1), 1)
    assert redelivery.due(500) == []


def test_neighbours_fall_due_together() -> None:
    redelivery = Redelivery(1000, 1000, 1.0)
    for at in range(0, 100, 7):
        redelivery.add([(1, at)], 0, at)
    assert len(redelivery.due(1100)) == len(range(0, 100, 7))


def test_no_delay_is_due_at_once() -> None:
    redelivery = Redelivery(0, 0, 1.0)
    redelivery.add([(1, 1)], 9, 77)
    assert redelivery.due(77) == [(1, 1)]
