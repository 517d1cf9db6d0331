"""Ledger records as Pulsar's driver keeps them: what stands above them; the list of bookies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from magnetar.protocol.ids import LedgerId
from storage.clock import SystemClock
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    DigestType,
    Ensemble,
    LedgerMetadata,
)
from storage.ledger.bookkeeper.metadata_format import LedgerPaths
from storage.ledger.bookkeeper.metadata_oxia import OxiaLedgerMetadata
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.watches import WatchQueue
from tests.support.bounds import set_bound
from tests.support.waiting import until

RECORD = LedgerMetadata(
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    ensembles=(Ensemble(0, (BookieId("b1:3181"),)),),
    digest_type=DigestType.CRC32C,
    password=b"",
)
SHORT, LONG = LedgerId(12_0003_0004), LedgerId(2**31 + 5)


@pytest.mark.parametrize("ledger_id", [SHORT, LONG], ids=["short", "long"])
async def test_a_missing_parent_is_made_wherever_it_is_missing(ledger_id: LedgerId) -> None:
    """A process that died while it made them, as others do from below, has left a hole.

    Bookies do not see what is below a hole, and take its entries away.
    """
    parents = LedgerPaths().parents(LedgerPaths().ledger(ledger_id))
    for hole in range(len(parents)):
        store = MemoryMetadataStore(SystemClock())
        for parent in parents:
            if parent != parents[hole]:
                await store.put(parent, b"")
        metadata = OxiaLedgerMetadata(store)
        await metadata.create(ledger_id, RECORD)
        found = await store.get_many(parents)
        assert all(found), f"{parents[hole]} is missing"
        assert await metadata.list_ledgers() == [ledger_id]
        await metadata.close()


async def test_parents_are_there_before_the_record_whoever_else_makes_them() -> None:
    """Two ledgers at once below the same new parents."""
    store = MemoryMetadataStore(SystemClock())
    parents = LedgerPaths().parents(LedgerPaths().ledger(SHORT))
    whole: list[bool] = []

    async def create(metadata: OxiaLedgerMetadata, ledger_id: LedgerId) -> None:
        await metadata.create(ledger_id, RECORD)
        whole.append(all(await store.get_many(parents)))

    makers = [OxiaLedgerMetadata(store, close_store=False) for _ in range(8)]
    await asyncio.gather(
        *(create(maker, LedgerId(SHORT + place)) for place, maker in enumerate(makers))
    )
    assert whole == [True] * len(makers)
    await store.close()


# The list of bookies

BOOKIE = f"{LedgerPaths().available}/127.0.0.1:3181"
Started = tuple[OxiaLedgerMetadata, MemoryMetadataStore]


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Started]:
    set_bound(monkeypatch, "RESTART_PAUSE_MIN_S", 0.001, in_module="magnetar.background_tasks")
    store = MemoryMetadataStore(SystemClock())
    metadata = OxiaLedgerMetadata(store)
    await metadata.start()
    yield metadata, store
    await metadata.close()


async def is_listed(metadata: OxiaLedgerMetadata) -> None:
    await until(lambda: "127.0.0.1:3181" in metadata.bookies.writable)


async def test_bookies_are_listed_again_after_a_defect(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, store = started
    listing, faults = store.children, [RuntimeError("a defect")]

    async def children(key: str) -> list[str]:
        if faults:
            raise faults.pop()
        return await listing(key)

    monkeypatch.setattr(store, "children", children)
    await store.put(BOOKIE, b"")
    await is_listed(metadata)
    assert not faults


async def test_bookies_are_followed_after_a_watch_that_broke(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, store = started
    real, faults = WatchQueue.__anext__, [RuntimeError("a defect")]

    async def fails(queue: WatchQueue) -> object:
        event = await real(queue)
        if faults:
            raise faults.pop()
        return event

    monkeypatch.setattr(WatchQueue, "__anext__", fails)
    await store.put(f"{LedgerPaths().available}/127.0.0.1:1", b"")
    await store.put(f"{LedgerPaths().available}/127.0.0.1:2", b"")
    await until(lambda: not faults)
    await store.put(BOOKIE, b"")
    await is_listed(metadata)


async def test_a_close_that_is_cancelled_closes_the_store(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, store = started
    asked, released, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def children(_key: str) -> list[str]:
        asked.set()
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await released.wait()
        return []

    async def close() -> None:
        closed.set()

    monkeypatch.setattr(store, "children", children)
    monkeypatch.setattr(store, "close", close)
    await store.put(BOOKIE, b"")
    await asked.wait()
    closing = asyncio.create_task(metadata.close())
    for _ in range(3):
        await asyncio.sleep(0)
    closing.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed.is_set()
