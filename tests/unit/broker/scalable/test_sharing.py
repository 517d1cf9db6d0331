"""Shared segments on the wire: which clients get entry buckets, and what the policy learns."""

import pytest

from broker.scalable.relay_exchange import PassOn, RelayExchange
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, Peer, World
from tests.unit.broker.scalable.test_controller import segments

NEWER = "Pulsar-Java-v5.0.0"
HALVES = [(0, 32767), (32768, 65535)]


@pytest.fixture
async def topic(node: Node) -> Node:
    """Two segments with two entry buckets each."""
    await node.scalable.create(TOPIC, segments=2, properties={})
    return node


def buckets(assignment: pb.ScalableConsumerAssignment) -> dict[int, list[tuple[int, int]]]:
    return {
        segment.segment_id: [(each.start, each.end) for each in segment.bucket_ranges]
        for segment in assignment.segments
    }


def last_told(peer: Peer) -> dict[int, list[tuple[int, int]]]:
    """The segments of the last assignment, with their entry buckets."""
    updates = peer.taken(pb.BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE)
    return buckets(updates[-1].scalable_topic_assignment_update.assignment)


async def sharers(topic: Node, names: str, version: str = NEWER) -> dict[str, Peer]:
    """Consumers that joined one after the other, when it is known what they may share."""
    for segment_id in (0, 1):
        await topic.segment(segment_id)  # only of a loaded one it is known
    peers: dict[str, Peer] = {}
    for name in names:
        peer = peers[name] = Peer(topic, version)
        _, answer = await peer.register(name)
        segments(answer)
        await until(lambda: shareable(topic) == {0, 1})
        topic.give_up_waiting()
    return peers


def shareable(topic: Node) -> set[int]:
    return topic.group().group.shareable


async def test_consumers_of_a_shared_segment_get_all_of_its_buckets(topic: Node) -> None:
    peers = await sharers(topic, "abcd")
    told = {name: last_told(peer) for name, peer in peers.items()}
    assert told == {"a": {0: HALVES}, "b": {1: HALVES}, "c": {0: HALVES}, "d": {1: HALVES}}
    _, answer = await Peer(topic, NEWER).register("e")
    assert segments(answer) == [], "there are no more buckets"


async def test_a_client_that_cannot_share_ends_sharing(topic: Node) -> None:
    peers = await sharers(topic, "abcd")
    old = topic.peer()
    _, answer = await old.register("old")
    assert buckets(answer.assignment) == {}
    topic.give_up_waiting()
    for peer in peers.values():
        assert all(ranges == [] for ranges in last_told(peer).values())
    await topic.scalable.controllers.unsubscribe(old.as_connection(), 1)
    topic.give_up_waiting()
    assert last_told(peers["a"]) == {0: HALVES}


async def test_a_batch_without_entry_hashes_ends_sharing_of_its_segment(topic: Node) -> None:
    peers = await sharers(topic, "abcd")
    assert last_told(peers["c"]) == {0: HALVES}
    (await topic.segment(0)).note_unstamped_batch()
    topic.give_up_waiting()
    group = topic.group()
    assert len(group.group.holdings.owners(0)) == 1
    assert group.group.holdings.shared == {1}


async def test_a_group_can_share_while_all_its_clients_can(topic: Node) -> None:
    controllers = topic.scalable.controllers
    await sharers(topic, "ab")
    group = topic.group()
    assert group.group.can_share
    old = topic.peer()
    await old.register("old")
    assert not group.group.can_share
    await controllers.unsubscribe(old.as_connection(), 1)
    assert group.group.can_share


async def test_sharers_have_what_they_had_after_a_restart(world: World) -> None:
    node = await Node(world, scalable_consumer_grace_period_s=3600).start()
    await node.scalable.create(TOPIC, segments=2, properties={})
    await sharers(node, "dcba")
    group = node.group()
    had = group.group.holdings
    assert had.shared == {0, 1}
    assert await node.assignment() == group.group.to_store()
    node = await node.kill()
    for name in "abcd":
        _, answer = await Peer(node, NEWER).register(name)
        assert buckets(answer.assignment) == dict.fromkeys(had.of(name), HALVES)
    await node.stop()


def test_a_relay_passes_entry_buckets_on() -> None:
    request = pb.CommandScalableTopicSubscribe(request_id=1, consumer_id=2)
    exchange = RelayExchange(request, NEWER, 21, pb.FeatureFlags())
    assert exchange.begin().command.connect.client_version.endswith(NEWER)
    exchange.received(pb.BaseCommand(type=pb.BaseCommand.CONNECTED))
    assignment = pb.ScalableConsumerAssignment(layout_epoch=1)
    segment = assignment.segments.add(
        segment_id=0, hash_start=0, hash_end=65535, segment_topic="segment://p/d/t/0000-ffff-0"
    )
    segment.bucket_ranges.add(start=0, end=65535)
    answer = pb.BaseCommand(
        type=pb.BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
        scalable_topic_subscribe_response=pb.CommandScalableTopicSubscribeResponse(
            request_id=1, assignment=assignment
        ),
    )
    assert exchange.received(answer) == PassOn(answer, first=True)
