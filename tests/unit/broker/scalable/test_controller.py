"""Ordered consumers: registrations, hand-over, leaving, grace, restarts, parents first."""

import asyncio
import gc

import pytest

from broker.placement.peer_failed import PeerFailed
from broker.scalable.records import SubscriptionKind
from broker.scalable.segment_requests import SeekSubscription, SegmentRequest, ViewSegment
from broker.topics.consumer import Consumer
from broker.topics.topic import TopicState
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import SegmentName, parse_topic_name
from storage.ledger.store import LedgerFenced
from tests.support.bounds import set_bound
from tests.support.waiting import until, until_awaited
from tests.unit.broker.scalable.node import TOPIC, Node, Peer, World


@pytest.fixture
async def topic(node: Node) -> Node:
    await node.scalable.create(TOPIC, segments=4, properties={})
    return node


def segments(answer: pb.CommandScalableTopicSubscribeResponse) -> list[int]:
    assert not answer.HasField("error"), answer.message
    return [segment.segment_id for segment in answer.assignment.segments]


async def registered(node: Node, subscription: str = "s") -> list[str]:
    return await node.scalable._store.consumers(TOPIC, subscription)


async def peer_with_all_segments(topic: Node, name: str) -> tuple[Peer, list[Consumer]]:
    """A consumer that is attached to the four segments, and its segment consumers."""
    peer = topic.peer()
    await peer.register(name)
    return peer, [await peer.attach(n, name) for n in range(4)]


async def until_registered(node: Node, *names: str) -> None:
    controller = node.scalable.controllers.of(TOPIC)
    assert controller is not None
    await until(lambda: not controller._tasks.busy)
    assert await registered(node) == list(names)


async def until_told(
    peer: Peer,
    expected: list[int],
    answer: pb.CommandScalableTopicSubscribeResponse | None = None,
) -> None:
    """Return when the last assignment that a peer was sent, after its answer, is this one."""
    told = [[] if answer is None else segments(answer)]

    def is_told() -> bool:
        told.extend(ids for _, ids in peer.assignments())
        return told[-1] == expected

    await until(is_told)


async def test_the_first_consumer_gets_everything(topic: Node) -> None:
    peer = topic.peer()
    _consumer_id, answer = await peer.register("a")
    assert segments(answer) == [0, 1, 2, 3]
    first = answer.assignment.segments[0]
    assert (first.hash_start, first.hash_end) == (0, 0x3FFF)
    assert first.segment_topic == "segment://public/default/t/0000-3fff-0"
    assert answer.assignment.layout_epoch == 0
    assert not first.bucket_ranges
    assert await registered(topic) == ["a"]
    assert await topic.kind_of("s") is SubscriptionKind.STREAM
    assert peer.assignments() == [], "the answer tells it all"


@pytest.mark.parametrize(
    "name", ["persistent://public/default/t", "t", "segment://public/default/t/0000-3fff-0"]
)
async def test_other_names_of_the_topic_do_as_well(topic: Node, name: str) -> None:
    _, answer = await topic.peer().register("a", topic=name)
    assert segments(answer) == [0, 1, 2, 3]


async def test_errors_come_in_the_response(topic: Node) -> None:
    for name, code in (
        ("topic://public/default/none", pb.TopicNotFound),
        ("persistent://public/default/none", pb.TopicNotFound),
        ("nonsense://x", pb.InvalidTopicName),
    ):
        _, answer = await topic.peer().register("a", topic=name)
        assert answer.error == code
        assert not answer.HasField("assignment")
        if code == pb.TopicNotFound:
            assert "migrate the ordinary topic of that name" in answer.message


async def test_segments_are_handed_over_when_they_are_closed(topic: Node) -> None:
    first, second = topic.peer(), topic.peer()
    first_id, _ = await first.register("a")
    consumers = [await first.attach(n, "a") for n in range(4)]
    second_id, answer = await second.register("b")
    assert segments(answer) == [], "nothing is free yet"
    assert first.assignments() == [(first_id, [0, 2])]
    consumers[1].close()
    consumers[3].close()
    assert second.assignments() == [(second_id, [1])]
    await until_told(second, [1, 3])
    for n in (1, 3):
        await second.attach(n, "b")
    assert await registered(topic) == ["a", "b"]


async def test_a_connection_that_only_its_client_knows_to_be_lost_holds_no_segment_back(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "LETTING_GO_CHECK_S", 0)
    lost, second = topic.peer(), topic.peer()
    await lost.register("a")
    for n in (1, 3):
        await lost.attach(n, "a")
    back = topic.peer()
    await back.register("a")
    for n in (0, 2):
        await back.attach(n, "a")
    _, answer = await second.register("b")
    assert segments(answer) == [], "its client closes nothing of what it lost"
    lost.silent = True
    await until_told(second, [1, 3], answer)
    assert lost.closing
    assert not back.closing
    assert await registered(topic) == ["a", "b"]


async def test_closing_all_segments_is_leaving(topic: Node) -> None:
    first, second = topic.peer(), topic.peer()
    await first.register("a")
    consumers = [await first.attach(n, "a") for n in range(4)]
    second_id, _ = await second.register("b")
    for consumer in consumers[1], consumers[3]:
        consumer.close()
    second.assignments()
    for consumer in consumers[0], consumers[2]:
        consumer.close()
    assert second.assignments()[-1] == (second_id, [0, 1, 2, 3])
    await until_registered(topic, "b")


async def test_a_consumer_taken_for_gone_is_taken_back(topic: Node) -> None:
    peer = topic.peer()
    consumer_id, _ = await peer.register("a")
    (await peer.attach(0, "a")).close()
    await until_registered(topic)
    await peer.attach(1, "a")
    await until_registered(topic, "a")
    assert peer.assignments()[-1] == (consumer_id, [0, 1, 2, 3])


async def test_ordered_consumers_of_one_connection_are_bounded(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have left do not count, though the official client says nothing here."""
    set_bound(monkeypatch, "SESSIONS_PER_CONNECTION", 2)
    peer = topic.peer()
    stays, _ = await peer.register("stays")
    for number in range(3):
        name = f"goes-{number}"
        goes, answer = await peer.register(name)
        assert segments(answer) == [], "nothing is free yet"
        topic.give_up_waiting()
        own = [ids for told, ids in peer.assignments() if told == goes][-1]
        (await peer.attach(own[0], name)).close()
    await peer.register("other")
    _, answer = await peer.register("one too many")
    assert answer.error == pb.TooManyRequests
    _, answer = await peer.register("stays", consumer_id=stays)
    assert not answer.HasField("error"), "it is one of them"
    await until_registered(topic, "other", "stays")


async def test_unsubscribe_leaves_at_once(topic: Node) -> None:
    first, second = topic.peer(), topic.peer()
    first_id, _ = await first.register("a")
    second_id, _ = await second.register("b")
    await topic.scalable.controllers.unsubscribe(first.as_connection(), first_id)
    assert await registered(topic) == ["b"]
    assert second.assignments()[-1] == (second_id, [0, 1, 2, 3])
    for unknown in (first_id, 999):
        await topic.scalable.controllers.unsubscribe(first.as_connection(), unknown)
    await topic.scalable.controllers.unsubscribe(topic.peer().as_connection(), second_id)
    assert await registered(topic) == ["b"], "another connection's consumers are its own"


async def test_unsubscribe_cancels_a_registration_in_flight(topic: Node) -> None:
    peer = topic.peer()
    registering = asyncio.ensure_future(peer.register("a", consumer_id=7))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await topic.scalable.controllers.unsubscribe(peer.as_connection(), 7)
    _, answer = await registering
    assert answer.error == pb.ConsumerNotFound
    assert await registered(topic) == []
    _, other = await topic.peer().register("b")
    assert segments(other) == [0, 1, 2, 3]


async def test_the_same_name_takes_over(world: World) -> None:
    node = await Node(world, scalable_consumer_grace_period_s=3600).start()
    await node.scalable.create(TOPIC, segments=2, properties={})
    old, new, other = node.peer(), node.peer(), node.peer()
    await old.register("a")
    _, answer = await new.register("a")
    assert segments(answer) == [0, 1]
    old.close()
    group = node.group()
    assert group.members["a"].connection is new.as_connection()
    assert not group._grace, "the old connection's end starts no grace period"
    for n in (0, 1):
        await new.attach(n, "a")
    _, answer = await other.register("b")
    assert segments(answer) == []
    assert [ids for _, ids in new.assignments()] == [[0]]
    await node.stop()


async def test_a_lost_consumer_keeps_its_share_for_the_grace_period(world: World) -> None:
    node = await Node(world, scalable_consumer_grace_period_s=3600).start()
    await node.scalable.create(TOPIC, segments=2, properties={})
    first, second = node.peer(), node.peer()
    await first.register("a")
    second_id, _ = await second.register("b")
    first.close()
    assert second.assignments() == [(second_id, [1])], "a is gone: its half need not be awaited"
    assert await registered(node) == ["a", "b"]
    _, answer = await node.peer().register("a")
    assert segments(answer) == [0]
    await node.stop()


async def test_after_the_grace_period_it_is_evicted(topic: Node) -> None:
    first, second = topic.peer(), topic.peer()
    await first.register("a")
    _second_id, _ = await second.register("b")
    first.close()
    await until_told(second, [0, 1, 2, 3])
    await until_registered(topic, "b")


async def test_the_grace_period_of_the_topic_counts_before_that_of_the_namespace(
    world: World,
) -> None:
    node = await Node(world, scalable_consumer_grace_period_s=3600).start()
    await node.scalable.create(TOPIC, segments=2, properties={})
    first, second, third = node.peer(), node.peer(), node.peer()
    await first.register("a")
    await second.register("b")
    member = {"scalableTopicConsumerSessionGracePeriodSeconds": 0}
    await node.namespaces.change(TOPIC.namespace_name, lambda record: record.update(member))
    await node.scalable.set_consumer_grace(TOPIC, 3600)
    first.close()
    await asyncio.sleep(0.05)
    assert await registered(node) == ["a", "b"]
    await node.scalable.set_consumer_grace(TOPIC, None)
    await third.register("a")
    third.close()
    group = node.group()
    await until(lambda: group.group.registered() == ["b"])
    await until_registered(node, "b")
    await node.stop()


async def test_a_restart_restores_the_registered(world: World) -> None:
    node = await Node(world, scalable_consumer_grace_period_s=3600).start()
    await node.scalable.create(TOPIC, segments=2, properties={})
    await node.peer().register("a")
    await node.peer().register("b")
    node = await node.kill()
    peer, other = node.peer(), node.peer()
    consumer = await peer.attach(1, "a")
    _, answer = await node.peer().register("c", "other")
    assert segments(answer) == [0, 1], "subscriptions have nothing to do with each other"
    other_id, answer = await other.register("b")
    assert segments(answer) == [], "a is disconnected, keeps its share, and reads segment 1"
    _, answer = await peer.register("a")
    assert segments(answer) == [0]
    consumer.close()
    assert other.assignments() == [(other_id, [1])]
    await node.stop()


async def test_a_layout_that_changes_while_a_controller_begins_is_assigned(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await Node(world, scalable_consumer_grace_period_s=3600).start()
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.peer().register("a")
    await node.scalable.split(TOPIC, 0)
    node = await node.kill()
    load = node.scalable._segments.load

    async def split_first(segment: SegmentName) -> None:
        monkeypatch.setattr(node.scalable._segments, "load", load)
        await node.scalable.split(TOPIC, 1)
        await load(segment)

    monkeypatch.setattr(node.scalable._segments, "load", split_first)
    peer = node.peer()
    _, answer = await peer.register("a")
    await until_told(peer, [3, 4, 2], answer)
    await node.stop()


async def test_a_layout_that_changes_while_a_subscription_is_reserved(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.fill(0, 1)
    await node.scalable.split(TOPIC, 0)
    live = await node.live()
    await until(lambda: not live.work.busy)
    ask = node.scalable._segments.ask

    async def split_first(request: SegmentRequest[object]) -> object:
        monkeypatch.setattr(node.scalable._segments, "ask", ask)
        await node.scalable.split(TOPIC, 1)
        return await ask(request)

    monkeypatch.setattr(node.scalable._segments, "ask", split_first)
    _, answer = await node.peer().register("a")
    assert segments(answer) == [0], "it is not drained"
    await until(lambda: not live.work.busy)
    for segment_id in (2, 3, 4):
        assert "s" in (await node.segment(segment_id)).subscriptions


async def test_a_restart_evicts_consumers_that_do_not_reconnect(world: World) -> None:
    node = await Node(world).start()
    await node.scalable.create(TOPIC, segments=2, properties={})
    await node.peer().register("a")
    await node.peer().register("b")
    node = await node.kill()
    peer = node.peer()
    _consumer_id, answer = await peer.register("b")
    await until_told(peer, [0, 1], answer)
    await until_registered(node, "b")
    await node.stop()


async def test_children_are_given_when_the_parent_is_drained(topic: Node) -> None:
    peer = topic.peer()
    consumer_id, _ = await peer.register("a")
    consumers = [await peer.attach(n, "a") for n in range(4)]
    await topic.fill(0, 3)
    await topic.scalable.split(TOPIC, 0)
    parent = await topic.segment(0)
    await until(lambda: parent.sealed)
    assert peer.assignments() == [], "the parent is not drained"
    await topic.drain(0)
    assert peer.assignments() == [(consumer_id, [4, 5, 1, 2, 3])]
    consumers[0].close()
    await until_registered(topic, "a")
    await parent.subscriptions["s"].seek(EARLIEST)
    assert peer.assignments() == [(consumer_id, [0, 1, 2, 3])], "after a seek it comes first again"


async def test_a_parent_loaded_with_a_backlog_comes_first_again(topic: Node) -> None:
    """Acknowledgements that were not durable are lost when the segment's ledger is given up."""
    peer = topic.peer()
    consumer_id, _ = await peer.register("a")
    for n in range(4):
        await peer.attach(n, "a")
    await topic.fill(0, 3)
    await topic.scalable.split(TOPIC, 0)
    parent = await topic.segment(0)
    await until(lambda: parent.sealed)
    await topic.drain(0)
    parent.ledger._core.fence(LedgerFenced("Somebody else opened it: stop."))
    assert peer.assignments() == [(consumer_id, [4, 5, 1, 2, 3])]
    await until(lambda: parent.state is TopicState.CLOSED)
    assert await topic.backlog(0) == 3
    assert peer.assignments() == [(consumer_id, [0, 1, 2, 3])]


async def test_an_empty_parent_delays_no_consumer(topic: Node) -> None:
    peer = topic.peer()
    _consumer_id, _ = await peer.register("a")
    await topic.scalable.split(TOPIC, 0)
    await until_told(peer, [4, 5, 1, 2, 3])


async def test_everything_above_must_be_drained(topic: Node) -> None:
    peer = topic.peer()
    consumer_id, _ = await peer.register("a")
    for n in range(4):
        await peer.attach(n, "a")
    await topic.fill(0, 1)
    await topic.scalable.split(TOPIC, 0)
    await topic.scalable.split(TOPIC, 4)
    live = await topic.scalable._topics.get(TOPIC)
    await until(lambda: not live.work.busy)
    assert peer.assignments() == []
    await topic.drain(0)
    assert peer.assignments()[-1] == (consumer_id, [6, 7, 5, 1, 2, 3])


async def test_a_checkpoint_group_gets_children_at_once(topic: Node) -> None:
    peer = topic.peer()
    consumer_id, answer = await peer.register("a", "g", kind=pb.CHECKPOINT)
    assert segments(answer) == [0, 1, 2, 3]
    for n in range(4):
        await peer.attach(n, "a", f"reader-{n}", durable=False)
    await topic.fill(0, 1)
    await topic.scalable.split(TOPIC, 0)
    assert peer.assignments() == [(consumer_id, [4, 0, 5, 1, 2, 3])]
    assert await topic.kind_of("g") is SubscriptionKind.CHECKPOINT


async def test_a_checkpoint_group_hands_over_and_ends_with_its_last_consumer(topic: Node) -> None:
    first, second = topic.peer(), topic.peer()
    await first.register("a", "g", kind=pb.CHECKPOINT)
    readers = [await first.attach(n, "a", f"reader-{n}", durable=False) for n in range(4)]
    second_id, answer = await second.register("b", "g", kind=pb.CHECKPOINT)
    assert segments(answer) == []
    readers[1].close()
    assert second.assignments() == [(second_id, [1])]
    second.close()
    for reader in readers[0], readers[2]:
        reader.close()
    controller = topic.scalable.controllers.of(TOPIC)
    assert controller is not None
    await until(lambda: not controller._tasks.busy and "g" not in controller.groups)
    assert await topic.kind_of("g") is None


async def test_a_subscription_serves_one_kind_of_consumer(topic: Node) -> None:
    await topic.peer().register("a")
    _, answer = await topic.peer().register("b", kind=pb.CHECKPOINT)
    assert answer.error == pb.NotAllowedError


async def test_late_stream_at_latest_misses_nothing_below_a_sealed_segment(topic: Node) -> None:
    await topic.fill(0, 2)
    await topic.scalable.split(TOPIC, 0)
    parent = await topic.segment(0)
    await until(lambda: parent.sealed)
    await topic.fill(4, 3)
    peer = topic.peer()
    consumer_id, answer = await peer.register("a")
    assert segments(answer) == [0, 1, 2, 3]
    await topic.fill(4, 5)
    await peer.attach(0, "a", start=LATEST)
    assert peer.assignments() == [(consumer_id, [4, 5, 1, 2, 3])]
    assert await topic.backlog(4) == 5, "what came after the registration, not what was before"


async def sealed_with_children(topic: Node) -> None:
    """Segment 0 is sealed with 2 messages, and its child 4 has 3."""
    await topic.fill(0, 2)
    await topic.scalable.split(TOPIC, 0)
    parent = await topic.segment(0)
    await until(lambda: parent.sealed)
    await topic.fill(4, 3)


async def until_at_earliest(topic: Node) -> None:
    """Return when a subscription has all messages of that child."""

    async def is_at_earliest() -> bool:
        return await topic.backlog(4) == 3

    await until_awaited(is_at_earliest)


async def test_late_stream_at_earliest_gets_everything_below_a_sealed_segment(topic: Node) -> None:
    await sealed_with_children(topic)
    peer = topic.peer()
    await peer.register("a")
    await peer.attach(0, "a", start=EARLIEST)
    await until_at_earliest(topic)
    assert await topic.backlog(0) == 2


@pytest.mark.parametrize("kind", [ViewSegment, SeekSubscription])
async def test_late_stream_at_earliest_gets_everything_though_an_owner_is_away(
    topic: Node, monkeypatch: pytest.MonkeyPatch, kind: type[SegmentRequest[object]]
) -> None:
    await sealed_with_children(topic)
    peer = topic.peer()
    await peer.register("a")
    ask, away = topic.scalable._segments.ask, 2

    async def fails(request: SegmentRequest[object]) -> object:
        nonlocal away
        if isinstance(request, kind) and away:
            away -= 1
            raise PeerFailed("the owner is away: try again.")
        return await ask(request)

    monkeypatch.setattr(topic.scalable._segments, "ask", fails)
    await peer.attach(0, "a", start=EARLIEST)
    await until_at_earliest(topic)
    assert not away


async def test_late_stream_at_earliest_gets_everything_over_a_restart(world: World) -> None:
    """It comes before the first consumer has shown where it begins."""
    topic = await Node(world, scalable_consumer_grace_period_s=60).start()
    await topic.scalable.create(TOPIC, segments=4, properties={})
    await sealed_with_children(topic)
    await topic.peer().register("a")
    topic = await topic.kill()
    peer = topic.peer()
    await peer.register("a")
    await peer.attach(0, "a", start=EARLIEST)
    await until_at_earliest(topic)
    await topic.stop()


async def test_a_start_that_nobody_shows_before_a_segment_is_pruned_is_awaited_no_more(
    topic: Node,
) -> None:
    await sealed_with_children(topic)
    peer = topic.peer()
    consumer_id, _ = await peer.register("a")
    await topic.scalable.controllers.unsubscribe(peer.as_connection(), consumer_id)
    controller = topic.scalable.controllers.of(TOPIC)
    assert controller is not None
    await until(lambda: not controller._tasks.busy)
    assert not controller.idle
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()
    await until(lambda: controller.idle)


async def test_a_segment_that_does_not_answer_hides_no_drained_one(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = topic.peer()
    await peer.register("a")
    load = topic.scalable._segments.load

    async def load_others(segment: SegmentName) -> None:
        if segment.segment_id == 0:
            raise PeerFailed("the test says no")
        await load(segment)

    monkeypatch.setattr(topic.scalable._segments, "load", load_others)
    for segment_id in (0, 1):
        await topic.scalable.split(TOPIC, segment_id)
    await until_told(peer, [0, 6, 7, 2, 3])


async def test_waiting_for_a_consumer_never_seen_has_an_end(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RELEASE_WAIT_S", 0)
    await topic.peer().register("a")
    second = topic.peer()
    _second_id, answer = await second.register("b")
    await until_told(second, [1, 3], answer)


async def test_consumer_that_attaches_no_segment_is_replaced(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RELEASE_WAIT_S", 0)
    set_bound(monkeypatch, "TAKE_UP_WAIT_S", 0)
    set_bound(monkeypatch, "FIRST_TAKE_UP_WAIT_S", 0)
    closed, alive = topic.peer(), topic.peer()
    await closed.register("a")
    _, answer = await alive.register("b")
    for n in (1, 3):
        await alive.attach(n, "b")
    await until_told(alive, [0, 1, 2, 3], answer)
    await until_registered(topic, "b")


async def test_an_assignment_with_a_new_segment_is_sent_again_if_missed(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ASSIGNMENT_REPEAT_S", 0.01)
    second = topic.peer()
    _, consumers = await peer_with_all_segments(topic, "a")
    await second.register("b")
    for n in (1, 3):
        consumers[n].close()
    second.assignments()  # It missed these.
    await until_told(second, [1, 3])
    await second.attach(1, "b")
    await until_told(second, [1, 3])
    other = topic.peer()
    await other.register("never attaches", subscription="other")
    await until(other.assignments)
    # The timer may come before the controller has checked all timers after an attachment.
    set_bound(monkeypatch, "RELEASE_COALESCE_S", 60)
    await second.attach(3, "b")
    second.assignments()
    for _ in range(3):
        await until(other.assignments)
    assert second.assignments() == [], "it has what it was told"


async def test_an_assignment_without_a_segment_is_sent_again_if_missed(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ASSIGNMENT_REPEAT_S", 0.01)
    second = topic.peer()
    first, consumers = await peer_with_all_segments(topic, "a")
    _, answer = await second.register("b")
    first.assignments()  # It missed that 1 and 3 are not its own any longer.
    await until_told(first, [0, 2])
    for n in (1, 3):
        consumers[n].close()
    await until_told(second, [1, 3], answer)


async def test_a_segment_whose_subscribe_failed_is_taken_out_and_given_anew(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ASSIGNMENT_REPEAT_S", 0.01)
    set_bound(monkeypatch, "TAKE_UP_WAIT_S", 0.05)
    peer = topic.peer()
    peer_id, _ = await peer.register("a")
    for n in range(3):
        await peer.attach(n, "a")
    told: list[tuple[int, list[int]]] = []

    def is_given_anew() -> bool:
        told.extend(peer.assignments())
        return told[-2:] == [(peer_id, [0, 1, 2]), (peer_id, [0, 1, 2, 3])]

    await until(is_given_anew)


async def test_a_consumer_that_never_attached_loses_its_segments_sooner(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "FIRST_TAKE_UP_WAIT_S", 0)
    closed = topic.peer()
    alive, consumers = await peer_with_all_segments(topic, "a")
    await closed.register("b")
    for n in (1, 3):
        consumers[n].close()
    await until_told(alive, [0, 1, 2, 3])
    await until_registered(topic, "a")


async def test_only_a_segment_that_was_missing_all_the_time_is_given_anew(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ASSIGNMENT_REPEAT_S", 0.01)
    set_bound(monkeypatch, "TAKE_UP_WAIT_S", 2)
    peer = topic.peer()
    peer_id, _ = await peer.register("a")
    for n in range(3):
        await peer.attach(n, "a")
    # Half of that: so much may a slow machine take for the rest, and the children are not missing
    # all the time.
    await asyncio.sleep(1)
    await topic.scalable.split(TOPIC, 0)  # Nobody wrote to it: its children are assigned now.
    told: list[tuple[int, list[int]]] = []

    def is_given_anew() -> bool:
        told.extend(each for each in peer.assignments() if 4 in each[1] or 5 in each[1])
        return any(3 not in ids for _, ids in told)

    await until(is_given_anew)
    assert (peer_id, [4, 5, 1, 2]) in told
    assert all({4, 5} <= set(ids) for _, ids in told), "its subscribe may be under way"


async def test_a_finished_sealed_segment_is_not_assigned_again(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ASSIGNMENT_REPEAT_S", 0.01)
    peer = topic.peer()
    peer_id, _ = await peer.register("a", "g", kind=pb.CHECKPOINT)
    readers = [await peer.attach(n, "a", f"reader-{n}", durable=False) for n in range(4)]
    await topic.fill(0, 1)
    await topic.scalable.split(TOPIC, 0)
    await peer.attach(4, "a", "reader-4", durable=False)
    readers[0].close()  # It read the segment to its end.
    peer.assignments()
    told: list[tuple[int, list[int]]] = []

    def is_told_again() -> bool:
        told.extend(peer.assignments())
        return bool(told)

    await until(is_told_again)
    assert told[0] == (peer_id, [4, 5, 1, 2, 3])


async def test_a_newcomer_whose_segments_are_loading_keeps_its_share(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RELEASE_WAIT_S", 0)
    set_bound(monkeypatch, "FIRST_TAKE_UP_WAIT_S", 0)
    first, slow = topic.peer(), topic.peer()
    await first.register("a")
    for n in (0, 2):
        await first.attach(n, "a")
    _, answer = await slow.register("b")
    await until_told(slow, [1, 3], answer)
    await asyncio.sleep(0.05)
    assert await registered(topic) == ["a", "b"]
    await slow.attach(1, "b")
    await slow.attach(3, "b")
    assert slow.assignments() == []


async def test_a_deleted_topic_forgets_its_consumers(topic: Node) -> None:
    peer = topic.peer()
    await peer.register("a")
    await topic.scalable.delete(TOPIC, force=True)
    assert topic.scalable.controllers.of(TOPIC) is None
    assert await topic.metadata.children("/topics/public/default/t/subscriptions/s/consumers") == []
    assert not peer.closing, "its client would create the topic again"
    await topic.scalable.create(TOPIC, segments=1, properties={})
    assert peer.closing, "else it would be told nothing of this one"
    assert not topic.scalable.controllers.awaits(TOPIC)
    _, answer = await topic.peer().register("b")
    assert segments(answer) == [0]


async def test_nothing_is_kept_of_consumers_that_leave_after_their_topic(topic: Node) -> None:
    peer = topic.peer()
    await peer.register("a")
    await peer.register("b", "other")
    await topic.scalable.delete(TOPIC, force=True)
    assert topic.scalable.controllers.awaits(TOPIC)
    peer.close()
    assert not topic.scalable.controllers.awaits(TOPIC)


async def test_the_controller_record_is_an_ephemeral_of_ours(topic: Node) -> None:
    await topic.peer().register("a")
    record = await topic.metadata.get("/topics/public/default/t/controller")
    assert record is not None
    assert record.ephemeral
    assert record.value == b'"127.0.0.1:8080"'
    await topic.session.close()
    assert await topic.metadata.get("/topics/public/default/t/controller") is None


async def test_a_lost_session_is_replaced(topic: Node) -> None:
    await topic.peer().register("a")
    await topic.session.close()
    _, answer = await topic.peer().register("b")
    assert not answer.HasField("error")
    assert await topic.metadata.get("/topics/public/default/t/controller") is not None
    await topic.scalable.stop()
    assert await topic.metadata.get("/topics/public/default/t/controller") is None


async def test_another_brokers_topic_is_not_ours_to_assign(topic: Node) -> None:
    await topic.metadata.put("/topics/public/default/t/controller", b'"elsewhere:8080"')
    _, answer = await topic.peer().register("a")
    assert answer.error == pb.ServiceNotReady


async def test_names_with_slashes_and_dots(node: Node) -> None:
    name = parse_topic_name("topic://public/default/a/b.c")
    await node.scalable.create(name, segments=1, properties={})
    for consumer in ("..", "a/b", "ü"):
        _, answer = await node.peer().register(consumer, consumer, topic=name)
        assert segments(answer) == [0]
        assert await node.scalable._store.consumers(name, consumer) == [consumer]
    peer = Peer(node)
    await peer.attach(0, "..", "..", topic=name)


async def test_a_controller_that_ends_leaves_no_work_behind_that_had_not_begun(
    topic: Node, recwarn: pytest.WarningsRecorder
) -> None:
    await topic.peer().register("a")
    controller = topic.scalable.controllers.of(TOPIC)
    assert controller is not None
    await controller.drop("s")
    controller.check_drained()
    await controller.close()
    gc.collect()
    assert not [str(each.message) for each in recwarn if each.category is RuntimeWarning]
