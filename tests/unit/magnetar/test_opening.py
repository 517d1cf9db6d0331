"""Openings: awaited or entered, once, and nothing left of one that fails."""

import asyncio
from types import TracebackType
from typing import Self

import pytest

from magnetar.errors import ConnectionLost, InvalidArgument
from magnetar.opening import Opening, completed


class Thing:
    """Notes what is done to it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.events: list[str] = []
        self.failure = failure
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def open(self) -> None:
        self.events.append("open")
        await self.goes_on.wait()
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.events.append("close")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.events.append(f"exit {kind.__name__ if kind else None}")


async def test_awaited_it_stays_open() -> None:
    thing = Thing()
    assert await Opening(lambda: thing) is thing
    assert thing.events == ["open"]


async def test_entered_its_end_is_its_own() -> None:
    thing = Thing()
    async with Opening(lambda: thing) as opened:
        assert opened is thing
    assert thing.events == ["open", "exit None"]
    thing = Thing()
    with pytest.raises(ZeroDivisionError):
        async with Opening(lambda: thing):
            raise ZeroDivisionError
    assert thing.events == ["open", "exit ZeroDivisionError"]


async def test_failed_opening_closes_its_object() -> None:
    thing = Thing(ConnectionLost("away"))
    with pytest.raises(ConnectionLost):
        await Opening(lambda: thing)
    assert thing.events == ["open", "close"]


async def test_opening_cancelled_twice_closes_its_object() -> None:
    thing = Thing()
    thing.goes_on.clear()
    task = asyncio.ensure_future(Opening(lambda: thing)._open())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert thing.events == ["open", "close"]


async def test_opening_awaited_twice_is_refused() -> None:
    opening = Opening(Thing)
    await opening
    with pytest.raises(InvalidArgument):
        await opening


async def test_nothing_is_made_before() -> None:
    made: list[Thing] = []

    def make() -> Thing:
        made.append(Thing())
        return made[0]

    Opening(make)
    assert not made


async def test_work_goes_on_when_its_caller_is_cancelled() -> None:
    release, done = asyncio.Event(), []

    async def work() -> int:
        await release.wait()
        done.append(True)
        return 7

    caller = asyncio.ensure_future(completed(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [True]
    assert await completed(work()) == 7
