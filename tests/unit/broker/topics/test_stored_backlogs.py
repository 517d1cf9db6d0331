"""Backlogs of topics that were not loaded since the start, as the metrics show them."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.unloaded_backlogs import UnloadedBacklogs
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST as FIRST
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import RawClient
from tests.support.waiting import until_awaited
from tests.unit.broker.placement.cluster import Cluster, Node

TOPIC = "persistent://public/default/t"
SCALABLE = parse_topic_name("topic://public/default/scaled")
SEGMENT = "segment://public/default/scaled/0000-ffff-0"
BACKLOG = re.compile(
    r'pulsar_subscription_back_log\{.*subscription="(.*)",topic="(.*)"\} ([0-9]+)\.0'
)
EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


async def backlogs(broker: Broker) -> list[tuple[str, str, int]]:
    """Topic, subscription and backlog of each subscription in the metrics."""
    found = BACKLOG.findall(await metrics_text(broker))
    return sorted((topic, subscription, int(count)) for subscription, topic, count in found)


async def publish(client: RawClient, topic: str, count: int) -> None:
    producer = await client.create_producer(topic)
    for number in range(count):
        await producer.send(b"%d" % number)
    await producer.close()


async def acknowledge(
    client: RawClient, topic: str, subscription: str, acked: Sequence[int], count: int
) -> None:
    """Subscribe, receive `count` messages, and acknowledge some by their number."""
    consumer = await client.subscribe(topic, subscription, EARLIEST, permits=count)
    messages = [await consumer.receive() for _ in range(count)]
    for number in acked:
        await consumer.ack_answered(messages[number].message_id)
    await consumer.close()


async def abandon(broker: Broker) -> list[tuple[str, str, int]]:
    """Leave subscriptions behind; returns their backlogs."""
    await broker.scalable.create(SCALABLE, segments=1, properties={})
    client = await RawClient.open("127.0.0.1", broker.port)
    await publish(client, TOPIC, 10)
    await publish(client, SEGMENT, 3)
    await acknowledge(client, TOPIC, "left", [0, 1, 5, 7], 10)
    await acknowledge(client, TOPIC, "done", range(10), 10)
    await acknowledge(client, TOPIC, "odd", range(1, 10, 2), 10)
    await acknowledge(client, SEGMENT, "s", [0], 3)
    await client.close()
    for topic in broker.topics.loaded().values():
        for cursor in topic.ledger.cursors.values():
            await cursor.persist()
    return [(TOPIC, "left", 6), (TOPIC, "odd", 5), (SEGMENT, "s", 2)]


@pytest.mark.parametrize("end", ["clean", "crash"])
async def test_backlogs_are_shown_after_a_start_without_loading_topics(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a crash the positions are in ledgers of their own.
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    async with running(tmp_path / "clean") as broker:
        wanted = await abandon(broker)
        shutil.copytree(tmp_path / "clean", tmp_path / "crash")
    async with running(tmp_path / end) as broker:

        async def all_shown() -> bool:
            return await backlogs(broker) == wanted

        await until_awaited(all_shown)
        assert TOPIC not in broker.topics.loaded()
        topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
        assert topic.subscriptions["left"].backlog == 6, "nothing was changed or fenced"
        assert (TOPIC, "done", 0) in await backlogs(broker), "those of the loaded topic"
        assert len([each for each in await backlogs(broker) if each[:2] == (TOPIC, "left")]) == 1


async def test_backlogs_shown_after_a_start_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as broker:
        await abandon(broker)
    set_bound(monkeypatch, "UNLOADED_BACKLOGS", 1)
    async with running(tmp_path) as broker:

        async def some_shown() -> bool:
            return bool(await backlogs(broker))

        await until_awaited(some_shown)
        assert {topic for topic, _, _ in await backlogs(broker)} == {TOPIC}


def test_topic_that_is_used_while_its_backlog_is_read_is_not_remembered() -> None:
    unloaded = UnloadedBacklogs()
    name = parse_topic_name(TOPIC)
    unloaded.expect(name)
    unloaded.forget(TOPIC)
    unloaded.remember_expected(name, {"s": 1})
    assert not unloaded.by_topic
    unloaded.expect(name)
    unloaded.remember_expected(name, {"s": 1})
    assert unloaded.by_topic[TOPIC].entries == {"s": 1}


async def shown_by(nodes: Sequence[Node]) -> list[tuple[Node, int]]:
    """The nodes that show the backlog of the abandoned subscription, and the backlog."""
    return [
        (node, count)
        for node in nodes
        for topic, subscription, count in await backlogs(node.broker)
        if (topic, subscription) == (TOPIC, "left")
    ]


async def test_leader_shows_the_backlogs_of_topics_that_no_broker_has_loaded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "STORED_BACKLOGS_PAUSE_S", 0.01)
    leader, other = await cluster.add(), await cluster.add()
    assert leader.placement.is_leader
    name = parse_topic_name(TOPIC)
    topic = await other.broker.topics.get(name, create=True)
    await topic.create_subscription("left", FIRST)
    client = await other.client()
    await publish(client, TOPIC, 4)
    assert await shown_by(cluster.nodes) == [(other, 4)], "by the owner"

    await other.broker.topics.unload(name)

    async def shown_by_leader() -> bool:
        return await shown_by(cluster.nodes) == [(leader, 4)]

    await until_awaited(shown_by_leader)
    await leader.stop()
    cluster.nodes.remove(leader)

    async def shown_by_next_leader() -> bool:
        return await shown_by(cluster.nodes) == [(other, 4)]

    await until_awaited(shown_by_next_leader)
    assert TOPIC not in other.broker.topics.loaded()
    await other.broker.topics.delete(name, force=True)
    assert await shown_by(cluster.nodes) == []
