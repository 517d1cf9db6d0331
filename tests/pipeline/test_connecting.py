"""Processes of a query that begin while the broker is away: a batch starts several at any time."""

import asyncio
import socket
from pathlib import Path

import pytest

import magnetar
from magnetar.errors import ConnectionLost
from magnetar.spark.connecting import ClientThread
from magnetar.spark.options import Connection
from tests.support.broker_process import BrokerProcess
from tests.support.child_process import HOST


def turn_away(listener: socket.socket) -> None:
    """Let somebody connect, and leave."""
    with listener:
        listener.accept()[0].close()


async def test_a_broker_that_is_restarted_is_waited_for(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    listener = socket.create_server((HOST, broker.port))
    url = f"pulsar://{HOST}:{broker.port}"
    connecting = asyncio.create_task(asyncio.to_thread(ClientThread, Connection(url)))
    await asyncio.to_thread(turn_away, listener)
    try:
        await broker.start()
        connected = await connecting
        await broker.create_scalable("t", 1)
        name = "topic://public/default/t"
        layout = await asyncio.to_thread(connected.run, magnetar.Client.layout, name)
        assert list(layout.segments) == [0]
        await asyncio.to_thread(connected.close)
    finally:
        broker.kill()


async def test_but_not_for_longer_than_a_request() -> None:
    with socket.create_server((HOST, 0)) as listener:
        url = f"pulsar://{HOST}:{listener.getsockname()[1]}"
    with pytest.raises(ConnectionLost, match="check the address"):
        await asyncio.to_thread(ClientThread, Connection(url, operation_timeout_ms=300))
