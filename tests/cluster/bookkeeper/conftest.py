"""The Java client on the bookies that all tests share."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.servers.bookie_cluster import BookieCluster
from tests.servers.bookkeeper_peer.peer import BookKeeperPeer, PeerClient


@pytest.fixture(scope="module", params=["v2", "v3"])
def java(
    request: pytest.FixtureRequest, bookies: BookieCluster, bookkeeper_peer: BookKeeperPeer
) -> Iterator[PeerClient]:
    """The Java client, with each protocol."""
    client = asyncio.run(bookkeeper_peer.connect(bookies.uri, v2=request.param == "v2"))
    yield client
    asyncio.run(client.close())


@pytest.fixture(scope="module")
def java_v2(bookies: BookieCluster, bookkeeper_peer: BookKeeperPeer) -> Iterator[PeerClient]:
    """The Java client as Pulsar uses it, where the protocol does not matter."""
    settings = {"batchReadEnabled": True}
    client = asyncio.run(bookkeeper_peer.connect(bookies.uri, settings=settings))
    yield client
    asyncio.run(client.close())
