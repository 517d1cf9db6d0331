"""Starts: what they read, what they repair, what they refuse, and what they only complain about."""

from collections.abc import Mapping, Sequence

import pytest
from structlog.testing import capture_logs

from storage.ledger.local import codec
from storage.ledger.local.index import INDEX_HEAD_BYTES, decode_index_header
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.store import CorruptEntry, LedgerError, ReadableLedger
from storage.metadata.store import MetadataStore
from tests.unit.storage.ledger.local.simulated_disk import SimulatedDisk, disk_full, io_error
from tests.unit.storage.ledger.local.support import (
    append_all,
    append_each,
    new_metadata,
    opened,
    read_all,
    started,
)

ENTRIES = [b"%d" % n * 300 for n in range(10)]


async def crashed_store() -> tuple[dict[str, bytes], MetadataStore, ReadableLedger]:
    """Four groups in the newest file, never closed."""
    metadata, disk = new_metadata(), SimulatedDisk()
    store = await started(disk, metadata)
    ledger = await store.create(custom={})
    await append_each(ledger, [b"one", b"two", b"three", b"four"])
    return disk.survivors("durable"), metadata, ledger


async def closed_store() -> tuple[dict[str, bytes], MetadataStore, ReadableLedger]:
    """Ten entries in one sealed file."""
    metadata, disk = new_metadata(), SimulatedDisk()
    store = await started(disk, metadata)
    ledger = await store.create(custom={})
    await append_each(ledger, ENTRIES)
    await store.close()
    return disk.survivors("durable"), metadata, ledger


def errors(logs: Sequence[Mapping[str, object]]) -> list[object]:
    return [entry["event"] for entry in logs if entry["log_level"] == "error"]


async def test_newest_file_truncated_at_any_byte_keeps_its_whole_entries() -> None:
    files, _, _ = await crashed_store()
    ((name, data),) = files.items()
    wanted = [b"one", b"two", b"three", b"four"]
    ends = [data.index(entry) + len(entry) for entry in wanted]
    for cut in range(len(data) + 1):
        _, metadata, ledger = await crashed_store()
        store = await started(SimulatedDisk({name: data[:cut]}), metadata)
        found = await read_all(await opened(store, ledger))
        assert found == wanted[: sum(end <= cut for end in ends)]
        await store.close()


async def test_a_changed_byte_in_a_durable_group_is_an_error_and_hides_nothing_else() -> None:
    files, metadata, ledger = await crashed_store()
    ((name, data),) = files.items()
    broken = data.replace(b"two", b"tWo")
    disk = SimulatedDisk({name: broken})
    with capture_logs() as logs:
        store = await started(disk, metadata)
    assert errors(logs) == ["data_damaged", "data_damaged", "data_damage_found"]
    assert [str(ledger.missing) for ledger in store.damage.ledgers.values()] == ["((1, 1),)"]
    reader = await opened(store, ledger)
    assert reader.last_add_confirmed == 3
    assert await reader.read(0, 3, max_bytes=100) == [b"one"]
    with pytest.raises(CorruptEntry, match="Entry 1"):
        await reader.read(1, 3, max_bytes=100)
    assert await reader.read(2, 3, max_bytes=100) == [b"three", b"four"]
    await store.delete(reader.ledger_id)
    assert (await store.reclaim()).dropped == 0
    assert name in disk.files, "damaged files are left to the operator"
    await store.close()


async def test_a_lost_group_leaves_a_hole_that_reads_as_corrupt() -> None:
    files, metadata, ledger = await crashed_store()
    ((name, data),) = files.items()
    at = data.index(b"two") - codec.RECORD_HEADER_BYTES
    broken = data[:at] + bytes(codec.RECORD_HEADER_BYTES) + data[at + codec.RECORD_HEADER_BYTES :]
    with capture_logs() as logs:
        store = await started(SimulatedDisk({name: broken}), metadata)
    assert errors(logs) == ["data_damaged", "data_damaged", "data_damage_found"]
    assert [str(ledger.missing) for ledger in store.damage.ledgers.values()] == ["((1, 1),)"]
    reader = await opened(store, ledger)
    assert reader.last_add_confirmed == 3
    with pytest.raises(CorruptEntry, match="no log file"):
        await reader.read(1, 1, max_bytes=100)
    assert await reader.read(2, 2, max_bytes=100) == [b"three"]
    await store.close()


async def test_the_last_group_is_made_sure_before_it_counts() -> None:
    """Read from memory it may never have reached the disk: it is written and synced again."""
    files, metadata, ledger = await crashed_store()
    ((name, data),) = files.items()
    disk = SimulatedDisk({name: data})
    lost = data.rindex(codec.GROUP_MAGIC)
    disk.directory[name].durable = data[:lost]
    store = await started(disk, metadata)
    assert b"four" in disk.survivors("durable")[name]
    assert len(await read_all(await opened(store, ledger))) == 4
    await store.close()


async def test_a_start_writes_into_a_new_file() -> None:
    files, metadata, _ = await crashed_store()
    (name,) = files
    disk = SimulatedDisk(files)
    store = await started(disk, metadata, limits=LedgerLimits())
    await append_all(await store.create(custom={}), [b"new"])
    assert disk.files[name] == files[name]
    assert len([name for name in disk.files if name.endswith(".log")]) == 2
    await store.close()


async def test_a_start_reads_the_indexes_of_sealed_files_and_not_the_files() -> None:
    files, metadata, ledger = await closed_store()
    disk = SimulatedDisk(files)
    mapped: list[str] = []
    real_map = disk.map

    def noting(name: str) -> codec.Mapped:
        mapped.append(name)
        return real_map(name)

    disk.map = noting  # type: ignore[method-assign]
    store = await started(disk, metadata)
    assert mapped == [name for name in files if name.endswith(".index")]
    assert await read_all(await opened(store, ledger)) == ENTRIES
    await store.close()


async def test_damaged_indexes_are_made_anew() -> None:
    files, _, _ = await closed_store()
    name = next(name for name in files if name.endswith(".index"))
    for at in range(len(files[name])):
        _, metadata, ledger = await closed_store()
        changed = bytearray(files[name])
        changed[at] ^= 0x04
        disk = SimulatedDisk({**files, name: bytes(changed)})
        with capture_logs() as logs:
            store = await started(disk, metadata)
            assert await read_all(await opened(store, ledger)) == ENTRIES
        assert errors(logs), at
        await store.close()


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
async def test_truncated_index_is_rebuilt(cut: int) -> None:
    files, metadata, ledger = await closed_store()
    name = next(name for name in files if name.endswith(".index"))
    store = await started(SimulatedDisk({**files, name: files[name][:cut]}), metadata)
    assert await read_all(await opened(store, ledger)) == ENTRIES
    await store.close()


async def test_every_changed_byte_of_a_sealed_log() -> None:
    """Never wrong data: the entry, or CorruptEntry."""
    files, _, _ = await closed_store()
    name = next(name for name in files if name.endswith(".log"))
    for at in range(0, len(files[name]), 7):
        _, metadata, ledger = await closed_store()
        changed = bytearray(files[name])
        changed[at] ^= 0x20
        store = await started(SimulatedDisk({**files, name: bytes(changed)}), metadata)
        reader = await opened(store, ledger)
        corrupt = 0
        for entry_id, entry in enumerate(ENTRIES):
            try:
                assert await reader.read(entry_id, entry_id, max_bytes=9999) == [entry]
            except CorruptEntry:
                corrupt += 1
        assert corrupt <= 1
        await store.close()


async def test_a_sealed_log_that_became_shorter_is_an_error() -> None:
    files, metadata, ledger = await closed_store()
    name = next(name for name in files if name.endswith(".log"))
    with capture_logs() as logs:
        store = await started(SimulatedDisk({**files, name: files[name][:1000]}), metadata)
    assert "data_damaged" in errors(logs)
    reader = await opened(store, ledger)
    assert (await reader.read(0, 9, max_bytes=9999))[0] == ENTRIES[0]
    with pytest.raises(CorruptEntry):
        await reader.read(9, 9, max_bytes=9999)
    await store.close()


async def test_leftovers_are_removed() -> None:
    files, metadata, ledger = await closed_store()
    number = max(files)[:10]
    index = f"{int(number) + 7:010d}.index"
    leftovers = {f"{number}.log.tmp": b"half", index: files[f"{number}.index"]}
    disk = SimulatedDisk({**files, **leftovers, "README": b"of somebody else"})
    store = await started(disk, metadata)
    await store.reclaim()
    assert set(disk.files) == {*files, "README"}
    assert await read_all(await opened(store, ledger)) == ENTRIES
    fresh = await store.create(custom={})
    await append_all(fresh, [b"x"])
    assert f"{int(number) + 8:010d}.log" in disk.files
    await store.close()


async def test_an_unreadable_log_is_kept_and_reported() -> None:
    files, metadata, _ = await crashed_store()
    ((name, data),) = files.items()
    second = data.index(codec.GROUP_MAGIC, data.index(codec.GROUP_MAGIC) + 1)
    disk = SimulatedDisk({name: bytes(second) + data[second:]})
    with capture_logs() as logs:
        store = await started(disk, metadata)
        await store.reclaim()
    assert "data_damaged" in errors(logs)
    assert len(disk.files[name]) == len(data)
    await store.close()


async def test_a_full_disk_does_not_keep_the_store_from_starting() -> None:
    files, metadata, ledger = await crashed_store()
    disk = SimulatedDisk(files)
    disk.fail_write = lambda name: disk_full() if ".index" in name else None
    store = await started(disk, metadata)
    assert len(await read_all(await opened(store, ledger))) == 4
    fresh = await store.create(custom={})
    await append_all(fresh, [b"fits"])
    again = await started(SimulatedDisk(disk.survivors("written")), metadata)
    assert len(await read_all(await opened(again, ledger))) == 4
    assert await read_all(await opened(again, fresh)) == [b"fits"]
    await again.close()
    await store.close()


async def test_a_disk_that_cannot_be_read_is_said_so() -> None:
    files, metadata, _ = await crashed_store()
    disk = SimulatedDisk(files)
    disk.fail_write = lambda name: io_error()
    with pytest.raises(LedgerError, match="Recovering the ledger log failed"):
        await started(disk, metadata)


async def test_a_log_without_its_metadata_is_refused() -> None:
    """Else reclaim would take every entry for garbage."""
    files, _, _ = await closed_store()
    with pytest.raises(LedgerError, match="restore the metadata"):
        await started(SimulatedDisk(files), new_metadata())


async def test_metadata_older_than_the_log_never_gives_an_id_twice() -> None:
    """A backup has its metadata from a moment before its log."""
    metadata, disk = new_metadata(), SimulatedDisk()
    store = await started(disk, metadata)
    for _ in range(5):
        await append_all(await store.create(custom={}), [b"of the future"])
    await store.close()
    older = new_metadata()
    other = await started(SimulatedDisk(), older)
    first = await other.create(custom={})
    await other.close()
    restored = await started(SimulatedDisk(disk.survivors("durable")), older)
    fresh = await restored.create(custom={})
    assert fresh.ledger_id == 6
    await append_all(fresh, [b"mine"])
    assert await read_all(await opened(restored, fresh)) == [b"mine"]
    assert await restored.list_ledgers() == [first.ledger_id, fresh.ledger_id]
    await restored.close()


async def test_index_header_names_the_end_of_the_log() -> None:
    files, _, _ = await closed_store()
    log, index = sorted(files, reverse=True)
    assert decode_index_header(files[index][:INDEX_HEAD_BYTES]).covers == len(files[log])
