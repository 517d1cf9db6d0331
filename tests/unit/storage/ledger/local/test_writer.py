"""Group commit: what is one group, who is told what, and what a failing disk leads to."""

import asyncio

import pytest

from storage.ledger.local.codec import FILE_HEADER_BYTES, GROUP_HEADER_BYTES, RECORD_HEADER_BYTES
from storage.ledger.store import DiskFull, LedgerError, LedgerFenced
from tests.unit.storage.ledger.local.simulated_disk import SimulatedDisk, disk_full, io_error
from tests.unit.storage.ledger.local.support import (
    SMALL,
    Outcomes,
    append_all,
    append_each,
    new_metadata,
    opened,
    read_all,
    started,
)


def logs(disk: SimulatedDisk) -> list[str]:
    return sorted(name for name in disk.files if name.endswith(".log"))


async def test_one_turn_is_one_group_and_what_waits_is_the_next() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    one, two = await store.create(custom={}), await store.create(custom={})
    disk.hold = asyncio.Event()
    outcomes = Outcomes()
    one.append(b"a", outcomes)
    two.append(b"b", outcomes)
    await asyncio.sleep(0)
    for entry in (b"c", b"d", b"e"):
        one.append(entry, outcomes)
        await asyncio.sleep(0)
    assert outcomes.all == []
    assert one.last_add_confirmed == -1
    disk.hold.set()
    await outcomes.wait(5)
    assert disk.appended == [1 + 2 * 2, 1 + 2 * 3]
    assert outcomes.all == [(0, None), (0, None), (1, None), (2, None), (3, None)]
    assert (one.last_add_confirmed, one.length, two.length) == (3, 4, 1)
    await store.close()


async def test_the_next_group_is_written_while_callbacks_run() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    ledger = await store.create(custom={})
    held = disk.hold = asyncio.Event()
    in_flight: list[int] = []
    outcomes = Outcomes()

    def first(entry_id: int, error: LedgerError | None) -> None:
        disk.hold = None
        in_flight.append(len(disk.appended))
        outcomes(entry_id, error)

    ledger.append(b"1", first)
    await asyncio.sleep(0)
    ledger.append(b"2", outcomes)
    held.set()
    await outcomes.wait(2)
    assert in_flight == [1]
    assert len(disk.appended) == 2
    await store.close()


async def test_a_broken_callback_does_not_keep_others_from_their_outcome() -> None:
    store = await started(SimulatedDisk(), new_metadata())
    ledger = await store.create(custom={})
    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    outcomes = Outcomes()

    def broken(entry_id: int, error: LedgerError | None) -> None:
        raise ZeroDivisionError

    ledger.append(b"1", broken)
    ledger.append(b"2", outcomes)
    assert await outcomes.wait(1) == [(1, None)]
    assert [type(error) for error in reported] == [ZeroDivisionError]
    await store.close()


async def test_log_files_are_rolled_by_size_and_by_records() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    ledger = await store.create(custom={})
    await append_each(ledger, [bytes([n]) * 1000 for n in range(20)])
    per_file = (8192 - FILE_HEADER_BYTES) // (1000 + RECORD_HEADER_BYTES + GROUP_HEADER_BYTES)
    assert len(logs(disk)) == -(-20 // per_file)
    assert all(len(disk.files[name]) <= 8192 for name in logs(disk))
    await append_all(ledger, [b"x"] * 2500)
    assert await read_all(ledger) == [bytes([n]) * 1000 for n in range(20)] + [b"x"] * 2500
    await store.close()
    again = SimulatedDisk(disk.survivors("durable"))
    assert all(name.replace(".log", ".index") in again.files for name in logs(again))


async def test_an_entry_larger_than_a_file_is_taken() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    ledger = await store.create(custom={})
    entries = [b"a", b"b" * 20_000, b"c"]
    await append_each(ledger, entries)
    assert await read_all(ledger) == entries
    await store.close()


@pytest.mark.parametrize("what", [disk_full, io_error])
@pytest.mark.parametrize("acknowledged", [0, 1, 3])
async def test_a_failed_group(what: type[OSError], acknowledged: int) -> None:
    """All that wait fail, what was acknowledged stays, and the store works again at once."""
    metadata = new_metadata()
    disk = SimulatedDisk()
    store = await started(disk, metadata)
    one, two = await store.create(custom={}), await store.create(custom={})
    good = [b"good %d" % n for n in range(acknowledged)]
    await append_each(one, good)
    failures = [what()]
    disk.fail_append = lambda: failures.pop() if failures else None
    disk.hold = asyncio.Event()
    outcomes = Outcomes()
    one.append(b"lost", outcomes)
    await asyncio.sleep(0)
    two.append(b"waits", outcomes)
    one.append(b"lost too", outcomes)
    disk.hold.set()
    await outcomes.wait(3)
    ids = [entry_id for entry_id, _ in outcomes.all]
    assert ids == [acknowledged, 0, acknowledged + 1]
    kind = DiskFull if what is disk_full else LedgerError
    assert all(type(error) is kind for _, error in outcomes.all)

    assert one.append(b"later", outcomes) == acknowledged + 2
    await outcomes.wait(4)
    assert type(outcomes.all[3][1]) is kind

    three = await store.create(custom={})
    await append_all(three, [b"works"])
    assert await read_all(await opened(store, one)) == good
    assert await read_all(await opened(store, three)) == [b"works"]
    await two.close()
    await store.close()
    again = await started(SimulatedDisk(disk.survivors("durable")), metadata)
    assert await read_all(await opened(again, one)) == good
    assert await read_all(await opened(again, two)) == []
    assert await read_all(await opened(again, three)) == [b"works"]
    await again.close()


async def test_a_disk_that_stays_full_answers_every_append() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    full = True
    disk.fail_append = lambda: disk_full() if full else None
    for _ in range(5):
        ledger = await store.create(custom={})
        with pytest.raises(DiskFull):
            await append_all(ledger, [b"no room"])
    full = False
    ledger = await store.create(custom={})
    await append_all(ledger, [b"room"])
    assert len(logs(disk)) == 1
    await store.close()


async def test_after_a_failed_sync_the_last_page_is_written_once_more() -> None:
    """Even if the page that held them is lost, acknowledged records are there."""
    metadata = new_metadata()
    disk = SimulatedDisk()
    store = await started(disk, metadata)
    ledger, other = await store.create(custom={}), await store.create(custom={})
    await append_each(ledger, [b"x" * 3000, b"on the last page", b"and this"])
    failures = [io_error()]
    disk.fail_append = lambda: failures.pop() if failures else None
    with pytest.raises(LedgerError):
        await append_all(other, [b"fails"])
    await append_all(await store.create(custom={}), [b"next"])
    assert await read_all(ledger) == [b"x" * 3000, b"on the last page", b"and this"]
    await store.close()
    found = disk.survivors("durable")
    first, second = logs(disk)
    assert b"on the last page" in found[second]
    lost = found[first].index(b"on the last page")
    page = bytearray(found[first])
    page[lost:] = bytes(len(page) - lost)
    again = await started(SimulatedDisk({**found, first: bytes(page)}), metadata)
    ledger_again = await opened(again, ledger)
    assert await read_all(ledger_again) == [b"x" * 3000, b"on the last page", b"and this"]
    await again.close()


async def test_carried_records_survive_a_second_failure() -> None:
    metadata = new_metadata()
    disk = SimulatedDisk()
    store = await started(disk, metadata)
    ledger = await store.create(custom={})
    await append_each(ledger, [b"stays"])
    failures = [disk_full(), io_error()]
    disk.fail_append = lambda: failures.pop() if failures else None
    for _ in range(2):
        with pytest.raises(LedgerError):
            await append_all(await store.create(custom={}), [b"fails"])
    await append_all(ledger, [b"goes on"])
    assert b"stays" in disk.survivors("durable")[logs(disk)[-1]]
    assert await read_all(ledger) == [b"stays", b"goes on"]
    await store.close()


async def test_carried_records_are_written_when_the_store_closes() -> None:
    metadata = new_metadata()
    disk = SimulatedDisk()
    store = await started(disk, metadata)
    ledger = await store.create(custom={})
    await append_each(ledger, [b"stays"])
    failures = [io_error()]
    disk.fail_append = lambda: failures.pop() if failures else None
    with pytest.raises(LedgerError):
        await append_all(await store.create(custom={}), [b"fails"])
    await store.close()
    _, second = logs(disk)
    assert b"stays" in disk.survivors("durable")[second]


async def test_a_store_with_carried_records_closes_on_a_disk_that_stays_full() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    await append_each(await store.create(custom={}), [b"stays"])
    disk.fail_append = disk_full
    with pytest.raises(LedgerError):
        await append_all(await store.create(custom={}), [b"fails"])
    await store.close()
    assert len(logs(disk)) == 1


async def test_file_that_cannot_be_truncated_is_read_up_to_its_durable_end() -> None:
    """Truncation fails too: the next file says how far the former one was durable."""
    metadata = new_metadata()
    disk = SimulatedDisk()
    store = await started(disk, metadata)
    ledger = await store.create(custom={})
    await append_each(ledger, [b"one", b"two"])
    failures = [io_error()]

    def fail() -> OSError | None:
        return failures.pop() if failures else None

    def no_truncate(name: str, length: int) -> None:
        raise io_error()

    def no_index(name: str) -> OSError | None:
        return disk_full() if ".index" in name else None

    disk.fail_sync, disk.fail_write = fail, no_index
    disk.truncate = no_truncate  # type: ignore[method-assign]
    with pytest.raises(LedgerError):
        await append_all(ledger, [b"never acknowledged"])
    await append_all(await store.create(custom={}), [b"next"])
    left = disk.survivors("written")
    assert any(b"never acknowledged" in data for data in left.values())
    again = await started(SimulatedDisk(left), metadata)
    assert await read_all(await opened(again, ledger)) == [b"one", b"two"]
    await again.close()
    await store.close()


async def test_defect_during_truncation_stops_no_later_append() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    ledger = await store.create(custom={})
    await append_each(ledger, [b"one"])
    failures = [io_error()]

    def defect(name: str, length: int) -> None:
        raise RuntimeError("a defect")

    disk.fail_sync = lambda: failures.pop() if failures else None
    disk.truncate = defect  # type: ignore[method-assign]
    with pytest.raises(LedgerError):
        await append_all(ledger, [b"fails"])
    await append_all(await store.create(custom={}), [b"works"])
    await store.close()


async def test_fencing_fails_what_waits_and_keeps_what_is_on_its_way() -> None:
    disk = SimulatedDisk()
    store = await started(disk, new_metadata())
    ledger = await store.create(custom={})
    disk.hold = asyncio.Event()
    outcomes = Outcomes()
    ledger.append(b"on its way", outcomes)
    await asyncio.sleep(0)
    ledger.append(b"waits", outcomes)
    opening = asyncio.create_task(opened(store, ledger))
    while True:
        try:
            ledger.append(b"waits too", outcomes)
        except LedgerFenced:
            break
        await asyncio.sleep(0)
    assert not opening.done()
    disk.hold.set()
    reader = await opening
    assert await read_all(reader) == [b"on its way"]
    assert outcomes.all[0] == (0, None)
    assert len(outcomes.all) > 2
    assert all(type(error) is LedgerFenced for _, error in outcomes.all[1:])
    assert [entry_id for entry_id, _ in outcomes.all] == list(range(len(outcomes.all)))
    await ledger.close()
    await store.close()


async def test_group_bytes_bound_a_group() -> None:
    disk = SimulatedDisk()
    limits = type(SMALL)(file_bytes=2**20, group_bytes=1000, reclaim_pause_s=3600)
    store = await started(disk, new_metadata(), limits=limits)
    ledger = await store.create(custom={})
    await append_all(ledger, [b"x" * 400] * 7)
    assert disk.appended == [5, 5, 5, 3]
    await store.close()
