"""What several brokers stand on: one ZooKeeper server and three bookies, for tests and benchmarks.

Rules: everything is in the directory given, and no process is left at the end; metadata of brokers
is in a place of its own for each set of them, beside that of the bookies.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper
from tests.servers.bookie_part import SMALL, BookieProcess
from tests.servers.zookeeper_part import ZooKeeperServer


@dataclass(frozen=True)
class Ground:
    """A ZooKeeper server and three bookies; whoever breaks them mends them."""

    zookeeper: ZooKeeperServer
    bookies: BookieCluster

    def metadata_store(self) -> str:
        """URL of an empty place for the metadata of brokers."""
        return f"zk:{self.zookeeper.address}{self.zookeeper.fresh_chroot()}"

    def mend(self) -> None:
        """Everything runs again."""
        asyncio.run(self._mend())

    async def _mend(self) -> None:
        if not self.zookeeper.running:
            await self.zookeeper.start()
        await self.bookies.mend()


@contextmanager
def new_ground(
    directory: Path,
    settings: Mapping[str, object] | None = None,
    process: BookieProcess = SMALL,
) -> Iterator[Ground]:
    """Servers that run; `settings` and `process` are those of the bookies."""
    zookeeper = ZooKeeperServer(directory / "zookeeper")
    bookies: BookieCluster | None = None
    try:
        asyncio.run(zookeeper.start())
        root = OnZooKeeper(zookeeper, zookeeper.fresh_chroot())
        bookies = BookieCluster(directory / "bookies", root, 3, settings, process)
        asyncio.run(bookies.start())
        yield Ground(zookeeper, bookies)
    finally:
        if bookies is not None:
            bookies.kill()
        zookeeper.kill()
