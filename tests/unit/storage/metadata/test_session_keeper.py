"""Keeping sessions alive, on a loop whose time the test owns."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from storage.metadata.sessions import BEATS_PER_TIMEOUT, RETRY_S, SessionKeeper
from storage.metadata.store import MetadataError
from tests.support.waiting import TIMEOUT_S


class Timer:
    def __init__(self, due: float, call: Callable[[], object]) -> None:
        self.due = due
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualLoop:
    """`time` and `call_later` of a loop; `advance` is the passing of time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[..., object], *args: object) -> Timer:
        timer = Timer(self.now + delay, lambda: call(*args))
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Run what falls due, each at its time."""
        end = self.now + seconds
        while due := [each for each in self.timers if not each.cancelled and each.due <= end]:
            timer = min(due, key=lambda each: each.due)
            self.timers.remove(timer)
            self.now = max(self.now, timer.due)
            timer.call()
        self.now = end

    def freeze(self, seconds: float) -> None:
        """Time passes and nothing runs; then everything does."""
        self.now += seconds
        self.advance(0)


class Store:
    """Counts removals; fails while `broken`."""

    def __init__(self) -> None:
        self.broken = False
        self.ended: list[tuple[int, ...]] = []
        self.tries = 0

    def end(self, session_ids: tuple[int, ...]) -> "asyncio.Future[bool]":
        self.tries += 1
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.broken:
            done.set_exception(MetadataError("The disk is full: free space."))
        else:
            self.ended.append(session_ids)
            done.set_result(True)
        return done


@pytest.fixture
def loop() -> ManualLoop:
    return ManualLoop()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def keeper(loop: ManualLoop, store: Store) -> SessionKeeper:
    return SessionKeeper(cast(asyncio.AbstractEventLoop, loop), store.end)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_session_lives_as_long_as_the_loop_runs(
    loop: ManualLoop, store: Store, keeper: SessionKeeper
) -> None:
    session = keeper.keep(7, 9000)
    loop.advance(3600)
    assert not session.lost
    assert store.tries == 0


async def test_a_short_freeze_is_survived(loop: ManualLoop, keeper: SessionKeeper) -> None:
    session = keeper.keep(7, 9000)
    for _ in range(5):
        loop.advance(1)
        loop.freeze(7.9)
    assert not session.lost


async def test_a_freeze_of_the_timeout_loses_the_session(
    loop: ManualLoop, store: Store, keeper: SessionKeeper
) -> None:
    session, patient = keeper.keep(7, 9000), keeper.keep(8, 60_000)
    waiting = asyncio.ensure_future(session.wait_lost())
    loop.advance(9 / BEATS_PER_TIMEOUT)
    loop.freeze(9.1)
    assert session.lost
    assert not patient.lost
    await asyncio.wait_for(waiting, TIMEOUT_S)
    assert store.ended == [(7,)]
    loop.advance(3600)
    await settle()
    assert store.tries == 1


async def test_a_removal_that_fails_is_tried_until_it_works(
    loop: ManualLoop, store: Store, keeper: SessionKeeper
) -> None:
    session = keeper.keep(7, 9000)
    store.broken = True
    with pytest.raises(MetadataError):
        await session.close()
    assert session.lost
    await settle()
    for _ in range(3):
        loop.advance(RETRY_S)
        await settle()
    assert store.tries == 4
    store.broken = False
    loop.advance(RETRY_S)
    await settle()
    assert store.ended == [(7,)]
    loop.advance(3600)
    await session.close()
    assert store.tries == 5


async def test_closing_twice_removes_once(store: Store, keeper: SessionKeeper) -> None:
    session = keeper.keep(7, 9000)
    await asyncio.gather(session.close(), session.close())
    await session.close()
    assert store.ended == [(7,)]


async def test_all_sessions_end_in_one_commit(
    loop: ManualLoop, store: Store, keeper: SessionKeeper
) -> None:
    sessions = [keeper.keep(number, 9000) for number in (7, 8, 9)]
    store.broken = True
    with pytest.raises(MetadataError):
        await sessions[0].close()
    store.broken = False
    await settle()
    await keeper.close()
    assert all(session.lost for session in sessions)
    assert store.ended == [(7, 8, 9)]
    loop.advance(3600)
    assert store.tries == 2
