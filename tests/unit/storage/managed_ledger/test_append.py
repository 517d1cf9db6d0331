"""Appending, reading back, rolling over, and every way a write can fail."""

import asyncio
from collections import Counter
from functools import partial

import pytest

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.ledger.store import (
    Copies,
    DiskFull,
    EntryTooLarge,
    LedgerAssertion,
    LedgerBusy,
    LedgerError,
    LedgerFenced,
)
from storage.managed_ledger.types import (
    AppendOutcomeUnknown,
    Limits,
    ManagedLedgerBusy,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
    ManagedLedgerState,
)
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.waiting import count_turns, until
from tests.unit.storage.managed_ledger.fakes import (
    SMALL,
    AppendFault,
    Outcomes,
    World,
    contents,
    data_of,
    publish,
    publish_each,
    settle,
)


async def test_entries_come_back_in_order_also_after_a_restart_and_a_crash() -> None:
    world = World()
    ledger = await world.open()
    positions = await publish(ledger, 25)
    expected = [f"e{number}".encode() for number in range(25)]
    assert positions == sorted(positions)
    assert data_of(await contents(ledger)) == expected
    assert ledger.last_confirmed == positions[-1]
    for reopen in (world.restart, world.crash):
        ledger = await reopen()
        assert [entry.position for entry in await contents(ledger)] == positions
        assert data_of(await contents(ledger)) == expected
        assert ledger.last_confirmed == positions[-1]
        assert ledger.entry_count == 25
        assert ledger.total_size_bytes == sum(len(data) for data in expected)


async def test_an_idle_stream_has_no_ledger() -> None:
    world = World()
    ledger = await world.open()
    assert ledger.last_confirmed == Position(-1, -1)
    assert world.ledgers.ledgers == {}
    ledger = await world.crash()
    assert await contents(ledger) == []
    assert world.ledgers.ledgers == {}


async def test_callbacks_in_order_then_listeners_once_for_each_group() -> None:
    world = World(Limits())
    ledger = await world.open()
    seen: list[str] = []
    remove = ledger.on_append(lambda: seen.append(f"group at {ledger.last_confirmed.entry_id}"))
    for number in range(3):
        ledger.append(b"x", lambda position, _: seen.append(f"done {position and position[1]}"))
        assert number == 0 or not seen
    await until(lambda: len(seen) == 4)
    assert seen == ["done 0", "done 1", "done 2", "group at 2"]
    remove()
    await publish(ledger, 1)
    assert len(seen) == 4


async def test_many_listeners_are_called_in_slices_and_a_second_group_starves_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "LISTENERS_CALLED_AT_ONCE", 2)
    ledger = await World(Limits()).open()
    await publish(ledger, 1)
    calls: list[tuple[int, int]] = []
    turn = count_turns()
    confirmed: list[int] = []

    def listener(number: int) -> None:
        calls.append((turn(), number))
        if calls == [calls[0]]:
            ledger.append(b"second", lambda _, __: confirmed.append(len(calls)))

    removals = [ledger.on_append(partial(listener, number)) for number in range(40)]
    ledger.append(b"first", lambda _, __: removals[38]())
    await until(lambda: confirmed and len(calls) >= 39 + confirmed[0])
    await settle()
    assert 2 <= confirmed[0] < 38, "the second group came while listeners were called"
    assert [number for _, number in calls] == [*range(38), 39, *range(confirmed[0])]
    assert max(Counter(at for at, _ in calls).values()) == 2


async def test_few_listeners_are_called_in_the_turn_of_the_publish_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "LISTENERS_CALLED_AT_ONCE", 2)
    ledger = await World(Limits()).open()
    called: list[int] = []
    for number in range(2):
        ledger.on_append(partial(called.append, number))
    at_callback: list[int] = []

    def done(_: Position | None, __: object) -> None:
        asyncio.get_running_loop().call_soon(lambda: at_callback.extend(called))

    ledger.append(b"x", done)
    await until(lambda: bool(at_callback))
    assert at_callback == [0, 1]


async def test_a_callback_that_raises_keeps_nobody_from_theirs() -> None:
    world = World()
    ledger = await world.open()
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )
    seen: list[int] = []
    groups: list[str] = []

    def bad_listener() -> None:
        raise ValueError("listener")

    ledger.on_append(bad_listener)
    ledger.on_append(lambda: groups.append("second"))
    for number in range(3):

        def done(_: Position | None, __: object, number: int = number) -> None:
            if number == 1:
                raise ValueError("callback")
            seen.append(number)

        ledger.append(b"x", done)
    await until(lambda: groups == ["second"])
    assert seen == [0, 2]
    assert [str(failure) for failure in failures] == ["callback", "listener"]


async def test_rolls_over_by_entries_with_appends_in_flight() -> None:
    world = World()
    ledger = await world.open()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 35)
    assert ledger.state is ManagedLedgerState.ROLLING
    await outcomes.wait(35)
    assert outcomes.stored == [f"e{number}".encode() for number in range(35)]
    assert [position.entry_id for position in outcomes.positions] == [
        *range(10),
        *range(10),
        *range(10),
        *range(5),
    ]
    assert len(ledger.ledgers) == 4


async def test_rolls_over_by_size() -> None:
    world = World(Limits(ledger_max_size_bytes=30, ledger_min_age_ms=0))
    ledger = await world.open()
    for _ in range(4):
        await publish(ledger, 1, "x" * 10)
    assert [info.entry_id for info in [ledger.last_confirmed]] == [0]
    assert len(ledger.ledgers) == 2


async def test_a_young_ledger_is_not_rolled_over_until_it_is_old_enough() -> None:
    world = World(Limits(ledger_max_entries=5, ledger_min_age_ms=30))
    ledger = await world.open()
    first = await publish(ledger, 12)
    assert {position.ledger_id for position in first} == {1}
    await until(lambda: ledger.state is ManagedLedgerState.ROLLING, poll_s=0)
    await until(lambda: ledger.state is ManagedLedgerState.OPEN)
    assert (await publish(ledger, 1))[0].ledger_id == 2


async def test_an_old_ledger_ends_and_the_next_one_waits_for_an_entry() -> None:
    world = World(Limits(ledger_max_age_ms=20))
    ledger = await world.open()
    await publish(ledger, 1)
    await until(lambda: world.ledgers.ledgers[1].closed)  # type: ignore[index]
    await settle()
    assert list(world.ledgers.ledgers) == [1]
    assert (await publish(ledger, 1))[0] == Position(2, 0)


async def test_held_back_appends_are_bounded() -> None:
    world = World(Limits(roll_over_buffer_entries=3))
    ledger = await world.open()
    gate = world.ledgers.gates["create"] = asyncio.Event()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 3)
    with pytest.raises(ManagedLedgerBusy):
        outcomes.append(ledger, b"one too many")
    gate.set()
    await outcomes.wait(3)
    assert outcomes.stored == [b"e0", b"e1", b"e2"]
    await publish(ledger, 1)


async def test_an_entry_that_the_store_does_not_take_is_refused_alone() -> None:
    """It says nothing about the ledger, which is not ended, recovered and made anew for it."""
    world = World()
    world.ledgers.most_bytes = 10
    ledger = await world.open()
    outcomes = Outcomes()
    with pytest.raises(EntryTooLarge):
        outcomes.append(ledger, bytes(11))
    await settle()
    assert not world.ledgers.ledgers
    outcomes.append(ledger, b"a")
    with pytest.raises(EntryTooLarge):
        outcomes.append(ledger, bytes(11))
    await outcomes.wait(1)
    outcomes.append(ledger, b"b")
    with pytest.raises(EntryTooLarge):
        outcomes.append(ledger, bytes(11))
    outcomes.append(ledger, bytes(10))
    await outcomes.wait(3)
    assert outcomes.positions == [Position(1, 0), Position(1, 1), Position(1, 2)]
    assert (ledger.state, list(world.ledgers.ledgers)) == (ManagedLedgerState.OPEN, [1])


async def test_appends_to_a_busy_ledger_are_refused_and_it_goes_on() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1)
    world.ledgers.room, world.ledgers.hold = 2, True
    outcomes = Outcomes()
    outcomes.append_all(ledger, 2)
    with pytest.raises(LedgerBusy):
        outcomes.append(ledger, b"one too many")
    world.ledgers.release(1)
    outcomes.append(ledger, b"next")
    world.ledgers.release()
    await outcomes.wait(3)
    assert outcomes.stored == [b"e0", b"e1", b"next"]
    assert (ledger.state, list(world.ledgers.ledgers)) == (ManagedLedgerState.OPEN, [1])


@pytest.mark.parametrize("fails", [False, True])
async def test_buffered_appends_wait_for_a_busy_ledger(fails: bool) -> None:
    world = World()
    world.ledgers.room = 3
    if fails:
        world.ledgers.fault = AppendFault(4, LedgerError("broken"), stored=1)
    ledger = await world.open()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 8)
    await outcomes.wait(1)
    outcomes.append(ledger, b"last")
    await outcomes.wait(9)
    assert outcomes.stored == [*(b"e%d" % number for number in range(8)), b"last"]
    assert data_of(await contents(ledger)) == outcomes.stored
    assert ledger.state is ManagedLedgerState.OPEN
    assert len(world.ledgers.ledgers) == (2 if fails else 1)


async def test_a_stream_ends_behind_what_waits_for_a_busy_ledger() -> None:
    world = World()
    world.ledgers.room = 3
    ledger = await world.open()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 8)
    assert await ledger.terminate() == Position(1, 7)
    assert outcomes.stored == [b"e%d" % number for number in range(8)]


@pytest.mark.parametrize("on_disk", [0, 1, 3, 6])
async def test_recovery_decides_about_appends_after_a_failed_write(on_disk: int) -> None:
    world = World(Limits(ledger_min_age_ms=0))
    ledger = await world.open()
    await publish(ledger, 2, "old")
    groups: list[Position] = []
    ledger.on_append(lambda: groups.append(ledger.last_confirmed))
    world.ledgers.fault = AppendFault(world.ledgers.appends + 2, LedgerError("broken"), on_disk)
    outcomes = Outcomes()
    outcomes.append_all(ledger, 8)
    await outcomes.wait(8)
    assert outcomes.stored == [f"e{number}".encode() for number in range(8)]
    in_first = [position for position in outcomes.positions if position.ledger_id == 1]
    assert len(in_first) == 2 + on_disk
    assert world.ledgers.next_id == (3 if on_disk < 6 else 2), "one more if it has entries"
    assert outcomes.positions == sorted(outcomes.positions)
    expected = [b"old0", b"old1", *outcomes.stored]
    assert data_of(await contents(ledger)) == expected
    assert data_of(await contents(await world.crash())) == expected


async def test_appends_during_recovery_stay_behind_the_failed_ones() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1, "old")
    gate = world.ledgers.gates["open"] = asyncio.Event()
    world.ledgers.fault = AppendFault(world.ledgers.appends, LedgerError("broken"))
    outcomes = Outcomes()
    outcomes.append_all(ledger, 2)
    await settle()
    outcomes.append(ledger, b"later")
    await settle()
    assert outcomes.said == []
    gate.set()
    await outcomes.wait(3)
    assert outcomes.stored == [b"e0", b"e1", b"later"]


async def test_a_full_disk_reaches_the_callers_and_space_makes_it_work_again() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1, "old")
    world.ledgers.fault = AppendFault(world.ledgers.appends + 1, DiskFull("full"), stored=1)
    outcomes = Outcomes()
    outcomes.append_all(ledger, 4)
    await outcomes.wait(4)
    assert outcomes.stored == [b"e0", b"e1"]
    assert [type(error) for error in outcomes.errors] == [DiskFull, DiskFull]
    world.ledgers.fail("create", DiskFull("full"))
    outcomes.append(ledger, b"no")
    await outcomes.wait(5)
    assert isinstance(outcomes.errors[-1], DiskFull)
    assert ledger.state is ManagedLedgerState.OPEN
    outcomes.append(ledger, b"yes")
    await outcomes.wait(6)
    assert data_of(await contents(ledger)) == [b"old0", b"e0", b"e1", b"yes"]
    assert data_of(await contents(await world.crash())) == [b"old0", b"e0", b"e1", b"yes"]


async def test_an_empty_ledger_stays_until_the_list_is_without_it() -> None:
    world = World()
    ledger = await world.open()
    world.ledgers.fault = AppendFault(0, DiskFull("full"))
    outcomes = Outcomes()
    outcomes.append(ledger, b"no")
    await outcomes.wait(1)
    await settle()
    assert list(world.ledgers.ledgers) == [1]
    ledger = await world.crash()
    assert await contents(ledger) == []
    assert world.ledgers.ledgers == {}


async def test_a_ledger_that_stores_nothing_is_tried_a_few_times_only() -> None:
    world = World()
    ledger = await world.open()

    class Broken(LedgerError):
        pass

    class Always:
        """A fault that is there whatever the number of the append."""

        at = property(lambda _: world.ledgers.appends)
        error = Broken("always")
        stored = 0

    broken = True
    original = world.ledgers.create

    async def create(*, custom: dict[str, bytes], copies: Copies | None = None) -> object:
        if broken:
            world.ledgers.fault = Always()  # type: ignore[assignment]
        return await original(custom=custom, copies=copies)

    world.ledgers.create = create  # type: ignore[method-assign, assignment]
    outcomes = Outcomes()
    outcomes.append_all(ledger, 2)
    await outcomes.wait(2)
    assert [type(error) for error in outcomes.errors] == [Broken, Broken]
    assert world.ledgers.next_id == 4
    broken = False
    world.ledgers.fault = None
    await publish(ledger, 1)
    await settle()
    assert len(world.ledgers.ledgers) == 1, "empty ledgers are deleted"


async def test_without_recovery_the_outcome_is_unknown_and_later_settled() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1, "old")
    world.ledgers.fault = AppendFault(world.ledgers.appends, LedgerError("broken"), stored=1)
    world.ledgers.fail("open", MetadataError("down"), MetadataError("down"))
    outcomes = Outcomes()
    outcomes.append_all(ledger, 2)
    await outcomes.wait(2)
    assert [type(error) for error in outcomes.errors] == [AppendOutcomeUnknown] * 2
    outcomes.append(ledger, b"still down")
    await outcomes.wait(3)
    assert isinstance(outcomes.errors[-1], MetadataError)
    assert data_of(await contents(ledger)) == [b"old0"]
    outcomes.append(ledger, b"up")
    await outcomes.wait(4)
    expected = [b"old0", b"e0", b"up"]
    assert data_of(await contents(ledger)) == expected
    assert ledger.entry_count == 3
    assert ledger.total_size_bytes == sum(len(data) for data in expected)
    assert data_of(await contents(await world.restart())) == expected


async def test_a_list_whose_write_had_an_unknown_outcome_is_written_again() -> None:
    for applied in (False, True):
        world = World()
        ledger = await world.open()
        world.metadata.faults.append((ledger.name, applied))
        outcomes = Outcomes()
        outcomes.append(ledger, b"no")
        await outcomes.wait(1)
        assert isinstance(outcomes.errors[0], MetadataError)
        assert [position.ledger_id for position in await publish(ledger, 1, "yes")] == [1]
        assert data_of(await contents(await world.crash())) == [b"yes0"]
        assert list(world.ledgers.ledgers) == [1]


async def test_closing_after_an_unknown_list_write_leaves_a_stream_that_opens() -> None:
    for applied in (False, True):
        world = World()
        ledger = await world.open()
        world.metadata.faults.append((ledger.name, applied))
        outcomes = Outcomes()
        outcomes.append(ledger, b"no")
        await outcomes.wait(1)
        ledger = await world.restart()
        assert await contents(ledger) == []
        assert world.ledgers.ledgers == {}


async def test_the_newest_owner_wins_and_the_other_stops_for_good() -> None:
    world = World()
    first = await world.open()
    await publish(first, 3)
    told: list[object] = []
    first.on_stop(told.append)
    second = await world.new_factory().open(first.name)
    outcomes = Outcomes()
    outcomes.append(first, b"lost")
    await outcomes.wait(1)
    assert isinstance(outcomes.errors[0], ManagedLedgerFenced)
    assert first.state is ManagedLedgerState.FENCED
    assert [type(error) for error in told] == [ManagedLedgerFenced]
    with pytest.raises(ManagedLedgerFenced):
        first.append(b"x", lambda *_: None)
    with pytest.raises(ManagedLedgerFenced):
        await first.read(EARLIEST, max_entries=1, max_bytes=1)
    await publish(second, 1, "second")
    assert data_of(await contents(second)) == [b"e0", b"e1", b"e2", b"second0"]
    await first.close()
    assert data_of(await contents(await world.crash())) == [b"e0", b"e1", b"e2", b"second0"]


async def test_a_conflict_on_the_list_fences_before_anything_is_confirmed() -> None:
    world = World()
    first, second = (
        await world.open(),
        await world.new_factory().open("public/default/persistent/t"),
    )
    await publish(second, 1)
    outcomes = Outcomes()
    outcomes.append(first, b"lost")
    await outcomes.wait(1)
    assert isinstance(outcomes.errors[0], ManagedLedgerFenced)
    assert first.state is ManagedLedgerState.FENCED
    await settle()
    assert list(world.ledgers.ledgers) == [1], "the loser's ledger is deleted"


async def test_a_claiming_open_shuts_out_an_idle_owner() -> None:
    world = World(Limits(claim_on_open=True))
    first = await world.open()
    cursor = await first.open_cursor("s", EARLIEST)
    await publish(first, 1)
    await first.close()
    first = await world.new_factory().open(first.name)
    cursor = first.cursors["s"]
    await world.new_factory().open(first.name)
    cursor.acknowledge(Position(1, 0))
    with pytest.raises(ManagedLedgerFenced):
        await cursor.persist()
    assert first.state is ManagedLedgerState.FENCED


async def test_data_that_recovery_does_not_find_stops_the_stream() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 3)
    world.ledgers.fault = AppendFault(world.ledgers.appends, LedgerError("broken"))
    world.ledgers.hold = True
    outcomes = Outcomes()
    outcomes.append(ledger, b"x")
    world.ledgers.ledgers[1].entries.pop()  # type: ignore[index]
    world.ledgers.hold = False
    world.ledgers.release()
    await outcomes.wait(1)
    assert ledger.state is ManagedLedgerState.FENCED
    assert isinstance(outcomes.errors[0].__cause__, LedgerAssertion)


async def test_close_finishes_what_was_taken_and_refuses_the_rest() -> None:
    world = World()
    ledger = await world.open()
    outcomes = Outcomes()
    outcomes.append_all(ledger, 15)
    closing = asyncio.ensure_future(ledger.close())
    await asyncio.sleep(0)
    with pytest.raises(ManagedLedgerClosed):
        ledger.append(b"late", lambda *_: None)
    await closing
    assert len(outcomes.stored) == 15
    assert ledger.state is ManagedLedgerState.CLOSED
    assert all(stored.closed for stored in world.ledgers.ledgers.values())
    assert world.factory.cache.size_bytes == 0
    puts = len(world.metadata.puts)
    assert len(await contents(await world.restart())) == 15
    assert len(world.metadata.puts) == puts, "opening after a clean close writes nothing"


async def test_a_crash_at_each_step_of_rolling_over_loses_nothing() -> None:
    for step in range(40):
        world = World()
        ledger = await world.open()
        outcomes = Outcomes()
        outcomes.append_all(ledger, 24)
        for _ in range(step):
            await asyncio.sleep(0)
        acknowledged = list(outcomes.stored)
        found = data_of(await contents(await world.crash()))
        assert found[: len(acknowledged)] == acknowledged, step
        assert found == [f"e{number}".encode() for number in range(len(found))], step
    assert len(acknowledged) == 24, "the last step is past the end"


async def test_reads_start_anywhere_and_stop_at_their_limits() -> None:
    world = World()
    ledger = await world.open()
    positions = await publish(ledger, 25)

    async def read(
        start: Position,
        *,
        max_entries: int = 100,
        max_bytes: int = 10**6,
        up_to: Position | None = None,
    ) -> list[Position]:
        found = await ledger.read(start, max_entries=max_entries, max_bytes=max_bytes, up_to=up_to)
        return [entry.position for entry in found]

    assert await read(EARLIEST) == positions
    assert await read(LATEST) == []
    assert await read(Position(3, 5)) == []
    assert await read(Position(1, 99)) == positions[10:]
    assert await read(Position(2, -1)) == positions[10:]
    assert await read(positions[3], up_to=positions[12]) == positions[3:13]
    assert await read(EARLIEST, max_bytes=6) == positions[:3]
    assert await read(EARLIEST, max_bytes=0) == positions[:1]
    assert await read(positions[8], max_bytes=4) == positions[8:10]
    assert await read(EARLIEST, max_entries=0) == []


async def test_positions_and_counts_over_ledgers() -> None:
    world = World()
    ledger = await world.open()
    positions = await publish(ledger, 25)
    assert ledger.next_position(EARLIEST) == positions[0]
    assert ledger.next_position(positions[9]) == positions[10]
    assert ledger.next_position(positions[-1]) == Position(3, 5)
    assert ledger.previous_position(positions[10]) == positions[9]
    assert ledger.previous_position(positions[0]) == Position(1, -1)
    assert [info.entries for info in ledger.ledgers] == [10, 10, 5]


async def test_find_first() -> None:
    world = World()
    ledger = await world.open()
    assert await ledger.find_first(lambda _: True) is None
    positions = await publish(ledger, 25)
    for wanted in (0, 1, 9, 10, 24):
        found = await ledger.find_first(lambda e, w=wanted: int(e.data[1:]) >= w)  # type: ignore[misc]
        assert found == positions[wanted]
    assert await ledger.find_first(lambda _: False) is None


async def test_tailing_readers_never_touch_the_disk() -> None:
    world = World()
    ledger = await world.open()
    position = EARLIEST
    for _ in range(30):
        (at,) = await publish_each(ledger, 1)
        for _ in range(2):
            found = ledger.read_cached(position, 10, 1000)
            assert found is not None
            assert [entry.position for entry in found] == [at]
        position = ledger.next_position(at)
        assert ledger.read_cached(position, 10, 1000) == []
    assert world.ledgers.reads == 0
    ledger = await world.restart()
    assert ledger.read_cached(EARLIEST, 10, 1000) is None


async def test_a_limit_smaller_than_one_entry_still_rolls_over() -> None:
    world = World(Limits(ledger_max_entries=1, ledger_min_age_ms=0))
    ledger = await world.open()
    positions = await publish(ledger, 4)
    assert [position.entry_id for position in positions] == [0, 0, 0, 0]
    assert SMALL.ledger_max_entries == 10


async def test_a_fenced_write_confirms_nothing_more() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1)
    world.ledgers.fault = AppendFault(world.ledgers.appends + 1, LedgerFenced("taken"), stored=5)
    outcomes = Outcomes()
    outcomes.append_all(ledger, 3)
    await outcomes.wait(3)
    assert [type(error) for error in outcomes.errors][-2:] == [ManagedLedgerFenced] * 2
    assert data_of(await contents(await world.crash()))[: 1 + len(outcomes.stored)] == [
        b"e0",
        *outcomes.stored,
    ]
