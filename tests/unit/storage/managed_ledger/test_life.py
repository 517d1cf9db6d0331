"""Terminating, trimming, and properties, with crashes at every step."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.ledger.store import DiskFull, LedgerError
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import (
    AppendOutcomeUnknown,
    Limits,
    ManagedLedgerState,
    ManagedLedgerTerminated,
    Retention,
)
from storage.metadata.store import MetadataError, PutResult, Version
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.storage.managed_ledger.crashes import crash_at_each_step, numbered
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    AppendFault,
    Outcomes,
    World,
    contents,
    data_of,
    publish,
    settle,
)

# Terminate


async def test_terminate_waits_for_what_was_taken_and_seals_for_ever() -> None:
    world = World()
    ledger = await world.open()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 25)
    sealing = asyncio.ensure_future(ledger.terminate())
    await asyncio.sleep(0)
    with pytest.raises(ManagedLedgerTerminated):
        outcomes.append(ledger, b"late")
    end = await sealing
    assert outcomes.stored == numbered(25)
    assert end == outcomes.positions[-1] == ledger.last_confirmed
    assert ledger.state is ManagedLedgerState.TERMINATED
    assert await ledger.terminate() == end
    for reopen in (world.crash, world.restart):
        ledger = await reopen()
        assert ledger.state is ManagedLedgerState.TERMINATED
        assert await ledger.terminate() == end == ledger.last_confirmed
        assert data_of(await contents(ledger)) == numbered(25)
        with pytest.raises(ManagedLedgerTerminated):
            ledger.append(b"late", lambda *_: None)


@pytest.mark.parametrize("what", ["end", "properties", "properties of a cursor"])
async def test_cancelled_write_does_not_fence_the_close(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    world = World()
    ledger = await world.open()
    end = (await publish(ledger, 3))[-1]
    cursor = await ledger.open_cursor("s", EARLIEST)
    put, held, queue = world.metadata.put, asyncio.Event(), asyncio.Lock()
    asked: list[str] = []

    async def put_in_turn(key: str, value: bytes, expect: Version | None) -> PutResult:
        async with queue:
            await held.wait()
            return await put(key, value, expect=expect)

    async def put_later(
        key: str, value: bytes, *, expect: Version | None = None, **_: object
    ) -> PutResult:
        """Put it behind earlier ones, also if the caller is cancelled, as a store on disk does."""
        asked.append(key)
        return await asyncio.shield(put_in_turn(key, value, expect))

    monkeypatch.setattr(world.metadata, "put", put_later)
    writes: dict[str, Callable[[], Awaitable[object]]] = {
        "end": ledger.terminate,
        "properties": lambda: ledger.set_properties({"a": "1"}),
        "properties of a cursor": lambda: cursor.set_replicated(True),
    }
    writing = asyncio.ensure_future(writes[what]())
    await until(lambda: asked, poll_s=0)
    writing.cancel()
    cursor.acknowledge(end)
    with capture_logs() as logged:
        closing = asyncio.ensure_future(ledger.close())
        await settle()
        held.set()
        await closing
    assert not logged, "nobody else has written the record"
    with pytest.raises(asyncio.CancelledError):
        await writing
    ledger = await world.crash()
    assert (ledger.state is ManagedLedgerState.TERMINATED) is (what == "end")
    assert (ledger.properties == {"a": "1"}) is (what == "properties")
    assert ledger.cursors["s"].replicated is (what == "properties of a cursor")
    assert ledger.last_confirmed == end


async def test_an_empty_stream_can_be_terminated() -> None:
    world = World()
    ledger = await world.open()
    assert await ledger.terminate() == Position(-1, -1)
    ledger = await world.crash()
    assert ledger.state is ManagedLedgerState.TERMINATED
    assert await ledger.terminate() == Position(-1, -1)


async def test_concurrent_terminations_agree() -> None:
    world = World()
    ledger = await world.open()
    Outcomes().append_all(ledger, 3)
    first, second = await asyncio.gather(ledger.terminate(), ledger.terminate())
    assert first == second == Position(1, 2)


@pytest.mark.parametrize("on_disk", [0, 1, 3])
async def test_recovery_decides_what_a_terminated_stream_ends_with(on_disk: int) -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 2, "old")
    world.ledgers.fault = AppendFault(world.ledgers.appends, LedgerError("broken"), on_disk)
    outcomes = Outcomes()
    outcomes.append_all(ledger, 3)
    end = await ledger.terminate()
    await outcomes.wait(3)
    assert outcomes.stored == numbered(3)
    assert end == outcomes.positions[-1]
    assert data_of(await contents(await world.crash())) == [b"old0", b"old1", *numbered(3)]


async def test_without_recovery_nothing_is_terminated_and_nothing_is_taken() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1, "old")
    world.ledgers.fault = AppendFault(world.ledgers.appends, LedgerError("broken"), stored=1)
    world.ledgers.fail("open", MetadataError("down"))
    outcomes = Outcomes()
    outcomes.append_all(ledger, 2)
    with pytest.raises(MetadataError):
        await ledger.terminate()
    assert [type(error) for error in outcomes.errors] == [AppendOutcomeUnknown] * 2
    with pytest.raises(ManagedLedgerTerminated):
        ledger.append(b"late", lambda *_: None)
    assert await ledger.terminate() == Position(1, 1)
    assert data_of(await contents(await world.crash())) == [b"old0", b"e0"]


async def test_terminate_with_a_full_disk_ends_with_what_is_stored() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1, "old")
    world.ledgers.fault = AppendFault(world.ledgers.appends + 1, DiskFull("full"))
    outcomes = Outcomes()
    outcomes.append_all(ledger, 3)
    assert await ledger.terminate() == Position(1, 1)
    assert outcomes.stored == [b"e0"]
    assert len(outcomes.errors) == 2


async def test_a_termination_with_unknown_outcome_can_be_repeated() -> None:
    for applied in (False, True):
        world = World()
        ledger = await world.open()
        await publish(ledger, 3)
        world.metadata.faults.append((NAME, applied))
        with pytest.raises(MetadataError):
            await ledger.terminate()
        with pytest.raises(ManagedLedgerTerminated):
            ledger.append(b"late", lambda *_: None)
        assert await ledger.terminate() == Position(1, 2)
        assert (await world.crash()).state is ManagedLedgerState.TERMINATED


async def test_a_terminated_stream_takes_cursors_and_acknowledgements() -> None:
    world = World()
    ledger = await world.open()
    await ledger.open_cursor("hold", EARLIEST)
    await publish(ledger, 3)
    await ledger.terminate()
    cursor = await ledger.open_cursor("s", EARLIEST)
    cursor.acknowledge(Position(1, 0))
    await ledger.set_properties({"k": "v"})
    ledger = await world.restart()
    assert ledger.cursors["s"].backlog == 2
    assert ledger.properties == {"k": "v"}


async def test_a_crash_at_each_step_of_terminating() -> None:
    said: list[Outcomes] = []

    async def prepare(_: World, ledger: ManagedLedger) -> None:
        said.append(Outcomes())
        await publish(ledger, 4, "old")
        said[-1].append_all(ledger, 20)

    async def check(_: World, ledger: ManagedLedger, finished: bool, step: int) -> None:
        found = data_of(await contents(ledger))[4:]
        stored = said[-1].stored
        assert found[: len(stored)] == stored, step
        if finished:
            assert ledger.state is ManagedLedgerState.TERMINATED
        if ledger.state is ManagedLedgerState.TERMINATED:
            assert found == stored == numbered(20), "nothing was acknowledged past the end"
            with pytest.raises(ManagedLedgerTerminated):
                ledger.append(b"late", lambda *_: None)
        else:
            await publish(ledger, 1)

    await crash_at_each_step(prepare, ManagedLedger.terminate, check)


# Trim


async def test_ledgers_that_all_cursors_passed_are_dropped() -> None:
    world = World()
    ledger = await world.open()
    slow = await ledger.open_cursor("slow", EARLIEST)
    fast = await ledger.open_cursor("fast", EARLIEST)
    positions = await publish(ledger, 35)
    fast.acknowledge_up_to(positions[29])
    await settle()
    assert len(ledger.ledgers) == 4
    slow.acknowledge_up_to(positions[18])
    await settle()
    assert sorted(world.ledgers.ledgers) == [2, 3, 4]
    slow.acknowledge(positions[19])
    await until(lambda: sorted(world.ledgers.ledgers) == [3, 4])
    assert ledger.entry_count == 15
    assert (slow.backlog, fast.backlog) == (15, 5)
    assert [entry.position for entry in await contents(ledger)] == positions[20:]
    ledger = await world.crash()
    assert [entry.position for entry in await contents(ledger)] == positions[20:]
    assert ledger.last_confirmed == positions[-1]
    assert ledger.cursors["fast"].first_unacknowledged(EARLIEST) >= positions[20]


async def test_the_last_individual_acknowledgement_drops_a_ledger_too() -> None:
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 15)
    for position in [*positions[:4], *positions[5:12]]:
        cursor.acknowledge(position)
    await settle()
    assert sorted(world.ledgers.ledgers) == [1, 2]
    cursor.acknowledge(positions[4])
    await until(lambda: sorted(world.ledgers.ledgers) == [2])


async def test_readers_hold_ledgers_until_they_are_closed() -> None:
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    ledger.open_reader_cursor("r", EARLIEST)
    positions = await publish(ledger, 15)
    cursor.acknowledge_up_to(positions[-1])
    await settle()
    assert sorted(world.ledgers.ledgers) == [1, 2]
    await ledger.delete_cursor("r")
    await until(lambda: sorted(world.ledgers.ledgers) == [2])


async def test_deleting_the_slow_cursor_drops_ledgers() -> None:
    world = World()
    ledger = await world.open()
    await ledger.open_cursor("slow", EARLIEST)
    fast = await ledger.open_cursor("fast", EARLIEST)
    positions = await publish(ledger, 15)
    fast.acknowledge_up_to(positions[-1])
    await ledger.delete_cursor("slow")
    await until(lambda: sorted(world.ledgers.ledgers) == [2])


async def test_of_a_terminated_stream_everything_goes_and_the_end_is_remembered() -> None:
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 15)
    await ledger.terminate()
    cursor.acknowledge_up_to(LATEST)
    await until(lambda: not world.ledgers.ledgers)
    for reopen in (world.crash, world.restart):
        ledger = await reopen()
        assert ledger.last_confirmed == positions[-1]
        assert ledger.cursors["s"].backlog == 0
        assert await contents(ledger) == []
        late = await ledger.open_cursor("late", EARLIEST)
        assert late.backlog == 0


async def test_an_entry_that_went_is_not_acknowledged_any_more() -> None:
    """Its acknowledgement may come late: from a client, or with a transaction that commits."""
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 15)
    await ledger.terminate()
    cursor.acknowledge_up_to(LATEST)
    await ledger.trim()
    await until(lambda: not world.ledgers.ledgers)
    ledger = await world.crash()
    cursor = ledger.cursors["s"]
    for position in positions:
        assert not cursor.acknowledge(position)
    assert cursor.backlog == 0
    await ledger.close()


async def test_a_stream_whose_ledgers_all_went_goes_on() -> None:
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    await publish(ledger, 5)
    cursor.acknowledge_up_to(LATEST)
    ledger = await world.restart()
    await until(lambda: not world.ledgers.ledgers)
    ledger = await world.crash()
    cursor = ledger.cursors["s"]
    assert cursor.backlog == 0
    assert ledger.last_confirmed == Position(-1, -1)
    late = await ledger.open_cursor("late", LATEST)
    (position,) = await publish(ledger, 1)
    assert position > Position(1, 4)
    assert (cursor.backlog, late.backlog) == (1, 1)
    assert cursor.first_unacknowledged(EARLIEST) == position
    assert cursor.acknowledge(position)
    assert ledger.read_cached(cursor.first_unacknowledged(EARLIEST), 10, 100) == []
    await ledger.close()


async def test_retention_keeps_consumed_ledgers_and_may_change() -> None:
    world = World()
    policy: list[Retention | None] = [Retention(-1, -1)]
    ledger = await world.factory.open(NAME, retention=lambda: policy[0])
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 25)
    cursor.acknowledge_up_to(positions[-1])
    await settle()
    assert len(ledger.ledgers) == 3
    policy[0] = Retention(-1, 20)
    await ledger.trim()
    assert len(ledger.ledgers) == 2
    policy[0] = None
    await ledger.trim()
    assert len(ledger.ledgers) == 1
    await ledger.close()


async def test_time_alone_drops_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "_LEAST_PAUSE_MS", 5)
    world = World(Limits(ledger_max_entries=5, ledger_min_age_ms=0, unsubscribed_retention_ms=20))
    ledger = await world.open()
    await publish(ledger, 12)
    await settle()
    assert len(ledger.ledgers) == 3
    world.clock.ms += 20
    await until(lambda: len(ledger.ledgers) == 1)
    assert len(await contents(ledger)) == 2


async def test_reading_goes_on_after_a_ledger_that_is_trimmed_meanwhile() -> None:
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 25)
    world.factory.cache.drop(1)
    gate = world.ledgers.gates["open"] = asyncio.Event()
    reading = asyncio.ensure_future(ledger.read(EARLIEST, max_entries=100, max_bytes=10**6))
    await settle()
    cursor.acknowledge_up_to(positions[12])
    await until(lambda: 1 not in world.ledgers.ledgers)
    gate.set()
    assert [entry.position for entry in await reading] == positions[10:]


async def test_failed_ledger_deletion_is_retried() -> None:
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 25)
    world.ledgers.fail("delete", LedgerError("no"))
    cursor.acknowledge_up_to(positions[9])
    await settle()
    assert sorted(world.ledgers.ledgers) == [1, 2, 3]
    cursor.acknowledge_up_to(positions[19])
    await until(lambda: sorted(world.ledgers.ledgers) == [3])


async def test_failed_ledger_deletion_is_retried_though_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "_LEAST_PAUSE_MS", 5)
    set_bound(monkeypatch, "_RETRY_MS", 5)
    world = World()
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 25)
    world.ledgers.fail("delete", *[LedgerError("no")] * 3)
    cursor.acknowledge_up_to(positions[19])
    await until(lambda: sorted(world.ledgers.ledgers) == [3])


async def test_a_crash_at_each_step_of_trimming() -> None:
    async def prepare(_: World, ledger: ManagedLedger) -> None:
        cursor = await ledger.open_cursor("s", EARLIEST)
        positions = await publish(ledger, 25)
        cursor._boundary = LATEST  # only `act` trims
        cursor.acknowledge_up_to(positions[21])
        await cursor.persist()

    async def check(world: World, ledger: ManagedLedger, finished: bool, step: int) -> None:
        assert data_of(await contents(ledger))[-5:] == numbered(25)[20:], step
        assert ledger.cursors["s"].backlog == 3
        await until(lambda: len(ledger.ledgers) == 1)
        await world.factory.close()
        world.factory = world.new_factory()
        orphans = await world.factory.sweep_orphans()
        assert sorted(world.ledgers.ledgers) == [3], step
        assert not (finished and orphans)
        assert len(await contents(await world.open())) == 5

    await crash_at_each_step(prepare, ManagedLedger.trim, check)


async def truncate(ledger: ManagedLedger) -> None:
    await ledger.end_ledger()
    await ledger.drop_up_to(LATEST)


async def test_a_truncation_ends_the_open_ledger_and_leaves_what_a_cursor_has_not_read() -> None:
    world = World()
    ledger = await world.factory.open(NAME, retention=lambda: Retention(-1, -1))
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 25)
    cursor.acknowledge_up_to(positions[21])
    await truncate(ledger)
    assert data_of(await contents(ledger)) == numbered(25)[20:]
    cursor.acknowledge_up_to(LATEST)
    await truncate(ledger)
    assert (ledger.entry_count, ledger.total_size_bytes, cursor.backlog) == (0, 0, 0)
    await until(lambda: not world.ledgers.ledgers)
    (position,) = await publish(ledger, 1)
    assert position > positions[-1]
    assert cursor.backlog == 1
    await ledger.close()


async def test_a_ledger_with_entries_behind_the_last_one_to_drop_stays_without_cursors() -> None:
    world = World()
    ledger = await world.factory.open(NAME, retention=lambda: Retention(-1, -1))
    positions = await publish(ledger, 25)
    await ledger.end_ledger()
    await ledger.drop_up_to(positions[21])
    assert data_of(await contents(ledger)) == numbered(25)[20:]


async def test_a_crash_at_each_step_of_a_truncation() -> None:
    async def prepare(_: World, ledger: ManagedLedger) -> None:
        ledger.use_retention(lambda: Retention(-1, -1))
        cursor = await ledger.open_cursor("s", EARLIEST)
        await publish(ledger, 25)
        cursor.acknowledge_up_to(LATEST)
        await cursor.persist()

    async def check(world: World, ledger: ManagedLedger, finished: bool, step: int) -> None:
        assert ledger.cursors["s"].backlog == 0, step
        assert not (finished and ledger.entry_count)
        (position,) = await publish(ledger, 1)
        assert position.ledger_id > 3, step
        assert ledger.cursors["s"].backlog == 1, step
        await world.factory.close()

    await crash_at_each_step(prepare, truncate, check)


# Properties


async def test_properties_last_and_a_failed_change_is_none() -> None:
    world = World()
    ledger = await world.open()
    await ledger.set_properties({"a": "1", "b": "2"})
    await publish(ledger, 12)
    await ledger.set_properties({"a": None, "c": "3"})
    world.metadata.faults.append((NAME, False))
    with pytest.raises(MetadataError):
        await ledger.set_properties({"x": "lost"})
    assert ledger.properties == {"b": "2", "c": "3"}
    assert (await world.crash()).properties == {"b": "2", "c": "3"}


async def test_changes_of_the_record_during_a_roll_over_do_not_collide() -> None:
    world = World()
    ledger = await world.open()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 35)
    for number in range(10):
        await ledger.set_properties({"n": str(number)})
        await ledger.open_cursor(f"c{number}", EARLIEST)
    await outcomes.wait(35)
    ledger = await world.crash()
    assert ledger.properties == {"n": "9"}
    assert len(ledger.cursors) == 10
    assert data_of(await contents(ledger)) == numbered(35)
