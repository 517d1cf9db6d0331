"""Garbage collection of bookies: ledgers that have a record stay, all others go.

A collection is known to have run by what it took: a ledger made and deleted for that, whose id is
above those of all others.  Bookies go through their ledgers by id, so they judged the others first.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import pytest
from kazoo.client import KazooClient

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import Digest
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata
from storage.ledger.bookkeeper.metadata_format import LedgerPaths
from storage.ledger.bookkeeper.metadata_oxia import OxiaLedgerMetadata
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore
from storage.ledger.store import NoSuchLedger
from tests.cluster.bookkeeper.ledger_access import (
    STRIPED,
    USUAL,
    Quorums,
    RawBookies,
    append,
    raw_bookies,
    read_all,
    record_of,
    store_at,
    written,
)
from tests.servers.bookie_cluster import BookieCluster, OnOxia, OnZooKeeper
from tests.servers.fixtures import StartBookies
from tests.servers.oxia_part import OxiaServer
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.child_process import once_it_is

pytestmark = pytest.mark.cluster

COLLECTING = {"gcWaitTime": 1000, "gcOverreplicatedLedgerWaitTime": 1000}
COLLECTED_WITHIN_S = 60
ENTRIES = tuple(b"entry-%d" % number for number in range(6))
SHORT_ID = 12_0003_0004
"""At /ledgers/12/0003/L0004, where nothing else is."""
LONG_ID = 34 << 32
LOST_ID = 13_0003_0004
WITNESSES = itertools.count(35 << 32)
"""Ids of the ledgers that prove a collection."""


@pytest.fixture(scope="module")
def cluster(
    zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BookieCluster]:
    root = OnZooKeeper(zookeeper, zookeeper.fresh_chroot())
    started = BookieCluster(tmp_path_factory.mktemp("collecting"), root, 3, COLLECTING)
    try:
        asyncio.run(started.start())
        yield started
    finally:
        started.kill()


@asynccontextmanager
async def numbered(
    cluster: BookieCluster, ledger_ids: Iterator[int], quorums: Quorums = STRIPED
) -> AsyncIterator[BookKeeperLedgerStore]:
    """A store whose ledgers get these ids."""

    async def next_ledger_id() -> LedgerId:
        return LedgerId(next(ledger_ids))

    async with store_at(cluster.uri, quorums) as store:
        store._services.metadata.next_ledger_id = next_ledger_id  # type: ignore[method-assign]
        yield store


async def answers(
    raw: RawBookies, bookie: BookieId, ledger_id: int, entry_id: int, code: ReplyCode
) -> bool:
    return await raw.read(bookie, ledger_id, entry_id) is code


async def until_collected(raw: RawBookies, bookie: BookieId, ledger_id: int) -> None:
    """The bookie has forgotten the ledger."""
    gone = partial(answers, raw, bookie, ledger_id, 0, ReplyCode.NO_SUCH_LEDGER)
    await once_it_is(gone, f"the end of ledger {ledger_id} on {bookie}", COLLECTED_WITHIN_S)


async def two_collections(cluster: BookieCluster) -> None:
    """Every bookie judges every ledger that was there when this was called, twice."""
    async with numbered(cluster, WITNESSES, (3, 3, 3)) as store, raw_bookies() as raw:
        await collect_twice(store, raw)


async def collect_twice(store: BookKeeperLedgerStore, raw: RawBookies) -> None:
    """The same by a store that draws from `WITNESSES`, on the bookies of its ensembles."""
    for _ in range(2):
        witness = await written(store, b"witness")
        record = await record_of(store, witness.ledger_id)
        await witness.close()
        await store.delete(witness.ledger_id)
        for bookie in record.last_ensemble.bookies:
            await until_collected(raw, bookie, witness.ledger_id)


async def every_copy_is_there(raw: RawBookies, ledger_id: int, record: LedgerMetadata) -> None:
    for entry_id, data in enumerate(ENTRIES):
        for place in record.write_set(entry_id):
            bookie = record.last_ensemble.bookies[place]
            code = await raw.read(bookie, ledger_id, entry_id)
            assert code is ReplyCode.OK, f"entry {entry_id} on {bookie}"
            assert (await raw.opened(bookie, ledger_id, entry_id)).data == data


@pytest.mark.parametrize("ledger_id", [SHORT_ID, LONG_ID], ids=["short", "long"])
async def test_ledgers_survive_in_directories_of_their_own(
    cluster: BookieCluster, ledger_id: int
) -> None:
    """A closed one and an open one, which goes on afterwards."""
    async with (
        numbered(cluster, itertools.count(ledger_id)) as store,
        store_at(cluster.uri) as other,
        raw_bookies() as raw,
    ):
        closed, opened = await written(store, *ENTRIES), await written(store, *ENTRIES)
        await closed.close()
        assert (closed.ledger_id, opened.ledger_id) == (ledger_id, ledger_id + 1)
        await two_collections(cluster)
        for each in (closed, opened):
            record = await record_of(store, each.ledger_id)
            await every_copy_is_there(raw, each.ledger_id, record)
        assert await append(opened, b"after two collections") == [len(ENTRIES)]
        reader = await other.open(closed.ledger_id)
        assert await read_all(reader) == list(ENTRIES)
        reader = await other.open(opened.ledger_id)
        assert await read_all(reader) == [*ENTRIES, b"after two collections"]
        await store.delete(closed.ledger_id)
        await store.delete(opened.ledger_id)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
async def test_a_ledger_without_a_record_does_not_survive(
    cluster: BookieCluster, closed: bool
) -> None:
    """What the other tests would see if records were not where bookies look for them."""
    parts = urlsplit(cluster.uri)
    tree = KazooClient(parts.netloc)
    async with store_at(cluster.uri) as store, store_at(cluster.uri) as other, raw_bookies() as raw:
        ledger = await written(store, *ENTRIES)
        await append(ledger, b"by which others know that those are confirmed")
        if closed:
            await ledger.close()
        reader = await other.open_no_recovery(ledger.ledger_id)
        record = await record_of(store, ledger.ledger_id)
        await every_copy_is_there(raw, ledger.ledger_id, record)
        tree.start(timeout=15)
        try:
            tree.delete(LedgerPaths(parts.path).ledger(ledger.ledger_id))
        finally:
            tree.stop()
            tree.close()
        await two_collections(cluster)
        for bookie in record.last_ensemble.bookies:
            assert await raw.read(bookie, ledger.ledger_id, 0) is ReplyCode.NO_SUCH_LEDGER
        with pytest.raises(AssertionError):
            await every_copy_is_there(raw, ledger.ledger_id, record)
        with pytest.raises(NoSuchLedger):
            await reader.read(0, 1, max_bytes=1000)


async def test_a_deleted_ledger_gives_its_space_back(cluster: BookieCluster) -> None:
    async with store_at(cluster.uri) as store, raw_bookies() as raw:
        stays, goes = await written(store, *ENTRIES), await written(store, *ENTRIES)
        await goes.close()
        await store.delete(goes.ledger_id)
        await two_collections(cluster)
        record = await record_of(store, stays.ledger_id)
        for bookie in cluster.bookies:
            code = await raw.read(BookieId(bookie.bookie_id), goes.ledger_id, 0)
            assert code is ReplyCode.NO_SUCH_LEDGER
        await every_copy_is_there(raw, stays.ledger_id, record)


async def test_a_bookie_gives_up_what_a_record_does_not_name_it_for(cluster: BookieCluster) -> None:
    """As after a bookie was replaced: bookies understand who holds a closed ledger."""
    async with store_at(cluster.uri, (2, 2, 2)) as store, raw_bookies() as raw:
        ledger = await written(store, *ENTRIES)
        record = await record_of(store, ledger.ledger_id)
        members = record.last_ensemble.bookies
        (extra,) = {BookieId(each.bookie_id) for each in cluster.bookies} - set(members)
        body = Digest(*USUAL).seal(ledger.ledger_id, 0, -1, len(ENTRIES[0]), ENTRIES[0])
        await raw.put(extra, ledger.ledger_id, 0, body)
        await two_collections(cluster)
        assert await raw.holds(extra, ledger.ledger_id, 0), "a ledger that is open may need it"
        await ledger.close()
        await until_collected(raw, extra, ledger.ledger_id)
        await two_collections(cluster)
        await every_copy_is_there(raw, ledger.ledger_id, record)
        assert await read_all(await store.open(ledger.ledger_id)) == list(ENTRIES)


async def test_ledgers_on_oxia_survive_by_the_parents_of_their_records(
    fresh_oxia: OxiaServer, start_bookies: StartBookies
) -> None:
    """And where a parent is missing bookies do not see the record, and take the entries away.

    One store does everything, and ledgers are not looked for on other bookies, which would write:
    the server that the tests build does not survive two writers.
    """
    cluster = await start_bookies(OnOxia(fresh_oxia), 2, {"gcWaitTime": 1000})
    ledger_ids = itertools.chain((SHORT_ID, LONG_ID, LOST_ID), WITNESSES)
    async with numbered(cluster, ledger_ids, (2, 2, 2)) as store, raw_bookies() as raw:
        closed, idle, lost = [await written(store, *ENTRIES) for _ in range(3)]
        await closed.close()
        await collect_twice(store, raw)
        records = {each: await record_of(store, each.ledger_id) for each in (closed, idle, lost)}
        for each, record in records.items():
            await every_copy_is_there(raw, each.ledger_id, record)
        metadata = store._services.metadata
        assert isinstance(metadata, OxiaLedgerMetadata)
        assert lost.ledger_id == LOST_ID
        await metadata._store.delete("/ledgers/13/0003")
        await collect_twice(store, raw)
        assert await record_of(store, lost.ledger_id) == records[lost]
        for bookie in records[lost].last_ensemble.bookies:
            assert await raw.read(bookie, lost.ledger_id, 0) is ReplyCode.NO_SUCH_LEDGER
        for each in (closed, idle):
            await every_copy_is_there(raw, each.ledger_id, records[each])
            assert await read_all(await store.open(each.ledger_id)) == list(ENTRIES)
