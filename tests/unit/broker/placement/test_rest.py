"""REST on several brokers: what concerns one topic goes to its owner, the rest any broker does."""

from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import NamespaceName
from tests.support.raw_client import BrokerError, RawProducer
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node

NAMESPACE = "/admin/v2/persistent/public/default"
Kind = pb.BaseCommand
STARTS = range(0, 0x10000, 0x4000)


async def served(node: Node, topic: str) -> RawProducer:
    """A producer there, so that the broker owns the topic."""
    return await (await node.client()).create_producer(f"persistent://public/default/{topic}")


async def redirect(cluster: Cluster, node: Node, method: str, path: str) -> tuple[int, str]:
    """Status and Location of an answer that is not followed."""
    url = node.placement.web_url + path
    async with cluster.http.request(method, url, allow_redirects=False) as response:
        return response.status, response.headers.get("Location", "")


async def test_a_request_about_a_topic_is_sent_to_its_owner(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    await served(first, "t")
    await until(lambda: second.owner_of("persistent://public/default/t") == first.id)
    path = f"{NAMESPACE}/t/stats?a=%20b"
    status, location = await redirect(cluster, second, "GET", path)
    assert status == 307
    assert location.startswith(f"{first.placement.web_url}{NAMESPACE}/t/stats?")
    assert "a=+b" in location or "a=%20b" in location
    stats = await cluster.rest(second, "GET", f"{NAMESPACE}/t/stats")
    assert isinstance(stats, dict)
    assert stats["ownerBroker"] == first.id
    assert (await cluster.rest(second, "PUT", f"{NAMESPACE}/t/subscription/s")) is None
    assert await cluster.rest(second, "GET", f"{NAMESPACE}/t/subscriptions") == ["s"]
    assert await cluster.rest(second, "GET", f"{NAMESPACE}/none/stats") == 404
    found = await cluster.rest(second, "GET", "/lookup/v2/topic/persistent/public/default/t")
    assert found == {
        "brokerId": first.id,
        "brokerUrl": first.placement.broker_url,
        "brokerUrlTls": None,
        "brokerUrlSsl": None,
        "httpUrl": first.placement.web_url,
        "httpUrlTls": None,
        "nativeUrl": first.placement.broker_url,
    }


async def test_a_topic_is_made_and_deleted_through_any_broker(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(3)]
    for number in range(6):
        path = f"{NAMESPACE}/t{number}"
        assert await cluster.rest(nodes[number % 3], "PUT", path) is None
        assert await cluster.rest(nodes[(number + 1) % 3], "PUT", path) == 409
    assert sorted(len(node.placement.owned) for node in nodes) == [2, 2, 2]
    for number in range(6):
        path = f"{NAMESPACE}/t{number}"
        assert await cluster.rest(nodes[(number + 2) % 3], "DELETE", path) is None
        assert await cluster.rest(nodes[number % 3], "DELETE", path) == 404
    assert not any(node.placement.owned for node in nodes)
    assert await cluster.rest(nodes[0], "GET", NAMESPACE) == []


async def test_partitions_spread_and_are_looked_at_and_deleted_together(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    path = f"{NAMESPACE}/p/partitions"
    assert await cluster.rest(nodes[0], "PUT", path, 4) is None
    producers = [await served(nodes[index % 2], f"p-partition-{index}") for index in range(4)]
    await until(lambda: all(len(node.placement.owners()) == 4 for node in nodes))
    found = await cluster.rest(nodes[1], "GET", f"{NAMESPACE}/p/partitioned-stats")
    assert isinstance(found, dict)
    assert len(found["partitions"]) == 4
    assert all(len(one["publishers"]) == 1 for one in found["partitions"].values())
    assert await cluster.rest(nodes[1], "DELETE", path) == 412, "they have producers"
    await producers[1].close()
    await producers[3].close()
    assert await cluster.rest(nodes[1], "DELETE", path) == 412, "elsewhere they have"
    assert await cluster.rest(nodes[1], "DELETE", f"{path}?force=true") is None
    assert await cluster.rest(nodes[0], "GET", NAMESPACE) == []
    await until(lambda: not any(node.placement.owned for node in nodes))


async def test_any_broker_truncates_and_describes_partitions_of_others(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    topic = f"{NAMESPACE}/p"
    assert await cluster.rest(nodes[0], "PUT", f"{topic}/partitions", 2) is None
    for index, node in enumerate(nodes):
        producer = await served(node, f"p-partition-{index}")
        path = f"{topic}-partition-{index}/subscription/s"
        assert await cluster.rest(nodes[1 - index], "PUT", path, "earliest") is None
        await producer.send(b"x")
    counted = await cluster.rest(
        nodes[0], "POST", f"{topic}-partition-1/subscription/s/analyzeBacklog"
    )
    assert isinstance(counted, dict)
    assert (counted["entries"], counted["aborted"]) == (1, False)
    properties = f"{topic}/subscription/s/properties"
    assert await cluster.rest(nodes[0], "PUT", properties, {"team": "a"}) is None
    for index, node in enumerate(nodes):
        own = f"{topic}-partition-{index}/subscription/s/properties"
        assert await cluster.rest(nodes[1 - index], "GET", own) == {"team": "a"}
        assert await cluster.rest(node, "GET", properties) == {"team": "a"}
    assert await cluster.rest(nodes[1], "DELETE", f"{topic}/truncate") is None
    found = await cluster.rest(nodes[0], "GET", f"{topic}/partitioned-stats")
    assert isinstance(found, dict)
    assert (found["subscriptions"]["s"]["msgBacklog"], found["storageSize"]) == (0, 0)


async def test_a_namespace_goes_with_the_topics_of_every_broker(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    space = "/admin/v2/namespaces/public/n"
    assert await cluster.rest(nodes[0], "PUT", space) is None
    made = ("persistent/public/n/p/partitions", "persistent/public/n/unused/partitions")
    for path in made:
        assert await cluster.rest(nodes[0], "PUT", f"/admin/v2/{path}", 2) is None
    for index, node in enumerate(nodes):
        for name in (f"t{index}", f"p-partition-{index}"):
            await (await node.client()).create_producer(f"persistent://public/n/{name}")
        scalable = f"/admin/v2/scalable/public/n/s{index}"
        assert await cluster.rest(node, "PUT", scalable) is None
        assert await cluster.rest(node, "POST", f"{scalable}/split/0?authoritative=true") is None
    assert await cluster.rest(nodes[1], "DELETE", space) == 409
    assert await cluster.rest(nodes[1], "DELETE", f"{space}?force=true") is None
    for node in nodes:
        assert await cluster.rest(node, "GET", space) == 404
    assert await cluster.rest(nodes[0], "PUT", space) is None
    for left in ("persistent/public/n", "persistent/public/n/partitioned", "scalable/public/n"):
        assert await cluster.rest(nodes[0], "GET", f"/admin/v2/{left}") == []
    await until(lambda: not any(node.placement.owned for node in nodes))


async def test_a_namespace_that_is_being_deleted_makes_no_topics(cluster: Cluster) -> None:
    """Clients come back at once, and would make again what was deleted a moment ago."""
    node = await cluster.add()
    name = NamespaceName("public", "n")
    await node.broker.namespaces.create(name)
    await node.broker.namespaces.change(name, lambda record: record.update(deleted=True))
    client = await node.client()
    with pytest.raises(BrokerError, match="create it first"):
        await client.create_producer("persistent://public/n/t")
    _, told = await client.watch_dag("topic://public/n/s")
    assert told.error == pb.TopicNotFound
    space = "/admin/v2/namespaces/public/n"
    assert await cluster.rest(node, "DELETE", f"{space}?force=true") is None, "tried again"


async def test_subscriptions_of_partitions_that_nobody_used_yet(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(3)]
    topic = f"{NAMESPACE}/p"
    assert await cluster.rest(nodes[0], "PUT", f"{topic}/partitions", 6) is None
    assert await cluster.rest(nodes[1], "PUT", f"{topic}/subscription/s") is None
    assert {len(node.placement.owned) for node in nodes} == {2}
    for node in nodes:
        assert await cluster.rest(node, "GET", f"{topic}/subscriptions") == ["s"]
        assert await cluster.rest(node, "POST", f"{topic}/subscription/s/skip_all") is None
        assert await cluster.rest(node, "PUT", f"{topic}/subscription/s") == 409
    assert await cluster.rest(nodes[2], "POST", f"{topic}/partitions", 12) is None
    for index in range(12):
        found = await cluster.rest(nodes[0], "GET", f"{topic}-partition-{index}/subscriptions")
        assert found == ["s"], index
    assert await cluster.rest(nodes[2], "DELETE", f"{topic}/subscription/s") is None
    assert await cluster.rest(nodes[0], "DELETE", f"{topic}/subscription/s") == 404
    assert await cluster.rest(nodes[0], "GET", f"{topic}/subscriptions") == []


async def test_a_topic_is_unloaded_to_where_it_is_sent(cluster: Cluster) -> None:
    first, second, third = [await cluster.add() for _ in range(3)]
    await served(first, "t")
    topic = "persistent://public/default/t"
    await until(lambda: third.owner_of(topic) == first.id)
    path = f"{NAMESPACE}/t/unload?destinationBroker="
    assert await cluster.rest(third, "PUT", path + second.id) is None
    assert cluster.owners(topic) == [second]
    assert topic in second.broker.topics.loaded()
    assert await cluster.rest(second, "PUT", path + "nobody:1") == 412
    assert await cluster.rest(second, "PUT", f"{NAMESPACE}/t/unload") is None
    assert cluster.owners(topic) == []


async def test_a_namespace_is_unloaded_on_every_broker(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    for number, node in enumerate(nodes):
        await served(node, f"t{number}")
    await until(lambda: len(nodes[0].placement.owners()) == 2)
    path = "/admin/v2/namespaces/public/default/unload"
    assert await cluster.rest(nodes[0], "PUT", path) is None
    assert not any(node.placement.owned for node in nodes)


async def test_any_broker_tells_of_all_brokers(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    await served(nodes[0], "t")
    await until(lambda: len(nodes[1].placement.owners()) == 1)
    for node in nodes:
        live = await cluster.rest(node, "GET", "/admin/v2/brokers/standalone")
        assert live == sorted(each.id for each in nodes)
        leader = await cluster.rest(node, "GET", "/admin/v2/brokers/leaderBroker")
        assert leader == {"brokerId": nodes[0].id, "serviceUrl": nodes[0].placement.web_url}
        owned = f"/admin/v2/brokers/standalone/{nodes[0].id}/ownedNamespaces"
        spaces = await cluster.rest(node, "GET", owned)
        assert isinstance(spaces, dict)
        assert list(spaces) == ["public/default/0x00000000_0xffffffff"]
        report = await cluster.rest(node, "GET", "/admin/v2/broker-stats/load-report")
        assert isinstance(report, dict)
        assert report["pulsarServiceUrl"] == node.placement.broker_url
    assert await cluster.rest(nodes[0], "GET", "/admin/v2/brokers/x/none:1/ownedNamespaces") == 404


async def test_metrics_tell_what_is_owned_and_what_happened(cluster: Cluster) -> None:
    node = await cluster.add()
    await served(node, "t")
    async with cluster.http.get(f"{node.placement.web_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    labels = f'{{broker="{node.id}",cluster="standalone"}}'
    assert f"pulsar_lb_owned_count{labels} 1.0" in lines
    assert f"pulsar_lb_acquired_total{labels} 1.0" in lines
    assert f"pulsar_lb_leader{labels} 1.0" in lines


async def test_topic_list_watch_reports_topics_created_on_other_brokers(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    client = await first.client()
    watch = pb.CommandWatchTopicList(
        watcher_id=7, namespace="public/default", topics_pattern="persistent://public/default/.*"
    )
    answer = await client.request(Kind.WATCH_TOPIC_LIST, watch)
    assert list(answer.watch_topic_list_success.topic) == []
    producer = await served(second, "made")
    update = await client.wait(client.events.get())
    assert list(update.watch_topic_update.new_topics) == ["persistent://public/default/made"]
    await producer.close()
    assert await cluster.rest(first, "DELETE", f"{NAMESPACE}/made") is None
    update = await client.wait(client.events.get())
    assert list(update.watch_topic_update.deleted_topics) == ["persistent://public/default/made"]
    assert await cluster.rest(second, "PUT", f"{NAMESPACE}/p/partitions", 2) is None
    update = await client.wait(client.events.get())
    assert len(update.watch_topic_update.new_topics) == 2
    close = pb.CommandWatchTopicListClose(watcher_id=7)
    await client.request(Kind.WATCH_TOPIC_LIST_CLOSE, close)
    await until(lambda: not first.broker.topics._lists._followed)


async def test_a_policy_set_on_one_broker_holds_on_the_other(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    await served(second, "t")
    path = "/admin/v2/namespaces/public/default/deduplication"
    assert await cluster.rest(first, "POST", path, True) is None
    topic = second.broker.topics.loaded()["persistent://public/default/t"]
    await until(lambda: topic.deduplicates)


async def test_the_segments_of_a_topic_are_offloaded_wherever_they_are(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings = {"offload_url": f"file://{tmp_path}/copies", "offload_deletion_lag_s": -1}
    first, second = [await cluster.add(**settings) for _ in range(2)]
    topic = "/admin/v2/scalable/public/default/s"
    assert await cluster.rest(first, "PUT", f"{topic}?numInitialSegments=4") is None
    names = [f"segment://public/default/s/{n:04x}-{n + 0x3FFF:04x}-{n >> 14}" for n in STARTS]
    for name in names:
        await cluster.rest(first, "GET", name.replace("segment://", "/admin/v2/segments/"))
        (owner,) = cluster.owners(name)
        producer = await (await owner.client()).create_producer(name)
        await producer.send(b"x")
        await producer.close()
    assert {node.id for name in names for node in cluster.owners(name)} == {first.id, second.id}
    for number in range(4):
        assert await cluster.rest(second, "POST", f"{topic}/split/{number}") is None

    assert await cluster.rest(first, "PUT", f"{topic}/offload") == list(range(12))
    await until(lambda: not (first.broker.offloads.running or second.broker.offloads.running))
    for node in (first, second):
        dropped = await cluster.rest(node, "POST", f"{topic}/offload/dropHot")
        assert isinstance(dropped, dict)
        assert [len(dropped[str(n)]) for n in range(4)] == [int(node is first)] * 4
        told = await cluster.rest(node, "GET", f"{topic}/offload/manifest")
        assert isinstance(told, dict)
        for n in range(4):
            (ledger,) = told["segments"][str(n)]["ledgers"]
            assert ledger["bookkeeperDeleted"]
    assert await cluster.rest(first, "PUT", f"{topic}/offload?url=file:///x") == 412


async def test_statistics_of_partitions_that_nobody_owns_are_read_from_the_stores(
    cluster: Cluster,
) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    topic = f"{NAMESPACE}/p"
    assert await cluster.rest(nodes[0], "PUT", f"{topic}/partitions", 3) is None
    for index, node in enumerate(nodes):
        producer = await served(node, f"p-partition-{index}")
        path = f"{topic}-partition-{index}/subscription/s"
        assert await cluster.rest(node, "PUT", path, "earliest") is None
        await producer.send(b"x")
        await producer.close()
    assert await cluster.rest(nodes[0], "PUT", f"{topic}-partition-0/unload") is None
    await until(lambda: all(len(node.placement.owners()) == 1 for node in nodes))
    for node in nodes:
        found = await cluster.rest(node, "GET", f"{topic}/partitioned-stats")
        assert isinstance(found, dict)
        assert found["subscriptions"]["s"]["msgBacklog"] == 2
        owners = [one.get("ownerBroker") for one in found["partitions"].values()]
        assert owners == [None, nodes[1].id, None]
    assert all(len(node.placement.owners()) == 1 for node in nodes)
