"""Operations of Pulsar's admin library that no other test shows, as the library sends them."""

from typing import cast

import pytest

from broker.policies.policy_kinds import OF_NAMESPACES
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.admin.conftest import Rest

NAMESPACE = "/admin/v2/namespaces/public/default"
PERSISTENT = "/admin/v2/persistent/public/default"
VALUES: dict[str, object] = {
    "retention": {"retentionTimeInMinutes": 1, "retentionSizeInMB": 2},
    "deduplication": True,
    "autoSubscriptionCreation": {"allowAutoSubscriptionCreation": False},
    "compactionThreshold": 1_000_000,
    "maxProducersPerTopic": 1,
    "maxConsumersPerTopic": 2,
    "maxConsumersPerSubscription": 3,
    "maxSubscriptionsPerTopic": 4,
    "maxUnackedMessagesPerConsumer": 5,
    "maxUnackedMessagesPerSubscription": 6,
    "subscriptionTypesEnabled": ["Shared"],
    "messageTTL": 60,
    "subscriptionExpirationTime": 30,
    "schemaCompatibilityStrategy": "BACKWARD",
}
"""Policies that a namespace and its topics have."""


@pytest.mark.parametrize("name", VALUES)
async def test_a_policy_of_a_namespace_is_in_force_for_its_topics(rest: Rest, name: str) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    path, of_topic = f"{NAMESPACE}/{name}", f"{PERSISTENT}/x/{OF_NAMESPACES[name].topic_path}"
    assert await rest.call("GET", path) == (204, "")
    before = await rest.call("GET", f"{of_topic}?applied=true")
    await rest.done("POST", path, VALUES[name])
    assert await rest.get(path) == VALUES[name]
    assert await rest.get(f"{of_topic}?applied=true") == VALUES[name]
    await rest.done("DELETE", path)
    assert await rest.call("GET", path) == (204, "")
    assert await rest.call("GET", f"{of_topic}?applied=true") == before


async def test_automatic_creation_of_topics_is_shown_and_removed(rest: Rest) -> None:
    path, policy = f"{NAMESPACE}/autoTopicCreation", {"allowAutoTopicCreation": False}
    await rest.done("POST", path, policy)
    assert await rest.get(path) == policy
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    with pytest.raises(BrokerError) as caught:
        await client.create_producer("persistent://public/default/x")
    assert caught.value.code == pb.TopicNotFound
    await rest.done("DELETE", path)
    assert await rest.call("GET", path) == (204, "")
    await client.close()


async def test_the_switch_of_v4_transactions_is_set_shown_and_removed(rest: Rest) -> None:
    path = f"{NAMESPACE}/transactionCoordinatorEnabled"
    assert await rest.call("GET", path) == (204, "")
    await rest.done("POST", path, False)
    assert await rest.get(path) is False
    status, answer = await rest.call("POST", path, "off")
    assert (status, "true or false" in str(answer)) == (412, True)
    await rest.done("DELETE", path)
    assert await rest.call("GET", path) == (204, "")


async def test_the_lag_of_deletions_after_offloading_is_shown_and_removed(rest: Rest) -> None:
    path = f"{NAMESPACE}/offloadDeletionLagMs"
    await rest.done("PUT", path, 1000)
    assert await rest.get(path) == 1000
    await rest.done("DELETE", path)
    assert await rest.call("GET", path) == (204, "")


async def test_a_terminated_topic_takes_no_messages(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    producer = await client.create_producer("persistent://public/default/x")
    await producer.send(b"x")
    status, last = await rest.call("POST", f"{PERSISTENT}/x/terminate")
    assert (status, cast("dict[str, int]", last)["entryId"]) == (200, 0)
    with pytest.raises(BrokerError) as caught:
        await client.create_producer("persistent://public/default/x")
    assert caught.value.code == pb.TopicTerminatedError
    await client.close()


async def test_versions_of_a_schema_are_listed_and_found(rest: Rest) -> None:
    path = "/admin/v2/schemas/public/default/x"
    text = {"type": "STRING", "schema": "", "properties": {}}
    await rest.done("PUT", f"{NAMESPACE}/schemaCompatibilityStrategy", "ALWAYS_COMPATIBLE")
    for version, each in enumerate((text, {**text, "type": "INT32"})):
        made = await rest.call("POST", f"{path}/schema", each)
        assert made == (200, {"version": {"version": version}})
    listed = cast("dict[str, list[dict[str, object]]]", await rest.get(f"{path}/schemas"))
    assert [each["type"] for each in listed["getSchemaResponses"]] == ["STRING", "INT32"]
    found = cast("dict[str, object]", await rest.get(f"{path}/schema/0"))
    assert found["type"] == "STRING"
    assert await rest.call("POST", f"{path}/version", text) == (200, {"version": 0})


async def test_the_cluster_and_the_settings_of_a_broker_are_shown(rest: Rest) -> None:
    cluster = cast("dict[str, object]", await rest.get("/admin/v2/clusters/standalone"))
    assert cluster["brokerServiceUrl"] == f"pulsar://127.0.0.1:{rest.binary_port}"
    settings = await rest.get("/admin/v2/brokers/configuration/runtime")
    assert cast("dict[str, str]", settings)["cluster_name"] == "standalone"


async def test_each_partition_is_looked_up(rest: Rest) -> None:
    """The library asks for the number of partitions, and then for each."""
    await rest.done("PUT", f"{PERSISTENT}/p/partitions", 2)
    count = cast("dict[str, int]", await rest.get(f"{PERSISTENT}/p/partitions"))["partitions"]
    for index in range(count):
        path = f"/lookup/v2/topic/persistent/public/default/p-partition-{index}"
        found = cast("dict[str, str]", await rest.get(path))
        assert found["brokerUrl"] == f"pulsar://127.0.0.1:{rest.binary_port}"
