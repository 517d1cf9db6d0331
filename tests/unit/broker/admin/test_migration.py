"""Migration of an ordinary topic over REST, and requests for the old topic afterwards."""

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.admin.conftest import Rest

SCALABLE = "/admin/v2/scalable/public/default/x"
PERSISTENT = "/admin/v2/persistent/public/default/x"
SCHEMA = "/admin/v2/schemas/public/default/x/schema"
EARLIEST = {"ledgerId": -1, "entryId": -1}


async def make_ordinary(rest: Rest, partitions: int) -> None:
    if partitions:
        await rest.done("PUT", f"{PERSISTENT}/partitions", {"partitions": partitions})
    else:
        await rest.done("PUT", PERSISTENT)
    await rest.done("PUT", f"{PERSISTENT}/subscription/s", EARLIEST)


async def client_of(rest: Rest) -> RawClient:
    return await RawClient.open("127.0.0.1", rest.binary_port)


async def test_a_topic_is_migrated_and_its_layout_names_the_partitions(rest: Rest) -> None:
    assert "does not exist" in await rest.refused(404, "POST", f"{SCALABLE}/migrate")
    await make_ordinary(rest, 2)
    assert "partition" in await rest.refused(412, "POST", f"{SCALABLE}-partition-0/migrate")
    await rest.done("POST", f"{SCALABLE}/migrate")
    layout = await rest.get(SCALABLE)
    assert isinstance(layout, dict)
    assert (layout["epoch"], layout["nextSegmentId"]) == (1, 4)
    old, new = layout["segments"]["1"], layout["segments"]["3"]
    assert old["legacyTopicName"] == "persistent://public/default/x-partition-1"
    assert (old["state"], old["hashRange"]) == ("SEALED", {"start": 0, "end": 65535})
    assert (new["state"], new["parentIds"]) == ("ACTIVE", [0, 1])
    assert "already" in await rest.refused(409, "POST", f"{SCALABLE}/migrate?force=true")
    stats = await rest.get(f"{SCALABLE}/stats")
    assert isinstance(stats, dict)
    assert stats["segments"]["1"]["name"] == old["legacyTopicName"]


async def test_v4_clients_are_named_in_the_refusal(rest: Rest) -> None:
    await make_ordinary(rest, 0)
    client = await client_of(rest)
    name = "persistent://public/default/x"
    producer = await client.create_producer(name, pb.CommandProducer(producer_name="old"))
    assert "producer 'old'" in await rest.refused(409, "POST", f"{SCALABLE}/migrate")
    await rest.done("POST", f"{SCALABLE}/migrate?force=true")
    closed = await client.wait(producer.events.get(), 10)
    assert closed.type == pb.BaseCommand.CLOSE_PRODUCER
    with pytest.raises(BrokerError) as refused:
        await client.create_producer(name)
    assert refused.value.code == pb.TopicTerminatedError
    await client.close()


@pytest.mark.parametrize("partitions", [0, 2])
async def test_old_partitions_are_changed_with_the_scalable_topic_alone(
    rest: Rest, partitions: int
) -> None:
    await make_ordinary(rest, partitions)
    await rest.done("POST", f"{SCALABLE}/migrate")
    for method, path in (
        [("DELETE", f"{PERSISTENT}/partitions"), ("DELETE", f"{PERSISTENT}-partition-1")]
        if partitions
        else [("DELETE", f"{PERSISTENT}?force=true")]
    ):
        assert "topic://public/default/x" in await rest.refused(409, method, path)
    if partitions:
        await rest.refused(409, "POST", f"{PERSISTENT}/partitions", 3)


@pytest.mark.parametrize("partitions", [0, 2])
async def test_deletion_forgets_grants_and_schemas(rest: Rest, partitions: int) -> None:
    await make_ordinary(rest, partitions)
    await rest.done("POST", f"{PERSISTENT}/permissions/alice", ["consume"])
    schema = {"type": "STRING", "schema": "", "properties": {}}
    status, answer = await rest.call("POST", SCHEMA, schema)
    assert status == 200, answer
    await rest.done("POST", f"{SCALABLE}/migrate")
    assert await rest.get(f"{SCALABLE}/permissions") == {"alice": ["consume"]}
    assert (await rest.call("GET", SCHEMA))[0] == 200
    await rest.done("DELETE", SCALABLE)
    assert await rest.get("/admin/v2/persistent/public/default") == []
    assert (await rest.call("GET", SCHEMA))[0] == 404
    await make_ordinary(rest, partitions)
    assert await rest.get(f"{PERSISTENT}/permissions") == {}


@pytest.mark.parametrize("partitions", [0, 2])
async def test_namespace_of_a_migrated_topic_is_deleted(rest: Rest, partitions: int) -> None:
    namespace = "/admin/v2/namespaces/public/moved"
    topic = "/admin/v2/persistent/public/moved/x"
    await rest.done("PUT", namespace, {})
    if partitions:
        await rest.done("PUT", f"{topic}/partitions", partitions)
    else:
        await rest.done("PUT", topic)
    await rest.done("POST", "/admin/v2/scalable/public/moved/x/migrate")
    await rest.done("DELETE", f"{namespace}?force=true")
    await rest.done("PUT", namespace, {})
    assert await rest.get("/admin/v2/persistent/public/moved") == []
    assert await rest.get("/admin/v2/persistent/public/moved/partitioned") == []
    assert await rest.get("/admin/v2/scalable/public/moved") == []
