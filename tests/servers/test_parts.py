"""Each part starts, serves, is killed, paused, and comes back on the same port with its data."""

import asyncio
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from tests.servers.bookie_cluster import BookieCluster, OnOxia, OnZooKeeper, OnZooKeeperAsPulsar
from tests.servers.fixtures import StartBookies
from tests.servers.oxia_part import OxiaServer
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.child_process import ChildFailed, port_is_open
from tests.support.waiting import end

pytestmark = pytest.mark.cluster


def nodes(zookeeper: ZooKeeperServer, path: str) -> list[str]:
    client = KazooClient(zookeeper.address)
    client.start(timeout=15)
    try:
        return list(client.get_children(path))
    finally:
        client.stop()
        client.close()


async def test_zookeeper_is_killed_and_keeps_its_data(java_parts: Path, tmp_path: Path) -> None:
    server = ZooKeeperServer(tmp_path / "zookeeper")
    try:
        await server.start()
        assert await server.ask("ruok") == "imok"
        chroot = server.fresh_chroot()
        server.kill()
        assert not port_is_open(server.port)
        await server.restart()
        assert chroot.lstrip("/") in nodes(server, "/")
        await server.stop()
        assert not server.running
    finally:
        server.kill()


async def test_bookies_on_oxia_register_and_return(
    fresh_oxia: OxiaServer, start_bookies: StartBookies
) -> None:
    cluster = await start_bookies(OnOxia(fresh_oxia))
    first = cluster.bookies[0]
    before = await cluster.root.registrations(first.bookie_id)
    first.kill()
    await first.until_unregistered()
    await cluster.mend()
    assert not before & await cluster.root.registrations(first.bookie_id)


async def test_each_test_has_an_empty_tree(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    assert nodes(zookeeper, zookeeper_chroot) == []
    assert zookeeper.fresh_chroot() != zookeeper_chroot


async def test_oxia_is_killed_paused_and_comes_back(fresh_oxia: OxiaServer) -> None:
    fresh_oxia.kill()
    assert not await fresh_oxia.is_serving()
    await fresh_oxia.restart()
    fresh_oxia.pause()
    assert fresh_oxia.paused
    fresh_oxia.resume()
    await fresh_oxia.until_serving()
    await fresh_oxia.stop()
    assert not await fresh_oxia.is_serving()


async def test_oxia_comes_back_under_clients_that_do_not_wait(fresh_oxia: OxiaServer) -> None:
    """Its first life may end in their first question; `start` then gives it another."""

    async def ask_for_ever() -> None:
        while True:
            await asyncio.to_thread(fresh_oxia.has_leaders)

    asking = [asyncio.create_task(ask_for_ever()) for _ in range(4)]
    try:
        for _ in range(5):
            await fresh_oxia.restart()
            assert await fresh_oxia.is_serving()
    finally:
        await end(*asking)


async def test_server_that_does_not_start_shows_its_log(fresh_oxia: OxiaServer) -> None:
    await fresh_oxia.stop()
    (fresh_oxia.directory / "wal").rename(fresh_oxia.directory / "gone")
    (fresh_oxia.directory / "wal").write_text("not a directory")
    with pytest.raises(ChildFailed, match=r"oxia does not serve(.|\n)*not a directory"):
        await fresh_oxia.start()
    assert not fresh_oxia.running


async def test_bookies_register_leave_and_return(
    zookeeper: ZooKeeperServer, bookies: BookieCluster
) -> None:
    first, second, _third = bookies.bookies
    try:
        first.kill()
        second.pause()
        await first.until_unregistered()
        await second.until_unregistered()
    finally:
        await bookies.mend()
    assert not second.paused
    for bookie in bookies.bookies:
        assert port_is_open(bookie.port)
        assert await bookie.root.registrations(bookie.bookie_id)


async def test_bookie_that_is_killed_waits_for_its_own_record(bookies: BookieCluster) -> None:
    bookie = bookies.bookies[0]
    before = await bookies.root.registrations(bookie.bookie_id)
    await bookie.restart()
    assert not before & await bookies.root.registrations(bookie.bookie_id)


async def test_bookie_that_does_not_end_when_told_is_killed(bookies: BookieCluster) -> None:
    bookie = bookies.bookies[0]
    bookie.stop_patience_s = 0.1
    bookie.pause()
    try:
        await bookie.stop()
        assert not bookie.running
    finally:
        del bookie.stop_patience_s
        await bookies.mend()


@pytest.mark.parametrize("kind", [OnZooKeeper, OnZooKeeperAsPulsar])
async def test_read_only_bookie_of_either_driver_is_registered(
    zookeeper: ZooKeeperServer,
    zookeeper_chroot: str,
    start_bookies: StartBookies,
    kind: type[OnZooKeeper],
) -> None:
    cluster = await start_bookies(
        kind(zookeeper, zookeeper_chroot), 1, {"forceReadOnlyBookie": "true"}
    )
    (bookie,) = cluster.bookies
    readonly = nodes(zookeeper, f"{zookeeper_chroot}/ledgers/available/readonly")
    assert readonly == [bookie.bookie_id]
