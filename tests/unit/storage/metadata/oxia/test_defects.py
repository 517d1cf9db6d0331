"""Defects of our own: nobody waits for ever, and nobody is told what is not so.

Each test breaks one place once, or for one key, with an error that nobody expects there.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from storage.clock import SystemClock
from storage.metadata.oxia import lost_writes, records, shard_writer
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import Peer
from storage.metadata.oxia.lost_writes import Answers, LostWriteResolver
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.oxia.write_issuer import WriteIssuer
from storage.metadata.oxia.writes import Write
from storage.metadata.store import EventKind, MetadataError, PutResult, Record
from storage.metadata.watches import WatchHub
from tests.support.bounds import set_bound
from tests.support.fake_oxia import FakeOxia, World
from tests.support.waiting import TIMEOUT_S, until

T = TypeVar("T")


@pytest.fixture
async def store(server: FakeOxia) -> AsyncIterator[OxiaMetadataStore]:
    opened = await OxiaMetadataStore.open(
        f"oxia://{server.address}", SystemClock(), random.Random(1)
    )
    yield opened
    await opened.close()


def once(monkeypatch: pytest.MonkeyPatch, place: object, name: str, error: Exception) -> None:
    """The next call breaks; later ones do what they did."""
    real = getattr(place, name)

    def broken(*args: object, **named: object) -> object:
        monkeypatch.setattr(place, name, real)
        raise error

    monkeypatch.setattr(place, name, broken)


async def test_shard_map_is_passed_again_after_a_listener_failed(
    store: OxiaMetadataStore, server: FakeOxia, world: World
) -> None:
    taken: list[int] = []
    faults = [KeyError("a defect")]

    def take() -> None:
        if faults:
            raise faults.pop()
        taken.append(len(store._shards.table.ids))

    store._shards.on_change(take)
    world.lead(server.address, server.address)
    await until(lambda: taken == [2])
    world.lead(server.address)
    await until(lambda: taken == [2, 1])


@pytest.mark.parametrize("error", [KeyError("a"), asyncio.InvalidStateError(), TimeoutError()])
async def test_an_answer_that_is_not_taken_is_settled(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also if the error looks like one of a connection: it is logged as ours."""
    real, faults = Answers.take, [error]

    def take(self: Answers, write: Write, answer: object) -> bool:
        if write.key == "/b" and faults:
            raise faults.pop()
        return real(self, write, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(Answers, "take", take)
    with capture_logs() as logs:
        puts = [store.put(key, key.encode()) for key in ("/a", "/b", "/c")]
        done = await asyncio.wait_for(asyncio.gather(*puts), TIMEOUT_S)
    assert [each.key for each in done] == ["/a", "/b", "/c"]
    assert [each["exc_info"] for each in logs if each["event"] == "oxia_defect"] == [error]


async def test_a_write_that_was_not_issued_counts_for_nothing(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand in the way of others for ever: only so many may be outstanding."""
    once(monkeypatch, WriteIssuer, "issue", KeyError("a defect"))
    with pytest.raises(KeyError, match="a defect"):
        await store.put("/a", b"value")
    await store.put("/a", b"value")
    await until(lambda: store._outstanding == store._outstanding_bytes == 0)


async def test_a_write_that_always_breaks_ends_at_its_deadline(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outcome is unknown: an `InternalError` would say that it did nothing."""
    set_bound(monkeypatch, "OXIA_REQUEST_TIMEOUT_S", 1)
    real = Answers.take

    def take(self: Answers, write: Write, answer: object) -> bool:
        if write.key == "/bad":
            raise KeyError("a defect")
        return real(self, write, answer)  # type: ignore[arg-type]

    def found(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Answers, "take", take)
    monkeypatch.setattr(Answers, "found", found)
    with pytest.raises(MetadataError, match="outcome is unknown"):
        await asyncio.wait_for(store.put("/bad", b""), TIMEOUT_S)
    set_bound(monkeypatch, "OXIA_REQUEST_TIMEOUT_S", 30)
    await asyncio.wait_for(store.put("/good", b""), TIMEOUT_S)


async def test_a_request_that_could_not_be_made_is_made_later(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, shard_writer, "take_batch", KeyError("a defect"))
    await asyncio.wait_for(store.put("/a", b""), TIMEOUT_S)


async def test_a_look_at_what_was_sent_twice(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, faults = Answers.take, [False]

    def take(self: Answers, write: Write, answer: object) -> bool:
        if write.key == "/a" and faults:
            return faults.pop()
        return real(self, write, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(Answers, "take", take)
    once(monkeypatch, LostWriteResolver, "recheck", KeyError("a defect"))
    with pytest.raises(MetadataError, match="outcome is unknown"):
        await asyncio.wait_for(store.put("/a", b""), TIMEOUT_S)
    await asyncio.wait_for(store.put("/b", b""), TIMEOUT_S)


async def test_the_beginning_of_a_session(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, Peer, "create_session", TypeError("a defect"))
    with pytest.raises(MetadataError, match="defect"):
        await asyncio.wait_for(store.open_session(timeout_ms=60_000, identity="a"), TIMEOUT_S)
    opened = store.open_session(timeout_ms=60_000, identity="a")
    assert not (await asyncio.wait_for(opened, TIMEOUT_S)).lost


async def test_reads_of_a_request_that_breaks_fail_and_the_next_ones_do_not(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("/a", b"1")
    once(monkeypatch, Peer, "read", KeyError("a defect"))
    with capture_logs() as logs, pytest.raises(MetadataError, match="defect"):
        await asyncio.wait_for(store.get_many(["/a", "/b"]), TIMEOUT_S)
    assert [each["event"] for each in logs] == ["oxia_defect"]
    record = await asyncio.wait_for(store.get("/a"), TIMEOUT_S)
    assert record is not None


async def test_a_listing_that_breaks(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(monkeypatch, Peer, "list_keys", KeyError("a defect"))
    with pytest.raises(MetadataError, match="defect"):
        await asyncio.wait_for(store.children("/a"), TIMEOUT_S)
    assert await asyncio.wait_for(store.children("/a"), TIMEOUT_S) == []


async def test_a_record_that_cannot_be_understood_fails_its_own_read(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watchers too: those of other records are told, and the one of this list."""
    real = records.found_record

    def found_record(key: str, *others: object) -> object:
        if key == "/bad":
            raise ValueError("no JSON")
        return real(key, *others)  # type: ignore[arg-type]

    await asyncio.gather(*(store.put(key, b"1") for key in ("/a", "/bad")))
    monkeypatch.setattr(lost_writes, "found_record", found_record)
    bad, good = await asyncio.wait_for(
        asyncio.gather(store.get("/bad"), store.get("/a"), return_exceptions=True), TIMEOUT_S
    )
    assert isinstance(bad, MetadataError)
    assert isinstance(good, Record)

    watches = [store.watch_key(key) for key in ("/bad", "/a")]
    store._watch_router._known.clear()
    batch = pb.NotificationBatch(shard=0, offset=9)
    for key in ("/bad", "/a"):
        batch.notifications[key].type = pb.KEY_MODIFIED
        batch.notifications[key].version_id = 9
    store._watch_router.notified(0, batch)
    events = [await asyncio.wait_for(anext(each), TIMEOUT_S) for each in watches]
    assert [each.kind for each in events] == [EventKind.RESYNC, EventKind.RESYNC]
    await until(lambda: not store._watch_router._reading)


async def test_watcher_resyncs_after_a_defect_in_publishing(
    store: OxiaMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = store.watch_key("/a")
    once(monkeypatch, WatchHub, "publish", KeyError("a defect"))
    made = await asyncio.wait_for(store.put("/a", b""), TIMEOUT_S)
    assert isinstance(made, PutResult)
    assert (await asyncio.wait_for(anext(watch), TIMEOUT_S)).kind is EventKind.RESYNC


async def test_a_session_begins_when_the_put_that_begins_the_stream_is_acknowledged(
    server: FakeOxia, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server that one may write to at a time the two must never be under way together."""
    first = await OxiaMetadataStore.open(
        f"oxia://{server.address}", SystemClock(), random.Random(1)
    )
    await first.close()
    world.open.clear()
    sent, world.most_writing = len(world.requests), 0
    store = await OxiaMetadataStore.open(
        f"oxia://{server.address}", SystemClock(), random.Random(2)
    )
    assert len(world.requests) == sent, "a store that is opened on a known namespace writes nothing"
    opening = asyncio.create_task(store.open_session(timeout_ms=60_000, identity="a"))
    await until(lambda: len(world.requests) == sent + 1)
    assert world.sessions == 0
    world.open.set()
    assert not (await asyncio.wait_for(opening, TIMEOUT_S)).lost
    assert world.most_writing == 1
    await store.close()
