"""Bookies that make one BookKeeper cluster, and the three places where it may have its metadata.

Rules: the cluster is initialised once, with BookKeeper's own shell, before its first bookie
starts; bookies on an Oxia server start one after the other, for the server that the tests build
does not survive two writers at once.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.servers.bookie_part import SMALL, BookieProcess, BookieRoot, BookieServer
from tests.servers.oxia_part import OxiaServer
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.child_process import LOG_TAIL, ChildFailed

INITIALISE_TIMEOUT_S: Final = 120


def records(bookie_id: str, chroot: str = "") -> tuple[str, str]:
    """Where a bookie is registered: as writable, as read-only."""
    available = f"{chroot}/ledgers/available"
    return f"{available}/{bookie_id}", f"{available}/readonly/{bookie_id}"


class OnZooKeeper:
    """Metadata on ZooKeeper, below `chroot`, by BookKeeper's own driver."""

    session_ms = 4_000
    one_by_one = False

    def __init__(self, zookeeper: ZooKeeperServer, chroot: str) -> None:
        self._zookeeper = zookeeper
        self._chroot = chroot

    @property
    def uri(self) -> str:
        return f"zk+hierarchical://{self._zookeeper.address}{self._chroot}/ledgers"

    async def registrations(self, bookie_id: str) -> set[str]:
        return await self._zookeeper.owners(*records(bookie_id, self._chroot))


class OnZooKeeperAsPulsar(OnZooKeeper):
    """The same tree by the driver of Pulsar."""

    @property
    def uri(self) -> str:
        return f"metadata-store:zk:{self._zookeeper.address}{self._chroot}"


class OnOxia:
    """Metadata on Oxia, by the driver of Pulsar.

    Its client beats every two seconds at the earliest: a session of two would end while it lives.
    """

    session_ms = 10_000
    one_by_one = True

    def __init__(self, oxia: OxiaServer) -> None:
        self._oxia = oxia

    @property
    def uri(self) -> str:
        return f"metadata-store:oxia://{self._oxia.address}/default"

    async def registrations(self, bookie_id: str) -> set[str]:
        return await self._oxia.owners(*records(bookie_id))


class BookieCluster:
    """`count` bookies, numbered from 0, in one directory."""

    def __init__(
        self,
        directory: Path,
        root: BookieRoot,
        count: int = 3,
        settings: Mapping[str, object] | None = None,
        process: BookieProcess = SMALL,
    ) -> None:
        self.root = root
        self._directory = directory
        self._process = process
        self.bookies = [self._bookie(number, settings) for number in range(count)]
        self._initialised = False

    @property
    def uri(self) -> str:
        """`metadataServiceUri` for clients of any language."""
        return self.root.uri

    async def start(self) -> None:
        """Initialise the cluster if this is the first time; start every bookie that is down."""
        if not self._initialised:
            await self._initialise()
            self._initialised = True
        down = [each for each in self.bookies if not each.running]
        if self.root.one_by_one:
            for each in down:
                await each.start()
        else:
            await asyncio.gather(*(each.start() for each in down))

    async def mend(self) -> None:
        """Wake what is paused, restart what is down, wait until every bookie is registered."""
        for each in self.bookies:
            if each.paused:
                each.resume()
        await self.start()
        for each in self.bookies:
            await each.until_registered()

    async def stop(self) -> None:
        """SIGTERM to all, and wait."""
        await asyncio.gather(*(each.stop() for each in self.bookies))

    def kill(self) -> None:
        """SIGKILL to all that run."""
        for each in self.bookies:
            each.kill()

    async def add_bookie(self, settings: Mapping[str, object] | None = None) -> BookieServer:
        """Start one more."""
        bookie = self._bookie(len(self.bookies), settings)
        self.bookies.append(bookie)
        await bookie.start()
        return bookie

    def _bookie(self, number: int, settings: Mapping[str, object] | None) -> BookieServer:
        directory = self._directory / f"bookie-{number}"
        return BookieServer(number, directory, self.root, settings, self._process)

    async def shell(self, *arguments: str) -> str:
        """What BookKeeper's shell prints; raises `ChildFailed` if it fails."""
        process = await asyncio.create_subprocess_exec(
            *self.bookies[0].shell_command(*arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(INITIALISE_TIMEOUT_S):
                printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        text = printed.decode("utf-8", "replace")
        if process.returncode != 0:
            raise ChildFailed(f"the shell's {arguments[0]} failed:\n{text[-LOG_TAIL:]}")
        return text

    async def _initialise(self) -> None:
        await self.shell("initnewcluster")
