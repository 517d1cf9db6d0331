"""Partitioned topics over REST, in the forms that the admin clients of Pulsar send."""

import json
from pathlib import Path

import pytest

from config.bounds import MAX_PROPERTIES_BYTES
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.admin.conftest import Rest, asking_broker

PERSISTENT = "/admin/v2/persistent/public/default"
JSON = "application/json"
METADATA = "application/vnd.partitioned-topic-metadata+json"


@pytest.mark.parametrize(
    ("text", "content_type"),
    [
        ("2", JSON),
        ('"2"', JSON),
        ('{"properties":null,"partitions":2}', METADATA),
        ('{"partitions":2,"deleted":false,"properties":{}}', METADATA),
    ],
)
async def test_a_number_of_partitions_comes_in_two_forms(
    rest: Rest, text: str, content_type: str
) -> None:
    path = f"{PERSISTENT}/p/partitions"
    assert await rest.send("PUT", path, text, content_type) == (204, "")
    assert await rest.get(path) == {"partitions": 2, "deleted": False}


async def test_partitions_are_added_by_a_number_or_its_text(rest: Rest) -> None:
    path = f"{PERSISTENT}/p/partitions"
    wanted = {"properties": {"team": "a"}, "partitions": 1}
    assert await rest.send("PUT", path, json.dumps(wanted), METADATA) == (204, "")
    assert await rest.send("POST", path, '"2"', JSON) == (204, "")
    assert await rest.send("POST", path, "3", JSON) == (204, "")
    kept = {"partitions": 3, "deleted": False, "properties": {"team": "a"}}
    assert await rest.get(path) == kept
    assert "only when" in await rest.refused(406, "POST", path, {"partitions": 4})


async def test_partitions_are_created_without_being_loaded(tmp_path: Path) -> None:
    """So that many of them take no memory until they are used."""
    names = [f"persistent://public/default/p-partition-{number}" for number in range(3)]
    changes: list[tuple[str, bool]] = []
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        broker.topics.on_change(lambda name, exists: changes.append((str(name), exists)))
        await rest.done("PUT", f"{PERSISTENT}/p/partitions", 2)
        assert dict(broker.topics.loaded()) == {}
        assert dict(broker.managed_ledgers.loaded()) == {}
        await rest.done("POST", f"{PERSISTENT}/p/partitions", 3)
        # The first one is asked for the subscriptions that new ones get.
        assert list(broker.topics.loaded()) == names[:1]
        assert await rest.get(PERSISTENT) == names
        assert sorted(changes) == [(name, True) for name in names]
        await rest.done("DELETE", f"{PERSISTENT}/p/partitions")
        assert await rest.get(PERSISTENT) == []


@pytest.mark.parametrize(
    "wanted",
    [
        {"partitions": 2, "replicas": 3},
        {"partitions": 2, "deleted": True},
        {"partitions": 2, "properties": {"team": 1}},
        {"partitions": 2, "properties": ["team"]},
        {"partitions": 2, "properties": {"magnetar.trimmed": "1:1"}},
        {"partitions": "two"},
        {"properties": {"team": "a"}},
        {"partitions": True},
        {"partitions": 0},
        2.5,
        True,
        "",
        None,
    ],
)
async def test_partition_metadata_that_cannot_be_kept_is_refused(
    rest: Rest, wanted: object
) -> None:
    text = json.dumps(wanted)
    status, answer = await rest.send("PUT", f"{PERSISTENT}/p/partitions", text, METADATA)
    assert status in (400, 406)
    assert json.loads(answer)["reason"].endswith(".")
    assert await rest.get(f"{PERSISTENT}/partitioned") == []


async def test_properties_of_a_partitioned_topic(rest: Rest) -> None:
    path = f"{PERSISTENT}/p/partitions"
    wanted = {"properties": {"team": "a"}, "partitions": 2}
    assert await rest.send("PUT", path, json.dumps(wanted), METADATA) == (204, "")
    await keeps_properties(rest, "p")
    assert await rest.get(path) == {
        "partitions": 2,
        "deleted": False,
        "properties": {"tier": "gold"},
    }
    assert await rest.get(f"{PERSISTENT}/p-partition-0/properties") == {}


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
async def test_partition_of_a_deleted_topic_is_not_made_by_clients_that_come_back(
    rest: Rest, client: RawClient, domain: str
) -> None:
    topics = f"/admin/v2/{domain}/public/default"
    partition = f"{domain}://public/default/p-partition-0"
    policy = {"allowAutoTopicCreation": True, "topicType": "non-partitioned"}
    await rest.done("POST", "/admin/v2/namespaces/public/default/autoTopicCreation", policy)
    await rest.done("PUT", f"{topics}/p/partitions", 2)
    await client.create_producer(partition)
    await client.subscribe(partition, "s")
    await rest.done("DELETE", f"{topics}/p/partitions?force=true")
    with pytest.raises(BrokerError, match="named as a partition") as refused:
        await client.create_producer(partition)
    assert refused.value.code == pb.NotAllowedError
    with pytest.raises(BrokerError, match="named as a partition"):
        await client.subscribe(partition, "s")
    assert await rest.get(topics) == []
    await rest.done("PUT", f"{topics}/p/partitions", 1)
    await client.create_producer(partition)


async def test_users_neither_see_nor_set_the_property_of_the_topic_epoch(
    rest: Rest, client: RawClient
) -> None:
    topic, epoch = f"{PERSISTENT}/x", "pulsar.topic.epoch"
    await rest.done("PUT", topic)
    exclusive = pb.CommandProducer(producer_access_mode=pb.Exclusive)
    await client.create_producer("persistent://public/default/x", exclusive)
    assert await rest.get(f"{topic}/properties") == {}
    assert epoch in await rest.refused(400, "PUT", f"{topic}/properties", {epoch: "9"})
    await rest.refused(412, "DELETE", f"{topic}/properties?key={epoch}")
    stats = await rest.get(f"{topic}/stats")
    assert isinstance(stats, dict)
    assert stats["topicEpoch"] == 0


async def test_properties_of_a_topic_without_partitions(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x", {"team": "a"})
    await keeps_properties(rest, "x")
    await rest.done("PUT", f"{PERSISTENT}/x/unload")
    assert await rest.get(f"{PERSISTENT}/x/properties") == {"tier": "gold"}
    await rest.refused(400, "PUT", f"{PERSISTENT}/y", {"team": 1})
    await rest.refused(400, "PUT", f"{PERSISTENT}/y", 3)
    await rest.refused(404, "GET", f"{PERSISTENT}/y/properties")
    most = MAX_PROPERTIES_BYTES - len(json.dumps({"k": ""}))
    await rest.refused(413, "PUT", f"{PERSISTENT}/y", {"k": "v" * (most + 1)})
    await rest.done("PUT", f"{PERSISTENT}/y", {"k": "v" * most})


async def keeps_properties(rest: Rest, topic: str) -> None:
    """Of a topic that was made with team=a: read, changed, taken away."""
    path = f"{PERSISTENT}/{topic}/properties"
    assert await rest.get(path) == {"team": "a"}
    await rest.done("PUT", path, {"tier": "gold"})
    assert await rest.get(path) == {"team": "a", "tier": "gold"}
    await rest.done("DELETE", f"{path}?key=team")
    assert await rest.get(path) == {"tier": "gold"}
    await rest.refused(400, "PUT", path, {"tier": None})
    await rest.refused(400, "PUT", path, {"magnetar.trimmed": "1:1"})
    await rest.refused(412, "DELETE", path)
    assert await rest.get(path) == {"tier": "gold"}


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
async def test_only_partitions_of_a_topic_are_named_as_partitions(rest: Rest, domain: str) -> None:
    base = f"/admin/v2/{domain}/public/default"
    for name in ("x-partition-0", "x-partition-y"):
        reason = await rest.refused(412, "PUT", f"{base}/{name}/partitions", 2)
        assert "'-partition-'" in reason
    assert "has 0 of them" in await rest.refused(412, "PUT", f"{base}/x-partition-0")
    await rest.done("PUT", f"{base}/p/partitions", 2)
    assert "has 2 of them" in await rest.refused(412, "PUT", f"{base}/p-partition-2")
    await rest.done("PUT", f"{base}/x-partition-y")


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
async def test_a_request_for_the_other_kind_of_topic_names_the_right_one(
    rest: Rest, domain: str
) -> None:
    base = f"/admin/v2/{domain}/public/default"
    await rest.done("PUT", f"{base}/p/partitions", 2)
    await rest.done("PUT", f"{base}/x")
    assert "delete-partitioned-topic" in await rest.refused(409, "DELETE", f"{base}/p")
    assert "without /partitions" in await rest.refused(409, "DELETE", f"{base}/x/partitions")
    for name in ("x", "none"):
        reason = await rest.refused(409, "POST", f"{base}/{name}/partitions", 3)
        assert "not partitioned" in reason
    if domain == "persistent":
        await rest.refused(404, "DELETE", f"{base}/none")
    else:
        await rest.done("DELETE", f"{base}/none")
    await rest.refused(404, "DELETE", f"{base}/none/partitions")
