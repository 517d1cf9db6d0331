"""Segments that several consumers share: who has them, never in two modes, few moves."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from broker.scalable.answers import assignment_of
from broker.scalable.assignment import Holdings, planned, rebalance, release
from broker.scalable.group import ConsumerGroup
from broker.scalable.layout import Layout, initial, rebucket
from broker.scalable.sharing_clients import can_share_segments
from magnetar.protocol.names import parse_topic_name
from tests.unit.broker.scalable.holdings import settle
from tests.unit.broker.scalable.test_group import Client, HonestClients, restored

NAMES = st.sets(st.sampled_from("abcdefghij"))
SEGMENTS = st.lists(st.integers(0, 5), unique=True, max_size=5)
PLACES = st.dictionaries(st.integers(0, 5), st.integers(1, 4))
Shares = Mapping[int, frozenset[str]]


def shares(text: str) -> dict[int, frozenset[str]]:
    """`0:ac 1:b` as the consumers of segments."""
    pairs = (each.split(":") for each in text.split())
    return {int(segment_id): frozenset(names) for segment_id, names in pairs}


@pytest.mark.parametrize(
    ("consumers", "places", "expected"),
    [
        ("ab", {0: 4, 1: 4}, "0:a 1:b"),
        ("abc", {0: 4, 1: 4}, "0:ac 1:b"),
        ("abcdefgh", {0: 4, 1: 4}, "0:aceg 1:bdfh"),
        ("abcdefghij", {0: 4, 1: 4}, "0:aceg 1:bdfh"),
        ("abcdef", {0: 1, 1: 4}, "0:a 1:bcde"),
        ("abcdef", {1: 2}, "0:a 1:bc"),
        ("abc", {}, "0:a 1:b"),
    ],
)
def test_surplus_consumers_are_dealt_round_robin(
    consumers: str, places: dict[int, int], expected: str
) -> None:
    assert planned({}, [0, 1], consumers, places) == shares(expected)


@given(st.lists(st.tuples(SEGMENTS, NAMES, PLACES), min_size=1, max_size=6))
def test_a_plan_is_fair_stable_and_within_the_places(
    steps: list[tuple[list[int], set[str], dict[int, int]]],
) -> None:
    plan: dict[int, frozenset[str]] = {}
    for segments, names, places in steps:
        plan = planned(plan, segments, names, places)
        assert planned(plan, segments, names, places) == plan
        assert plan.keys() == (set(segments) if names else set())
        for segment_id, owners in plan.items():
            assert 1 <= len(owners) <= places.get(segment_id, 1)
        counts = {name: sum(name in owners for owners in plan.values()) for name in names}
        room = sum(places.get(each, 1) for each in segments)
        if len(names) > len(segments):
            assert set(counts.values()) <= {0, 1}
            assert sum(counts.values()) == min(len(names), room)
            full = [s for s in segments if len(plan[s]) == places.get(s, 1)]
            sizes = [len(plan[s]) for s in segments if s not in full]
            assert max(sizes, default=0) - min(sizes, default=0) <= 1
        elif names:
            assert max(counts.values()) - min(counts.values()) <= 1


@given(SEGMENTS.filter(bool), NAMES, st.sampled_from("abcdefghij"), PLACES)
def test_no_consumer_changes_its_segment_when_another_one_joins_or_leaves(
    segments: list[int], names: set[str], other: str, places: dict[int, int]
) -> None:
    small, large = names - {other}, names | {other}
    if len(small) <= len(segments):
        return
    before = planned({}, segments, small, places)
    after = planned(before, segments, large, places)
    assert all(before[s] <= after[s] for s in segments), "it takes nobody's place"
    left = planned(after, segments, small, places)
    moved = [n for s in segments for n in left[s] - after[s]]
    waited = large - {name for owners in after.values() for name in owners}
    # At most one goes to the segment that lost its consumer, or one that waited takes its place.
    assert len(moved) <= 1
    if waited - {other}:
        assert set(moved) <= waited


@given(st.lists(st.tuples(SEGMENTS, NAMES, PLACES, st.integers(0, 6)), max_size=12))
def test_exclusive_consumers_and_sharers_never_meet(
    steps: list[tuple[list[int], set[str], dict[int, int], int]],
) -> None:
    holdings = Holdings()
    attached: dict[int, dict[str, bool]] = {}
    for segments, names, places, releases in steps:
        holdings = rebalance(holdings, segments, names, places)
        assert rebalance(holdings, segments, names, places) == holdings
        for segment_id, owners in holdings.granted.items():
            shared = segment_id in holdings.shared
            assert shared or len(owners) == 1
            at = attached.setdefault(segment_id, {})
            at.update(dict.fromkeys(owners, shared))
            assert len(set(at.values())) == 1, "all are attached in one mode"
            assert shared or len(at) == 1, "an exclusive consumer is alone"
            assert not owners & holdings.former(segment_id)
        off = sorted((s, n) for s, former in holdings.releasing.items() for n in former)
        for segment_id, name in off[:releases]:
            holdings = release(holdings, segment_id, name)
            del attached[segment_id][name]
    if steps:
        segments, names, places, _ = steps[-1]
        holdings = settle(holdings, segments, names, places)
        assert holdings.granted == holdings.plan
        assert {s for s, owners in holdings.plan.items() if len(owners) > 1} == holdings.shared


def test_a_segment_is_shared_when_its_exclusive_consumer_has_detached() -> None:
    places = {0: 4}
    alone = rebalance(Holdings(), [0], "a", places)
    joined = rebalance(alone, [0], "ab", places)
    assert joined.granted == {}
    assert joined.releasing == shares("0:a")
    both = rebalance(release(joined, 0, "a"), [0], "ab", places)
    assert both.granted == shares("0:ab")
    assert both.shared == {0}
    three = rebalance(both, [0], "abc", places)
    assert three.granted == shares("0:abc"), "a sharer joins at once"
    two = rebalance(three, [0], "bc", places)
    assert (two.granted, two.releasing) == (shares("0:bc"), shares("0:a")), "and leaves at once"
    one = rebalance(two, [0], "c", places)
    assert (one.granted, one.releasing) == ({}, shares("0:abc"))
    for name in "ab":
        one = rebalance(release(one, 0, name), [0], "c", places)
        assert one.granted == {}
    assert rebalance(release(one, 0, "c"), [0], "c", places).granted == shares("0:c")


# Groups


def layout_with_buckets(segments: int) -> Layout:
    """Segments with 4 entry buckets each, after one sealed parent each."""
    layout = initial(segments, now_ms=1)
    for segment_id in range(segments):
        layout = rebucket(layout, [segment_id], 4, now_ms=2).layout
    return layout


def sharing_group(*names: str, segments: int = 2) -> ConsumerGroup:
    layout = layout_with_buckets(segments)
    group = ConsumerGroup(layout, ordered=True)
    group.set_drained(set(range(segments)))
    group.set_shareable({segment.segment_id for segment in layout.active})
    for name in names:
        group.connect(name, can_share=True)
        group.give_up_waiting(group.awaited())
    return group


def test_a_group_shares_segments_when_all_clients_can() -> None:
    group = sharing_group("a", "b", "c")
    assert group.can_share
    assert group.holdings.granted == shares("2:ac 3:b")
    assert group.sessions["a"].shared == {2}
    changed = group.connect("m1", can_share=False)
    assert changed["m1"] == frozenset()
    assert not group.can_share
    group.give_up_waiting(group.awaited())
    assert not group.holdings.shared
    assert all(len(owners) == 1 for owners in group.holdings.granted.values())
    group.leave("m1")
    group.give_up_waiting(group.awaited())
    assert group.holdings.shared


def test_a_segment_with_unstamped_batches_is_not_shared() -> None:
    group = sharing_group("a", "b", "c", "d")
    for each in (2, 3):
        for name in group.holdings.owners(each):
            group.attached(each, name)
    group.set_shareable(group.shareable - {2})
    assert group.holdings.owners(2) == frozenset()
    for name in group.holdings.former(2):
        group.detached(2, name, by_command=True)
    assert len(group.holdings.owners(2)) == 1
    assert group.holdings.shared == {3}
    assert len(group.holdings.owners(3)) == 3


def test_checkpoint_consumers_never_share() -> None:
    layout = rebucket(initial(1, now_ms=1), [0], 4, now_ms=2).layout
    group = ConsumerGroup(layout, ordered=False)
    group.shareable = set(layout.segments)
    for name in "abc":
        group.connect(name, can_share=True)
    assert not group.holdings.shared
    assert not group.can_share


def test_an_assignment_in_another_mode_is_sent_though_its_segments_are_the_same() -> None:
    group = sharing_group("a", "b", segments=1)
    assert group.holdings.granted == shares("1:ab")
    group.disconnect("a")
    group.disconnect("b")
    changed = group.leave("a")
    assert changed == {"b": {1}}
    assert group.sessions["b"].shared == frozenset()


def test_a_restart_leaves_shared_segments_shared() -> None:
    group = sharing_group("e", "d", "c", "b", "a")
    had = group.holdings
    assert {len(owners) for owners in had.granted.values()} == {2, 3}
    after = restored(group, *"abcde", layout=layout_with_buckets(2))
    after.set_drained({0, 1})
    after.deal()
    assert after.holdings == had
    for name in "abcde":
        assert after.connect(name, can_share=True)[name] == had.of(name)
    assert after.holdings == had


def test_a_restart_in_the_middle_of_a_change_of_mode_goes_on_with_it() -> None:
    group = sharing_group("a", "b")
    for segment_id, name in ((2, "a"), (3, "b")):
        group.attached(segment_id, name)
    group.connect("c", can_share=True)
    (flipping,) = group.holdings.releasing
    after = restored(group, "a", "b", "c", layout=layout_with_buckets(2))
    after.set_drained({0, 1})
    after.deal()
    assert after.holdings == group.holdings
    for name in "cab":
        after.connect(name, can_share=True)
    assert after.holdings.granted == group.holdings.plan
    assert after.holdings.shared == {flipping}


class Told(frozenset[int]):
    """The segments of an assignment, and those of them that are shared."""

    shared: frozenset[int] = frozenset()


class SharingClients(HonestClients):
    """As `HonestClients`, with segments that several consumers may share."""

    @initialize(segments=st.integers(1, 3))
    def begin(self, segments: int) -> None:
        super().begin(segments)
        self.modes: dict[tuple[int, str], bool] = {}
        self.never_shared: set[int] = set()
        self.m1_clients: set[str] = set()
        for segment_id in range(segments):
            self.layout = rebucket(self.layout, [segment_id], 6, now_ms=2).layout
        self.group.set_layout(self.layout)
        self.segments_load()

    def segments_load(self) -> None:
        self.deliver(self.group.set_shareable(self.layout.segments.keys() - self.never_shared))

    def deliver(self, assignments: Mapping[str, frozenset[int]]) -> None:
        for name, own in assignments.items():
            if self.clients[name].connected:
                told = Told(own)
                told.shared = self.group.holdings.shared & own
                assert not told.shared or name not in self.m1_clients
                self.clients[name].inbox.append(told)

    @rule(name=st.sampled_from("efgh"))
    def join_too(self, name: str) -> None:
        self.join(name)

    @rule(name=st.sampled_from("ab"))
    def join_as_m1(self, name: str) -> None:
        client = self.clients.get(name)
        if client is None or not client.connected:
            self.m1_clients.add(name)
            self.join(name)

    def connect(self, name: str) -> Mapping[str, frozenset[int]]:
        return self.group.connect(name, can_share=name not in self.m1_clients)

    def obey(self, client: Client) -> None:
        told = client.inbox.popleft()
        assert isinstance(told, Told)
        for segment_id in sorted(client.on - told):
            self.detach(client, segment_id, by_command=True)
        for segment_id in told:
            shared = segment_id in told.shared
            if segment_id in client.on:
                assert self.modes[segment_id, client.name] == shared, "it never changes at once"
                continue
            for other in self.clients.values():
                if segment_id in other.on:
                    assert shared, f"{client.name} would meet {other.name} on {segment_id}"
                    assert self.modes[segment_id, other.name]
            client.on.add(segment_id)
            self.modes[segment_id, client.name] = shared
            self.group.attached(segment_id, client.name)

    @rule(data=st.data())
    def find_unstamped_batch(self, data: st.DataObject) -> None:
        self.never_shared.add(data.draw(st.sampled_from(sorted(self.layout.segments))))
        self.segments_load()

    @rule(data=st.data())
    def split_one(self, data: st.DataObject) -> None:
        super().split_one(data)
        self.segments_load()

    @rule(data=st.data())
    def restart_the_broker(self, data: st.DataObject) -> None:
        super().restart_the_broker(data)
        self.segments_load()

    @invariant()
    def no_segment_has_two_owners(self) -> None:
        sessions = self.group.sessions.values()
        alone = [s for session in sessions for s in session.assigned - session.shared]
        shared = {s for session in sessions for s in session.shared}
        assert len(alone) == len(set(alone))
        assert not shared & set(alone)
        assert not shared & self.never_shared

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "clients"):
            assert self.group.holdings.granted == self.group.holdings.plan
            if self.group.can_share:
                idle = [c for c in self.clients.values() if c.connected and not c.on]
                for segment_id, owners in self.group.holdings.plan.items():
                    places = self.layout.segments[segment_id].entry_buckets
                    shareable = segment_id not in self.never_shared
                    assert not idle or len(owners) == (places if shareable else 1)


TestSharingClients = SharingClients.TestCase
TestSharingClients.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# Clients


@pytest.mark.parametrize(
    ("version", "can"),
    [
        ("Pulsar-Java-v5.0.0-M1", False),
        ("Pulsar-Java-v5.0.0-M1-worker", False),
        ("Pulsar-Java-v5.0.0-M2", True),
        ("Pulsar-Java-v5.0.0-M10", True),
        ("Pulsar-Java-v5.0.0", True),
        ("Pulsar-Java-v5.1.2-worker", True),
        ("Pulsar-Java-v10.0.0", True),
        ("Pulsar-Java-v4.0.1", False),
        ("Pulsar-CPP-v5.0.0", False),
        ("Magnetar-Python-7.2.1-worker", True),
        ("Magnetar relay of Pulsar-Java-v5.0.0-M1", False),
        ("Magnetar relay of Pulsar-Java-v5.0.0", True),
        ("", False),
    ],
)
def test_clients_that_can_share_are_known_by_their_version(version: str, can: bool) -> None:
    assert can_share_segments(version) is can


def test_only_shared_segments_have_bucket_ranges() -> None:
    layout = rebucket(initial(1, now_ms=1), [0], 3, now_ms=2).layout
    name, all_segments = parse_topic_name("topic://public/default/t"), layout.segments.values()
    assignment = assignment_of(name, 2, all_segments, shared={1})
    ranges = [[(r.start, r.end) for r in s.bucket_ranges] for s in assignment.segments]
    assert ranges == [[], [(0, 21844), (21845, 43689), (43690, 65535)]]
