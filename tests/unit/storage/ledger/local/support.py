"""Stores on simulated disks, and shorthands for appends and reads."""

import asyncio
import random
from collections.abc import Sequence

from magnetar.protocol.ids import LedgerId
from storage.clock import SystemClock
from storage.ledger.local.disk import Disk
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.local.reclaim import DeletionGuard, unguarded
from storage.ledger.store import LedgerError, ReadableLedger, WritableLedger
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import MetadataStore
from tests.support.waiting import TIMEOUT_S

SMALL = LedgerLimits(
    file_bytes=8192,
    file_records=1000,
    reclaim_pause_s=3600,
    seal_retry_s=3600,
    compact_bytes_per_s=2**40,
    compact_step_bytes=1024,
)
"""Limits that make a few entries fill a file."""

Outcome = tuple[int, LedgerError | None]


def new_metadata() -> MetadataStore:
    return MemoryMetadataStore(SystemClock())


async def started(
    disk: Disk,
    metadata: MetadataStore,
    *,
    limits: LedgerLimits = SMALL,
    guard: DeletionGuard = unguarded,
) -> LocalLedgerStore:
    store = LocalLedgerStore(
        disk, metadata, SystemClock(), limits=limits, rng=random.Random(7), guard=guard
    )
    await store.start()
    return store


class Outcomes:
    """What the callbacks of appends said, in the order in which they said it."""

    def __init__(self) -> None:
        self.all: list[Outcome] = []
        self._wanted = 0
        self._reached = asyncio.Event()

    def __call__(self, entry_id: int, error: LedgerError | None) -> None:
        self.all.append((entry_id, error))
        if len(self.all) >= self._wanted:
            self._reached.set()

    async def wait(self, count: int) -> list[Outcome]:
        self._wanted = count
        self._reached.clear()
        if len(self.all) < count:
            # Not wait_for: in Python 3.11 it can swallow a cancellation that meets the result.
            async with asyncio.timeout(TIMEOUT_S):
                await self._reached.wait()
        return self.all

    @property
    def acknowledged(self) -> list[int]:
        return [entry_id for entry_id, error in self.all if error is None]


async def append_all(ledger: WritableLedger, entries: Sequence[bytes]) -> None:
    """Append in one turn of the loop, and wait until all are durable."""
    outcomes = Outcomes()
    for entry in entries:
        ledger.append(entry, outcomes)
    for _, error in await outcomes.wait(len(entries)):
        if error is not None:
            raise error


async def append_each(ledger: WritableLedger, entries: Sequence[bytes]) -> None:
    """Append in groups of one."""
    for entry in entries:
        await append_all(ledger, [entry])


async def read_all(ledger: ReadableLedger) -> list[bytes]:
    found: list[bytes] = []
    while len(found) <= ledger.last_add_confirmed:
        last = ledger.last_add_confirmed
        found += await ledger.read(len(found), last, max_bytes=1 << 20)
    return found


async def opened(store: LocalLedgerStore, ledger: ReadableLedger) -> ReadableLedger:
    return await store.open(LedgerId(ledger.ledger_id))
