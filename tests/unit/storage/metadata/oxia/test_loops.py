"""Loops that go on after what nobody expected, and stop when they are told to."""

import asyncio
import random
from typing import cast

import pytest
from structlog.testing import capture_logs

from magnetar.protocol.backoff import Backoff
from storage.metadata.oxia.connection import Connections
from storage.metadata.oxia.loops import Loop
from storage.metadata.oxia.shards import Shards
from tests.support.bounds import set_bound
from tests.support.waiting import until

PAUSE_S = 0.001


class Server:
    """Breaks with what it is given, then serves."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.serving = 0
        self.told: list[BaseException] = []
        self.ended = False

    async def serve(self) -> None:
        self.serving += 1
        if self.errors:
            raise self.errors.pop(0)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True

    def loop(self) -> Loop:
        return Loop("a-loop", self.serve, Backoff(PAUSE_S, PAUSE_S), self.told.append)


async def test_loop_logs_any_error_reports_it_and_goes_on() -> None:
    errors = [KeyError("a"), AssertionError("b"), asyncio.CancelledError()]
    server = Server(*errors)
    with capture_logs() as logs:
        loop = server.loop()
        await until(lambda: server.serving == 4)
    assert server.told == errors
    assert [each["exc_info"] for each in logs if each["event"] == "oxia_defect"] == errors
    assert {each["where"] for each in logs} == {"a-loop"}
    await loop.stop()
    assert server.ended


async def test_an_owner_that_breaks_too_does_not_end_it() -> None:
    server = Server(KeyError("a"))

    def broken(error: BaseException) -> None:
        raise error

    loop = Loop("a-loop", server.serve, Backoff(PAUSE_S, PAUSE_S), broken)
    await until(lambda: server.serving == 2)
    await loop.stop()


def test_pauses_double_up_to_a_bound_with_some_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "OXIA_BACKOFF_MIN_S", 0.001)
    set_bound(monkeypatch, "OXIA_BACKOFF_MAX_S", 0.004)
    shards = Shards(["one:1"], "a-namespace", cast("Connections", None), random.Random(1))
    backoff, luck = shards.backoff(), random.Random(1)
    for exact_s in (0.001, 0.002, 0.004, 0.004):
        assert backoff.pause_s() == exact_s * luck.uniform(0.8, 1.2)


async def test_loop_ends_even_if_its_stop_is_cancelled() -> None:
    server = Server()
    loop = server.loop()
    await until(lambda: server.serving == 1)
    stopping = asyncio.create_task(loop.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await until(lambda: server.ended)
