"""Leaders that were replaced and do not know it, and maps that name them.

The churn at the end is of several writers: the server of the other tests of several, 0.14.0, breaks
of two at once.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from storage.clock import SystemClock
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.store import ABSENT, IndexEntry, MetadataError, VersionConflict
from tests.support.bounds import set_bound
from tests.support.effort import by_effort
from tests.support.fake_oxia import FakeOxia, World
from tests.support.waiting import TIMEOUT_S, until


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeOxia]]:
    """Of one world; the first one leads both shards."""
    world = World(authorities=["oxia.example:6648", "oxia-0.example:6648"])
    made = [FakeOxia(world) for _ in range(3)]
    for each in made:
        await each.start()
    world.lead(made[0].address, made[0].address)
    yield made
    for each in made:
        await each.stop()


async def open_store(*servers: FakeOxia, seed: int = 1) -> OxiaMetadataStore:
    """A store that asks the servers in this order; its puts are told from others' by the seed."""
    addresses = ",".join(each.address for each in servers)
    async with asyncio.timeout(TIMEOUT_S):
        return await OxiaMetadataStore.open(
            f"oxia://{addresses}", SystemClock(), random.Random(seed)
        )


def shorten(monkeypatch: pytest.MonkeyPatch, attempt_s: float = 0.5) -> None:
    """Attempts fail soon from now on: before a store is open it would begin at another server."""
    set_bound(monkeypatch, "OXIA_ATTEMPT_TIMEOUT_S", attempt_s)
    set_bound(monkeypatch, "OXIA_REQUEST_TIMEOUT_S", 10)


async def value_of(store: OxiaMetadataStore, key: str, *, fresh: bool = False) -> bytes | None:
    record = await asyncio.wait_for(store.get(key, fresh=fresh), TIMEOUT_S)
    return None if record is None else record.value


def key_of(store: OxiaMetadataStore, shard_id: int) -> str:
    """Some key that lives on a shard."""
    return next(
        key
        for key in (f"/k{n}" for n in range(100))
        if store._shards.table.shard_of(key, None) == shard_id
    )


def leader_of(store: OxiaMetadataStore, shard_id: int) -> str | None:
    """Whom the newest map names."""
    return store._shards.table.leader(shard_id)


@pytest.mark.parametrize("fresh", [False, True])
async def test_reads_do_not_go_back_to_a_deposed_leader_that_its_own_map_names(
    servers: list[FakeOxia], monkeypatch: pytest.MonkeyPatch, *, fresh: bool
) -> None:
    deposed, leader, _ = servers
    store = await open_store(leader, deposed)
    shorten(monkeypatch)
    key = key_of(store, 0)
    await store.put(key, b"old")
    deposed.cut_off()
    leader.world.lead(leader.address, leader.address)
    await until(lambda: leader_of(store, 0) == leader.address)
    await asyncio.wait_for(store.put(key, b"new"), TIMEOUT_S)
    leader.end_map_streams()
    await until(lambda: leader_of(store, 0) == deposed.address)
    assert await value_of(store, key, fresh=fresh) == b"new"
    await store.close()


async def test_a_fresh_read_is_answered_by_a_leader_that_acknowledged_its_put(
    servers: list[FakeOxia], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map goes back between the two; the leader keeps its channel: it leads another shard."""
    leader, deposed, _ = servers
    world = leader.world
    world.lead(deposed.address, leader.address)
    store = await open_store(leader, deposed)
    shorten(monkeypatch)
    key = key_of(store, 0)
    await store.put(key, b"old")
    deposed.cut_off()
    world.lead(leader.address, leader.address)
    await until(lambda: leader_of(store, 0) == leader.address)
    await asyncio.wait_for(store.put(key, b"new"), TIMEOUT_S)
    world.open.clear()
    asked = len(world.requests)
    reading = asyncio.create_task(value_of(store, key, fresh=True))
    await until(lambda: len(world.requests) > asked)
    leader.end_map_streams()
    await until(lambda: leader_of(store, 0) == deposed.address)
    world.open.set()
    assert await reading == b"new"
    await store.close()


async def values_read(store: OxiaMetadataStore, read: str, *, fresh: bool) -> list[bytes]:
    """What one kind of read tells of `/a/b`."""
    if read == "get":
        record = await store.get("/a/b", fresh=fresh)
        return [] if record is None else [record.value]
    if read == "scan":
        return [each.value for each in await store.scan("/a/", "/a//", fresh=fresh)]
    limit = 10 if read == "limited" else None
    hits = await store.scan_index("i", "k", "l", fresh=fresh, limit=limit)
    return [hit.record.value for hit in hits]


@pytest.mark.parametrize("read", ["get", "scan", "index", "limited"])
@pytest.mark.parametrize("change", ["put", "delete"])
async def test_w2_fresh_reads_of_a_client_of_a_deposed_leader_are_those_of_the_leader(
    servers: list[FakeOxia], monkeypatch: pytest.MonkeyPatch, read: str, change: str
) -> None:
    """Its map is as old as the leader that it names, which answers, and acknowledges nothing."""
    deposed, leader, _ = servers
    behind = await open_store(deposed, leader, seed=1)
    ahead = await open_store(leader, deposed, seed=2)
    shorten(monkeypatch)
    await behind.put("/a/b", b"old", indexes=[IndexEntry("i", "k")])
    deposed.cut_off()
    leader.world.lead(leader.address, leader.address)
    await until(lambda: leader_of(ahead, 0) == leader.address)
    if change == "put":
        put = ahead.put("/a/b", b"new", indexes=[IndexEntry("i", "k")])
        await asyncio.wait_for(put, TIMEOUT_S)
    else:
        assert await asyncio.wait_for(ahead.delete("/a/b"), TIMEOUT_S)
    assert await values_read(behind, read, fresh=False) == [b"old"], "what the deposed one answers"
    told = await asyncio.wait_for(values_read(behind, read, fresh=True), TIMEOUT_S)
    assert told == ([b"new"] if change == "put" else [])
    assert leader_of(behind, 0) == leader.address
    for store in (behind, ahead):
        await asyncio.wait_for(store.close(), TIMEOUT_S)


async def test_watcher_at_a_deposed_leader_gets_changes_from_the_new_one(
    servers: list[FakeOxia], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream stays open and silent; what it missed comes when the map names another one."""
    deposed, leader, _ = servers
    behind = await open_store(deposed, leader, seed=1)
    ahead = await open_store(leader, deposed, seed=2)
    shorten(monkeypatch)
    watch = behind.watch_key("/a")
    deposed.cut_off()
    leader.world.lead(leader.address, leader.address)
    await until(lambda: leader_of(ahead, 0) == leader.address)
    await asyncio.wait_for(ahead.put("/a", b"new"), TIMEOUT_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(watch), 0.2)
    assert await value_of(behind, "/a", fresh=True) == b"new"
    event = await asyncio.wait_for(anext(watch), TIMEOUT_S)
    assert event.record is not None
    assert event.record.value == b"new"
    await asyncio.wait_for(ahead.put("/a", b"newer"), TIMEOUT_S)
    event = await asyncio.wait_for(anext(watch), TIMEOUT_S)
    assert event.record is not None
    assert event.record.value == b"newer"
    for store in (behind, ahead):
        await asyncio.wait_for(store.close(), TIMEOUT_S)


async def test_beats_that_only_a_deposed_leader_counts_keep_no_session(
    servers: list[FakeOxia], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader ends sessions that do not beat there: who holds ephemerals must know."""
    deposed, leader, _ = servers
    store = await open_store(leader, deposed)
    shorten(monkeypatch)
    session = await store.open_session(timeout_ms=2000, identity="one")
    deposed.cut_off()
    leader.world.lead(leader.address, leader.address)
    await until(lambda: leader_of(store, 0) == leader.address)
    await until(lambda: not any(store._shards.must_prove(n) for n in (0, 1)))
    await leader.stop()
    await until(lambda: leader_of(store, 0) == deposed.address)
    await until(lambda: session.lost)
    with pytest.raises(MetadataError):
        await asyncio.wait_for(store.close(), TIMEOUT_S)


class Churn:
    """Leaders come and go while several stores count up the same records.

    A count that was acknowledged is seen by every fresh read that begins later, by any store; and
    by every read of the store that it was acknowledged to, whose reads never go back.
    """

    def __init__(self, servers: list[FakeOxia], seed: int) -> None:
        self.rng = random.Random(seed)
        self.servers = servers
        self.world = servers[0].world
        self.over = False
        self.acknowledged: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.newest: Counter[str] = Counter()
        self.reads = 0

    async def change_leaders(self) -> None:
        """One server at a time is cut off, and may be the next that clients ask for the map."""
        for _ in range(12):
            gone = self.rng.choice(self.servers)
            if self.rng.random() < 0.7:
                gone.cut_off()
            others = [each.address for each in self.servers if each is not gone]
            self.world.lead(*(self.rng.choice(others) for _ in self.world.leaders))
            await asyncio.sleep(self.rng.random() / 4)
            for each in self.servers:
                if each is not gone:
                    each.end_map_streams()
            await asyncio.sleep(0.2 + self.rng.random() / 2)
            gone.come_back()
        self.over = True

    async def count(self, store: OxiaMetadataStore, key: str) -> None:
        """One at a time, on the version that was read."""
        seen = 0
        while not self.over:
            try:
                record = await store.get(key)
                value = int(record.value) if record is not None else 0
                assert value >= seen, "a read went back"
                seen = value
                expect = ABSENT if record is None else record.version
                await store.put(key, b"%d" % (value + 1), expect=expect)
            except VersionConflict:
                continue
            except MetadataError:
                self.unknown[key] += 1
                continue
            seen = value + 1
            self.acknowledged[key] += 1
            self.newest[key] = max(self.newest[key], value + 1)

    async def read(self, store: OxiaMetadataStore, key: str) -> None:
        """Afresh, again and again."""
        while not self.over:
            known = self.newest[key]
            try:
                record = await store.get(key, fresh=True)
            except MetadataError:
                continue
            self.reads += 1
            assert known <= (0 if record is None else int(record.value)), "a fresh read is old"


@pytest.mark.parametrize("seed", by_effort(quick=range(1), whole=range(2), nightly=range(20)))
async def test_nothing_goes_back_whatever_becomes_of_leaders(
    servers: list[FakeOxia], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "_ASK_AGAIN_S", 0.02)
    set_bound(monkeypatch, "OXIA_BACKOFF_MIN_S", 0.02)
    churn = Churn(servers, seed)
    stores = [await open_store(*churn.rng.sample(servers, 3), seed=n) for n in range(2)]
    shorten(monkeypatch, 0.2)
    keys = [key_of(stores[0], shard_id) for shard_id in (0, 1)]
    async with asyncio.timeout(2 * TIMEOUT_S), asyncio.TaskGroup() as group:
        for store in stores:
            for key in keys:
                group.create_task(churn.count(store, key))
                group.create_task(churn.read(store, key))
        group.create_task(churn.change_leaders())
    for key in keys:
        value = int(await value_of(stores[0], key, fresh=True) or 0)
        assert churn.acknowledged[key] <= value <= churn.acknowledged[key] + churn.unknown[key]
    assert churn.reads
    assert min(churn.acknowledged.values()) > 10
    for store in stores:
        await asyncio.wait_for(store.close(), TIMEOUT_S)
