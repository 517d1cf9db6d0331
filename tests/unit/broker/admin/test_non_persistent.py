"""`/admin/v2/non-persistent/...`, and how such topics are listed and looked up."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.admin.conftest import Rest, asking_broker

BASE = "/admin/v2/non-persistent/public/default"
TOPIC = "non-persistent://public/default/t"
NAMESPACE = "/admin/v2/namespaces/public/default"
Mode = pb.CommandGetTopicsOfNamespace


@pytest.fixture
async def creating(broker: Broker) -> AsyncIterator[Rest]:
    async with asking_broker(broker) as rest:
        yield rest


@pytest.fixture
async def client(creating: Rest) -> AsyncIterator[RawClient]:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    yield client
    await client.close()


async def listed(client: RawClient, mode: pb.CommandGetTopicsOfNamespace.Mode) -> list[str]:
    command = pb.CommandGetTopicsOfNamespace(namespace="public/default", mode=mode)
    answer = await client.request(pb.BaseCommand.GET_TOPICS_OF_NAMESPACE, command)
    return list(answer.get_topics_of_namespace_response.topics)


async def test_topic_is_created_listed_and_deleted(creating: Rest, client: RawClient) -> None:
    await creating.done("PUT", f"{BASE}/t")
    await creating.refused(409, "PUT", f"{BASE}/t")
    await creating.done("PUT", "/admin/v2/persistent/public/default/stored")
    stored = "persistent://public/default/stored"
    assert await creating.get(BASE) == [TOPIC]
    for name, mode, wanted in (
        ("PERSISTENT", Mode.PERSISTENT, [stored]),
        ("NON_PERSISTENT", Mode.NON_PERSISTENT, [TOPIC]),
        ("ALL", Mode.ALL, [TOPIC, stored]),
    ):
        found = await creating.get(f"{NAMESPACE}/topics?mode={name}")
        assert isinstance(found, list)
        assert sorted(found) == wanted
        assert await listed(client, mode) == wanted
    await client.create_producer(TOPIC)
    assert "producers" in await creating.refused(412, "DELETE", f"{BASE}/t")
    await creating.done("DELETE", f"{BASE}/t?force=true")
    assert await creating.get(BASE) == []
    await creating.refused(404, "GET", f"{BASE}/t/stats")
    await creating.refused(404, "GET", "/admin/v2/non-persistent/public/none")


async def test_namespace_with_such_topics_is_deleted_by_force(creating: Rest) -> None:
    await creating.done("PUT", "/admin/v2/namespaces/public/other")
    other = "/admin/v2/non-persistent/public/other"
    await creating.done("PUT", f"{other}/t")
    await creating.done("PUT", f"{other}/p/partitions", 2)
    await creating.refused(409, "DELETE", "/admin/v2/namespaces/public/other")
    await creating.done("DELETE", "/admin/v2/namespaces/public/other?force=true")
    await creating.refused(404, "GET", other)


async def test_statistics_count_what_was_delivered_and_dropped(
    creating: Rest, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s", permits=3)
    producer = await client.create_producer(TOPIC)
    for _ in range(10):
        await producer.send(b"x")
    await client.ping()
    assert consumer.messages.qsize() == 3
    stats = await creating.get(f"{BASE}/t/stats")
    assert isinstance(stats, dict)
    assert (stats["msgInCounter"], stats["msgOutCounter"]) == (10, 3)
    assert stats["msgDropRate"] == 0
    assert stats["msgRateIn"] > stats["msgRateOut"] > 0
    (publisher,) = stats["publishers"]
    assert (publisher["msgInCounter"], publisher["msgDropRate"]) == (10, 0)
    subscription = stats["subscriptions"]["s"]
    assert subscription["type"] == "Exclusive"
    assert subscription["msgOutCounter"] == 3
    assert subscription["msgDropRate"] == pytest.approx(7 / 3 * subscription["msgRateOut"])
    assert len(subscription["consumers"]) == 1
    without = await creating.get(f"{BASE}/t/stats?excludePublishers=true&excludeConsumers=true")
    assert isinstance(without, dict)
    assert without["publishers"] == without["subscriptions"]["s"]["consumers"] == []
    internal = await creating.get(f"{BASE}/t/internalStats")
    assert internal == {"entriesAddedCounter": 10, "ledgers": [], "cursors": {"s": {}}}


async def test_metrics_have_the_topic_and_the_drops_of_its_subscription(
    creating: Rest, client: RawClient
) -> None:
    await client.subscribe(TOPIC, "s")
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    _, page = await creating.call("GET", "/metrics")
    assert isinstance(page, str)
    lines = page.splitlines()
    assert any(line.startswith("pulsar_in_messages_total{") and TOPIC in line for line in lines)
    (drops,) = [line for line in lines if line.startswith("pulsar_subscription_msg_drop_rate{")]
    assert TOPIC in drops
    assert float(drops.split()[-1]) > 0


async def test_subscriptions_are_listed_and_deleted(creating: Rest, client: RawClient) -> None:
    consumer = await client.subscribe(TOPIC, "s")
    assert await creating.get(f"{BASE}/t/subscriptions") == ["s"]
    await creating.refused(412, "DELETE", f"{BASE}/t/subscription/s")
    await consumer.close()
    await creating.done("DELETE", f"{BASE}/t/subscription/s")
    assert await creating.get(f"{BASE}/t/subscriptions") == []
    await creating.refused(404, "DELETE", f"{BASE}/t/subscription/s")


async def test_partitioned_topic_is_stored_listed_grown_and_deleted(
    creating: Rest, client: RawClient
) -> None:
    await creating.done("PUT", f"{BASE}/p/partitions", 2)
    await creating.refused(409, "PUT", f"{BASE}/p/partitions", 2)
    whole = "non-persistent://public/default/p"
    assert await creating.get(f"{BASE}/partitioned") == [whole]
    assert await creating.get("/admin/v2/persistent/public/default/partitioned") == []
    assert await listed(client, Mode.NON_PERSISTENT) == [
        f"{whole}-partition-0",
        f"{whole}-partition-1",
    ]
    command = pb.CommandPartitionedTopicMetadata(topic=whole)
    answer = await client.request(pb.BaseCommand.PARTITIONED_METADATA, command)
    assert answer.partitioned_metadata_response.partitions == 2
    with pytest.raises(BrokerError, match="is partitioned") as refused:
        await client.create_producer(whole)
    assert refused.value.code == pb.NotAllowedError
    with pytest.raises(BrokerError, match="has 2 partitions"):
        await client.create_producer(f"{whole}-partition-2")
    consumer = await client.subscribe(f"{whole}-partition-1", "s", permits=10)
    producer = await client.create_producer(f"{whole}-partition-1")
    await producer.send(b"x")
    assert (await consumer.receive()).message_id.partition == 1
    stats = await creating.get(f"{BASE}/p/partitioned-stats")
    assert isinstance(stats, dict)
    assert (stats["msgInCounter"], stats["msgDropRate"]) == (1, 0)
    assert stats["metadata"]["partitions"] == 2
    await creating.done("POST", f"{BASE}/p/partitions", 3)
    assert (await creating.get(f"{BASE}/p/partitions")) == {"partitions": 3, "deleted": False}
    await creating.refused(412, "DELETE", f"{BASE}/p/partitions")
    await creating.done("PUT", f"{BASE}/p/unload")
    assert (await client.wait(consumer.events.get())).type == pb.BaseCommand.CLOSE_CONSUMER
    await creating.done("DELETE", f"{BASE}/p/partitions?force=true")
    assert await creating.get(BASE) == []


async def test_partitioned_topics_of_both_domains_are_apart(creating: Rest) -> None:
    await creating.done("PUT", f"{BASE}/p/partitions", 2)
    await creating.done("PUT", "/admin/v2/persistent/public/default/p/partitions", 3)
    assert await creating.get(f"{BASE}/p/partitions") == {"partitions": 2, "deleted": False}
    await creating.done("DELETE", f"{BASE}/p/partitions")
    persistent = "/admin/v2/persistent/public/default/p/partitions"
    assert await creating.get(persistent) == {"partitions": 3, "deleted": False}


async def test_missing_topic_is_partitioned_by_the_policy_of_its_namespace(
    creating: Rest, client: RawClient
) -> None:
    policy = {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 3,
    }
    await creating.done("POST", f"{NAMESPACE}/autoTopicCreation", policy)
    command = pb.CommandPartitionedTopicMetadata(topic=TOPIC, metadata_auto_creation_enabled=True)
    answer = await client.request(pb.BaseCommand.PARTITIONED_METADATA, command)
    assert answer.partitioned_metadata_response.partitions == 3


async def test_topic_is_not_created_where_the_policy_forbids_it(
    creating: Rest, client: RawClient
) -> None:
    policy = {"allowAutoTopicCreation": False}
    await creating.done("POST", f"{NAMESPACE}/autoTopicCreation", policy)
    with pytest.raises(BrokerError) as refused:
        await client.create_producer(TOPIC)
    assert refused.value.code == pb.TopicNotFound
    await creating.done("PUT", f"{BASE}/t")
    await client.create_producer(TOPIC)


async def test_maximums_of_the_namespace_hold(creating: Rest, client: RawClient) -> None:
    for policy in ("maxProducersPerTopic", "maxSubscriptionsPerTopic", "maxConsumersPerTopic"):
        await creating.done("POST", f"{NAMESPACE}/{policy}", 1)
    await client.create_producer(TOPIC)
    await client.subscribe(TOPIC, "s", pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared))
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    with pytest.raises(BrokerError, match="maxProducersPerTopic"):
        await client.create_producer(TOPIC)
    with pytest.raises(BrokerError, match="maxSubscriptionsPerTopic"):
        await client.subscribe(TOPIC, "other", shared)
    with pytest.raises(BrokerError, match="maxConsumersPerTopic"):
        await client.subscribe(TOPIC, "s", shared)


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [
        (400, "PUT", "subscription/s"),
        (412, "DELETE", "truncate"),
        (405, "GET", "lastMessageId"),
        (406, "POST", "terminate"),
        (405, "PUT", "compaction"),
        (405, "PUT", "offload"),
        (405, "POST", "subscription/s/skip_all"),
        (405, "POST", "subscription/s/skip/1"),
        (405, "POST", "subscription/s/analyzeBacklog"),
        (405, "PUT", "subscription/s/properties"),
        (405, "POST", "subscription/s/expireMessages/1"),
        (405, "POST", "subscription/s/resetcursor/1"),
        (405, "GET", "subscription/s/position/1"),
    ],
)
async def test_what_needs_stored_messages_is_refused_in_a_sentence(
    creating: Rest, status: int, method: str, path: str
) -> None:
    await creating.done("PUT", f"{BASE}/t")
    assert "stores nothing" in await creating.refused(status, method, f"{BASE}/t/{path}")


async def test_properties_of_a_subscription_are_those_of_its_first_consumer(
    creating: Rest, client: RawClient
) -> None:
    given = [pb.KeyValue(key="team", value="a")]
    await client.subscribe(TOPIC, "s", pb.CommandSubscribe(subscription_properties=given))
    assert await creating.get(f"{BASE}/t/subscription/s/properties") == {"team": "a"}
    await creating.refused(404, "GET", f"{BASE}/t/subscription/none/properties")


async def test_lookup_over_rest_and_the_wire_names_the_broker(
    creating: Rest, client: RawClient
) -> None:
    found = await creating.get("/lookup/v2/topic/non-persistent/public/default/t")
    assert isinstance(found, dict)
    url = f"pulsar://127.0.0.1:{creating.binary_port}"
    assert found["brokerUrl"] == url
    assert (await client.lookup(TOPIC)).broker_service_url == url


async def test_unused_topic_is_deleted_and_one_with_a_subscription_stays(
    creating: Rest, client: RawClient, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = f"{TOPIC}-kept"
    consumer = await client.subscribe(kept, "s")
    await consumer.close()
    producer = await client.create_producer(TOPIC)
    await producer.close()
    topics = broker.topics.non_persistent
    await topics.forget_unused()
    assert sorted(topics.loaded()) == [TOPIC, kept]
    later_s = asyncio.get_running_loop().time() + 61
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: later_s)
    await topics.forget_unused()
    monkeypatch.undo()
    assert list(topics.loaded()) == [kept]


async def test_topic_is_deleted_after_an_unload_with_its_schemas(
    broker: Broker, creating: Rest
) -> None:
    name = parse_topic_name(TOPIC)
    await creating.done("PUT", f"{BASE}/t")
    schemas = "/admin/v2/schemas/public/default/t/schema"
    await creating.call("POST", schemas, {"type": "STRING", "schema": ""})
    assert await broker.schemas.history(name.schema_id)
    await creating.done("PUT", f"{BASE}/t/unload")
    await creating.done("DELETE", f"{BASE}/t")
    assert not await broker.schemas.history(name.schema_id)
    await creating.done("DELETE", f"{BASE}/t")
    missing = "/admin/v2/non-persistent/public/none/t"
    assert "does not exist" in await creating.refused(404, "DELETE", missing)


async def test_schemas_go_with_the_topic_unless_a_stored_namesake_has_them(
    creating: Rest, client: RawClient, broker: Broker
) -> None:
    schema = pb.Schema(name="s", type=pb.Schema.String, schema_data=b"")
    name = parse_topic_name(TOPIC)
    for twin in (False, True):
        if twin:
            await creating.done("PUT", "/admin/v2/persistent/public/default/t")
        producer = await client.create_producer(TOPIC, pb.CommandProducer(schema=schema))
        assert producer.success.schema_version
        await producer.close()
        await creating.done("DELETE", f"{BASE}/t")
        assert bool(await broker.schemas.history(name.schema_id)) == twin
