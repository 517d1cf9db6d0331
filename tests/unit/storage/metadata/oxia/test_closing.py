"""Closing while shards go, and closers that are cancelled."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from storage.clock import SystemClock
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import Peer
from storage.metadata.oxia.sessions import OxiaSession
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.store import EventKind, MetadataError
from tests.support.fake_oxia import FakeOxia, World
from tests.support.waiting import TIMEOUT_S, until

Closer = Callable[[OxiaMetadataStore], Awaitable[None]]
CLOSERS: dict[str, Closer] = {
    "reader": lambda store: store._set.readers[0].close(),
    "writer": lambda store: store._set.writers[0].close(),
    "notifications": lambda store: store._set._followers[0].close(),
    "shards": lambda store: store._shards.close(),
    "all of them": lambda store: store._set.close(),
}


async def open_store(server: FakeOxia, world: World, shards: int) -> OxiaMetadataStore:
    world.lead(*[server.address] * shards)
    return await OxiaMetadataStore.open(f"oxia://{server.address}", SystemClock(), random.Random(1))


def tasks(name: str) -> list["asyncio.Task[object]"]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(name)]


async def cancelled_at_once(closing: "asyncio.Task[None]") -> None:
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(closing, TIMEOUT_S)


@pytest.mark.parametrize("part", CLOSERS)
async def test_a_closer_that_is_cancelled_is_cancelled(
    server: FakeOxia, world: World, part: str
) -> None:
    store = await open_store(server, world, 1)

    async def close() -> None:
        await CLOSERS[part](store)

    await cancelled_at_once(asyncio.create_task(close()))
    await store.close()


async def test_waiting_calls_fail_even_if_close_is_cancelled(
    server: FakeOxia, world: World
) -> None:
    store = await open_store(server, world, 1)
    await store.put("/first", b"")
    world.open.clear()
    sent = len(world.requests)
    first = asyncio.create_task(store.put("/a", b""))
    await until(lambda: len(world.requests) == sent + 1)
    await cancelled_at_once(asyncio.create_task(store._set.close()))
    with pytest.raises(MetadataError, match="outcome is unknown"):
        await asyncio.wait_for(first, TIMEOUT_S)
    with pytest.raises(MetadataError, match="closed"):
        await asyncio.wait_for(store.put("/b", b""), TIMEOUT_S)
    await until(lambda: not tasks("oxia-writer") and not tasks("oxia-reader"))
    await store.close()


async def test_a_cancelled_close_of_the_store_leaves_nothing_behind(
    server: FakeOxia, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(server, world, 2)
    await store.put("/a", b"")
    real, begun = store._set.close, asyncio.Event()

    async def close() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await real()

    monkeypatch.setattr(store._set, "close", close)
    closing = asyncio.create_task(store.close())
    await asyncio.wait_for(begun.wait(), TIMEOUT_S)
    await cancelled_at_once(closing)
    await until(lambda: not tasks("oxia-"))
    assert not store._connections._peers


async def test_a_shard_that_goes_is_dropped_once(server: FakeOxia, world: World) -> None:
    """Maps may come faster than its parts are closed."""
    store = await open_store(server, world, 2)
    dropping: list[int] = []
    store._shards.on_change(store._set.shards_changed)
    store._shards.on_change(lambda: dropping.append(len(tasks("oxia-shard-gone"))))
    world.lead(server.address)
    await until(lambda: dropping == [1])
    await until(lambda: not tasks("oxia-shard-gone"))
    await store.put("/a", b"")
    await store.close()


async def test_changes_on_a_shard_that_is_gone_let_watchers_list(
    server: FakeOxia, world: World
) -> None:
    """Nothing is read there again and again; the records are where the map of now says."""
    store = await open_store(server, world, 2)
    watch = store.watch_key("/a")
    world.lead(server.address)
    await until(lambda: store._shards.table.ids == (0,) and 1 not in store._set.readers)
    assert (await asyncio.wait_for(anext(watch), TIMEOUT_S)).kind is EventKind.RESYNC
    batch = pb.NotificationBatch(shard=1, offset=9)
    batch.notifications["/a"].type = pb.KEY_MODIFIED
    batch.notifications["/a"].version_id = 9
    store._watch_router.notified(1, batch)
    assert (await asyncio.wait_for(anext(watch), TIMEOUT_S)).kind is EventKind.RESYNC
    await until(lambda: not store._watch_router._reading)
    assert not store._watch_router._changed
    await store.close()


async def test_a_session_is_made_once_on_a_new_shard(server: FakeOxia, world: World) -> None:
    """However many maps come meanwhile: ephemerals would hang on the one that is not beaten."""
    store = await open_store(server, world, 1)
    session = await store.open_session(timeout_ms=60_000, identity="a")
    assert isinstance(session, OxiaSession)
    store._shards.on_change(lambda: store._sessions.shards_changed(store._shards.table.ids))
    world.lead(server.address, server.address)
    await until(lambda: session.id_on(1) is not None and not store._sessions._tasks.busy)
    assert world.sessions == 2
    await store.close()


async def test_a_shard_that_goes_before_it_has_a_session_does_not_end_it(
    server: FakeOxia, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(server, world, 1)
    session = await store.open_session(timeout_ms=60_000, identity="a")
    assert isinstance(session, OxiaSession)
    asked = asyncio.Event()

    async def create_session(*_: object) -> int:
        asked.set()
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(Peer, "create_session", create_session)
    world.lead(server.address, server.address)
    await asyncio.wait_for(asked.wait(), TIMEOUT_S)
    world.lead(server.address)
    await until(lambda: store._shards.table.ids == (0,) and not store._sessions._tasks.busy)
    assert not session.lost
    assert session.ids.keys() == {0}
    await store.close()


async def test_a_session_gets_the_shards_that_come_while_it_is_made(
    server: FakeOxia, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(server, world, 1)
    asked, answer, real = asyncio.Event(), asyncio.Event(), Peer.create_session

    async def create_session(
        peer: Peer, shard_id: int, timeout_ms: int, identity: str, timeout_s: float
    ) -> int:
        asked.set()
        await answer.wait()
        return await real(peer, shard_id, timeout_ms, identity, timeout_s)

    monkeypatch.setattr(Peer, "create_session", create_session)
    opening = asyncio.create_task(store.open_session(timeout_ms=60_000, identity="a"))
    await asyncio.wait_for(asked.wait(), TIMEOUT_S)
    world.lead(server.address, server.address)
    await until(lambda: store._shards.table.ids == (0, 1))
    answer.set()
    session = await asyncio.wait_for(opening, TIMEOUT_S)
    assert isinstance(session, OxiaSession)
    await until(lambda: session.ids.keys() == {0, 1})
    await store.close()
