"""Owners over a store that is late, for everybody differently: whatever happens, one holds a name.

Each process takes, releases, loses its session and opens another one, as a seed decides; answers
and events come late.  Afterwards everybody knows what the store says.
"""

import asyncio
import random
from typing import cast

import pytest

from broker.placement.members import MemberState
from broker.placement.ownership import OWNERS, Owner, Ownership, owner_key
from broker.placement.placement import OwnedElsewhere, PlacementCounters, PlacementNotReady
from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import Event, MetadataError, MetadataStore, Session, Watch
from tests.support.waiting import until

NAMES = [f"persistent://public/default/t{number}" for number in range(4)]
STEPS = 30


class LateWatch:
    """Events come some turns later, in their order."""

    def __init__(self, watch: Watch, rng: random.Random) -> None:
        self._watch = watch
        self._rng = rng

    def __aiter__(self) -> "LateWatch":
        return self

    async def __anext__(self) -> Event:
        event = await self._watch.__anext__()
        await turns(self._rng.randrange(8))
        return event

    def close(self) -> None:
        self._watch.close()


class LateStore:
    """Requests and answers take some turns; a put or delete may fail, made or not."""

    def __init__(self, store: MemoryMetadataStore, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self.faults = 0.05

    def __getattr__(self, name: str) -> object:
        method = getattr(self._store, name)
        if name.startswith("watch_"):
            return lambda *args: LateWatch(method(*args), self._rng)

        async def call(*args: object, **kwargs: object) -> object:
            luck = self._rng.random() if name in ("put", "delete") else 1.0
            await turns(self._rng.randrange(15))
            if luck < self.faults:
                raise MetadataError("not made")
            found = await method(*args, **kwargs)
            await turns(self._rng.randrange(15))
            if luck < 2 * self.faults:
                raise MetadataError("made, and the answer was lost")
            return found

        return call


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Process:
    """One owner among several."""

    def __init__(self, store: MemoryMetadataStore, number: int, rng: random.Random) -> None:
        self.rng = rng
        self.store = store
        self.view = LateStore(store, rng)
        self.session: Session
        self.changes: list[str] = []
        self.done = False
        self.ownership = Ownership(
            cast("MetadataStore", self.view),
            Owner(f"b{number}:8080", str(number)),
            PlacementCounters(),
            self.changes.append,
            lambda _: MemberState.SERVING,
        )

    async def start(self) -> None:
        await self.ownership.start()
        await self.open()

    async def open(self) -> None:
        self.session = await self.store.open_session(timeout_ms=60_000, identity="x")
        self.ownership.use(self.session)

    async def run(self) -> None:
        losing = asyncio.ensure_future(self._lose_sessions())
        await asyncio.gather(*(self._use(name) for name in NAMES))
        self.done = True
        await losing

    async def _use(self, name: str) -> None:
        for _ in range(STEPS):
            try:
                if self.rng.random() < 0.5:
                    await self.ownership.acquire(name)
                else:
                    await self.ownership.release(name)
            except (OwnedElsewhere, PlacementNotReady, MetadataError):
                continue
            await turns(self.rng.randrange(3))

    async def _lose_sessions(self) -> None:
        while not self.done:
            await turns(self.rng.randrange(60))
            await self.session.close()
            await turns(self.rng.randrange(3))
            self.ownership.session_lost()
            await turns(self.rng.randrange(4))
            await self.open()


@pytest.mark.parametrize("seed", range(25))
async def test_one_holds_a_name_and_everybody_ends_up_knowing_who(seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryMetadataStore(SystemClock())
    processes = [Process(store, number, random.Random(rng.random())) for number in range(3)]
    for process in processes:
        await process.start()
    work = [asyncio.ensure_future(process.run()) for process in processes]
    while not all(task.done() for task in work):
        for name in NAMES:
            assert sum(process.ownership.holds(name) for process in processes) <= 1, name
        await asyncio.sleep(0)
    await asyncio.gather(*work)
    for process in processes:
        process.view.faults = 0.0
    stored = await owners_in(store)

    def settled() -> bool:
        return all(
            {name: owner.broker_id for name, owner in each.ownership.owners.items()} == stored
            for each in processes
        )

    await until(settled)
    for process in processes:
        for name in NAMES:
            if process.ownership.holds(name):
                assert stored[name] == f"b{process.ownership._me.incarnation}:8080"
        await process.ownership.stop()
    await store.close()


async def owners_in(store: MemoryMetadataStore) -> dict[str, str]:
    found = await store.get_many([owner_key(name) for name in NAMES])
    return {
        name: f"b{record.value.decode()[-3]}:8080"
        for name, record in zip(NAMES, found, strict=True)
        if record is not None
    }


async def test_after_a_resync_the_lists_are_compared() -> None:
    store = MemoryMetadataStore(SystemClock())
    first, second = (Process(store, number, random.Random(number)) for number in range(2))
    for process in (first, second):
        process.view.faults = 0.0
        await process.start()
    await first.ownership.acquire(NAMES[0])
    await until(lambda: NAMES[0] in second.ownership.owners)
    level = owner_key(NAMES[0]).rpartition("/")[0]
    second.ownership._owners[NAMES[1]] = Owner("gone:1", "x")  # an event that was lost
    for name in NAMES:
        await second.ownership._list(owner_key(name).rpartition("/")[0])
    assert level.startswith(OWNERS)
    assert {*second.ownership.owners} == {NAMES[0]}
    for process in (first, second):
        await process.ownership.stop()
    await store.close()


async def alone() -> tuple[MemoryMetadataStore, Process]:
    store = MemoryMetadataStore(SystemClock())
    process = Process(store, 0, random.Random(0))
    process.view.faults = 0.0
    await process.start()
    return store, process


async def test_an_event_of_the_past_takes_nothing_away() -> None:
    store, process = await alone()
    await process.ownership.acquire(NAMES[0])
    await turns(50)
    told = len(process.changes)
    for late in (None, Owner("other:1", "x")):
        process.ownership._apply(NAMES[0], late)
        assert process.ownership.holds(NAMES[0])
        await until(lambda: not process.ownership._events_while_reading)
        await turns(50)
        assert process.ownership.holds(NAMES[0])
        assert process.ownership.owners[NAMES[0]] == process.ownership._me
    assert len(process.changes) == told, "nobody is told of what is not so"
    await process.ownership.stop()
    await store.close()


async def test_release_leaves_a_record_that_another_broker_took() -> None:
    store, process = await alone()
    await process.ownership.acquire(NAMES[0])
    await process.ownership._followers.stop()
    await store.put(owner_key(NAMES[0]), b'{"brokerId":"other:1","incarnation":"x"}')
    await process.ownership.release(NAMES[0])
    assert not process.ownership.holds(NAMES[0])
    assert await store.get(owner_key(NAMES[0])) is not None
    await until(lambda: process.ownership.owners.get(NAMES[0]) == Owner("other:1", "x"))
    await process.ownership.stop()
    await store.close()


async def test_records_that_are_not_ours_disturb_nobody() -> None:
    store, process = await alone()
    level = owner_key(NAMES[0]).rpartition("/")[0]
    await store.put(f"{level}/%zz", b"{}")
    await store.put(owner_key(NAMES[0]), b"no json")
    await store.put(owner_key(NAMES[1]), b'{"brokerId":"other:1","incarnation":"x"}')
    await until(lambda: NAMES[1] in process.ownership.owners)
    with pytest.raises(OwnedElsewhere):
        await process.ownership.acquire(NAMES[0])
    await process.ownership._list(level)
    await store.delete(owner_key(NAMES[0]))
    await process.ownership.acquire(NAMES[0])
    assert process.ownership.holds(NAMES[0])
    await process.ownership.stop()
    await store.close()
