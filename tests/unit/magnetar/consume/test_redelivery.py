"""When messages are asked for again: negative acknowledgements, and timeouts."""

import random

import pytest

from magnetar.consume.message import EntryKey
from magnetar.consume.redelivery import ProcessingTimeouts, Redelivery, delay_ms


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
    assert list(redelivery.due(1109)) == []
    assert list(redelivery.due(1110)) == [(1, 1)]
    assert redelivery.next_ms == 1210
    assert list(redelivery.due(5000)) == [(1, 2)]
    assert redelivery.next_ms is None or list(redelivery.due(5000)) == []
    assert len(redelivery) == 0


def test_the_earliest_time_counts() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1)], 3, 0)
    redelivery.add([(1, 1)], 0, 0)
    assert list(redelivery.due(100)) == [(1, 1)]
    assert list(redelivery.due(10_000)) == []


def test_nacked_message_acked_later_is_not_requested_again() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1), (1, 2)], 0, 0)
    redelivery.forget((1, 1))
    assert list(redelivery.due(100)) == [(1, 2)]


def test_an_entry_is_forgotten_when_none_of_its_messages_is_wanted_again() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1)], 0, 0, 0)
    redelivery.add([(1, 1)], 0, 0, 2)
    redelivery.add([(1, 2)], 0, 0, 0)
    redelivery.forget((1, 1), 1)
    redelivery.forget((1, 1), 0)
    redelivery.forget((1, 2), 0)
    assert len(redelivery) == 1
    assert list(redelivery.due(100)) == [(1, 1)]


def test_indexes_of_what_was_asked_for_count_no_more() -> None:
    redelivery = Redelivery(100, 1000, 2.0)
    redelivery.add([(1, 1)], 0, 0, 0)
    assert list(redelivery.due(100)) == [(1, 1)]
    redelivery.add([(1, 1)], 0, 100, 1)
    redelivery.forget((1, 1), 1)
    assert list(redelivery.due(300)) == []
    redelivery.add([(1, 1)], 0, 300, 0)
    redelivery.clear()
    redelivery.add([(1, 1)], 0, 300, 1)
    redelivery.forget((1, 1), 1)
    assert list(redelivery.due(500)) == []


def test_neighbours_fall_due_together() -> None:
    redelivery = Redelivery(1000, 1000, 1.0)
    for at in range(0, 100, 7):
        redelivery.add([(1, at)], 0, at)
    assert len(redelivery.due(1100)) == len(range(0, 100, 7))


def test_no_delay_is_due_at_once() -> None:
    redelivery = Redelivery(0, 0, 1.0)
    redelivery.add([(1, 1)], 9, 77)
    assert list(redelivery.due(77)) == [(1, 1)]


ONE, TWO, THREE = (1, 1), (1, 2), (1, 3)


@pytest.mark.parametrize("timeout_ms", [1, 9, 1000, 1234, 60_000])
@pytest.mark.parametrize("now_ms", [0, 1, 99, 100, 12_345])
def test_the_time_is_over_never_too_early_and_a_tick_too_late_at_most(
    timeout_ms: int, now_ms: int
) -> None:
    timeouts = ProcessingTimeouts(timeout_ms)
    due_ms = timeouts.handed_out(ONE, -1, now_ms)
    assert (timeouts.next_ms, len(timeouts)) == (due_ms, 1)
    # `now_ms` may be a millisecond that is all but over.
    assert now_ms + 1 + timeout_ms <= due_ms
    assert due_ms <= now_ms + timeout_ms + max(1, min(timeout_ms / 10, 1000))
    assert timeouts.due(due_ms - 1) == []
    assert timeouts.due(due_ms) == [ONE]
    assert (timeouts.due(due_ms), timeouts.next_ms, len(timeouts)) == ([], None, 0)


def test_redeliveries_due_in_one_tick_are_requested_together() -> None:
    timeouts = ProcessingTimeouts(1000)
    dues = {timeouts.handed_out((1, at), -1, at) for at in range(99)}
    assert dues == {1100}
    assert timeouts.due(1100) == [(1, at) for at in range(99)]


def test_message_acked_in_time_is_not_requested_again() -> None:
    timeouts = ProcessingTimeouts(1000)
    timeouts.handed_out(ONE, -1, 0)
    timeouts.handed_out(TWO, -1, 0)
    assert timeouts.end(ONE, -1)
    assert not timeouts.end(ONE, -1)
    assert not timeouts.end(THREE, -1)
    assert timeouts.due(10_000) == [TWO]
    assert not timeouts.end(TWO, -1)


def test_a_batch_is_asked_for_once_when_the_first_of_its_messages_is_late() -> None:
    timeouts = ProcessingTimeouts(1000)
    for index in range(70):
        timeouts.handed_out(ONE, index, index * 100)
    assert timeouts.end(ONE, 0)
    first = timeouts.next_ms
    assert first is not None
    assert timeouts.due(first) == [ONE]
    assert (len(timeouts), timeouts.due(100_000)) == (0, [])
    assert not timeouts.end(ONE, 5)


def test_a_batch_of_which_all_is_done_with_is_not_known_any_more() -> None:
    timeouts = ProcessingTimeouts(1000)
    for index in (0, 3):
        timeouts.handed_out(ONE, index, 0)
        timeouts.handed_out(TWO, index, 0)
    for index in (3, 0):
        assert timeouts.end(ONE, index)
    assert timeouts.due(10_000) == [TWO]


def test_the_time_begins_anew_with_each_time_that_it_is_handed_out() -> None:
    timeouts = ProcessingTimeouts(1000)
    timeouts.handed_out(ONE, 2, 0)
    timeouts.handed_out(TWO, -1, 300)
    timeouts.handed_out(ONE, 2, 500)
    assert timeouts.due(1400) == [TWO]
    assert timeouts.due(1500) == []
    assert timeouts.due(1600) == [ONE]


def test_what_is_asked_for_for_another_reason_is_not_asked_for_twice() -> None:
    timeouts = ProcessingTimeouts(1000)
    for key, index in ((ONE, 0), (ONE, 64), (TWO, -1), (THREE, -1)):
        timeouts.handed_out(key, index, 0)
    timeouts.end_all([ONE, TWO, (9, 9)])
    assert timeouts.due(10_000) == [THREE]


def test_nothing_is_known_when_all_comes_again_anyway() -> None:
    timeouts = ProcessingTimeouts(1000)
    timeouts.handed_out(ONE, 0, 0)
    timeouts.handed_out(TWO, -1, 0)
    timeouts.clear()
    assert (len(timeouts), timeouts.due(10_000)) == (0, [])
    timeouts.handed_out(ONE, 1, 0)
    assert timeouts.end(ONE, 1)


@pytest.mark.parametrize("seed", range(20))
def test_any_history_asks_for_what_a_plain_list_says(seed: int) -> None:
    luck, timeouts, now = random.Random(seed), ProcessingTimeouts(500), 0
    out: dict[tuple[EntryKey, int], int] = {}
    for _ in range(2000):
        now += luck.randrange(20)
        key = (1, luck.randrange(30))
        index = -1 if key[1] % 2 else luck.randrange(4)
        match luck.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                out[key, index] = timeouts.handed_out(key, index, now)
            case 5 | 6 | 7:
                assert timeouts.end(key, index) == (out.pop((key, index), None) is not None)
            case 8:
                late = {each for (each, _), due in out.items() if due <= now}
                found = timeouts.due(now)
                assert len(found) == len(late)
                assert set(found) == late
                out = {each: due for each, due in out.items() if each[0] not in late}
            case _:
                timeouts.end_all([key])
                out = {each: due for each, due in out.items() if each[0] != key}
        assert len(timeouts) == len(out)
        assert timeouts.next_ms == min(out.values(), default=None)
        assert len(timeouts._batches) == len({each for each, at in out if at >= 0})
