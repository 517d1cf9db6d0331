"""The backends on which the ledger contract is checked.

A backend gives `Backend`: a running store, another start after a crash, and one after a close.
"bookkeeper-simulated" is the store on bookies inside this process, "bookkeeper" the one on real
ones.
"""

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from storage.clock import SystemClock
from storage.ledger.bookkeeper.bookie_client import BookieClient
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.bookies import BookiePool
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataStore
from storage.ledger.bookkeeper.metadata_zookeeper import (
    ZooKeeperLedgerMetadata,
    parse_metadata_service_uri,
)
from storage.ledger.bookkeeper.open import address_of
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import Copies, LedgerStore
from storage.metadata.memory import MemoryMetadataStore
from tests.servers.bookie_cluster import BookieCluster
from tests.servers.bookie_part import MAX_FRAME_BYTES
from tests.unit.storage.ledger.bookkeeper.simulated_bookies import (
    SimulatedBookie,
    SimulatedBookieClient,
    SimulatedCluster,
    SimulatedMetadata,
    Weather,
)


class Backend(Protocol):
    """One kind of store, and its data."""

    unseen: int
    """Confirmed entries at the end of a dead writer's ledger that only recovery finds."""

    @property
    def store(self) -> LedgerStore:
        """The store that runs now."""
        ...

    async def restart(self) -> LedgerStore:
        """Close the store and start another one on the same data."""
        ...

    async def takeover(self) -> LedgerStore:
        """Start another store on the same data, as if the first one had died."""
        ...

    async def close(self) -> None:
        """Close what was started."""
        ...


class LocalBackend:
    """The embedded store with small files, so that every test crosses several."""

    unseen = 0

    def __init__(self, root: Path) -> None:
        self._root = root
        self._metadata = MemoryMetadataStore(SystemClock())
        self._limits = LedgerLimits(file_bytes=20_000, reclaim_pause_s=0.01)
        self._abandoned: list[LocalLedgerStore] = []

    async def start(self) -> None:
        self.store = await self._started()

    async def _started(self) -> LocalLedgerStore:
        clock = SystemClock()
        disk = RealDisk(self._root)
        store = LocalLedgerStore(disk, self._metadata, clock, limits=self._limits)
        await store.start()
        return store

    async def restart(self) -> LedgerStore:
        await self.store.close()
        self.store = await self._started()
        return self.store

    async def takeover(self) -> LedgerStore:
        """Only where the data directory's lock would have been lost with the process."""
        self._abandoned.append(self.store)
        await self.store._reclaim.close()
        await self.store._sealer.close()
        self.store = await self._started()
        return self.store

    async def close(self) -> None:
        await self.store.close()
        for store in self._abandoned:
            await store._disk.close()


Doors = Callable[[], tuple[LedgerMetadataStore, BookieClient]]


class BookKeeperBackend:
    """The store on bookies.  These learn what is confirmed with the next add only."""

    unseen = 1

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._abandoned: list[tuple[LedgerMetadataStore, BookieClient]] = []

    async def start(self) -> None:
        self.store = await self._started()
        for ledger_id in await self.store.list_ledgers():
            await self.store.delete(ledger_id)

    async def _started(self) -> BookKeeperLedgerStore:
        self._running = metadata, bookies = self._doors()
        options = BookKeeperOptions(Copies(3, 3, 2), frame_bytes=MAX_FRAME_BYTES)
        store = BookKeeperLedgerStore(metadata, bookies, SystemClock(), random.Random(3), options)
        await store.start()
        return store

    async def restart(self) -> LedgerStore:
        await self.store.close()
        self.store = await self._started()
        return self.store

    async def takeover(self) -> LedgerStore:
        """What the first one had in flight is cut off."""
        self._abandoned.append(self._running)
        await self._running[1].close()
        self.store = await self._started()
        return self.store

    async def close(self) -> None:
        await self.store.close()
        for metadata, _ in self._abandoned:
            await metadata.close()


def simulated_doors() -> Doors:
    """Bookies inside this process, quick and without faults."""
    weather = Weather(random.Random(1), slow_s=0.0005)
    # On the real clock a busy machine takes seconds for what takes none in a simulated one.
    cluster = SimulatedCluster(
        asyncio.get_running_loop(), contextvars.Context(), weather, timeout_s=60
    )
    for number in range(3):
        bookie = SimulatedBookie(f"bookie-{number}")
        cluster.bookies[bookie.id] = bookie
    return lambda: (SimulatedMetadata(cluster), SimulatedBookieClient(cluster))


def real_doors(uri: str) -> Doors:
    """Real bookies whose records are in ZooKeeper."""

    def doors() -> tuple[LedgerMetadataStore, BookieClient]:
        metadata = ZooKeeperLedgerMetadata(parse_metadata_service_uri(uri), random.Random())
        options = BookieOptions(max_frame_bytes=MAX_FRAME_BYTES)

        return metadata, BookiePool(partial(address_of, metadata), options)

    return doors


@pytest.fixture(
    params=["local", "bookkeeper-simulated", pytest.param("bookkeeper", marks=pytest.mark.cluster)]
)
def kind(request: pytest.FixtureRequest) -> str:
    """The backend, or the URI of the bookies.  Started here, where no loop runs yet."""
    if request.param != "bookkeeper":
        return str(request.param)
    bookies: BookieCluster = request.getfixturevalue("bookies")
    return bookies.uri


@pytest.fixture
async def backend(kind: str, tmp_path: Path) -> AsyncIterator[Backend]:
    made: LocalBackend | BookKeeperBackend
    if kind == "local":
        made = LocalBackend(tmp_path)
    elif kind == "bookkeeper-simulated":
        made = BookKeeperBackend(simulated_doors())
    else:
        made = BookKeeperBackend(real_doors(kind))
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def store(backend: Backend) -> LedgerStore:
    return backend.store
