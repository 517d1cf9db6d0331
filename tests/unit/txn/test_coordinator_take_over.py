"""Who leads after a broker died, however news and answers overtake each other: seeded schedules.

Whatever takes time (a call's way to the store, its answer, an event, news of brokers) waits for the
schedule, which lets one go on after the other in an order that the seed draws.  Events of different
keys overtake each other, and one key's merge into its newest, as `Watch` has it.  No time passes
before nothing is left that could go on.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from config.bounds import (
    COORDINATOR_KEPT_MAX_S,
    COORDINATOR_KEPT_S,
    COORDINATOR_LEFT_ALONE_S,
)
from magnetar.protocol.txn_id import CoordinatorId
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.sessions import KeptSession
from storage.metadata.store import Event, MetadataStore, Session, Watch
from tests.unit.txn.virtual_time import VirtualClock, in_virtual_time
from txn import records
from txn.coordinator_elections import CoordinatorBrokers, CoordinatorElections, Leader

TURNS = 30
"""Of the loop, within which whatever can go on does."""
SESSION_TIMEOUT_MS = 5000


class Schedule:
    """Everything that waits, and the order in which it goes on."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._waiting: list[asyncio.Future[None]] = []
        self._free = False

    async def wait(self) -> None:
        """Until it is this one's turn."""
        if not self._free:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    async def go_on(self, steps: int | None = None) -> None:
        """So many of them, one after the other; all, until nothing waits any more."""
        left = steps
        while left is None or left > 0:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self._waiting = [turn for turn in self._waiting if not turn.done()]
            if not self._waiting:
                return
            self._waiting.pop(self.rng.randrange(len(self._waiting))).set_result(None)
            left = None if left is None else left - 1

    def set_free(self) -> None:
        """From now on nothing waits."""
        self._free = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)


class ShuffledWatch:
    """Tells the newest of each key, keys in any order, each when it is its turn."""

    def __init__(self, watch: Watch, schedule: Schedule) -> None:
        self._watch = watch
        self._schedule = schedule
        self._newest: dict[str, Event] = {}
        self._some = asyncio.Event()
        self._pump = asyncio.ensure_future(self._take_in())

    async def _take_in(self) -> None:
        async for event in self._watch:
            self._newest[event.key] = event
            self._some.set()

    def __aiter__(self) -> "ShuffledWatch":
        return self

    async def __anext__(self) -> Event:
        while not self._newest:
            self._some.clear()
            await self._some.wait()
        await self._schedule.wait()
        return self._newest.pop(self._schedule.rng.choice(sorted(self._newest)))

    def close(self) -> None:
        self._pump.cancel()
        self._watch.close()


class Process:
    """One broker's elections, and its own view of the store and of the brokers."""

    def __init__(self, world: "TakeOverWorld", name: str) -> None:
        self.name = name
        self.candidates: Sequence[str] = world.brokers
        self.session: Session | None = None
        self._world = world
        self.elections = CoordinatorElections(
            cast("MetadataStore", self),
            Leader(name, f"pulsar://{name}:6650"),
            world.parallelism,
            lambda: None,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            electorate=CoordinatorBrokers(lambda: self.candidates, self._only_session),
        )

    async def _only_session(self) -> Session:
        if self.session is None:
            self.session = await self._world.store.open_session(
                timeout_ms=SESSION_TIMEOUT_MS, identity=self.name
            )
        return self.session

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._world.store, name)

        async def call(*args: object, **given: object) -> object:
            await self._world.schedule.wait()
            found = await method(*args, **given)
            await self._world.schedule.wait()
            return found

        return call

    def watch_children(self, key: str) -> Watch:
        return ShuffledWatch(self._world.store.watch_children(key), self._world.schedule)

    async def hear_of_brokers(self) -> None:
        """Some time, and then of the newest."""
        await self._world.schedule.wait()
        self.candidates = self._world.brokers
        self.elections.balance()

    async def kill(self) -> None:
        """It does nothing more; its session lives."""
        await self.elections._tasks.stop()
        self.elections._following.close()
        if self.elections._balance_timer is not None:
            self.elections._balance_timer.cancel()


class TakeOverWorld:
    """Brokers on one store, by one schedule."""

    def __init__(self, seed: int, brokers: Sequence[str], parallelism: int) -> None:
        self.schedule = Schedule(seed)
        self.store = MemoryMetadataStore(VirtualClock())
        self.brokers = brokers
        self.parallelism = parallelism
        self.live: dict[str, Process] = {}
        self.begun: list[asyncio.Future[None]] = []
        """What is under way in the schedule."""

    async def start(self, *names: str) -> None:
        for name in names:
            self._begin(name)
        await self.schedule.go_on()

    def add(self, name: str) -> None:
        """One more starts, and each hears of it when it is its turn."""
        self._begin(name)
        self.tell([*dict.fromkeys([*self.brokers, name])])

    def _begin(self, name: str) -> None:
        self.live[name] = Process(self, name)
        self.begun.append(asyncio.ensure_future(self.live[name].elections.start()))

    def tell(self, brokers: Sequence[str]) -> None:
        """Each hears of it when it is its turn."""
        self.brokers = brokers
        self.begun += [asyncio.ensure_future(one.hear_of_brokers()) for one in self.live.values()]

    async def kill(self, name: str) -> Process:
        victim = self.live.pop(name)
        await victim.kill()
        return victim

    async def end_session(self, victim: Process) -> None:
        """Its records go at once, its member's among them; the others hear one by one."""
        session = cast("KeptSession", victim.session)
        await session._keeper.removed(session)
        self.tell([name for name in self.brokers if name != victim.name])

    async def leaders(self) -> dict[int, str]:
        """By what is stored."""
        numbers = [CoordinatorId(number) for number in range(self.parallelism)]
        found = await self.store.get_many([*map(records.leader_key, numbers)])
        urls = {one: f'"brokerId":"{one}"'.encode() for one in "abcdefgh"}
        return {
            number: next(one for one, part in urls.items() if part in record.value)
            for number, record in zip(numbers, found, strict=True)
            if record is not None
        }

    async def versions(self) -> list[int | None]:
        """Of what is stored; None where nobody leads."""
        numbers = [CoordinatorId(number) for number in range(self.parallelism)]
        found = await self.store.get_many([*map(records.leader_key, numbers)])
        return [None if record is None else record.version for record in found]

    def known(self) -> list[dict[int, str]]:
        """By what each live one knows."""
        return [
            {number: leader.broker_id for number, leader in one.elections.leaders.items()}
            for one in self.live.values()
        ]


@asynccontextmanager
async def world_of(seed: int, brokers: str, parallelism: int) -> AsyncIterator[TakeOverWorld]:
    made = TakeOverWorld(seed, [*brokers], parallelism)
    try:
        yield made
    finally:
        made.schedule.set_free()
        await asyncio.gather(*made.begun)
        for one in made.live.values():
            await one.elections.stop()
        await made.store.close()


async def check_all_led(world: TakeOverWorld) -> None:
    """By live ones, evenly, as all know; and no time has passed."""
    await check_shared(world)
    assert asyncio.get_running_loop().time() < COORDINATOR_LEFT_ALONE_S


async def check_shared(world: TakeOverWorld) -> None:
    """Live ones lead everything, evenly, as all know."""
    leaders = await world.leaders()
    assert leaders.keys() == set(range(world.parallelism))
    assert set(leaders.values()) <= world.live.keys()
    assert all(known == leaders for known in world.known())
    share = -(-world.parallelism // len(world.live))
    assert max(list(leaders.values()).count(one) for one in world.live) <= share


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with capture_logs():
        yield


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["ab", "abc", "abcd"]), st.integers(1, 9))
def test_coordinators_of_a_dead_broker_are_led_by_the_others(
    seed: int, brokers: str, parallelism: int
) -> None:
    @in_virtual_time
    async def take_over() -> None:
        async with world_of(seed, brokers, parallelism) as world:
            await world.start(*brokers)
            await check_all_led(world)
            victim = await world.kill(world.schedule.rng.choice(brokers))
            await world.end_session(victim)
            await world.schedule.go_on()
            await check_all_led(world)

    take_over()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_a_death_while_coordinators_move_to_a_new_broker_leaves_none_without_a_leader(
    seed: int, parallelism: int
) -> None:
    @in_virtual_time
    async def take_over() -> None:
        async with world_of(seed, "ab", parallelism) as world:
            rng = world.schedule.rng
            await world.start("a", "b")
            world.add("c")
            await world.schedule.go_on(rng.randrange(60))
            victim = await world.kill(rng.choice("ab"))
            await world.schedule.go_on(rng.randrange(60))
            await world.end_session(victim)
            await world.schedule.go_on()
            await check_all_led(world)

    take_over()


@in_virtual_time
async def test_what_is_given_up_for_a_dead_broker_is_led_again_and_stays_for_a_while() -> None:
    async with world_of(1, "ab", 6) as world:
        await world.start("a", "b")
        world.schedule.set_free()
        world.tell("abc")
        await asyncio.sleep(0.5 * COORDINATOR_LEFT_ALONE_S)
        assert len(await world.leaders()) == 4
        await asyncio.sleep(0.6 * COORDINATOR_LEFT_ALONE_S)
        kept = await world.leaders()
        assert len(kept) == 6
        versions = await world.versions()
        await asyncio.sleep(0.9 * COORDINATOR_KEPT_S)
        assert await world.versions() == versions, "nobody gave it up once more"
        world.add("c")
        await asyncio.sleep(0.2 * COORDINATOR_KEPT_S)
        await check_shared(world)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_who_took_more_than_its_share_of_what_was_left_alone_keeps_it_while_the_dead_one_is_there(
    seed: int,
) -> None:
    @in_virtual_time
    async def take_over() -> None:
        async with world_of(seed, "abc", 9) as world:
            await world.start(*"abc")
            world.schedule.set_free()
            dead = await world.kill("c")
            theirs = [number for number, one in (await world.leaders()).items() if one == "c"]
            for number in theirs:
                await world.store.delete(records.leader_key(CoordinatorId(number)))
            await asyncio.sleep(1.2 * COORDINATOR_LEFT_ALONE_S)
            kept = await world.leaders()
            assert len(kept) == 9
            await asyncio.sleep(0.5 * COORDINATOR_KEPT_S)
            assert await world.leaders() == kept
            await world.end_session(dead)
            await asyncio.sleep(0.5 * COORDINATOR_LEFT_ALONE_S)
            await check_shared(world)

    take_over()


@in_virtual_time
async def test_what_a_candidate_never_takes_is_offered_to_it_less_and_less_often() -> None:
    async with world_of(1, "ab", 6) as world:
        await world.start("a", "b")
        world.schedule.set_free()
        world.tell("abc")
        await asyncio.sleep(2 * COORDINATOR_LEFT_ALONE_S)
        at_s, times_s = asyncio.get_running_loop().time, list[float]()
        versions = await world.versions()
        while at_s() < 60 * COORDINATOR_KEPT_S:
            await asyncio.sleep(5 * COORDINATOR_LEFT_ALONE_S)
            if versions != (versions := await world.versions()):
                times_s.append(at_s())
        assert len(times_s) <= 8, "each time it takes about twice as long"
        await asyncio.sleep(COORDINATOR_KEPT_MAX_S)
        assert await world.versions() != versions, "it is still offered"
        world.tell("abd")
        await asyncio.sleep(2 * COORDINATOR_LEFT_ALONE_S)
        versions = await world.versions()
        await asyncio.sleep(1.1 * COORDINATOR_KEPT_S)
        assert await world.versions() != versions, "with other candidates it begins anew"


@in_virtual_time
async def test_each_is_left_alone_for_as_long_whatever_went_before() -> None:
    async with world_of(1, "ab", 4) as world:
        await world.start("a", "b")
        world.schedule.set_free()
        dead = await world.kill("b")
        theirs = [number for number, one in (await world.leaders()).items() if one == dead.name]
        assert len(theirs) == 2
        for number in theirs:
            await world.store.delete(records.leader_key(CoordinatorId(number)))
            await asyncio.sleep(0.5 * COORDINATOR_LEFT_ALONE_S)
        await asyncio.sleep(0.1 * COORDINATOR_LEFT_ALONE_S)
        assert (await world.leaders()).keys() == {0, 1, 2, 3} - {theirs[1]}
        await asyncio.sleep(0.5 * COORDINATOR_LEFT_ALONE_S)
        assert set((await world.leaders()).values()) == {"a"}
        assert len(await world.leaders()) == 4
