"""Operators' work on subscriptions of a whole topic, and its statistics."""

import asyncio
import json

import pytest

from broker.scalable.layout import UnknownSegment
from broker.scalable.records import SubscriptionKind
from broker.scalable.topic_store import ScalableTopicNotFound
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.topic import SubscriptionNotFound
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_topic_name
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node
from tests.unit.broker.scalable.relaying import Held
from tests.unit.broker.scalable.test_controller import until_told


@pytest.fixture
async def topic(node: Node) -> Node:
    await node.scalable.create(TOPIC, segments=2, properties={})
    await node.fill(0, 3)
    return node


async def create(node: Node, name: str = "s", kind: str = "QUEUE") -> None:
    await node.scalable.create_subscription(TOPIC, name, kind=kind, start=EARLIEST)


async def test_creating_covers_every_active_segment(topic: Node) -> None:
    await create(topic)
    await create(topic)
    assert (await topic.backlog(0), await topic.backlog(1)) == (3, 0)
    assert await topic.kind_of("s") is SubscriptionKind.QUEUE
    await create(topic, kind="STREAM")
    assert await topic.kind_of("s") is SubscriptionKind.QUEUE, "fixed by the first"


async def test_deleting_reaches_every_segment_and_record(topic: Node) -> None:
    await create(topic)
    await topic.scalable.split(TOPIC, 0)
    await topic.peer().register("a")
    await topic.scalable.delete_subscription(TOPIC, "s", force=False)
    for segment_id in range(4):
        assert not (await topic.segment(segment_id)).subscriptions
    assert await topic.kind_of("s") is None
    assert await topic.scalable._store.consumers(TOPIC, "s") == []
    with pytest.raises(SubscriptionNotFound):
        await topic.scalable.delete_subscription(TOPIC, "s", force=False)


@pytest.mark.parametrize("at", ["put_consumer", "consumers", "remove_subscription"])
async def test_ordered_consumers_of_a_deleted_subscription_register_again(
    topic: Node, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Also one that registers meanwhile: else nobody would assign it the next layout."""
    await create(topic, kind="STREAM")
    first, second = topic.peer(), topic.peer()
    await first.register("a")
    held = Held(monkeypatch, topic.scalable._store, at)
    deletion = topic.scalable.delete_subscription(TOPIC, "s", force=True)
    if at == "put_consumer":
        registering = asyncio.create_task(second.register("b"))
        await held.reached.wait()
        deleting = asyncio.create_task(deletion)
        await asyncio.sleep(0)
    else:
        deleting = asyncio.create_task(deletion)
        await held.reached.wait()
        registering = asyncio.create_task(second.register("b"))
        await asyncio.sleep(0)
    held.go_on.set()
    await asyncio.gather(registering, deleting)
    assert first.closing
    for peer in (second, topic.peer()):
        if not peer.closing:
            _, answer = await peer.register("b")
            await topic.scalable.split(TOPIC, 1)
            await until_told(peer, [0, 2, 3], answer)
            break
    assert await topic.scalable._store.consumers(TOPIC, "s") == ["b"]


async def test_a_subscription_in_use_is_not_deleted_without_force(topic: Node) -> None:
    await create(topic)
    consumer = await topic.peer().attach(1, "a")
    with pytest.raises(ConsumerBusy):
        await topic.scalable.delete_subscription(TOPIC, "s", force=False)
    assert await topic.backlog(0) == 3, "nothing is removed, on no segment"
    await topic.scalable.delete_subscription(TOPIC, "s", force=True)
    assert consumer.closed


async def test_skipping_and_seeking(topic: Node) -> None:
    await create(topic)
    topic.clock.ms += 1000
    since = topic.clock.now_ms()
    await topic.fill(0, 2)
    await topic.fill(1, 4)
    await topic.scalable.skip_all(TOPIC, "s")
    assert (await topic.backlog(0), await topic.backlog(1)) == (0, 0)
    await topic.scalable.seek_subscription(TOPIC, "s", since)
    assert (await topic.backlog(0), await topic.backlog(1)) == (2, 4)
    await topic.scalable.seek_subscription(TOPIC, "s", 0)
    assert (await topic.backlog(0), await topic.backlog(1)) == (5, 4)
    for change in (
        topic.scalable.skip_all(TOPIC, "none"),
        topic.scalable.seek_subscription(TOPIC, "none", 0),
    ):
        with pytest.raises(SubscriptionNotFound):
            await change


async def test_seeking_past_a_sealed_segment_skips_it(topic: Node) -> None:
    await create(topic)
    await topic.scalable.split(TOPIC, 0)
    parent = await topic.segment(0)
    await until(lambda: parent.sealed)
    topic.clock.ms += 1000
    await topic.fill(2, 2)
    await topic.scalable.seek_subscription(TOPIC, "s", topic.clock.now_ms())
    assert (await topic.backlog(0), await topic.backlog(2)) == (0, 2)


async def test_subscription_calls_on_a_missing_topic_fail(node: Node) -> None:
    none = parse_topic_name("topic://public/default/none")
    for change in (
        node.scalable.create_subscription(none, "s", kind="QUEUE", start=EARLIEST),
        node.scalable.delete_subscription(none, "s", force=True),
        node.scalable.seek_subscription(none, "s", 0),
        node.scalable.skip_all(none, "s"),
    ):
        with pytest.raises(ScalableTopicNotFound):
            await change


async def test_statistics(topic: Node) -> None:
    await create(topic, "queue")
    peer = topic.peer()
    await peer.register("a", "stream")
    await peer.attach(0, "a", "stream", start=EARLIEST)
    await topic.peer().register("r", "group", kind=pb.CHECKPOINT)
    producer = await peer.produce(1)
    await topic.scalable.split(TOPIC, 0)
    stats = json.loads(json.dumps(await topic.scalable.stats(TOPIC)))
    assert (stats["epoch"], stats["totalSegments"]) == (1, 4)
    assert (stats["activeSegments"], stats["sealedSegments"]) == (3, 1)
    assert stats["segments"]["0"] == {
        "name": "segment://public/default/t/0000-7fff-0",
        "state": "SEALED",
    }
    node = stats["layout"]["segments"]["2"]
    assert (node["parentIds"], node["state"], node["entryBuckets"]) == ([0], "ACTIVE", 1)
    assert stats["producers"][0]["producerName"] == producer.name
    assert stats["storageSize"] > 0
    queue, stream, group = (stats["subscriptions"][n] for n in ("queue", "stream", "group"))
    assert (queue["type"], queue["msgBacklog"], queue["consumerCount"]) == ("QUEUE", 3, 0)
    assert queue["segments"]["0"] == {
        "msgBacklog": 3,
        "backlogSize": 69,
        "msgDelayed": 0,
        "unackedMessages": 0,
        "msgRateOut": 0,
        "msgThroughputOut": 0,
        "byteRateOut": 0,
        "consumerCount": 0,
    }
    assert (stream["type"], stream["consumerCount"]) == ("STREAM", 1)
    assert stream["consumers"][0]["consumerName"] == "a"
    assert stream["consumers"][0]["connected"] is True
    assert stream["consumers"][0]["segmentIds"] == [0, 1]
    assert (group["type"], group["consumerCount"]) == ("CHECKPOINT", 1)
    await producer.close()


async def test_statistics_of_an_unused_topic(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    stats = await node.scalable.stats(TOPIC)
    assert stats["subscriptions"] == {}
    assert stats["producers"] == []


async def test_statistics_add_the_rates_of_segments_and_of_their_clients(topic: Node) -> None:
    peer = topic.peer()
    await peer.register("a", "stream")
    for segment_id in (0, 1):
        await peer.attach(segment_id, "a", "stream", start=EARLIEST)
    producers = [await peer.produce(segment_id) for segment_id in (0, 1)]
    for segment_id, messages in ((0, 30), (1, 12)):
        segment = await topic.segment(segment_id)
        for producer in segment.producers.values():
            producer.name = "one"
            producer.messages_in += messages
            producer.bytes_in += 100 * messages
        (consumer,) = segment.subscriptions["stream"].consumers
        consumer.messages_out_total += messages
        consumer.bytes_out_total += 100 * messages
        consumer.redelivered_total += 1
        consumer.acknowledged_total += messages
    stats = json.loads(json.dumps(await topic.scalable.stats(TOPIC)))
    # Of a test that began less than a second ago: rates are taken over a second at least.
    assert stats["msgRateIn"] == pytest.approx(42, rel=0.5)
    assert stats["byteRateIn"] == stats["msgThroughputIn"]
    assert stats["averageMsgSize"] == pytest.approx(100, rel=0.1)
    assert stats["storageSize"] > stats["offloadedStorageSize"] == 0
    assert stats["oldestBacklogMessageAgeSeconds"] >= 0 < stats["backlogSize"]
    (producer_stats,) = stats["producers"]
    assert producer_stats["producerName"] == "one"
    assert producer_stats["accessMode"] == "Shared"
    assert producer_stats["msgRateIn"] == pytest.approx(stats["msgRateIn"], rel=0.2)
    subscription = stats["subscriptions"]["stream"]
    assert subscription["segments"]["1"]["msgRateOut"] > 0
    (registered,) = subscription["consumers"]
    assert (registered["consumerName"], registered["segmentIds"]) == ("a", [0, 1])
    for each in (subscription, registered):
        assert each["msgRateOut"] == pytest.approx(42, rel=0.5)
        assert each["byteRateOut"] == pytest.approx(100 * each["msgRateOut"])
        assert each["msgRateRedeliver"] > 0 < each["messageAckRate"]
    for producer in producers:
        await producer.close()


async def test_statistics_of_one_segment(topic: Node) -> None:
    await create(topic)
    peer = topic.peer()
    await peer.attach(0, "c")
    producer = await peer.produce(0)
    stats = json.loads(json.dumps(await topic.scalable.segment_stats(TOPIC, 0)))
    assert stats["ownerBroker"]
    assert stats["storageSize"] > 0 <= stats["oldestBacklogMessageAgeSeconds"]
    assert (stats["waitingPublishers"], stats["offloadedStorageSize"]) == (0, 0)
    assert [each["producerName"] for each in stats["producers"]] == [producer.name]
    subscription = stats["subscriptions"]["s"]
    assert (subscription["type"], subscription["msgBacklog"]) == ("Exclusive", 3)
    (consumer,) = subscription["consumers"]
    assert consumer["consumerName"] == "c-seg-0"
    for members in (stats, subscription, consumer):
        assert members["byteRateOut"] == members["msgThroughputOut"] >= 0
    empty = await topic.scalable.segment_stats(TOPIC, 1)
    assert (empty["oldestBacklogMessageAgeSeconds"], empty["backlogSize"]) == (-1, 0)
    with pytest.raises(UnknownSegment):
        await topic.scalable.segment_stats(TOPIC, 7)
    await producer.close()
