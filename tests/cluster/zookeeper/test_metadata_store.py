"""The metadata store on a real ZooKeeper: outages, expiry, other processes, what people see."""

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from config import bounds
from storage.clock import SystemClock
from storage.metadata.keys import sequence_key
from storage.metadata.open import open_metadata_store
from storage.metadata.store import (
    ABSENT,
    EventKind,
    IndexEntry,
    MetadataError,
    PutResult,
    RecordTooLarge,
    SessionLost,
    VersionConflict,
)
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import RequestFailed, ZooKeeperClient
from storage.metadata.zookeeper.sessions import ZooKeeperSession
from storage.metadata.zookeeper.store import ZooKeeperMetadataStore
from tests.cluster.zookeeper.plain_client import plain_client
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.bounds import set_bound
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

PATIENCE_S = 30
SESSION_MS = 5000


@asynccontextmanager
async def opened(server: ZooKeeperServer, chroot: str) -> AsyncIterator[ZooKeeperMetadataStore]:
    url = f"zk:{server.address}{chroot}"
    store = await open_metadata_store(url, SystemClock(), random.Random())
    assert isinstance(store, ZooKeeperMetadataStore)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def own_server(java_parts: Path, tmp_path: Path) -> AsyncIterator[ZooKeeperServer]:
    """A server that the test may break, with sessions of up to a minute.

    On a busy machine it takes longer to start than its sessions usually last.
    """
    server = ZooKeeperServer(tmp_path / "zookeeper", tick_ms=3000)
    try:
        await server.start()
        yield server
    finally:
        server.kill()


def are_done(puts: Sequence[asyncio.Future[PutResult]], count: int) -> bool:
    return sum(put.done() for put in puts) >= count


async def expire(server: ZooKeeperServer, client: ZooKeeperClient) -> None:
    """Have the server end a client's session, as after a long silence."""
    thief = KazooClient(server.address, client_id=client._library.client_id)
    await asyncio.to_thread(thief.start)
    await asyncio.to_thread(thief.stop)
    thief.close()


async def test_writes_ride_through_a_restart_once_each(
    own_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of a sequence: a write that was done twice, or lost, would show."""
    # A busy machine starts it slowly; with the session the outcome of what is in flight is lost.
    set_bound(monkeypatch, "ZOOKEEPER_REQUEST_S", 60)
    set_bound(monkeypatch, "ZOOKEEPER_SESSION_MS", 60_000)
    chroot = own_server.fresh_chroot()
    async with opened(own_server, chroot) as store:
        await store.put("/s/", b"first", partition="p", sequence=True)
        for done in (0, 40):
            puts = [
                asyncio.ensure_future(store.put("/s/", b"", partition="p", sequence=True))
                for _ in range(300)
            ]
            await until(partial(are_done, puts, done))
            own_server.kill()
            await own_server.restart()
            made = await asyncio.gather(*puts)
            assert [each.key for each in made] == sorted({each.key for each in made})
        keys = [record.key for record in await store.scan("/s/", "/s//", partition="p")]
        assert keys == [sequence_key("/s/", number) for number in range(1, 602)]


async def test_answers_lost_by_a_broken_connection_are_settled(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    """The server did what it was asked; only the answers are gone."""
    async with opened(zookeeper, zookeeper_chroot) as store:
        for n in range(20):
            created = [
                asyncio.ensure_future(store.put(f"/c/{n}-{i}", b"v", expect=ABSENT))
                for i in range(50)
            ]
            await asyncio.sleep(0)
            store._client._library._connection._socket.shutdown(socket.SHUT_RDWR)
            made = await asyncio.gather(*created)
            records = await store.get_many([each.key for each in made])
            assert [each.version for each in made] == [
                record and record.version for record in records
            ]


async def test_answers_that_the_library_drops_as_it_breaks_are_settled(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    """Its thread ends in the middle of an answer, and again before it has the next connection."""
    async with opened(zookeeper, zookeeper_chroot) as store:
        library = store._client._library
        connection = library._connection
        read, connect = connection._read_response, connection._connect_loop

        def drop(*_: object) -> None:
            connection._read_response = read
            connection._connect_loop = break_again
            library._pending.popleft()
            raise RuntimeError("defect")

        def break_again(_: object) -> None:
            connection._connect_loop = connect
            raise RuntimeError("defect")

        await store.put("/c/first", b"v")
        for n in range(3):
            connection._read_response = drop
            puts = (store.put(f"/c/{n}-{i}", b"v", expect=ABSENT) for i in range(100))
            made = await asyncio.gather(*puts)
            assert connection._read_response == read
            assert connection._connect_loop == connect
            records = await store.get_many([each.key for each in made])
            assert [each.version for each in made] == [
                record and record.version for record in records
            ]


async def test_a_server_that_is_away_is_told_within_the_bound(
    own_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chroot = own_server.fresh_chroot()
    before = threading.active_count()
    async with opened(own_server, chroot) as store:
        made = await store.put("/a", b"1")
        set_bound(monkeypatch, "ZOOKEEPER_REQUEST_S", 1)
        own_server.kill()
        calls = (
            store.put("/a", b"2", expect=made.version),
            store.put("/b", b"2"),
            store.get("/a"),
            store.scan("/", "//"),
            store.delete("/a"),
        )
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, MetadataError) for result in results), results
            assert "unknown" in str(results[0])
    await until(lambda: threading.active_count() <= before)


async def test_nothing_of_a_closed_store_runs_on(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    before = threading.active_count()
    async with opened(zookeeper, zookeeper_chroot) as store:
        session = await store.open_session(timeout_ms=SESSION_MS, identity="one")
        await store.put("/e", b"", session=session)
        assert threading.active_count() > before
    await until(lambda: threading.active_count() <= before)
    async with plain_client(zookeeper) as client:
        for place in ("writers", "sessions", "records"):
            path = f"{zookeeper_chroot}/{place}"
            assert await asyncio.to_thread(client.get_children, path) == []


async def test_writes_go_on_after_the_session_of_the_process_expired(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    async with opened(zookeeper, zookeeper_chroot) as store:
        watch = store.watch_children("/d")
        made = await store.put("/d/a", b"1")
        assert (await anext(watch)).key == "/d/a"
        await expire(zookeeper, store._client)
        again = await store.put("/d/a", b"2", expect=made.version)
        record = await store.get("/d/a")
        assert record is not None
        assert (record.value, record.version) == (b"2", again.version)
        async with asyncio.timeout(PATIENCE_S):
            assert (await anext(watch)).kind is EventKind.RESYNC
        await store.put("/d/b", b"")
        async with asyncio.timeout(PATIENCE_S):
            while (await anext(watch)).key != "/d/b":
                pass
        watch.close()


async def test_a_defect_in_the_thread_of_the_library_is_no_end(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    """It ends the session, as an expiry does; then there is another one."""

    async with opened(zookeeper, zookeeper_chroot) as store:
        connection = store._client._library._connection
        send = connection._submit

        def broken(*_: object) -> None:
            connection._submit = send
            raise RuntimeError("defect")

        watch = store.watch_children("/d")
        made = await store.put("/d/a", b"1")
        assert (await anext(watch)).key == "/d/a"
        for value in (b"2", b"3"):
            connection._submit = broken
            with pytest.raises(RequestFailed):
                await store._client.call(requests.sync("/"))
            made = await store.put("/d/a", value, expect=made.version)
            async with asyncio.timeout(PATIENCE_S):
                while (await anext(watch)).kind is not EventKind.RESYNC:
                    pass
        record = await store.get("/d/a")
        assert record is not None
        assert record.value == b"3"
        watch.close()


async def test_an_expired_session_is_told(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    async with opened(zookeeper, zookeeper_chroot) as store:
        session = await store.open_session(timeout_ms=SESSION_MS, identity="one")
        assert isinstance(session, ZooKeeperSession)
        await store.put("/e/a", b"", session=session, indexes=[IndexEntry("i", "k")])
        await expire(zookeeper, session.client)
        async with asyncio.timeout(PATIENCE_S):
            await session.wait_lost()
        with pytest.raises(SessionLost):
            await store.put("/e/b", b"", session=session)
        assert await store.children("/e") == []
        assert await store.scan_index("i", "k", "l") == []
        await session.close()


async def test_a_frozen_server_costs_the_session(own_server: ZooKeeperServer) -> None:
    """It may have expired it, for all that this process can know."""
    chroot = own_server.fresh_chroot()
    async with opened(own_server, chroot) as store:
        session = await store.open_session(timeout_ms=1000, identity="one")
        own_server.pause()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await session.wait_lost()
        finally:
            own_server.resume()
        assert (await store.put("/after", b"")).modifications == 0


async def test_a_record_made_anew_is_another_one(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    """Its node has the same version in ZooKeeper as the one before it had."""
    async with (
        opened(zookeeper, zookeeper_chroot) as one,
        opened(zookeeper, zookeeper_chroot) as two,
    ):
        for remaking in ("delete", "session"):
            key = f"/r/{remaking}"
            session = await one.open_session(timeout_ms=SESSION_MS, identity="one")
            held = session if remaking == "session" else None
            mine = await one.put(key, b"mine", session=held)
            if held is None:
                await two.delete(key)
            else:
                await session.close()
            theirs = await two.put(key, b"theirs", expect=ABSENT)
            with pytest.raises(VersionConflict):
                await one.put(key, b"late", expect=mine.version)
            with pytest.raises(VersionConflict):
                await one.delete(key, expect=mine.version)
            record = await one.get(key)
            assert record is not None
            assert (record.value, record.version) == (b"theirs", theirs.version)
            await session.close()


async def test_two_processes_lose_nothing_to_each_other(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    async with (
        opened(zookeeper, zookeeper_chroot) as one,
        opened(zookeeper, zookeeper_chroot) as two,
    ):
        await one.put("/counter", b"0")

        async def increment(store: ZooKeeperMetadataStore) -> None:
            while True:
                record = await store.get("/counter")
                assert record is not None
                value = str(int(record.value) + 1).encode()
                try:
                    await store.put("/counter", value, expect=record.version)
                except VersionConflict:
                    continue
                return

        async def add(store: ZooKeeperMetadataStore) -> str:
            indexes = [IndexEntry("i", "k")]
            made = await store.put("/s/", b"", partition="p", sequence=True, indexes=indexes)
            return made.key

        async with asyncio.timeout(PATIENCE_S * 2):
            await asyncio.gather(*(increment(store) for store in (one, two) * 10))
            keys = await asyncio.gather(*(add(store) for store in (one, two) * 30))
        record = await two.get("/counter")
        assert record is not None
        assert (record.value, record.modifications) == (b"20", 20)
        assert len(set(keys)) == 60
        hits = await two.scan_index("i", "k", "l", fresh=True)
        assert [hit.record.key for hit in hits] == sorted(keys)


async def test_one_of_two_processes_creates(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    async with (
        opened(zookeeper, zookeeper_chroot) as one,
        opened(zookeeper, zookeeper_chroot) as two,
    ):
        puts = [
            store.put(f"/lock/{n}", name, expect=ABSENT)
            for n in range(50)
            for store, name in ((one, b"one"), (two, b"two"))
        ]
        results = await asyncio.gather(*puts, return_exceptions=True)
        for n in range(50):
            pair = results[2 * n : 2 * n + 2]
            assert sorted(type(each).__name__ for each in pair) == ["PutResult", "VersionConflict"]
            won = b"one" if isinstance(pair[0], PutResult) else b"two"
            record = await one.get(f"/lock/{n}")
            assert record is not None
            assert record.value == won


async def test_people_find_their_way(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are named as the layout says, and empty directories go."""
    set_bound(monkeypatch, "ZOOKEEPER_PRUNE_S", 0.01)
    async with opened(zookeeper, zookeeper_chroot) as store, plain_client(zookeeper) as client:

        async def children(path: str) -> list[str]:
            found = await asyncio.to_thread(client.get_children, f"{zookeeper_chroot}/{path}")
            return sorted(found)

        await store.put("/txn/id/(1,5)", b"OPEN", partition="(1,5)", indexes=[IndexEntry("i", "9")])
        await store.put("/txn/op/(1,5)/w:s", b"", partition="(1,5)")
        await store.put("/txn", b"")
        assert await children("records") == ["=txn", "txn"]
        assert await children("records/txn/id") == ["=(1,5)"]
        path = f"{zookeeper_chroot}/records/txn/id/=(1,5)"
        data, _ = await asyncio.to_thread(client.get, path)
        header, _, value = data.partition(b"\n")
        assert b'"partition":"(1,5)"' in header
        assert value == b"OPEN"
        buckets = [
            name
            for each in await children("indexes/i")
            for name in await children(f"indexes/i/{each}")
        ]
        assert buckets == ["9^,|txn|id|(1,5)"]
        await store.delete("/txn/op/(1,5)/w:s", partition="(1,5)")
        async with asyncio.timeout(PATIENCE_S):
            while await children("records/txn") != ["id"]:
                await asyncio.sleep(0.02)
        await store.delete("/txn/id/(1,5)", partition="(1,5)")
        async with asyncio.timeout(PATIENCE_S):
            while await children("records") != ["=txn"]:
                await asyncio.sleep(0.02)
        await store.put("/txn/op/(1,5)/w:s", b"again", partition="(1,5)")
        assert await store.children("/txn/op/(1,5)") == ["w:s"]


async def test_record_too_large_for_zookeeper_is_refused(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    """Sent, it would break the connection, again and again."""
    async with opened(zookeeper, zookeeper_chroot) as store:
        longest = random.Random(1).randbytes(bounds.ZOOKEEPER_REQUEST_BYTES - 2048)
        await store.put("/a", longest)
        record = await store.get("/a")
        assert record is not None
        assert record.value == longest
        with pytest.raises(RecordTooLarge):
            await store.put("/b", random.Random(2).randbytes(bounds.METADATA_VALUE_BYTES))
        assert await store.children("/") == ["a"]


async def test_a_follower_of_another_process_sees_its_changes(
    zookeeper: ZooKeeperServer, zookeeper_chroot: str
) -> None:
    async with (
        opened(zookeeper, zookeeper_chroot) as one,
        opened(zookeeper, zookeeper_chroot) as two,
    ):
        watch = two.watch_children("/")
        assert await two.children("/") == []
        made = await one.put("/x", b"1")
        async with asyncio.timeout(PATIENCE_S):
            event = await anext(watch)
        assert event.record is not None
        assert event.record.version == made.version
        await one.delete("/x")
        async with asyncio.timeout(PATIENCE_S):
            event = await anext(watch)
        assert (event.kind, event.key) == (EventKind.REMOVED, "/x")
        watch.close()
