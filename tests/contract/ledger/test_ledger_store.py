"""What every ledger store does: see the rules at the top of `storage.ledger.store`."""

import asyncio
import os
import random

import pytest

from magnetar.protocol.ids import LedgerId
from storage.clock import SystemClock
from storage.ledger.store import (
    ONE_COPY,
    Copies,
    EntryTooLarge,
    LedgerClosed,
    LedgerError,
    LedgerFenced,
    LedgerStore,
    NoSuchEntry,
    NoSuchLedger,
    ReadableLedger,
    WritableLedger,
)
from tests.contract.ledger.conftest import Backend
from tests.unit.storage.ledger.local.support import Outcomes, append_all, append_each, read_all

NOWHERE = LedgerId(10**9)


def entries(count: int, size: int = 300) -> list[bytes]:
    return [b"%05d" % number + os.urandom(size) for number in range(count)]


async def filled(store: LedgerStore, data: list[bytes]) -> WritableLedger:
    ledger = await store.create(custom={"component": b"test"})
    await append_all(ledger, data)
    return ledger


async def test_a_ledger_says_how_it_was_made_until_it_is_deleted(store: LedgerStore) -> None:
    before_ms = SystemClock().now_ms()
    ledger = await store.create(custom={"component": b"test", "other": b"\x00\xff"})
    told = await store.describe(ledger.ledger_id)
    assert told.custom == {"component": b"test", "other": b"\x00\xff"}
    assert told.created_ms is not None
    assert before_ms <= told.created_ms <= SystemClock().now_ms()
    await ledger.close()
    assert await store.describe(ledger.ledger_id) == told
    await store.delete(ledger.ledger_id)
    with pytest.raises(NoSuchLedger):
        await store.describe(ledger.ledger_id)


async def test_a_ledger_is_made_with_one_copy_on_request_but_not_with_more_than_there_can_be(
    store: LedgerStore,
) -> None:
    ledger = await store.create(custom={}, copies=ONE_COPY)
    await append_all(ledger, [b"entry"])
    assert await read_all(ledger) == [b"entry"]
    with pytest.raises(LedgerError):
        await store.create(custom={}, copies=Copies(99, 2, 2))


async def test_ids_are_given_at_once_and_callbacks_come_in_order(store: LedgerStore) -> None:
    ledger = await store.create(custom={})
    assert (ledger.last_add_confirmed, ledger.length) == (-1, 0)
    outcomes = Outcomes()
    confirmed: list[int] = []

    def done(entry_id: int, error: LedgerError | None) -> None:
        confirmed.append(ledger.last_add_confirmed)
        outcomes(entry_id, error)

    assert [ledger.append(b"x" * n, done) for n in range(100)] == list(range(100))
    assert outcomes.all == []
    assert await outcomes.wait(100) == [(n, None) for n in range(100)]
    assert all(lac >= n for n, lac in enumerate(confirmed))
    assert (ledger.last_add_confirmed, ledger.length) == (99, sum(range(100)))


async def test_appended_entries_are_read(store: LedgerStore) -> None:
    data = [b"", b"a", *entries(200), os.urandom(100_000)]
    ledger = await filled(store, data)
    assert await read_all(ledger) == data
    assert await ledger.read(3, 3, max_bytes=0) == [data[3]]
    assert await ledger.read(7, 12, max_bytes=1 << 20) == data[7:13]
    await ledger.close()
    assert await read_all(ledger) == data
    assert await read_all(await store.open(ledger.ledger_id)) == data


async def test_an_entry_above_the_largest_is_refused_and_the_ledger_goes_on(
    store: LedgerStore,
) -> None:
    largest = os.urandom(1000) * (store.max_entry_bytes // 1000 + 1)
    largest = largest[: store.max_entry_bytes]
    ledger = await filled(store, [b"first"])
    with pytest.raises(EntryTooLarge, match=str(store.max_entry_bytes)):
        ledger.append(largest + b"x", Outcomes())
    await append_all(ledger, [largest, b"last"])
    assert ledger.last_add_confirmed == 2
    await ledger.close()
    reader = await store.open(ledger.ledger_id)
    assert await reader.read(1, 1, max_bytes=0) == [largest]
    assert await reader.read(2, 2, max_bytes=0) == [b"last"]


async def test_a_read_is_bounded_in_bytes_but_gives_one(store: LedgerStore) -> None:
    ledger = await filled(store, [b"x" * 100] * 10)
    assert len(await ledger.read(0, 9, max_bytes=350)) == 3
    assert len(await ledger.read(0, 9, max_bytes=1)) == 1
    assert len(await ledger.read(0, 9, max_bytes=1000)) == 10


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 3), (-1, 0), (2, 1), (-5, -1)])
async def test_nothing_else_is_readable(store: LedgerStore, first: int, last: int) -> None:
    ledger = await filled(store, [b"a", b"b", b"c"])
    with pytest.raises(NoSuchEntry):
        await ledger.read(first, last, max_bytes=100)


async def test_an_empty_ledger(store: LedgerStore) -> None:
    ledger = await store.create(custom={})
    await ledger.close()
    reader = await store.open(ledger.ledger_id)
    assert (reader.last_add_confirmed, reader.length) == (-1, 0)
    with pytest.raises(NoSuchEntry):
        await reader.read(0, 0, max_bytes=1)


async def test_ledgers_are_separate(store: LedgerStore) -> None:
    ledgers = [await store.create(custom={}) for _ in range(5)]
    data = {ledger.ledger_id: entries(40) for ledger in ledgers}
    for turn in range(40):
        await asyncio.gather(
            *(append_all(ledger, [data[ledger.ledger_id][turn]]) for ledger in ledgers)
        )
    for ledger in ledgers:
        assert await read_all(ledger) == data[ledger.ledger_id]
    assert await store.list_ledgers() == sorted(data)


async def test_close_waits_for_appends_and_is_idempotent(store: LedgerStore) -> None:
    ledger = await store.create(custom={})
    outcomes = Outcomes()
    for entry in entries(50):
        ledger.append(entry, outcomes)
    await ledger.close()
    assert outcomes.all == [(n, None) for n in range(50)]
    await ledger.close()
    with pytest.raises(LedgerClosed):
        ledger.append(b"late", outcomes)
    reader = await store.open(ledger.ledger_id)
    assert (reader.last_add_confirmed, reader.length) == (49, 50 * 305)


async def test_open_fences_the_writer(store: LedgerStore) -> None:
    ledger = await filled(store, entries(10))
    reader = await store.open(ledger.ledger_id)
    assert (reader.last_add_confirmed, reader.length) == (9, ledger.length)
    with pytest.raises(LedgerFenced):
        ledger.append(b"late", Outcomes())
    assert (await store.open(ledger.ledger_id)).last_add_confirmed == 9


async def test_open_under_load_decides_every_append(store: LedgerStore) -> None:
    """Whatever was acknowledged is there, whatever is there was appended, nothing comes after."""
    ledger = await store.create(custom={})
    outcomes = Outcomes()
    data = entries(300)
    opening: asyncio.Task[ReadableLedger] | None = None
    appended = 0
    for number, entry in enumerate(data):
        if number == 150:
            opening = asyncio.create_task(store.open(ledger.ledger_id))
        try:
            ledger.append(entry, outcomes)
        except LedgerFenced:
            break
        appended += 1
        if number % 10 == 0:
            await asyncio.sleep(0)
    assert opening is not None
    reader = await opening
    found = await read_all(reader)
    await outcomes.wait(appended)
    acknowledged = outcomes.acknowledged
    assert [entry_id for entry_id, _ in outcomes.all] == list(range(appended))
    assert acknowledged == list(range(len(acknowledged)))
    assert len(acknowledged) <= len(found)
    assert found == data[: len(found)]
    errors = [type(error) for _, error in outcomes.all if error is not None]
    assert errors == [LedgerFenced] * (appended - len(acknowledged))


async def test_concurrent_opens_agree(store: LedgerStore) -> None:
    ledger = await filled(store, entries(20))
    readers = await asyncio.gather(*(store.open(ledger.ledger_id) for _ in range(8)))
    assert {(reader.last_add_confirmed, reader.length) for reader in readers} == {(19, 20 * 305)}


async def test_open_and_close_at_once(store: LedgerStore) -> None:
    ledger = await store.create(custom={})
    outcomes = Outcomes()
    for entry in entries(30):
        ledger.append(entry, outcomes)
    reader, _ = await asyncio.gather(
        store.open(ledger.ledger_id), ledger.close(), return_exceptions=True
    )
    assert isinstance(reader, ReadableLedger)
    await outcomes.wait(30)
    assert reader.last_add_confirmed + 1 == len(outcomes.acknowledged)


async def test_open_no_recovery_leaves_the_writer_alone(store: LedgerStore) -> None:
    ledger = await filled(store, entries(5))
    reader = await store.open_no_recovery(ledger.ledger_id)
    assert reader.last_add_confirmed == 4
    more = entries(5)
    await append_all(ledger, more)
    later = await store.open_no_recovery(ledger.ledger_id)
    assert later.last_add_confirmed == 9
    assert await later.read(5, 9, max_bytes=1 << 20) == more
    await ledger.close()
    assert (await store.open_no_recovery(ledger.ledger_id)).last_add_confirmed == 9


async def test_missing_ledger_is_not_found(store: LedgerStore) -> None:
    with pytest.raises(NoSuchLedger):
        await store.open(NOWHERE)
    with pytest.raises(NoSuchLedger):
        await store.open_no_recovery(NOWHERE)
    await store.delete(NOWHERE)


async def test_delete(store: LedgerStore) -> None:
    ledger, other = await filled(store, entries(30)), await filled(store, entries(3))
    reader = await store.open_no_recovery(ledger.ledger_id)
    await store.delete(ledger.ledger_id)
    await store.delete(ledger.ledger_id)
    with pytest.raises(LedgerFenced):
        ledger.append(b"late", Outcomes())
    for handle in (ledger, reader):
        with pytest.raises(NoSuchLedger):
            await handle.read(0, 0, max_bytes=1)
    with pytest.raises(NoSuchLedger):
        await store.open(ledger.ledger_id)
    assert await store.list_ledgers() == [other.ledger_id]
    assert len(await read_all(other)) == 3


async def test_ids_are_never_given_twice(backend: Backend) -> None:
    seen: set[LedgerId] = set()
    store = backend.store
    for _ in range(4):
        for _ in range(3):
            ledger = await store.create(custom={})
            await append_all(ledger, [b"x"])
            assert ledger.ledger_id not in seen
            seen.add(ledger.ledger_id)
            await store.delete(ledger.ledger_id)
        store = await backend.restart()
    made = await asyncio.gather(*(store.create(custom={}) for _ in range(10)))
    assert len({ledger.ledger_id for ledger in made} - seen) == 10


async def test_everything_is_there_after_a_restart(backend: Backend) -> None:
    data = [entries(60), entries(5), []]
    ledgers = [await filled(backend.store, some) for some in data]
    await ledgers[0].close()
    store = await backend.restart()
    for ledger, some in zip(ledgers, data, strict=True):
        reader = await store.open(ledger.ledger_id)
        assert await read_all(reader) == some
        assert reader.length == sum(map(len, some))
    assert await store.list_ledgers() == sorted(ledger.ledger_id for ledger in ledgers)


async def test_everything_acknowledged_is_there_after_a_crash(backend: Backend) -> None:
    data = [entries(60), entries(7)]
    ledgers = [await backend.store.create(custom={}) for _ in data]
    for ledger, some in zip(ledgers, data, strict=True):
        await append_each(ledger, some)
    store = await backend.takeover()
    unrecovered = await store.open_no_recovery(ledgers[0].ledger_id)
    assert await read_all(unrecovered) == data[0][: len(data[0]) - backend.unseen]
    for ledger, some in zip(ledgers, data, strict=True):
        assert await read_all(await store.open(ledger.ledger_id)) == some
    fresh = await filled(store, [b"goes on"])
    assert await read_all(fresh) == [b"goes on"]


async def test_deleting_gives_space_back_and_harms_nothing(backend: Backend) -> None:
    store = backend.store
    rng = random.Random(5)
    alive: dict[LedgerId, list[bytes]] = {}
    for _ in range(30):
        data = entries(rng.randint(1, 20))
        ledger = await filled(store, data)
        alive[ledger.ledger_id] = data
        if rng.random() < 0.6:
            gone = rng.choice(sorted(alive))
            del alive[gone]
            await store.delete(gone)
    for _ in range(2):
        for ledger_id, data in alive.items():
            assert await read_all(await store.open(ledger_id)) == data
        store = await backend.restart()
    assert await store.list_ledgers() == sorted(alive)


async def test_a_closed_store_refuses(backend: Backend) -> None:
    ledger = await filled(backend.store, [b"a"])
    store = backend.store
    await store.close()
    await store.close()
    with pytest.raises(LedgerError):
        await store.create(custom={})
    with pytest.raises(LedgerError):
        await ledger.read(0, 0, max_bytes=1)
    with pytest.raises(LedgerError):
        ledger.append(b"late", Outcomes())
