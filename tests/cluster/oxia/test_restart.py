"""A server that is killed and started again while a store works on it."""

import asyncio
from collections.abc import Callable

import pytest

from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.store import (
    Event,
    EventKind,
    MetadataError,
    Record,
    VersionConflict,
    Watch,
)
from tests.cluster.oxia.stores import PATIENCE_S
from tests.conftest import Report
from tests.servers.oxia_part import OxiaServer
from tests.support.bounds import set_bound
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

COUNTERS = 12


class Load:
    """Counters raised by compare-and-set, and new records, until told to stop."""

    def __init__(self, store: OxiaMetadataStore) -> None:
        self._store = store
        self.stop = False
        self.made: set[str] = set()
        self.doubted: set[str] = set()
        self.raised = [0] * COUNTERS
        self.unknown = [0] * COUNTERS

    @property
    def done(self) -> int:
        return sum(self.raised) + len(self.made)

    async def run(self) -> None:
        await asyncio.gather(*(self._count(n) for n in range(COUNTERS)))

    async def _count(self, n: int) -> None:
        key, made = f"/load/counter-{n}", 0
        while not self.stop:
            try:
                record = await self._store.get(key)
                value = 0 if record is None else int(record.value)
                version = None if record is None else record.version
                await self._store.put(key, str(value + 1).encode(), expect=version)
                self.raised[n] += 1
            except VersionConflict:
                raise AssertionError("nobody else writes") from None
            except MetadataError as error:
                self.unknown[n] += "unknown" in str(error)
            made += 1
            new = f"/made/{n}-{made}"
            try:
                await self._store.put(new, b"")
                self.made.add(new)
            except MetadataError:
                self.doubted.add(new)


async def mirror(watch: Watch, seen: dict[str, Record], done: Callable[[], bool]) -> None:
    """Events into a dict until it is as wanted."""
    while not done():
        event: Event = await asyncio.wait_for(anext(watch), PATIENCE_S)
        assert event.kind is EventKind.UPSERT, event
        assert event.record is not None
        seen[event.key] = event.record


async def test_no_update_is_lost(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer, report: Report
) -> None:
    """And the watch goes on without a resync."""
    watch = store.watch_children("/load")
    load = Load(store)
    running = asyncio.create_task(load.run())
    for _ in range(2):
        done = load.done
        await until(lambda done=done: load.done > done + 200)  # type: ignore[misc]
        fresh_oxia.kill()
        await fresh_oxia.start()
    done = load.done
    await until(lambda: load.done > done + 200)
    load.stop = True
    await asyncio.wait_for(running, PATIENCE_S)

    records = {each.key: each for each in await store.scan("/load/", "/load//")}
    for n in range(COUNTERS):
        value = int(records[f"/load/counter-{n}"].value)
        assert load.raised[n] <= value <= load.raised[n] + load.unknown[n]
    there = {f"/made/{name}" for name in await store.children("/made")}
    assert load.made <= there <= load.made | load.doubted
    seen: dict[str, Record] = {}
    await mirror(watch, seen, lambda: seen == records)
    watch.close()
    report(f"oxia restarts: {load.done} writes, {sum(load.unknown)} outcomes of counters unknown")


async def test_sessions_and_their_records_survive(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer
) -> None:
    session = await store.open_session(timeout_ms=60_000, identity="one")
    await store.put("/e/a", b"", session=session)
    fresh_oxia.kill()
    await fresh_oxia.start()
    await store.put("/e/b", b"", session=session)
    assert not session.lost
    assert await store.children("/e") == ["a", "b"]
    await session.close()
    assert await store.children("/e") == []


async def test_a_session_is_lost_when_no_beat_comes_through(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer
) -> None:
    """Its records go once the server is back, and a new session may be opened."""
    session = await store.open_session(timeout_ms=2_000, identity="one")
    await store.put("/e/a", b"", session=session)
    watch = store.watch_key("/e/a")
    fresh_oxia.kill()
    await asyncio.wait_for(session.wait_lost(), PATIENCE_S)
    await fresh_oxia.start()
    event = await asyncio.wait_for(anext(watch), PATIENCE_S)
    assert event.kind is EventKind.REMOVED
    again = await store.open_session(timeout_ms=10_000, identity="one")
    await store.put("/e/a", b"", session=again)
    await again.close()
    watch.close()


async def test_a_write_waits_for_the_server(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer
) -> None:
    """What was queued while there was none is done once, and reads wait too."""
    made = await store.put("/a", b"1")
    fresh_oxia.kill()
    put = asyncio.create_task(store.put("/a", b"2", expect=made.version))
    get = asyncio.create_task(store.get("/a"))
    await fresh_oxia.start()
    assert (await asyncio.wait_for(put, PATIENCE_S)).modifications == 1
    record = await asyncio.wait_for(get, PATIENCE_S)
    assert record is not None
    assert record.value in (b"1", b"2")


async def test_a_silent_server_holds_nobody_for_ever(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "OXIA_REQUEST_TIMEOUT_S", 2)
    set_bound(monkeypatch, "OXIA_ATTEMPT_TIMEOUT_S", 1)
    await store.put("/a", b"1")
    fresh_oxia.pause()
    try:
        calls = [
            store.put("/a", b"2"),
            store.put("/b", b"2"),
            store.get("/a"),
            store.scan("/", "//"),
            store.scan("/", "//", fresh=True),
            store.open_session(timeout_ms=2_000, identity="one"),
        ]
        outcomes = await asyncio.wait_for(
            asyncio.gather(*calls, return_exceptions=True), PATIENCE_S
        )
    finally:
        fresh_oxia.resume()
    assert all(isinstance(each, MetadataError) for each in outcomes), outcomes
    assert "unknown" in str(outcomes[0])
