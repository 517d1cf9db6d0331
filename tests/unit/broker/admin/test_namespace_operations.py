"""Operations on all topics of a namespace at once, and the properties of a namespace."""

from pathlib import Path

from magnetar.protocol.names import parse_topic_name
from storage.managed_ledger.records import ledger_key
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import Rest, asking_broker
from tests.unit.broker.placement.cluster import Cluster

NAMESPACE = "/admin/v2/namespaces/public/default"
TOPICS = "/admin/v2/persistent/public/default"
SCALABLE = "/admin/v2/scalable/public/default"
NAMES = ["x", "p-partition-0", "p-partition-1"]


async def with_backlogs(rest: Rest) -> None:
    """Two ordinary topics and a scalable one with a message and subscriptions a and b each."""
    await rest.done("PUT", f"{TOPICS}/p/partitions", 2)
    await rest.done("PUT", f"{TOPICS}/x")
    await rest.done("PUT", f"{SCALABLE}/s")
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    for subscription in "ab":
        for name in ("p", "x"):
            await rest.done("PUT", f"{TOPICS}/{name}/subscription/{subscription}", "earliest")
        await rest.done("PUT", f"{SCALABLE}/s/subscriptions/{subscription}?type=QUEUE")
    for name in NAMES:
        producer = await client.create_producer(f"persistent://public/default/{name}")
        await producer.send(b"m")
    producer = await client.create_producer("segment://public/default/s/0000-ffff-0")
    await producer.send(b"m")
    await client.close()


async def backlogs(rest: Rest, subscription: str) -> list[object]:
    found: list[object] = []
    for path in (*(f"{TOPICS}/{name}" for name in NAMES), f"{SCALABLE}/s"):
        stats = await rest.get(f"{path}/stats")
        assert isinstance(stats, dict)
        found.append(stats["subscriptions"].get(subscription, {}).get("msgBacklog"))
    return found


async def test_the_backlog_of_all_topics_is_skipped(rest: Rest) -> None:
    await with_backlogs(rest)
    assert await backlogs(rest, "a") == await backlogs(rest, "b") == [1, 1, 1, 1]
    await rest.done("POST", f"{NAMESPACE}/clearBacklog/a")
    assert await backlogs(rest, "a") == [0, 0, 0, 0]
    assert await backlogs(rest, "b") == [1, 1, 1, 1]
    await rest.done("POST", f"{NAMESPACE}/clearBacklog")
    assert await backlogs(rest, "b") == [0, 0, 0, 0]
    await rest.refused(404, "POST", "/admin/v2/namespaces/public/none/clearBacklog")


async def test_a_subscription_is_deleted_on_all_topics_that_have_it(rest: Rest) -> None:
    await with_backlogs(rest)
    await rest.done("PUT", f"{TOPICS}/without")
    await rest.done("POST", f"{NAMESPACE}/unsubscribe/a")
    assert await backlogs(rest, "a") == [None, None, None, None]
    assert await backlogs(rest, "b") == [1, 1, 1, 1]
    await rest.done("POST", f"{NAMESPACE}/unsubscribe/a")


async def test_a_subscription_with_consumers_stays_and_goes_from_the_other_topics(
    rest: Rest,
) -> None:
    await with_backlogs(rest)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    consumer = await client.subscribe("persistent://public/default/p-partition-0", "a")
    reason = await rest.refused(412, "POST", f"{NAMESPACE}/unsubscribe/a")
    assert "p-partition-0" in reason
    assert await backlogs(rest, "a") == [None, 1, None, None]
    await consumer.close()
    await rest.done("POST", f"{NAMESPACE}/unsubscribe/a")
    await client.close()


async def test_partitions_that_were_never_used_are_not_made(cluster: Cluster) -> None:
    node = await cluster.add()
    assert await cluster.rest(node, "PUT", f"{TOPICS}/p/partitions", 3) is None
    assert await cluster.rest(node, "POST", f"{NAMESPACE}/clearBacklog") is None
    assert not node.broker.topics.loaded()


async def test_topics_of_all_brokers_are_reached_from_any(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    topics = [f"persistent://public/default/t{number}" for number in range(6)]
    for number in range(6):
        assert await cluster.rest(nodes[0], "PUT", f"{TOPICS}/t{number}") is None
        path = f"{TOPICS}/t{number}/subscription/a"
        assert await cluster.rest(nodes[0], "PUT", path, "earliest") is None
    assert await cluster.rest(nodes[0], "PUT", f"{SCALABLE}/s") is None
    path = f"{SCALABLE}/s/subscriptions/a?type=QUEUE"
    assert await cluster.rest(nodes[0], "PUT", path) is None
    await until(lambda: all(cluster.owners(topic) for topic in topics))
    assert {node.id for topic in topics for node in cluster.owners(topic)} == {
        node.id for node in nodes
    }
    assert await cluster.rest(nodes[1], "POST", f"{NAMESPACE}/unsubscribe/a") is None
    for number in range(6):
        found = await cluster.rest(nodes[0], "GET", f"{TOPICS}/t{number}/subscriptions")
        assert found == []
    assert await cluster.rest(nodes[0], "GET", f"{SCALABLE}/s/subscriptions") == []


async def test_properties_of_a_namespace_are_set_shown_and_removed(rest: Rest) -> None:
    path = f"{NAMESPACE}/properties"
    assert await rest.get(path) == {}
    await rest.done("PUT", path, {"owner": "billing", "tier": "1"})
    await rest.done("PUT", path, {"tier": "2"})
    await rest.done("PUT", f"{NAMESPACE}/property/note/a%2Fb%20c")
    assert await rest.get(path) == {"owner": "billing", "tier": "2", "note": "a/b c"}
    assert await rest.get(f"{NAMESPACE}/property/note") == "a/b c"
    assert await rest.call("GET", f"{NAMESPACE}/property/none") == (204, "")
    assert await rest.call("DELETE", f"{NAMESPACE}/property/owner") == (200, "billing")
    assert await rest.call("DELETE", f"{NAMESPACE}/property/owner") == (204, "")
    policies = await rest.get(NAMESPACE)
    assert isinstance(policies, dict)
    assert policies["properties"] == {"tier": "2", "note": "a/b c"}
    await rest.done("DELETE", path)
    assert await rest.get(path) == {}


async def test_properties_come_with_a_new_namespace_and_are_bounded(rest: Rest) -> None:
    new = "/admin/v2/namespaces/public/n"
    await rest.refused(412, "PUT", new, {"properties": {"a": 1}})
    await rest.done("PUT", new, {"properties": {"a": "1"}})
    assert await rest.get(f"{new}/properties") == {"a": "1"}
    await rest.refused(400, "PUT", f"{new}/properties", {"a": 1})
    await rest.done("PUT", f"{new}/properties", {"b": "x" * 9_000})
    # Each is small enough, and both together are not.
    await rest.refused(413, "PUT", f"{new}/properties", {"c": "x" * 9_000})
    await rest.refused(404, "GET", "/admin/v2/namespaces/public/none/properties")


async def test_missing_partitions_are_made_by_a_single_broker(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        key = ledger_key(parse_topic_name("persistent://public/default/p-partition-1").ledger_path)
        await rest.done("PUT", f"{TOPICS}/p/partitions", 2)
        await rest.done("DELETE", f"{TOPICS}/p-partition-1")
        assert await broker.metadata.get(key) is None
        await rest.done("POST", f"{TOPICS}/p/createMissedPartitions")
        assert await broker.metadata.get(key) is not None
        await rest.refused(404, "POST", f"{TOPICS}/x/createMissedPartitions")


async def test_missing_partitions_are_left_to_their_first_use_in_a_cluster(
    cluster: Cluster,
) -> None:
    node = await cluster.add()
    assert await cluster.rest(node, "PUT", f"{TOPICS}/p/partitions", 2) is None
    assert await cluster.rest(node, "POST", f"{TOPICS}/p/createMissedPartitions") is None
    assert not cluster.owners("persistent://public/default/p-partition-0")
    assert await cluster.rest(node, "POST", f"{TOPICS}/x/createMissedPartitions") == 404
