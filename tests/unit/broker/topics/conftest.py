"""Clients of the broker of a test of topics."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from broker.app.service import Broker
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest, asking_broker
from tests.unit.broker.topics.reads import Reads


@pytest.fixture
async def reads(connect: Callable[[], Awaitable[RawClient]]) -> Reads:
    """A client that plans and reads."""
    return Reads(await connect())


@pytest.fixture
async def rest(broker: Broker) -> AsyncIterator[Rest]:
    async with asking_broker(broker) as rest:
        yield rest


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    client = await RawClient.open("127.0.0.1", broker.port)
    yield client
    await client.close()
