"""The compacted ledger of a stream: read, replaced, given up, with crashes at every step."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from config import bounds
from magnetar.protocol.ids import EARLIEST, Position
from storage.ledger.store import LedgerError, WritableLedger
from storage.managed_ledger import managed_ledger_pb2 as pb
from storage.managed_ledger.compacted_record import (
    COMPACTED_PROPERTY,
    COMPACTION_CURSOR,
    compacted_of,
    compaction_ledgers,
    decode_compacted,
    encode_compacted,
)
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import cursor_key, decode_stream, ledger_key
from storage.managed_ledger.types import CorruptRecord, CursorNotFound, Entry, Limits
from storage.metadata.store import MetadataError
from tests.unit.storage.managed_ledger.crashes import crash_at_each_step
from tests.unit.storage.managed_ledger.fakes import NAME, World, contents, publish, settle
from tests.unit.storage.managed_ledger.test_on_local_stores import Local

SHARED = Limits(ledger_max_entries=10, ledger_min_age_ms=0, cursor_flush_ms=1, claim_on_open=True)
PLACES = [Position(1, 3), Position(1, 8), Position(2, 0), Position(4, 5)]


async def write(ledger: WritableLedger, entries: Sequence[Entry]) -> None:
    for entry in entries:
        durable: asyncio.Future[LedgerError | None] = asyncio.get_running_loop().create_future()
        ledger.append(encode_compacted(entry), partial(_done, durable))
        assert await durable is None
    await ledger.close()


def _done(
    durable: "asyncio.Future[LedgerError | None]", _entry_id: int, error: LedgerError | None
) -> None:
    durable.set_result(error)


async def every_fifth(stream: ManagedLedger) -> None:
    """Compact everything: entries of which the number ends with 0 or 5 are the newest."""
    entries = await contents(stream)
    made = await stream.compaction.begin()
    await write(made, [entry for entry in entries if entry.data[-1:] in b"05"])
    await stream.compaction.commit(made, entries[-1].position, empty=False)


async def compacted_contents(stream: ManagedLedger) -> list[bytes]:
    ledger = stream.compaction.use()
    if ledger is None:
        return []
    found: list[Entry] = []
    start = EARLIEST
    while entries := await ledger.read(start, max_entries=2, max_bytes=1000):
        found += entries
        start = Position(found[-1].position.ledger_id, found[-1].position.entry_id + 1)
    last = await ledger.last()
    assert (found[-1] if found else None) == last
    stream.compaction.leave(ledger)
    return [entry.data for entry in found]


async def named(world: World) -> set[int]:
    record = await world.metadata.get(ledger_key(NAME))
    assert record is not None
    found = decode_stream(record.key, record.value)
    return {info.ledger_id for info in found.ledgers} | compaction_ledgers(found.properties)


async def prepare(world: World, stream: ManagedLedger) -> None:
    await stream.open_cursor(COMPACTION_CURSOR, EARLIEST)
    await publish(stream, 15)
    await every_fifth(stream)
    await publish(stream, 12, "f")


async def test_a_crash_at_each_step_leaves_the_old_or_the_new_compacted_ledger() -> None:
    both: set[bool] = set()

    async def check(world: World, stream: ManagedLedger, finished: bool, step: int) -> None:
        await settle()
        compacted = await compacted_contents(stream)
        old = [b"e0", b"e5", b"e10"]
        new = [b"f0", b"f5", b"f10"]
        left = {entry.data for entry in await contents(stream)}
        # The first ledger of ten entries was trimmed after the first compaction.
        is_new = compacted[-1:] == new[-1:]
        both.add(is_new)
        if is_new:
            assert compacted == [b"e10", *new]
            assert stream.cursors[COMPACTION_CURSOR].backlog == 0
        else:
            assert not finished
            assert compacted == old
            assert {f"f{n}".encode() for n in range(12)} <= left
            assert stream.cursors[COMPACTION_CURSOR].backlog == 12
        # Everything that is stored is named, or swept at the next start.
        await world.factory.close()
        world.factory = world.new_factory()
        await world.factory.sweep_orphans()
        stream = await world.open()
        assert set(await world.ledgers.list_ledgers()) == await named(world)
        assert await compacted_contents(stream) == compacted

    await crash_at_each_step(prepare, every_fifth, check)
    assert both == {False, True}


async def test_of_shared_stores_the_search_for_orphans_leaves_what_a_compaction_names() -> None:
    async def check(world: World, stream: ManagedLedger, finished: bool, step: int) -> None:
        await settle()
        before = await compacted_contents(stream)
        # A run that takes days: its ledger is old, and must not be found.
        made = await stream.compaction.begin()
        world.clock.ms += bounds.ORPHANED_LEDGER_AGE_MS
        await world.factory.delete_orphaned_ledgers()
        assert set(world.ledgers.ledgers) == await named(world), step
        await write(made, [Entry(Position(1, 0), b"x")])
        assert await compacted_contents(stream) == before
        await world.factory.close()

    await crash_at_each_step(prepare, every_fifth, check, SHARED)


async def test_a_ledger_in_use_is_deleted_when_its_readers_have_left() -> None:
    world = World()
    stream = await world.open()
    await prepare(world, stream)
    old = stream.compaction.use()
    assert old is not None
    await every_fifth(stream)
    await settle()
    assert [entry.data for entry in await old.read(EARLIEST, max_entries=9, max_bytes=99)] == [
        b"e0",
        b"e5",
        b"e10",
    ]
    assert old.ledger_id in await named(world)
    stream.compaction.leave(old)
    await settle()
    assert old.ledger_id not in world.ledgers.ledgers
    assert old.ledger_id not in await named(world)


async def test_an_abandoned_run_and_a_deleted_cursor_leave_nothing() -> None:
    world = World()
    stream = await world.open()
    await prepare(world, stream)
    made = await stream.compaction.begin()
    await stream.compaction.abandon(made)
    assert int(made.ledger_id) not in world.ledgers.ledgers
    made = await stream.compaction.begin()
    await stream.delete_cursor(COMPACTION_CURSOR)
    with pytest.raises(CursorNotFound):
        await stream.compaction.commit(made, stream.last_confirmed, empty=False)
    await stream.open_cursor(COMPACTION_CURSOR, EARLIEST)
    with pytest.raises(CursorNotFound):
        await stream.compaction.commit(made, stream.last_confirmed, empty=False)
    assert stream.compaction.use() is None
    await settle()
    assert set(await world.ledgers.list_ledgers()) == {info.ledger_id for info in stream.ledgers}


@pytest.mark.parametrize("in_ledger", [False, True], ids=["record", "cursor-ledger"])
async def test_a_ledger_that_pulsar_compacted_is_taken_over(in_ledger: bool) -> None:
    world = World()
    stream = await world.open()
    positions = await publish(stream, 5)
    await world.factory.close()
    made = await world.ledgers.create(custom={})
    await write(made, [Entry(positions[2], b"newest")])
    mark = positions[3]
    info = pb.ManagedCursorInfo(
        cursorsLedgerId=-1, markDeleteLedgerId=mark.ledger_id, markDeleteEntryId=mark.entry_id
    )
    if in_ledger:
        noted = await world.ledgers.create(custom={})
        info = pb.ManagedCursorInfo(cursorsLedgerId=int(noted.ledger_id))
        position = pb.PositionInfo(ledgerId=mark.ledger_id, entryId=mark.entry_id)
        position.properties.add(name="CompactedTopicLedger", value=int(made.ledger_id))
        durable: asyncio.Future[LedgerError | None] = asyncio.get_running_loop().create_future()
        noted.append(position.SerializeToString(), partial(_done, durable))
        assert await durable is None
    else:
        info.properties.add(name="CompactedTopicLedger", value=int(made.ledger_id))
    await world.metadata.put(cursor_key(NAME, COMPACTION_CURSOR), info.SerializeToString())
    world.factory = world.new_factory()
    stream = await world.open()
    for _ in range(2):
        assert stream.compaction.horizon == mark
        assert await compacted_contents(stream) == [b"newest"]
        stream.cursors[COMPACTION_CURSOR].acknowledge_up_to(mark)
        stream = await world.restart()


@pytest.mark.parametrize("applied", [False, True])
async def test_a_write_of_unknown_outcome_leaves_the_old_ledger_until_the_next_run(
    applied: bool,
) -> None:
    world = World()
    stream = await world.open()
    await prepare(world, stream)
    made = await stream.compaction.begin()
    await made.close()
    world.metadata.faults.append((ledger_key(NAME), applied))
    with pytest.raises(MetadataError):
        await stream.compaction.commit(made, stream.last_confirmed, empty=False)
    assert await compacted_contents(stream) == [b"e0", b"e5", b"e10"]
    assert stream.cursors[COMPACTION_CURSOR].backlog == 12
    await stream.compaction.abandon(made)
    await every_fifth(stream)
    assert await compacted_contents(stream) == [b"e10", b"f0", b"f5", b"f10"]
    assert set(await world.ledgers.list_ledgers()) == await named(world)


async def test_a_compaction_of_which_nothing_is_left_has_no_ledger() -> None:
    world = World()
    stream = await world.open()
    await prepare(world, stream)
    made = await stream.compaction.begin()
    await made.close()
    await stream.compaction.commit(made, stream.last_confirmed, empty=True)
    for _ in range(2):
        assert stream.compaction.horizon == stream.last_confirmed
        assert await compacted_contents(stream) == []
        assert set(await world.ledgers.list_ledgers()) == await named(world)
        stream = await world.crash()
    await stream.close()


async def test_deleting_the_stream_deletes_its_compacted_ledger() -> None:
    world = World()
    await prepare(world, await world.open())
    await world.factory.delete(NAME)
    assert await world.ledgers.list_ledgers() == []


async def test_reads_begin_at_or_after_their_start() -> None:
    world = World()
    stream = await world.open()
    await stream.open_cursor(COMPACTION_CURSOR, EARLIEST)
    await publish(stream, 1)
    made = await stream.compaction.begin()
    await write(made, [Entry(place, b"x") for place in PLACES])
    await stream.compaction.commit(made, stream.last_confirmed, empty=False)
    ledger = stream.compaction.use()
    assert ledger is not None

    async def from_(start: Position) -> list[Position]:
        return [each.position for each in await ledger.read(start, max_entries=9, max_bytes=99)]

    for start, first in (
        (EARLIEST, 0),
        (PLACES[0], 0),
        (Position(1, 4), 1),
        (Position(1, 9), 2),
        (Position(3, 0), 3),
        (Position(4, 6), 4),
        (Position(4, 6), 4),
    ):
        assert await from_(start) == PLACES[first:]
    await stream.close()


async def test_it_survives_restarts_of_the_embedded_stores(tmp_path: Path) -> None:
    local = Local(tmp_path)
    await local.start()
    stream = await local.factory.open(NAME)
    await stream.open_cursor(COMPACTION_CURSOR, EARLIEST)
    await publish(stream, 15)
    await every_fifth(stream)
    for clean in (True, False):
        stream = await local.reopen(clean=clean)
        assert await compacted_contents(stream) == [b"e0", b"e5", b"e10"]
    await local.stop(clean=True)


def test_broken_records_and_entries_are_refused() -> None:
    assert decode_compacted(encode_compacted(Entry(Position(5, 6), b"abc"))) == Entry(
        Position(5, 6), b"abc"
    )
    for data in (b"", b"\0\0\0\x09abc", encode_compacted(Entry(Position(5, 6), b"abc"))[:-1]):
        with pytest.raises(CorruptRecord):
            decode_compacted(data)
    for value in ("x", "1:2", "1:2:3:4"):
        with pytest.raises(CorruptRecord):
            compacted_of({COMPACTED_PROPERTY: value})
