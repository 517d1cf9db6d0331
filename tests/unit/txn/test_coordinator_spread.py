"""Coordinators shared among brokers: pure."""

import math
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from config.bounds import COORDINATOR_KEPT_MAX_S, COORDINATOR_KEPT_S
from magnetar.protocol.txn_id import CoordinatorId
from txn.coordinator_spread import (
    RetainedCoordinators,
    assign_successors,
    choose_candidacies,
    choose_surplus,
)

IDS = st.lists(st.sampled_from([f"b{n}:8080" for n in range(6)]), min_size=1, unique=True)


@st.composite
def views(draw: st.DrawFn) -> tuple[int, dict[CoordinatorId, str], list[str]]:
    """How many there are, who leads which, and who may."""
    parallelism, ids = draw(st.integers(1, 32)), draw(IDS)
    anybody = st.none() | st.sampled_from([*ids, "gone:8080"])
    led = {CoordinatorId(number): draw(anybody) for number in range(parallelism)}
    return parallelism, {number: one for number, one in led.items() if one is not None}, ids


@given(views(), st.integers(0, 1000))
def test_everything_is_led_evenly_after_two_steps_and_little_moves(
    view: tuple[int, dict[CoordinatorId, str], list[str]], seed: int
) -> None:
    parallelism, leaders, ids = view
    leaders = {number: one for number, one in leaders.items() if one in ids}
    share = math.ceil(parallelism / len(ids))
    before = dict(leaders)
    for one in ids:
        for number in choose_surplus(one, before, ids, parallelism):
            del leaders[number]
    unled = [CoordinatorId(n) for n in range(parallelism) if CoordinatorId(n) not in leaders]
    shuffled = ids[:]
    random.Random(seed).shuffle(shuffled)
    chosen = assign_successors(unled, leaders, ids)
    assert chosen == assign_successors(unled, leaders, shuffled), "all who see the same agree"
    leaders |= chosen
    assert len(leaders) == parallelism
    counts = [sum(one == who for one in leaders.values()) for who in ids]
    assert max(counts) <= share
    moved = [number for number, one in before.items() if leaders[number] != one]
    above = sum(max(0, sum(one == who for one in before.values()) - share) for who in ids)
    assert len(moved) <= above


def test_broker_that_may_not_lead_releases_nothing_by_itself() -> None:
    led = {CoordinatorId(number): "a" for number in range(4)}
    assert choose_surplus("a", led, ["b"], 4) == []
    assert choose_surplus("a", led, ["a", "b"], 4) != []


def test_without_a_candidate_nobody_is_chosen() -> None:
    assert assign_successors([CoordinatorId(0)], {}, []) == {}


@given(views(), st.integers(0, 5))
def test_candidate_stands_for_at_most_its_share(
    view: tuple[int, dict[CoordinatorId, str], list[str]], which: int
) -> None:
    parallelism, leaders, ids = view
    me, share = ids[which % len(ids)], math.ceil(parallelism / len(ids))
    unled = [CoordinatorId(n) for n in range(parallelism) if CoordinatorId(n) not in leaders]
    led = sum(one == me for one in leaders.values())
    chosen, taken = choose_candidacies(me, unled, [], leaders, ids)
    assert not taken
    assert not chosen or led + len(chosen) <= share
    assert choose_candidacies(me, unled, [], leaders, ids, chosen) == ([], []), "each is tried once"


def test_what_was_left_alone_is_taken_one_at_a_time_by_each_in_its_own_order() -> None:
    unled = [CoordinatorId(number) for number in range(2, 10)]
    leaders = {CoordinatorId(number): one for number, one in enumerate("ab")}
    ids = ["a", "b", "dead", "dead too"]
    first = set[CoordinatorId]()
    for me in "ab":
        chosen, taken = choose_candidacies(me, unled, unled, leaders, ids)
        assert chosen, "what it is chosen for goes first"
        assert not taken
        tried = list(chosen)
        order = list[CoordinatorId]()
        while taken := choose_candidacies(me, unled, unled, leaders, ids, tried)[1]:
            order += taken
            tried += taken
        assert sorted([*chosen, *order]) == unled
        first.add(order[0])
    assert len(first) == 2


def test_who_may_not_lead_takes_what_was_left_alone_only_where_nobody_may() -> None:
    unled = [CoordinatorId(0)]
    assert choose_candidacies("a", unled, unled, {}, ["b"]) == ([], [])
    assert choose_candidacies("a", unled, unled, {}, []) == ([], unled)
    assert choose_candidacies("a", unled, [], {}, []) == ([], [])


def test_retained_coordinator_is_no_surplus() -> None:
    led = {CoordinatorId(number): "a" for number in range(4)}
    given_up = choose_surplus("a", led, ["a", "b"], 4)
    assert len(given_up) == 2
    assert choose_surplus("a", led, ["a", "b"], 4, given_up) == []
    assert len(choose_surplus("a", led, ["a", "b"], 4, given_up[:1])) == 1


ZERO, ONE = CoordinatorId(0), CoordinatorId(1)


def test_coordinator_won_by_another_is_not_kept() -> None:
    kept = RetainedCoordinators("a")
    kept.note([ZERO, ONE], "abc", 0.0)
    assert set(kept.numbers({ZERO: "a", ONE: "b"}, "abc", 1.0)) == {ZERO}
    assert set(kept.numbers({ZERO: "a", ONE: "a"}, "abc", 2.0)) == {ZERO}
    assert kept.due_s == [COORDINATOR_KEPT_S]


def test_newly_won_coordinator_is_retained() -> None:
    kept = RetainedCoordinators("a")
    kept.note([ZERO], "abc", 0.0)
    assert set(kept.numbers({}, "abc", 1.0)) == {ZERO}


def test_nothing_is_kept_once_the_candidates_are_others_in_whatever_order() -> None:
    for others in ("ab", "abcd", "abd", ""):
        kept = RetainedCoordinators("a")
        kept.note([ZERO], "abc", 0.0)
        assert set(kept.numbers({ZERO: "a"}, "cab", 1.0)) == {ZERO}
        assert not kept.numbers({ZERO: "a"}, others, 2.0)
        assert not kept.numbers({ZERO: "a"}, "abc", 3.0), "what is forgotten stays so"


def test_where_there_is_no_candidate_nothing_is_kept() -> None:
    kept = RetainedCoordinators("a")
    kept.note([ZERO], "", 0.0)
    assert not kept.numbers({ZERO: "a"}, "", 0.0)


def test_what_is_left_alone_again_is_kept_for_longer_up_to_a_bound_until_candidates_change() -> (
    None
):
    kept, now_s, times_s = RetainedCoordinators("a"), 5.0, list[float]()
    for _ in range(12):
        kept.note([ZERO], "abc", now_s)
        times_s.append(kept.due_s[0] - now_s)
        now_s = kept.due_s[0] + 1
        assert not kept.numbers({ZERO: "a"}, "abc", now_s)
    assert times_s[0] == COORDINATOR_KEPT_S
    assert all(
        later >= min(2 * one, COORDINATOR_KEPT_MAX_S) for one, later in pairwise(times_s[1:])
    )
    assert times_s[-1] == COORDINATOR_KEPT_MAX_S
    kept.note([ZERO], "abd", now_s)
    assert kept.due_s == [now_s + COORDINATOR_KEPT_S]
