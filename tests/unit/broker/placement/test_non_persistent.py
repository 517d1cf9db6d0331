"""Non-persistent topics on several brokers: one of them has a topic, which ends with it."""

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.raw_client import RawProducer
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.placement.test_several import closed, found_by, lookup, producer_on

NAMESPACE = "/admin/v2/non-persistent/public/default"
TOPIC = "non-persistent://public/default/t"


async def owned_by_first(cluster: Cluster) -> tuple[Node, Node, RawProducer]:
    """Two brokers, of which the first has the topic, and a producer there."""
    first, second = await cluster.add(), await cluster.add()
    producer = await (await first.client()).create_producer(TOPIC)
    await until(lambda: second.owner_of(TOPIC) == first.id)
    return first, second, producer


def topics_of(node: Node) -> list[str]:
    return list(node.broker.topics.non_persistent.loaded())


async def test_lookups_lead_to_the_broker_that_has_the_topic(cluster: Cluster) -> None:
    first, second, producer = await owned_by_first(cluster)
    assert (await lookup(second, TOPIC)).broker_service_url == first.placement.broker_url
    assert await found_by(cluster, second, TOPIC) is first
    consumer = await (await first.client()).subscribe(TOPIC, "s", permits=10)
    await producer.send(b"x")
    assert (await consumer.receive()).payload == b"x"
    assert (topics_of(first), topics_of(second)) == ([TOPIC], [])


async def test_any_broker_lists_the_topic_and_rest_reaches_its_owner(cluster: Cluster) -> None:
    first, second, _ = await owned_by_first(cluster)
    assert await cluster.rest(second, "GET", NAMESPACE) == [TOPIC]
    client = await second.client()
    command = pb.CommandGetTopicsOfNamespace(
        namespace="public/default", mode=pb.CommandGetTopicsOfNamespace.ALL
    )
    answer = await client.request(pb.BaseCommand.GET_TOPICS_OF_NAMESPACE, command)
    assert list(answer.get_topics_of_namespace_response.topics) == [TOPIC]
    stats = await cluster.rest(second, "GET", f"{NAMESPACE}/t/stats")
    assert isinstance(stats, dict)
    assert stats["ownerBroker"] == first.id
    assert await cluster.rest(second, "PUT", f"{NAMESPACE}/t") == 409
    assert await cluster.rest(second, "DELETE", f"{NAMESPACE}/t") == 412
    assert await cluster.rest(second, "DELETE", f"{NAMESPACE}/t?force=true") is None
    await until(lambda: second.placement.known_owner(parse_topic_name(TOPIC)) is None)
    assert await cluster.rest(second, "GET", NAMESPACE) == []
    assert topics_of(first) == []


async def test_topic_is_gone_with_its_broker_and_made_anew_at_another(cluster: Cluster) -> None:
    first, second, _ = await owned_by_first(cluster)
    await first.stop()
    await until(lambda: second.placement.known_owner(parse_topic_name(TOPIC)) is None)
    assert await cluster.rest(second, "GET", NAMESPACE) == []
    await producer_on(cluster, second, TOPIC)
    assert topics_of(second) == [TOPIC]


async def test_topic_is_unloaded_to_another_broker(cluster: Cluster) -> None:
    first, second, producer = await owned_by_first(cluster)
    path = f"{NAMESPACE}/t/unload?destinationBroker={second.id}"
    assert await cluster.rest(second, "PUT", path) is None
    await closed(producer)
    await until(lambda: first.owner_of(TOPIC) == second.id)
    assert (topics_of(first), topics_of(second)) == ([], [TOPIC])


async def test_broker_that_loses_its_session_closes_the_topic(cluster: Cluster) -> None:
    first, second, producer = await owned_by_first(cluster)
    await first.view.expire()
    await closed(producer)
    await until(lambda: not topics_of(first))
    assert not first.placement.owns(parse_topic_name(TOPIC))
    await producer_on(cluster, second, TOPIC)


async def test_statistics_of_partitions_come_from_all_brokers(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    assert await cluster.rest(first, "PUT", f"{NAMESPACE}/p/partitions", 2) is None
    partitions = [f"non-persistent://public/default/p-partition-{index}" for index in (0, 1)]
    for partition, node in zip(partitions, (first, second), strict=True):
        producer = await (await node.client()).create_producer(partition)
        await producer.send(b"x")
    await until(lambda: first.owner_of(partitions[1]) == second.id)
    stats = await cluster.rest(first, "GET", f"{NAMESPACE}/p/partitioned-stats")
    assert isinstance(stats, dict)
    assert stats["msgInCounter"] == 2
    assert len(stats["partitions"]) == 2
