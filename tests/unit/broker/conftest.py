"""A broker in this process, its clients, and a cluster, for a test of any part."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.unit.broker.placement.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        await made.close()


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
