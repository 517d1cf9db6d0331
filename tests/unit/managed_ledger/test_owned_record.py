"""Records that one process owns, of streams and cursors: what it takes for its own, what not."""

import pytest

from protocol.ids import EARLIEST, Position
from storage.managed_ledger_owned import OwnedRecord
from storage.managed_ledger_records import cursor_key, ledger_key
from storage.managed_ledger_types import Limits, ManagedLedgerFenced, ManagedLedgerState
from storage.metadata.store import MetadataError, Record, VersionConflict
from tests.unit.managed_ledger.fakes import FakeClock, FaultyMetadata, World, publish

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
