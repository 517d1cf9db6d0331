"""The SQLite backend when the disk fails or the process is killed."""

import asyncio
import resource
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.clock import SystemClock
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import IndexEntry, MetadataError

ROOT = Path(__file__).resolve().parents[4]
ROUNDS = 3
ACKNOWLEDGED = 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteMetadataStore]:
    opened = await SqliteMetadataStore.open(path, SystemClock())
    await opened.put("/kept", b"value", indexes=[IndexEntry("i", "k")])
    yield opened
    await opened.close()


@contextmanager
def no_file_grows(limit_bytes: int) -> Iterator[None]:
    """Writes beyond this offset fail, as on a broken disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def still_readable(store: SqliteMetadataStore) -> None:
    record = await store.get("/kept")
    assert record is not None
    assert record.value == b"value"
    assert [each.key for each in await store.scan("/", "//")] == ["/kept"]
    assert [hit.record.key for hit in await store.scan_index("i", "k", "l")] == ["/kept"]


async def test_an_io_error_fails_the_commit_and_nothing_else(
    store: SqliteMetadataStore, path: Path
) -> None:
    watch = store.watch_children("/")
    wal = path.with_name(path.name + "-wal")
    with no_file_grows(wal.stat().st_size):
        results = await asyncio.gather(
            store.put("/lost", b"v" * 50_000, indexes=[IndexEntry("i", "l")]),
            store.delete("/kept"),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [MetadataError, MetadataError]
        assert results[0] is not results[1]
        assert "the disk failed" in str(results[0])
        await still_readable(store)
    await still_readable(store)
    made = await store.put("/later", b"v")
    assert (await anext(watch)).key == "/later"
    assert await store.children("/") == ["kept", "later"]
    again = await store.get("/later")
    assert again is not None
    assert again.version == made.version
    watch.close()


async def test_a_full_disk_fails_the_commit_and_nothing_else(store: SqliteMetadataStore) -> None:
    connection = store._files.writer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(MetadataError, match="the disk is full: free space"):
        await store.put("/lost", b"v" * 100_000)
    await still_readable(store)
    await store.put("/kept", b"value", indexes=[IndexEntry("i", "k")])
    connection.execute("PRAGMA max_page_count = 1000000")
    await store.put("/later", b"v" * 100_000)
    assert await store.children("/") == ["kept", "later"]


async def test_a_full_disk_is_the_operators_error_for_records_of_this_process_too(
    store: SqliteMetadataStore,
) -> None:
    """The writer knows the record from memory, so its first statement is the save."""
    await store.put("/made/here", b"small")
    connection = store._files.writer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(MetadataError, match="the disk is full: free space"):
        await store.put("/made/here", b"v" * 100_000)
    connection.execute("PRAGMA max_page_count = 1000000")
    await store.put("/made/here", b"v" * 100_000)


async def test_an_io_error_is_the_operators_error_for_records_of_this_process_too(
    store: SqliteMetadataStore, path: Path
) -> None:
    await store.put("/made/here", b"small")
    wal = path.with_name(path.name + "-wal")
    with (
        no_file_grows(wal.stat().st_size),
        pytest.raises(MetadataError, match="the disk failed: look at the kernel log"),
    ):
        await store.put("/made/here", b"v" * 50_000)
    await still_readable(store)


async def test_ephemerals_go_once_the_disk_works_again(
    store: SqliteMetadataStore, path: Path
) -> None:
    session = await store.open_session(timeout_ms=60_000, identity="test")
    await store.put("/e", b"", session=session)
    watch = store.watch_key("/e")
    wal = path.with_name(path.name + "-wal")
    with no_file_grows(wal.stat().st_size):
        with pytest.raises(MetadataError):
            await session.close()
        assert session.lost
        assert await store.get("/e") is not None
    assert (await asyncio.wait_for(anext(watch), 20)).record is None
    assert await store.get("/e") is None
    watch.close()


async def test_a_damaged_page_is_reported(path: Path) -> None:
    store = await SqliteMetadataStore.open(path, SystemClock())
    await asyncio.gather(*(store.put(f"/n/{n:05}", b"v" * 500) for n in range(500)))
    await store.close()
    damaged = bytearray(path.read_bytes())
    damaged[8192:] = b"\xff" * (len(damaged) - 8192)
    path.write_bytes(damaged)
    with pytest.raises(MetadataError, match="damaged: stop, restore"):  # noqa: PT012 - when it shows
        store = await SqliteMetadataStore.open(path, SystemClock())
        try:
            await store.scan("/n/", "/n//")
        finally:
            await store.close()


async def test_a_killed_process_loses_nothing_acknowledged(path: Path) -> None:
    acknowledged: dict[str, str] = {}
    for round_number in range(ROUNDS):
        acknowledged |= await asyncio.to_thread(kill_under_load, path, round_number)
        store = await SqliteMetadataStore.open(path, SystemClock())
        keys = list(acknowledged)
        records = await store.get_many(keys)
        found = {record.key: record.value.decode() for record in records if record is not None}
        assert found == acknowledged
        hits = await store.scan_index("i", "/", "0")
        assert all(hit.index_key == hit.record.key for hit in hits)
        assert set(keys) <= {hit.record.key for hit in hits}
        assert await store.children("/e") == []
        assert await store.scan_index("e", "0", "~") == []
        await store.close()
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM session").fetchone() == (0,)
        connection.close()


def kill_under_load(path: Path, round_number: int) -> dict[str, str]:
    """What the process had acknowledged when it was killed."""
    command = [sys.executable, "-m", "tests.unit.storage.metadata.killed_store", str(path)]
    process = subprocess.Popen(
        [*command, str(round_number)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if len(lines) == ACKNOWLEDGED:
                process.kill()
    finally:
        process.kill()
        process.wait(20)
    assert len(lines) >= ACKNOWLEDGED
    return dict(line.split() for line in lines if line.endswith("\n"))
