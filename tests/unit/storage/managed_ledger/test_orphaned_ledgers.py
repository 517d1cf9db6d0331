"""Ledgers on shared stores that no record names: crashes at every step, and makers that stall."""

import asyncio

import pytest

from config import bounds
from magnetar.protocol.ids import EARLIEST, LedgerId
from storage.ledger.store import LedgerError
from storage.managed_ledger import managed_ledger_pb2 as pb
from storage.managed_ledger.core import Stores
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import cursor_key, decode_cursor, decode_stream, ledger_key
from storage.managed_ledger.types import Limits, ManagedLedgerNotFound, StoresNotShared
from storage.metadata.instance import INSTANCE_KEY, instance_of
from storage.metadata.keys import children_range
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.clocks import FakeClock
from tests.support.waiting import until
from tests.unit.storage.managed_ledger.crashes import crash_at_each_step
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    Outcomes,
    World,
    contents,
    data_of,
    publish,
    settle,
)

SHARED = Limits(ledger_max_entries=10, ledger_min_age_ms=0, cursor_flush_ms=1, claim_on_open=True)
DAY_MS = bounds.ORPHANED_LEDGER_AGE_MS


async def named(world: World) -> list[int]:
    """Every ledger that the records of the one stream name."""
    key = ledger_key(NAME)
    record = await world.metadata.get(key)
    streams = () if record is None else decode_stream(key, record.value).ledgers
    cursors = await world.metadata.scan(*children_range(key))
    ids = {decode_cursor(each.key, each.value).ledger_id for each in cursors} - {-1}
    return sorted({info.ledger_id for info in streams} | ids)


async def deleted(factory: ManagedLedgerFactory) -> list[int]:
    return [each.ledger_id for each in await factory.delete_orphaned_ledgers()]


async def work(ledger: ManagedLedger) -> None:
    """Everything that makes or deletes ledgers: switches, positions, trims, the stream's end."""
    cursor = await ledger.open_cursor("s", EARLIEST)
    for turn in range(4):
        positions = await publish(ledger, 9, f"{turn}.")
        for position in positions[::2]:
            cursor.acknowledge(position)
            await cursor.persist()
        cursor.acknowledge_up_to(positions[-1])
        await cursor.persist()
        await ledger.trim()
    await ledger.delete()


async def test_a_crash_at_any_step_leaves_nothing_that_is_not_found_and_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 1)
    set_bound(monkeypatch, "CURSOR_LEDGER_ENTRIES", 3)
    left: set[bool] = set()

    async def prepare(_: World, __: ManagedLedger) -> None:
        return None

    async def check(world: World, ledger: ManagedLedger, finished: bool, step: int) -> None:
        assert await deleted(world.factory) == [], step
        world.clock.ms += DAY_MS
        before = set(world.ledgers.ledgers)
        orphans = await world.factory.orphaned_ledgers()
        assert set(await named(world)) == before - {each.ledger_id for each in orphans}, step
        left.update(bool(each.cursor) for each in orphans)
        assert await deleted(world.factory) == [each.ledger_id for each in orphans], step
        assert sorted(world.ledgers.ledgers) == await named(world), step
        await contents(ledger)
        await publish(ledger, 1)
        await world.factory.close()

    await crash_at_each_step(prepare, work, check, SHARED)
    assert left == {False, True}, "of streams, and of subscriptions"


async def test_a_ledger_of_a_stream_that_is_gone_is_found() -> None:
    world = World(SHARED)
    ledger = await world.open()
    await publish(ledger, 25)
    world.ledgers.fail("delete", *[LedgerError("The bookies are away: wait.")] * 3)
    await world.factory.delete(NAME)
    assert len(world.ledgers.ledgers) == 3
    with pytest.raises(ManagedLedgerNotFound):
        await world.factory.open(NAME, create=False)
    world.clock.ms += DAY_MS
    found = await world.factory.orphaned_ledgers()
    assert [(each.stream, each.cursor, each.created_ms) for each in found] == [
        (NAME, "", 1_000_000)
    ] * 3
    assert len(await deleted(world.factory)) == 3
    assert world.ledgers.ledgers == {}


async def test_ledgers_of_others_and_young_ones_are_left() -> None:
    world = World(SHARED)
    ours = {
        "component": b"managed-ledger",
        "pulsar/managed-ledger": NAME.encode(),
        "magnetar/instance": await instance_of(world.metadata),
    }
    theirs = {**ours, "magnetar/instance": await instance_of(MemoryMetadataStore(world.clock))}
    of_pulsar = {key: ours[key] for key in ours if key != "magnetar/instance"}
    for custom in ({}, theirs, of_pulsar, {**ours, "component": b"schema"}):
        await world.ledgers.create(custom=custom)
    undated = await world.ledgers.create(custom=ours)
    world.ledgers.ledgers[undated.ledger_id].created_ms = None
    old = await world.ledgers.create(custom=ours)
    health = await world.ledgers.create(custom={**ours, "component": b"health"})
    world.clock.ms += DAY_MS - 1
    young = await world.ledgers.create(custom=ours)
    assert await deleted(world.factory) == []
    world.clock.ms += 1
    assert await deleted(world.factory) == [old.ledger_id, health.ledger_id]
    assert young.ledger_id in world.ledgers.ledgers


async def test_a_ledger_that_gets_named_while_they_are_looked_for_is_left() -> None:
    """Its maker is at the last moment: the records are read after the ledgers."""
    world = World(SHARED)
    ledger = await world.open()
    await publish(ledger, 1)
    described = world.ledgers.gates["describe"] = asyncio.Event()
    cursor = await ledger.open_cursor("s", EARLIEST)
    stores = Stores(world.metadata, world.ledgers, world.clock, SHARED)
    made = await stores.create_ledger(NAME, "s")
    world.clock.ms += DAY_MS
    looking = asyncio.ensure_future(deleted(world.factory))
    await settle()
    key = cursor_key(NAME, "s")
    record = await world.metadata.get(key)
    assert record is not None
    assert cursor.backlog == 1
    info = decode_cursor(key, record.value)
    assert info.ledger_id == -1
    await world.metadata.put(key, name_ledger(record.value, made.ledger_id))
    described.set()
    assert await looking == []
    assert made.ledger_id in world.ledgers.ledgers


def name_ledger(value: bytes, ledger_id: LedgerId) -> bytes:
    info = pb.ManagedCursorInfo.FromString(value)
    info.cursorsLedgerId = ledger_id
    return info.SerializeToString()


async def test_a_maker_that_stalls_does_not_name_a_ledger_that_was_deleted_meanwhile() -> None:
    world = World(SHARED)
    ledger = await world.open()
    outcomes = Outcomes()
    # Made, not named, and kept for the next attempt.
    world.metadata.faults.append((NAME, False))
    outcomes.append(ledger, b"refused")
    await outcomes.wait(1)
    assert isinstance(outcomes.errors[0], MetadataError)
    (left,) = world.ledgers.ledgers
    world.clock.ms += DAY_MS
    other = world.new_factory()
    assert await deleted(other) == [left]
    outcomes.append(ledger, b"taken")
    await outcomes.wait(2)
    assert outcomes.stored == [b"taken"]
    assert left not in await named(world)
    assert sorted(world.ledgers.ledgers) == await named(world)
    assert data_of(await contents(await world.crash())) == [b"taken"]


async def test_a_maker_that_stalls_while_it_waits_for_the_record_does_not_name_the_ledger() -> None:
    world = World(SHARED)
    ledger = await world.open()
    outcomes = Outcomes()
    async with ledger._core.lock:
        outcomes.append(ledger, b"taken")
        await until(lambda: len(world.ledgers.ledgers) == 1)
        (left,) = world.ledgers.ledgers
        world.clock.ms += DAY_MS
        assert await deleted(world.new_factory()) == [left]
    await outcomes.wait(1)
    assert left not in await named(world)
    assert data_of(await contents(await world.crash())) == [b"taken"]


async def test_a_ledger_too_old_to_be_named_is_deleted_after_a_record_without_it() -> None:
    world = World(SHARED)
    ledger = await world.open()
    outcomes = Outcomes()
    world.metadata.faults.append((NAME, True))  # it is named, but its maker does not know
    outcomes.append(ledger, b"refused")
    await outcomes.wait(1)
    (left,) = await named(world)
    world.clock.ms += bounds.LEDGER_NAMING_MS
    world.metadata.faults.append((NAME, False))
    outcomes.append(ledger, b"refused")
    await outcomes.wait(2)
    assert left in world.ledgers.ledgers, "the record may name it still"
    outcomes.append(ledger, b"taken")
    await outcomes.wait(3)
    await ledger.trim()
    assert left not in world.ledgers.ledgers
    assert data_of(await contents(await world.crash())) == [b"taken"]


async def test_a_subscription_does_not_name_a_ledger_that_took_an_hour_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world = World(SHARED)
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    (position,) = await publish(ledger, 1)
    world.ledgers.hold = True
    cursor.acknowledge(position)
    writing = asyncio.ensure_future(cursor.persist())
    await until(lambda: len(world.ledgers.ledgers) == 2)
    left = max(world.ledgers.ledgers)
    handle = world.ledgers.ledgers[left].handle
    assert handle is not None
    await until(lambda: bool(handle.waiting))
    world.clock.ms += bounds.LEDGER_NAMING_MS
    world.ledgers.hold = False
    handle.complete()
    await asyncio.wait({writing})
    assert left not in await named(world)
    assert left not in world.ledgers.ledgers
    await ledger.close()


async def test_where_the_stores_are_not_shared_the_start_deletes_orphans() -> None:
    world = World()
    with pytest.raises(StoresNotShared):
        await world.factory.orphaned_ledgers()
    with pytest.raises(StoresNotShared):
        await world.factory.delete_orphaned_ledgers()


async def test_all_who_use_a_metadata_store_know_it_by_the_same_id() -> None:
    store = MemoryMetadataStore(FakeClock())
    first, second = await asyncio.gather(instance_of(store), instance_of(store))
    assert first == second == await instance_of(store)
    record = await store.get(INSTANCE_KEY)
    assert record is not None
    assert record.value == first
    assert await instance_of(MemoryMetadataStore(FakeClock())) != first
