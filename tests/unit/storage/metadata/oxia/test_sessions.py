"""Beats of a session: their pauses, and how a session ends."""

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.operations import BeginSession
from storage.metadata.oxia.sessions import OxiaSession, OxiaSessions, beat_s
from tests.support.waiting import TIMEOUT_S, until


@pytest.mark.parametrize(("timeout_s", "pause_s"), [(2, 2 / 3), (15, 2), (30, 3), (300, 30)])
def test_beats(timeout_s: float, pause_s: float) -> None:
    assert beat_s(timeout_s) == pytest.approx(pause_s)


@given(st.floats(2, 300))
def test_three_beats_fit_a_timeout(timeout_s: float) -> None:
    assert 0 < beat_s(timeout_s) * 3 <= timeout_s * 1.0001


class Servers:
    """Every shard's leader, as a session sees it: beats are answered when the test lets them."""

    def __init__(self) -> None:
        self.shards = self
        self.beats = 0
        self.answer = asyncio.Event()
        self.answer.set()
        self.fault: Exception | None = None
        self.removed: list[OxiaSession] = []

    def peer(self, _shard_id: int) -> "Servers":
        return self

    async def keep_alive(self, _shard_id: int, _session_id: int, _timeout_s: float) -> None:
        self.beats += 1
        await self.answer.wait()
        if self.fault is not None:
            raise self.fault

    async def remove(self, session: OxiaSession) -> None:
        self.removed.append(session)

    async def until_beats(self, count: int) -> None:
        await until(lambda: self.beats >= count)


def session_on(servers: Servers, *shards: int, timeout_ms: int) -> OxiaSession:
    begin = BeginSession(identity="me", timeout_ms=timeout_ms, now_ms=0)
    now_s = asyncio.get_running_loop().time()
    ids = {shard_id: 10 + shard_id for shard_id in shards}
    return OxiaSession(cast("OxiaSessions", servers), begin, ids, now_s)


async def test_a_beat_that_was_on_its_way_to_a_shard_that_went_is_not_remembered() -> None:
    servers = Servers()
    session = session_on(servers, 0, 1, timeout_ms=300)
    servers.answer.clear()
    await servers.until_beats(2)
    del session.ids[1], session.beaten_s[1]
    servers.answer.set()
    await servers.until_beats(5)
    assert session.beaten_s.keys() == {0}
    assert not session.lost
    await session.close()


async def test_defect_in_heartbeats_ends_the_session() -> None:
    servers = Servers()
    servers.fault = RuntimeError("a defect")
    session = session_on(servers, 0, timeout_ms=60)
    async with asyncio.timeout(TIMEOUT_S):
        await session.wait_lost()
        while not servers.removed:
            await asyncio.sleep(0.001)
    assert servers.removed == [session]
