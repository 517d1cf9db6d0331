"""What only the real server shows: its order, its notifications, who proves to lead."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.metadata.keys import number, sequence_key
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.notifications import NotificationFollower
from storage.metadata.oxia.records import PROOF
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.store import EventKind, IndexEntry
from tests.cluster.oxia.stores import PATIENCE_S, look, open_store
from tests.servers.oxia_part import OxiaServer

pytestmark = pytest.mark.cluster


class Told:
    """What a follower tells."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gaps = 0

    def notified(self, shard_id: int, batch: pb.NotificationBatch) -> None:
        self.batches.append(batch.offset)

    def gap(self, shard_id: int) -> None:
        self.gaps += 1


class ForgetfulOxia(OxiaServer):
    """It keeps notifications for a second."""

    def command(self) -> list[str]:
        return [*super().command(), "--notifications-retention-time", "1s"]


@pytest.fixture
async def forgetful(oxia_binary: Path, tmp_path: Path) -> Iterator[OxiaServer]:  # type: ignore[misc]
    server = ForgetfulOxia(tmp_path / "forgetful", shards=1)
    try:
        await server.start()
        yield server
    finally:
        server.kill()


async def follow_from(store: OxiaMetadataStore, offset: int | None) -> Told:
    """What a follower is told that goes on behind an offset, until it was told something."""
    told = Told()
    follower = NotificationFollower(0, store._shards, told)
    follower.position.offset = offset
    async with asyncio.timeout(PATIENCE_S):
        while not told.batches:
            await asyncio.sleep(0.02)
            await store.put("/again", b"")
    await follower.close()
    return told


async def test_a_follower_goes_on_where_it_was(store: OxiaMetadataStore) -> None:
    follower = store._set._followers[0]
    before = follower.position.offset
    assert before is not None
    for n in range(40):
        await store.put(f"/n/{n}", b"")
    told = await follow_from(store, before)
    assert told.gaps == 0
    assert told.batches[0] > before


async def test_a_gap_is_noticed(forgetful: OxiaServer) -> None:
    """The server goes on behind what it has forgotten and does not say so."""
    store = await open_store(forgetful.address)
    before = store._set._followers[0].position.offset
    assert before is not None
    async with asyncio.timeout(PATIENCE_S):
        while (await follow_from(store, before)).gaps == 0:
            await asyncio.sleep(0.2)
    await store.close()


async def test_watchers_list_again_after_a_gap(store: OxiaMetadataStore) -> None:
    children, key = store.watch_children("/d"), store.watch_key("/k")
    store._watch_router.gap(0)
    for watch in (children, key):
        event = await asyncio.wait_for(anext(watch), PATIENCE_S)
        assert event.kind is EventKind.RESYNC
    await store.put("/d/a", b"")
    event = await asyncio.wait_for(anext(children), PATIENCE_S)
    assert (event.kind, event.key) == (EventKind.UPSERT, "/d/a")


async def test_after_a_long_outage_watchers_list_again(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer
) -> None:
    for follower in store._set._followers.values():
        follower.position._kept_s = 0.0
    watch = store.watch_key("/a")
    fresh_oxia.kill()
    await fresh_oxia.start()
    event = await asyncio.wait_for(anext(watch), PATIENCE_S)
    assert event.kind is EventKind.RESYNC


async def test_changes_of_another_process_are_told(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer
) -> None:
    """By notifications alone; only one of them writes, as 0.14.0 bears no second writer."""
    reader = await open_store(fresh_oxia.address)
    key, children = reader.watch_key("/o/a", partition="p"), reader.watch_children("/o")
    sequence = reader.watch_sequence("/o/s/", partition="p")
    made = await store.put("/o/a", b"1", partition="p")
    for watch in (key, children):
        event = await asyncio.wait_for(anext(watch), PATIENCE_S)
        assert event.record is not None
        assert (event.kind, event.record.version) == (EventKind.UPSERT, made.version)
        assert event.record.partition == "p"
    await store.delete("/o/a", partition="p")
    for watch in (key, children):
        event = await asyncio.wait_for(anext(watch), PATIENCE_S)
        assert (event.kind, event.key) == (EventKind.REMOVED, "/o/a")
    await store.put("/o/s/", b"", partition="p", sequence=True)
    event = await asyncio.wait_for(anext(sequence), PATIENCE_S)
    assert event.key == sequence_key("/o/s/", 1)
    await reader.close()


async def test_a_fresh_scan_proves_the_leaders_it_asks(
    store: OxiaMetadataStore, fresh_oxia: OxiaServer
) -> None:
    await asyncio.gather(*(store.put(f"/warm/{n}", b"") for n in range(64)))

    async def proofs() -> list[int]:
        found = await look(fresh_oxia.address, PROOF)
        return [each.version.modifications_count for each in found]

    before = await proofs()
    await store.scan("/", "//")
    await store.scan_index("i", "a", "b")
    assert await proofs() == before
    await store.scan("/", "//", fresh=True)
    await store.scan_index("i", "a", "b", fresh=True)
    assert await proofs() == [count + 2 for count in before]
    shard = store._shards.table.shard_of("", "foo")
    await store.scan("/", "//", partition="foo", fresh=True)
    after = await proofs()
    assert [now - was - 2 for now, was in zip(after, before, strict=True)] == [
        int(each == shard) for each in range(4)
    ]


async def test_many_sessions_come_and_go_beside_writes(store: OxiaMetadataStore) -> None:
    """A session's begin and end are writes of the server: two writers at once break 0.14.0."""
    done = asyncio.Event()

    async def write(n: int) -> int:
        count = 0
        while not done.is_set():
            await store.put(f"/busy/{n}", str(count).encode())
            count += 1
        return count

    writers = [asyncio.create_task(write(n)) for n in range(64)]
    for _ in range(15):
        session = await store.open_session(timeout_ms=60_000, identity="one")
        await store.put("/e/a", b"", session=session)
        await session.close()
    done.set()
    counts = await asyncio.wait_for(asyncio.gather(*writers), PATIENCE_S)
    assert min(counts) > 0
    assert await store.children("/e") == []


async def test_the_first_hits_of_a_long_range(store: OxiaMetadataStore) -> None:
    """A shard sends a thousand records at a time; what comes first is enough for a limit."""
    total = 2500
    puts = [
        store.put(f"/h/{n:05}", b"", partition="p", indexes=[IndexEntry("i", number(total - n))])
        for n in range(total)
    ]
    await asyncio.gather(*puts)
    first = await store.scan_index("i", "0", "9", limit=1200)
    assert [hit.index_key for hit in first] == [number(n + 1) for n in range(1200)]
    assert len(await store.scan_index("i", "0", "9", limit=2400, partition="p")) == 2400
    assert len(await store.scan_index("i", "0", "9")) == total
