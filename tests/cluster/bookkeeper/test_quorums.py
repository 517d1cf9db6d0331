"""Quorums on real bookies that die, come back, and are taken over: nothing acknowledged is lost."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.ensemble_choice import NotEnoughBookies
from storage.ledger.bookkeeper.ledger_metadata import LedgerState
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore
from storage.ledger.store import LedgerError, LedgerFenced
from tests.cluster.bookkeeper.quorum_load import Load, Quorums, check, store_on
from tests.servers.bookie_part import BookieServer
from tests.servers.ground import Ground
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[3]
EACH = pytest.mark.parametrize(
    "quorums", [(2, 2, 2), (3, 2, 2), (3, 3, 2)], ids=lambda quorums: "/".join(map(str, quorums))
)


@pytest.fixture
def mended(ground: Ground) -> Iterator[Ground]:
    """Whatever the test did to the bookies is undone before the next one."""
    yield ground
    ground.mend()


def members(ground: Ground, store: BookKeeperLedgerStore, load: Load) -> list[BookieServer]:
    """The bookies of the ledger's last ensemble, in order."""
    by_id = {bookie.bookie_id: bookie for bookie in ground.bookies.bookies}
    metadata = load.ledger.metadata  # type: ignore[attr-defined]
    return [by_id[bookie] for bookie in metadata.last_ensemble.bookies]


async def known(store: BookKeeperLedgerStore, bookie: BookieServer) -> None:
    """The store has noticed that the bookie may be written to."""
    metadata = store._services.metadata
    await until(lambda: bookie.bookie_id in metadata.bookies.writable)


@asynccontextmanager
async def loaded(
    ground: Ground, quorums: Quorums
) -> AsyncIterator[tuple[BookKeeperLedgerStore, Load]]:
    """A ledger under load that has got somewhere."""
    async with store_on(ground.bookies.uri, quorums) as store:
        load = Load(await store.create(custom={}))
        await load.reached(2000)
        yield store, load


async def recovered(ground: Ground, load: Load, quorums: Quorums) -> int:
    """Another client finds everything that was acknowledged; where it ended."""
    async with store_on(ground.bookies.uri, quorums) as other:
        reader = await other.open(load.ledger.ledger_id)
        assert reader.last_add_confirmed >= load.acknowledged
        await check(reader)
        again = await other.open_no_recovery(load.ledger.ledger_id)
        assert (again.last_add_confirmed, again.length) == (
            reader.last_add_confirmed,
            reader.length,
        )
        return reader.last_add_confirmed


@EACH
async def test_a_bookie_is_killed_and_another_one_takes_its_place(
    mended: Ground, quorums: Quorums
) -> None:
    if quorums[0] == len(mended.bookies.bookies):
        await mended.bookies.add_bookie()
    async with loaded(mended, quorums) as (store, load):
        dead = members(mended, store, load)[1]
        dead.kill()
        killed_at = load.acknowledged
        await load.reached(killed_at + 3000)
        await load.stop()
        assert load.error is None
        metadata = load.ledger.metadata  # type: ignore[attr-defined]
        assert [dead.bookie_id in each.bookies for each in metadata.ensembles] == [True, False]
        assert metadata.last_ensemble.first_entry_id > killed_at - 1
        assert store.counters.ensemble_changes == 1
        await load.ledger.close()
        await check(load.ledger)
    assert await recovered(mended, load, quorums) == load.acknowledged


@pytest.mark.parametrize("quorums", [(4, 2, 2), (4, 3, 2)], ids=lambda q: "/".join(map(str, q)))
async def test_a_bookie_is_killed_and_there_is_no_other(mended: Ground, quorums: Quorums) -> None:
    if len(mended.bookies.bookies) == 3:
        await mended.bookies.add_bookie()
    async with loaded(mended, quorums) as (store, load):
        members(mended, store, load)[0].kill()
        await load.ended()
        assert isinstance(load.error, NotEnoughBookies)
    await mended.bookies.mend()
    await recovered(mended, load, quorums)


@EACH
async def test_all_bookies_but_one_are_killed_and_come_back(
    mended: Ground, quorums: Quorums
) -> None:
    """Whoever opens the ledger meanwhile gets an error, or the whole truth."""
    async with loaded(mended, quorums) as (store, load):
        left = members(mended, store, load)[0]
        for bookie in mended.bookies.bookies:
            if bookie is not left:
                bookie.kill()
        await load.ended()
        assert load.error is not None
        with contextlib.suppress(LedgerError):
            reader = await store.open(load.ledger.ledger_id)
            assert reader.last_add_confirmed >= load.acknowledged
    await mended.bookies.mend()
    await recovered(mended, load, quorums)


async def test_a_bookie_restarts_under_load(mended: Ground) -> None:
    """Within its session: others go on in its place, and it is used again."""
    quorums = (2, 2, 2)
    async with loaded(mended, quorums) as (store, load):
        first = members(mended, store, load)[0]
        first.kill()
        await load.reached(load.acknowledged + 1000)
        await first.start()
        await known(store, first)
        for bookie in members(mended, store, load):
            bookie.kill()
            await load.reached(load.acknowledged + 1000)
            await bookie.start()
            await known(store, bookie)
        await load.stop()
        assert load.error is None
        await load.ledger.close()
    assert await recovered(mended, load, quorums) == load.acknowledged


@EACH
async def test_two_recover_a_ledger_that_is_being_written(mended: Ground, quorums: Quorums) -> None:
    uri = mended.bookies.uri
    async with (
        loaded(mended, quorums) as (_, load),
        store_on(uri, quorums) as one,
        store_on(uri, quorums) as two,
    ):
        first, second = await asyncio.gather(
            one.open(load.ledger.ledger_id), two.open(load.ledger.ledger_id)
        )
        await load.ended()
        assert isinstance(load.error, LedgerFenced)
        assert first.last_add_confirmed == second.last_add_confirmed >= load.acknowledged
        assert first.length == second.length
        await check(first)
        await check(second)


class Writer:
    """A writer in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.acknowledged = -1
        self.ended_with = ""

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    async def follow(self, until: int | None = None) -> None:
        """Read what it was told, up to an entry or to its end."""
        while until is None or self.acknowledged < until:
            line = await self.line()
            if not line:
                return
            if line.isdigit():
                assert int(line) == self.acknowledged + 1
                self.acknowledged = int(line)
            else:
                self.ended_with = line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def writer_process(uri: str, quorums: Quorums) -> AsyncIterator[tuple[Writer, LedgerId]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.cluster.bookkeeper.quorum_load",
        uri,
        *map(str, quorums),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    writer = Writer(process)
    try:
        yield writer, LedgerId(int(await writer.line()))
    finally:
        await writer.end()


@EACH
async def test_a_writer_sleeps_through_a_recovery(mended: Ground, quorums: Quorums) -> None:
    uri = mended.bookies.uri
    async with writer_process(uri, quorums) as (writer, ledger_id):
        await writer.follow(until=1000)
        writer.signal(signal.SIGSTOP)
        async with store_on(uri, quorums) as other:
            reader = await other.open(ledger_id)
            writer.signal(signal.SIGCONT)
            await writer.follow()
            assert writer.ended_with == LedgerFenced.__name__
            assert 1000 <= writer.acknowledged <= reader.last_add_confirmed
            await check(reader)
            record = await other._services.metadata.read(ledger_id)
            assert record.metadata.state is LedgerState.CLOSED
            assert record.metadata.last_entry_id == reader.last_add_confirmed


@pytest.mark.parametrize("entries", [1, 500, 3000])
async def test_a_writer_is_killed(mended: Ground, entries: int) -> None:
    uri = mended.bookies.uri
    async with writer_process(uri, (3, 2, 2)) as (writer, ledger_id):
        await writer.follow(until=entries)
        writer.signal(signal.SIGKILL)
        await writer.follow()
        async with store_on(uri, (3, 2, 2)) as other:
            reader = await other.open(ledger_id)
            assert reader.last_add_confirmed >= writer.acknowledged
            await check(reader)
