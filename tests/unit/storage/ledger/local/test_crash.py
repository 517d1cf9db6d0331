"""The machine stops before every single step on the disk; afterwards all that was promised holds.

Three ways of stopping: the process dies (everything written is there), the power goes (only what
was synced is there), and the power goes while unsynced sectors, lengths and names are half there.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Final

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.local.disk import TEMPORARY
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import LedgerError, NoSuchLedger, WritableLedger
from storage.metadata.store import MetadataStore
from tests.support.effort import by_effort
from tests.unit.storage.ledger.local.simulated_disk import SimulatedDisk, Survival
from tests.unit.storage.ledger.local.support import append_all, new_metadata, read_all, started

WAYS: Final[tuple[Survival, ...]] = ("written", "durable", "torn")
STRIDE: Final = by_effort(quick=len(WAYS), whole=1, nightly=1)


@dataclass
class Promises:
    """What the outside was told."""

    appended: dict[int, list[bytes]] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)
    deleting: set[int] = field(default_factory=set)
    merged: int = 0

    def append(self, ledger: WritableLedger, entry: bytes) -> None:
        ledger_id = ledger.ledger_id
        self.appended.setdefault(ledger_id, []).append(entry)

        def done(entry_id: int, error: LedgerError | None) -> None:
            assert error is None
            assert entry_id == self.acknowledged.get(ledger_id, 0)
            self.acknowledged[ledger_id] = entry_id + 1

        ledger.append(entry, done)

    async def settled(self) -> None:
        while any(
            len(entries) > self.acknowledged.get(ledger_id, 0)
            for ledger_id, entries in self.appended.items()
        ):
            await asyncio.sleep(0)


async def work(store: LocalLedgerStore, promises: Promises) -> None:
    """Several files, ledgers that are deleted, and merges of what is left between them."""
    rng = random.Random(3)
    ledgers = [await store.create(custom={}) for _ in range(6)]
    for turn in range(60):
        for _ in range(rng.randint(1, 3)):
            ledger = rng.choice(ledgers)
            size = rng.choice([0, 40, 700, 1500])
            promises.append(ledger, rng.randbytes(4) + bytes([turn]) * size)
        await promises.settled()
        if turn % 20 == 19:
            gone = ledgers.pop(0)
            await ledgers.pop(0).close()
            promises.deleting.add(gone.ledger_id)
            await store.delete(gone.ledger_id)
            promises.merged += (await store.reclaim()).merged
            ledgers.append(await store.create(custom={}))
    await store.close()


async def check(store: LocalLedgerStore, promises: Promises) -> None:
    for ledger_id, entries in promises.appended.items():
        try:
            ledger = await store.open(LedgerId(ledger_id))
        except NoSuchLedger:
            assert ledger_id in promises.deleting
            continue
        found = await read_all(ledger)
        assert found == entries[: len(found)]
        assert len(found) >= promises.acknowledged.get(ledger_id, 0)
        assert ledger.length == sum(map(len, found))


async def stop_and_look(
    disk: SimulatedDisk, metadata: MetadataStore, promises: Promises, how: Survival, seed: int
) -> None:
    again = SimulatedDisk(disk.survivors(how, random.Random(seed)))
    store = await started(again, metadata)
    await check(store, promises)
    await store.reclaim()
    await check(store, promises)
    ledger = await store.create(custom={})
    assert ledger.ledger_id not in promises.appended
    await append_all(ledger, [b"goes on"])
    await store.close()
    assert not [name for name in again.files if name.endswith(TEMPORARY)]

    last = SimulatedDisk(again.survivors("durable"))
    store = await started(last, metadata)
    await check(store, promises)
    logs = {name.removesuffix(".log") for name in last.files if name.endswith(".log")}
    indexes = {name.removesuffix(".index") for name in last.files if name.endswith(".index")}
    assert logs == indexes
    assert_no_entry_twice(store, last)
    await store.close()


def assert_no_entry_twice(store: LocalLedgerStore, disk: SimulatedDisk) -> None:
    """A merged file and its sources are never both alive."""
    seen: set[tuple[int, int]] = set()
    for file in store._files.sealed:
        for run in file.index(disk).runs():
            entries = {(run.ledger_id, entry) for entry in range(run.first, run.last + 1)}
            assert not seen & entries
            seen |= entries


async def run_until_crash(at: int | None) -> tuple[SimulatedDisk, MetadataStore, Promises]:
    disk, metadata, promises = SimulatedDisk(), new_metadata(), Promises()
    store = await started(disk, metadata)
    disk.crash_at = at
    worker = asyncio.create_task(work(store, promises))
    while not worker.done() and (at is None or disk.steps < at):
        await asyncio.sleep(0)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    await store._reclaim.close()
    return disk, metadata, promises


@pytest.mark.parametrize(("which", "how"), list(enumerate(WAYS)), ids=WAYS)
async def test_a_crash_before_every_step(which: int, how: Survival) -> None:
    """A quick run takes every third step; together its three ways of stopping take each."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    whole, _, promises = await run_until_crash(None)
    assert whole.steps > 200
    assert promises.merged > 3
    assert len(promises.deleting) == 3
    for at in range(1 + which % STRIDE, whole.steps + 1, STRIDE):
        disk, metadata, promises = await run_until_crash(at)
        await stop_and_look(disk, metadata, promises, how, seed=at)
