"""Non-persistent topics in two clusters, each of which sends its messages to the other one."""

import asyncio

import pytest

from broker.replication.non_persistent_replicator import NonPersistentReplicator
from broker.replication.non_persistent_topic import ReplicatedNonPersistentTopic
from broker.replication.remote_producer import RemoteProducer
from broker.topics.topic_stats import NO_REPLICATION, replication_of_all
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_entry
from magnetar.wire.connection import Connection
from tests.support.bounds import set_bound
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import RawClient
from tests.support.raw_handles import RawConsumer
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster
from tests.unit.broker.topics.test_topic_memory import unreachable_objects

Pair = tuple[Cluster, Cluster]
TOPIC = "non-persistent://public/default/n"
ENTRY = build_entry(pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1), b"0")
PATH = "/admin/v2/non-persistent/public/default/n"


async def consuming(cluster: Cluster, topic: str = TOPIC) -> tuple[RawClient, RawConsumer]:
    """A consumer of all messages from now on."""
    client = await cluster.client()
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Exclusive)
    return client, await client.subscribe(topic, "s", options, permits=1000)


def replicators(cluster: Cluster, topic: str = TOPIC) -> dict[str, NonPersistentReplicator]:
    """Those of a topic, if it is there."""
    found = cluster.broker.topics.non_persistent.loaded().get(topic)
    if found is None:
        return {}
    assert isinstance(found.replication, ReplicatedNonPersistentTopic)
    return found.replication.replicators


def is_connected(cluster: Cluster, topic: str = TOPIC) -> bool:
    """Whether all its replicators are attached."""
    found = replicators(cluster, topic).values()
    return bool(found) and all(each.connected for each in found)


async def sent_by(cluster: Cluster) -> dict[str, object]:
    """What is shown of the replicator to west."""
    found = await cluster.rest.get(f"{PATH}/stats")
    assert isinstance(found, dict)
    shown = found["replication"]["west"]
    assert isinstance(shown, dict)
    return shown


async def test_messages_reach_consumers_of_both_clusters_once(pair: Pair) -> None:
    consumers = [await consuming(each) for each in pair]
    await until(lambda: all(is_connected(each) for each in pair))
    for each in pair:
        payloads = [b"%d-%s" % (number, each.name.encode()) for number in range(5)]
        await each.publish(*payloads, topic=TOPIC)
        for _, consumer in consumers:
            received = [await consumer.receive() for _ in range(5)]
            assert [found.payload for found in received] == payloads
    for _, consumer in consumers:
        assert consumer.messages.empty()
    found = await pair[1].rest.get(f"{PATH}/stats")
    assert isinstance(found, dict)
    assert found["publishers"] == []
    assert found["replication"]["east"]["msgInCount"] == 5
    for client, _ in consumers:
        await client.close()


async def test_replicated_message_names_the_cluster_that_it_is_from(pair: Pair) -> None:
    east, west = pair
    client, consumer = await consuming(west)
    await until(lambda: is_connected(west))
    await east.publish(b"0", topic=TOPIC)
    received = await consumer.receive()
    assert received.metadata.replicated_from == "east"
    await client.close()


async def test_message_goes_to_the_clusters_that_it_names(pair: Pair) -> None:
    east, west = pair
    client, consumer = await consuming(west)
    sender = await east.client()
    producer = await sender.create_producer(TOPIC)
    await until(lambda: is_connected(east))
    for payload, clusters in ((b"here", ["east"]), (b"there", ["west"]), (b"all", [])):
        await producer.send(payload, metadata=pb.MessageMetadata(replicate_to=clusters))
    assert [(await consumer.receive()).payload for _ in range(2)] == [b"there", b"all"]
    assert (await sent_by(east))["msgDropCount"] == 0
    await sender.close()
    await client.close()


async def test_first_message_is_kept_until_its_replicator_is_attached(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATOR_IDLE_S", 0.05)
    east, west = pair
    client, consumer = await consuming(west)
    sender = await east.client()
    producer = await sender.create_producer(TOPIC)
    for number in range(3):
        await until(lambda: replicators(east) and replicators(east)["west"].resting)
        await producer.send(b"%d" % number)
        assert (await consumer.receive()).payload == b"%d" % number
    assert (await sent_by(east))["msgDropRate"] == 0
    await sender.close()
    await client.close()


async def test_message_that_is_larger_than_the_queue_is_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "NON_PERSISTENT_QUEUE_BYTES", 100)
    east, west = pair
    client, consumer = await consuming(west)
    sender = await east.client()
    producer = await sender.create_producer(TOPIC)
    await until(lambda: is_connected(east))
    for payload in (b"x" * 200, b"last"):
        await producer.send(payload)
        assert (await consumer.receive()).payload == payload
    await sender.close()
    await client.close()


async def test_message_that_comes_while_its_replicator_leaves_arrives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, may_leave, leaves = list[str](), asyncio.Event(), RemoteProducer.leave

    async def leave(producer: RemoteProducer, connection: Connection) -> None:
        leaving.append(producer.cluster)
        await may_leave.wait()
        await leaves(producer, connection)

    monkeypatch.setattr(RemoteProducer, "leave", leave)
    set_bound(monkeypatch, "REPLICATOR_IDLE_S", 0.05)
    east, west = pair
    client, consumer = await consuming(west)
    sender = await east.client()
    producer = await sender.create_producer(TOPIC)
    await until(lambda: "west" in leaving)
    assert not replicators(east)["west"].resting
    await producer.send(b"0")
    may_leave.set()
    assert (await consumer.receive()).payload == b"0"
    await sender.close()
    await client.close()


async def test_messages_are_dropped_while_the_other_cluster_is_away(pair: Pair) -> None:
    east, west = pair
    sender = await east.client()
    producer = await sender.create_producer(TOPIC)
    await until(lambda: is_connected(east))
    await west.stop()
    for _ in range(5):
        await producer.send(b"lost")
    await until(lambda: replicators(east)["west"].outbound_stats(0).dropped == 5)
    shown = await sent_by(east)
    assert (shown["connected"], shown["msgDropCount"]) == (False, 5)
    assert "No connection" in str(shown["lastFailure"])
    assert shown["replicationBacklog"] == 0
    labels = f'cluster="east",namespace="public/default",remote_cluster="west",topic="{TOPIC}"'
    metric = f"magnetar_replication_dropped_messages_total{{{labels}}} 5.0\n"
    assert metric in await metrics_text(east.broker)
    await west.start()
    client, consumer = await consuming(west)
    await until(lambda: is_connected(east), 60)
    await producer.send(b"back")
    assert (await consumer.receive()).payload == b"back"
    await sender.close()
    await client.close()


def test_dropped_messages_of_all_partitions_are_added() -> None:
    partitions = [dict(NO_REPLICATION, msgDropRate=0.5, msgDropCount=count) for count in (2, 3)]
    shown = replication_of_all(partitions)
    assert (shown["msgDropRate"], shown["msgDropCount"]) == (1.0, 5)


async def test_messages_above_the_bound_are_dropped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "NON_PERSISTENT_QUEUE_ENTRIES", 2)
    east, _ = pair
    sender = await east.client()
    producer = await sender.create_producer(TOPIC)
    await until(lambda: is_connected(east))
    loaded = east.broker.topics.non_persistent.loaded()[TOPIC]
    replicator = replicators(east)["west"]
    for _ in range(10):
        loaded.replication.send(ENTRY)
    shown = replicator.outbound_stats(0)
    assert (shown.messages, shown.backlog, shown.dropped) == (2, 2, 6)
    await until(lambda: replicator.outbound_stats(0).messages == 4)
    await producer.send(b"more")
    await sender.close()


async def test_replicator_ends_with_the_list_and_begins_again(pair: Pair) -> None:
    east, west = pair
    client, consumer = await consuming(west)
    sender = await east.client()
    producer = await sender.create_producer(TOPIC)
    await until(lambda: is_connected(east))
    await east.replicate("east")
    await until(lambda: not replicators(east))
    await producer.send(b"here alone")
    await east.replicate("east", "west")
    await until(lambda: is_connected(east))
    await producer.send(b"all")
    assert (await consumer.receive()).payload == b"all"
    await sender.close()
    await client.close()


async def test_partitions_are_made_there_and_replicated(pair: Pair) -> None:
    east, west = pair
    await east.rest.done("PUT", f"{PATH}/partitions", 2)
    partition = f"{TOPIC}-partition-1"
    client, consumer = await consuming(east, partition)
    await until(lambda: is_connected(east, partition))
    assert await west.rest.get(f"{PATH}/partitions") == {"deleted": False, "partitions": 2}
    await west.publish(b"0", topic=partition)
    assert (await consumer.receive()).payload == b"0"
    await client.close()


async def test_replicator_of_a_closed_topic_is_freed_at_once(pair: Pair) -> None:
    east, _ = pair
    await east.publish(b"0", topic=TOPIC)
    await until(lambda: is_connected(east))
    with unreachable_objects() as found:
        topic = east.broker.topics.non_persistent.loaded()[TOPIC]
        await east.broker.topics.non_persistent.unload(topic.name)
        del topic
    assert not {"NonPersistentReplicator", "RemoteProducer"}.intersection(found)
