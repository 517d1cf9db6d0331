"""A subscription in two clusters whose layouts change: never ahead, and behind at most as stated.

A pinned seed that shows nothing any more says that the runs have changed: `python -m
tests.replicated_subscriptions` looks for others.
"""

import pytest

from tests.replicated_subscriptions.late import LateWorld
from tests.replicated_subscriptions.rules import BROKEN, LATE
from tests.replicated_subscriptions.world import problem_of
from tests.support.effort import by_effort

SEEDS = range(by_effort(quick=200, whole=500, nightly=5_000))
AHEAD_HERE, AHEAD_THERE = "acknowledged in S by no consumer", "acknowledged in R by no consumer"
BEHIND, LEFT = "is behind", "these are left"
FOUND = {
    "F1": (146, AHEAD_THERE),
    "F2": (213, AHEAD_HERE),
    "F2-part": (0, AHEAD_HERE),
    "F3": (12, AHEAD_HERE),
    "F3-sent": (3, AHEAD_HERE),
    "F4-active": (0, AHEAD_HERE),
    "F4-ended": (14, AHEAD_HERE),
    "F4-silent": (3, AHEAD_HERE),
    "F5": (4, AHEAD_HERE),
    "F6": (73, AHEAD_THERE),
    "F7": (5, LEFT),
    "F8": (155, LEFT),
    "F8-epoch": (73, AHEAD_THERE),
    "F9": (81, BEHIND),
    "F10": (12, AHEAD_THERE),
}
"""By rule: the first seed that shows that it is broken, and what goes wrong."""

LATE_SEEDS = range(by_effort(quick=100, whole=200, nightly=2_000))
FOUND_LATE = {
    "F11": (101, AHEAD_HERE),
    "F11-ancestors": (133, AHEAD_HERE),
    "F11-child": (304, AHEAD_HERE),
    "F11-gone": (101, AHEAD_HERE),
    "F11-pruned": (133, AHEAD_HERE),
}
"""The same of a subscription that is made late."""


def test_a_subscription_is_never_ahead_and_comes_to_the_same_state_in_both_clusters() -> None:
    found = {seed: problem_of(seed) for seed in SEEDS}
    assert {seed: problem for seed, problem in found.items() if problem is not None} == {}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_run_shows_that_a_rule_is_broken(rule: str) -> None:
    seed, what = FOUND[rule]
    assert what in (problem_of(seed, rule) or "nothing")
    assert problem_of(seed) is None


def test_a_subscription_that_is_made_late_is_never_ahead_and_gets_complete() -> None:
    found = {seed: problem_of(seed, world=LateWorld) for seed in LATE_SEEDS}
    assert {seed: problem for seed, problem in found.items() if problem is not None} == {}


@pytest.mark.parametrize("rule", LATE)
def test_a_run_shows_what_is_wrong_with_a_late_subscription(rule: str) -> None:
    seed, what = FOUND_LATE[rule]
    assert what in (problem_of(seed, rule, LateWorld) or "nothing")
    assert problem_of(seed, world=LateWorld) is None
