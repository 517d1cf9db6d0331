"""Permits against models of both brokers: they never leak, and nobody waits for ever."""

from random import Random

import pytest

from magnetar.consume.permits import Permits


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
