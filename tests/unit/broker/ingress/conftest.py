"""A whole broker in this process, on a free port and a temporary data directory."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from broker.service import Broker
from config.settings import Settings
from protocol import pulsar_pb2 as pb
from storage.clock import SystemClock
from tests.support.raw_client import RawClient


@asynccontextmanager
async def running(directory: Path, **settings: object) -> AsyncIterator[Broker]:
    given = {"data_dir": directory, "port": 0, "http_port": 0, "bind_host": "127.0.0.1"} | settings
    broker = Broker(
        Settings(**given),  # type: ignore[arg-type]
        clock=SystemClock(),
        rng=random.Random(1),
    )
    try:
        await broker.start()
        yield broker
    finally:
        await broker.stop()


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path) as broker:
        yield broker


@pytest.fixture
async def connect(broker: Broker) -> AsyncIterator[Callable[[], object]]:
    """Opens clients of the broker, and closes them after the test."""
    async with AsyncExitStack() as stack:

        async def open_client(command: pb.CommandConnect | None = None) -> RawClient:
            client = await RawClient.open("127.0.0.1", broker.port, command)
            stack.push_async_callback(client.close)
            return client

        yield open_client
