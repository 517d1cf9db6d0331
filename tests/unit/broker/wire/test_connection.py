"""One connection: handshake, keep-alive, bounds, and what ends it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.publish_limits import PublishLimits
from broker.topics.throttled_sends import THROTTLED
from broker.wire.connection import Connection, Handler
from broker.wire.handlers.produce import send
from broker.wire.handlers.table import handler_table
from broker.wire.peer_memory import PeerMemory
from broker.wire.server import BinaryServer
from config.bounds import CONNECTION_WRITE_HIGH_WATER, MAX_MESSAGE_SIZE
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from magnetar.protocol.ids import UNSOLICITED_REQUEST_ID
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, basecommand
from tests.support.waiting import until

Kind = pb.BaseCommand
Connect = Callable[..., Awaitable[RawClient]]
LOOKUP = pb.CommandLookupTopic(topic="persistent://public/default/t", request_id=10**6)


def only(broker: Broker) -> Connection:
    (connection,) = broker.connections
    return connection


def answering(handlers: Mapping[int, Handler]) -> Mapping[int, Handler]:
    """The real table with some handlers replaced."""
    return {**handler_table(), **handlers}


async def serve(broker: Broker, handlers: Mapping[int, Handler]) -> RawClient:
    """A client of a second socket of the broker, whose commands are handled otherwise."""
    server = BinaryServer(broker, answering(handlers), send)
    server.bind("127.0.0.1", 0)
    await server.start()
    client = await RawClient.open("127.0.0.1", server.port)
    await server.stop()
    return client


async def test_the_handshake_settles_version_and_features(broker: Broker, connect: Connect) -> None:
    client = await connect(pb.CommandConnect(client_version="x", protocol_version=19))
    connected = client.connected
    assert connected.protocol_version == 19
    assert connected.max_message_size == MAX_MESSAGE_SIZE
    flags = connected.feature_flags
    assert flags.supports_scalable_topics
    assert flags.supports_topic_watchers
    assert flags.supports_get_partitioned_metadata_without_auto_creation
    assert flags.supports_tc_metadata_discovery
    assert only(broker).client_version == "x"
    newer = await connect(pb.CommandConnect(client_version="y", protocol_version=30))
    assert newer.connected.protocol_version == 21


async def test_an_empty_proxy_target_is_a_direct_connection(connect: Connect) -> None:
    client = await connect(pb.CommandConnect(client_version="x", proxy_to_broker_url=""))
    await client.ping()


async def test_this_broker_is_no_proxy(connect: Connect) -> None:
    with pytest.raises(BrokerError, match="no live broker"):
        await connect(pb.CommandConnect(client_version="x", proxy_to_broker_url="other:6650"))


async def test_this_broker_by_its_own_name_is_no_proxy(broker: Broker, connect: Connect) -> None:
    here = broker.placement.broker_url.removeprefix("pulsar://")
    client = await connect(pb.CommandConnect(client_version="x", proxy_to_broker_url=here))
    await client.ping()


async def test_command_before_connect_is_refused(broker: Broker) -> None:
    client = await RawClient.open_socket("127.0.0.1", broker.port)
    client.send(Kind.LOOKUP, LOOKUP)
    refused = await client.wait(client.events.get())
    assert refused.error.request_id == UNSOLICITED_REQUEST_ID
    await client.wait_closed()


async def test_connect_comes_once(connect: Connect) -> None:
    client = await connect()
    client.send(Kind.CONNECT, pb.CommandConnect(client_version="x"))
    await client.wait_closed()


@pytest.mark.parametrize(
    "garbage",
    [b"\x7f\xff\xff\xff\x00", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\x00\x00\x00\x05\xff\xff"],
)
async def test_garbage_ends_that_connection_alone(
    broker: Broker, connect: Connect, garbage: bytes
) -> None:
    client, other = await connect(), await connect()
    client.write(garbage + bytes(100))
    await client.wait_closed()
    await other.ping()
    await until(lambda: len(broker.connections) == 1)


async def test_request_before_garbage_is_answered(connect: Connect) -> None:
    client = await connect()
    answer = asyncio.create_task(client.lookup(LOOKUP.topic))
    await asyncio.sleep(0)
    client.write(bytes(64))
    assert (await answer).broker_service_url
    await client.wait_closed()


async def test_a_command_that_only_brokers_send_ends_the_connection(connect: Connect) -> None:
    client = await connect()
    client.send(Kind.SUCCESS, pb.CommandSuccess(request_id=1))
    await client.wait_closed()


async def test_a_fault_of_ours_is_answered_and_does_no_harm(broker: Broker) -> None:
    def breaks(connection: Connection, command: pb.BaseCommand, entry: bytes | None) -> None:
        raise KeyError("ours")

    async def breaks_later(
        connection: Connection, command: pb.BaseCommand, entry: bytes | None
    ) -> None:
        raise KeyError("ours")

    client = await serve(broker, {Kind.LOOKUP: breaks, Kind.GET_SCHEMA: breaks_later})
    for request in (client.lookup(LOOKUP.topic), schema(client)):
        with pytest.raises(BrokerError, match="its log has the cause") as refused:
            await request
        assert pb.ServerError.Name(refused.value.code) == "UnknownError"
    await client.ping()
    await client.close()


async def schema(client: RawClient) -> None:
    await client.request(Kind.GET_SCHEMA, pb.CommandGetSchema(topic=LOOKUP.topic))


async def test_requests_in_progress_have_a_bound(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "MAX_PENDING_REQUESTS", 10)
    running: list[int] = []
    go = asyncio.Event()

    async def waits(connection: Connection, command: pb.BaseCommand, entry: bytes | None) -> None:
        running.append(command.lookup.request_id)
        await go.wait()
        connection.send(
            basecommand(
                Kind.LOOKUP_RESPONSE,
                pb.CommandLookupTopicResponse(request_id=command.lookup.request_id),
            )
        )

    client = await serve(broker, {Kind.LOOKUP: waits})
    answers = [asyncio.create_task(client.lookup(LOOKUP.topic)) for _ in range(100)]
    await until(lambda: len(running) == 10)
    go.set()
    await asyncio.gather(*answers)
    assert running == sorted(running)
    assert len(running) == 100
    await client.close()


async def test_the_end_of_a_connection_cancels_its_requests(broker: Broker) -> None:
    cancelled = asyncio.Event()

    async def waits(connection: Connection, command: pb.BaseCommand, entry: bytes | None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    client = await serve(broker, {Kind.LOOKUP: waits})
    client.send(Kind.LOOKUP, LOOKUP)
    await client.ping()
    await client.close()
    await asyncio.wait_for(cancelled.wait(), 10)


async def test_a_silent_peer_is_asked_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, keep_alive_interval_s=0.05) as broker:
        client = await RawClient.open_socket("127.0.0.1", broker.port)
        pings: list[bytes] = []
        monkeypatch.setattr(client, "data_received", pings.append)
        client.transport.set_protocol(client)  # type: ignore[union-attr]
        client.send(Kind.CONNECT, pb.CommandConnect(client_version="x"))
        assert await client.wait_closed()
    assert b"".join(pings).endswith(encode_command(basecommand(Kind.PING, pb.CommandPing())))


async def test_a_peer_that_answers_stays(tmp_path: Path) -> None:
    async with running(tmp_path, keep_alive_interval_s=0.02) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        await asyncio.sleep(0.2)
        await client.ping()
        assert not client.closed.done()
        await client.close()


async def test_a_peer_whose_sends_wait_for_a_rate_hears_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own PINGs are not read, and clients give up a broker that is silent."""
    async with running(tmp_path, keep_alive_interval_s=0.02) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        pings: list[None] = []
        monkeypatch.setattr(client, "send_pong", lambda: pings.append(None))
        only(broker).pause_reading(THROTTLED)
        await until(lambda: len(pings) >= 3)
        only(broker).resume_reading(THROTTLED)
        await client.ping()
        await client.close()


async def test_a_peer_without_handshake_is_given_up(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "HANDSHAKE_TIMEOUT_S", 0.05)
    client = await RawClient.open_socket("127.0.0.1", broker.port)
    await client.wait_closed()
    await until(lambda: not broker.connections)


async def test_a_peer_that_does_not_read_is_not_read_either(broker: Broker) -> None:
    served: list[int] = []

    def answers_much(connection: Connection, command: pb.BaseCommand, entry: bytes | None) -> None:
        served.append(command.lookup.request_id)
        response = pb.CommandLookupTopicResponse(
            request_id=command.lookup.request_id, message="x" * 200_000
        )
        connection.send(basecommand(Kind.LOOKUP_RESPONSE, response))

    client = await serve(broker, {Kind.LOOKUP: answers_much})
    connection = only(broker)
    client.transport.pause_reading()  # type: ignore[union-attr]
    answers = [asyncio.create_task(client.lookup(LOOKUP.topic)) for _ in range(200)]
    await until(lambda: not connection.writable)
    stopped = len(served)
    assert stopped < 200
    queued = connection._outbox._bytes + connection._transport.get_write_buffer_size()
    assert queued < CONNECTION_WRITE_HIGH_WATER + 400_000
    client.transport.resume_reading()  # type: ignore[union-attr]
    await asyncio.gather(*answers)
    assert len(served) == 200
    await until(lambda: connection.writable)
    await client.close()


async def test_publishing_stops_reading_until_data_is_durable(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.publish_limits._connection_bytes = 20_000
    producer = await (await connect()).create_producer("persistent://public/default/t")
    connection, most = only(broker), 0
    started = PublishLimits.started

    def watched(limits: PublishLimits, publisher: Connection, size: int) -> None:
        nonlocal most
        started(limits, publisher, size)
        most = max(most, publisher.inflight_bytes)

    monkeypatch.setattr(PublishLimits, "started", watched)
    await producer.send_many([b"x" * 1000] * 500)
    assert 20_000 < most < 23_000
    await until(lambda: connection.inflight_bytes == 0)


async def test_connections_have_a_bound(tmp_path: Path) -> None:
    async with running(tmp_path, max_connections=1) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        refused = await RawClient.open_socket("127.0.0.1", broker.port)
        await refused.wait_closed()
        await client.ping()
        await client.close()


async def test_silent_connections_do_not_lock_out_a_client(tmp_path: Path) -> None:
    async with running(tmp_path, max_connections=3) as broker:
        present = await RawClient.open("127.0.0.1", broker.port)
        silent = [await RawClient.open_socket("127.0.0.1", broker.port) for _ in range(2)]
        newcomer = await RawClient.open("127.0.0.1", broker.port)
        await silent[0].wait_closed()
        for client in (present, newcomer):
            await client.ping()
            await client.close()
        assert not silent[1].closed.done()
        await silent[1].close()


async def test_connections_that_come_all_at_once_have_a_bound(tmp_path: Path) -> None:
    """All that are accepted in one turn of the loop are looked at before any of them counts."""
    async with running(tmp_path, max_connections=3) as broker, AsyncExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", broker.port)))
        client = await RawClient.open("127.0.0.1", broker.port)
        await client.ping()
        assert len(broker.connections) <= 3
        await client.close()


async def test_an_address_has_as_many_connections_as_the_setting_says(tmp_path: Path) -> None:
    async with running(tmp_path, max_connections_per_address=1) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        refused = await RawClient.open_socket("127.0.0.1", broker.port)
        await refused.wait_closed()
        await client.ping()
        await client.close()
        await client.wait_closed()
        again = await RawClient.open("127.0.0.1", broker.port)
        await again.close()


async def test_unfinished_frames_of_one_address_are_bounded_before_the_login(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as broker:
        broker.peer_memory = PeerMemory(
            2**30, 10, asyncio.get_running_loop().time, before_login_bytes=120_000
        )
        begun = [await RawClient.open_socket("127.0.0.1", broker.port) for _ in range(3)]
        for each in begun:
            each.write((60_000).to_bytes(4, "big") + bytes(50_000))
        await until(lambda: broker.peer_memory.given_up == 1)
        assert 0 < broker.peer_memory.total <= 120_000
        ended = sum(each.closed.done() for each in begun)
        assert ended <= 1
        for each in begun:
            await each.close()


async def test_connection_whose_reads_take_long_is_not_read_again_in_the_same_turn(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "TURN_S", 0)
    set_bound(monkeypatch, "SHORT_READ_S", 0)
    client = await serve(broker, {})
    (connection,) = broker.connections
    transport = connection._transport
    ping = encode_command(basecommand(Kind.PING, pb.CommandPing()))
    reads = 0
    # As libuv does it: it reads again and again, while there is more and reading is not paused.
    while transport.is_reading() and reads < 32:
        connection.data_received(ping)
        reads += 1
    assert reads == 1
    await until(transport.is_reading)
    await client.ping()
