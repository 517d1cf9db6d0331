"""Requests are answered once each, also by a library that ends, or does not end, as it likes."""

import asyncio
import struct
import threading
from collections.abc import Iterator

import pytest
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.connection import STOP_CONNECTING
from kazoo.protocol.states import KeeperState
from structlog.testing import capture_logs

from config import bounds
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import Connection, ZooKeeperClient, _PendingAnswer
from storage.metadata.zookeeper.requests import Answer, Failure, Request
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S, until


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def fresh_client() -> ZooKeeperClient:
    return ZooKeeperClient(
        "127.0.0.1:1",
        session_timeout_ms=1000,
        on_state=lambda _: None,
        on_change=lambda _: None,
    )


async def test_a_library_that_does_not_end_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_CLOSE_S", 0.05)
    set_bound(monkeypatch, "ZOOKEEPER_WINDOW", 1)
    client = fresh_client()
    taken = []
    monkeypatch.setattr(client._library, "_call", lambda _, awaited: taken.append(awaited))
    monkeypatch.setattr(client._library, "stop", gate.wait)
    answers: list[Answer] = []
    for _ in range(2):
        client.submit(requests.sync("/"), answers.append)
    async with asyncio.timeout(TIMEOUT_S):
        await client.close()
        client.submit(requests.sync("/"), answers.append)
        while len(answers) < 3:
            await asyncio.sleep(0)
    assert {each.failure for each in answers} == {Failure.SESSION_EXPIRED}
    taken[0].set(None)
    client._deliver()
    assert len(taken) == 1
    assert len(answers) == 3


async def test_more_than_may_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_WINDOW", 1)
    set_bound(monkeypatch, "METADATA_QUEUE_OPERATIONS", 2)
    client = fresh_client()
    taken = []
    monkeypatch.setattr(client._library, "_call", lambda _, awaited: taken.append(awaited))
    answers: list[Answer] = []
    for _ in range(4):
        client.submit(requests.sync("/"), answers.append)
    async with asyncio.timeout(TIMEOUT_S):
        while not answers:
            await asyncio.sleep(0)
        assert [each.failure for each in answers] == [Failure.OTHER]
        for number in range(3):
            taken[number].set(True)
            client._deliver()
    assert [each.failure for each in answers[1:]] == [None] * 3
    await client.close()


async def test_a_server_that_accepts_and_does_not_answer_is_tried_again_within_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_CONNECT_S", 3.5)
    accepted: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        await reader.read(1024)
        if len(accepted) > 1:
            answer = struct.pack(">iiqi16s?", 0, 4000, 7, 16, bytes(16), False)
            writer.write(struct.pack(">i", len(answer)) + answer)
            await reader.read(1024)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = ZooKeeperClient(
        f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
        session_timeout_ms=4000,
        on_state=lambda _: None,
        on_change=lambda _: None,
    )
    try:
        await client.connect()
        assert (len(accepted), client.session_id) == (2, 7)
    finally:
        await client.close()
        server.close()


class Broken:
    """The library's way to connect, run on its thread: the first attempts break that thread."""

    def __init__(self, client: ZooKeeperClient, *, breaks: int) -> None:
        self.tries = 0
        self.held = threading.Event()
        self._library = client._library
        self._breaks = breaks

    def __call__(self, _retry: object) -> object:
        self.tries += 1
        self._library._session_callback(KeeperState.CONNECTING)
        if self.tries <= self._breaks:
            raise RuntimeError("defect")
        self._library._session_callback(KeeperState.CONNECTED)
        assert self.held.wait(TIMEOUT_S)
        return STOP_CONNECTING


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_RECONNECT_MIN_S", 0.01)
    set_bound(monkeypatch, "ZOOKEEPER_RECONNECT_MAX_S", 0.02)


@pytest.mark.usefixtures("short_pauses")
async def test_a_library_whose_thread_breaks_is_begun_again_until_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = fresh_client()
    broken = Broken(client, breaks=3)
    monkeypatch.setattr(client._library._connection, "_connect_loop", broken)
    with capture_logs() as logs:
        async with asyncio.timeout(TIMEOUT_S):
            await client.connect()
    assert broken.tries == 4
    assert [str(each.get("exc_info")) for each in logs] == ["defect"] * 3
    broken.held.set()
    await until(lambda: broken.tries > 4)
    await client.close()
    begun = client._restart
    assert begun is None or begun.cancelled()
    client._library_ended(None)
    assert client._restart is begun


@pytest.mark.usefixtures("short_pauses")
async def test_a_library_that_does_not_start_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = fresh_client()
    broken = Broken(client, breaks=1)
    monkeypatch.setattr(client._library._connection, "_connect_loop", broken)
    begin = client._library.start_async
    begun = 0

    def start() -> object:
        nonlocal begun
        begun += 1
        if begun in (2, 3):
            raise RuntimeError("defect")
        return begin()

    monkeypatch.setattr(client._library, "start_async", start)
    await client.connect()
    assert begun == 4
    broken.held.set()
    await client.close()


@pytest.mark.usefixtures("short_pauses")
async def test_request_dropped_by_a_broken_thread_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = fresh_client()
    broken = Broken(client, breaks=0)
    monkeypatch.setattr(client._library._connection, "_connect_loop", broken)
    await client.connect()
    monkeypatch.setattr(client._library, "_call", lambda *_: None)
    answers: list[Answer] = []
    client.submit(requests.sync("/"), answers.append)
    broken.held.set()
    await until(lambda: bool(answers))
    assert answers[0].failure is Failure.SESSION_EXPIRED
    await client.close()
    assert len(answers) == 1


async def test_request_dropped_in_an_expired_session_is_answered_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_WINDOW", 2)
    client = fresh_client()
    library = client._library
    taken = []
    monkeypatch.setattr(library, "_call", lambda _, awaited: taken.append(awaited))
    answers: list[tuple[str, Failure | None]] = []

    def submit(name: str) -> None:
        client.submit(requests.sync("/"), lambda each: answers.append((name, each.failure)))

    def tell(*states: str) -> None:
        for state in states:
            library._session_callback(state)
        client._deliver()

    tell(KeeperState.CONNECTING, KeeperState.CONNECTED)
    submit("first")
    submit("second")
    submit("waiting")
    tell(KeeperState.CONNECTING, KeeperState.CONNECTED)
    await asyncio.sleep(0)
    assert answers == []
    tell(KeeperState.EXPIRED_SESSION)
    taken[1].set_exception(ConnectionLoss())
    client._deliver()
    assert answers == [("second", Failure.CONNECTION_LOSS)]
    tell(KeeperState.CONNECTING, KeeperState.CONNECTED)
    client._deliver()
    assert answers[1:] == [("first", Failure.SESSION_EXPIRED)]
    tell(KeeperState.CONNECTING, KeeperState.CONNECTED)
    client._deliver()
    assert len(answers) == 2
    taken[0].set(True)
    taken[2].set(True)
    client._deliver()
    assert answers[2:] == [("waiting", None)]
    await client.close()


async def test_an_answer_that_cannot_be_read_is_answered_with_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = fresh_client()
    taken = []
    monkeypatch.setattr(client._library, "_call", lambda _, awaited: taken.append(awaited))
    answers: list[Answer] = []
    client.submit(requests.sync("/"), answers.append)
    taken[0].set(("of another shape",))
    client._deliver()
    assert [each.failure for each in answers] == [Failure.OTHER]
    await client.close()


async def test_a_request_that_cannot_be_handed_over_takes_no_answer_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_WINDOW", 1)
    client = fresh_client()
    taken: list[_PendingAnswer] = []

    def take(_: Request, awaited: _PendingAnswer) -> None:
        if taken:
            raise RuntimeError("defect")
        taken.append(awaited)

    monkeypatch.setattr(client._library, "_call", take)
    answers: list[Failure | None] = []
    for _ in range(2):
        client.submit(requests.sync("/"), lambda each: answers.append(each.failure))
    taken[0].set(True)
    client._deliver()
    client._deliver()
    assert answers == [None, Failure.OTHER]
    await client.close()


async def test_bodies_are_made_before_the_library_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = fresh_client()
    taken = []
    monkeypatch.setattr(client._library, "_call", lambda request, _: taken.append(request))
    answers: list[Answer] = []
    sent = requests.sync("/a")
    client.submit(sent, lambda _: None)
    body = sent.serialize()
    monkeypatch.setattr(type(sent), "serialize", None)
    client.submit(requests.sync("/b"), answers.append)
    await asyncio.sleep(0)
    assert [each.serialize() for each in taken] == [body]
    assert taken[0].type == sent.type  # type: ignore[attr-defined]
    assert [each.failure for each in answers] == [Failure.OTHER]
    await client.close()


async def test_pauses_grow_until_a_connection_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fresh_client()
    now = 100.0
    monkeypatch.setattr(client._loop, "time", lambda: now)
    pauses = []

    def connect_and_end(lasted_s: float) -> None:
        nonlocal now
        client._take_state(Connection.CONNECTED)
        now += lasted_s
        client._take_state(Connection.LOST)
        client._library_ended(None)
        assert client._restart is not None
        pauses.append(client._restart.when() - now)
        client._restart.cancel()
        client._restart = None

    for lasted_s in (0, 0, 0, 2 * bounds.ZOOKEEPER_RECONNECT_MAX_S, 0):
        connect_and_end(lasted_s)
    first = bounds.ZOOKEEPER_RECONNECT_MIN_S
    assert pauses == pytest.approx([first, 2 * first, 4 * first, first, 2 * first])
    monkeypatch.undo()
    await client.close()
