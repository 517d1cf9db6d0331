"""Records that one process owns, of streams and cursors: what it takes for its own, what not."""

import pytest

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.managed_ledger.ack_ranges import AckRanges, BatchBits
from storage.managed_ledger.owned_record import OwnedRecord
from storage.managed_ledger.records import (
    INLINE_LEDGER_ID,
    CursorSnapshot,
    cursor_key,
    encode_cursor,
    ledger_key,
)
from storage.managed_ledger.types import Limits, ManagedLedgerFenced, ManagedLedgerState
from storage.metadata.store import MetadataError, Record, VersionConflict
from tests.support.clocks import FakeClock
from tests.unit.storage.managed_ledger.fakes import FaultyMetadata, World, publish

KEY = "/managed-ledgers/x"


async def test_the_same_bytes_written_by_another_owner_are_not_ones_own() -> None:
    """Though a write of just these has no known outcome."""
    store = FaultyMetadata(FakeClock())
    ours, theirs = OwnedRecord(store, KEY), OwnedRecord(store, KEY)
    await ours.put(b"1")
    store.faults.append((KEY, False))
    with pytest.raises(MetadataError):
        await ours.put(b"1")
    await theirs.load()
    await theirs.put(b"1")
    with pytest.raises(VersionConflict):
        await ours.put(b"2")
    await theirs.put(b"3")


async def test_a_claim_is_not_taken_for_a_write_whose_answer_was_lost() -> None:
    world = World(Limits(claim_on_open=True, cursor_flush_ms=10**6))
    first = await world.open()
    cursor = await first.open_cursor("s", EARLIEST)
    await publish(first, 3)
    cursor.acknowledge(Position(1, 0))
    world.metadata.faults.append((cursor_key(first.name, "s"), True))
    with pytest.raises(MetadataError):
        await cursor.persist()
    successor = await world.new_factory().open(first.name)
    cursor.acknowledge(Position(1, 1))
    with pytest.raises(ManagedLedgerFenced):
        await cursor.persist()
    theirs = successor.cursors["s"]
    assert theirs.mark_delete == Position(1, 0)
    theirs.acknowledge(Position(1, 2))
    await theirs.persist()


async def test_a_claim_of_the_stream_is_not_taken_for_a_write_whose_answer_was_lost() -> None:
    world = World(Limits(claim_on_open=True))
    first = await world.open()
    world.metadata.faults.append((ledger_key(first.name), True))
    with pytest.raises(MetadataError):
        await first.set_properties({"a": "2"})
    # It claims the record in the same bytes, as nothing that they say has changed.
    successor = await world.new_factory().open(first.name)
    written = await world.metadata.get(ledger_key(first.name))
    with pytest.raises(ManagedLedgerFenced):
        await first.set_properties({"a": "3"})
    assert first.state is ManagedLedgerState.FENCED
    assert await world.metadata.get(ledger_key(first.name)) == written
    await successor.set_properties({"a": "4"})


async def test_a_change_that_is_tried_again_and_was_stored_is_not_written_twice() -> None:
    world = World(Limits(claim_on_open=True))
    first = await world.open()
    world.metadata.puts.clear()
    world.metadata.faults.append((ledger_key(first.name), True))
    with pytest.raises(MetadataError):
        await first.set_properties({"a": "2"})
    await first.set_properties({"a": "2"})
    assert len(world.metadata.puts) == 1


async def test_an_open_finds_every_cursor_though_reads_may_be_of_the_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(Limits(claim_on_open=True))
    first = await world.open()
    await first.open_cursor("s", EARLIEST)
    scan = world.metadata.scan

    async def children(_key: str) -> list[str]:
        return []

    async def of_the_past(
        lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> list[Record]:
        return await scan(lo, hi, partition=partition, fresh=True) if fresh else []

    monkeypatch.setattr(world.metadata, "children", children)
    monkeypatch.setattr(world.metadata, "scan", of_the_past)
    successor = await world.new_factory().open(first.name)
    # Of one that was not found, what transactions hold would be forgotten when it is made anew.
    assert list(successor.cursors) == ["s"]


async def test_a_stale_owner_makes_no_cursor() -> None:
    world = World(Limits(claim_on_open=True))
    stale = await world.open()
    await publish(stale, 3)
    successor = await world.new_factory().open(stale.name)
    with pytest.raises(ManagedLedgerFenced):
        await stale.open_cursor("s", EARLIEST)
    assert await world.metadata.get(cursor_key(stale.name, "s")) is None
    cursor = await successor.open_cursor("s", LATEST)
    assert cursor.backlog == 0
    again = await world.new_factory().open(stale.name)
    assert again.cursors["s"].backlog == 0


async def test_a_cursor_that_a_stale_owner_left_is_made_anew_as_it_is_asked_for() -> None:
    """That owner died before it could look whether it still was one."""
    world = World(Limits(claim_on_open=True))
    stale = await world.open()
    await publish(stale, 3)
    successor = await world.new_factory().open(stale.name)
    record = encode_cursor(
        INLINE_LEDGER_ID, CursorSnapshot(EARLIEST, AckRanges(), BatchBits()), {"of": "stale"}, 0
    )
    await world.metadata.put(cursor_key(stale.name, "s"), record)
    cursor = await successor.open_cursor("s", LATEST, properties={"of": "successor"})
    assert (cursor.backlog, cursor.properties) == (0, {"of": "successor"})
    again = await world.new_factory().open(stale.name)
    assert (again.cursors["s"].backlog, again.cursors["s"].properties) == (0, {"of": "successor"})


async def test_a_cursor_whose_answer_was_lost_is_made_where_it_is_asked_for_next() -> None:
    world = World(Limits(claim_on_open=True))
    ledger = await world.open()
    await publish(ledger, 3)
    world.metadata.faults.append((cursor_key(ledger.name, "s"), True))
    with pytest.raises(MetadataError):
        await ledger.open_cursor("s", EARLIEST)
    assert (await ledger.open_cursor("s", LATEST)).backlog == 0
    again = await world.new_factory().open(ledger.name)
    assert again.cursors["s"].backlog == 0


async def test_an_owner_in_doubt_of_its_stream_is_still_one() -> None:
    world = World(Limits(claim_on_open=True))
    ledger = await world.open()
    for applied in (True, False):
        world.metadata.faults.append((ledger_key(ledger.name), applied))
        with pytest.raises(MetadataError):
            await ledger.set_properties({"applied": str(applied)})
        await ledger.open_cursor(f"s{applied}", EARLIEST)
    await ledger.set_properties({"a": "b"})
    assert list((await world.new_factory().open(ledger.name)).cursors) == ["sFalse", "sTrue"]
