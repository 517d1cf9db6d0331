"""What ranges of a stream add up to, against its entries read one by one."""

import asyncio
import gc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.ledger.store import LedgerError
from storage.managed_ledger import entry_index
from storage.managed_ledger.entry_index import EntryFacts, Sums, facts_of, index_key
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.stream_ranges import after
from storage.managed_ledger.types import Limits, ManagedLedgerClosed, Retention
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.waiting import count_turns, until
from tests.unit.storage.managed_ledger.fakes import NAME, SMALL, Outcomes, World, publish, settle
from tests.unit.storage.managed_ledger.test_entry_index import FACTS, entry_of, sums_of

NO_CACHE = Limits(
    ledger_max_entries=30, ledger_min_age_ms=0, cursor_flush_ms=1, entry_cache_bytes=0
)
ALL = 10**9
COUNTED = list[tuple[Position, EntryFacts]]


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ENTRY_INDEX_BLOCKS", 4)


async def append(ledger: ManagedLedger, shapes: Sequence[EntryFacts]) -> None:
    outcomes = Outcomes()
    for shape in shapes:
        outcomes.append(ledger, entry_of(shape))
    await outcomes.wait(len(shapes))


async def counted(ledger: ManagedLedger) -> COUNTED:
    entries = await ledger.read(EARLIEST, max_entries=ALL, max_bytes=ALL)
    return [(entry.position, facts_of(entry.data)) for entry in entries]


def within(entries: COUNTED, first: Position, end: Position) -> COUNTED:
    return [(position, fact) for position, fact in entries if first <= position < end]


def places(entries: COUNTED) -> st.SearchStrategy[Position]:
    """Any place of the stream, such as exist and such as do not."""
    some = [EARLIEST, *(position for position, _ in entries)]
    some += [after(position) for position, _ in entries]
    some += [Position(position.ledger_id, position.entry_id + 7) for position, _ in entries]
    return st.sampled_from(some)


def most_that_fits(entries: COUNTED, messages: int, size_bytes: int) -> COUNTED:
    for count in range(len(entries), 1, -1):
        sums = sums_of([fact for _, fact in entries[:count]])
        if sums.messages <= messages and sums.size_bytes <= size_bytes:
            return entries[:count]
    return entries[:1]


async def check(ledger: ManagedLedger, entries: COUNTED, data: st.DataObject) -> None:
    """Some questions, against brute force."""
    ranges = ledger.ranges
    for _ in range(6):
        first, end = data.draw(places(entries)), data.draw(places(entries))
        expected = within(entries, first, end)
        assert await ranges.sums(first, end) == sums_of([fact for _, fact in expected])
        messages = data.draw(st.integers(0, 100))
        size_bytes = data.draw(st.integers(0, 5000))
        fitting = most_that_fits(expected, messages, size_bytes)
        stop = after(fitting[-1][0]) if fitting else first
        found = await ranges.fitting(first, end, messages, size_bytes)
        assert found == (stop, sums_of([fact for _, fact in fitting]))
        since_ms = data.draw(st.integers(1, 10))
        late = [each for each, fact in expected if fact.publish_time_ms >= since_ms]
        assert await ranges.first_published(first, end, since_ms) == (late[0] if late else None)


@pytest.mark.parametrize("ends", ["live", "restart", "crash"])
@settings(max_examples=25, deadline=None)
@given(before=FACTS, behind=FACTS, data=st.data())
def test_ranges_are_as_their_entries(
    ends: str, before: list[EntryFacts], behind: list[EntryFacts], data: st.DataObject
) -> None:
    """Over ledgers that are written, were closed, or were recovered and are read for it."""

    async def run() -> None:
        world = World(NO_CACHE)
        ledger = await world.open()
        await append(ledger, before)
        await check(ledger, await counted(ledger), data)
        if ends == "restart":
            ledger = await world.restart()
        elif ends == "crash":
            ledger = await world.crash()
        await append(ledger, behind)
        await check(ledger, await counted(ledger), data)

    asyncio.run(run())


async def test_indexes_that_were_stored_are_not_made_again() -> None:
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(2, 10, 5)] * 65)
    expected = await ledger.ranges.sums(EARLIEST, LATEST)
    assert (expected.entries, expected.messages) == (65, 130)
    ledger = await world.restart()
    world.ledgers.reads = 0
    assert await ledger.ranges.sums(EARLIEST, LATEST) == expected
    assert world.ledgers.reads == 0


async def test_an_index_is_made_once_for_all_who_ask_and_kept() -> None:
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(2, 10, 5)] * 25)
    ledger = await world.crash()
    world.ledgers.reads = 0
    both = await asyncio.gather(*(ledger.ranges.sums(EARLIEST, LATEST) for _ in range(5)))
    assert {sums.messages for sums in both} == {50}
    assert world.ledgers.reads == 1
    ledger = await world.restart()
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).messages == 50
    assert world.ledgers.reads == 1


async def test_indexes_are_read_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ENTRY_INDEX_READ_ENTRIES", 4)
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(1, 10, 5)] * 25)
    ledger = await world.crash()
    world.ledgers.reads = 0
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).entries == 25
    assert world.ledgers.reads == 7


async def test_others_go_on_while_an_index_is_made_of_cached_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ENTRY_INDEX_READ_ENTRIES", 4)
    ledger = await World(Limits(ledger_min_age_ms=0, cursor_flush_ms=1)).open()
    await append(ledger, [EntryFacts(1, 10, 5)] * 100)
    turns = count_turns()
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).entries == 100
    assert turns() >= 25


@pytest.mark.parametrize("damage", ["missing", "garbage", "short"])
async def test_a_record_that_does_not_say_all_is_made_anew(damage: str) -> None:
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(1, 10, 5)] * 20)
    await ledger.ranges.sums(EARLIEST, LATEST)
    ledger = await world.restart()
    key = index_key(ledger.ledgers[0].ledger_id)
    record = await world.metadata.get(key)
    assert record is not None
    if damage == "missing":
        await world.metadata.delete(key)
    else:
        short = entry_index.LedgerIndex()
        short.add([entry_of(EntryFacts(1, 10, 5))] * 19)
        await world.metadata.put(key, b"?" if damage == "garbage" else short.encode())
    ledger = await world.restart()
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).entries == 20
    await settle()
    assert (await world.metadata.get(key) or record).value == record.value


async def test_index_is_made_only_when_a_range_is_asked_for() -> None:
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(1, 10, 5)] * 25)
    ledger = await world.restart()
    key = index_key(ledger.ledgers[0].ledger_id)
    assert await world.metadata.get(key) is None
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).entries == 25
    await settle()
    assert await world.metadata.get(key) is not None


async def test_an_index_that_cannot_be_stored_fails_nothing() -> None:
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(1, 10, 5)])
    await ledger.ranges.sums(EARLIEST, LATEST)
    world.metadata.faults.extend([(entry_index.ROOT, False)] * 2)
    await append(ledger, [EntryFacts(1, 10, 5)] * 64)
    ledger = await world.restart()
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).entries == 65


async def test_closing_a_stream_fails_calls_that_wait_for_its_index() -> None:
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(1, 10, 5)] * 25)
    ledger = await world.crash()
    world.ledgers.gates["open"] = asyncio.Event()
    asking = asyncio.create_task(ledger.ranges.sums(EARLIEST, LATEST))
    await settle()
    assert not asking.done()
    await world.factory.unload(NAME)
    with pytest.raises(ManagedLedgerClosed):
        await asking


async def test_failed_read_for_an_index_is_raised_and_retried() -> None:
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(1, 10, 5)] * 25)
    ledger = await world.crash()
    world.ledgers.fail("read", LedgerError("the test says no: try again."))
    with pytest.raises(LedgerError):
        await ledger.ranges.sums(EARLIEST, LATEST)
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).entries == 25


# Trimming


def keep_all() -> Retention:
    return Retention(-1, -1)


async def trimmed(world: World, entries: int, mark: int) -> tuple[ManagedLedger, list[Position]]:
    """A stream from which what is acknowledged was trimmed."""
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 1)
    await ledger.ranges.sums(EARLIEST, LATEST)  # somebody asks, so it is counted
    positions += await publish(ledger, entries - 1)
    cursor.acknowledge_up_to(positions[mark])
    ledger.use_retention(lambda: Retention(0, 0))
    whole = (mark + 1) // 10 * 10
    await until(lambda: not whole or ledger.ranges.first_retained > positions[whole - 1])
    return ledger, positions


@pytest.mark.parametrize("again", [False, True])
async def test_only_trimmed_entries_are_lost(again: bool) -> None:
    world = World(SMALL)
    ledger, positions = await trimmed(world, 35, 19)
    assert ledger.ranges.first_retained == positions[20]
    if again:
        ledger = await world.restart()
    assert [ledger.has_lost(position) for position in positions] == [True] * 20 + [False] * 15
    assert ledger.has_lost(EARLIEST)
    end_of_trimmed = after(positions[19])
    assert end_of_trimmed.ledger_id < positions[20].ledger_id
    assert not ledger.has_lost(end_of_trimmed)
    assert not ledger.has_lost(LATEST)
    assert (await ledger.ranges.sums(EARLIEST, LATEST)).entries == 15


async def test_the_end_stays_when_all_is_trimmed() -> None:
    world = World(SMALL)
    ledger, positions = await trimmed(world, 30, 29)
    await until(lambda: not ledger.ledgers)
    ledger = await world.restart()
    end = after(positions[-1])
    assert (ledger.ranges.end, ledger.has_lost(end)) == (end, False)
    assert ledger.has_lost(positions[-1])


async def test_without_a_note_a_place_in_a_ledger_that_is_gone_is_lost() -> None:
    """As in streams of Apache Pulsar."""
    world = World(SMALL)
    ledger, positions = await trimmed(world, 35, 19)
    await ledger.set_properties({"magnetar.trimmed": None})
    assert ledger.has_lost(after(positions[19]))
    assert not ledger.has_lost(positions[20])
    assert not ledger.has_lost(EARLIEST)
    await ledger.set_properties({"magnetar.trimmed": "nonsense"})
    assert ledger.has_lost(positions[19])


async def test_nothing_is_lost_where_nothing_was_trimmed() -> None:
    world = World(SMALL)
    ledger = await world.open()
    assert not ledger.has_lost(EARLIEST)
    positions = await publish(ledger, 3)
    assert not ledger.has_lost(positions[0])
    assert not ledger.has_lost(EARLIEST)


async def test_the_index_goes_with_its_ledger() -> None:
    world = World(SMALL)
    _, positions = await trimmed(world, 35, 19)
    kept = {position.ledger_id for position in positions[20:30]}

    async def stored() -> set[int]:
        ids = {position.ledger_id for position in positions}
        return {each for each in ids if await world.metadata.get(index_key(each)) is not None}

    await settle()
    assert await stored() == kept
    await world.factory.delete(NAME)
    assert await stored() == set()


async def test_an_index_that_cannot_be_deleted_is_deleted_later() -> None:
    world = World(SMALL)
    ledger, positions = await trimmed(world, 35, 5)
    key = index_key(positions[0].ledger_id)
    assert await world.metadata.get(key) is not None

    async def refuse(*_: object, **__: object) -> bool:
        raise MetadataError("the test says no: try again.")

    metadata = world.metadata
    real, metadata.delete = metadata.delete, refuse  # type: ignore[method-assign]
    ledger.cursors["s"].acknowledge_up_to(positions[9])
    await until(lambda: ledger.ranges.first_retained == positions[10])
    await settle()
    assert await metadata.get(key) is not None
    metadata.delete = real  # type: ignore[method-assign]
    await ledger.trim()
    assert await metadata.get(key) is None


async def test_entries_that_recovery_found_are_counted() -> None:
    """Their callers were told that it is not known; nobody handed them to the index."""
    world = World(NO_CACHE)
    ledger = await world.open()
    await append(ledger, [EntryFacts(1, 10, 5)] * 5)
    ledger = await world.crash()
    await append(ledger, [EntryFacts(1, 10, 6)] * 5)
    sums = await ledger.ranges.sums(EARLIEST, LATEST)
    assert sums == Sums(10, 10, sums.size_bytes, 5, 6)


async def test_indexes_that_close_at_once_leave_no_work_behind_that_had_not_begun(
    recwarn: pytest.WarningsRecorder,
) -> None:
    ledger = await World(NO_CACHE).open()
    ahead = ledger.ranges.look_ahead(EARLIEST)
    await ledger.ranges._index.close()  # noqa: SLF001 - a ledger that closes waits before
    assert ahead.cancelled()
    del ahead
    gc.collect()
    assert not [str(each.message) for each in recwarn if each.category is RuntimeWarning]
