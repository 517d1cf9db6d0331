"""The backends on which the ledger contract is checked.

A backend gives `Backend`: a running store, another start after a crash, and one after a close.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from storage.clock import SystemClock
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import LedgerStore
from storage.metadata.memory import MemoryMetadataStore


class Backend(Protocol):
    """One kind of store, and its data."""

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


@pytest.fixture(params=["local"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    assert request.param == "local"
    made = LocalBackend(tmp_path)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def store(backend: Backend) -> LedgerStore:
    return backend.store
