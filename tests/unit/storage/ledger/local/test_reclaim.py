"""Space comes back, and nothing that is alive or being made ever goes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from magnetar.protocol.ids import LedgerId
from storage.ledger.local import reclaim, recovery, sealing
from storage.ledger.local.ledger_records import LedgerRecords, ledger_path
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.local.log_files import LogFile
from storage.ledger.local.reclaim import FileUsage, choose_sources
from storage.ledger.store import CorruptEntry, LedgerError, NoSuchLedger, WritableLedger
from tests.support.waiting import until
from tests.unit.storage.ledger.local.simulated_disk import SimulatedDisk, disk_full
from tests.unit.storage.ledger.local.support import (
    SMALL,
    append_all,
    append_each,
    new_metadata,
    opened,
    read_all,
    started,
)

KB = [bytes([n]) * 1000 for n in range(100)]


def logs(disk: SimulatedDisk) -> set[str]:
    return {name for name in disk.files if name.endswith(".log")}


async def interleaved(
    store: LocalLedgerStore, entries: int
) -> tuple[WritableLedger, WritableLedger]:
    """Two ledgers that share every file, the first with seven of eight entries."""
    big, small = await store.create(custom={}), await store.create(custom={})
    for number in range(entries):
        await append_all(small if number % 8 == 7 else big, [KB[number]])
    return big, small


async def sealed(store: LocalLedgerStore) -> None:
    """Fill the newest file, so that those before it are sealed."""
    filler = await store.create(custom={})
    count = len(store._files.sealed)
    while len(store._files.memory) > 1 or len(store._files.sealed) == count:
        await append_all(filler, [b"filler" * 200])


async def test_files_without_a_living_ledger_go() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    ledger = await store.create(custom={})
    await append_each(ledger, KB[:30])
    await sealed(store)
    before = logs(disk)
    assert (await store.reclaim()).dropped == 0
    await store.delete(LedgerId(ledger.ledger_id))
    report = await store.reclaim()
    assert report.dropped >= 4
    assert report.removed == 2 * report.dropped
    assert len(logs(disk)) == len(before) - report.dropped
    with pytest.raises(NoSuchLedger):
        await ledger.read(0, 0, max_bytes=1)
    await store.close()


async def test_a_defect_keeps_no_later_file_from_being_sealed_or_reclaimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, usage, failures = (
        recovery.write_index,
        reclaim.usage_of,
        [RuntimeError(), RuntimeError()],
    )

    def fails_once(count: int) -> None:
        if len(failures) == count:
            raise failures.pop()

    def write_index(*given: Any) -> object:  # noqa: ANN401
        fails_once(2)
        return write(*given)

    def usage_of(*given: Any) -> object:  # noqa: ANN401
        fails_once(1)
        return usage(*given)

    monkeypatch.setattr(sealing, "write_index", write_index)
    monkeypatch.setattr(reclaim, "usage_of", usage_of)
    disk = SimulatedDisk()
    limits = replace(SMALL, seal_retry_s=0.01, reclaim_pause_s=0.01)
    store = await started(disk, new_metadata(), limits=limits)
    ledger = await store.create(custom={})
    await append_each(ledger, KB[:30])
    await sealed(store)
    before = len(logs(disk))
    await store.delete(LedgerId(ledger.ledger_id))
    await until(lambda: len(logs(disk)) < before)
    assert not failures
    await store.close()


async def test_sparse_files_are_merged_and_read_on() -> None:
    metadata, disk = new_metadata(), SimulatedDisk()
    store = await started(disk, metadata)
    big, small = await interleaved(store, 64)
    reader = await store.open_no_recovery(LedgerId(small.ledger_id))
    await sealed(store)
    before = len(logs(disk))
    assert await read_all(reader) == KB[7:64:8]
    await store.delete(LedgerId(big.ledger_id))
    report = await store.reclaim()
    assert report.merged >= 5
    assert len(logs(disk)) <= before - report.merged + 2
    assert await read_all(reader) == KB[7:64:8]
    assert (await store.reclaim()).merged == 0, "a merge must not be worth another one"
    await small.close()
    await store.close()
    again = await started(SimulatedDisk(disk.survivors("durable")), metadata)
    assert await read_all(await opened(again, small)) == KB[7:64:8]
    await again.close()


async def test_many_small_files_are_merged() -> None:
    """Every start leaves a file; they do not add up."""
    metadata, disk = new_metadata(), SimulatedDisk()
    ledgers = []
    for number in range(12):
        store = await started(disk, metadata)
        ledger = await store.create(custom={})
        await append_all(ledger, [b"%d" % number * 400])
        ledgers.append(ledger)
        await store.close()
    store = await started(disk, metadata)
    await store.reclaim()
    assert len(logs(disk)) < 8
    for number, ledger in enumerate(ledgers):
        assert await read_all(await opened(store, ledger)) == [b"%d" % number * 400]
    await store.close()


async def test_orphans_are_dropped() -> None:
    """Entries whose record never was, or went without the store."""
    metadata, disk = new_metadata(), SimulatedDisk()
    store = await started(disk, metadata)
    ledger = await store.create(custom={})
    await append_each(ledger, KB[:10])
    await store.close()
    await metadata.delete(ledger_path(ledger.ledger_id))
    store = await started(disk, metadata)
    await store.reclaim()
    assert logs(disk) == set()
    await store.close()


async def test_a_backup_defers_merges_and_removals() -> None:
    held = True

    @contextmanager
    def guard() -> Iterator[bool]:
        yield not held

    metadata, disk = new_metadata(), SimulatedDisk()
    store = await started(disk, metadata, guard=guard)
    big, small = await interleaved(store, 64)
    await sealed(store)
    await store.delete(LedgerId(big.ledger_id))
    before = set(disk.files)
    report = await store.reclaim()
    assert report.merged == report.removed == 0
    assert before == set(disk.files)
    copy = disk.survivors("written")
    held = False
    report = await store.reclaim()
    assert report.merged
    assert (await store.reclaim()).removed + report.removed
    assert await read_all(small) == KB[7:64:8]
    await store.close()

    again = await started(SimulatedDisk(copy), metadata)
    await again.reclaim()
    assert await read_all(await opened(again, small)) == KB[7:64:8]
    await again.close()


async def test_a_ledger_made_during_the_pass_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are fixed before records are listed, so what is made in between is in neither."""
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    dead = await store.create(custom={})
    await append_each(dead, KB[:10])
    await sealed(store)
    await store.delete(LedgerId(dead.ledger_id))
    listed, go_on = asyncio.Event(), asyncio.Event()
    list_ids = LedgerRecords.list_ids

    async def slow(records: LedgerRecords) -> list[LedgerId]:
        found = await list_ids(records)
        listed.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(LedgerRecords, "list_ids", slow)
    reclaiming = asyncio.create_task(store.reclaim())
    await listed.wait()
    fresh = await store.create(custom={})
    await append_each(fresh, KB[:30])
    go_on.set()
    assert (await reclaiming).dropped
    assert await read_all(fresh) == KB[:30]
    await store.close()


async def test_a_source_that_does_not_verify_is_left_alone() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    big, small = await interleaved(store, 64)
    await sealed(store)
    await store.delete(LedgerId(big.ledger_id))
    hurt = next(name for name, data in sorted(disk.files.items()) if KB[15] in data)
    at = bytes(disk.directory[hurt].written).index(KB[15])
    disk.directory[hurt].written[at] ^= 1
    assert (await store.reclaim()).merged
    assert hurt in disk.files
    assert store.damage.ledgers[int(small.ledger_id)].missing == ((1, 1),)
    for number in range(8):
        if number == 1:
            with pytest.raises(CorruptEntry):
                await small.read(1, 1, max_bytes=2000)
        else:
            assert await small.read(number, number, max_bytes=2000) == [KB[7 + 8 * number]]
    await store.close()


async def test_compaction_without_free_disk_space_is_given_up() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    big, small = await interleaved(store, 64)
    await sealed(store)
    await store.delete(LedgerId(big.ledger_id))
    disk.fail_write = lambda name: disk_full() if name.endswith(".log.tmp") else None
    assert (await store.reclaim()).merged == 0
    assert not [name for name in disk.files if name.endswith(".tmp")]
    assert await read_all(small) == KB[7:64:8]
    disk.fail_write = lambda name: None
    assert (await store.reclaim()).merged
    assert await read_all(small) == KB[7:64:8]
    await store.close()


async def test_a_read_that_meets_a_merge_looks_again() -> None:
    """The view of a read may be older than the removal of its files."""
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    big, small = await interleaved(store, 64)
    await sealed(store)
    assert await read_all(small) == KB[7:64:8]
    await store.delete(LedgerId(big.ledger_id))
    read, moved = disk.read, False

    async def merge_first(job: object) -> object:
        nonlocal moved
        if not moved:
            moved = True
            await store.reclaim()
        return await read(job)  # type: ignore[arg-type]

    disk.read = merge_first  # type: ignore[method-assign, assignment]
    assert await small.read(0, 7, max_bytes=1 << 20) == KB[7:64:8]
    assert moved
    await store.close()


def test_a_file_size_beyond_32_bits_is_refused() -> None:
    LedgerLimits(file_bytes=2**31)
    with pytest.raises(LedgerError, match="smaller file size"):
        LedgerLimits(file_bytes=2**32)


class Case(NamedTuple):
    usages: list[tuple[int, int]]
    chosen: list[int]


LIMITS = LedgerLimits(file_bytes=64_000, file_records=1000, compact_sources=10)


@pytest.mark.parametrize(
    "case",
    [
        Case([], []),
        Case([(60_000, 59_000)] * 20, []),
        Case([(60_000, 29_000)], [0]),
        Case([(60_000, 31_000)], []),
        Case([(60_000, 20_000)] * 4, [0, 1, 2]),
        Case([(900, 400)], []),
        Case([(5_000, 5_000)] * 7, []),
        Case([(5_000, 5_000)] * 8, list(range(8))),
        Case([(1_000, 1_000)] * 20, list(range(10))),
    ],
)
def test_choice_of_sources(case: Case) -> None:
    files = [LogFile(number, 0, end) for number, (end, _) in enumerate(case.usages)]
    usages = [FileUsage(file, live, 1) for file, (_, live) in zip(files, case.usages, strict=True)]
    assert [file.number for file in choose_sources(usages, LIMITS)] == case.chosen
