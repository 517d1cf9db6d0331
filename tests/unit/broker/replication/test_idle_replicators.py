"""Replicators without anything to send leave the other cluster, and come back."""

import pytest

from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import TOPIC, Cluster

OTHER = "persistent://public/default/other"
Pair = tuple[Cluster, Cluster]


@pytest.fixture
async def idle_pair(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """East and west, whose replicators leave at once when they have nothing to send."""
    set_bound(monkeypatch, "REPLICATOR_IDLE_S", 0.05)
    return pair


def left(cluster: Cluster, topic: str = TOPIC) -> bool:
    """Whether the topic is loaded, and its replicators have left."""
    replicators = cluster.replicators(topic).values()
    return bool(replicators) and not any(each.connected for each in replicators)


async def test_a_replicator_leaves_and_comes_back_with_the_next_message(idle_pair: Pair) -> None:
    east, west = idle_pair
    await west.messages(0)
    for number in range(3):
        await east.publish(b"%d" % number)
        await until(lambda: east.is_done() and left(east))
        await until(lambda: not west.broker.topics.loaded()[TOPIC].producers)
    shown = (await east.stats())["replication"]["west"]
    assert (shown["connected"], shown["msgOutCount"]) == (False, 3)
    assert "lastFailure" not in shown
    assert await west.payloads(3) == [b"0", b"1", b"2"]


async def test_messages_that_come_while_it_leaves_arrive_once_and_in_order(idle_pair: Pair) -> None:
    east, west = idle_pair
    await west.messages(0)
    client = await east.client()
    producer = await client.create_producer(TOPIC)
    sent: list[bytes] = []
    for number in range(30):
        if number % 3 == 0:
            await until(lambda: left(east))
        sent.append(b"%d" % number)
        await producer.send(sent[-1])
    await until(east.is_done)
    await client.close()
    assert west.broker.topics.loaded()[TOPIC].ledger.entry_count == len(sent)
    assert await west.payloads(len(sent)) == sent


async def test_an_inactive_topic_is_deleted_although_it_is_replicated(idle_pair: Pair) -> None:
    east, west = idle_pair
    policy = {
        "deleteWhileInactive": True,
        "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
        "maxInactiveDurationSeconds": 1,
    }
    await west.stop()
    west.settings["broker_delete_inactive_topics_frequency_s"] = 1
    await west.start()
    await west.ask("POST", "/admin/v2/namespaces/public/default/inactiveTopicPolicies", policy)
    await east.publish(b"1")
    await until(east.is_done)
    await until(lambda: TOPIC in west.broker.topics.loaded())
    await until(lambda: TOPIC not in west.broker.topics.loaded())
    await east.publish(b"2")
    await until(east.is_done)
    assert TOPIC in west.broker.topics.loaded()


async def test_a_replicator_with_a_backlog_stays(idle_pair: Pair) -> None:
    east, west = idle_pair
    rate = {"dispatchThrottlingRateInMsg": 1, "ratePeriodInSecond": 3600}
    path = "/admin/v2/namespaces/public/default/replicatorDispatchRate"
    await east.ask("POST", path, rate)
    await east.publish(*[b"%d" % number for number in range(20)])
    await until(lambda: "west" in east.replicators() and east.replicators()["west"].counts.messages)
    replicator = east.replicators()["west"]
    attached = replicator.producer
    # One that has the same time without anything to send leaves meanwhile.
    await east.publish(b"1", topic=OTHER)
    await until(lambda: left(east, OTHER))
    assert replicator.subscription.backlog
    assert replicator.producer is attached
    assert replicator.connected
    await east.ask("DELETE", path)
    await until(east.is_done)
    assert len(await west.payloads(20)) == 20
