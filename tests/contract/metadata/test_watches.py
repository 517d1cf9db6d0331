"""Watches: every change that a read may have missed, newest state only, never in the way."""

import asyncio

import pytest

from config import bounds
from storage.metadata.store import Event, EventKind, MetadataError, MetadataStore
from tests.contract.metadata.backends import brief, events_until, next_event

UPSERT, REMOVED, RESYNC = EventKind.UPSERT, EventKind.REMOVED, EventKind.RESYNC


async def test_a_key(store: MetadataStore) -> None:
    with_key = store.watch_key("/a")
    await store.put("/other", b"")
    made = await store.put("/a", b"1")
    event = await next_event(with_key)
    assert brief(event) == (UPSERT, "/a", b"1")
    assert event.record is not None
    assert event.record.version == made.version
    await store.put("/a", b"2")
    assert brief(await next_event(with_key)) == (UPSERT, "/a", b"2")
    await store.delete("/a")
    assert brief(await next_event(with_key)) == (REMOVED, "/a", None)
    with_key.close()


async def test_children(store: MetadataStore) -> None:
    watch = store.watch_children("/d")
    root = store.watch_children("/")
    for key in ("/d", "/d/a/below", "/dd", "/d/a"):
        await store.put(key, b"v")
    assert brief(await next_event(watch)) == (UPSERT, "/d/a", b"v")
    assert [(await next_event(root)).key for _ in range(2)] == ["/d", "/dd"]
    await store.delete("/d/a/below")
    await store.delete("/d/a")
    assert brief(await next_event(watch)) == (REMOVED, "/d/a", None)
    watch.close()
    root.close()


async def test_of_children_those_that_are_wanted_are_told(store: MetadataStore) -> None:
    wanted = {"/d/a"}
    watch = store.watch_children("/d", wanted=lambda key: key in wanted)
    for key in ("/d/b", "/d/a", "/d/c"):
        await store.put(key, b"1")
    assert brief(await next_event(watch)) == (UPSERT, "/d/a", b"1")
    wanted.add("/d/b")
    assert await store.get("/d/b") is not None
    for key in ("/d/c", "/d/b"):
        await store.put(key, b"2")
    assert brief(await next_event(watch)) == (UPSERT, "/d/b", b"2")
    wanted.remove("/d/a")
    for key in ("/d/a", "/d/c", "/d/b"):
        await store.delete(key)
    assert brief(await next_event(watch)) == (REMOVED, "/d/b", None)
    watch.close()


async def test_failed_writes_are_no_news(store: MetadataStore) -> None:
    watch = store.watch_children("/")
    made = await store.put("/a", b"1")
    results = await asyncio.gather(
        store.put("/a", b"2", expect=type(made.version)(made.version + 1000)),
        store.delete("/b"),
        store.put("/c", b"3"),
        return_exceptions=True,
    )
    assert isinstance(results[0], Exception)
    events = await events_until(watch, lambda event: event.key == "/c")
    assert {event.key for event in events} == {"/a", "/c"}
    assert all(event.kind is UPSERT for event in events)
    watch.close()


async def test_events_are_coalesced_to_the_newest_state(store: MetadataStore) -> None:
    watch = store.watch_children("/d")
    for n in range(30):
        await store.put("/d/a", str(n).encode())
        await store.put("/d/b", str(n).encode())
    await store.delete("/d/b")
    await store.put("/d/last", b"")
    expected = {
        "/d/a": (UPSERT, "/d/a", b"29"),
        "/d/b": (REMOVED, "/d/b", None),
        "/d/last": (UPSERT, "/d/last", b""),
    }
    newest: dict[str, tuple[EventKind, str, bytes | None]] = {}

    def is_last(event: Event) -> bool:
        newest[event.key] = brief(event)
        return newest == expected

    # Keys of several shards come in no common order: each may come once more than it has to.
    assert len(await events_until(watch, is_last)) <= 2 * len(expected)
    watch.close()


async def test_a_watcher_that_falls_behind_is_told_to_list_again(store: MetadataStore) -> None:
    watch = store.watch_children("/d")
    keys = [f"/d/{n:06}" for n in range(bounds.WATCH_QUEUE_EVENTS + 1)]
    for start in range(0, len(keys), 2000):
        await asyncio.gather(*(store.put(key, b"") for key in keys[start : start + 2000]))
    assert brief(await next_event(watch)) == (RESYNC, "", None)
    await store.put("/d/after", b"")
    assert brief(await next_event(watch)) == (UPSERT, "/d/after", b"")
    assert len(await store.children("/d")) == len(keys) + 1
    watch.close()


async def test_a_slow_watcher_holds_up_nobody(store: MetadataStore) -> None:
    slow, quick = store.watch_key("/a"), store.watch_key("/a")
    for n in range(20):
        await store.put("/a", str(n).encode())
        assert brief(await next_event(quick)) == (UPSERT, "/a", str(n).encode())
    assert brief(await next_event(slow)) == (UPSERT, "/a", b"19")
    slow.close()
    quick.close()


async def test_registered_first_and_read_second_misses_nothing(store: MetadataStore) -> None:
    """A reader beside a writer ends with the writer's last value, and never goes back in time."""
    last = 40

    async def write(key: str) -> None:
        for n in range(last + 1):
            await store.put(key, str(n).encode())

    for round_number in range(15):
        key = f"/r/{round_number}"
        writing = asyncio.ensure_future(write(key))
        for _ in range(round_number):
            await asyncio.sleep(0)
        watch = store.watch_key(key)
        record = await store.get(key)
        known = -1 if record is None else int(record.value)
        while known < last:
            event = await next_event(watch)
            assert event.record is not None
            assert int(event.record.value) >= known
            known = int(event.record.value)
        await writing
        watch.close()


async def test_record_named_by_an_event_can_be_read(store: MetadataStore) -> None:
    watch = store.watch_key("/a")

    async def write() -> None:
        for n in range(30):
            await store.put("/a", str(n).encode())

    writing = asyncio.ensure_future(write())
    told = -1
    while told < 29:
        event = await next_event(watch)
        assert event.record is not None
        told = int(event.record.value)
        record = await store.get("/a")
        assert record is not None
        assert int(record.value) >= told
    await writing
    watch.close()


async def test_a_cancelled_wait_loses_no_event(store: MetadataStore) -> None:
    watch = store.watch_key("/a")
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await store.put("/a", b"1")
    assert brief(await next_event(watch)) == (UPSERT, "/a", b"1")
    watch.close()


async def test_a_closed_watch_ends(store: MetadataStore) -> None:
    watch = store.watch_key("/a")
    waiting = asyncio.ensure_future(anext(watch, None))
    await asyncio.sleep(0)
    watch.close()
    assert await waiting is None
    watch.close()
    await store.put("/a", b"")
    assert [event async for event in watch] == []


async def test_watches_end_with_the_store(store: MetadataStore) -> None:
    watches = [
        store.watch_key("/a"),
        store.watch_children("/a"),
        store.watch_sequence("/a/", partition="p"),
    ]
    waiting = [asyncio.ensure_future(anext(watch, None)) for watch in watches]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*waiting) == [None] * len(watches)
    for watch in watches:
        watch.close()
    with pytest.raises(MetadataError):
        store.watch_children("/a")
