"""Where a metadata service URI says that ledgers are, and the list of bookies there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from random import Random

import pytest

from storage.ledger.bookkeeper import metadata_zookeeper
from storage.ledger.bookkeeper.metadata_zookeeper import (
    LedgerRoot,
    ZooKeeperLedgerMetadata,
    parse_metadata_service_uri,
)
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.address import InvalidZooKeeperAddress
from storage.metadata.zookeeper.client import ChangeKind, Connection, NodeChange, RequestFailed
from storage.metadata.zookeeper.requests import Answer, Done, Failure, Request, Value
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.storage.metadata.zookeeper.fake_zookeeper import FakeTree, _Refused

AVAILABLE = "/ledgers/available"
WATCHED = {AVAILABLE, "/bookies"}


@pytest.mark.parametrize(
    ("uri", "servers", "path"),
    [
        ("zk+hierarchical://a:1;b:2/ledgers", "a:1,b:2", "/ledgers"),
        ("zk+hierarchical://a,b:2/x/ledgers", "a:2181,b:2", "/x/ledgers"),
        ("zk+null://a:1/ledgers/", "a:1", "/ledgers"),
        ("metadata-store:zk:a:1,b:2", "a:1,b:2", "/ledgers"),
        ("metadata-store:zk:a:1/chroot/below", "a:1", "/chroot/below/ledgers"),
    ],
)
def test_both_forms(uri: str, servers: str, path: str) -> None:
    assert parse_metadata_service_uri(uri) == LedgerRoot(servers, path)


@pytest.mark.parametrize(
    "uri",
    ["", "zk+hierarchical://a:1", "zk+flat://a:1/ledgers", "metadata-store:oxia://a:1", "zk:a:1/x"],
)
def test_others_are_refused(uri: str) -> None:
    with pytest.raises(InvalidZooKeeperAddress):
        parse_metadata_service_uri(uri)


# The list of bookies


class Client:
    """`ZooKeeperClient` for one owner: `refusals` watches are not had, `faults` are raised."""

    def __init__(
        self,
        _servers: str,
        *,
        on_state: Callable[[Connection], None],
        on_change: Callable[[NodeChange], None],
        **_: object,
    ) -> None:
        self.tree = FakeTree()
        self.tree.make(["/ledgers", AVAILABLE])
        self.watched: set[str] = set()
        self.refusals = 0
        self.faults: list[Exception] = []
        self.hanging: asyncio.Event | None = None
        self.asked = asyncio.Event()
        self.closed = False
        self.on_state = on_state
        self.on_change = on_change

    async def connect(self) -> None:
        pass

    def submit(self, request: Request, done: Done) -> None:
        value, failure = self._answer(request)
        asyncio.get_running_loop().call_soon(done, Answer(value, failure, 0))

    async def call_again(self, request: Request) -> tuple[Value, bool]:
        if self.faults:
            raise self.faults.pop()
        while self.hanging is not None and not self.hanging.is_set():
            self.asked.set()
            with suppress(asyncio.CancelledError):
                await self.hanging.wait()
        value, failure = self._answer(request)
        if failure is not None:
            raise RequestFailed(failure)
        return value, False

    def _answer(self, request: Request) -> tuple[Value, Failure | None]:
        if isinstance(request, requests._AddWatch):
            if self.refusals:
                self.refusals -= 1
                return None, Failure.NO_AUTH
            self.watched.add(request._path)
            return True, None
        try:
            return self.tree.apply(request, 0), None
        except _Refused as error:
            return None, error.failure

    def register(self, bookie: str) -> None:
        path = f"{AVAILABLE}/{bookie}"
        self.tree.make([path])
        if AVAILABLE in self.watched:
            self.on_change(NodeChange(ChangeKind.CREATED, path))

    async def close(self) -> None:
        self.closed = True


def has(metadata: ZooKeeperLedgerMetadata, bookie: str) -> Callable[[], bool]:
    return lambda: bookie in metadata.bookies.writable


@pytest.fixture
async def started(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[ZooKeeperLedgerMetadata, Client]]:
    monkeypatch.setattr(metadata_zookeeper, "ZooKeeperClient", Client)
    set_bound(monkeypatch, "ZOOKEEPER_RECONNECT_MAX_S", 0.001)
    set_bound(monkeypatch, "RESTART_PAUSE_MIN_S", 0.001, in_module="magnetar.background_tasks")
    metadata = ZooKeeperLedgerMetadata(LedgerRoot("127.0.0.1:1", "/ledgers"), Random(1))
    client = metadata._zookeeper
    assert isinstance(client, Client)
    await metadata.start()
    await until(lambda: client.watched == WATCHED)
    yield metadata, client
    await metadata.close()


Started = tuple[ZooKeeperLedgerMetadata, Client]


async def test_a_watch_that_was_refused_is_asked_for_again(started: Started) -> None:
    """After a reconnection; nothing that was missed meanwhile stays unknown."""
    metadata, client = started
    client.watched.clear()
    client.refusals = 3
    client.on_state(Connection.CONNECTED)
    client.register("127.0.0.1:1")
    await until(lambda: client.watched == WATCHED)
    await until(has(metadata, "127.0.0.1:1"))
    client.register("127.0.0.1:2")
    await until(has(metadata, "127.0.0.1:2"))


async def test_without_a_watch_the_bookies_are_listed_all_the_same(started: Started) -> None:
    metadata, client = started
    client.watched.clear()
    client.refusals = 1_000_000
    client.on_state(Connection.CONNECTED)
    for bookie in ("127.0.0.1:1", "127.0.0.1:2"):
        client.register(bookie)
        await until(has(metadata, bookie))
    assert not client.watched


async def test_bookies_are_listed_again_after_a_defect(started: Started) -> None:
    metadata, client = started
    client.faults.append(RuntimeError("a defect"))
    client.register("127.0.0.1:1")
    await until(has(metadata, "127.0.0.1:1"))
    assert not client.faults


async def test_a_close_that_is_cancelled_closes_the_client(started: Started) -> None:
    metadata, client = started
    client.hanging = asyncio.Event()
    client.register("127.0.0.1:1")
    await client.asked.wait()
    closing = asyncio.create_task(metadata.close())
    for _ in range(3):
        await asyncio.sleep(0)
    closing.cancel()
    client.hanging.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert client.closed
