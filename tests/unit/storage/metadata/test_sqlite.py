"""The SQLite backend: group commit, threads, opening, backup."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from storage.clock import SystemClock
from storage.metadata import sqlite_file
from storage.metadata.embedded_store import QueuedRequest
from storage.metadata.operations import Operation
from storage.metadata.recent_changes import RecentChanges
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.sqlite_file import SCHEMA_VERSION, UnknownMetadataFile, back_up
from storage.metadata.sqlite_writer import CommitResult
from storage.metadata.store import EventKind, IndexEntry, MetadataError
from tests.support.waiting import TIMEOUT_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteMetadataStore]:
    opened = await open_store(path)
    yield opened
    await opened.close()


async def open_store(path: Path) -> SqliteMetadataStore:
    return await SqliteMetadataStore.open(path, SystemClock())


class Commits:
    """Counts the commits of a store, and fails one if asked to."""

    def __init__(self, store: SqliteMetadataStore) -> None:
        self.groups: list[int] = []
        self.started = threading.Event()
        self.bug = False
        self._commit = store._files.writer.commit
        store._files.writer.commit = self.commit  # type: ignore[method-assign]

    def commit(self, operations: Sequence[Operation]) -> CommitResult:
        self.groups.append(len(operations))
        self.started.set()
        if self.bug:
            raise ZeroDivisionError("a bug")
        return self._commit(operations)


async def test_writes_queued_during_a_commit_are_the_next_commit(
    store: SqliteMetadataStore, path: Path
) -> None:
    commits = Commits(store)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    puts = [asyncio.ensure_future(store.put("/first", b""))]
    assert await asyncio.to_thread(commits.started.wait, 20)
    for n in range(100):
        puts.append(asyncio.ensure_future(store.put(f"/n/{n}", b"")))
        await asyncio.sleep(0)
    assert not any(put.done() for put in puts)
    blocker.execute("ROLLBACK")
    blocker.close()
    await asyncio.gather(*puts)
    assert commits.groups == [1, 100]


async def test_reads_go_on_during_a_commit(store: SqliteMetadataStore, path: Path) -> None:
    await store.put("/d/a", b"old", indexes=[IndexEntry("i", "k")])
    commits = Commits(store)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    put = asyncio.ensure_future(store.put("/d/a", b"new"))
    assert await asyncio.to_thread(commits.started.wait, 20)
    record = await store.get("/d/a")
    assert record is not None
    assert record.value == b"old"
    assert await store.children("/d") == ["a"]
    assert len(await store.scan_index("i", "k", "l")) == 1
    assert not put.done()
    blocker.execute("ROLLBACK")
    blocker.close()
    await put


async def test_a_read_waits_until_watchers_know_as_much(store: SqliteMetadataStore) -> None:
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    store._reads += 1
    store._deliver_read(store._published_revision + 1, [QueuedRequest(("/a",), done)], {})
    assert not done.done()
    watch = store.watch_key("/a")
    await store.put("/a", b"")
    assert await asyncio.wait_for(done, TIMEOUT_S) == {}
    assert (await anext(watch)).kind is EventKind.UPSERT
    watch.close()


async def test_a_bug_in_a_commit_fails_its_operations_only(store: SqliteMetadataStore) -> None:
    commits = Commits(store)
    commits.bug = True
    with pytest.raises(MetadataError, match="bug"):
        await store.put("/a", b"")
    commits.bug = False
    await store.put("/b", b"")
    assert await store.children("/") == ["b"]


async def test_a_bug_in_what_is_remembered_keeps_nobody_waiting(
    store: SqliteMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    await store.put("/a", b"old")
    early: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    store._reads += 1
    store._deliver_read(store._published_revision + 1, [QueuedRequest(("/a",), early)], {})
    monkeypatch.setattr(RecentChanges, "take", broken)
    async with asyncio.timeout(TIMEOUT_S):
        with capture_logs() as logs:
            await store.put("/a", b"new")
            assert await early == {}
    assert [each["event"] for each in logs] == ["changes_not_remembered"]
    monkeypatch.undo()
    record = await store.get("/a")
    assert record is not None
    assert record.value == b"new"


async def test_a_close_that_is_cancelled_goes_on(path: Path) -> None:
    store = await open_store(path)
    commits = Commits(store)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    put = asyncio.ensure_future(store.put("/a", b"1"))
    assert await asyncio.to_thread(commits.started.wait, 20)
    closing_store = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing_store.cancel()
    await asyncio.wait({closing_store})
    blocker.execute("ROLLBACK")
    blocker.close()
    async with asyncio.timeout(TIMEOUT_S):
        await store.close()
    await put
    for thread in (store._commits._thread, store._ranges._thread):
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        store._files.writer._connection.execute("SELECT 1")


async def test_durability_is_what_the_decision_says(store: SqliteMetadataStore) -> None:
    connection = store._files.writer._connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


async def test_everything_is_there_after_a_restart(path: Path) -> None:
    store = await open_store(path)
    made = await store.put("/a", b"v", partition="p", indexes=[IndexEntry("i", "k")])
    await store.put("/gone", b"")
    await store.delete("/gone")
    last = await store.put("/s/", b"", partition="p", sequence=True)
    before = await store.get("/a", partition="p")
    await store.close()
    assert not path.with_name(path.name + "-wal").exists()

    store = await open_store(path)
    assert await store.get("/a", partition="p") == before
    assert [hit.record.version for hit in await store.scan_index("i", "k", "l")] == [made.version]
    again = await store.put("/gone", b"")
    assert again.version not in {made.version, last.version}
    await store.delete(last.key, partition="p")
    assert (await store.put("/s/", b"", partition="p", sequence=True)).key > last.key
    await store.close()


async def test_opening_ends_all_sessions_of_earlier_processes(path: Path) -> None:
    store = await open_store(path)
    for number in range(3):
        session = await store.open_session(timeout_ms=60_000, identity="old")
        await store.put(f"/e/{number}", b"", session=session, indexes=[IndexEntry("i", "k")])
        await store.put(f"/e/{number + 10}", b"", session=session)
    await store.put("/e/0", b"stays")
    await abandon(store)

    store = await open_store(path)
    assert await store.children("/e") == ["0"]
    assert await store.scan_index("i", "k", "l") == []
    session = await store.open_session(timeout_ms=60_000, identity="new")
    await store.put("/e/9", b"", session=session)
    assert await store.children("/e") == ["0", "9"]
    await store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM session").fetchone() == (0,)
    connection.close()


async def test_a_cancelled_open_leaves_no_session(store: SqliteMetadataStore, path: Path) -> None:
    opening = asyncio.ensure_future(store.open_session(timeout_ms=60_000, identity="test"))
    await asyncio.sleep(0)
    opening.cancel()
    await store.put("/a", b"")
    await store.put("/b", b"")
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM session").fetchone() == (0,)
    assert connection.execute("SELECT revision FROM store").fetchone() == (3,)
    connection.close()


async def abandon(store: SqliteMetadataStore) -> None:
    """Release the file as a killed process does: sessions stay as they are."""
    await store._shut_down()
    for session in store._sessions._sessions.values():
        session.end()


async def test_a_newer_schema_is_refused_by_name(path: Path) -> None:
    await (await open_store(path)).close()
    newer = SCHEMA_VERSION + 1
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {newer}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(UnknownMetadataFile, match=f"schema version {newer}.*start the newer"):
        await open_store(path)
    assert path.read_bytes() == before


async def test_files_of_others_are_refused_and_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(UnknownMetadataFile, match="another program"):
        await open_store(path)
    path.write_bytes(b"not a database, whatever its name says " * 100)
    with pytest.raises(MetadataError, match="not a metadata file"):
        await open_store(path)
    path.write_bytes(before)


async def test_an_empty_file_is_a_new_store(path: Path) -> None:
    path.touch()
    store = await open_store(path)
    await store.put("/a", b"")
    await store.close()


async def test_a_backup_is_of_one_moment(store: SqliteMetadataStore, tmp_path: Path) -> None:
    """Taken under load: it opens as a store, whole, with all that was acknowledged before."""
    stop = asyncio.Event()
    acknowledged = 0

    async def write(caller: int) -> None:
        nonlocal acknowledged
        number = 0
        while not stop.is_set():
            key = f"/b/{caller}-{number:06}"
            await store.put(key, b"v" * 500, indexes=[IndexEntry("i", key)])
            acknowledged += 1
            number += 1

    writing = [asyncio.ensure_future(write(caller)) for caller in range(8)]
    while acknowledged < 100:
        await asyncio.sleep(0.001)
    before = {record.key for record in await store.scan("/b/", "/b//")}
    target = tmp_path / "backup.db"
    await asyncio.to_thread(back_up, tmp_path / "metadata.db", target)
    after = {record.key for record in await store.scan("/b/", "/b//")}
    stop.set()
    await asyncio.gather(*writing)

    copy = await open_store(target)
    records = await copy.scan("/b/", "/b//")
    assert before <= {record.key for record in records} <= after
    hits = await copy.scan_index("i", "/", "0")
    assert [hit.record for hit in hits] == records
    await copy.put("/b/new", b"")
    await copy.close()
    assert [each.name for each in tmp_path.glob("*.partial*")] == []


async def test_no_commit_happens_in_the_moment_of_a_backup(
    store: SqliteMetadataStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller notes then is of the same moment as the copy."""
    loop = asyncio.get_running_loop()
    refused: list[str] = []

    def at_moment() -> None:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                refused.append(str(error))

    hold = sqlite_file._hold_moment

    def hold_then_commit(of: Path, source: sqlite3.Connection, noting: Callable[[], None]) -> None:
        hold(of, source, noting)
        asyncio.run_coroutine_threadsafe(store.put("/after", b""), loop).result(20)

    monkeypatch.setattr(sqlite_file, "_hold_moment", hold_then_commit)
    await store.put("/before", b"")
    await asyncio.to_thread(back_up, path, tmp_path / "copy.db", at_moment)
    assert refused == ["database is locked"]
    copy = await open_store(tmp_path / "copy.db")
    assert await copy.children("/") == ["before"]
    await copy.close()


async def test_a_backup_replaces_an_older_one(store: SqliteMetadataStore, tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    target.write_bytes(b"older")
    await store.put("/a", b"")
    await asyncio.to_thread(back_up, tmp_path / "metadata.db", target)
    copy = await open_store(target)
    assert await copy.children("/") == ["a"]
    await copy.close()


async def test_a_backup_that_fails_says_so(store: SqliteMetadataStore, tmp_path: Path) -> None:
    with pytest.raises(MetadataError, match="could not be copied"):
        await asyncio.to_thread(back_up, tmp_path / "metadata.db", tmp_path / "no" / "backup.db")
    await store.put("/a", b"")
