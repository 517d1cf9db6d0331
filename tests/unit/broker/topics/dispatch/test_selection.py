"""Selection: turns, ranks, rings and ranges, checked for all inputs."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.topics.dispatch.errors import ConsumerAssignError
from broker.topics.dispatch.selection import AutoSplit, Rotation, StickyRanges, choose_active
from magnetar.protocol.names import TopicName, parse_topic_name

HASHES = range(0, 65536, 97)


@dataclass(frozen=True)
class Candidate:
    name: str
    priority_level: int = 0


names = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
candidates = st.lists(
    st.builds(Candidate, st.text("abc", min_size=1, max_size=3), st.integers(0, 2)),
    min_size=1,
    max_size=8,
    unique=True,
)


def topic_name(text: str) -> TopicName:
    return parse_topic_name(f"persistent://public/default/{text}")


@settings(deadline=None)
@given(candidates, st.sampled_from(["t", "u", "t-partition-0", "t-partition-7"]))
def test_the_active_one_is_of_the_best_level_whatever_the_order(
    consumers: list[Candidate], topic: str
) -> None:
    active = choose_active(consumers, topic_name(topic))
    assert active.priority_level == min(each.priority_level for each in consumers)
    assert choose_active(consumers[::-1], topic_name(topic)) == active


def test_partitions_spread_over_the_best_level() -> None:
    consumers = [Candidate("c"), Candidate("a"), Candidate("b"), Candidate("0", 1)]
    partitions = [topic_name(f"t-partition-{index}") for index in range(6)]
    assert [choose_active(consumers, each).name for each in partitions] == list("abcabc")


@pytest.mark.parametrize(
    ("members", "chosen"),
    [
        (["a", "b", "c"], "200002012012"),
        (["consumer-1", "consumer-2"], "011100001000"),
        (["x", "ü", "z"], "000121102222"),
    ],
)
def test_topics_without_partitions_spread_as_in_pulsar(members: list[str], chosen: str) -> None:
    """The numbers are those of Apache Pulsar's own ring, for the topics t0 to t11."""
    consumers = [Candidate("0", 1), *map(Candidate, members)]
    active = [choose_active(consumers, topic_name(f"t{number}")).name for number in range(12)]
    assert active == [members[int(number)] for number in chosen]


def test_newer_one_of_two_consumers_with_one_name_becomes_active() -> None:
    consumers = [Candidate("a"), Candidate("a")]
    assert choose_active(consumers, topic_name("t")) is consumers[1]


@settings(deadline=None)
@given(names, st.integers(1, 5))
def test_every_consumer_gets_as_many_turns(members: list[str], rounds: int) -> None:
    rotation: Rotation[Candidate] = Rotation()
    for name in members:
        rotation.add(Candidate(name))
    turns = [rotation.next(lambda _: True) for _ in range(rounds * len(members))]
    assert turns == [Candidate(name) for name in members] * rounds


@settings(deadline=None)
@given(candidates, st.data())
def test_a_lower_level_gets_only_what_better_ones_cannot_take(
    consumers: list[Candidate], data: st.DataObject
) -> None:
    rotation: Rotation[Candidate] = Rotation()
    for consumer in consumers:
        rotation.add(consumer)
    roomy = data.draw(st.sets(st.sampled_from(consumers)))
    chosen = rotation.next(lambda each: each in roomy)
    if not roomy:
        assert chosen is None
    else:
        assert chosen in roomy
        assert chosen.priority_level == min(each.priority_level for each in roomy)


@settings(deadline=None)
@given(names, st.data())
def test_leaving_does_not_cost_others_their_turn(members: list[str], data: st.DataObject) -> None:
    rotation: Rotation[Candidate] = Rotation()
    for name in members:
        rotation.add(Candidate(name))
    taken = data.draw(st.integers(0, len(members) - 1))
    for _ in range(taken):
        rotation.next(lambda _: True)
    leaver = data.draw(st.sampled_from(members))
    rotation.remove(Candidate(leaver))
    upcoming = [name for name in members[taken:] + members[:taken] if name != leaver]
    turns = [rotation.next(lambda _: True) for _ in upcoming]
    assert [each.name for each in turns if each is not None] == upcoming


@settings(deadline=None)
@given(names)
def test_auto_split_owns_every_hash_and_moves_only_the_leavers(members: list[str]) -> None:
    ring: AutoSplit[Candidate] = AutoSplit()
    for name in members:
        ring.add(Candidate(name), ())
    before = {key_hash: ring.owner(key_hash) for key_hash in HASHES}
    assert None not in before.values()
    leaver = Candidate(members[0])
    ring.remove(leaver)
    for key_hash, owner in before.items():
        if len(members) == 1:
            assert ring.owner(key_hash) is None
        elif owner != leaver:
            assert ring.owner(key_hash) == owner
        else:
            assert ring.owner(key_hash) in [Candidate(name) for name in members[1:]]


@settings(deadline=None)
@given(names)
def test_auto_split_depends_on_the_consumers_not_on_their_order(members: list[str]) -> None:
    one: AutoSplit[Candidate] = AutoSplit()
    other: AutoSplit[Candidate] = AutoSplit()
    for name in members:
        one.add(Candidate(name), ())
    for name in reversed(members):
        other.add(Candidate(name), ())
    assert [one.owner(h) for h in HASHES] == [other.owner(h) for h in HASHES]


@settings(deadline=None)
@given(names)
def test_auto_split_shows_every_hash_in_a_range_of_its_owner(members: list[str]) -> None:
    ring: AutoSplit[Candidate] = AutoSplit()
    assert ring.ranges_by_owner() == {}
    for name in members:
        ring.add(Candidate(name), ())
    found = ring.ranges_by_owner()
    assert found.keys() == {Candidate(name) for name in members}
    whole = sorted(each for some in found.values() for each in some)
    assert (whole[0][0], whole[-1][1]) == (0, 65535)
    assert all(low[1] + 1 == high[0] for low, high in pairwise(whole))
    for consumer, some in found.items():
        assert all(low[1] + 1 < high[0] for low, high in pairwise(some))
        assert all(ring.owner(key_hash) == consumer for each in some for key_hash in each)


def test_auto_split_is_roughly_even() -> None:
    ring: AutoSplit[Candidate] = AutoSplit()
    for index in range(4):
        ring.add(Candidate(f"consumer-{index}"), ())
    owned = [ring.owner(key_hash) for key_hash in range(65536)]
    shares = [owned.count(Candidate(f"consumer-{index}")) / 65536 for index in range(4)]
    assert min(shares) > 0.15
    assert max(shares) < 0.35


def test_twins_of_one_name_share() -> None:
    ring: AutoSplit[Candidate] = AutoSplit()
    twins = [Candidate("same", 0), Candidate("same", 1)]
    for twin in twins:
        ring.add(twin, ())
    assert {ring.owner(key_hash) for key_hash in HASHES} == set(twins)


ranges = st.lists(st.integers(0, 65535), min_size=2, max_size=12, unique=True).map(
    lambda cuts: [
        (start, end) for start, end in zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)
    ]
)


@settings(deadline=None)
@given(ranges, st.integers(0, 65535))
def test_sticky_owner_is_the_consumer_of_the_range(
    parts: list[tuple[int, int]], key_hash: int
) -> None:
    sticky: StickyRanges[Candidate] = StickyRanges()
    for index, part in enumerate(parts):
        sticky.add(Candidate(str(index)), [part])
    expected = [str(index) for index, (start, end) in enumerate(parts) if start <= key_hash <= end]
    owner = sticky.owner(key_hash)
    assert ([] if owner is None else [owner.name]) == expected


@settings(deadline=None)
@given(ranges, ranges)
def test_sticky_refuses_overlaps_and_is_unchanged_then(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    sticky: StickyRanges[Candidate] = StickyRanges()
    sticky.add(Candidate("first"), first)
    before = [sticky.owner(key_hash) for key_hash in HASHES]
    overlap = any(a <= d and c <= b for a, b in first for c, d in second)
    if overlap:
        with pytest.raises(ConsumerAssignError):
            sticky.add(Candidate("second"), second)
        assert [sticky.owner(key_hash) for key_hash in HASHES] == before
    else:
        sticky.add(Candidate("second"), second)
        sticky.remove(Candidate("first"))
        assert {sticky.owner(start) for start, _ in second} == {Candidate("second")}


@pytest.mark.parametrize("bad", [[], [(5, 4)], [(-1, 3)], [(0, 65536)], [(0, 5), (5, 9)]])
def test_sticky_refuses_what_is_no_range(bad: list[tuple[int, int]]) -> None:
    sticky: StickyRanges[Candidate] = StickyRanges()
    with pytest.raises(ConsumerAssignError):
        sticky.add(Candidate("c"), bad)
    assert sticky.owner(5) is None
