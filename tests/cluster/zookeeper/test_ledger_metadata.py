"""Ledger records and bookies on a real ZooKeeper."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    DigestType,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_format import LedgerPaths, UnreadableRecord
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataConflict
from storage.ledger.bookkeeper.metadata_zookeeper import (
    ZooKeeperLedgerMetadata,
    parse_metadata_service_uri,
)
from storage.ledger.store import LedgerError, NoSuchLedger
from tests.cluster.zookeeper.plain_client import plain_client
from tests.servers.bookie_cluster import OnZooKeeper, OnZooKeeperAsPulsar
from tests.servers.fixtures import StartBookies
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.bounds import set_bound
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

PATIENCE_S = 30
RECORD = LedgerMetadata(
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    ensembles=(Ensemble(0, (BookieId("b1:3181"),)),),
    digest_type=DigestType.CRC32C,
    password=b"secret",
    custom={"application": b"pulsar"},
)


@asynccontextmanager
async def opened(uri: str, seed: int = 1) -> AsyncIterator[ZooKeeperLedgerMetadata]:
    store = ZooKeeperLedgerMetadata(parse_metadata_service_uri(uri), random.Random(seed))
    await store.start()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["zk+hierarchical://{}{}/ledgers", "metadata-store:zk:{}{}"])
def uri(request: pytest.FixtureRequest, zookeeper: ZooKeeperServer, zookeeper_chroot: str) -> str:
    """Both forms name the same root."""
    return str(request.param).format(zookeeper.address, zookeeper_chroot)


async def test_a_ledger_from_its_making_to_its_end(uri: str) -> None:
    async with opened(uri) as store:
        ledger_id = await store.next_ledger_id()
        assert ledger_id == 0
        made = await store.create(ledger_id, RECORD)
        assert made.metadata == replace(RECORD, creator_token=made.metadata.creator_token)
        assert made == await store.read(ledger_id)
        closed = replace(made.metadata, state=LedgerState.CLOSED, last_entry_id=7, length=70)
        written = await store.write(ledger_id, closed, expect=made.version)
        assert await store.read(ledger_id) == written
        assert written.metadata == closed
        with pytest.raises(LedgerMetadataConflict):
            await store.write(ledger_id, RECORD, expect=made.version)
        with pytest.raises(LedgerMetadataConflict):
            await store.write(ledger_id, RECORD, expect=-1)
        with pytest.raises(LedgerMetadataConflict):
            await store.create(ledger_id, RECORD)
        assert await store.list_ledgers() == [ledger_id]
        await store.delete(ledger_id)
        await store.delete(ledger_id)
        with pytest.raises(NoSuchLedger):
            await store.read(ledger_id)
        with pytest.raises(NoSuchLedger):
            await store.write(ledger_id, RECORD, expect=written.version)
        assert await store.list_ledgers() == []


async def test_ids_are_given_once(uri: str) -> None:
    async with opened(uri) as one, opened(uri) as two:
        ids = await asyncio.gather(*(store.next_ledger_id() for store in (one, two) * 20))
        assert sorted(ids) == list(range(40))
        for ledger_id in (LedgerId(5), LedgerId(123_456_789), LedgerId(2**31 + 5)):
            await one.create(ledger_id, RECORD)
        assert await two.list_ledgers() == [5, 123_456_789, 2**31 + 5]


async def test_long_ids_once_they_have_begun(
    uri: str, zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    async with plain_client(zookeeper) as client, opened(uri) as store:
        await asyncio.to_thread(client.create, f"{zookeeper_chroot}/ledgers")
        await asyncio.to_thread(client.create, f"{zookeeper_chroot}/ledgers/idgen-long")
        assert await store.next_ledger_id() == 1 << 32
        high = f"{zookeeper_chroot}/ledgers/idgen-long/HOB-0000000007"
        await asyncio.to_thread(client.create, high)
        assert [await store.next_ledger_id() for _ in range(2)] == [7 << 32, 7 << 32 | 1]


async def test_parents_that_others_remove_are_made_again(
    uri: str, zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    level = f"{zookeeper_chroot}/ledgers/00/0000"
    async with plain_client(zookeeper) as client, opened(uri) as store:
        for ledger_id in range(3):
            await store.create(LedgerId(ledger_id), RECORD)
            await store.delete(LedgerId(ledger_id))
            await asyncio.to_thread(client.delete, level)
            await asyncio.to_thread(client.delete, level.rpartition("/")[0])


async def test_another_layout_is_refused(
    uri: str, zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    async with plain_client(zookeeper) as client:
        await asyncio.to_thread(client.create, f"{zookeeper_chroot}/ledgers")
        layout = f"{zookeeper_chroot}/ledgers/LAYOUT"
        other = b"2\norg.apache.bookkeeper.meta.LongHierarchicalLedgerManagerFactory:1"
        await asyncio.to_thread(client.create, layout, other)
        with pytest.raises(UnreadableRecord):
            async with opened(uri):
                pass
        ours = b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
        await asyncio.to_thread(client.set, layout, ours)
        async with opened(uri) as store:
            assert await store.list_ledgers() == []


async def test_bookies_and_racks_are_followed(
    uri: str, zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    available = f"{zookeeper_chroot}/ledgers/available"
    async with plain_client(zookeeper) as client, opened(uri) as store:
        assert not store.bookies.writable
        await asyncio.to_thread(client.create, f"{available}/b1:3181", makepath=True)
        await until(lambda: set(store.bookies.writable) == {"b1:3181"})
        assert store.bookies.writable[BookieId("b1:3181")].port == 3181
        await asyncio.to_thread(client.create, f"{available}/readonly/b2:3181", makepath=True)
        await until(lambda: set(store.bookies.read_only) == {"b2:3181"})
        racks = b'{"default":{"b1:3181":{"rack":"/r1","hostname":"h"}}}'
        await asyncio.to_thread(client.create, f"{zookeeper_chroot}/bookies", racks)
        await until(lambda: dict(store.bookies.racks) == {"b1:3181": "/r1"})
        await asyncio.to_thread(client.set, f"{zookeeper_chroot}/bookies", b"{broken")
        await asyncio.to_thread(client.delete, f"{available}/b1:3181")
        await until(lambda: not store.bookies.writable)
        assert dict(store.bookies.racks) == {"b1:3181": "/r1"}
        await asyncio.to_thread(client.create, f"{available}/b3:3181")
        await until(lambda: set(store.bookies.writable) == {"b3:3181"})


async def test_real_bookies_are_found(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str, start_bookies: StartBookies
) -> None:
    """By the name and place that they register, whichever URI names their tree."""
    root = OnZooKeeper(zookeeper, zookeeper_chroot)
    cluster = await start_bookies(root, 1)
    for uri in (root.uri, OnZooKeeperAsPulsar(zookeeper, zookeeper_chroot).uri):
        async with opened(uri) as store:
            assert [each.port for each in store.bookies.writable.values()] == [
                bookie.port for bookie in cluster.bookies
            ]
            assert not store.bookies.read_only
    async with opened(root.uri) as store:
        await cluster.bookies[0].stop()
        await until(lambda: not store.bookies.writable)


async def test_a_server_that_stops_and_comes_back(
    java_parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked meanwhile waits; bookies that came meanwhile are seen."""
    set_bound(monkeypatch, "ZOOKEEPER_REQUEST_S", 60)  # a busy machine starts it slowly
    server = ZooKeeperServer(tmp_path)
    try:
        await server.start()
        chroot = server.fresh_chroot()
        async with opened(f"metadata-store:zk:{server.address}{chroot}") as store:
            first = await store.next_ledger_id()
            server.kill()
            waiting = asyncio.ensure_future(store.next_ledger_id())
            await server.restart()
            assert await waiting > first
            await store.create(first, RECORD)
            async with plain_client(server) as client:
                path = f"{chroot}/ledgers/available/b1:1"
                await asyncio.to_thread(client.create, path, makepath=True)
            await until(lambda: set(store.bookies.writable) == {"b1:1"})
    finally:
        server.kill()


async def test_missing_server_fails_the_opening_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_CONNECT_S", 0.2)
    with pytest.raises(LedgerError):
        async with opened("metadata-store:zk:127.0.0.1:1/none"):
            pass


def test_places_have_parents() -> None:
    assert (
        LedgerPaths("/a/ledgers").root
        == parse_metadata_service_uri("zk+hierarchical://h:1;i:2/a/ledgers").path
    )
