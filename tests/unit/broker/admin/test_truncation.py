"""`DELETE .../truncate`: every subscription goes to the end, and what is stored is deleted."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import from_wire
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest, asking
from tests.unit.broker.admin.test_compaction import ended

PERSISTENT = "/admin/v2/persistent/public/default"
TOPIC = f"{PERSISTENT}/t"
NAME = "persistent://public/default/t"
KEPT = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Rest]:
    """A broker whose ledgers have ten entries."""
    async with asking(tmp_path, auto_topic_creation=False, ledger_max_entries=10) as rest:
        yield rest


@pytest.fixture
async def client(small: Rest) -> AsyncIterator[RawClient]:
    await small.done("PUT", TOPIC)
    client = await RawClient.open("127.0.0.1", small.binary_port)
    yield client
    await client.close()


async def stats(rest: Rest, topic: str = TOPIC) -> dict[str, object]:
    found = await rest.get(f"{topic}/stats")
    assert isinstance(found, dict)
    return found


async def backlogs(rest: Rest) -> dict[str, int]:
    subscriptions = (await stats(rest))["subscriptions"]
    assert isinstance(subscriptions, dict)
    return {name: one["msgBacklog"] for name, one in subscriptions.items()}


async def test_truncation_deletes_ledgers_that_retention_keeps(
    small: Rest, client: RawClient
) -> None:
    await small.done("POST", f"{TOPIC}/retention", KEPT)
    for name in ("a", "b"):
        await small.done("PUT", f"{TOPIC}/subscription/{name}", "earliest")
    producer = await client.create_producer(NAME)
    for _ in range(25):
        await producer.send(b"before")
    assert await backlogs(small) == {"a": 25, "b": 25}
    await small.done("DELETE", f"{TOPIC}/truncate")
    assert await backlogs(small) == {"a": 0, "b": 0}
    assert (await stats(small))["storageSize"] == 0
    assert "is empty" in await small.refused(412, "GET", f"{TOPIC}/examinemessage")
    consumer = await client.subscribe(NAME, "a", permits=5)
    last = (await consumer.last_message_id()).last_message_id
    assert from_wire(last.entry_id) == -1
    sent = await producer.send(b"after")
    assert sent.message_id.entry_id == 0
    assert (await consumer.receive()).payload == b"after"
    await small.done("DELETE", f"{TOPIC}/truncate")
    assert await backlogs(small) == {"a": 0, "b": 0}


async def test_a_connected_consumer_comes_back_to_what_is_new(
    small: Rest, client: RawClient
) -> None:
    consumer = await client.subscribe(NAME, "s", permits=1)
    producer = await client.create_producer(NAME)
    for _ in range(3):
        await producer.send(b"before")
    await consumer.receive()
    await small.done("DELETE", f"{TOPIC}/truncate")
    again = await client.subscribe(NAME, "s", permits=9)
    await producer.send(b"after")
    assert (await again.receive()).payload == b"after"


async def test_truncation_deletes_the_compacted_ledger(small: Rest, client: RawClient) -> None:
    producer = await client.create_producer(NAME)
    for _ in range(3):
        await producer.send(b"x", metadata=pb.MessageMetadata(partition_key="k"))
    await small.done("PUT", f"{TOPIC}/compaction")
    await ended(small, "t")
    await small.done("DELETE", f"{TOPIC}/truncate")
    ledgers = await small.get(f"{TOPIC}/internalStats")
    assert isinstance(ledgers, dict)
    assert ledgers["compactedLedger"]["ledgerId"] == -1
    assert await backlogs(small) == {}
    await producer.send(b"y", metadata=pb.MessageMetadata(partition_key="k"))
    await small.done("PUT", f"{TOPIC}/compaction")
    await ended(small, "t")
    ledgers = await small.get(f"{TOPIC}/internalStats")
    assert isinstance(ledgers, dict)
    assert ledgers["compactedLedger"]["entries"] == 1


async def test_each_partition_is_truncated(small: Rest, client: RawClient) -> None:
    await small.done("PUT", f"{PERSISTENT}/p/partitions", 2)
    await small.done("PUT", f"{PERSISTENT}/p/subscription/s")
    for index in range(2):
        producer = await client.create_producer(f"persistent://public/default/p-partition-{index}")
        await producer.send(b"x")
    await small.done("DELETE", f"{PERSISTENT}/p/truncate")
    found = await small.get(f"{PERSISTENT}/p/partitioned-stats")
    assert isinstance(found, dict)
    assert (found["subscriptions"]["s"]["msgBacklog"], found["storageSize"]) == (0, 0)


async def test_a_topic_that_is_not_there_or_a_segment_is_not_truncated(
    small: Rest, client: RawClient
) -> None:
    assert "no topic" in await small.refused(404, "DELETE", f"{PERSISTENT}/none/truncate")
    scalable = "/admin/v2/scalable/public/default/t"
    await small.done("POST", f"{scalable}/migrate")
    assert "change the scalable topic" in await small.refused(409, "DELETE", f"{TOPIC}/truncate")
