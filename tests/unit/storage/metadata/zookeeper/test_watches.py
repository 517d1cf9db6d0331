"""Who is told about which node."""

import asyncio

import pytest
from structlog.testing import capture_logs

from storage.metadata.group import Stored
from storage.metadata.store import (
    Event,
    EventKind,
    MetadataError,
    PartitionMismatch,
    Version,
    Watch,
)
from storage.metadata.zookeeper.client import ChangeKind, NodeChange
from storage.metadata.zookeeper.layout import Layout
from storage.metadata.zookeeper.requests import Answer, Done, Failure, Request
from storage.metadata.zookeeper.watches import NodeRecord, NodeWatches
from tests.support.bounds import set_bound

LAYOUT = Layout("")


class World:
    """Records, and what was asked of ZooKeeper."""

    def __init__(self) -> None:
        self.records: dict[str, NodeRecord] = {}
        self.reads: list[str] = []
        self.error: MetadataError | None = None
        self.asked: list[tuple[str, str]] = []
        self.failure: Failure | None = None
        self.watches = NodeWatches(LAYOUT, self.submit, self.read)

    def submit(self, request: Request, done: Done) -> None:
        kind = type(request).__name__
        self.asked.append((kind, request._path))  # type: ignore[attr-defined]
        done(Answer(True, self.failure, 0))

    async def read(self, key: str) -> NodeRecord | None:
        self.reads.append(key)
        if self.error is not None:
            raise self.error
        return self.records.get(key)

    def put(self, key: str, *, partition: str | None = None) -> None:
        self.records[key] = NodeRecord(Stored(Version(1), 0, 1, 1, partition, None, ()), b"v")

    def change(self, path: str, kind: ChangeKind = ChangeKind.CREATED) -> None:
        self.watches.changed(NodeChange(kind, path))


async def taken(watch: Watch) -> Event:
    return await asyncio.wait_for(anext(watch), 5)


async def brief(watch: Watch) -> tuple[EventKind, str]:
    event = await taken(watch)
    return event.kind, event.key


async def pending(watch: Watch) -> bool:
    """Whether there is an event; takes it."""
    waiting = asyncio.ensure_future(anext(watch))
    for _ in range(3):
        await asyncio.sleep(0)
    found = waiting.done()
    waiting.cancel()
    return found


async def test_watch_of_a_level_reports_its_records_only() -> None:
    world = World()
    watch = world.watches.watch_level("/a/")
    world.put("/a/b")
    for path in ("/records/a", "/records/a/b", "/records/a/b/=c", "/records/=a", "/records/ab/=c"):
        world.change(path)
    assert not await pending(watch)
    world.change("/records/a/=b")
    world.change("/records/a/=b", ChangeKind.CHANGED)
    world.change("/records/a/=gone", ChangeKind.DELETED)
    assert await brief(watch) == (EventKind.UPSERT, "/a/b")
    assert await brief(watch) == (EventKind.REMOVED, "/a/gone")
    assert world.reads == ["/a/b", "/a/gone"]


async def test_of_a_level_what_nobody_wants_is_not_read() -> None:
    world, wanted = World(), {"/a/b"}
    watch = world.watches.watch_level("/a/", lambda key: key in wanted)
    world.put("/a/b")
    for name in ("c", "b"):
        world.change(f"/records/a/={name}")
    assert await brief(watch) == (EventKind.UPSERT, "/a/b")
    wanted.add("/a/c")
    world.change("/records/a/=c", ChangeKind.DELETED)
    assert await brief(watch) == (EventKind.REMOVED, "/a/c")
    assert world.reads == ["/a/b", "/a/c"]


async def test_a_key_of_another_partition_fails() -> None:
    world = World()
    watch = world.watches.watch_key("/a", None)
    world.put("/a", partition="p")
    world.change("/records/=a")
    for _ in range(2):
        with pytest.raises(PartitionMismatch):
            await taken(watch)


async def test_a_sequence_tells_its_newest_key_without_a_read() -> None:
    world = World()
    watch = world.watches.watch_sequence("/s/", "p")
    for number in (1, 2, 3):
        world.change(f"/records/s/=-{number}")
    world.change("/records/s/=-1", ChangeKind.DELETED)
    assert await taken(watch) == Event(EventKind.UPSERT, "/s/-3")
    assert world.reads == []


async def test_watches_of_one_node_share_zookeepers() -> None:
    world = World()
    first, second = world.watches.watch_level("/a/"), world.watches.watch_sequence("/a/", "p")
    assert world.asked == [("_AddWatch", "/records/a")]
    first.close()
    assert len(world.asked) == 1
    second.close()
    second.close()
    assert world.asked[1:] == [("_RemoveWatch", "/records/a")]
    world.change("/records/a/=b")


async def test_after_a_reconnection_all_list_again() -> None:
    world = World()
    watches: list[Watch] = [
        world.watches.watch_level("/a/"),
        world.watches.watch_key("/a", None),
        world.watches.watch_sequence("/s/", "p"),
    ]
    world.change("/records/a/=b")
    asked, world.asked = world.asked, []
    world.watches.ask_again()
    assert world.asked == asked
    for watch in watches:
        assert (await taken(watch)).kind is EventKind.RESYNC


async def test_a_watch_that_is_refused_is_asked_for_until_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_RECONNECT_MAX_S", 0.01)
    world = World()
    world.failure = Failure.OTHER
    watch = world.watches.watch_level("/a/")
    for _ in range(3):
        assert (await taken(watch)).kind is EventKind.RESYNC
    world.failure = None
    asked = len(world.asked)
    assert (await taken(watch)).kind is EventKind.RESYNC
    assert world.asked[asked:] == [("_AddWatch", "/records/a")]
    world.change("/records/a/=b")
    assert await brief(watch) == (EventKind.REMOVED, "/a/b")
    world.watches.close()


async def test_a_connection_that_breaks_asks_for_no_watch_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one does, for all."""
    set_bound(monkeypatch, "ZOOKEEPER_RECONNECT_MAX_S", 0)
    world = World()
    world.failure = Failure.CONNECTION_LOSS
    watch = world.watches.watch_level("/a/")
    assert not await pending(watch)
    assert len(world.asked) == 1


async def test_defect_in_publishing_a_change_resyncs_watchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    watch = world.watches.watch_level("/a/")

    def broken(*_: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(world.watches, "_offer_to_level", broken)
    with capture_logs() as logs:
        world.change("/records/a/=b")
    assert [each["event"] for each in logs] == ["change_not_told"]
    assert (await taken(watch)).kind is EventKind.RESYNC


async def test_a_read_that_fails_is_a_resync() -> None:
    world = World()
    watch = world.watches.watch_level("/a/")
    world.error = MetadataError("away")
    world.change("/records/a/=b")
    assert (await taken(watch)).kind is EventKind.RESYNC


async def test_a_wait_that_is_cancelled_in_its_read_loses_nothing() -> None:
    world = World()
    watch = world.watches.watch_level("/a/")
    gate = asyncio.Event()
    read = world.read

    async def slow(key: str) -> NodeRecord | None:
        await gate.wait()
        return await read(key)

    watch._read = slow
    world.change("/records/a/=b")
    assert not await pending(watch)
    gate.set()
    assert await brief(watch) == (EventKind.REMOVED, "/a/b")


async def test_the_end() -> None:
    world = World()
    watch = world.watches.watch_level("/a/")
    world.change("/records/a/=b")
    world.watches.close()
    assert [event async for event in watch] == []
