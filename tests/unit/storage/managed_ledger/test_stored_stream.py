"""A stream as it is stored, beside the same stream opened."""

import pytest

from magnetar.protocol.ids import EARLIEST
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.stored_stream import StoredStream
from storage.managed_ledger.types import Limits
from tests.support.bounds import set_bound
from tests.unit.storage.managed_ledger.fakes import NAME, World, publish

LIMITS = Limits(ledger_max_entries=10, ledger_min_age_ms=0, cursor_flush_ms=1)


async def stored(world: World) -> StoredStream:
    found = await world.factory.stored_stream(NAME)
    assert found is not None
    return found


def require_same(found: StoredStream, ledger: ManagedLedger) -> None:
    """What is stored says what the open stream says."""
    assert found.size_bytes == ledger.total_size_bytes
    assert found.cursors.keys() == ledger.cursors.keys()
    for name, cursor in ledger.cursors.items():
        one = found.cursors[name]
        assert one.backlog == cursor.backlog
        assert one.backlog_size_bytes == ledger.size_after(cursor.mark_delete)
        assert one.acked_run_count == cursor.acked_run_count
        assert one.oldest == cursor.first_unacknowledged(EARLIEST)
        assert (one.properties, one.replicated) == (cursor.properties, cursor.replicated)


@pytest.mark.parametrize("inline_writes", [0, 100], ids=["cursor-ledger", "record"])
async def test_ledgers_and_cursors_are_read_without_disturbing_their_owner(
    monkeypatch: pytest.MonkeyPatch, inline_writes: int
) -> None:
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", inline_writes)
    world = World(LIMITS)
    assert await world.factory.stored_stream(NAME) is None
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST, properties={"team": "a"})
    await ledger.open_cursor("keeps-all", EARLIEST)
    await cursor.set_replicated(True)
    positions = await publish(ledger, 25)
    cursor.acknowledge_up_to(positions[11])
    cursor.acknowledge(positions[14])
    await cursor.persist()
    found = await stored(world)
    require_same(found, ledger)
    newest, oldest = await found.newest(), await found.entry(found.cursors["s"].oldest)
    assert newest is not None
    assert oldest is not None
    assert (newest.position, newest.data) == (positions[24], b"e24")
    assert (oldest.position, oldest.data) == (positions[12], b"e12")
    # The owner goes on in the same ledger, and with the same cursor.
    (following,) = await publish(ledger, 1)
    assert following.ledger_id == positions[24].ledger_id
    cursor.acknowledge(following)
    await cursor.persist()
    require_same(await stored(world), ledger)


async def test_an_empty_stream_has_no_newest_entry() -> None:
    world = World(LIMITS)
    ledger = await world.open()
    await ledger.open_cursor("s", EARLIEST)
    found = await stored(world)
    require_same(found, ledger)
    assert await found.newest() is None
    assert found.cursors["s"].backlog == found.offloaded_size_bytes == 0
