"""Fixtures of real parts; `tests/servers/__init__.py` lists them.

Rules: a session's part is started when the first test asks for it and is gone at the end; what a
test starts for itself is gone after the test.  What is built the first time has its own limit, and
does not count into a test's timeout.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import pytest

from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper
from tests.servers.bookie_part import SMALL, BookieProcess, BookieRoot
from tests.servers.bookkeeper_peer.peer import BookKeeperPeer
from tests.servers.java_parts import resolve_jars
from tests.servers.oxia_part import OxiaServer, build_oxia
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.tools import missing_go, missing_java, require

TEST_TIMEOUT_S: Final = 300
"""Of the test alone, without what its fixtures build and start; for a machine that has much else
to do, as some tests start bookies of their own and wait for what these do in the background."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, func_only=True))


@pytest.fixture(scope="session")
def java_parts() -> Path:
    """The directory of jars; tests that need it do not run without Java."""
    require(missing_java(), "cluster", "JDK 17 and Maven")
    return resolve_jars()


@pytest.fixture(scope="session")
def oxia_binary() -> Path:
    """The Oxia server's program; tests that need it do not run without Go."""
    require(missing_go(), "Oxia", "Go 1.24")
    return build_oxia()


@pytest.fixture(scope="session")
def zookeeper(
    java_parts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ZooKeeperServer]:
    """A ZooKeeper server that all tests share."""
    server = ZooKeeperServer(tmp_path_factory.mktemp("zookeeper"))
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.kill()


@pytest.fixture
def zookeeper_chroot(zookeeper: ZooKeeperServer) -> str:
    """The path of an empty node on the shared ZooKeeper server."""
    return zookeeper.fresh_chroot()


@pytest.fixture(scope="session")
def oxia(oxia_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OxiaServer]:
    """An Oxia server that all tests share: one after the other, for it bears one writer."""
    server = OxiaServer(tmp_path_factory.mktemp("oxia"))
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.kill()


@pytest.fixture
def fresh_oxia(oxia_binary: Path, tmp_path: Path) -> Iterator[OxiaServer]:
    """An empty Oxia server for this test alone."""
    server = OxiaServer(tmp_path / "oxia")
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def bookies(
    zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BookieCluster]:
    """Three bookies on the shared ZooKeeper server."""
    root = OnZooKeeper(zookeeper, zookeeper.fresh_chroot())
    cluster = BookieCluster(tmp_path_factory.mktemp("bookies"), root)
    try:
        asyncio.run(cluster.start())
        yield cluster
    finally:
        cluster.kill()


class StartBookies(Protocol):
    """Starts a cluster that is gone after the test."""

    def __call__(
        self,
        root: BookieRoot,
        count: int = 3,
        settings: Mapping[str, object] | None = None,
        process: BookieProcess = SMALL,
    ) -> Awaitable[BookieCluster]:
        """`settings` are lines of BookKeeper's configuration, as `gcWaitTime`."""
        ...


@pytest.fixture
def start_bookies(java_parts: Path, tmp_path: Path) -> Iterator[StartBookies]:
    """Starts clusters that are gone after the test."""
    clusters: list[BookieCluster] = []

    async def start(
        root: BookieRoot,
        count: int = 3,
        settings: Mapping[str, object] | None = None,
        process: BookieProcess = SMALL,
    ) -> BookieCluster:
        directory = tmp_path / f"bookies-{len(clusters)}"
        cluster = BookieCluster(directory, root, count, settings, process)
        clusters.append(cluster)
        await cluster.start()
        return cluster

    yield start
    for cluster in clusters:
        cluster.kill()


@pytest.fixture(scope="session")
def bookkeeper_peer(
    java_parts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BookKeeperPeer]:
    """BookKeeper's own client, in one process for all tests."""
    peer = BookKeeperPeer(tmp_path_factory.mktemp("bookkeeper-peer"))
    yield peer
    peer.close()
