"""A consumer that comes or goes costs in proportion to its segments, not to their square."""

import pytest

from broker.scalable import assignment, group
from broker.scalable.assignment import assignable
from broker.scalable.group import ConsumerGroup
from broker.scalable.layout import Layout, initial, merge, split
from broker.topics.consumer import Consumer
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, Peer

SEGMENTS = 60
FEW = 6


class Deals:
    """Counts how often segments are dealt out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        patch.setattr(group, "rebalance", self._rebalance)

    def _rebalance(self, *arguments: object) -> assignment.Holdings:
        self.count += 1
        return assignment.rebalance(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def deals(monkeypatch: pytest.MonkeyPatch) -> Deals:
    return Deals(monkeypatch)


async def attach_all(peer: Peer, name: str) -> list[Consumer]:
    return [await peer.attach(each, name) for each in range(SEGMENTS)]


async def test_consumer_that_attaches_everywhere_causes_few_deals(node: Node, deals: Deals) -> None:
    await node.scalable.create(TOPIC, segments=SEGMENTS, properties={})
    peer = node.peer()
    await peer.register("a")
    deals.count = 0
    await attach_all(peer, "a")
    assert deals.count <= FEW
    assert not node.group().group.missing_from("a")


async def test_lost_connection_causes_few_deals(node: Node, deals: Deals) -> None:
    await node.scalable.create(TOPIC, segments=SEGMENTS, properties={})
    peer = node.peer()
    await peer.register("a")
    await attach_all(peer, "a")
    deals.count = 0
    peer.close()
    loaded = node.topics.loaded().values()
    await until(lambda: not any(each.subscriptions["s"].consumers for each in loaded))
    assert deals.count <= FEW


async def test_segments_released_together_are_granted_together(node: Node, deals: Deals) -> None:
    await node.scalable.create(TOPIC, segments=SEGMENTS, properties={})
    first, second = node.peer(), node.peer()
    await first.register("a")
    consumers = await attach_all(first, "a")
    await second.register("b")
    members = node.group()
    taken = members.group.not_released_by("a")
    assert len(taken) == SEGMENTS // 2
    deals.count = 0
    for each in taken:
        consumers[each].close()
    await until(lambda: len(members.group.holdings.of("b")) == SEGMENTS // 2)
    assert deals.count <= FEW


def test_shareable_segment_is_no_reason_to_deal_while_each_consumer_has_one(deals: Deals) -> None:
    members = ConsumerGroup(initial(4, now_ms=1), ordered=True)
    for name in "abcd":
        members.connect(name, can_share=True)
    deals.count = 0
    assert members.set_shareable({0, 1}) == {}
    assert deals.count == 0
    members.connect("e", can_share=True)
    deals.count = 0
    members.set_shareable({0})
    assert deals.count > 0


class CountedCounts(dict[int, int]):
    """Counts lookups of the numbers of places."""

    lookups = 0

    def __getitem__(self, segment_id: int) -> int:
        CountedCounts.lookups += 1
        return super().__getitem__(segment_id)


def test_many_sharers_are_placed_without_going_through_all_segments_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments, names = range(100), [f"c{number:03}" for number in range(300)]
    monkeypatch.setattr(
        "broker.scalable.assignment._counts",
        lambda *_: CountedCounts(dict.fromkeys(segments, 3)),
    )
    plan = assignment.planned({}, segments, names, dict.fromkeys(segments, 4))
    assert CountedCounts.lookups <= len(segments) + 2 * len(names)
    assert [sorted(plan[each]) for each in (0, 99)] == [
        ["c000", "c100", "c200"],
        ["c099", "c199", "c299"],
    ]


class CountedSegments(dict[int, object]):
    """Counts lookups of segments by id."""

    lookups = 0

    def __getitem__(self, segment_id: int) -> object:
        self.lookups += 1
        return super().__getitem__(segment_id)


def test_segments_below_a_long_line_of_ancestors_are_found_in_one_pass() -> None:
    layout = initial(1, now_ms=1)
    for _ in range(100):
        layout = split(layout, layout.active[0].segment_id, now_ms=1).layout
        pair = [each.segment_id for each in layout.active]
        layout = merge(layout, pair, now_ms=1).layout
    counted = CountedSegments(layout.segments)
    line = Layout(layout.epoch, layout.next_segment_id, counted)  # type: ignore[arg-type]
    drained = {each.segment_id for each in layout.sealed}
    for some, found in ((drained, layout.active), (set[int](), (layout.segments[0],))):
        counted.lookups = 0
        assert assignable(line, some, ordered=True) == found
        assert counted.lookups <= len(layout.segments)
