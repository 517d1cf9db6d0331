"""The queue of one watcher, and the hub that feeds it."""

import asyncio

import pytest

from config import bounds
from storage.metadata.group import Change, Stored
from storage.metadata.store import (
    Event,
    EventKind,
    IndexEntry,
    InvalidMetadataRequest,
    Record,
    Version,
)
from storage.metadata.watches import WatchHub, WatchQueue

RESYNC = Event(EventKind.RESYNC)


def upsert(key: str, value: bytes = b"") -> Event:
    return Event(EventKind.UPSERT, key, Record(key, value, Version(1), 0, 0, 0, False, None))


async def drained(queue: WatchQueue) -> list[Event]:
    events = []
    while True:
        waiting = asyncio.ensure_future(anext(queue))
        await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait([waiting])
            return events
        events.append(waiting.result())


async def test_a_busy_key_keeps_its_place() -> None:
    queue = WatchQueue()
    for event in (upsert("/a", b"1"), upsert("/b", b"1"), upsert("/a", b"2")):
        queue.offer(event)
    assert await drained(queue) == [upsert("/a", b"2"), upsert("/b", b"1")]


async def test_too_many_events_become_one_resync() -> None:
    queue = WatchQueue(max_events=3)
    for key in ("/a", "/b", "/c"):
        queue.offer(upsert(key))
    assert len(await drained(queue)) == 3
    for key in ("/a", "/b", "/c", "/d", "/e", "/f", "/g", "/h", "/i"):
        queue.offer(upsert(key))
    assert await drained(queue) == [RESYNC]
    queue.offer(upsert("/a"))
    assert await drained(queue) == [upsert("/a")]


async def test_too_many_bytes_become_one_resync() -> None:
    queue = WatchQueue(max_bytes=10)
    for _ in range(5):
        queue.offer(upsert("/a", b"12345"))
        queue.offer(upsert("/b", b"12345"))
    assert await drained(queue) == [upsert("/a", b"12345"), upsert("/b", b"12345")]
    queue.offer(upsert("/a", b"123456"))
    queue.offer(upsert("/b", b"12345"))
    assert await drained(queue) == [RESYNC]
    queue.offer(upsert("/a", b"1234567890"))
    assert await drained(queue) == [upsert("/a", b"1234567890")]


async def test_a_hint_replaces_what_waits() -> None:
    queue = WatchQueue()
    for key in ("/s/-1", "/s/-2", "/s/-3"):
        queue.offer_hint(Event(EventKind.UPSERT, key))
    assert await drained(queue) == [Event(EventKind.UPSERT, "/s/-3")]


async def test_a_watch_is_for_one_task() -> None:
    queue = WatchQueue()
    first = asyncio.ensure_future(anext(queue))
    await asyncio.sleep(0)
    with pytest.raises(InvalidMetadataRequest):
        await anext(queue)
    queue.offer(upsert("/a"))
    assert await first == upsert("/a")


def change(key: str, *, before: list[str] | None, after: list[str] | None) -> Change:
    def stored(index_keys: list[str] | None) -> Stored | None:
        if index_keys is None:
            return None
        entries = tuple(IndexEntry("i", each) for each in index_keys)
        return Stored(Version(1), 0, 0, 0, None, None, entries)

    return Change(key, stored(before), stored(after), b"")


async def test_a_watch_in_two_entries_of_a_record_is_told_once() -> None:
    hub = WatchHub()
    watch = hub.watch_index("i", "a", "z")
    hub.publish([change("/a", before=["b", "c"], after=["c", "d"])])
    assert [event.kind for event in await drained(watch)] == [EventKind.UPSERT]
    hub.publish([change("/a", before=["c", "d"], after=["~"])])
    assert [event.kind for event in await drained(watch)] == [EventKind.REMOVED]
    hub.publish([change("/a", before=["~"], after=None)])
    assert await drained(watch) == []


async def test_closed_watches_are_forgotten() -> None:
    hub = WatchHub()
    watches = [
        hub.watch_key("/a", None),
        hub.watch_level("/"),
        hub.watch_index("i", "a", "z"),
        hub.watch_index("i", "a", "a\x02"),
        hub.watch_sequence("/", "p"),
    ]
    twin = hub.watch_key("/a", None)
    for watch in watches:
        watch.close()
    hub.publish([change("/a", before=None, after=["a"])])
    assert [event.key for event in await drained(twin)] == ["/a"]
    twin.close()
    registries = (hub._keys, hub._children, hub._sequences, hub._exact, hub._ranges)
    assert not any(registries)


async def test_a_thousand_exact_watches_cost_a_change_one_look_up() -> None:
    hub = WatchHub()
    watches = {n: hub.watch_index("i", f"{n}", f"{n}\x02") for n in range(1000)}
    hub.publish([change("/a", before=["7"], after=["8", "9"])])
    told = {n: await drained(watch) for n, watch in watches.items()}
    assert {n: events[0].kind for n, events in told.items() if events} == {
        7: EventKind.REMOVED,
        8: EventKind.UPSERT,
        9: EventKind.UPSERT,
    }
    assert len(list(hub._index_watchers((IndexEntry("i", "7"),)))) == 1


def test_bounds_are_the_named_ones() -> None:
    queue = WatchQueue()
    assert queue._max_events == bounds.WATCH_QUEUE_EVENTS
    assert queue._max_bytes == bounds.WATCH_QUEUE_BYTES
