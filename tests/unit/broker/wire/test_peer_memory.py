"""Bytes held for peers: their account, and that they go with the connection."""

import asyncio
import gc
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import structlog
import uvloop

from broker.app.service import Broker
from broker.metrics.exposition import make_broker_registry
from broker.wire.connection import Connection
from broker.wire.peer_memory import PeerMemory
from config.bounds import HANDSHAKE_FRAME_BYTES, MAX_FRAME_SIZE, PEER_PROGRESS_BYTES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient, basecommand
from tests.support.roles import SECRET_KEY, connect_as
from tests.support.security import Security
from tests.support.waiting import until
from tests.unit.broker.wire.test_connection import only, serve

Kind = pb.BaseCommand
MIB = 1024 * 1024
CONNECT = encode_command(basecommand(Kind.CONNECT, pb.CommandConnect(client_version="x")))


def partial_frame(announced: int, sent: int) -> bytes:
    """The first bytes of a SEND frame."""
    return announced.to_bytes(4, "big") + (16).to_bytes(4, "big") + bytes(sent - 8)


class Peer:
    """A `Holder` whose figures a test sets."""

    def __init__(self, held_bytes: int = 0, address_before_login: str | None = None) -> None:
        self.held_bytes = held_bytes
        self.address_before_login = address_before_login
        self.progress_bytes = 0
        self.waits_for_broker = False
        self.given_up = False

    def give_up(self) -> None:
        self.given_up = True


class Account:
    """The memory of 100 peers, with a bound of 1,000,000 bytes and a clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.memory = PeerMemory(1_000_000, 100, lambda: self.now_s, before_login_bytes=80_000)

    def hold(self, held_bytes: int, address_before_login: str | None = None) -> Peer:
        peer = Peer(held_bytes, address_before_login)
        self.memory.report(peer)
        return peer


# The account


def test_account_has_what_each_peer_reported_last() -> None:
    account = Account()
    one, other = account.hold(100), account.hold(10)
    assert account.memory.total == 110
    one.held_bytes = 40
    account.memory.report(one)
    assert account.memory.total == 50
    other.held_bytes = 0
    account.memory.report(other)
    account.memory.forget(one)
    account.memory.forget(one)
    assert account.memory.total == 0


def test_peers_that_stall_are_ended_before_one_that_sends_a_large_message() -> None:
    account = Account()
    stalled = [account.hold(150_000) for _ in range(6)]
    account.now_s = 5.0
    sending = account.hold(400_000)
    assert not sending.given_up
    assert sum(peer.given_up for peer in stalled) == 3
    assert account.memory.total == 3 * 150_000 + 400_000
    assert account.memory.given_up == 3


def test_peer_with_few_bytes_is_never_ended_for_others() -> None:
    account = Account()
    small = account.hold(10_000)
    account.now_s = 3600.0
    large = [account.hold(300_000) for _ in range(4)]
    assert not small.given_up
    assert any(peer.given_up for peer in large)


def test_peer_that_makes_progress_is_ended_after_those_that_make_none() -> None:
    account = Account()
    reading, stalled = account.hold(450_000), account.hold(400_000)
    for second in range(1, 10):
        account.now_s = float(second)
        reading.progress_bytes += PEER_PROGRESS_BYTES
        account.memory.report(reading)
    account.hold(160_000)
    assert (reading.given_up, stalled.given_up) == (False, True)


def test_an_address_has_little_memory_before_its_peers_log_in() -> None:
    account = Account()
    honest = account.hold(50_000, "10.0.0.9")
    old = account.hold(30_000, "10.0.0.1")
    account.now_s = 2.0
    young = [account.hold(20_000, "10.0.0.1") for _ in range(3)]
    assert (old.given_up, [each.given_up for each in young]) == (True, [False] * 3)
    assert not honest.given_up
    assert account.memory.total == 50_000 + 3 * 20_000
    account.hold(20_000, "10.0.0.1")
    assert account.memory.total == 50_000 + 4 * 20_000, "80,000 bytes are allowed"


def test_the_memory_of_a_peer_that_has_logged_in_is_not_that_of_its_address() -> None:
    account = Account()
    peer = account.hold(60_000, "10.0.0.1")
    peer.address_before_login = None
    other = account.hold(60_000, "10.0.0.1")
    assert (peer.given_up, other.given_up) == (False, False)
    for each in (peer, other):
        account.memory.forget(each)
    assert account.memory.total == 0
    account.hold(79_000, "10.0.0.1")
    assert account.memory.given_up == 0


def test_a_byte_now_and_then_is_no_progress() -> None:
    account = Account()
    dripping, sending = account.hold(600_000), Peer(500_000)
    for second in range(1, 10):
        account.now_s = float(second)
        dripping.progress_bytes += 1
        account.memory.report(dripping)
    account.memory.report(sending)
    assert (dripping.given_up, sending.given_up) == (True, False)


def test_peer_that_waits_for_the_broker_does_not_stall() -> None:
    account = Account()
    waiting, stalled = account.hold(500_000), account.hold(400_000)
    waiting.waits_for_broker = True
    account.now_s = 9.0
    account.hold(200_000)
    assert (waiting.given_up, stalled.given_up) == (False, True)


def test_output_that_has_left_without_a_report_counts_no_more() -> None:
    account = Account()
    drained = [account.hold(90_000) for _ in range(10)]
    for peer in drained:
        peer.held_bytes = 0
    last = account.hold(200_000)
    assert account.memory.total == 200_000
    assert not any(peer.given_up for peer in [*drained, last])


def test_peers_are_not_asked_again_at_each_report_near_the_bound() -> None:
    account = Account()
    asked = 0

    class Counted(Peer):
        @property
        def held_bytes(self) -> int:
            nonlocal asked
            asked += 1
            return 999

        @held_bytes.setter
        def held_bytes(self, value: int) -> None:
            pass

    peers = [Counted() for _ in range(1001)]
    for peer in peers:
        account.memory.report(peer)
    before = asked
    for peer in peers[:900]:
        account.memory.report(peer)
    assert asked - before == 900


# Connections


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@asynccontextmanager
async def watched(broker: Broker) -> AsyncIterator[tuple[RawClient, Callable[[], bool]]]:
    """A client that has not sent CONNECT, and whether its connection was freed."""
    client = await RawClient.open_socket("127.0.0.1", broker.port)
    await until(lambda: len(broker.connections) == 1)
    freed = weakref.ref(only(broker))
    yield client, lambda: freed() is None
    if client.transport is not None:
        client.transport.abort()


async def leave_nothing(client: RawClient) -> None:
    pass


async def leave_partial_frame(client: RawClient) -> None:
    client.write(CONNECT)
    await client.wait(client.events.get())
    client.write(partial_frame(MAX_FRAME_SIZE, MIB))


async def send_garbage(client: RawClient) -> None:
    client.write(CONNECT + b"\x7f\xff\xff\xff" * 4)
    await client.wait_closed()


async def send_garbage_first(client: RawClient) -> None:
    client.write(bytes(64))
    await client.wait_closed()


async def open_things(client: RawClient) -> None:
    client.write(CONNECT)
    await client.wait(client.events.get())
    producer = await client.create_producer("persistent://public/default/t")
    await producer.send_many([b"x"] * 3)
    await client.subscribe("persistent://public/default/t", "s", permits=10)
    await client.request(
        Kind.WATCH_TOPIC_LIST,
        pb.CommandWatchTopicList(
            watcher_id=1, namespace="public/default", topics_pattern="public/default/.*"
        ),
    )


WAYS = [leave_nothing, leave_partial_frame, send_garbage, send_garbage_first, open_things]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_closed_connection_is_freed_without_a_garbage_collection(
    broker: Broker, no_collection: None, way: Callable[[RawClient], asyncio.Future[None]]
) -> None:
    async with watched(broker) as (client, freed):
        await way(client)
    await until(lambda: not broker.connections)
    await until(freed)


def test_a_closed_connection_is_freed_on_uvloop_too(
    tmp_path_factory: pytest.TempPathFactory, no_collection: None
) -> None:
    async def attack() -> None:
        for way in WAYS:
            directory = tmp_path_factory.mktemp("broker")
            async with running(directory) as broker, watched(broker) as (client, freed):
                await way(client)
                cast("asyncio.Transport", client.transport).abort()
                await until(lambda: not broker.connections)
                await until(freed)

    uvloop.run(attack())


LOGINS = {
    "valid": connect_as("alice"),
    "token": connect_as("alice", life_s=-60),
    "password": pb.CommandConnect(auth_method_name="basic", auth_data=b"alice:x"),
    "none": pb.CommandConnect(),
}


async def test_logins_are_freed_without_a_garbage_collection(
    tmp_path: Path, no_collection: None
) -> None:
    """A broker hardly collects garbage, and OpenSSL's objects take some 50 KB each."""
    security = Security(tmp_path / "security")
    settings = {**security.settings, "plaintext_ports": True, "authorization": "off"}
    settings |= {
        "authentication_providers": ("token", "basic"),
        "token_secret_keys": (SECRET_KEY,),
        "superuser_roles": ("root",),
        "broker_client_token_file": None,
    }
    async with running(tmp_path / "data", **settings) as broker:
        for port, tls in ((broker.port, None), (broker.port_tls, security.context)):
            assert port is not None
            for name, login in LOGINS.items():
                assert await is_freed(broker, port, tls, login), (name, tls)


async def is_freed(
    broker: Broker, port: int, tls: ssl.SSLContext | None, login: pb.CommandConnect
) -> bool:
    """Whether a connection is freed after this login, and with it what OpenSSL has for it."""
    client = await RawClient.open_socket("127.0.0.1", port, tls=tls)
    await until(lambda: len(broker.connections) == 1)
    freed = weakref.ref(only(broker))
    request = pb.CommandConnect(client_version="x")
    request.MergeFrom(login)
    client.send(Kind.CONNECT, request)
    await client.wait(client.events.get())
    await client.close()
    await until(lambda: not broker.connections)
    for _ in range(10):
        if freed() is None:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_closing_connection_drops_its_input_at_once(broker: Broker) -> None:
    async with watched(broker) as (client, _):
        await leave_partial_frame(client)
        connection = only(broker)
        await until(lambda: connection.held_bytes >= MIB)
        assert broker.peer_memory.total >= MIB
        connection.close("the test wants it")
        assert connection.held_bytes == 0
    await until(lambda: not broker.connections)
    assert broker.peer_memory.total == 0


async def test_a_connection_may_announce_little_before_connect(broker: Broker) -> None:
    async with watched(broker) as (client, _):
        client.write(partial_frame(HANDSHAKE_FRAME_BYTES, 1000))
        await until(lambda: only(broker).held_bytes == 1000)
    async with watched(broker) as (client, _):
        client.write(partial_frame(HANDSHAKE_FRAME_BYTES + 1, 1000))
        refused = await client.wait(client.events.get())
        assert f"{HANDSHAKE_FRAME_BYTES} is the most" in refused.error.message
        assert "CONNECT first" in refused.error.message
        await client.wait_closed()


async def test_a_ready_connection_may_announce_the_largest_message(broker: Broker) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    producer = await client.create_producer("persistent://public/default/t")
    await producer.send_many([b"x" * (5 * MIB - 100)])
    await until(lambda: broker.peer_memory.refresh() == 0)
    await client.close()


async def test_above_the_bound_of_all_the_worst_peers_lose_their_connections(
    broker: Broker,
) -> None:
    broker.peer_memory = PeerMemory(8 * MIB, 100, asyncio.get_running_loop().time)
    healthy = await RawClient.open("127.0.0.1", broker.port)
    producer = await healthy.create_producer("persistent://public/default/t")
    hostile = [await RawClient.open("127.0.0.1", broker.port) for _ in range(10)]
    with structlog.testing.capture_logs() as lines:
        for client in hostile:
            client.write(partial_frame(MAX_FRAME_SIZE, 2 * MIB))
        await until(lambda: any(client.closed.done() for client in hostile))
        await producer.send_many([b"x" * (4 * MIB)])
    assert broker.peer_memory.refresh() <= 8 * MIB
    assert any(line["event"] == "connection_held_too_much" for line in lines)
    assert not healthy.closed.done()
    for client in (healthy, *hostile):
        await client.close()


async def test_bytes_of_frames_that_wait_are_counted(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "MAX_PENDING_REQUESTS", 2)
    go = asyncio.Event()

    async def waits(connection: Connection, command: pb.BaseCommand, entry: bytes | None) -> None:
        await go.wait()

    client = await serve(broker, {Kind.LOOKUP: waits})
    lookup = pb.CommandLookupTopic(topic="persistent://public/default/t", request_id=1)
    frame = encode_command(basecommand(Kind.LOOKUP, lookup))
    client.write(frame * 1000)
    connection = only(broker)
    await until(lambda: connection.held_bytes >= len(frame) * 900)
    assert broker.peer_memory.total == connection.held_bytes <= len(frame) * 1000
    go.set()
    await until(lambda: broker.peer_memory.refresh() == 0)
    await client.close()


async def test_queued_output_is_counted(broker: Broker) -> None:
    def answers_much(connection: Connection, command: pb.BaseCommand, entry: bytes | None) -> None:
        response = pb.CommandLookupTopicResponse(
            request_id=command.lookup.request_id, message="x" * 200_000
        )
        connection.send(basecommand(Kind.LOOKUP_RESPONSE, response))

    client = await serve(broker, {Kind.LOOKUP: answers_much})
    cast("asyncio.Transport", client.transport).pause_reading()
    connection = only(broker)
    lookup = pb.CommandLookupTopic(topic="persistent://public/default/t", request_id=1)
    client.write(encode_command(basecommand(Kind.LOOKUP, lookup)) * 200)
    await until(lambda: not connection.writable)
    assert broker.peer_memory.refresh() > 4 * MIB
    registry, name = make_broker_registry(broker), "magnetar_peer_memory_bytes"
    assert registry.get_sample_value(name, {"cluster": "standalone"}) == connection.held_bytes
    assert connection.held_bytes > 4 * MIB
    cast("asyncio.Transport", client.transport).abort()
    await until(lambda: not broker.connections)
    assert broker.peer_memory.total == 0
