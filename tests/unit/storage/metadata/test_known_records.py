"""Groups that are committed without a look at what is stored."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from storage.clock import SystemClock
from storage.metadata.group import Change, Stored
from storage.metadata.known_records import KnownRecords
from storage.metadata.operations import Delete, EndSessions, Operation, Put
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.sqlite_writer import LoadedView
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    MetadataError,
    Version,
    VersionConflict,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteMetadataStore]:
    """A store that was opened anew: it knows nothing of what is in it."""
    first = await SqliteMetadataStore.open(path, SystemClock())
    await first.put("/old/a", b"1", partition="p", indexes=[IndexEntry("i", "k")])
    await first.put("/s/", b"", partition="p", sequence=True)
    await first.close()
    opened = await SqliteMetadataStore.open(path, SystemClock())
    yield opened
    await opened.close()


class Loads:
    """Counts the groups that are looked up."""

    def __init__(self, store: SqliteMetadataStore) -> None:
        self.count = 0
        writer = store._files.writer
        load = writer._load

        def counted(operations: Iterable[Operation]) -> LoadedView:
            self.count += 1
            return load(operations)

        writer._load = counted  # type: ignore[method-assign]


def put(key: str, expect: Version | None = None) -> Put:
    return Put(key, b"", None, expect, None, (), 0, 0)


def stored(version: int) -> Stored:
    return Stored(Version(version), 0, 0, 0, None, None, ())


@pytest.mark.parametrize(
    "operations",
    [
        [put("/new")],
        [put("/new", Version(3))],
        [Delete("/new", None, None)],
        [put("/known"), EndSessions((1,))],
        [put("/known"), put("/new", ABSENT), Delete("/new", None, None)],
    ],
)
def test_record_that_may_exist_is_read(operations: list[Operation]) -> None:
    known = KnownRecords()
    known.take([Change("/known", None, stored(1), b"")])
    assert known.view(operations, set()) is None


def test_written_or_new_record_is_not_read() -> None:
    known = KnownRecords()
    known.take([Change("/known", None, stored(7), b""), Change("/gone", stored(1), None, b"")])
    view = known.view([put("/known"), Delete("/gone", None, None), put("/new", ABSENT)], {5})
    assert view is not None
    assert view.stored("/known") == stored(7)
    assert view.stored("/gone") is None
    assert view.stored("/new") is None
    assert view.session_exists(5)


def test_the_keys_written_longest_ago_go_first() -> None:
    known = KnownRecords(max_keys=2)
    known.take(Change(key, None, stored(1), b"") for key in ("/a", "/b"))
    known.take([Change("/a", stored(1), stored(2), b""), Change("/c", None, stored(3), b"")])
    assert len(known) == 2
    assert known.view([put("/b")], set()) is None
    assert known.view([put("/a"), put("/c")], set()) is not None


async def test_a_record_s_whole_life_needs_no_look(store: SqliteMetadataStore) -> None:
    loads = Loads(store)
    made = await store.put("/t/x", b"1", expect=ABSENT, indexes=[IndexEntry("i", "1")])
    ended = await store.put("/t/x", b"2", expect=made.version, indexes=[IndexEntry("i", "2")])
    assert [hit.index_key for hit in await store.scan_index("i", "0", "9")] == ["2"]
    with pytest.raises(VersionConflict):
        await store.put("/t/x", b"3", expect=made.version)
    assert await store.delete("/t/x", expect=ended.version)
    assert not await store.delete("/t/x")
    again = await store.put("/t/x", b"4", expect=ABSENT)
    assert again.modifications == 0
    assert again.version > ended.version
    assert loads.count == 0


async def test_a_record_that_is_there_after_all_conflicts_and_the_others_apply(
    store: SqliteMetadataStore,
) -> None:
    loads = Loads(store)
    results = await asyncio.gather(
        store.put("/new/a", b"1", expect=ABSENT),
        store.put("/old/a", b"2", partition="p", expect=ABSENT),
        store.put("/new/b", b"3", expect=ABSENT),
        return_exceptions=True,
    )
    assert loads.count == 1
    assert isinstance(results[1], VersionConflict)
    found = await store.get_many(["/new/a", "/new/b"])
    assert [record.value for record in found if record is not None] == [b"1", b"3"]
    kept = await store.get("/old/a", partition="p")
    assert kept is not None
    assert kept.value == b"1"
    assert len(await store.scan_index("i", "k", "l")) == 1


async def test_nothing_is_made_below_a_sequence_that_nobody_knew_of(
    store: SqliteMetadataStore,
) -> None:
    with pytest.raises(InvalidMetadataRequest, match="only the sequence makes keys"):
        await store.put("/s/x", b"", expect=ABSENT)
    assert len(await store.children("/s")) == 1


async def test_after_a_failed_commit_nothing_is_known(
    store: SqliteMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await store.put("/t/x", b"1", expect=ABSENT)
    writer = store._files.writer
    save = writer._save

    def saved_but_not_told(*group: object) -> None:
        save(*group)  # type: ignore[arg-type]
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(writer, "_save", saved_but_not_told)
    monkeypatch.setattr(writer, "_took_effect", lambda made: False)
    with pytest.raises(MetadataError):
        await store.put("/t/x", b"2", expect=made.version)
    monkeypatch.undo()
    with pytest.raises(VersionConflict):
        await store.put("/t/x", b"3", expect=made.version)
