"""Choosing brokers and planning moves: pure, so held against what must be true of any view."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.placement.choice import UNEVEN, Candidate, choose, fair_shares, plan_moves

IDS = st.lists(st.sampled_from([f"b{n}:8080" for n in range(5)]), min_size=1, unique=True)
NAMES = st.integers(0, 1000).map("t{}".format)
LOADS = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])


@st.composite
def views(draw: st.DrawFn) -> list[Candidate]:
    """Some brokers with something each."""
    return [Candidate(one, draw(st.integers(0, 40)), draw(LOADS)) for one in draw(IDS)]


def names_of(view: list[Candidate]) -> dict[str, list[str]]:
    return {one.broker_id: [f"{one.broker_id}/{n}" for n in range(one.owned)] for one in view}


@given(views(), NAMES, st.integers(0, 1000))
def test_all_who_see_the_same_choose_the_same(view: list[Candidate], name: str, seed: int) -> None:
    other = view[:]
    random.Random(seed).shuffle(other)
    assert choose(name, view) == choose(name, other)


def test_without_a_candidate_there_is_no_choice() -> None:
    assert choose("t", []) is None
    assert plan_moves({}, [], limit=8) == []


@given(views(), NAMES)
def test_the_cheapest_is_chosen(view: list[Candidate], name: str) -> None:
    chosen = next(one for one in view if one.broker_id == choose(name, view))
    assert chosen.cost == min(one.cost for one in view)


@given(IDS, st.integers(0, 100))
def test_topics_placed_one_by_one_are_spread_evenly(ids: list[str], count: int) -> None:
    owned = Counter(dict.fromkeys(ids, 0))
    for number in range(count):
        chosen = choose(f"t{number}", [Candidate(one, owned[one]) for one in ids])
        assert chosen is not None
        owned[chosen] += 1
    assert max(owned.values()) - min(owned.values()) <= 1


def test_a_busy_broker_gets_less() -> None:
    owned = Counter({"busy": 0, "idle": 0})
    for number in range(90):
        view = [Candidate("busy", owned["busy"], 1.0), Candidate("idle", owned["idle"])]
        owned[choose(f"t{number}", view) or ""] += 1
    assert owned["busy"] == pytest.approx(30, abs=1)


@given(IDS.filter(lambda ids: len(ids) > 1))
def test_among_equals_the_name_decides_and_most_keep_their_broker(ids: list[str]) -> None:
    view = [Candidate(one, 0) for one in ids]
    before = {f"t{n}": choose(f"t{n}", view) for n in range(50)}
    gone = ids[0]
    after = {name: choose(name, [one for one in view if one.broker_id != gone]) for name in before}
    assert all(after[name] == broker_id for name, broker_id in before.items() if broker_id != gone)


# Moves


@given(views(), st.integers(1, 50))
def test_a_round_moves_few_from_above_to_below_the_share(view: list[Candidate], limit: int) -> None:
    owned, shares = names_of(view), fair_shares(view)
    counts = {one.broker_id: one.owned for one in view}
    moves = plan_moves(owned, view, limit=limit)
    assert len(moves) <= limit
    assert len({move.name for move in moves}) == len(moves)
    for move in moves:
        assert move.name in owned[move.source]
        assert counts[move.source] > shares[move.source]
        assert counts[move.target] < shares[move.target]
        counts[move.source] -= 1
        counts[move.target] += 1


@given(views())
def test_rounds_end_and_leave_nobody_far_above_its_share(view: list[Candidate]) -> None:
    owned, loads = names_of(view), {one.broker_id: one.load for one in view}
    shares = fair_shares(view)
    excess = sum(max(0.0, len(owned[one]) - shares[one]) for one in owned)
    moved = 0
    while True:
        now = [Candidate(one, len(names), loads[one]) for one, names in owned.items()]
        moves = plan_moves(owned, now, limit=8)
        if not moves:
            break
        moved += len(moves)
        for move in moves:
            owned[move.source].remove(move.name)
            owned[move.target].append(move.name)
    assert moved <= math.ceil(excess), "no name goes to and fro"
    assert all(len(names) <= shares[one] * UNEVEN + 1 for one, names in owned.items())


@given(IDS, st.integers(0, 100))
def test_even_distribution_plans_no_moves(ids: list[str], each: int) -> None:
    view = [Candidate(one, each) for one in ids]
    assert plan_moves(names_of(view), view, limit=8) == []


def test_a_new_broker_gets_its_share_and_nothing_else_moves() -> None:
    view = [Candidate("a", 30), Candidate("b", 30), Candidate("new", 0)]
    moves = plan_moves(names_of(view), view, limit=100)
    assert {move.target for move in moves} == {"new"}
    assert Counter(move.source for move in moves) == {"a": 10, "b": 10}


def test_recently_moved_topic_is_not_moved_again() -> None:
    view = [Candidate("a", 30), Candidate("b", 0)]
    owned = names_of(view)
    first = plan_moves(owned, view, limit=5)
    second = plan_moves(owned, view, limit=5, keep={move.name for move in first})
    assert not {move.name for move in first} & {move.name for move in second}
    assert plan_moves(owned, view, limit=5, keep=owned["a"]) == []


def test_a_broker_that_is_no_candidate_is_left_alone() -> None:
    view = [Candidate("a", 4), Candidate("b", 4)]
    owned = names_of(view) | {"draining": [f"d{n}" for n in range(100)]}
    assert plan_moves(owned, view, limit=8) == []
