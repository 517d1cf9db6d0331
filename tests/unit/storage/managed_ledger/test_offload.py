"""Ended ledgers that are copied to another place, and the stream over them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from magnetar.protocol.ids import EARLIEST, LATEST, LedgerId, Position
from storage.ledger.store import LedgerError, NoSuchLedger
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import decode_stream, ledger_key
from storage.managed_ledger.types import Limits, ManagedLedgerClosed, Retention
from storage.metadata.store import MetadataError
from storage.offload.cold_ledgers import ColdLedgers
from storage.offload.context import Location, OffloadContext
from storage.offload.errors import OffloadedDataLost, OffloadFailed
from storage.offload.objects import Objects, StoredObject
from tests.support.waiting import TIMEOUT_S, end, until
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    Process,
    ProcessLedgers,
    ProcessMetadata,
    World,
    contents,
    data_of,
    publish,
    settle,
)

THERE = Location("file", "/there")
ELSEWHERE = Location("file", "/elsewhere")
BY_HAND = Limits(
    ledger_max_entries=10,
    ledger_min_age_ms=0,
    cursor_flush_ms=1,
    entry_cache_bytes=0,
    offload_deletion_lag_ms=-1,
)


class CountedProcess(Process):
    """Dies at a chosen call of one of its stores: before it has an effect, or just after."""

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.calls = 0
        self.died = asyncio.Event()

    async def alive(self) -> None:
        self.calls += 1
        if self.calls == self.dies_at:
            self.dead = True
            self.died.set()
        await super().alive()


class MemoryObjects(Objects):
    """The objects of one place, as one process sees them."""

    def __init__(self, process: Process, stored: dict[str, bytes]) -> None:
        self._process = process
        self._stored = stored
        self.answers = asyncio.Event()
        self.answers.set()

    async def put(self, key: str, parts: AsyncIterator[bytes]) -> None:
        await self._process.alive()
        whole = b"".join([part async for part in parts])
        await self._process.alive()
        self._stored[key] = whole
        await self._process.alive()

    async def read(self, key: str, start: int, length: int) -> bytes:
        await self._process.alive()
        await self.answers.wait()
        if key not in self._stored:
            raise OffloadedDataLost(f"no {key}")
        return self._stored[key][start : start + length]

    async def size(self, key: str) -> int:
        return len(await self.read(key, 0, 1 << 30))

    async def delete(self, key: str) -> None:
        await self._process.alive()
        await self.answers.wait()
        self._stored.pop(key, None)
        await self._process.alive()

    async def list(self) -> AsyncIterator[StoredObject]:
        for key in list(self._stored):
            yield StoredObject(key, len(self._stored[key]), 0)


class MemoryCold(ColdLedgers):
    """Copies in memory, by place; they outlive the process."""

    def __init__(self, process: Process, places: dict[Location, dict[str, bytes]]) -> None:
        super().__init__(random.Random())
        self._process = process
        self._places = places

    def _open_objects(self, location: Location, size_hint_bytes: int = 0) -> Objects:
        if location not in self._objects:
            stored = self._places.setdefault(location, {})
            self._objects[location] = MemoryObjects(self._process, stored)
        return self._objects[location]


class ColdWorld(World):
    """The two stores, and places for copies."""

    def __init__(self, limits: Limits = BY_HAND) -> None:
        self.places: dict[Location, dict[str, bytes]] = {}
        self.dies_at: int | None = None
        super().__init__(limits)

    def new_factory(self) -> ManagedLedgerFactory:
        self.process: CountedProcess = CountedProcess(self.dies_at)
        return ManagedLedgerFactory(
            ProcessMetadata(self.process, self.metadata),
            ProcessLedgers(self.process, self.ledgers),
            self.clock,
            self.limits,
            MemoryCold(self.process, self.places),
        )

    @property
    def place(self) -> MemoryObjects:
        """The objects there, as the process of now sees them."""
        objects = self.factory.cold._open_objects(THERE)
        assert isinstance(objects, MemoryObjects)
        return objects

    @property
    def objects(self) -> dict[str, bytes]:
        return self.places.setdefault(THERE, {})

    async def recorded(self) -> list[OffloadContext | None]:
        record = await self.metadata.get(ledger_key(NAME))
        assert record is not None
        return [info.offload for info in decode_stream(record.key, record.value).ledgers]

    async def orphans(self) -> list[str]:
        return sorted(each.key for each in await self.factory.orphaned_copies(THERE))


@pytest.fixture
async def world() -> ColdWorld:
    return ColdWorld()


def numbered(count: int) -> list[bytes]:
    return [f"e{number}".encode() for number in range(count)]


async def filled(world: World, count: int = 35) -> ManagedLedger:
    ledger = await world.open()
    await ledger.open_cursor("hold", EARLIEST)
    await publish(ledger, count)
    return ledger


async def offloaded(ledger: ManagedLedger, up_to: Position = LATEST) -> None:
    await ledger.offload.request(THERE, up_to)
    await ledger.offload.run()


async def test_ended_ledgers_are_read_from_their_copies_when_they_are_gone(
    world: ColdWorld,
) -> None:
    ledger = await filled(world)
    await offloaded(ledger)
    assert len(world.objects) == 6
    assert [info.hot for info in ledger.ledgers] == [True] * 4
    assert ledger.offload.first_hot() == Position(ledger.ledgers[3].ledger_id, 0)
    dropped = await ledger.offload.drop_hot()
    assert dropped == [info.ledger_id for info in ledger.ledgers[:3]]
    assert sorted(world.ledgers.ledgers) == [LedgerId(ledger.ledgers[3].ledger_id)]
    said = [context is not None and context.hot_deleted for context in await world.recorded()]
    assert said == [True, True, True, False]
    assert data_of(await contents(ledger)) == numbered(35)
    positions = [entry.position for entry in await contents(ledger)]
    assert await ledger.find_first(lambda entry: int(entry.data[1:]) >= 17) == positions[17]
    ledger = await world.restart()
    assert [entry.position for entry in await contents(ledger)] == positions
    assert ledger.cursors["hold"].backlog == 35
    cursor = ledger.open_reader_cursor("reader", positions[4])
    assert cursor.first_unacknowledged(EARLIEST) == positions[5]
    assert (await publish(ledger, 1))[0] > positions[-1]


async def test_a_reader_goes_on_when_the_ledger_goes(world: ColdWorld) -> None:
    ledger = await filled(world)
    await offloaded(ledger)
    first = await ledger.read(EARLIEST, max_entries=5, max_bytes=1000)
    await ledger.offload.drop_hot()
    later = await ledger.read(
        ledger.next_position(first[-1].position), max_entries=50, max_bytes=1000
    )
    assert data_of([*first, *later]) == numbered(35)


async def test_a_ledger_that_is_gone_too_early_is_read_from_its_copy(world: ColdWorld) -> None:
    """As after a crash between its deletion and the record."""
    ledger = await filled(world)
    await offloaded(ledger)
    await ledger.read(EARLIEST, max_entries=5, max_bytes=1000)
    await world.ledgers.delete(LedgerId(ledger.ledgers[0].ledger_id))
    assert data_of(await contents(ledger)) == numbered(35)
    assert await ledger.offload.drop_hot() == [info.ledger_id for info in ledger.ledgers[:3]]
    other = await filled_elsewhere(world)
    await world.ledgers.delete(LedgerId(other.ledgers[0].ledger_id))
    with pytest.raises(NoSuchLedger):
        await contents(other)


async def filled_elsewhere(world: World) -> ManagedLedger:
    other = await world.open(NAME + "2")
    await other.open_cursor("hold", EARLIEST)
    await publish(other, 15)
    return other


async def test_only_what_ended_before_a_position_is_copied(world: ColdWorld) -> None:
    ledger = await filled(world)
    third = ledger.ledgers[2]
    await offloaded(ledger, Position(third.ledger_id, 0))
    assert len(ledger.offload.copied()) == 2
    assert ledger.offload.first_hot() == Position(third.ledger_id, 0)
    await offloaded(ledger, Position(third.ledger_id, 9))
    assert len(ledger.offload.copied()) == 2
    await offloaded(ledger, Position(third.ledger_id, 10))
    assert len(ledger.offload.copied()) == 3
    assert await ledger.offload.request(ELSEWHERE) == 0
    assert ELSEWHERE not in world.places


async def test_a_sealed_stream_is_copied_whole(world: ColdWorld) -> None:
    ledger = await filled(world)
    await ledger.terminate()
    await offloaded(ledger)
    await ledger.offload.drop_hot()
    assert world.ledgers.ledgers == {}
    ledger = await world.restart()
    assert data_of(await contents(ledger)) == numbered(35)
    assert [one.entries for _, one in await ledger.offload.manifests()] == [10, 10, 10, 5]
    await world.factory.delete(NAME)
    assert world.objects == {}


async def test_trimming_a_ledger_deletes_its_offloaded_copy(world: ColdWorld) -> None:
    ledger = await filled(world)
    await offloaded(ledger)
    await ledger.offload.drop_hot(ledger_ids=[ledger.ledgers[0].ledger_id])
    ledger.cursors["hold"].acknowledge_up_to((await contents(ledger))[24].position)
    await until(lambda: len(ledger.ledgers) == 2)
    await until(lambda: len(world.objects) == 2)
    assert await world.orphans() == []
    assert data_of(await contents(ledger)) == numbered(35)[20:]


async def test_ledgers_are_deleted_some_time_after_they_were_copied(world: ColdWorld) -> None:
    world.limits = Limits(
        ledger_max_entries=10, ledger_min_age_ms=0, cursor_flush_ms=1, offload_deletion_lag_ms=5000
    )
    await world.factory.close()
    world.factory = world.new_factory()
    ledger = await filled(world)
    await offloaded(ledger)
    await ledger.trim()
    assert all(info.hot for info in ledger.ledgers)
    assert ledger.next_trim_ms() == world.clock.ms + 5000
    world.clock.ms += 5000
    world.ledgers.fail("delete", LedgerError("not now"))
    with pytest.raises(LedgerError, match="not now"):
        await ledger.trim()
    assert ledger.next_trim_ms() == world.clock.ms + 30_000, "not at each look"
    world.clock.ms += 30_000
    await ledger.trim()
    assert [info.hot for info in ledger.ledgers] == [False, False, False, True]
    assert ledger.next_trim_ms() is None


async def test_a_copy_that_is_not_whole_any_more_keeps_its_ledger(world: ColdWorld) -> None:
    ledger = await filled(world)
    await offloaded(ledger)
    data = next(key for key in world.objects if not key.endswith("-index"))
    world.objects[data] = world.objects[data][:-1]
    with pytest.raises(LedgerError, match="the ledger is kept"):
        await ledger.offload.drop_hot()
    assert data_of(await contents(ledger)) == numbered(35)
    assert LedgerId(int(data.rpartition("-")[2])) in world.ledgers.ledgers


async def test_a_place_that_does_not_answer_holds_nobody_up(world: ColdWorld) -> None:
    ledger = await filled(world)
    await offloaded(ledger)
    world.place.answers.clear()
    dropping = asyncio.ensure_future(ledger.offload.drop_hot())
    await settle()
    await publish(ledger, 30)
    assert len(ledger.ledgers) == 7, "rolled over"
    await asyncio.wait_for(world.factory.unload(NAME), TIMEOUT_S)
    with pytest.raises(ManagedLedgerClosed):
        await dropping
    assert data_of(await contents(await world.open()))[:35] == numbered(35)


async def test_copies_that_cannot_be_deleted_now_hold_nobody_up(world: ColdWorld) -> None:
    ledger = await filled(world)
    await offloaded(ledger)
    world.place.answers.clear()
    ledger.cursors["hold"].acknowledge_up_to(Position(ledger.ledgers[1].ledger_id, 9))
    await until(lambda: len(ledger.ledgers) == 2)
    await asyncio.wait_for(world.factory.unload(NAME), TIMEOUT_S)
    world.place.answers.set()
    assert len(await world.orphans()) == 4
    assert data_of(await contents(await world.open())) == numbered(35)[20:]


async def test_an_offload_that_failed_goes_on_when_asked_again(world: ColdWorld) -> None:
    ledger = await filled(world)
    world.ledgers.fail("open", None, OffloadFailed("the place is full"))
    await ledger.offload.request(THERE)
    with pytest.raises(OffloadFailed, match="full"):
        await ledger.offload.run()
    assert [info.offload is not None for info in ledger.ledgers] == [True, True, True, False]
    assert len(ledger.offload.copied()) == 1
    assert await ledger.offload.request(THERE) == 2
    await ledger.offload.run()
    assert (len(ledger.offload.copied()), len(world.objects)) == (3, 6)


@pytest.mark.parametrize("applied", [False, True])
async def test_a_record_of_unknown_fate_deletes_no_copy(world: ColdWorld, applied: bool) -> None:
    ledger = await filled(world, 15)
    await ledger.offload.request(THERE)
    world.metadata.faults.append(("/managed-ledgers/", applied))
    with pytest.raises(MetadataError):
        await ledger.offload.run()
    crashed = await world.crash()
    whole = [context for context in await world.recorded() if context and context.complete]
    assert len(whole) == applied
    assert data_of(await contents(crashed)) == numbered(15)
    await crashed.offload.run()
    await crashed.offload.drop_hot()
    assert data_of(await contents(crashed)) == numbered(15)
    assert (len(world.objects), await world.orphans()) == (2, [])


async def test_the_same_without_a_crash(world: ColdWorld) -> None:
    ledger = await filled(world, 15)
    await ledger.offload.request(THERE)
    world.metadata.faults.append(("/managed-ledgers/", True))
    with pytest.raises(MetadataError):
        await ledger.offload.run()
    await ledger.offload.run()
    await ledger.offload.drop_hot()
    assert data_of(await contents(ledger)) == numbered(15)
    assert (len(world.objects), await world.orphans()) == (2, [])


async def test_closing_cuts_it_off_and_the_next_one_goes_on(world: ColdWorld) -> None:
    ledger = await filled(world)
    gate = world.ledgers.gates["open"] = asyncio.Event()
    await ledger.offload.request(THERE)
    running = asyncio.ensure_future(ledger.offload.run())
    await settle()
    assert ledger.offload.running
    closing = asyncio.ensure_future(world.factory.unload(NAME))
    await settle()
    gate.set()
    await closing
    with pytest.raises(ManagedLedgerClosed, match="goes on"):
        await running
    with pytest.raises(ManagedLedgerClosed):
        await ledger.offload.run()
    ledger = await world.open()
    assert len(ledger.offload.pending()) == 3
    await ledger.offload.run()
    assert len(ledger.offload.copied()) == 3


async def test_an_attempt_of_an_earlier_owner_never_meets_the_next_one(world: ColdWorld) -> None:
    """He may be writing still."""
    ledger = await filled(world, 15)
    world.process.dies_at = world.process.calls + 6
    running = asyncio.ensure_future(offloaded(ledger))
    await world.process.died.wait()
    earlier = {context.uid for context in await world.recorded() if context}
    ledger = await world.crash()
    await offloaded(ledger)
    assert earlier
    assert not earlier & {context.uid for context in await world.recorded() if context}
    await end(running)


async def test_ledger_trimmed_during_its_offload_leaves_no_copy(world: ColdWorld) -> None:
    ledger = await filled(world, 15)
    await ledger.offload.request(THERE)
    gate = world.ledgers.gates["open"] = asyncio.Event()
    running = asyncio.ensure_future(ledger.offload.run())
    await settle()
    del world.ledgers.gates["open"]
    hot = await world.ledgers.open(LedgerId(ledger.ledgers[0].ledger_id))
    kept = world.ledgers.ledgers[hot.ledger_id]
    ledger.cursors["hold"].acknowledge_up_to(Position(ledger.ledgers[0].ledger_id, 9))
    await until(lambda: len(ledger.ledgers) == 1)
    await settle()
    world.ledgers.ledgers[hot.ledger_id] = kept
    gate.set()
    await running
    assert world.objects == {}


# Crashes


Act = Callable[[ManagedLedger], Coroutine[None, None, object]]


async def crash_at_each_call(prepare: Act, act: Act, check: Callable[[ColdWorld], Act]) -> int:
    """Let the process die at each call that `act` makes of a store; how many there were."""
    at, finished = 1, False
    while not finished:
        world = ColdWorld()
        ledger = await filled(world, 25)
        await prepare(ledger)
        await settle()
        world.process.dies_at = world.process.calls + at
        task = asyncio.ensure_future(act(ledger))
        died = asyncio.ensure_future(world.process.died.wait())
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        finished = not world.process.died.is_set()
        after = await world.crash()
        assert data_of(await contents(after)) == numbered(25), f"at call {at}"
        await check(world)(after)
        await end(task, died)
        at += 1
        assert at < 300
    return at


async def nothing(ledger: ManagedLedger) -> None:
    return None


async def drop(ledger: ManagedLedger) -> None:
    await ledger.offload.drop_hot()


async def test_a_crash_anywhere_in_copying_leaves_only_what_the_next_try_removes() -> None:
    def check(world: ColdWorld) -> Act:
        async def again(ledger: ManagedLedger) -> None:
            await ledger.offload.run()
            await offloaded(ledger)
            assert len(ledger.offload.copied()) == 3
            assert await world.orphans() == []
            assert len(world.objects) == 6
            await drop(ledger)
            assert data_of(await contents(ledger)) == numbered(25)

        return again

    assert await crash_at_each_call(nothing, offloaded, check) > 30


async def test_a_crash_anywhere_in_deleting_ledgers_loses_nothing() -> None:
    def check(world: ColdWorld) -> Act:
        async def again(ledger: ManagedLedger) -> None:
            await drop(ledger)
            assert [info.hot for info in ledger.ledgers] == [False, False, True]
            assert list(world.ledgers.ledgers) == [ledger.ledgers[2].ledger_id]
            assert data_of(await contents(ledger)) == numbered(25)

        return again

    assert await crash_at_each_call(offloaded, drop, check) > 10


async def test_a_crash_anywhere_in_trimming_leaves_no_record_without_its_copy() -> None:
    async def prepare(ledger: ManagedLedger) -> None:
        await offloaded(ledger)
        await drop(ledger)

    async def trim(ledger: ManagedLedger) -> None:
        ledger.use_retention(lambda: Retention(0, 0))
        await ledger.delete_cursor("hold")
        await ledger.trim()

    at, finished = 1, False
    while not finished:
        world = ColdWorld()
        ledger = await filled(world, 25)
        await prepare(ledger)
        world.process.dies_at = world.process.calls + at
        task = asyncio.ensure_future(trim(ledger))
        died = asyncio.ensure_future(world.process.died.wait())
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        finished = not world.process.died.is_set()
        after = await world.crash()
        left = data_of(await contents(after))
        assert left == numbered(25)[25 - len(left) :]
        for context in await world.recorded():
            assert context is None or sum(str(context.uid) in key for key in world.objects) == 2
        orphans = await world.orphans()
        await world.factory.cold.delete_objects(THERE, orphans)
        assert data_of(await contents(after)) == left
        await end(task, died)
        at += 1
        assert at < 300
    assert at > 5
