"""Who leads a coordinator among several brokers, while events and reads overtake each other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from config.bounds import COORDINATOR_LEFT_ALONE_S, COORDINATOR_NO_CANDIDATE_S
from magnetar.background_tasks import EndsForGood
from magnetar.protocol.txn_id import CoordinatorId
from storage.metadata.store import MetadataError, Record, Session
from tests.unit.txn.coordinator_world import WatchedStore, World
from tests.unit.txn.virtual_time import in_virtual_time
from txn import records
from txn.coordinator_elections import CoordinatorBrokers, CoordinatorElections, Leader, _encoded
from txn.coordinator_spread import assign_successors

ZERO, ONE = CoordinatorId(0), CoordinatorId(1)
ME = Leader("a", "pulsar://a:6650")


class Gone(MetadataError, EndsForGood):
    """There is no session any more."""


class Sessions:
    """The sessions of one broker; there are so many of them."""

    def __init__(self, store: WatchedStore, count: int) -> None:
        self.asked = 0
        self._store = store
        self._left = count

    async def __call__(self) -> Session:
        self.asked += 1
        if not self._left:
            raise Gone("Another process has this id: stop this one.")
        self._left -= 1
        return await self._store.open_session(timeout_ms=30_000, identity="a")


def record_of(broker: str) -> bytes:
    return b'{"brokerId":"%s","brokerServiceUrl":"pulsar://x:6650"}' % broker.encode()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks are not drawn for a terminal, which takes long."""
    with capture_logs():
        yield


@asynccontextmanager
async def electing(
    world: World,
    count: int,
    candidates: Sequence[str],
    *,
    changed: Callable[[], None] = lambda: None,
    sessions: Sessions | None = None,
) -> AsyncIterator[CoordinatorElections]:
    made = CoordinatorElections(
        world.metadata,
        ME,
        count,
        changed,
        session_timeout_ms=30_000,
        electorate=CoordinatorBrokers(lambda: candidates, sessions or Sessions(world.metadata, 9)),
    )
    try:
        await made.start()
        await asyncio.sleep(1)
        yield made
    finally:
        world.metadata.before = None
        await made.stop()


def ids(elections: CoordinatorElections) -> dict[int, str]:
    return {number: leader.broker_id for number, leader in elections.leaders.items()}


@in_virtual_time
async def test_what_is_read_takes_nothing_back_that_was_heard_of_since() -> None:
    world, go_on = World(), asyncio.Event()
    await world.metadata.put(records.leader_key(ONE), record_of("b"))
    async with electing(world, 2, ["a", "b"]) as elections:
        assert ids(elections) == {0: "a", 1: "b"}

        async def wait(what: str, key: str) -> None:
            if (what, key) == ("put", records.leader_key(ZERO)):
                await go_on.wait()

        world.metadata.before = wait
        reading = asyncio.ensure_future(elections._stand_for_all())
        await asyncio.sleep(1)
        await world.metadata.put(records.leader_key(ONE), record_of("c"))
        await asyncio.sleep(1)
        assert ids(elections) == {0: "a", 1: "c"}
        go_on.set()
        await reading
        await asyncio.sleep(60)
        assert ids(elections) == {0: "a", 1: "c"}


@in_virtual_time
async def test_a_leader_that_was_found_and_has_gone_since_is_not_taken_for_one() -> None:
    world, key, go_on = World(), records.leader_key(ZERO), asyncio.Event()
    get, overtaken = world.metadata.get, list[object]()

    async def slow(asked: str, **given: object) -> Record | None:
        found = await get(asked, **given)
        if asked == key and not overtaken:
            overtaken.append(found)
            await go_on.wait()
        return found

    async def be_first(what: str, asked: str) -> None:
        if (what, asked) == ("put", key):
            world.metadata.before = None
            await world.metadata.put(key, record_of("b"))

    world.metadata.get = slow  # type: ignore[method-assign, assignment]
    world.metadata.before = be_first
    async with electing(world, 1, ["a"]) as elections:
        assert overtaken
        assert ids(elections) == {0: "b"}
        await world.metadata.delete(key)
        await asyncio.sleep(1)
        go_on.set()
        await asyncio.sleep(60)
        assert ids(elections) == {0: "a"}
        assert elections.led_here == [ZERO]


@in_virtual_time
async def test_coordinator_won_under_a_lost_session_is_not_led() -> None:
    world, go_on = World(), asyncio.Event()
    sessions, put = Sessions(world.metadata, 1), world.metadata.put

    async def slow(key: str, value: bytes, **given: object) -> object:
        done = await put(key, value, **given)
        if key == records.leader_key(ZERO):
            await go_on.wait()
        return done

    world.metadata.put = slow  # type: ignore[method-assign]
    async with electing(world, 1, ["a"], sessions=sessions) as elections:
        await elections._session.close()  # type: ignore[union-attr]
        await asyncio.sleep(1)
        go_on.set()
        await asyncio.sleep(60)
        assert ids(elections) == {}


@in_virtual_time
async def test_failed_change_listener_is_called_again() -> None:
    world, told, failures = World(), list[int](), list[Exception]()

    def changed() -> None:
        if failures:
            raise failures.pop()
        told.append(len(told))

    async with electing(world, 2, ["a", "b"], changed=changed) as elections:
        told.clear()
        failures.append(RuntimeError("a defect"))
        await world.metadata.put(records.leader_key(ONE), record_of("b"))
        await asyncio.sleep(5)
        assert ids(elections) == {0: "a", 1: "b"}
        assert not failures
        assert told


@in_virtual_time
async def test_broker_elected_before_its_session_is_notified_that_it_leads() -> None:
    """A record of this id was heard of in between: who leads is the same, not what is led."""
    world, go_on, told = World(), asyncio.Event(), list[list[CoordinatorId]]()

    class LateSessions(Sessions):
        async def __call__(self) -> Session:
            if self.asked:
                await go_on.wait()
            return await super().__call__()

    def changed() -> None:
        told.extend(list(one.led_here) for one in started)

    started = list[CoordinatorElections]()
    late = LateSessions(world.metadata, 2)
    async with electing(world, 1, ["a"], changed=changed, sessions=late) as elections:
        started.append(elections)
        await elections._session.close()  # type: ignore[union-attr]
        await asyncio.sleep(1)
        await world.metadata.put(records.leader_key(ZERO), _encoded(ME))
        await asyncio.sleep(1)
        assert ids(elections) == {0: "a"}
        assert not told[-1]
        go_on.set()
        await asyncio.sleep(60)
        assert elections.led_here == [ZERO]
        assert told[-1] == [ZERO]


@in_virtual_time
async def test_who_has_no_session_any_more_does_not_ask_for_ever() -> None:
    world = World()
    sessions = Sessions(world.metadata, 1)
    async with electing(world, 1, ["a"], sessions=sessions) as elections:
        assert elections.led_here == [ZERO]
        with capture_logs() as logs:
            await elections._session.close()  # type: ignore[union-attr]
            await asyncio.sleep(60)
        assert not elections.led_here
        assert sessions.asked == 2
        assert [one["event"] for one in logs if one.get("task")] == ["task_ended_for_good"]


@in_virtual_time
async def test_a_new_leader_record_changes_the_chosen_successor() -> None:
    """What was another one's to take is this one's, once that one has taken something else."""
    world, key = World(), records.leader_key
    zero, one, two, three = map(CoordinatorId, range(4))
    other = next(
        name
        for name in "bcdefgh"
        if assign_successors([zero], {two: "a", one: name}, ["a", name])[zero] == name
    )
    for number, name in ((zero, "dead"), (one, other), (three, "dead")):
        await world.metadata.put(key(number), record_of(name))
    async with electing(world, 4, ["a", other]) as elections:
        assert ids(elections) == {0: "dead", 1: other, 2: "a", 3: "dead"}
        await world.metadata.delete(key(zero))
        await asyncio.sleep(0.1 * COORDINATOR_LEFT_ALONE_S)
        assert ids(elections) == {1: other, 2: "a", 3: "dead"}
        await world.metadata.put(key(three), record_of(other))
        await asyncio.sleep(0.1 * COORDINATOR_LEFT_ALONE_S)
        assert ids(elections) == {0: "a", 1: other, 2: "a", 3: other}


@in_virtual_time
async def test_where_nobody_is_a_candidate_yet_it_takes_longer_and_nothing_is_kept() -> None:
    world, candidates = World(), list[str]()
    async with electing(world, 2, candidates) as elections:
        await asyncio.sleep(COORDINATOR_NO_CANDIDATE_S - 2)
        assert ids(elections) == {}
        await asyncio.sleep(2)
        assert ids(elections) == {0: "a", 1: "a"}
        candidates += ["a", "b"]
        elections.balance()
        await asyncio.sleep(0.1 * COORDINATOR_LEFT_ALONE_S)
        assert len(ids(elections)) == 1
