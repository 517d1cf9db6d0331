"""When a session is told to be lost: never later than the server may have ended it."""

import asyncio
import time
from collections.abc import AsyncIterator
from random import Random

import pytest

from storage.metadata.store import MetadataError
from storage.metadata.zookeeper import sessions
from storage.metadata.zookeeper.client import Connection, RequestFailed
from storage.metadata.zookeeper.layout import Layout
from storage.metadata.zookeeper.requests import Answer, Done, Failure, Request, Value
from storage.metadata.zookeeper.sessions import ZooKeeperSession
from tests.support.waiting import TIMEOUT_S

TIMEOUT_MS = 90


class FakeConnection:
    """A server that answers as long as it is told to."""

    def __init__(self, *_: object, **__: object) -> None:
        self.negotiated_ms = TIMEOUT_MS
        self.session_id = 7
        self.beats = 0
        self.failure: Failure | None = None
        self.silent = False
        self.closed = 0

    async def connect(self) -> None:
        return None

    async def call(self, _request: Request) -> Value:
        if self.failure is not None:
            raise RequestFailed(self.failure)
        return True

    def submit(self, _request: Request, done: Done) -> None:
        self.beats += 1
        if not self.silent:
            asyncio.get_running_loop().call_soon(done, Answer(None, self.failure, 0))

    async def close(self) -> None:
        self.closed += 1


class Watcher:
    """What the store hears of its sessions."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def settled(self) -> None:
        self.heard.append("settled")

    async def ended(self, _session: ZooKeeperSession) -> None:
        self.heard.append("ended")

    def changed(self) -> None:
        return None


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
async def session(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ZooKeeperSession]:
    monkeypatch.setattr(sessions, "ZooKeeperClient", FakeConnection)
    made = ZooKeeperSession(
        "",
        Layout(""),
        timeout_ms=1000,
        access=None,
        settled=watcher.settled,
        ended=watcher.ended,
        changed=watcher.changed,
    )
    yield made
    await made.close()


def connection(session: ZooKeeperSession) -> FakeConnection:
    found = session.client
    assert isinstance(found, FakeConnection)
    return found


async def until_lost(session: ZooKeeperSession) -> None:
    await asyncio.wait_for(session.wait_lost(), TIMEOUT_S)


async def test_session_lives_as_long_as_the_server_answers(session: ZooKeeperSession) -> None:
    connection(session).negotiated_ms = 600
    await session.open("me", Random(1))
    while connection(session).beats < 5:
        await asyncio.sleep(0.005)
    assert not session.lost


@pytest.mark.parametrize("how", ["silent", "failing"])
async def test_session_is_lost_after_the_timeout_without_answers(
    session: ZooKeeperSession, how: str
) -> None:
    begun_at = time.monotonic()
    await session.open("me", Random(1))
    connection(session).silent = how == "silent"
    connection(session).failure = Failure.CONNECTION_LOSS
    await until_lost(session)
    assert time.monotonic() - begun_at >= TIMEOUT_MS / 1000
    await session.close()
    assert connection(session).closed == 1


async def test_a_frozen_process_finds_so_at_once(session: ZooKeeperSession) -> None:
    await session.open("me", Random(1))
    beats = connection(session).beats
    time.sleep(TIMEOUT_MS * 1.2 / 1000)
    await until_lost(session)
    assert connection(session).beats == beats


async def test_the_server_expires_it(session: ZooKeeperSession, watcher: Watcher) -> None:
    await session.open("me", Random(1))
    session._state_changed(Connection.SUSPENDED)
    assert not session.lost
    session._state_changed(Connection.LOST)
    assert session.lost
    await session.close()
    assert watcher.heard == ["ended"]


async def test_closing_waits_for_what_was_asked_before(
    session: ZooKeeperSession, watcher: Watcher
) -> None:
    await session.open("me", Random(1))
    await asyncio.gather(session.close(), session.close())
    assert session.lost
    assert watcher.heard[0] == "settled"
    assert watcher.heard.count("ended") == 1
    assert connection(session).closed == 1


async def test_a_close_that_is_cancelled_ends_it_all_the_same(
    session: ZooKeeperSession, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.Event()

    async def settled() -> None:
        waiting.set()
        await asyncio.Event().wait()

    connection(session).negotiated_ms = 60_000
    await session.open("me", Random(1))
    monkeypatch.setattr(session, "_settled", settled)
    closing = asyncio.ensure_future(session.close())
    await waiting.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    monkeypatch.undo()
    assert session.lost
    await session.close()
    assert watcher.heard == ["ended"]
    assert connection(session).closed == 1


async def test_a_connection_that_cannot_be_closed(
    session: ZooKeeperSession, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.open("me", Random(1))

    async def broken() -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(connection(session), "close", broken)
    await session.close()
    assert session.lost
    assert watcher.heard == ["settled", "ended"]


async def test_a_session_that_is_not_taken(session: ZooKeeperSession) -> None:
    connection(session).failure = Failure.NO_AUTH
    with pytest.raises(MetadataError):
        await session.open("me", Random(1))
    assert session.lost
    assert connection(session).closed == 1
