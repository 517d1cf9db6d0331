"""Another cluster that sends and answers what it should not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from broker.replication.errors import RemoteRefused
from broker.topics.subscription_markers import MARKER_RECEIPT, MARKER_TYPES
from config.bounds import REMOTE_FRAME_BYTES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from magnetar.wire.connection import Connection
from magnetar.wire.pool import ConnectionPool
from tests.support.bounds import set_bound
from tests.support.raw_client import RawClient
from tests.support.raw_replicator import BY_POSITION, RawReplicator
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import TOPIC, Cluster
from tests.unit.magnetar.wire.fake_broker import Peer, serving

Pair = tuple[Cluster, Cluster]
TOPICS = 4
OTHER = parse_topic_name("persistent://public/default/other")


@asynccontextmanager
async def endless_answers() -> AsyncIterator[int]:
    """A port where each request over HTTP gets an error whose body does not end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 409 Conflict\r\nContent-Length: 1000000000000\r\n\r\n")
            writer.write(b"x" * 100_000)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_of_an_answer_without_an_end_the_beginning_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REMOTE_REQUEST_S", 5)
    east, west = pair
    async with endless_answers() as port:
        record = west.record | {"serviceUrl": f"http://127.0.0.1:{port}"}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        remote = east.broker.replications.cluster("west")
        with pytest.raises(RemoteRefused, match="3 partitions here and 0 in cluster 'west'"):
            await remote.require_partitions(OTHER, 3)


async def test_a_frame_of_another_cluster_is_refused_before_it_takes_memory(pair: Pair) -> None:
    east, west = pair

    def greet(peer: Peer, received: pb.BaseCommand) -> None:
        assert peer.transport is not None
        if received.type == pb.BaseCommand.CONNECT:
            peer.say(pb.BaseCommand.CONNECTED, server_version="x", max_message_size=2**30)
        else:
            peer.transport.write((REMOTE_FRAME_BYTES + 1).to_bytes(4, "big"))

    async with serving(greet, greet) as hostile:
        record = west.record | {"brokerServiceUrl": hostile.url}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        await east.publish(b"0")
        await until(
            lambda: any(
                "is announced" in (each.failure or "") for each in east.replicators().values()
            )
        )
        await east.ask("POST", "/admin/v2/clusters/west", west.record)
        await until(east.is_done)


def attach_and_read_no_more(peer: Peer, received: pb.BaseCommand) -> None:
    """Answer what a replicator asks before it sends, and read nothing that it sends."""
    kind = pb.BaseCommand
    if received.type == kind.PARTITIONED_METADATA:
        number = received.partitioned_metadata.request_id
        done = pb.CommandPartitionedTopicMetadataResponse.Success
        peer.say(kind.PARTITIONED_METADATA_RESPONSE, request_id=number, partitions=0, response=done)
    elif received.type == kind.LOOKUP:
        peer.say(
            kind.LOOKUP_RESPONSE,
            request_id=received.lookup.request_id,
            broker_service_url=peer.broker.url,
            response=pb.CommandLookupTopicResponse.Connect,
        )
    elif received.type == kind.PRODUCER:
        number = received.producer.request_id
        peer.say(kind.PRODUCER_SUCCESS, request_id=number, producer_name="r")
        attached = sum(each.type == kind.PRODUCER for each in peer.received)
        if attached == TOPICS and peer.transport is not None:
            peer.transport.pause_reading()


def waits_for_its_socket(cluster: Cluster, topic: str) -> bool:
    """Whether the replicator of a topic to west has something to send, and cannot."""
    replicator = cluster.replicators(topic).get("west")
    connection = None if replicator is None else replicator.producer.connection
    return connection is not None and not connection.writable


async def test_topics_of_a_cluster_that_does_not_read_hold_bounded_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATION_READ_AHEAD_BYTES", 2_000_000)
    east, west = pair
    topics = [f"persistent://public/default/t{number}" for number in range(TOPICS)]
    async with serving(attach_and_read_no_more) as silent:
        away = west.record | {"brokerServiceUrl": "pulsar://127.0.0.1:1"}
        await east.ask("POST", "/admin/v2/clusters/west", away)
        for topic in topics:
            await east.publish(*(b"x" * 100_000 for _ in range(60)), topic=topic)
        record = west.record | {"brokerServiceUrl": silent.url}
        await east.ask("POST", "/admin/v2/clusters/west", record)
        await until(lambda: all(waits_for_its_socket(east, topic) for topic in topics))
        await asyncio.sleep(0)
        waiting = [east.replicators(topic)["west"] for topic in topics]
        held = [
            sum(len(entry.data) for entry in each._reader.buffer)  # noqa: SLF001
            for each in waiting
        ]
        assert 0 < sum(held) <= 2_000_000
        assert east.broker.replications.cluster("west").read_ahead.held_bytes == sum(held)
        await east.ask("POST", "/admin/v2/clusters/west", west.record)
        for topic in topics:
            await until(partial(east.is_done, topic))
            assert len(await west.payloads(60, topic)) == 60
    assert east.broker.replications.cluster("west").read_ahead.held_bytes == 0


@pytest.mark.parametrize("step", ["find", "attach"])
async def test_replicator_goes_on_after_an_error_that_nobody_expected(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    east, west = pair
    await west.messages(0)
    failures = iter([OSError("no such device"), UnicodeError("no host"), KeyError(1)])

    of_topic, request = ConnectionPool.of_topic, Connection.request

    async def find(pool: ConnectionPool, topic: str) -> Connection:
        for error in failures if step == "find" else ():
            raise error
        return await of_topic(pool, topic)

    async def ask(connection: Connection, command: pb.BaseCommand) -> pb.BaseCommand:
        for error in failures if step == "attach" and command.HasField("producer") else ():
            raise error
        return await request(connection, command)

    monkeypatch.setattr(ConnectionPool, "of_topic", find)
    monkeypatch.setattr(Connection, "request", ask)
    await east.publish(b"0")
    await until(east.is_done)
    assert next(failures, None) is None
    assert await west.payloads(1) == [b"0"]


@pytest.mark.parametrize("kind", MARKER_TYPES)
async def test_a_marker_with_text_that_is_not_utf_8_stops_nothing(pair: Pair, kind: int) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"before")
    client = await RawClient.open("127.0.0.1", east.broker.port, BY_POSITION)
    replicator = await RawReplicator.open(client, TOPIC, "west", epoch=100)
    metadata = replicator.metadata(None, "pulsar.marker")
    metadata.marker_type = kind
    name = pb.ClusterMessageId(
        cluster="?", message_id=pb.MarkersMessageIdData(ledger_id=1, entry_id=1)
    )
    payload = {
        10: pb.ReplicatedSubscriptionsSnapshotRequest(snapshot_id="?", source_cluster="west"),
        11: pb.ReplicatedSubscriptionsSnapshotResponse(snapshot_id="?", cluster=name),
        12: pb.ReplicatedSubscriptionsSnapshot(
            snapshot_id="?", local_message_id=name.message_id, clusters=[name]
        ),
        13: pb.ReplicatedSubscriptionsUpdate(subscription_name="?", clusters=[name]),
    }[kind].SerializeToString()
    await replicator.send(
        metadata,
        MARKER_RECEIPT,
        send=pb.CommandSend(marker=True),
        payload=payload.replace(b"?", b"\xff"),
    )
    await client.close()
    await east.publish(b"behind")
    await until(east.is_done)
    assert await west.payloads(2) == [b"before", b"behind"]
