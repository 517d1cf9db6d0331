"""Backups of a running data directory open, and have what was acknowledged before they began."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

import storage.backup
from magnetar.protocol.ids import LedgerId
from storage.backup import BackupRefused, backup
from storage.data_directory import DataDirectory, DataDirectoryTooNew, NotADataDirectory
from storage.ledger.local.local_store import LocalLedgerStore
from storage.metadata.sqlite_file import back_up
from tests.unit.storage.ledger.local.embedded import embedded_store, entry_for
from tests.unit.storage.ledger.local.support import append_all, read_all


def log_names(data: Path) -> set[str]:
    return {path.name for path in (data / "ledgers").glob("*.log")}


class Load:
    """Appends without end to ledgers that come and go."""

    def __init__(self, store: LocalLedgerStore) -> None:
        self._store = store
        self.acknowledged: dict[LedgerId, int] = {}
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            ledger = await self._store.create(custom={})
            ledger_id = ledger.ledger_id
            self.acknowledged[ledger_id] = 0
            for start in range(0, 120, 8):
                entries = [entry_for(ledger_id, start + n) for n in range(8)]
                await append_all(ledger, entries)
                self.acknowledged[ledger_id] += 8
            await ledger.close()
            if len(self.acknowledged) > 5:
                gone = sorted(self.acknowledged)[1]
                del self.acknowledged[gone]
                await self._store.delete(gone)

    async def reaches(self, ledger_id: int) -> None:
        while max(self.acknowledged, default=-1) < ledger_id:
            assert not self._task.done()
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def check_copy(path: Path, before: dict[LedgerId, int], after: set[LedgerId]) -> None:
    """`after`: ledgers that were there when the backup ended; others may be in it or not."""
    async with embedded_store(path) as store:
        ids = await store.list_ledgers()
        for ledger_id in ids:
            found = await read_all(await store.open(ledger_id))
            assert found == [entry_for(ledger_id, n) for n in range(len(found))]
            assert len(found) >= before.get(ledger_id, 0)
        assert before.keys() & after <= set(ids)
        fresh = await store.create(custom={})
        await append_all(fresh, [entry_for(fresh.ledger_id, 0)])
        await store.reclaim()
        for ledger_id in ids:
            assert await read_all(await store.open(ledger_id)) is not None


async def test_backups_under_load(tmp_path: Path) -> None:
    async with embedded_store(tmp_path / "data") as store:
        load = Load(store)
        for number in range(4):
            await load.reaches(8 + 6 * number)
            before = dict(load.acknowledged)
            target = tmp_path / f"copy{number}"
            await asyncio.to_thread(backup, tmp_path / "data", target)
            await check_copy(target, before, set(load.acknowledged))
        await load.stop()


async def test_nothing_is_removed_while_a_backup_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledgers of the metadata snapshot are deleted before their files are copied."""
    data = tmp_path / "data"
    async with embedded_store(data) as store:
        ledgers = [await store.create(custom={}) for _ in range(4)]
        for ledger in ledgers:
            await append_all(ledger, [entry_for(ledger.ledger_id, n) for n in range(300)])
        loop = asyncio.get_running_loop()
        removed: list[int] = []

        async def delete() -> None:
            for ledger in ledgers:
                await store.delete(ledger.ledger_id)
            removed.append((await store.reclaim()).removed)

        def back_up_then_delete(source: Path, target: Path, note: Callable[[], None]) -> None:
            before = log_names(data)
            back_up(source, target, note)
            asyncio.run_coroutine_threadsafe(delete(), loop).result(20)
            assert before <= log_names(data)

        monkeypatch.setattr(storage.backup, "back_up", back_up_then_delete)
        held = log_names(data)
        await asyncio.to_thread(backup, data, tmp_path / "copy")
        assert removed == [0]
        while held <= log_names(data):
            await store.reclaim()
    async with embedded_store(tmp_path / "copy") as store:
        for ledger in ledgers:
            found = await read_all(await store.open(ledger.ledger_id))
            assert found == [entry_for(ledger.ledger_id, n) for n in range(300)]


async def test_nothing_is_merged_while_a_backup_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merged file lacks what was deleted after the metadata snapshot, and hides its sources."""
    data = tmp_path / "data"
    async with embedded_store(data) as store:
        ledgers = [await store.create(custom={}) for _ in range(4)]
        for start in range(0, 600, 20):
            for ledger in ledgers:
                entries = [entry_for(ledger.ledger_id, start + n) for n in range(20)]
                await append_all(ledger, entries)
        loop = asyncio.get_running_loop()
        merged: list[int] = []

        async def delete_and_merge() -> None:
            for ledger in ledgers[:3]:
                await store.delete(ledger.ledger_id)
            merged.append((await store.reclaim()).merged)

        def back_up_then_merge(source: Path, target: Path, note: Callable[[], None]) -> None:
            back_up(source, target, note)
            asyncio.run_coroutine_threadsafe(delete_and_merge(), loop).result(20)

        monkeypatch.setattr(storage.backup, "back_up", back_up_then_merge)
        held = log_names(data)
        await asyncio.to_thread(backup, data, tmp_path / "copy")
        assert merged == [0]
        while held <= log_names(data):
            await store.reclaim()
    async with embedded_store(tmp_path / "copy") as store:
        for ledger in ledgers:
            found = await read_all(await store.open(ledger.ledger_id))
            assert found == [entry_for(ledger.ledger_id, n) for n in range(600)]


async def test_a_backup_of_a_stopped_directory_and_of_a_backup(tmp_path: Path) -> None:
    async with embedded_store(tmp_path / "data") as store:
        ledger = await store.create(custom={})
        await append_all(ledger, [b"a", b"b"])
    (tmp_path / "one").mkdir()
    backup(tmp_path / "data", tmp_path / "one")
    backup(tmp_path / "one", tmp_path / "two")
    async with embedded_store(tmp_path / "two") as store:
        assert await read_all(await store.open(ledger.ledger_id)) == [b"a", b"b"]


def test_backup_to_an_unsuitable_target_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    DataDirectory.open(data).close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for target in (data, data / "copy", tmp_path / "full", tmp_path / "full" / "x"):
        with pytest.raises(BackupRefused):
            backup(data, target)
    with pytest.raises(NotADataDirectory):
        backup(tmp_path / "nowhere", tmp_path / "copy")
    (data / "FORMAT").write_text("magnetar-data 99\n")
    with pytest.raises(DataDirectoryTooNew):
        backup(data, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_a_failed_backup_leaves_nothing_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded_store(tmp_path / "data") as store:
        await append_all(await store.create(custom={}), [b"a"])

    def full(source: Path, target: Path, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.backup, "_copy_prefix", full)
    with pytest.raises(OSError, match="No space"):
        backup(tmp_path / "data", tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


async def test_the_log_ends_where_the_metadata_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry whose claim came after the metadata snapshot would be read as committed."""
    data = tmp_path / "data"
    async with embedded_store(data) as store:
        ledger = await store.create(custom={})
        await append_all(ledger, [b"before"])
        loop = asyncio.get_running_loop()

        def append_after(source: Path, target: Path, note: Callable[[], None]) -> None:
            back_up(source, target, note)
            later = append_all(ledger, [b"after"])
            asyncio.run_coroutine_threadsafe(later, loop).result(20)

        monkeypatch.setattr(storage.backup, "back_up", append_after)
        await asyncio.to_thread(backup, data, tmp_path / "copy")
        assert await read_all(ledger) == [b"before", b"after"]
    async with embedded_store(tmp_path / "copy") as store:
        assert await read_all(await store.open(ledger.ledger_id)) == [b"before"]
