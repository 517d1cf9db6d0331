"""A whole broker in this process, and connections that greet it as later clients do."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient

Connect = Callable[..., Awaitable[RawClient]]


def java_client() -> pb.CommandConnect:
    """CONNECT of the Java client 5.0.0."""
    connect = pb.CommandConnect(client_version="Pulsar-Java-v5.0.0", protocol_version=21)
    flags = connect.feature_flags
    flags.supports_auth_refresh = flags.supports_broker_entry_metadata = True
    flags.supports_partial_producer = True
    flags.supports_get_partitioned_metadata_without_auto_creation = True
    flags.supports_repl_dedup_by_lid_and_eid = True
    return connect


def cpp_client() -> pb.CommandConnect:
    """CONNECT of the C++ client: it names scalable topics among what it can do."""
    connect = pb.CommandConnect(client_version="Pulsar-CPP-v5.0.0", protocol_version=21)
    flags = connect.feature_flags
    flags.supports_auth_refresh = flags.supports_broker_entry_metadata = True
    flags.supports_scalable_topics = True
    return connect


@pytest.fixture
def settings() -> dict[str, object]:
    """What the broker is set to; tests override it with `parametrize`."""
    return {}


@pytest.fixture
async def broker(tmp_path: Path, settings: dict[str, object]) -> AsyncIterator[Broker]:
    async with running(tmp_path, **settings) as broker:
        yield broker


@pytest.fixture
async def connect(broker: Broker) -> AsyncIterator[Connect]:
    """Opens clients of the broker, the Java one unless told; closes them after the test."""
    async with AsyncExitStack() as stack:

        async def open_client(command: pb.CommandConnect | None = None) -> RawClient:
            client = await RawClient.open("127.0.0.1", broker.port, command or java_client())
            stack.push_async_callback(client.close)
            return client

        yield open_client
