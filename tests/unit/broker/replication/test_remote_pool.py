"""Attempts to reach another cluster that is away: one for all topics."""

import asyncio
import random
from contextlib import suppress
from ssl import SSLContext

import pytest

from broker.replication.remote_pool import RemotePool
from magnetar.errors import ConnectionLost
from magnetar.identity import Identities
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.settings import ClientSettings
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S
from tests.unit.magnetar.wire.fake_broker import Peer, serving


def no_tls() -> SSLContext:
    raise AssertionError("its URL has no TLS")


def pool_of(port: int) -> RemotePool:
    url = f"pulsar://127.0.0.1:{port}"
    return RemotePool(url, ClientSettings(), Identities(), random.Random(1), no_tls)


async def test_topics_share_the_attempts_to_reach_a_cluster_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "REPLICATION_RETRY_MIN_S", 60.0)
    set_bound(monkeypatch, "REACH_RETRY_MAX_S", 60.0)
    attempts = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        pool = pool_of(server.sockets[0].getsockname()[1])
        together = await asyncio.gather(*(pool.any() for _ in range(5)), return_exceptions=True)
        later = await asyncio.gather(pool.any(), return_exceptions=True)
    assert attempts == 1
    errors = [*together, *later]
    assert [type(each) for each in errors] == [ConnectionLost] * 6
    assert len({str(each) for each in errors}) == 1
    await pool.close()


async def test_a_cluster_that_is_back_is_reached_after_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "REPLICATION_RETRY_MIN_S", 0.01)
    set_bound(monkeypatch, "REACH_RETRY_MAX_S", 0.01)
    attempts = 0

    def greet(peer: Peer, _: pb.BaseCommand) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > 2:
            peer.welcome()
        elif peer.transport is not None:
            peer.transport.close()

    async with serving(greet=greet) as broker:
        pool = pool_of(broker.port)
        async with asyncio.timeout(TIMEOUT_S):
            while not pool.connections:
                with suppress(ConnectionLost):
                    await pool.any()
                await asyncio.sleep(0)
        assert attempts == 3
        await pool.close()
