"""The same over the embedded stores, on a real disk."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.clock import SystemClock
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.local_store import LocalLedgerStore
from storage.managed_ledger.entry_index import index_key
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import (
    Limits,
    ManagedLedgerFenced,
    ManagedLedgerState,
    ManagedLedgerTerminated,
)
from storage.metadata.sqlite import SqliteMetadataStore
from tests.support.waiting import until
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    Outcomes,
    contents,
    data_of,
    publish,
    settle,
)

LIMITS = Limits(
    ledger_max_entries=10, ledger_min_age_ms=0, cursor_flush_ms=2, entry_cache_bytes=20_000
)


class Local:
    """One data directory, and one process after the other using it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = SystemClock()

    async def start(self) -> None:
        self.metadata = await SqliteMetadataStore.open(self.root / "metadata.db", self.clock)
        self.ledgers = LocalLedgerStore(RealDisk(self.root), self.metadata, self.clock)
        await self.ledgers.start()
        self.factory = ManagedLedgerFactory(self.metadata, self.ledgers, self.clock, LIMITS)

    async def stop(self, *, clean: bool) -> None:
        """Without `clean` the stores end under the streams, which then find nothing to write to."""
        if clean:
            await self.factory.close()
        await self.ledgers.close()
        await self.metadata.close()

    async def reopen(self, *, clean: bool) -> ManagedLedger:
        await self.stop(clean=clean)
        await self.start()
        return await self.factory.open(NAME)


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Local]:
    found = Local(tmp_path)
    await found.start()
    yield found
    await found.stop(clean=True)


@pytest.mark.parametrize("clean", [True, False])
async def test_entries_and_positions_come_back(local: Local, clean: bool) -> None:
    ledger = await local.factory.open(NAME)
    cursor = await ledger.open_cursor("s", EARLIEST, properties={"k": "v"})
    positions = await publish(ledger, 25)
    for position in [*positions[:12], *positions[14:20]]:
        cursor.acknowledge(position)
    cursor.acknowledge_batch(positions[20], [0b10], 3)
    await cursor.persist()
    ledger = await local.reopen(clean=clean)
    cursor = ledger.cursors["s"]
    assert [entry.position for entry in await contents(ledger)] == positions[10:]
    assert cursor.backlog == 7
    assert cursor.ack_set(positions[20]) == [0b10]
    assert cursor.properties == {"k": "v"}
    assert cursor.first_unacknowledged(positions[14]) == positions[20]
    assert (await publish(ledger, 1))[0] > positions[-1]


async def test_reads_from_the_disk_over_many_ledgers(local: Local) -> None:
    ledger = await local.factory.open(NAME)
    await ledger.open_cursor("hold", EARLIEST)
    positions = await publish(ledger, 500)
    assert ledger.read_cached(EARLIEST, 10, 1000) is None, "evicted"
    assert data_of(await contents(ledger)) == [f"e{n}".encode() for n in range(500)]
    assert await ledger.find_first(lambda entry: int(entry.data[1:]) >= 333) == positions[333]
    assert len(ledger.ledgers) == 50


@pytest.mark.parametrize("clean", [True, False])
async def test_ranges_add_up_to_the_same_after_a_restart(local: Local, clean: bool) -> None:
    """Indexes of ended ledgers are stored; that of the one which was written is made anew."""
    ledger = await local.factory.open(NAME)
    await ledger.open_cursor("hold", EARLIEST)
    positions = await publish(ledger, 44)
    before = [await ledger.ranges.sums(first, LATEST) for first in positions]
    assert (before[0].entries, before[0].size_bytes) == (44, ledger.total_size_bytes)
    ledger = await local.reopen(clean=clean)
    assert [await ledger.ranges.sums(first, LATEST) for first in positions] == before
    assert not ledger.has_lost(EARLIEST)
    ids = {position.ledger_id for position in positions}
    ledger = await local.reopen(clean=True)
    stored = [await local.metadata.get(index_key(ledger_id)) for ledger_id in ids]
    assert all(stored)
    await local.factory.delete(NAME)
    assert not any([await local.metadata.get(index_key(ledger_id)) for ledger_id in ids])


async def test_terminate_trim_and_delete(local: Local) -> None:
    ledger = await local.factory.open(NAME)
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 35)
    assert await ledger.terminate() == positions[-1]
    cursor.acknowledge_up_to(positions[25])
    await until(lambda: len(ledger.ledgers) == 2)
    ledger = await local.reopen(clean=False)
    assert ledger.state is ManagedLedgerState.TERMINATED
    with pytest.raises(ManagedLedgerTerminated):
        ledger.append(b"late", lambda *_: None)
    assert ledger.last_confirmed == positions[-1]
    ledger.cursors["s"].acknowledge_up_to(LATEST)
    await until(lambda: len(ledger.ledgers) == 0)
    await local.factory.delete(NAME)
    assert not await local.factory.exists(NAME)
    await local.factory.sweep_orphans()  # the crash may have come between the list and a deletion
    assert await local.ledgers.list_ledgers() == []


async def test_a_busy_cursor_uses_a_ledger_until_a_clean_close(local: Local) -> None:
    ledger = await local.factory.open(NAME)
    await ledger.open_cursor("hold", EARLIEST)
    cursor = await ledger.open_cursor("s", EARLIEST)
    for position in await publish(ledger, 40):
        cursor.acknowledge(position)
        await cursor.persist()
    assert len(await local.ledgers.list_ledgers()) == 4 + 1
    ledger = await local.reopen(clean=False)
    assert ledger.cursors["s"].backlog == 0
    ledger = await local.reopen(clean=True)
    assert ledger.cursors["s"].backlog == 0
    await local.factory.unload(NAME)
    orphan = await local.ledgers.create(custom={})
    assert await local.factory.sweep_orphans() == [orphan.ledger_id]
    assert len(await local.ledgers.list_ledgers()) == 4


async def test_the_newest_owner_wins(local: Local) -> None:
    first = await local.factory.open(NAME)
    await publish(first, 3)
    other = ManagedLedgerFactory(local.metadata, local.ledgers, local.clock, LIMITS)
    second = await other.open(NAME)
    outcomes = Outcomes()
    try:
        outcomes.append(first, b"lost")
        await outcomes.wait(1)
        assert isinstance(outcomes.errors[0], ManagedLedgerFenced)
    except ManagedLedgerFenced:
        pass
    assert first.state is ManagedLedgerState.FENCED
    await publish(second, 1, "second")
    assert data_of(await contents(second)) == [b"e0", b"e1", b"e2", b"second0"]
    await other.close()


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_life(local: Local, seed: int) -> None:
    rng = random.Random(seed)
    ledger = await local.factory.open(NAME)
    await ledger.open_cursor("hold", EARLIEST)
    await ledger.open_cursor("s", EARLIEST)
    known: list[Position] = []
    left: set[Position] = set()
    durable_left: set[Position] = set()
    for _ in range(60):
        cursor = ledger.cursors["s"]
        what = rng.choice(["append", "append", "ack", "ack", "up to", "persist", "stop", "crash"])
        if what == "append":
            added = await publish(ledger, rng.randint(1, 25), f"{len(known)}.")
            known += added
            left.update(added)
            durable_left.update(added)
        elif what == "ack" and known:
            for position in rng.sample(known, min(len(known), 10)):
                assert cursor.acknowledge(position) == (position in left)
                left.discard(position)
        elif what == "up to" and known:
            end = rng.choice(known)
            cursor.acknowledge_up_to(end)
            left = {position for position in left if position > end}
        elif what == "persist":
            await cursor.persist()
            durable_left = set(left)
        elif what == "stop":
            ledger = await local.reopen(clean=True)
            durable_left = set(left)
        elif what == "crash":
            ledger = await local.reopen(clean=False)
            cursor = ledger.cursors["s"]
            found = {position for position in known if not cursor.is_acknowledged(position)}
            assert left <= found <= durable_left
            left = found
            durable_left = set(found)
        assert ledger.cursors["s"].backlog == len(left)
    assert [entry.position for entry in await contents(ledger)] == known
    await settle()
    await ledger.close()
