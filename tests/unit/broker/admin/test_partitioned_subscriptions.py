"""Subscriptions of a partitioned topic over REST: every partition is asked."""

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest

PERSISTENT = "/admin/v2/persistent/public/default"
TOPIC = f"{PERSISTENT}/p"
NAME = "persistent://public/default/p"
EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
LATEST = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1, "partitionIndex": -1}


@pytest.fixture(autouse=True)
async def made(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}/partitions", 3)


async def written(rest: Rest, messages: int) -> RawClient:
    """So many messages in each partition."""
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    for index in range(3):
        producer = await client.create_producer(f"{NAME}-partition-{index}")
        for _ in range(messages):
            await producer.send(b"x")
    return client


async def backlogs(rest: Rest, subscription: str) -> list[object]:
    """Of each partition, then of the topic."""
    found = await rest.get(f"{TOPIC}/partitioned-stats")
    assert isinstance(found, dict)
    each = [*found["partitions"].values(), found]
    return [one["subscriptions"][subscription]["msgBacklog"] for one in each]


async def test_a_subscription_is_made_listed_and_deleted_on_every_partition(rest: Rest) -> None:
    assert await rest.get(f"{TOPIC}/subscriptions") == []
    await rest.done("PUT", f"{TOPIC}/subscription/a b%2Fc", EARLIEST)
    await rest.done("PUT", f"{TOPIC}/subscription/latest", LATEST)
    await rest.done("PUT", f"{TOPIC}/subscription/bare")
    wanted = ["a b/c", "bare", "latest"]
    assert await rest.get(f"{TOPIC}/subscriptions") == wanted
    for index in range(3):
        assert await rest.get(f"{TOPIC}-partition-{index}/subscriptions") == wanted
    await rest.refused(409, "PUT", f"{TOPIC}/subscription/bare")
    await rest.done("DELETE", f"{TOPIC}/subscription/a b%2Fc")
    await rest.refused(404, "DELETE", f"{TOPIC}/subscription/a b%2Fc")
    assert await rest.get(f"{TOPIC}/subscriptions") == ["bare", "latest"]


async def test_subscription_of_some_partitions_is_completed_and_deleted(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}-partition-1/subscription/s")
    assert await rest.get(f"{TOPIC}/subscriptions") == ["s"]
    await rest.done("POST", f"{TOPIC}/subscription/s/skip_all")
    await rest.done("PUT", f"{TOPIC}/subscription/s")
    assert await rest.get(f"{TOPIC}-partition-2/subscriptions") == ["s"]
    await rest.done("DELETE", f"{TOPIC}-partition-0/subscription/s")
    await rest.done("DELETE", f"{TOPIC}/subscription/s")
    assert await rest.get(f"{TOPIC}/subscriptions") == []


async def test_its_backlog_is_skipped_and_read_again(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}/subscription/s", EARLIEST)
    client = await written(rest, 2)
    assert await backlogs(rest, "s") == [2, 2, 2, 6]
    await rest.done("POST", f"{TOPIC}/subscription/s/skip_all")
    assert await backlogs(rest, "s") == [0, 0, 0, 0]
    await rest.done("POST", f"{TOPIC}/subscription/s/resetcursor/0")
    assert await backlogs(rest, "s") == [2, 2, 2, 6]
    for tail in ("skip_all", "resetcursor/0"):
        await rest.refused(404, "POST", f"{TOPIC}/subscription/none/{tail}")
    await client.close()


async def test_a_message_id_is_of_one_partition(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}/subscription/s")
    some = {"ledgerId": 1, "entryId": 0, "partitionIndex": -1}
    for path, method in (("s/resetcursor", "POST"), ("t", "PUT")):
        reason = await rest.refused(405, method, f"{TOPIC}/subscription/{path}", some)
        assert "partition" in reason
    assert await rest.get(f"{TOPIC}/subscriptions") == ["s"]


async def test_with_a_consumer_on_one_partition_none_is_deleted(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}/subscription/s")
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    await client.subscribe(f"{NAME}-partition-2", "s", options, permits=1)
    await rest.refused(412, "DELETE", f"{TOPIC}/subscription/s")
    assert await rest.get(f"{TOPIC}-partition-0/subscriptions") == ["s"]
    await rest.done("DELETE", f"{TOPIC}/subscription/s?force=true")
    assert await rest.get(f"{TOPIC}/subscriptions") == []
    await client.close()


async def test_statistics_are_those_of_all_partitions(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}/subscription/s", EARLIEST)
    client = await written(rest, 2)
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumer = await client.subscribe(f"{NAME}-partition-1", "s", options, permits=1)
    await consumer.receive()
    found = await rest.get(f"{TOPIC}/partitioned-stats")
    assert isinstance(found, dict)
    assert found["metadata"] == {"partitions": 3, "deleted": False}
    assert (found["msgInCounter"], found["msgOutCounter"]) == (6, 1)
    size = sum(one["storageSize"] for one in found["partitions"].values())
    assert found["storageSize"] == size > 0
    assert sum(one["msgInCounter"] for one in found["publishers"]) == 6
    subscription = found["subscriptions"]["s"]
    assert (subscription["type"], subscription["unackedMessages"]) == ("Shared", 1)
    assert len(subscription["consumers"]) == 1
    found = await rest.get(f"{TOPIC}/partitioned-stats?perPartition=false")
    assert isinstance(found, dict)
    assert (found["partitions"], found["msgInCounter"]) == ({}, 6)
    await client.close()


@pytest.mark.parametrize(
    ("start", "backlog"), [("earliest", 6), ("latest", 0), ({}, 0), (EARLIEST, 6), (LATEST, 0)]
)
async def test_new_subscription_starts_at_the_given_position(
    rest: Rest, start: object, backlog: int
) -> None:
    client = await written(rest, 2)
    await rest.done("PUT", f"{TOPIC}/subscription/s", start)
    assert (await backlogs(rest, "s"))[-1] == backlog
    await rest.done("POST", f"{TOPIC}-partition-0/subscription/s/resetcursor", "earliest")
    assert (await backlogs(rest, "s"))[0] == 2
    await client.close()


async def test_properties_of_a_subscription_are_read_back(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}/subscription/s", {**EARLIEST, "properties": {"team": "a"}})
    stats = await rest.get(f"{TOPIC}-partition-1/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["s"]["subscriptionProperties"] == {"team": "a"}
    stats = await rest.get(f"{TOPIC}/partitioned-stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["s"]["subscriptionProperties"] == {"team": "a"}
    await rest.refused(400, "PUT", f"{TOPIC}/subscription/t", {"properties": {"team": 1}})


async def test_properties_are_replaced_on_every_partition(rest: Rest) -> None:
    path = f"{TOPIC}/subscription/s/properties"
    await rest.refused(404, "GET", path)
    await rest.refused(404, "PUT", path, {"a": "b"})
    await rest.done("PUT", f"{TOPIC}/subscription/s", {**EARLIEST, "properties": {"team": "a"}})
    assert await rest.get(path) == {"team": "a"}
    await rest.done("PUT", path, {"owner": "b"})
    assert await rest.get(path) == {"owner": "b"}
    assert await rest.get(f"{TOPIC}-partition-2/subscription/s/properties") == {"owner": "b"}
    await rest.done("PUT", f"{TOPIC}-partition-1/subscription/s/properties", {"only": "here"})
    assert await rest.get(path) == {"owner": "b", "only": "here"}
    await rest.done("PUT", path, {})
    assert await rest.get(path) == {}
    assert "send {}" in await rest.refused(400, "PUT", path)
    await rest.refused(400, "PUT", path, {"number": 1})


async def test_a_property_that_would_mark_a_subscription_replicated_is_refused(rest: Rest) -> None:
    reserved = {"pulsar.replicated.subscription": "1"}
    path = f"{TOPIC}/subscription/s"
    refused = await rest.refused(400, "PUT", path, {**EARLIEST, "properties": reserved})
    assert "is the broker's" in refused
    await rest.done("PUT", path, EARLIEST)
    assert "is the broker's" in await rest.refused(400, "PUT", f"{path}/properties", reserved)
    assert await rest.get(f"{path}/properties") == {}


async def test_properties_outlive_the_load_of_the_topic(rest: Rest) -> None:
    path = f"{TOPIC}-partition-0/subscription/s/properties"
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    given = pb.CommandSubscribe(subscription_properties=[pb.KeyValue(key="team", value="a")])
    await client.subscribe(f"{NAME}-partition-0", "s", given)
    assert await rest.get(path) == {"team": "a"}
    await rest.done("PUT", path, {"team": "b"})
    await rest.done("PUT", f"{TOPIC}-partition-0/unload")
    assert await rest.get(path) == {"team": "b"}
    stats = await rest.get(f"{TOPIC}-partition-0/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["s"]["subscriptionProperties"] == {"team": "b"}
    await client.close()


async def test_a_reader_has_no_properties(rest: Rest) -> None:
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    await client.subscribe(f"{NAME}-partition-0", "r", pb.CommandSubscribe(durable=False))
    path = f"{TOPIC}-partition-0/subscription/r/properties"
    assert "not durable" in await rest.refused(405, "PUT", path, {"a": "b"})
    await client.close()


async def test_invalid_subscription_request_is_refused(rest: Rest) -> None:
    await rest.refused(400, "PUT", f"{TOPIC}/subscription/s", "middle")
    await rest.refused(400, "PUT", f"{TOPIC}/subscription/s", 7)
    assert await rest.get(f"{TOPIC}/subscriptions") == []


async def test_it_is_noted_whether_a_subscription_is_to_be_replicated(rest: Rest) -> None:
    path = f"{TOPIC}/subscription/s/replicatedSubscriptionStatus"
    await rest.done("PUT", f"{TOPIC}/subscription/s?replicated=true", LATEST)
    partitions = await rest.get(path)
    assert isinstance(partitions, dict)
    assert len(partitions) > 1
    assert all(partitions.values())
    await rest.done("POST", f"{TOPIC}/partitions", len(partitions) + 1)
    names = [f"persistent://public/default/p-partition-{n}" for n in range(len(partitions) + 1)]
    assert await rest.get(path) == dict.fromkeys(names, True)
    await rest.done("POST", path, False)
    assert not any((await rest.get(path)).values())  # type: ignore[attr-defined]
    assert "true or false" in await rest.refused(412, "POST", path, "yes")
    await rest.refused(404, "GET", f"{TOPIC}/subscription/none/replicatedSubscriptionStatus")


async def test_new_partitions_have_the_subscriptions_of_the_old(rest: Rest) -> None:
    await rest.done("PUT", f"{TOPIC}/subscription/s", {**LATEST, "properties": {"team": "a"}})
    await rest.done("PUT", f"{TOPIC}-partition-1/subscription/one")
    await rest.done("POST", f"{TOPIC}/partitions", 5)
    for index in (3, 4):
        stats = await rest.get(f"{TOPIC}-partition-{index}/stats")
        assert isinstance(stats, dict)
        held = stats["subscriptions"]
        assert list(held) == ["s"]
        assert held["s"]["subscriptionProperties"] == {"team": "a"}
