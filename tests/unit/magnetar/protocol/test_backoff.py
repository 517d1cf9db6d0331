"""Pauses that double up to a limit, begin anew after a success, and differ by luck."""

import random
from functools import partial

import pytest

from magnetar.protocol.backoff import Backoff


def test_pauses_double_up_to_the_limit_and_stay_there() -> None:
    backoff = Backoff(1, 5)
    assert [backoff.pause_s() for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_success_begins_with_the_first_pause_again() -> None:
    backoff = Backoff(0.5, 5)
    pauses = [backoff.pause_s() for _ in range(3)]
    backoff.reset()
    assert [backoff.pause_s() for _ in range(3)] == pauses == [0.5, 1, 2]


def test_a_first_pause_above_the_limit_is_made_once() -> None:
    backoff = Backoff(3, 2)
    assert [backoff.pause_s() for _ in range(3)] == [3, 2, 2]


def test_luck_changes_each_pause_and_not_the_next_one() -> None:
    backoff = Backoff(1, 8, partial(random.Random(1).uniform, 0.8, 1.2))
    luck = random.Random(1)
    expected = [pause_s * luck.uniform(0.8, 1.2) for pause_s in (1, 2, 4, 8, 8)]
    assert [backoff.pause_s() for _ in expected] == expected
    assert expected != pytest.approx([1, 2, 4, 8, 8])
