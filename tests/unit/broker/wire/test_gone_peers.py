"""Peers that have gone are noticed while their connections are not read."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import uvloop

from broker.app.service import Broker
from broker.wire.connection import Connection
from broker.wire.gone_peers import GonePeers, PeerState, peer_state
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import basecommand
from tests.support.waiting import until
from tests.unit.broker.wire.test_connection import only, serve

Kind = pb.BaseCommand
LOOKUP = encode_command(
    basecommand(
        Kind.LOOKUP, pb.CommandLookupTopic(topic="persistent://public/default/t", request_id=1)
    )
)


class Waiting:
    """A handler of LOOKUP that never answers; counts its calls and cancellations."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0

    async def __call__(
        self, connection: Connection, command: pb.BaseCommand, entry: bytes | None
    ) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


@asynccontextmanager
async def flooding(broker: Broker, flood: bytes) -> AsyncIterator[tuple[socket.socket, Waiting]]:
    """A peer that has sent requests, of which the broker leaves some unread."""
    waiting = Waiting()
    client = await serve(broker, {Kind.LOOKUP: waiting})
    transport = cast("asyncio.Transport", client.transport)
    peer = transport.get_extra_info("socket").dup()
    transport.abort()
    with peer:
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            peer.sendall(flood)
        await until(lambda: bool(only(broker).paused))
        yield peer, waiting


async def let_go(broker: Broker, flood: bytes) -> None:
    async with flooding(broker, flood) as (peer, waiting):
        assert waiting.begun
        peer.close()
        await until(lambda: not broker.connections, timeout_s=2.0)
        await until(lambda: waiting.cancelled == waiting.begun)


@pytest.mark.parametrize("requests", [2000, 500_000], ids=["few", "more than sockets hold"])
async def test_peer_that_floods_and_leaves_is_let_go_within_two_seconds(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    set_bound(monkeypatch, "MAX_PENDING_REQUESTS", 10)
    await let_go(broker, LOOKUP * requests)


@pytest.mark.parametrize("requests", [2000, 500_000], ids=["few", "more than sockets hold"])
def test_peer_that_floods_and_leaves_is_let_go_on_uvloop_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    set_bound(monkeypatch, "MAX_PENDING_REQUESTS", 10)

    async def attack() -> None:
        async with running(tmp_path) as broker:
            await let_go(broker, LOOKUP * requests)

    uvloop.run(attack())


async def test_peer_that_stays_keeps_its_paused_connection(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "MAX_PENDING_REQUESTS", 10)
    checks = GonePeers(broker.connections, interval_s=0.01)
    checks.start()
    async with flooding(broker, LOOKUP * 2000) as (_, waiting):
        await asyncio.sleep(0.1)
        await checks.stop()
        assert len(broker.connections) == 1
        assert waiting.cancelled == 0


def test_state_of_a_peer_is_known_though_bytes_are_unread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        with accepted:
            peer.sendall(b"unread")
            assert peer_state(accepted) is PeerState.PRESENT
            peer.close()
            assert peer_state(accepted) is PeerState.CLOSED
            accepted.sendall(b"refused")
            assert peer_state(accepted) is PeerState.RESET
    assert peer_state(accepted) is PeerState.PRESENT
    assert peer_state(None) is PeerState.PRESENT
