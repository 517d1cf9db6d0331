"""The queue of one watcher, and the hub that feeds it."""

import asyncio

import pytest

from config import bounds
from storage.metadata.group import Change, Stored
from storage.metadata.store import (
    Event,
    EventKind,
    InvalidMetadataRequest,
    Record,
    Version,
)
from storage.metadata.watches import WatchHub, WatchQueue

RESYNC = Event(EventKind.RESYNC)


def upsert(key: str, value: bytes = b"") -> Event:
    return Event(EventKind.UPSERT, key, Record(key, value, Version(1), 0, 0, 0, False, None))


async def drained(queue: WatchQueue) -> list[Event]:
    events: list[Event] = []
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


async def test_closed_watches_are_forgotten() -> None:
    hub = WatchHub()
    watches = [
        hub.watch_key("/a", None),
        hub.watch_level("/"),
        hub.watch_sequence("/", "p"),
    ]
    twin = hub.watch_key("/a", None)
    for watch in watches:
        watch.close()
    stored = Stored(Version(1), 0, 0, 0, None, None, ())
    hub.publish([Change("/a", None, stored, b"")])
    assert [event.key for event in await drained(twin)] == ["/a"]
    twin.close()
    assert not any((hub._keys, hub._children, hub._sequences))


def test_bounds_are_the_named_ones() -> None:
    queue = WatchQueue()
    assert queue._max_events == bounds.WATCH_QUEUE_EVENTS
    assert queue._max_bytes == bounds.WATCH_QUEUE_BYTES
