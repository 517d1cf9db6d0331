"""Fixtures of interoperation: a broker, an official Java client, our client, topics of a test.

Rules: they run unchanged on Magnetar and on Apache Pulsar (`--peer`). All tests share the broker,
the Java process and its client; each has a client of ours and topics of its own.
"""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import magnetar
from tests.client.conftest import Topic, rest
from tests.interop.java_client import JavaClient
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fixtures import RunningPeer
from tests.java.stock_driver import StockDriver

TEST_TIMEOUT_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.stock)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, func_only=True))


@pytest.fixture(scope="session")
def java(
    broker: BrokerUnderTest | RunningPeer, stock_driver_process: StockDriver
) -> Iterator[JavaClient]:
    """The official Java client, with transactions."""
    client = JavaClient.start(stock_driver_process, broker.url, broker.admin_url)
    yield client
    client.end()


@pytest.fixture
async def client(broker: BrokerUnderTest | RunningPeer) -> AsyncIterator[magnetar.Client]:
    """Our client."""
    async with magnetar.connect(broker.url) as client:
        yield client


MakeTopic = Callable[..., Awaitable[Topic]]


@pytest.fixture
def topic(broker: BrokerUnderTest | RunningPeer) -> MakeTopic:
    """Makes a scalable topic: `await topic(segments=1, name=None, properties=None)`."""

    async def make(
        segments: int = 1, *, name: str | None = None, properties: dict[str, str] | None = None
    ) -> Topic:
        made = Topic(broker, name or f"interop-{uuid.uuid4().hex[:8]}")
        path = f"/scalable/public/default/{made.local_name}"
        status, answer = await rest(
            broker, "PUT", path, body=properties or {}, numInitialSegments=segments
        )
        assert status == 204, answer
        return made

    return make
