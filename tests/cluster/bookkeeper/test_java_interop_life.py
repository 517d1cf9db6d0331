"""Life of ledgers that Python and Java share: ids, lists, deletion, parents; and both Java drivers.

On bookies whose records are in ZooKeeper by BookKeeper's own driver.
"""

import asyncio
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from kazoo.client import KazooClient

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.metadata_format import LedgerPaths
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore
from storage.ledger.store import LedgerFenced, NoSuchLedger
from tests.cluster.bookkeeper.interop import (
    ENTRIES,
    LAST,
    LENGTH,
    both_agree,
    gone_for_java,
    java_ledger,
    java_lists,
    java_open,
    java_reads,
    python_reads,
)
from tests.cluster.bookkeeper.ledger_access import append, store_at, written
from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper, OnZooKeeperAsPulsar
from tests.servers.bookkeeper_peer.peer import (
    LEDGER_FENCED,
    NO_SUCH_LEDGER_METADATA,
    BookKeeperPeer,
    PeerClient,
    PeerError,
)
from tests.servers.fixtures import StartBookies
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

ONE = (1, 1, 1)


class ZooKeeperTree:
    """The nodes of a cluster, by another client of ZooKeeper."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self.root = parts.path
        self.client = KazooClient(parts.netloc)
        self.client.start(timeout=15)

    def close(self) -> None:
        self.client.stop()
        self.client.close()


async def test_ledger_deleted_by_one_client_is_gone_for_the_other(
    bookies: BookieCluster, java: PeerClient
) -> None:
    async with store_at(bookies.uri) as store:
        ledger = await written(store, *ENTRIES)
        await ledger.close()
        writer = await java_ledger(java, *ENTRIES)
        await writer.close()
        both = {int(ledger.ledger_id), writer.ledger_id}
        assert both <= set(await store.list_ledgers())
        assert both <= set(await java.list_ledgers())
        await java.delete_ledger(ledger.ledger_id)
        await store.delete(LedgerId(writer.ledger_id))
        assert not both & set(await store.list_ledgers())
        assert not both & set(await java.list_ledgers())
        for ledger_id in both:
            for recover in (False, True):
                with pytest.raises(PeerError) as refused:
                    await java_open(java, ledger_id, recover=recover)
                assert refused.value.code == NO_SUCH_LEDGER_METADATA
            with pytest.raises(NoSuchLedger):
                await store.open_no_recovery(LedgerId(ledger_id))
            with pytest.raises(NoSuchLedger):
                await store.open(LedgerId(ledger_id))
        await store.delete(ledger.ledger_id)


async def test_java_deletes_a_ledger_that_python_writes(
    bookies: BookieCluster, java: PeerClient
) -> None:
    """Bookies go on taking entries; that it is gone is found out at the end."""
    async with store_at(bookies.uri) as store:
        ledger = await written(store, *ENTRIES)
        await java.delete_ledger(ledger.ledger_id)
        with pytest.raises(LedgerFenced):
            await ledger.close()


@pytest.mark.parametrize("ledger_id", [17_0001_0001, 17 << 32], ids=["short", "long"])
async def test_java_removes_empty_parents_and_python_makes_them_again(
    request: pytest.FixtureRequest,
    bookies: BookieCluster,
    java: PeerClient,
    monkeypatch: pytest.MonkeyPatch,
    ledger_id: int,
) -> None:
    # Bookies may have collected the ledgers of another case, and refuse their ids from then on.
    ledger_id += 2 * sum(request.node.name.encode())
    ids = iter((ledger_id, ledger_id + 1))

    async def next_ledger_id() -> LedgerId:
        return LedgerId(next(ids))

    tree = ZooKeeperTree(bookies.uri)
    try:
        async with store_at(bookies.uri) as store:
            monkeypatch.setattr(store._services.metadata, "next_ledger_id", next_ledger_id)
            first = await written(store, *ENTRIES)
            await first.close()
            path = LedgerPaths(tree.root).ledger(first.ledger_id)
            assert tree.client.exists(path)
            await java.delete_ledger(first.ledger_id)
            await until(lambda: not tree.client.exists(path.rpartition("/")[0]))
            second = await written(store, *ENTRIES)
            await second.close()
            assert second.ledger_id == ledger_id + 1
            await java_reads(await java_open(java, second.ledger_id, recover=False), ENTRIES)
            await java.delete_ledger(second.ledger_id)
    finally:
        tree.close()


async def test_ids_are_drawn_from_one_counter(bookies: BookieCluster, java: PeerClient) -> None:
    async with store_at(bookies.uri) as store:
        await ids_never_repeat(store, java, highest=2**31 - 1)


async def ids_never_repeat(
    store: BookKeeperLedgerStore, java: PeerClient, *, lowest: int = 0, highest: int
) -> None:
    """Drawn in turns they ascend; drawn at once they differ."""
    in_turns: list[int] = []
    for _ in range(5):
        in_turns.append((await store.create(custom={})).ledger_id)
        in_turns.append((await java_ledger(java, quorums=ONE)).ledger_id)
    assert in_turns == sorted(set(in_turns))
    ours, theirs = await asyncio.gather(
        asyncio.gather(*(store.create(custom={}) for _ in range(20))),
        asyncio.gather(*(java_ledger(java, quorums=ONE) for _ in range(20))),
    )
    at_once = {*(int(each.ledger_id) for each in ours), *(each.ledger_id for each in theirs)}
    assert len(at_once) == 40
    assert min(at_once) > in_turns[-1]
    everything = at_once | set(in_turns)
    assert all(lowest <= each < highest for each in everything)
    assert everything <= set(await store.list_ledgers())
    await java_lists(java, everything)


async def test_long_ids(
    zookeeper: ZooKeeperServer,
    zookeeper_chroot: str,
    start_bookies: StartBookies,
    bookkeeper_peer: BookKeeperPeer,
) -> None:
    """As after 2^31 ledgers."""
    cluster = await start_bookies(OnZooKeeper(zookeeper, zookeeper_chroot), 1)
    tree = ZooKeeperTree(cluster.uri)
    tree.client.ensure_path(f"{tree.root}/idgen-long/HOB-0000000003")
    tree.close()
    java = await bookkeeper_peer.connect(cluster.uri)
    async with store_at(cluster.uri, (1, 1, 1)) as store:
        await ids_never_repeat(store, java, lowest=3 << 32, highest=4 << 32)
        ledger = await written(store, *ENTRIES)
        await java_reads(await java_open(java, ledger.ledger_id, recover=True), ENTRIES)
        writer = await java_ledger(java, *ENTRIES, quorums=(1, 1, 1))
        await store.open(LedgerId(writer.ledger_id))
        await python_reads(store, writer.ledger_id, ENTRIES)
        await java.delete_ledger(ledger.ledger_id)
        await store.delete(LedgerId(writer.ledger_id))
        listed = set(await store.list_ledgers())
        assert listed == set(await java.list_ledgers())
        assert not listed & {int(ledger.ledger_id), writer.ledger_id}
    await java.close()


# Pulsar's driver


class Uris(NamedTuple):
    python: str
    java: str


@pytest.fixture(params=["python-on-either", "python-on-pulsars"])
def uris(
    request: pytest.FixtureRequest, zookeeper: ZooKeeperServer, bookies: BookieCluster
) -> Uris:
    """The same tree by other names: Java by Pulsar's driver, and Python by the name of each."""
    chroot = urlsplit(bookies.uri).path.removesuffix("/ledgers")
    as_pulsar = OnZooKeeperAsPulsar(zookeeper, chroot).uri
    return Uris(bookies.uri if request.param == "python-on-either" else as_pulsar, as_pulsar)


async def test_java_with_the_driver_of_pulsar(uris: Uris, bookkeeper_peer: BookKeeperPeer) -> None:
    java = await bookkeeper_peer.connect(uris.java)
    async with store_at(uris.python) as store:
        closed = await written(store, *ENTRIES)
        await closed.close()
        await java_reads(await java_open(java, closed.ledger_id, recover=False), ENTRIES)
        ledger = await written(store, *ENTRIES)
        await java_reads(await java_open(java, ledger.ledger_id, recover=True), ENTRIES)
        with pytest.raises(LedgerFenced):
            await append(ledger, b"too late")
        theirs = await java_ledger(java, *ENTRIES)
        await theirs.close()
        await python_reads(store, theirs.ledger_id, ENTRIES)
        writer = await java_ledger(java, *ENTRIES)
        await store.open(LedgerId(writer.ledger_id))
        with pytest.raises(PeerError) as refused:
            await writer.add(b"too late")
        assert refused.value.code == LEDGER_FENCED
        ledger_ids = (closed.ledger_id, ledger.ledger_id, theirs.ledger_id, writer.ledger_id)
        for ledger_id in ledger_ids:
            await both_agree(store, java, ledger_id, LAST, LENGTH)
        await ids_never_repeat(store, java, highest=2**31 - 1)
        await java.delete_ledger(ledger.ledger_id)
        with pytest.raises(NoSuchLedger):
            await store.open(ledger.ledger_id)
        await store.delete(LedgerId(writer.ledger_id))
        await gone_for_java(java, writer.ledger_id)
        # What this driver leaves, the parents, does not disturb the other one.
        again = await written(store, *ENTRIES)
        await again.close()
        await java_reads(await java_open(java, again.ledger_id, recover=False), ENTRIES)
    await java.close()
