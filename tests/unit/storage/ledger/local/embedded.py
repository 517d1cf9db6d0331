"""A ledger store on a data directory, as the broker has it: lock, SQLite, log."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from storage.clock import SystemClock
from storage.data_directory import DataDirectory
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.metadata.sqlite import SqliteMetadataStore

LIMITS = LedgerLimits(file_bytes=256 * 1024, reclaim_pause_s=0.05)


@asynccontextmanager
async def embedded_store(path: Path) -> AsyncIterator[LocalLedgerStore]:
    directory = DataDirectory.open(path)
    metadata = await SqliteMetadataStore.open(directory.metadata_path, SystemClock())
    store = LocalLedgerStore(
        RealDisk(directory.ledgers_path),
        metadata,
        SystemClock(),
        limits=LIMITS,
        guard=directory.deletion_guard,
    )
    await store.start()
    try:
        yield store
    finally:
        await store.close()
        await metadata.close()
        directory.close()


def entry_for(ledger_id: int, entry_id: int) -> bytes:
    """The one content that this entry has in these tests; sizes from 8 bytes to 3 KiB."""
    rng = random.Random(ledger_id << 32 | entry_id)
    return rng.randbytes(8 + rng.randrange(3 * 1024) * (entry_id % 3) // 2)
