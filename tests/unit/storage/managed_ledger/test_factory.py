"""The factory: opening, deleting, orphans, with crashes at every step."""

import asyncio

import pytest
from structlog.testing import capture_logs

from magnetar.protocol.ids import EARLIEST, Position
from storage.ledger.store import LedgerAssertion
from storage.managed_ledger import managed_ledger_pb2 as pb
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import ledger_key
from storage.managed_ledger.types import (
    CorruptRecord,
    Limits,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
    ManagedLedgerNotFound,
    ManagedLedgerState,
)
from storage.metadata.store import IndexEntry, MetadataError
from tests.unit.storage.managed_ledger.crashes import crash_at_each_step, numbered
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    Outcomes,
    World,
    contents,
    data_of,
    publish,
    settle,
)


async def test_concurrent_opens_share_one_instance() -> None:
    world = World()
    first, second = await asyncio.gather(world.open(), world.open())
    assert first is second
    assert world.factory.loaded() == {NAME: first}
    other = await world.open("public/default/persistent/other")
    assert other is not first


async def test_open_without_create_and_exists() -> None:
    world = World()
    with pytest.raises(ManagedLedgerNotFound):
        await world.factory.open(NAME, create=False)
    assert not await world.factory.exists(NAME)
    assert world.factory.loaded() == {}
    await world.open()
    assert await world.factory.exists(NAME)
    await world.factory.unload(NAME)
    assert world.factory.loaded() == {}
    assert (await world.factory.open(NAME, create=False)).entry_count == 0


async def test_a_creation_of_a_stream_with_unknown_outcome_can_be_repeated() -> None:
    for applied in (False, True):
        world = World()
        world.metadata.faults.append((NAME, applied))
        with pytest.raises(MetadataError):
            await world.open()
        await publish(await world.open(), 1)


async def test_a_fenced_instance_is_replaced_by_the_next_open() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1)
    other = await world.new_factory().open(NAME)
    await publish(other, 1, "other")
    outcomes = Outcomes()
    outcomes.append(ledger, b"lost")
    await outcomes.wait(1)
    again = await world.open()
    assert again is not ledger
    assert ledger.state is ManagedLedgerState.CLOSED
    assert data_of(await contents(again)) == [b"e0", b"other0"]


async def test_unload_during_appends_keeps_them_and_open_waits() -> None:
    world = World()
    ledger = await world.open()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 15)
    _, again = await asyncio.gather(world.factory.unload(NAME), world.open())
    assert again is not ledger
    assert data_of(await contents(again)) == outcomes.stored == numbered(15)


async def test_a_closed_factory_opens_nothing() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1)
    await asyncio.gather(world.factory.close(), world.factory.close())
    assert ledger.state is ManagedLedgerState.CLOSED
    with pytest.raises(ManagedLedgerClosed):
        await world.open()
    with pytest.raises(ManagedLedgerClosed):
        await ledger.read(EARLIEST, max_entries=1, max_bytes=1)


@pytest.mark.parametrize("loaded", [True, False])
async def test_delete_removes_everything(loaded: bool) -> None:
    world = World()
    ledger = await world.open()
    await ledger.open_cursor("s", EARLIEST)
    ledger.open_reader_cursor("r", EARLIEST)
    await publish(ledger, 25)
    if not loaded:
        await world.factory.unload(NAME)
    with capture_logs() as logs:
        await world.factory.delete(NAME)
    assert [line for line in logs if line["log_level"] != "debug"] == []
    assert world.ledgers.ledgers == {}
    assert not await world.factory.exists(NAME)
    assert await world.metadata.children(ledger_key(NAME)) == []
    with pytest.raises(ManagedLedgerNotFound):
        await world.factory.delete(NAME)
    with pytest.raises(ManagedLedgerClosed):
        ledger.append(b"late", lambda *_: None)
    fresh = await world.open()
    assert await contents(fresh) == []
    assert fresh.cursors == {}


async def test_a_crash_at_each_step_of_deleting() -> None:
    async def prepare(_: World, ledger: ManagedLedger) -> None:
        await ledger.open_cursor("s", EARLIEST)
        await publish(ledger, 15)

    async def check(world: World, ledger: ManagedLedger, finished: bool, step: int) -> None:
        found = data_of(await contents(ledger))
        assert found in ([], numbered(15)), step
        if found:
            await world.factory.delete(NAME)
        else:
            assert ledger.cursors == {}, step
            await world.factory.close()
        world.factory = world.new_factory()
        await world.factory.sweep_orphans()
        assert world.ledgers.ledgers == {}

    async def delete(ledger: ManagedLedger) -> None:
        await ledger.delete()

    await crash_at_each_step(prepare, delete, check)


async def test_orphans_are_swept_and_nothing_else() -> None:
    world = World()
    for name in ("public/default/persistent/a", "public/default/segment/t/0000-ffff-0"):
        ledger = await world.open(name)
        cursor = await ledger.open_cursor("s", EARLIEST)
        await publish(ledger, 400, name)
        for entry in range(400):
            cursor.acknowledge(Position(ledger.last_confirmed.ledger_id, entry))
            await cursor.persist()
    orphan = await world.ledgers.create(custom={})
    named = set(world.ledgers.ledgers) - {orphan.ledger_id}
    with pytest.raises(LedgerAssertion):
        await world.factory.sweep_orphans()
    world.ledgers.crash()
    world.factory = world.new_factory()
    swept, ledger = await asyncio.gather(
        world.factory.sweep_orphans(), world.open("public/default/persistent/a")
    )
    assert swept == [orphan.ledger_id]
    assert named - set(world.ledgers.ledgers) <= {1}
    assert len(named) > 60


async def test_nothing_is_swept_where_others_use_the_stores() -> None:
    world = World(Limits(claim_on_open=True))
    made_by_another = await world.ledgers.create(custom={})
    assert await world.factory.sweep_orphans() == []
    assert made_by_another.ledger_id in world.ledgers.ledgers


async def test_opening_a_stream_during_its_deletion_keeps_it() -> None:
    """The other process decides after it has opened the stream; the deleter before that."""
    world = World(Limits(claim_on_open=True))
    await (await world.open()).open_cursor("s", EARLIEST)
    await world.factory.unload(NAME)
    others = world.new_factory()

    async def opened_by_another() -> None:
        await publish(await others.open(NAME), 1)

    with pytest.raises(ManagedLedgerFenced):
        await world.factory.delete(NAME, require_unused=opened_by_another)
    ledger = await others.open(NAME)
    assert set(ledger.cursors) == {"s"}
    assert data_of(await contents(ledger)) == [b"e0"]
    await publish(ledger, 1, "still his")


async def test_a_stream_whose_deletion_is_refused_stays() -> None:
    world = World(Limits(claim_on_open=True))
    await (await world.open()).open_cursor("s", EARLIEST)

    async def refuse() -> None:
        raise CorruptRecord("It is in use: leave it.")

    with pytest.raises(CorruptRecord):
        await world.factory.delete(NAME, require_unused=refuse)
    assert set((await world.open()).cursors) == {"s"}


async def test_a_record_that_cannot_be_read_is_left_alone() -> None:
    world = World()
    await world.open()
    await world.metadata.put(
        ledger_key(NAME), b"\xff\xff", indexes=[IndexEntry("managed-ledgers", NAME)]
    )
    world.factory = world.new_factory()
    with pytest.raises(CorruptRecord):
        await world.open()
    await world.ledgers.create(custom={})
    with pytest.raises(CorruptRecord):
        await world.factory.sweep_orphans()
    assert len(world.ledgers.ledgers) == 1


async def test_records_written_by_pulsar_are_opened() -> None:
    """Two ended ledgers, an empty one, and the current one of an owner that died."""
    world = World()
    for count in (3, 0, 2):
        handle = await world.ledgers.create(custom={})
        for number in range(count):
            handle.append(f"{count}-{number}".encode(), lambda *_: None)
        await settle()
    info = pb.ManagedLedgerInfo()
    info.ledgerInfo.add(ledgerId=1, entries=3, size=9, timestamp=5)
    info.ledgerInfo.add(ledgerId=2, timestamp=6)
    info.ledgerInfo.add(ledgerId=3)
    info.properties.add(key="k", value="v")
    await world.metadata.put(ledger_key(NAME), info.SerializeToString())
    ledger = await world.open()
    assert data_of(await contents(ledger)) == [b"3-0", b"3-1", b"3-2", b"2-0", b"2-1"]
    assert ledger.properties == {"k": "v"}
    assert sorted(world.ledgers.ledgers) == [1, 3]


async def test_two_first_owners_at_once() -> None:
    world = World()
    results = await asyncio.gather(
        world.new_factory().open(NAME), world.new_factory().open(NAME), return_exceptions=True
    )
    kinds = sorted(type(result).__name__ for result in results)
    assert kinds in (["ManagedLedger", "ManagedLedgerFenced"], ["ManagedLedger"] * 2)
