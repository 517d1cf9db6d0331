"""Consumer groups: hand-over, leaving, grace, and a model of honest clients in random order."""

import json
from collections import deque
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from broker.scalable.assignment import assignable
from broker.scalable.assignment_record import assignment_from_json
from broker.scalable.group import ConsumerGroup
from broker.scalable.layout import Layout, initial, split
from tests.unit.broker.scalable.holdings import alone


def group_of(segments: int, *names: str) -> ConsumerGroup:
    group = ConsumerGroup(initial(segments, now_ms=1), ordered=True)
    for name in names:
        group.connect(name)
    return group


def attach_all(group: ConsumerGroup) -> None:
    for segment_id, names in group.holdings.granted.items():
        for name in names:
            group.attached(segment_id, name)


def test_the_answer_to_a_registration_is_the_whole_set() -> None:
    group = group_of(3)
    assert group.connect("a") == {"a": {0, 1, 2}}
    assert group.connect("a") == {"a": {0, 1, 2}}, "the same again for the same name"


def test_a_newcomer_gets_a_segment_when_its_owner_has_closed_it() -> None:
    group = group_of(2, "a")
    attach_all(group)
    assert group.connect("b") == {"a": {0}, "b": set()}
    assert group.detached(1, "a", by_command=True) == {"b": {1}}
    assert not group.has_closed_down("a"), "it closed what was taken from it"


def test_a_taken_segment_is_not_given_back_before_it_is_closed() -> None:
    group = group_of(2, "a")
    attach_all(group)
    group.connect("b")
    assert group.leave("b") == {}
    assert group.detached(1, "a", by_command=True) == {"a": {0, 1}}
    assert not group.has_closed_down("a")


def test_an_owner_never_seen_on_a_segment_is_waited_for() -> None:
    group = group_of(2, "a")
    assert group.connect("b") == {"a": {0}, "b": set()}
    assert group.awaited() == {(1, "a")}
    group.attached(1, "a")
    assert group.awaited() == set(), "it was on its way; now its close will be heard"
    assert group.detached(1, "a", by_command=True) == {"b": {1}}


def test_waiting_for_an_owner_never_seen_has_an_end() -> None:
    group = group_of(2, "a")
    group.connect("b")
    assert group.give_up_waiting({(1, "a")}) == {"b": {1}}


def test_a_lost_owner_is_not_waited_for() -> None:
    group = group_of(2, "a")
    group.connect("b")
    assert group.disconnect("a") == {"b": {1}}
    assert group.holdings.of("a") == {0}, "in its grace period it keeps its share"


def test_an_owner_that_left_holds_a_segment_while_it_is_attached() -> None:
    group = group_of(1, "a")
    attach_all(group)
    assert group.connect("b") == {"b": set()}
    assert group.leave("a") == {}
    assert group.detached(0, "a", by_command=False) == {"b": {0}}


def test_closing_all_own_segments_is_leaving() -> None:
    group = group_of(4, "a", "b")
    group.give_up_waiting(group.awaited())
    attach_all(group)
    group.detached(0, "a", by_command=True)
    assert not group.has_closed_down("a")
    group.detached(2, "a", by_command=True)
    assert group.has_closed_down("a")
    assert group.leave("a") == {"b": {0, 1, 2, 3}}


def test_losing_segment_consumers_is_not_leaving() -> None:
    group = group_of(2, "a")
    attach_all(group)
    group.detached(0, "a", by_command=False)
    group.detached(1, "a", by_command=False)
    assert not group.has_closed_down("a")
    group.attached(0, "a")
    group.attached(1, "a")
    group.detached(0, "a", by_command=True)
    group.attached(0, "a")
    group.detached(1, "a", by_command=False)
    assert not group.has_closed_down("a")


def test_nothing_assigned_is_not_leaving() -> None:
    group = group_of(1, "a", "b")
    assert group.holdings.of("b") == set()
    assert not group.has_closed_down("b")


def test_the_same_name_takes_over_with_the_same_segments() -> None:
    group = group_of(4, "a", "b")
    group.give_up_waiting(group.awaited())
    attach_all(group)
    group.disconnect("a")
    assert group.connect("a") == {"a": {0, 2}}


def test_restored_consumers_keep_the_segments_where_they_are_attached() -> None:
    group = ConsumerGroup(initial(4, now_ms=1), ordered=True)
    group.restore(["a", "b"], None)
    for segment_id, name in ((0, "b"), (1, "b"), (2, "a")):
        group.attached(segment_id, name)
    group.deal()
    assert group.holdings.of("b") == {0, 1}
    assert group.holdings.of("a") == {2, 3}


def restored(
    before: ConsumerGroup, *names: str, segments: int = 4, layout: Layout | None = None
) -> ConsumerGroup:
    """The group of the next controller, of what was stored of the one before."""
    record = json.loads(json.dumps(before.to_store().to_json()))
    group = ConsumerGroup(layout or initial(segments, now_ms=1), ordered=True)
    group.restore(names, assignment_from_json(record))
    return group


def test_a_restart_leaves_each_consumer_what_it_had() -> None:
    before = group_of(4, "a", "b")
    before.give_up_waiting(before.awaited())
    attach_all(before)
    before.leave("a")
    for segment_id in (0, 2):
        before.detached(segment_id, "a", by_command=True)
    attach_all(before)
    before.connect("0")
    for segment_id in before.holdings.releasing:
        before.detached(segment_id, "b", by_command=True)
    had = alone(before.holdings.granted)
    assert had != alone(group_of(4, "0", "b").holdings.granted), "names alone would share otherwise"
    after = restored(before, "0", "b")
    after.deal()
    assert after.holdings == before.holdings
    assert after.connect("b") == {"b": before.holdings.of("b")}
    assert after.connect("0") == {"0": before.holdings.of("0")}
    assert alone(after.holdings.granted) == had


def test_a_segment_on_its_way_is_waited_for_after_a_restart() -> None:
    before = group_of(2, "a")
    attach_all(before)
    before.connect("b")
    after = restored(before, "a", "b", segments=2)
    assert after.deal() == {"a": {0}}
    assert after.awaited() == {(1, "a")}, "a may be attached there again before it registers"
    assert after.connect("b") == {"b": set()}
    assert after.connect("a") == {"a": {0}, "b": {1}}, "it knows now that it has to release it"


def test_a_consumer_that_releases_a_segment_after_a_restart_is_seen() -> None:
    before = group_of(2, "a")
    attach_all(before)
    before.connect("b")
    after = restored(before, "a", "b", segments=2)
    after.attached(1, "a")
    after.deal()
    assert after.awaited() == set()
    after.connect("b")
    assert after.connect("a") == {"a": {0}}
    assert after.detached(1, "a", by_command=True) == {"b": {1}}


def test_waiting_for_a_former_consumer_after_a_restart_has_an_end() -> None:
    for end in ("give up", "evict"):
        before = group_of(2, "a")
        before.attached(1, "a")
        before.connect("b")
        after = restored(before, "a", "b", segments=2)
        after.deal()
        after.connect("b")
        changed = after.give_up_waiting({(1, "a")}) if end == "give up" else after.leave("a")
        assert changed["b"] >= {1}


def test_an_attached_consumer_is_believed_more_than_the_record() -> None:
    before = group_of(2, "a", "b")
    before.give_up_waiting(before.awaited())
    after = restored(before, "a", "b", segments=2)
    after.attached(0, "b")
    after.attached(1, "a")
    after.deal()
    assert alone(after.holdings.granted) == {0: "b", 1: "a"}
    late = restored(before, "a", "b", segments=2)
    late.deal()
    late.connect("a")
    late.attached(0, "b")
    assert alone(late.holdings.granted) == {0: "a", 1: "b"}, "a knows that it has segment 0"


def test_a_restart_after_the_layout_changed_assigns_the_children() -> None:
    before = group_of(2, "a", "b")
    before.give_up_waiting(before.awaited())
    attach_all(before)
    after = ConsumerGroup(split(initial(2, now_ms=1), 0, now_ms=2).layout, ordered=True)
    after.restore(["a", "b"], before.to_store())
    after.set_drained({0})
    after.deal()
    assert after.holdings.of("b") >= {1}
    assert after.holdings.granted.keys() == {1, 2, 3}
    assert not after.holdings.releasing


def test_consumers_that_are_not_registered_are_not_restored() -> None:
    before = group_of(2, "a", "b")
    before.give_up_waiting(before.awaited())
    after = restored(before, "b", segments=2)
    after.deal()
    assert alone(after.holdings.granted) == {0: "b", 1: "b"}


def test_a_strangers_segment_is_given_when_it_is_gone() -> None:
    group = ConsumerGroup(initial(1, now_ms=1), ordered=True)
    group.attached(0, "someone")
    assert group.connect("a") == {"a": set()}
    assert group.detached(0, "someone", by_command=False) == {"a": {0}}


def test_children_follow_their_drained_parent_at_once() -> None:
    layout = initial(1, now_ms=1)
    group = ConsumerGroup(layout, ordered=True)
    group.connect("a")
    attach_all(group)
    assert group.set_layout(split(layout, 0, now_ms=2).layout) == {}
    assert group.set_drained({0}) == {"a": {1, 2}}
    group.detached(0, "a", by_command=True)
    assert not group.has_closed_down("a")
    assert group.set_drained(set()) == {"a": {0}}, "after a seek the parent comes first again"


def test_a_consumer_that_takes_nothing_up_is_idle() -> None:
    group = group_of(2, "a", "b")
    group.give_up_waiting(group.awaited())
    group.attached(0, "a")
    assert not group.is_idle("a")
    assert group.is_idle("b")


def test_closing_a_sealed_segment_may_mean_that_it_was_read_to_its_end() -> None:
    layout = initial(2, now_ms=1)
    group = ConsumerGroup(layout, ordered=True)
    group.connect("a")
    attach_all(group)
    group.set_layout(split(layout, 0, now_ms=2).layout)
    group.detached(0, "a", by_command=True)
    assert not group.has_closed_down("a")
    assert not group.is_idle("a"), "it still reads the other one"
    group.set_drained({0})
    group.attached(2, "a")
    group.attached(3, "a")
    for segment_id in (1, 2, 3):
        group.detached(segment_id, "a", by_command=True)
    assert group.has_closed_down("a")


def test_a_consumer_that_closed_its_only_sealed_segment_is_idle() -> None:
    layout = initial(1, now_ms=1)
    group = ConsumerGroup(layout, ordered=True)
    group.connect("a")
    attach_all(group)
    group.set_layout(split(layout, 0, now_ms=2).layout)
    group.detached(0, "a", by_command=True)
    assert not group.has_closed_down("a")
    assert group.is_idle("a")


def test_a_checkpoint_reader_done_with_a_sealed_segment_is_not_idle() -> None:
    layout = initial(1, now_ms=1)
    group = ConsumerGroup(layout, ordered=False)
    group.connect("a")
    attach_all(group)
    group.set_layout(split(layout, 0, now_ms=2).layout)
    group.detached(0, "a", by_command=True)
    assert not group.has_closed_down("a")
    assert not group.is_idle("a")


def test_a_segment_granted_where_its_consumer_is_attached_is_not_missing() -> None:
    group = group_of(1, "a")
    group.attached(0, "a")
    group.connect("b")
    group.attached(0, "b")  # Both: the segment's owner let it in after a's connection was lost.
    group.detached(0, "a", by_command=False)
    assert group.leave("a") == {"b": {0}}
    group.disconnect("b")
    group.connect("b")
    assert group.missing_from("b") == set()


def test_a_segment_is_missing_until_its_consumer_attaches_or_closes_it() -> None:
    group = group_of(2, "a")
    assert group.missing_from("a") == {0, 1}
    attach_all(group)
    assert group.missing_from("a") == set()
    group.lost_sight_needs_deal(0, "a")
    assert group.missing_from("a") == {0}
    group.attached(0, "a")
    group.detached(1, "a", by_command=True)
    assert group.missing_from("a") == set(), "it is closing down"
    group.disconnect("a")
    group.lost_sight_needs_deal(0, "a")
    assert group.missing_from("a") == set(), "nothing can be sent to it"
    group.connect("a")
    assert group.missing_from("a") == {0, 1}


def test_a_consumer_not_released_by_what_was_taken_from_it_until_it_detaches() -> None:
    group = group_of(2, "a")
    attach_all(group)
    assert group.not_released_by("a") == set()
    group.connect("b")
    assert group.not_released_by("a") == {1}
    group.detached(1, "a", by_command=True)
    assert group.not_released_by("a") == set()
    assert group.missing_from("b") == {1}


@given(st.integers(1, 8), st.integers(1, 5))
def test_shares_are_even_for_any_number_of_consumers(segments: int, consumers: int) -> None:
    group = group_of(segments, *(f"c{n}" for n in range(consumers)))
    while group.awaited():
        group.give_up_waiting(group.awaited())
    shares = [len(group.holdings.of(f"c{n}")) for n in range(consumers)]
    assert sum(shares) == segments
    assert max(shares) - min(shares) <= 1


class Client:
    """A stream consumer as the official client is: obeys its assignments in order, some time later.

    It may miss some.  What it differs in from its assignment is told again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inbox: deque[frozenset[int]] = deque()
        self.on: set[int] = set()
        self.connected = False


class HonestClients(RuleBasedStateMachine):
    """Exclusive segment consumers never meet, and when all is quiet everything is read."""

    @initialize(segments=st.integers(1, 4))
    def begin(self, segments: int) -> None:
        self.layout = initial(segments, now_ms=1)
        self.group = ConsumerGroup(self.layout, ordered=True)
        self.clients: dict[str, Client] = {}
        self.drained: set[int] = set()

    def deliver(self, assignments: Mapping[str, frozenset[int]]) -> None:
        for name, own in assignments.items():
            if self.clients[name].connected:
                self.clients[name].inbox.append(own)

    @rule(name=st.sampled_from("abcd"))
    def join(self, name: str) -> None:
        client = self.clients.setdefault(name, Client(name))
        if not client.connected:
            client.connected = True
            self.deliver(self.connect(name))

    def connect(self, name: str) -> Mapping[str, frozenset[int]]:
        return self.group.connect(name)

    def obey(self, client: Client) -> None:
        own = client.inbox.popleft()
        for segment_id in sorted(client.on - own):
            self.detach(client, segment_id, by_command=True)
        for segment_id in sorted(own - client.on):
            others = [c.name for c in self.clients.values() if segment_id in c.on]
            assert not others, f"{client.name} would meet {others} on {segment_id}"
            client.on.add(segment_id)
            self.group.attached(segment_id, client.name)

    def detach(self, client: Client, segment_id: int, *, by_command: bool) -> None:
        client.on.remove(segment_id)
        self.deliver(self.group.detached(segment_id, client.name, by_command=by_command))
        if self.group.has_closed_down(client.name):
            assert not client.connected or not client.on, "it was taken for gone and is not"
            self.deliver(self.group.leave(client.name))

    @precondition(lambda self: any(c.inbox for c in self.clients.values() if c.connected))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        names = sorted(n for n, c in self.clients.items() if c.connected and c.inbox)
        self.obey(self.clients[data.draw(st.sampled_from(names))])

    @precondition(lambda self: any(c.inbox for c in self.clients.values()))
    @rule(data=st.data())
    def miss(self, data: st.DataObject) -> None:
        names = sorted(n for n, c in self.clients.items() if c.inbox)
        self.clients[data.draw(st.sampled_from(names))].inbox.popleft()

    @precondition(lambda self: any(c.connected for c in self.clients.values()))
    @rule(data=st.data(), segments_too=st.booleans())
    def lose_connection(self, data: st.DataObject, segments_too: bool) -> None:
        names = sorted(n for n, c in self.clients.items() if c.connected)
        client = self.clients[data.draw(st.sampled_from(names))]
        client.connected = False
        client.inbox.clear()
        if segments_too:
            self.lose_segments(client)
        self.deliver(self.group.disconnect(client.name))

    def lose_segments(self, client: Client) -> None:
        for segment_id in sorted(client.on):
            self.detach(client, segment_id, by_command=False)

    @precondition(lambda self: any(not c.connected for c in self.clients.values()))
    @rule(data=st.data())
    def grace_is_over(self, data: st.DataObject) -> None:
        names = sorted(n for n, c in self.clients.items() if not c.connected)
        name = data.draw(st.sampled_from(names))
        self.deliver(self.group.leave(name))

    @rule(data=st.data())
    def split_one(self, data: st.DataObject) -> None:
        if len(self.layout.segments) < 9:
            ids = [s.segment_id for s in self.layout.active]
            self.layout = split(self.layout, data.draw(st.sampled_from(ids)), now_ms=2).layout
            self.deliver(self.group.set_layout(self.layout))

    @rule(data=st.data())
    def drain_one(self, data: st.DataObject) -> None:
        ids = [s.segment_id for s in self.layout.sealed if s.segment_id not in self.drained]
        if ids:
            self.drained.add(data.draw(st.sampled_from(ids)))
            self.deliver(self.group.set_drained(self.drained))

    @rule()
    def rewind(self) -> None:
        self.drained.clear()
        self.deliver(self.group.set_drained(self.drained))

    @precondition(lambda self: bool(self.clients))
    @rule(data=st.data())
    def restart_the_broker(self, data: st.DataObject) -> None:
        """All connections are lost; some segment consumers are back before their clients are."""
        had = {name: session.assigned for name, session in self.group.sessions.items()}
        stored, names = self.group.to_store(), self.group.registered()
        self.group = ConsumerGroup(self.layout, ordered=True)
        self.group.restore(names, stored)
        self.group.drained = set(self.drained)
        for client in self.clients.values():
            client.connected = False
            client.inbox.clear()
            if not data.draw(st.booleans()):
                client.on.clear()
            for segment_id in sorted(client.on):
                self.group.attached(segment_id, client.name)
        self.group.deal()
        for name in names:
            assert self.group.sessions[name].assigned >= had[name], "it has what it had"

    @invariant()
    def no_segment_has_two_owners(self) -> None:
        told = [s for session in self.group.sessions.values() for s in session.assigned]
        assert len(told) == len(set(told))

    @rule()
    def tell_again(self) -> None:
        for name in self.clients:
            if self.group.missing_from(name) or self.group.not_released_by(name):
                self.deliver({name: self.group.holdings.of(name)})

    def hear_everything(self, clients: list[Client]) -> None:
        for _ in range(100):
            while waiting := [client for client in clients if client.inbox]:
                self.obey(waiting[0])
            self.tell_again()
            # Whoever was on his way to a segment is there now.
            self.deliver(self.group.give_up_waiting(self.group.awaited()))
            if not any(client.inbox for client in clients):
                return
        raise AssertionError(f"it never settles: {self.group.holdings}")

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        self.hear_everything([c for c in self.clients.values() if c.connected])
        alive = [c for c in self.clients.values() if c.connected]
        for client in self.clients.values():
            if not client.connected:
                self.lose_segments(client)
                self.deliver(self.group.leave(client.name))
                self.hear_everything(alive)
        ordered = assignable(self.layout, self.drained, ordered=True)
        expected = {segment.segment_id for segment in ordered if alive}
        assert {segment_id for client in alive for segment_id in client.on} == expected


TestHonestClients = HonestClients.TestCase
TestHonestClients.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
