"""Cursors: against a model in any order of operations, and the way they are kept."""

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from config import bounds
from magnetar.protocol.ack_set import to_words
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.ledger.store import DiskFull, EntryTooLarge, LedgerBusy, LedgerError
from storage.managed_ledger import managed_ledger_pb2 as pb
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import cursor_key, ledger_key
from storage.managed_ledger.types import (
    CursorExists,
    CursorNotFound,
    Limits,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
    ManagedLedgerState,
)
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.effort import by_effort
from tests.support.waiting import count_turns, until
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    SMALL,
    AppendFault,
    World,
    publish,
    remaining,
    settle,
)

KEY = cursor_key(NAME, "s")
BATCH = 4
"""Messages in each entry of the model: bits of what is not acknowledged yet."""


class CursorModel(RuleBasedStateMachine):
    """Operations in any order: the cursor says what a dictionary of bits says."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def run(self, coroutine: object) -> object:
        return self.loop.run_until_complete(coroutine)  # type: ignore[arg-type]

    @initialize(inline=st.booleans())
    def begin(self, inline: bool) -> None:
        async def start() -> None:
            # Entries that are consumed stay: positions keep their meaning for the model.
            self.world = World(
                Limits(ledger_max_entries=7, ledger_min_age_ms=0, cursor_flush_ms=3_600_000)
            )
            self.ledger = await self.world.factory.open(NAME, retention=None)
            await self.ledger.open_cursor("hold", EARLIEST)
            await self.ledger.open_cursor("s", EARLIEST)

        self.run(start())
        self.cursor._store._inline_writes = 0 if inline else bounds.CURSOR_INLINE_WRITES  # type: ignore[union-attr]
        self.left: dict[Position, int] = {}
        self.durable: dict[Position, int] = {}

    @property
    def cursor(self) -> Cursor:
        return self.ledger.cursors["s"]

    def pick(self, number: int) -> Position:
        """An entry, or now and then a place where there is none."""
        known = sorted(self.left)
        if not known or number % 11 == 10:
            return Position(number % 5, number % 9)
        return known[number % len(known)]

    @rule(count=st.integers(1, 12))
    def append(self, count: int) -> None:
        for position in self.run(publish(self.ledger, count)):  # type: ignore[attr-defined]
            self.left[position] = 2**BATCH - 1

    @rule(number=st.integers(0, 10**6))
    def acknowledge(self, number: int) -> None:
        position = self.pick(number)
        assert self.cursor.acknowledge(position) == bool(self.left.get(position))
        if position in self.left:
            self.left[position] = 0

    @rule(number=st.integers(0, 10**6), bits=st.integers(0, 2**BATCH - 1))
    def acknowledge_part(self, number: int, bits: int) -> None:
        position = self.pick(number)
        before = self.left.get(position, 0)
        completed = self.cursor.acknowledge_batch(position, to_words(bits), BATCH)
        if position in self.left:
            self.left[position] &= bits
        assert completed == bool(before and not before & bits)

    @rule(number=st.integers(0, 10**6), bits=st.integers(0, 2**BATCH - 2))
    def acknowledge_up_to(self, number: int, bits: int) -> None:
        position = self.pick(number)
        self.cursor.acknowledge_up_to(position, to_words(bits))
        past_the_end = position > self.ledger.last_confirmed
        for each in self.left:
            if each < position or (each == position and (bits == 0 or past_the_end)):
                self.left[each] = 0
            elif each == position:
                self.left[each] &= bits

    @rule(number=st.integers(0, 10**6))
    def reset(self, number: int) -> None:
        position = self.pick(number)
        self.run(self.cursor.reset(position))
        self.left = {each: 0 if each < position else 2**BATCH - 1 for each in self.left}
        self.durable = dict(self.left)

    @rule()
    def persist(self) -> None:
        self.run(self.cursor.persist())
        self.durable = dict(self.left)

    @rule()
    def restart(self) -> None:
        self.ledger = self.run(self.world.restart())  # type: ignore[assignment]
        self.durable = dict(self.left)

    @rule()
    def crash(self) -> None:
        self.ledger = self.run(self.world.crash())  # type: ignore[assignment]
        self.left = {each: self.durable.get(each, 2**BATCH - 1) for each in self.left}

    @invariant()
    def says_what_the_model_says(self) -> None:
        if not hasattr(self, "left"):
            return
        cursor = self.cursor
        for position, bits in self.left.items():
            assert cursor.is_acknowledged(position) == (bits == 0)
            partly = 0 < bits < 2**BATCH - 1
            assert cursor.ack_set(position) == (to_words(bits) if partly else None)
        open_ones = sorted(position for position, bits in self.left.items() if bits)
        assert cursor.backlog == len(open_ones)
        for start in (EARLIEST, *sorted(self.left)[::3]):
            following = [position for position in open_ones if position >= start]
            found = cursor.first_unacknowledged(start)
            assert found == following[0] if following else found > self.ledger.last_confirmed
        assert [cursor.nth_unacknowledged(1 + at) for at in range(len(open_ones))] == open_ones
        assert cursor.nth_unacknowledged(len(open_ones) + 1) > self.ledger.last_confirmed
        first_open = open_ones[0] if open_ones else LATEST
        assert cursor.mark_delete < first_open
        done = [position for position in self.left if position < first_open]
        assert not done or cursor.mark_delete >= max(done)

    def teardown(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(settle())
        self.loop.close()


CursorModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCursorModel = CursorModel.TestCase


async def open_with(count: int, limits: Limits = SMALL) -> tuple[World, ManagedLedger, Cursor]:
    world = World(limits)
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    await publish(ledger, count)
    return world, ledger, cursor


async def test_cursor_starts_at_the_given_position() -> None:
    world = World()
    ledger = await world.open()
    early = await ledger.open_cursor("early", EARLIEST)
    positions = await publish(ledger, 15)
    again = await ledger.open_cursor("again", EARLIEST)
    late = await ledger.open_cursor("late", LATEST)
    after = await ledger.open_cursor("after", positions[9])
    assert [each.backlog for each in (early, again, late, after)] == [15, 15, 0, 5]
    assert after.first_unacknowledged(EARLIEST) == positions[10]
    assert early.first_unacknowledged(EARLIEST) == positions[0]
    await publish(ledger, 1)
    assert [each.backlog for each in (early, again, late, after)] == [16, 16, 1, 6]
    assert await ledger.open_cursor("late", EARLIEST) is late


async def test_acknowledging_over_the_ends_of_ledgers() -> None:
    _, ledger, cursor = await open_with(25)
    positions = [
        entry.position for entry in await ledger.read(EARLIEST, max_entries=99, max_bytes=999)
    ]
    for position in [*positions[12:22], *positions[:8]]:
        assert cursor.acknowledge(position)
        assert not cursor.acknowledge(position)
    assert cursor.mark_delete == positions[7]
    assert cursor.backlog == 7
    assert cursor.first_unacknowledged(positions[12]) == positions[22]
    for position in positions[8:12]:
        cursor.acknowledge(position)
    assert cursor.mark_delete == positions[21]
    cursor.acknowledge_up_to(LATEST)
    assert cursor.mark_delete == positions[-1]
    assert cursor.backlog == 0
    await ledger.close()


async def test_acknowledging_a_missing_position_changes_nothing() -> None:
    _, ledger, cursor = await open_with(12)
    for nowhere in (Position(1, 10), Position(2, 2), Position(9, 0), Position(-1, 0), EARLIEST):
        assert not cursor.acknowledge(nowhere)
        assert not cursor.acknowledge_batch(nowhere, [1], 2)
    cursor.acknowledge_up_to(Position(0, 5))
    assert cursor.backlog == 12
    cursor.acknowledge_up_to(Position(1, 99))
    assert cursor.backlog == 2
    await ledger.close()


async def test_a_whole_ack_set_changes_nothing() -> None:
    _, ledger, cursor = await open_with(1)
    assert not cursor.acknowledge_batch(Position(1, 0), [0b111], 3)
    assert cursor.ack_set(Position(1, 0)) is None
    assert cursor.acknowledge_batch(Position(1, 0), [0b1000], 3), "bits past the batch do not count"
    assert cursor.backlog == 0
    await ledger.close()


async def test_acknowledgements_are_durable_by_themselves_and_timers_end() -> None:
    world, _, cursor = await open_with(5)
    loop = asyncio.get_running_loop()
    puts = world.metadata.puts.count(KEY)
    for entry_id in range(3):
        cursor.acknowledge(Position(1, entry_id))
    await until(lambda: world.metadata.puts.count(KEY) > puts)
    await settle()
    assert world.metadata.puts.count(KEY) == puts + 1, "one write for all"
    assert cursor._flusher is not None
    assert cursor._flusher._timer is None
    assert loop.is_running()
    assert (await world.crash()).cursors["s"].backlog == 2


async def test_a_busy_cursor_moves_to_a_ledger_and_back_at_close() -> None:
    world, ledger, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    await publish(ledger, 2 * bounds.CURSOR_INLINE_WRITES)
    for entry_id in range(bounds.CURSOR_INLINE_WRITES + 5):
        cursor.acknowledge(Position(1, entry_id))
        await cursor.persist()
    (cursor_ledger,) = set(world.ledgers.ledgers) - {1}
    assert world.ledgers.ledgers[cursor_ledger].custom["pulsar/cursor"] == b"s"
    assert len(world.ledgers.ledgers[cursor_ledger].entries) == 5
    backlog = cursor.backlog
    ledger = await world.crash()
    assert ledger.cursors["s"].backlog == backlog
    ledger = await world.restart()
    assert set(world.ledgers.ledgers) == {1}, "a clean close leaves no cursor ledger"
    assert ledger.cursors["s"].backlog == backlog


async def test_large_positions_go_to_a_ledger_and_stay_there() -> None:
    world, ledger, cursor = await open_with(4000, Limits(cursor_flush_ms=10**6))
    for entry_id in range(1, 4000, 2):
        cursor.acknowledge(Position(1, entry_id))
    await cursor.persist()
    for ledger in (await world.crash(), await world.restart(), await world.crash()):
        found = ledger.cursors["s"]
        assert found.backlog == 2000
        assert remaining(found, [Position(1, n) for n in range(4)]) == [
            Position(1, 0),
            Position(1, 2),
        ]
    found.acknowledge_up_to(Position(1, 3996))
    await found.persist()
    await settle()
    assert set(world.ledgers.ledgers) == {1}


async def test_cursor_ledgers_roll_over(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "CURSOR_LEDGER_ENTRIES", 3)
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world, _, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    for entry_id in range(8):
        cursor.acknowledge(Position(1, entry_id))
        await cursor.persist()
    assert len(world.ledgers.ledgers) == 2
    assert world.ledgers.next_id == 5
    assert (await world.crash()).cursors["s"].backlog == 1


async def test_a_cursor_ledger_ends_by_its_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world, _, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    cursor.acknowledge(Position(1, 0))
    await cursor.persist()
    (cursor_ledger,) = set(world.ledgers.ledgers) - {1}
    set_bound(monkeypatch, "CURSOR_LEDGER_BYTES", 1)
    cursor.acknowledge(Position(1, 1))
    await cursor.persist()
    assert len(world.ledgers.ledgers) == 2
    assert cursor_ledger not in world.ledgers.ledgers
    assert (await world.crash()).cursors["s"].backlog == 7


async def test_a_failed_cursor_write_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, ledger, cursor = await open_with(9)
    world.metadata.faults.append((KEY, False))
    cursor.acknowledge(Position(1, 0))
    with pytest.raises(MetadataError):
        await cursor.persist()
    await until(lambda: not cursor._flusher.dirty)  # type: ignore[union-attr]
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world.ledgers.fail("create", DiskFull("full"))
    cursor.acknowledge(Position(1, 1))
    with pytest.raises(DiskFull):
        await cursor.persist()
    await cursor.persist()
    world.ledgers.fault = AppendFault(world.ledgers.appends, LedgerError("broken"), stored=1)
    cursor.acknowledge(Position(1, 2))
    with pytest.raises(LedgerError):
        await cursor.persist()
    await cursor.persist()
    cursor.acknowledge(Position(1, 3))
    await cursor.persist()
    assert ledger.state is ManagedLedgerState.OPEN
    assert (await world.crash()).cursors["s"].backlog == 5
    await world.restart()
    assert set(world.ledgers.ledgers) == {1}


async def test_a_position_that_the_store_does_not_take_costs_no_ledgers() -> None:
    world, _, cursor = await open_with(4000, Limits(cursor_flush_ms=10**6))
    world.ledgers.most_bytes = 500
    for entry_id in range(1, 1400, 2):
        cursor.acknowledge(Position(1, entry_id))
    await cursor.persist()
    assert world.ledgers.next_id == 3, "it is large, but not too large"
    for entry_id in range(1401, 4000, 2):
        cursor.acknowledge(Position(1, entry_id))
    for _ in range(3):
        with pytest.raises(EntryTooLarge):
            await cursor.persist()
    cursor.acknowledge_up_to(Position(1, 3000))
    await cursor.persist()
    assert world.ledgers.next_id == 3
    assert (await world.crash()).cursors["s"].backlog == 499


async def test_a_busy_store_costs_no_cursor_ledgers() -> None:
    world, _, cursor = await open_with(4000, Limits(cursor_flush_ms=10**6))
    for entry_id in range(1, 4000, 2):
        cursor.acknowledge(Position(1, entry_id))
    await cursor.persist()
    made = world.ledgers.next_id
    world.ledgers.room = 0
    cursor.acknowledge(Position(1, 0))
    for _ in range(3):
        with pytest.raises(LedgerBusy):
            await cursor.persist()
    world.ledgers.room = 1
    await cursor.persist()
    assert world.ledgers.next_id == made
    assert (await world.crash()).cursors["s"].backlog == 1999


async def test_an_unknown_cursor_write_is_not_taken_for_another_owner() -> None:
    for applied in (False, True):
        world, ledger, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
        world.metadata.faults.append((KEY, applied))
        cursor.acknowledge(Position(1, 0))
        with pytest.raises(MetadataError):
            await cursor.persist()
        cursor.acknowledge(Position(1, 1))
        await cursor.persist()
        assert ledger.state is ManagedLedgerState.OPEN
        assert (await world.crash()).cursors["s"].backlog == 7


@pytest.mark.parametrize("ledger_mode", [False, True])
async def test_a_cursor_write_that_conflicts_stops_the_owner(
    ledger_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ledger_mode:
        set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world, ledger, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    cursor.acknowledge(Position(1, 0))
    await cursor.persist()
    other = await world.new_factory().open(NAME)
    other.cursors["s"].acknowledge(Position(1, 1))
    await other.cursors["s"].persist()
    cursor.acknowledge(Position(1, 2))
    with pytest.raises(ManagedLedgerFenced):
        await cursor.persist()
    assert ledger.state is ManagedLedgerState.FENCED
    await ledger.close()
    assert other.cursors["s"].backlog == 7
    assert (await world.crash()).cursors["s"].backlog == 7


async def test_a_persist_covers_what_came_before_it() -> None:
    world, _, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    for entry_id in range(5):
        cursor.acknowledge(Position(1, entry_id))
        task = asyncio.ensure_future(cursor.persist())
        await asyncio.sleep(0)
        cursor.acknowledge(Position(1, entry_id + 1))
        await asyncio.gather(task, cursor.persist())
        assert not cursor._flusher.dirty  # type: ignore[union-attr]
    assert (await world.crash()).cursors["s"].backlog == 3


async def test_a_cancelled_persist_does_not_cancel_the_write() -> None:
    world, _, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    cursor.acknowledge(Position(1, 0))
    task = asyncio.ensure_future(cursor.persist())
    await asyncio.sleep(0)
    task.cancel()
    await until(lambda: not cursor._flusher.dirty)  # type: ignore[union-attr]
    assert (await world.crash()).cursors["s"].backlog == 8


async def test_properties_last() -> None:
    world, ledger, _ = await open_with(2, Limits(cursor_flush_ms=10**6))
    cursor = await ledger.open_cursor("p", EARLIEST, properties={"a": "1"})
    await cursor.replace_properties({"a": "1", "b": "2", "c": "3"})
    cursor.acknowledge(Position(1, 0))
    await cursor.replace_properties({"a": "1", "b": "2"})
    world.metadata.faults.append(("/p", False))
    with pytest.raises(MetadataError):
        await cursor.replace_properties({"x": "lost"})
    assert cursor.properties == {"a": "1", "b": "2"}
    assert (await world.crash()).cursors["p"].properties == {"a": "1", "b": "2"}


async def test_changes_of_properties_at_once_lose_none() -> None:
    world, ledger, _ = await open_with(2)
    cursor = await ledger.open_cursor("p", EARLIEST, properties={"a": "1"})
    await asyncio.gather(cursor.replace_properties({"b": "2"}), cursor.set_replicated(True))
    assert (dict(cursor.properties), cursor.replicated) == ({"b": "2"}, True)
    await asyncio.gather(cursor.set_replicated(False), cursor.replace_properties({"c": "3"}))
    assert (dict(cursor.properties), cursor.replicated) == ({"c": "3"}, False)
    assert (await world.crash()).cursors["p"].properties == {"c": "3"}


async def test_a_note_of_replication_outlives_a_crash_and_goes_with_the_flag() -> None:
    world, ledger, _ = await open_with(2)
    cursor = await ledger.open_cursor("p", EARLIEST, replicated=True, replication_note='{"a": 1}')
    await cursor.replace_properties({"b": "2"})
    found = (await world.crash()).cursors["p"]
    assert (dict(found.properties), found.replication_note) == ({"b": "2"}, '{"a": 1}')
    await asyncio.gather(
        found.change_replication_note(lambda note: note + "x"),
        found.change_replication_note(lambda note: note + "y"),
    )
    found = (await world.crash()).cursors["p"]
    assert (found.replicated, found.replication_note) == (True, '{"a": 1}xy')
    # What is noted later does not bring it back.
    await asyncio.gather(found.set_replicated(False), found.change_replication_note(str.upper))
    found = (await world.crash()).cursors["p"]
    assert (found.replicated, found.replication_note) == (False, "")


async def test_properties_do_not_bring_a_deleted_cursor_back() -> None:
    world, ledger, _ = await open_with(2)
    cursor = await ledger.open_cursor("p", EARLIEST)
    deleted, changed = await asyncio.gather(
        ledger.delete_cursor("p"), cursor.replace_properties({"a": "1"}), return_exceptions=True
    )
    assert deleted is None
    assert isinstance(changed, CursorNotFound)
    with pytest.raises(CursorNotFound):
        await cursor.set_replicated(True)
    again = await ledger.open_cursor("p", LATEST)
    again.acknowledge_up_to(LATEST)
    await again.persist()
    await ledger.delete_cursor("p")
    assert "p" not in (await world.crash()).cursors


async def test_properties_are_not_written_behind_the_end_of_a_ledger() -> None:
    world, ledger, _ = await open_with(2)
    cursor = await ledger.open_cursor("p", EARLIEST)
    await ledger.close()
    with pytest.raises(ManagedLedgerClosed):
        await cursor.replace_properties({"a": "1"})
    assert not (await world.crash()).cursors["p"].properties


async def test_readers_leave_nothing_and_share_the_names() -> None:
    world, ledger, _ = await open_with(12)
    reader = ledger.open_reader_cursor("r", LATEST)
    assert (reader.durable, reader.backlog, dict(reader.properties)) == (False, 0, {})
    await reader.reset(EARLIEST)
    assert reader.backlog == 12
    reader.acknowledge_up_to(LATEST)
    await reader.persist()
    with pytest.raises(CursorExists):
        ledger.open_reader_cursor("r", EARLIEST)
    with pytest.raises(CursorExists):
        await ledger.open_cursor("r", EARLIEST)
    with pytest.raises(CursorExists):
        ledger.open_reader_cursor("s", EARLIEST)
    await ledger.delete_cursor("r")
    with pytest.raises(CursorNotFound):
        await ledger.delete_cursor("r")
    assert list((await world.restart()).cursors) == ["s"]


async def test_a_deleted_cursor_is_gone_and_stays_so() -> None:
    world, ledger, cursor = await open_with(12)
    cursor.acknowledge(Position(1, 5))
    await ledger.delete_cursor("s")
    cursor.acknowledge(Position(1, 6))
    await cursor.persist()
    assert (await world.crash()).cursors == {}
    assert (await (await world.open()).open_cursor("s", EARLIEST)).backlog == 12


async def test_a_creation_with_unknown_outcome_can_be_repeated() -> None:
    for applied in (False, True):
        world, ledger, _ = await open_with(3)
        world.metadata.faults.append(("/new", applied))
        with pytest.raises(MetadataError):
            await ledger.open_cursor("new", EARLIEST)
        assert "new" not in ledger.cursors
        assert (await ledger.open_cursor("new", EARLIEST)).backlog == 3
        assert ledger.state is ManagedLedgerState.OPEN


async def test_a_missing_or_damaged_cursor_ledger_costs_only_acknowledgements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world, _, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    for entry_id in range(3):
        cursor.acknowledge(Position(1, entry_id))
        await cursor.persist()
    (cursor_ledger,) = set(world.ledgers.ledgers) - {1}
    world.ledgers.ledgers[cursor_ledger].entries[-1] = b"\xff"
    assert (await world.crash()).cursors["s"].backlog == 7
    del world.ledgers.ledgers[cursor_ledger]
    assert (await world.crash()).cursors["s"].backlog == 8, "the record's hint"


@pytest.mark.parametrize("trimmed", [False, True])
async def test_a_position_newer_than_the_metadata_skips_nothing(
    monkeypatch: pytest.MonkeyPatch, trimmed: bool
) -> None:
    """A restored backup: the log, and so the cursor's ledger, was copied after the metadata."""
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world, _, cursor = await open_with(3, Limits(cursor_flush_ms=10**6))
    cursor.acknowledge_up_to(Position(1, 0))
    await cursor.persist()
    monkeypatch.undo()
    if trimmed:
        await world.metadata.put(ledger_key(NAME), pb.ManagedLedgerInfo().SerializeToString())
    newest = max(world.ledgers.ledgers)
    future = pb.PositionInfo(ledgerId=newest + 1, entryId=5)
    world.ledgers.ledgers[newest].entries.append(future.SerializeToString())
    # The ids of ledgers that only the log knows are given out anew once it has forgotten them.
    again = await world.crash()
    mark = again.cursors["s"].mark_delete
    assert mark.ledger_id <= newest
    assert again.cursors["s"].backlog == 0
    again = await world.crash()
    assert again.cursors["s"].mark_delete == mark, "durable, before anything new is written"
    (first, *_) = await publish(again, 3)
    assert first.ledger_id == newest + 1
    assert again.cursors["s"].first_unacknowledged(EARLIEST) == first
    assert again.cursors["s"].backlog == 3


async def test_records_written_by_pulsar_are_understood() -> None:
    world, _, _ = await open_with(25)
    await world.factory.close()
    info = pb.ManagedCursorInfo(
        cursorsLedgerId=-1, markDeleteLedgerId=1, markDeleteEntryId=4, lastActive=1
    )
    low, high = (
        pb.NestedPositionInfo(ledgerId=1, entryId=7),
        pb.NestedPositionInfo(ledgerId=3, entryId=1),
    )
    info.individualDeletedMessages.add(lowerEndpoint=low, upperEndpoint=high)
    await world.metadata.put(KEY, info.SerializeToString())
    cursor = (await world.crash()).cursors["s"]
    assert cursor.backlog == 3 + 3
    assert cursor.first_unacknowledged(Position(1, 8)) == Position(3, 2)
    assert not cursor.is_acknowledged(Position(1, 7))


@pytest.mark.parametrize("inline", [True, False])
async def test_position_where_a_cursor_began_outlives_a_crash(inline: bool) -> None:
    world = World(SMALL)
    ledger = await world.factory.open(NAME)
    await publish(ledger, 2)
    cursor = await ledger.open_cursor("s", LATEST, begins=True)
    cursor._store._inline_writes = 0 if inline else bounds.CURSOR_INLINE_WRITES  # type: ignore[union-attr]
    began = ledger.last_confirmed
    assert cursor.began == began
    await publish(ledger, 3)
    cursor.acknowledge(ledger.next_position(began))
    await cursor.persist()
    loaded = (await world.crash()).cursors["s"]
    assert (loaded.began, loaded.backlog) == (began, 2)


@pytest.mark.parametrize("whose", ["here", "there"])
async def test_what_another_incarnation_got_is_passed_over(whose: str) -> None:
    world = World(SMALL)
    ledger = await world.factory.open(NAME)
    cursor = await ledger.open_cursor("s", EARLIEST, begins=True)
    await publish(ledger, 4)
    first = ledger.entry_at(0)
    note = cursor.send_as if whose == "here" else cursor.send_to
    note(1)
    cursor.acknowledge(first)
    assert cursor.began == EARLIEST
    third = ledger.entry_at(2)
    cursor.acknowledge(third)
    note(2)
    await cursor.persist()
    loaded = (await world.crash()).cursors["s"]
    noted = loaded.sent_as if whose == "here" else loaded.sent_to
    assert (loaded.began, noted, loaded.backlog) == (third, 2, 2)


async def test_what_a_cursor_passed_over_behind_its_mark_outlives_a_crash() -> None:
    world = World(SMALL)
    ledger = await world.factory.open(NAME)
    cursor = await ledger.open_cursor("s", EARLIEST, begins=True)
    await publish(ledger, 3)
    last = ledger.last_confirmed
    cursor.pass_over(last)
    cursor.acknowledge(last)
    await cursor.persist()
    loaded = (await world.crash()).cursors["s"]
    assert (loaded.began, loaded.backlog) == (last, 2)


async def test_position_where_a_cursor_began_moves_with_what_it_passes_over() -> None:
    world = World(SMALL)
    ledger = await world.factory.open(NAME)
    cursor = await ledger.open_cursor("s", EARLIEST, begins=True)
    plain = await ledger.open_cursor("plain", EARLIEST)
    await publish(ledger, 3)
    for each in (cursor, plain):
        await each.reset(LATEST)
    assert (cursor.began, plain.began) == (ledger.last_confirmed, None)
    await cursor.reset(EARLIEST)
    loaded = (await world.crash()).cursors
    # What was passed over is not sent after a seek back either.
    assert loaded["s"].began == ledger.last_confirmed
    assert loaded["plain"].began is None


async def test_many_acknowledgements_out_of_order() -> None:
    count = by_effort(quick=20_000, whole=100_000, nightly=100_000)
    _, _, cursor = await open_with(count, Limits(cursor_flush_ms=10**6))
    for entry_id in range(count - 1, -1, -1):
        cursor.acknowledge(Position(1, entry_id))
        if entry_id == 1:
            assert cursor.backlog == 2 - 1
            assert cursor.mark_delete == Position(-1, -1)
    assert cursor.mark_delete == Position(1, count - 1)
    assert cursor.backlog == 0


async def test_time_of_the_last_use_outlives_a_crash_and_acknowledgements_do_not_write_it() -> None:
    world, ledger, cursor = await open_with(9, Limits(cursor_flush_ms=10**6))
    await publish(ledger, 2 * bounds.CURSOR_INLINE_WRITES)
    for entry_id in range(bounds.CURSOR_INLINE_WRITES + 1):
        cursor.acknowledge(Position(1, entry_id))
        await cursor.persist()
    version = (await world.metadata.get(KEY)).version  # type: ignore[union-attr]
    cursor.set_unused_since(77)
    await cursor.persist()
    noted = (await world.metadata.get(KEY)).version  # type: ignore[union-attr]
    assert noted != version
    for entry_id in range(bounds.CURSOR_INLINE_WRITES + 1, bounds.CURSOR_INLINE_WRITES + 5):
        cursor.acknowledge(Position(1, entry_id))
        await cursor.persist()
    assert (await world.metadata.get(KEY)).version == noted  # type: ignore[union-attr]
    ledger = await world.crash()
    assert ledger.cursors["s"].unused_since_ms == 77
    assert ledger.cursors["s"].numbers == {}
    ledger.cursors["s"].set_unused_since(None)
    ledger = await world.restart()
    assert ledger.cursors["s"].unused_since_ms is None


async def test_many_cursors_are_loaded_closed_and_released_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "CURSORS_AT_ONCE", 2)
    world = World()
    ledger = await world.open()
    names = [f"s{number}" for number in range(20)]
    for name in names:
        await ledger.open_cursor(name, EARLIEST)
    turn = count_turns()
    turns: dict[str, list[int]] = {"close": [], "snapshot": [], "restore": []}

    def count(method: str) -> None:
        original = getattr(Cursor, method)

        def counted(cursor: Cursor, *given: object) -> object:
            turns[method].append(turn())
            return original(cursor, *given)

        monkeypatch.setattr(Cursor, method, counted)

    for method in turns:
        count(method)
    await ledger.close()
    assert len(turns["close"]) == 20
    ledger = await world.open()
    assert sorted(ledger.cursors) == sorted(names)
    assert len(turns["restore"]) == 20
    most = {method: max(Counter(each).values()) for method, each in turns.items()}
    # A cursor that is closed takes a snapshot for its record, and one to be kept instead of it.
    assert most == {"close": 2, "snapshot": 4, "restore": 2}
    await ledger.close()
