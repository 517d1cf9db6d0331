"""No broker creates more topics in a namespace than its policy allows, and none lists them all."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.scalable.topic_store import ScalableTopicExists
from broker.topics.topic_counts import TooManyTopics, TopicCount
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import NamespaceName, parse_topic_name
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import ledger_key
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import Rest
from tests.unit.broker.placement.cluster import Cluster

NAMESPACE = NamespaceName("public", "default")
LIMIT = "/admin/v2/namespaces/public/default/maxTopicsPerNamespace"
TOPICS = "/admin/v2/persistent/public/default"
SCALABLE = "/admin/v2/scalable/public/default"
TOPIC = "persistent://public/default"


def test_a_partition_counts_once_whether_it_is_stored_or_not() -> None:
    count = TopicCount()
    count.set_partitions("p", 3)
    assert count.total == 3
    for index in range(2):
        count.set_topic(parse_topic_name(f"{TOPIC}/p-partition-{index}"), exists=True)
    assert count.total == 3
    count.set_partitions("p", 0)
    assert count.total == 2
    count.set_topic(parse_topic_name(f"{TOPIC}/p-partition-0"), exists=False)
    count.set_topic(parse_topic_name(f"{TOPIC}/p-partition-1"), exists=False)
    count.set_topic(parse_topic_name(f"{TOPIC}/p-partition-1"), exists=False)
    assert count.total == 0


def test_an_event_that_comes_twice_counts_once() -> None:
    count = TopicCount()
    for _ in range(2):
        count.set_topic(parse_topic_name(f"{TOPIC}/x"), exists=True)
        count.set_scalable("x", exists=True)
    assert count.total == 2
    for _ in range(2):
        count.set_scalable("x", exists=False)
    assert count.total == 1


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path, max_topics_per_namespace=2) as broker:
        yield broker


async def refused(client: RawClient, topic: str) -> None:
    with pytest.raises(BrokerError, match="the maximum is") as caught:
        await client.create_producer(topic)
    assert caught.value.code == pb.NotAllowedError


async def test_topics_above_the_maximum_are_refused_until_one_is_deleted(
    rest: Rest, client: RawClient
) -> None:
    await rest.done("PUT", f"{TOPICS}/a")
    await client.create_producer(f"{TOPIC}/b")
    reason = await rest.refused(412, "PUT", f"{TOPICS}/c")
    assert "the maximum is 2" in reason
    assert "maxTopicsPerNamespace" in reason
    await refused(client, f"{TOPIC}/c")
    # Topics that exist are opened as before.
    await client.create_producer(f"{TOPIC}/a")
    await rest.done("DELETE", f"{TOPICS}/a?force=true")
    await rest.done("PUT", f"{TOPICS}/c")
    await refused(client, f"{TOPIC}/a")


async def test_the_policy_of_a_namespace_comes_before_the_setting(rest: Rest) -> None:
    assert await rest.get(f"{LIMIT}?applied=true") == 2
    await rest.done("POST", LIMIT, 1)
    await rest.done("PUT", f"{TOPICS}/a")
    await rest.refused(412, "PUT", f"{TOPICS}/b")
    await rest.done("POST", LIMIT, 0)
    for name in "bcde":
        await rest.done("PUT", f"{TOPICS}/{name}")
    await rest.done("DELETE", LIMIT)
    assert await rest.get(LIMIT) == 0
    await rest.refused(412, "PUT", f"{TOPICS}/f")
    await rest.refused(412, "POST", LIMIT, -2)


async def test_each_partition_counts_from_the_creation_of_its_topic(
    rest: Rest, client: RawClient
) -> None:
    await rest.done("POST", LIMIT, 5)
    await rest.done("PUT", f"{TOPICS}/p/partitions", 2)
    await rest.refused(412, "PUT", f"{TOPICS}/q/partitions", 4)
    await rest.refused(412, "POST", f"{TOPICS}/p/partitions", 6)
    await rest.done("POST", f"{TOPICS}/p/partitions", 5)
    await client.create_producer(f"{TOPIC}/p-partition-4")
    await refused(client, f"{TOPIC}/x")
    await rest.done("DELETE", f"{TOPICS}/p/partitions?force=true")
    await rest.done("PUT", f"{TOPICS}/q/partitions", 5)


async def test_partitions_of_automatically_created_topics_count(
    rest: Rest, client: RawClient
) -> None:
    await rest.done("POST", LIMIT, 3)
    policy = {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 2,
    }
    await rest.done("POST", "/admin/v2/namespaces/public/default/autoTopicCreation", policy)
    query = "?checkAllowAutoCreation=true"
    assert await rest.get(f"{TOPICS}/p/partitions{query}") == {"partitions": 2, "deleted": False}
    await rest.refused(412, "GET", f"{TOPICS}/q/partitions{query}")


async def test_a_scalable_topic_counts_once_and_is_split_at_the_maximum(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPICS}/a")
    await rest.done("PUT", f"{SCALABLE}/s?numInitialSegments=4")
    await rest.refused(412, "PUT", f"{SCALABLE}/t")
    await rest.done("POST", f"{SCALABLE}/s/split/0")
    await rest.done("DELETE", f"{SCALABLE}/s?force=true")
    await rest.done("PUT", f"{SCALABLE}/t")


async def test_topics_that_store_nothing_do_not_count(rest: Rest, client: RawClient) -> None:
    for number in range(4):
        await client.create_producer(f"non-persistent://public/default/n{number}")
    await rest.done("PUT", f"{TOPICS}/a")
    await rest.done("PUT", f"{TOPICS}/b")
    await client.create_producer("non-persistent://public/default/n4")


async def test_topics_created_at_once_do_not_exceed_the_maximum(broker: Broker) -> None:
    names = [parse_topic_name(f"{TOPIC}/t{number}") for number in range(8)]
    made = await asyncio.gather(
        *(broker.topics.get(name, create=True) for name in names), return_exceptions=True
    )
    assert sum(isinstance(each, TooManyTopics) for each in made) == 6
    assert len(await broker.topics.list_names(NAMESPACE)) == 2


async def test_clients_that_create_the_same_topic_at_once_share_its_places(
    broker: Broker, rest: Rest
) -> None:
    await rest.done("POST", LIMIT, 3)
    policy = {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 2,
    }
    await rest.done("POST", "/admin/v2/namespaces/public/default/autoTopicCreation", policy)
    name = parse_topic_name(f"{TOPIC}/p")
    created = [broker.topics.partitions_of(name, create=True) for _ in range(5)]
    assert await asyncio.gather(*created) == [2] * 5
    scalable = parse_topic_name("topic://public/default/s")
    made = await asyncio.gather(
        *(broker.scalable.create(scalable, segments=1, properties={}) for _ in range(5)),
        return_exceptions=True,
    )
    assert [type(each) for each in made if each is not None] == [ScalableTopicExists] * 4
    assert broker.topic_counts.known(NAMESPACE) == 3


async def test_a_read_that_failed_leaves_no_changes_to_a_later_one(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [parse_topic_name(f"{TOPIC}/{each}") for each in "abcd"]
    for name in names[:2]:
        await broker.topics.create(name)
    set_bound(monkeypatch, "TOPIC_COUNT_REREAD_S", 0.0)
    children, failed = broker.metadata.children, False

    async def failing_once(key: str) -> list[str]:
        nonlocal failed
        if not failed:
            failed = True
            await broker.topics.delete(names[0], force=True)
            raise MetadataError("The store is away.")
        return await children(key)

    monkeypatch.setattr(broker.metadata, "children", failing_once)
    with pytest.raises(MetadataError):
        await broker.topics.create(names[2])
    await broker.topics.create(names[0])
    with pytest.raises(TooManyTopics):
        await broker.topics.create(names[3])


async def test_a_namespace_whose_maximum_goes_while_it_is_read_is_not_followed(
    broker: Broker, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    children, changed = broker.metadata.children, False

    async def changing_policies(key: str) -> list[str]:
        nonlocal changed
        if not changed:
            changed = True
            await rest.done("POST", LIMIT, 0)
        return await children(key)

    monkeypatch.setattr(broker.metadata, "children", changing_policies)
    await broker.topics.create(parse_topic_name(f"{TOPIC}/a"))
    assert changed
    assert broker.topic_counts.known(NAMESPACE) is None
    assert not [each for each in asyncio.all_tasks() if each.get_name() == "counted_topics"]


async def test_the_names_are_listed_once_however_many_topics_are_created(
    broker: Broker, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rest.done("POST", LIMIT, 100)
    listed: list[str] = []
    children = broker.metadata.children

    async def counted(key: str) -> list[str]:
        listed.append(key)
        return await children(key)

    monkeypatch.setattr(broker.metadata, "children", counted)
    for number in range(5):
        await rest.done("PUT", f"{TOPICS}/t{number}")
    assert listed.count(ledger_key(f"{NAMESPACE}/persistent")) == 1


async def test_a_failed_creation_leaves_its_place_to_another(broker: Broker) -> None:
    counts = broker.topic_counts
    for name in "ab":
        with pytest.raises(RuntimeError):
            async with counts.room(parse_topic_name(f"{TOPIC}/{name}")):
                raise RuntimeError
    await broker.topics.create(parse_topic_name(f"{TOPIC}/a"))
    await broker.topics.create(parse_topic_name(f"{TOPIC}/b"))


async def test_a_topic_whose_properties_are_not_stored_stays_open_nowhere(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = parse_topic_name(f"{TOPIC}/a")

    async def fails(ledger: ManagedLedger, changes: object) -> None:
        raise MetadataError("The store is away.")

    with monkeypatch.context() as patch:
        patch.setattr(ManagedLedger, "set_properties", fails)
        with pytest.raises(MetadataError):
            await broker.topics.create(name, {"a": "1"})
    # Another broker may own it next: what is open here would be out of date.
    assert name.ledger_path not in broker.managed_ledgers.loaded()
    await until(lambda: broker.topic_counts.known(NAMESPACE) == 1)
    await broker.topics.delete(name, force=False)
    assert broker.topic_counts.known(NAMESPACE) == 0


async def test_each_broker_hears_of_the_topics_of_the_others(cluster: Cluster) -> None:
    nodes = [await cluster.add(max_topics_per_namespace=2) for _ in range(2)]
    counts = [node.broker.topic_counts for node in nodes]
    # Any broker creates a scalable topic, the owner an ordinary one.
    assert await cluster.rest(nodes[0], "PUT", f"{SCALABLE}/a") is None
    assert await cluster.rest(nodes[1], "PUT", f"{SCALABLE}/s") is None
    await until(lambda: all(each.known(NAMESPACE) == 2 for each in counts))
    for node in nodes:
        assert await cluster.rest(node, "PUT", f"{TOPICS}/b") == 412
    assert await cluster.rest(nodes[1], "DELETE", f"{SCALABLE}/a?force=true") is None
    # A refusal is confirmed by the stored names: no event has to come before.
    assert await cluster.rest(nodes[0], "PUT", f"{TOPICS}/b/partitions", 1) is None


async def test_a_namespace_without_a_maximum_is_not_followed(broker: Broker, rest: Rest) -> None:
    await rest.done("PUT", f"{TOPICS}/a")
    assert broker.topic_counts.known(NAMESPACE) == 1
    await rest.done("POST", LIMIT, 0)
    await rest.done("PUT", f"{TOPICS}/b")
    await rest.done("PUT", f"{TOPICS}/c")
    assert broker.topic_counts.known(NAMESPACE) is None
