"""Markers that replicators bring are stored, and no client gets them."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.raw_replicator import BY_POSITION, RawReplicator
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import Rest, asking_broker
from tests.unit.broker.topics.reads import Reads, wire
from tests.unit.broker.topics.test_replicators import marker

TOPIC = "persistent://public/default/t"
PATH = "/admin/v2/persistent/public/default/t"
MARKER_RECEIPT = 2**63
SUBSCRIBE = pb.CommandSubscribe
TYPES = [SUBSCRIBE.Exclusive, SUBSCRIBE.Failover, SUBSCRIBE.Shared, SUBSCRIBE.Key_Shared]


@pytest.fixture
async def rest(broker: Broker) -> AsyncIterator[Rest]:
    async with asking_broker(broker) as rest:
        yield rest


async def publish(client: RawClient) -> None:
    """Store a marker before, between and behind two messages."""
    replicator = await RawReplicator.open(client, TOPIC)

    async def mark() -> None:
        metadata, send = marker(replicator, 10)
        # A key, so that compaction would keep it if it were a message.
        metadata.partition_key = "marker"
        assert await replicator.send(metadata, MARKER_RECEIPT, send=send)

    await mark()
    for entry in range(2):
        metadata = replicator.metadata(f"1:{entry}")
        metadata.partition_key = f"k{entry}"
        source = Position(1, entry)
        assert await replicator.send(metadata, source, payload=b"%d" % entry)
        await mark()
    await replicator.producer.close()


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    client = await RawClient.open("127.0.0.1", broker.port, BY_POSITION)
    yield client
    await client.close()


@pytest.mark.parametrize("kind", TYPES, ids=SUBSCRIBE.SubType.Name)
async def test_no_consumer_gets_markers_and_the_backlog_ends(
    broker: Broker, client: RawClient, rest: Rest, kind: SUBSCRIBE.SubType
) -> None:
    options = SUBSCRIBE(sub_type=kind)
    consumer = await client.subscribe(TOPIC, "s", options)
    await publish(client)
    stats = await rest.get(f"{PATH}/stats")
    assert isinstance(stats, dict)
    # Entries, as in Apache Pulsar.
    assert stats["subscriptions"]["s"]["msgBacklog"] == 5
    _, analysis = await rest.call("POST", f"{PATH}/subscription/s/analyzeBacklog")
    assert isinstance(analysis, dict)
    assert (analysis["entries"], analysis["markerMessages"]) == (5, 3)
    consumer.flow(10)
    for entry in range(2):
        delivered = await consumer.receive()
        assert delivered.payload == b"%d" % entry
        consumer.ack(delivered.message_id)
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    cursor = topic.subscriptions["s"].cursor
    # The markers count as acknowledged, so nothing keeps their ledger.
    await until(lambda: cursor.mark_delete == topic.ledger.last_confirmed)
    await client.ping()
    assert consumer.messages.empty()


async def test_no_reader_gets_markers_or_waits_for_one(client: RawClient) -> None:
    await publish(client)
    reader = await client.subscribe(
        TOPIC, "r", SUBSCRIBE(durable=False, start_message_id=wire(EARLIEST)), permits=10
    )
    received = [await reader.receive() for _ in range(2)]
    assert [each.payload for each in received] == [b"0", b"1"]
    last = (await reader.last_message_id()).last_message_id
    newest = received[-1].message_id
    assert (last.ledger_id, last.entry_id) == (newest.ledger_id, newest.entry_id)
    await client.ping()
    assert reader.messages.empty()


async def test_bulk_reads_leave_markers_out(client: RawClient) -> None:
    await publish(client)
    reads = Reads(client)
    assert (await reads.plan()).messages == 2
    assert [each.payload for each in await reads.read_all(EARLIEST, LATEST)] == [b"0", b"1"]


async def test_compaction_drops_markers(client: RawClient, rest: Rest) -> None:
    await publish(client)
    await rest.done("PUT", f"{PATH}/compaction")

    async def is_done() -> bool:
        return (await rest.call("GET", f"{PATH}/compaction"))[1] == {
            "status": "SUCCESS",
            "lastError": "",
        }

    while not await is_done():
        await client.ping()
    asked = SUBSCRIBE(read_compacted=True, durable=False, start_message_id=wire(EARLIEST))
    reader = await client.subscribe(TOPIC, "r", asked, permits=10)
    assert [(await reader.receive()).payload for _ in range(2)] == [b"0", b"1"]
    await client.ping()
    assert reader.messages.empty()


async def test_peeked_markers_say_what_they_are(client: RawClient, rest: Rest) -> None:
    # Apache Pulsar's admin library leaves them out by this header, unless it is asked for them.
    await client.subscribe(TOPIC, "s")
    await publish(client)
    kinds: list[str | None] = []
    async with aiohttp.ClientSession(rest.base) as session:
        for number in range(1, 6):
            async with session.get(f"{PATH}/subscription/s/position/{number}") as answer:
                kinds.append(answer.headers.get("X-Pulsar-marker-type"))
    assert kinds == ["10", None, "10", None, "10"]


async def test_markers_outlast_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port, BY_POSITION)
        await client.subscribe(TOPIC, "s")
        await publish(client)
        await broker.drain()
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port, BY_POSITION)
        consumer = await client.subscribe(TOPIC, "s", permits=10)
        assert [(await consumer.receive()).payload for _ in range(2)] == [b"0", b"1"]
