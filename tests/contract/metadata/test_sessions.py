"""Sessions and ephemerals: who holds a record, and what goes with a session."""

import asyncio
import time

import pytest

from storage.metadata.store import (
    EventKind,
    IndexEntry,
    InvalidMetadataRequest,
    MetadataStore,
    SessionLost,
)
from tests.contract.metadata.backends import (
    Backend,
    next_event,
)
from tests.support.waiting import TIMEOUT_S

LONG_MS = 120_000


async def test_ephemerals_go_with_their_session(store: MetadataStore) -> None:
    session = await store.open_session(timeout_ms=LONG_MS, identity="one")
    other = await store.open_session(timeout_ms=LONG_MS, identity="two")
    await store.put("/e/a", b"", session=session, indexes=[IndexEntry("i", "k")])
    await store.put("/e/b", b"", session=session, partition="p")
    await store.put("/e/c", b"", session=other)
    await store.put("/e/d", b"")
    record = await store.get("/e/a")
    assert record is not None
    assert record.ephemeral
    assert not session.lost
    await session.close()
    assert session.lost
    await session.wait_lost()
    assert await store.children("/e") == ["c", "d"]
    assert await store.scan_index("i", "k", "l") == []
    assert not other.lost
    await session.close()


async def test_a_lost_session_holds_nothing_more(store: MetadataStore) -> None:
    session = await store.open_session(timeout_ms=LONG_MS, identity="one")
    queued = asyncio.gather(
        store.put("/e/a", b"", session=session),
        session.close(),
        store.put("/e/b", b"", session=session),
        return_exceptions=True,
    )
    assert isinstance((await queued)[2], SessionLost)
    with pytest.raises(SessionLost):
        await store.put("/e/a", b"", session=session)
    assert await store.children("/e") == []


async def test_a_put_without_session_makes_a_record_stay(store: MetadataStore) -> None:
    session = await store.open_session(timeout_ms=LONG_MS, identity="one")
    await store.put("/e/a", b"1", session=session)
    await store.put("/e/a", b"2")
    record = await store.get("/e/a")
    assert record is not None
    assert not record.ephemeral
    await session.close()
    assert await store.children("/e") == ["a"]


async def test_a_put_of_another_session_takes_over(store: MetadataStore) -> None:
    first = await store.open_session(timeout_ms=LONG_MS, identity="one")
    second = await store.open_session(timeout_ms=LONG_MS, identity="two")
    await store.put("/e/a", b"1", session=first)
    taken = await store.put("/e/a", b"2", session=second)
    await first.close()
    record = await store.get("/e/a")
    assert record is not None
    assert (record.version, record.ephemeral) == (taken.version, True)
    await second.close()
    assert await store.get("/e/a") is None


async def test_a_record_becomes_ephemeral_again_or_not_by_its_last_put(
    store: MetadataStore,
) -> None:
    session = await store.open_session(timeout_ms=LONG_MS, identity="one")
    await asyncio.gather(
        store.put("/e/a", b"1"),
        store.put("/e/a", b"2", session=session),
        store.put("/e/b", b"1", session=session),
        store.put("/e/b", b"2"),
        store.put("/e/c", b"1", session=session),
        store.delete("/e/c"),
    )
    await session.close()
    assert await store.children("/e") == ["b"]


async def test_the_end_of_a_session_is_watched(store: MetadataStore) -> None:
    session = await store.open_session(timeout_ms=LONG_MS, identity="one")
    await store.put("/e/a", b"", session=session, indexes=[IndexEntry("i", "k")])
    watches = [
        store.watch_key("/e/a"),
        store.watch_children("/e"),
        store.watch_children("/e", wanted=lambda key: key == "/e/a"),
    ]
    await session.close()
    for watch in watches:
        event = await next_event(watch)
        assert (event.kind, event.key) == (EventKind.REMOVED, "/e/a")
        watch.close()


async def test_a_frozen_process_loses_its_session(store: MetadataStore, backend: Backend) -> None:
    session = await store.open_session(timeout_ms=backend.shortest_session_ms, identity="one")
    kept = await store.open_session(timeout_ms=LONG_MS, identity="two")
    await store.put("/e/a", b"", session=session, indexes=[IndexEntry("i", "k")])
    await store.put("/e/b", b"", session=kept)
    watch = store.watch_key("/e/a")
    time.sleep(backend.shortest_session_ms * 2 / 1000)
    await asyncio.wait_for(session.wait_lost(), TIMEOUT_S)
    assert session.lost
    event = await next_event(watch)
    assert event.kind is EventKind.REMOVED
    assert await store.children("/e") == ["b"]
    assert await store.scan_index("i", "k", "l") == []
    with pytest.raises(SessionLost):
        await store.put("/e/a", b"", session=session)
    await session.close()
    watch.close()


async def test_sessions_end_with_the_store(store: MetadataStore) -> None:
    session = await store.open_session(timeout_ms=LONG_MS, identity="one")
    waiting = asyncio.ensure_future(session.wait_lost())
    await store.close()
    await asyncio.wait_for(waiting, TIMEOUT_S)
    assert session.lost


async def test_impossible_sessions_are_refused(store: MetadataStore, backend: Backend) -> None:
    for timeout_ms in (0, -1, 3_600_000):
        with pytest.raises(InvalidMetadataRequest):
            await store.open_session(timeout_ms=timeout_ms, identity="one")
    with pytest.raises(InvalidMetadataRequest):
        await store.open_session(timeout_ms=LONG_MS, identity="")


async def test_a_session_belongs_to_its_store(
    store: MetadataStore, backend: Backend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = await backend.open(tmp_path_factory.mktemp("other"))
    session = await other.open_session(timeout_ms=LONG_MS, identity="one")
    with pytest.raises(InvalidMetadataRequest):
        await store.put("/e/a", b"", session=session)
    await other.close()


async def test_a_cancelled_open_leaves_no_session_in_the_way(store: MetadataStore) -> None:
    opening = asyncio.ensure_future(store.open_session(timeout_ms=LONG_MS, identity="one"))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    session = await store.open_session(timeout_ms=LONG_MS, identity="one")
    await store.put("/e/a", b"", session=session)
    await session.close()
    assert await store.children("/e") == []
