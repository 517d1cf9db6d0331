"""Attachments: coming back, giving up, and leaving nothing behind; on virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import cast

import pytest

from magnetar.bounds import LAYOUT_WAIT_S, LEAVE_S, RETRY_FIRST_S, RETRY_LIMIT_S
from magnetar.context import ClientContext
from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    MagnetarError,
    OperationTimedOut,
    ProducerBusy,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.protocol.server_error import InternalError
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection
from magnetar.wire.pool import ConnectionPool
from tests.support.waiting import until
from tests.unit.magnetar.wire.virtual_time import run


class FakeConnection:
    """Counts who is detached."""

    def __init__(self) -> None:
        self.is_lost = False
        self.detached: list[object] = []

    def detach_all(self, handler: object) -> None:
        self.detached.append(handler)


Step = Callable[["Thing"], Awaitable[None]]


async def works(thing: "Thing") -> None:
    await asyncio.sleep(0)


async def hangs(thing: "Thing") -> None:
    await asyncio.Event().wait()


def raises(error: Exception) -> Step:
    async def step(thing: "Thing") -> None:
        raise error

    return step


class Thing(Attachment):
    """Does its steps one after the other, the last one for ever."""

    def __init__(self, *steps: Step, leave: Step = works) -> None:
        context = ClientContext(cast("ConnectionPool", None), rng=random.Random(1))
        super().__init__(context)
        self.steps = list(steps)
        self.leave_step = leave
        self.events: list[tuple[str, float]] = []
        self.fake = FakeConnection()

    def note(self, event: str) -> None:
        self.events.append((event, self.context.loop.time()))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    async def find(self) -> Connection:
        return cast("Connection", self.fake)

    async def attach(self, connection: Connection) -> None:
        self.note("try")
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        await step(self)

    def attached(self) -> None:
        self.note("attached")

    def detached(self, error: MagnetarError) -> None:
        self.note("detached")

    def failed(self, error: MagnetarError) -> None:
        self.note("failed")

    async def leave(self, connection: Connection) -> None:
        self.note("leave")
        await self.leave_step(self)

    async def until(self, state: AttachmentState) -> None:
        await until(lambda: self.state is state, 3600)


LOST = ConnectionLost("lost")


def test_opens_and_closes() -> None:
    async def main() -> None:
        thing = Thing(works)
        await thing.open(1)
        assert thing.state is AttachmentState.ATTACHED
        assert thing.connection is cast("Connection", thing.fake)
        await thing.close()
        await thing.close()
        assert thing.names == ["try", "attached", "leave"]
        assert thing.connection is None
        assert thing.fake.detached == [thing]

    run(main())


def test_attachment_retries_with_longer_pauses_while_not_ready() -> None:
    async def main() -> None:
        thing = Thing(*[raises(ServiceNotReady("soon"))] * 4, works)
        await thing.open(60)
        times = [when for name, when in thing.events if name == "try"]
        pauses = [later - earlier for earlier, later in pairwise(times)]
        for number, pause in enumerate(pauses):
            whole = RETRY_FIRST_S * 2**number
            assert 0.8 * whole <= pause <= whole
        await thing.close()

    run(main())


def test_permanently_refused_attachment_fails_at_once() -> None:
    async def main() -> None:
        thing = Thing(raises(TopicNotFound("none")))
        with pytest.raises(TopicNotFound):
            await thing.open(60)
        assert thing.state is AttachmentState.FAILED
        assert thing.names == ["try", "failed"]
        await thing.close()
        assert thing.names == ["try", "failed"]

    run(main())


@pytest.mark.parametrize("step", [hangs, raises(ServiceNotReady("soon"))])
def test_the_first_time_has_a_limit(step: Step) -> None:
    async def main() -> None:
        thing = Thing(step)
        with pytest.raises(OperationTimedOut, match="5 s"):
            await thing.open(5)
        assert thing.context.loop.time() == pytest.approx(5)
        assert thing.state is AttachmentState.CLOSED

    run(main())


def test_a_loss_is_mended_however_long_it_takes() -> None:
    async def main() -> None:
        thing = Thing(works, *[raises(ConnectionLost("away"))] * 30, works)
        await thing.open(5)
        thing.connection_lost(LOST)
        assert thing.state is AttachmentState.WAITING
        assert thing.connection is None
        await thing.until(AttachmentState.ATTACHED)
        assert thing.context.loop.time() > 15 * RETRY_LIMIT_S
        assert thing.names.count("try") == 32
        assert [name for name in thing.names if name not in ("try", "leave")] == [
            *("attached", "detached", "attached")
        ]
        await thing.close()

    run(main())


def test_after_a_success_pauses_are_short_again() -> None:
    async def main() -> None:
        lost = raises(ConnectionLost("away"))
        thing = Thing(works, lost, lost, lost, works)
        await thing.open(5)
        thing.connection_lost(LOST)
        await thing.until(AttachmentState.ATTACHED)
        thing.connection_lost(LOST)
        before = thing.context.loop.time()
        await thing.until(AttachmentState.ATTACHED)
        assert thing.context.loop.time() - before <= RETRY_FIRST_S + 0.01
        await thing.close()

    run(main())


def test_again_takes_back_what_the_broker_may_have() -> None:
    async def main() -> None:
        thing = Thing(works)
        await thing.open(5)
        thing.again(ServiceNotReady("moved"))
        thing.again(ServiceNotReady("moved twice"))
        assert thing.fake.detached == [thing]
        await thing.until(AttachmentState.ATTACHED)
        assert thing.names == ["try", "attached", "detached", "leave", "try", "attached"]
        await thing.close()

    run(main())


def test_again_for_good_fails_it() -> None:
    async def main() -> None:
        thing = Thing(works)
        await thing.open(5)
        thing.again(ProducerBusy("taken"))
        assert thing.state is AttachmentState.FAILED
        assert thing.names == ["try", "attached", "failed"]
        await thing.close()
        assert thing.names == ["try", "attached", "failed", "leave"]

    run(main())


def test_close_during_an_attempt_starts_another_attempt() -> None:
    async def undone(thing: Thing) -> None:
        thing.again(ServiceNotReady("closed again"))

    async def main() -> None:
        thing = Thing(undone, works)
        await thing.open(5)
        assert thing.names == ["try", "leave", "try", "attached"]
        await thing.close()

    run(main())


def test_a_connection_lost_in_the_middle_is_not_missed() -> None:
    async def lost(thing: Thing) -> None:
        thing.fake.is_lost = True

    async def found(thing: Thing) -> None:
        thing.fake.is_lost = False

    async def main() -> None:
        thing = Thing(lost, found)
        await thing.open(5)
        assert thing.names == ["try", "try", "attached"]
        await thing.close()

    run(main())


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_opening_leaves_nothing(steps: int) -> None:
    async def three_turns(thing: Thing) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        thing.note("made")

    async def main() -> None:
        thing = Thing(three_turns)
        opening = asyncio.ensure_future(thing.open(5))
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        try:
            await opening
        except asyncio.CancelledError:
            if "try" in thing.names:
                assert thing.names[-1] == "leave"
        await thing.close()
        assert thing.names.count("leave") == thing.names.count("try")
        assert thing.state is AttachmentState.CLOSED

    run(main())


def test_a_cancelled_close_goes_on() -> None:
    async def slow(thing: Thing) -> None:
        await asyncio.sleep(1)
        thing.note("left")

    async def main() -> None:
        thing = Thing(works, leave=slow)
        await thing.open(5)
        closing = asyncio.ensure_future(thing.close())
        await asyncio.sleep(0.5)
        closing.cancel()
        await asyncio.sleep(0.1)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert thing.names[-1] == "left"

    run(main())


def test_close_does_not_wait_long_for_the_broker() -> None:
    async def main() -> None:
        thing = Thing(works, leave=hangs)
        await thing.open(5)
        await thing.close()
        assert thing.context.loop.time() == pytest.approx(LEAVE_S)

    run(main())


def test_close_fails_an_opening_in_progress() -> None:
    async def main() -> None:
        thing = Thing(hangs)
        opening = asyncio.ensure_future(thing.open(5))
        await asyncio.sleep(1)
        await thing.close()
        with pytest.raises(AlreadyClosed):
            await opening
        thing.again(LOST)
        assert thing.state is AttachmentState.CLOSED

    run(main())


def test_pause_between_retries_can_be_ended_early() -> None:
    async def main() -> None:
        lost = raises(ConnectionLost("away"))
        thing = Thing(works, *[lost] * 8, works)
        await thing.open(5)
        thing.connection_lost(LOST)
        await until(lambda: thing.names.count("try") == 9)
        before = thing.context.loop.time()
        thing.hurry()
        await thing.until(AttachmentState.ATTACHED)
        assert thing.context.loop.time() - before < RETRY_FIRST_S
        await thing.close()

    run(main())


def test_a_layout_is_awaited_longer_than_a_watch_may_pause() -> None:
    assert LAYOUT_WAIT_S > RETRY_LIMIT_S


def test_a_defect_is_raised_as_one() -> None:
    async def main() -> None:
        thing = Thing(raises(ZeroDivisionError("oops")))
        with pytest.raises(InternalError, match="oops"):
            await thing.open(5)
        await thing.close()

    run(main())


def test_a_defect_once_attached_fails_it_too() -> None:
    class Defect(Thing):
        def attached(self) -> None:
            super().attached()
            if self.names.count("attached") == 2:
                raise ZeroDivisionError("oops")

    async def main() -> None:
        thing = Defect(works)
        await thing.open(5)
        thing.connection_lost(LOST)
        await thing.until(AttachmentState.FAILED)
        assert isinstance(thing.error, InternalError)
        assert thing.connection is None
        await thing.close()
        assert thing.names[-2:] == ["failed", "leave"]

    run(main())


def test_attachment_cannot_be_opened_twice() -> None:
    async def main() -> None:
        thing = Thing(works)
        await thing.open(5)
        with pytest.raises(AlreadyClosed):
            await thing.open(5)
        await thing.close()

    run(main())


def test_pauses_stay_below_their_limit() -> None:
    context = ClientContext(cast("ConnectionPool", None), rng=random.Random(1))
    backoff = context.backoff(10)
    pauses = [backoff.pause_s() for _ in range(50)]
    assert 0.08 <= pauses[0] <= 0.1
    assert max(pauses) <= 10
    assert min(pauses[7:]) >= 8
    assert len(set(pauses)) == 50
    backoff.reset()
    assert backoff.pause_s() <= 0.1
