"""A broker that dies before it has named the ledger it made, on bookies inside this process."""

import asyncio
import contextvars
import random

import pytest

from config import bounds
from magnetar.protocol.ids import EARLIEST
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.ledger.store import Copies
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.types import Limits, ManagedLedgerState
from storage.metadata.memory import MemoryMetadataStore
from tests.support.bounds import set_bound
from tests.support.clocks import FakeClock
from tests.support.waiting import until
from tests.unit.storage.ledger.bookkeeper.simulated_bookies import (
    SimulatedBookie,
    SimulatedBookieClient,
    SimulatedCluster,
    SimulatedMetadata,
    Weather,
)
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    Outcomes,
    Process,
    ProcessMetadata,
    contents,
    data_of,
    publish,
)

SHARED = Limits(ledger_max_entries=10, ledger_min_age_ms=0, cursor_flush_ms=1, claim_on_open=True)


class Cluster:
    """Bookies and records that several brokers share."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metadata = MemoryMetadataStore(self.clock)
        weather = Weather(random.Random(1), slow_s=0.0002)
        loop = asyncio.get_running_loop()
        self.bookies = SimulatedCluster(loop, contextvars.Context(), weather)
        for number in range(3):
            bookie = SimulatedBookie(f"bookie-{number}")
            self.bookies.bookies[bookie.id] = bookie

    def broker(self, process: Process) -> ManagedLedgerFactory:
        ledgers = BookKeeperLedgerStore(
            SimulatedMetadata(self.bookies),
            SimulatedBookieClient(self.bookies),
            self.clock,
            random.Random(2),
            BookKeeperOptions(Copies(3, 3, 2)),
        )
        metadata = ProcessMetadata(process, self.metadata)
        return ManagedLedgerFactory(metadata, ledgers, self.clock, SHARED)

    @property
    def ledgers(self) -> list[int]:
        return sorted(self.bookies.records)

    async def made(self, count: int) -> int:
        """The newest ledger, once there are so many."""
        await until(lambda: len(self.ledgers) == count)
        return self.ledgers[-1]


@pytest.mark.parametrize("before", [0, 10], ids=["the first", "the next"])
async def test_a_ledger_whose_maker_died_before_naming_it_is_deleted_a_day_later(
    before: int,
) -> None:
    cluster, process = Cluster(), Process()
    first = await cluster.broker(process).open(NAME)
    await first.open_cursor("s", EARLIEST)
    await publish(first, before)
    async with first._core.lock:  # so it cannot be named
        first.append(b"lost", lambda *_: None)
        left = await cluster.made(2 if before else 1)
        process.dead = True
    factory = cluster.broker(Process())
    second = await factory.open(NAME)
    await publish(second, 1, "after")
    named = [info.ledger_id for info in second.ledgers]
    assert cluster.ledgers == sorted([*named, left])
    assert await factory.delete_orphaned_ledgers() == []
    cluster.clock.ms += bounds.ORPHANED_LEDGER_AGE_MS
    assert [each.ledger_id for each in await factory.delete_orphaned_ledgers()] == [left]
    assert cluster.ledgers == named
    assert len(await contents(second)) == before + 1


async def test_a_ledger_of_positions_whose_maker_died_before_naming_it_is_deleted_a_day_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    cluster, process = Cluster(), Process()
    first = await cluster.broker(process).open(NAME)
    cursor = await first.open_cursor("s", EARLIEST)
    (position,) = await publish(first, 1)
    process.dead = True
    cursor.acknowledge(position)
    writing = asyncio.ensure_future(cursor.persist())
    left = await cluster.made(2)
    factory = cluster.broker(Process())
    second = await factory.open(NAME)
    assert second.cursors["s"].backlog == 1
    cluster.clock.ms += bounds.ORPHANED_LEDGER_AGE_MS
    (found,) = await factory.orphaned_ledgers()
    assert (found.ledger_id, found.stream, found.cursor) == (left, NAME, "s")
    assert await factory.delete_orphaned_ledgers() == [found]
    assert cluster.ledgers == [info.ledger_id for info in second.ledgers]
    writing.cancel()


async def test_a_ledger_that_a_deposed_owner_makes_late_takes_nothing_and_is_deleted() -> None:
    cluster, process = Cluster(), Process()
    first = await cluster.broker(process).open(NAME)
    factory = cluster.broker(Process())
    second = await factory.open(NAME)
    await publish(second, 1)
    outcomes = Outcomes()
    outcomes.append(first, b"late")
    await outcomes.wait(1)
    assert first.state is ManagedLedgerState.FENCED
    assert outcomes.stored == []
    await until(lambda: cluster.ledgers == [info.ledger_id for info in second.ledgers])
    third = await cluster.broker(process).open(NAME)
    fourth = await cluster.broker(Process()).open(NAME)
    await publish(fourth, 1, "fourth")
    async with third._core.lock:
        third.append(b"later", lambda *_: None)
        left = await cluster.made(3)
        process.dead = True
    cluster.clock.ms += bounds.ORPHANED_LEDGER_AGE_MS
    deleted = await factory.delete_orphaned_ledgers()
    assert [each.ledger_id for each in deleted] == [left]
    assert data_of(await contents(fourth)) == [b"e0", b"fourth0"]
